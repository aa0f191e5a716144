"""Shards the tokens of a model of diffusers, and undoes it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo  # torch.compiler.disable would import Dynamo now

from deepsp.data.same_batch import compare_batches
from deepsp.data.sharding import shard, unshard
from deepsp.integrations.diffusers.backend import (
    SdpaOverRanks,
    check_core,
    leave_backend,
    use_backend,
)
from deepsp.integrations.diffusers.lengths import Lengths
from deepsp.integrations.diffusers.plans import MODELS, PROCESSORS, plan_of
from deepsp.ranks.groups import Group, Member, member_of
from deepsp.sequence.attention import parts

_ADVICE = (
    "draw noise and timesteps, and load images and prompts, alike on all ranks of a group: seed "
    "their generators alike, and let samplers count groups"
)


def enable(
    transformer: nn.Module,
    group: Group = None,
    core: str = "sdpa",
    *,
    chunks: int = 1,
    query_parts: int | str = "auto",
    average_gradients: bool = False,
) -> None:
    """Shards the tokens of a diffusion transformer over a group, by the model's own plan.

    Every rank of the group passes the same inputs to the model, and gets the full output. Numbers
    of tokens and heads needn't divide by the ranks. A rank's gradients are the share of its tokens:
    :func:`deepsp.sync_gradients` sums them. Cross-attention to tokens that every rank has in full
    stays on the rank, by torch's ``scaled_dot_product_attention``.

    Args:
        transformer: a Flux, Flux 2, SD3, QwenImage, Wan, LTX or LTX 2 model of diffusers.
        group: the sequence group.
        core: what computes attention on the full sequence of a rank's heads: torch's
            ``scaled_dot_product_attention``, or the name of a backend of diffusers ("flash",
            "native", "sage", ...), with whole heads.
        chunks: as in :func:`deepsp.distributed_attention`; ``query_parts``, too.
        query_parts: how queries are split.
        average_gradients: scales gradients by the number of ranks, for wrappers that average over
            all ranks, as DDP does.

    Raises:
        ValueError: it is another model, is parallel already, or has dropout; ``core`` isn't known.
            A forward raises if the ranks' inputs differ, or for a mask or causal attention that
            isn't supported.
    """
    plan = plan_of(transformer)
    if plan is None:
        raise ValueError(
            f"expected a model of diffusers among {', '.join(MODELS)}, which have been compared "
            f"with one process, got {type(transformer).__name__}; try "
            "torch.compile(backend='deepsp')"
        )
    if hasattr(transformer, _STATE) or getattr(transformer, "_parallel_config", None) is not None:
        raise ValueError(
            f"expected a {type(transformer).__name__} that isn't parallel yet, got one that is; "
            "call disable, or leave enable_parallelism out"
        )
    for name, module in transformer.named_modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            raise ValueError(
                "expected a model without dropout, since ranks would drop the same places of their "
                f"tokens, got p={module.p} in {name}; set it to 0"
            )
    if type(chunks) is not int or chunks < 1:
        raise ValueError(f"expected chunks to be an int >= 1, got {chunks!r}")
    options = {"chunks": chunks, "query_parts": parts.validate(query_parts, group)}
    check_core(core)
    state = State(transformer, member_of(group), core, options, average_gradients)
    try:
        state.install(plan)
    except BaseException:
        state.remove()
        raise


def disable(transformer: nn.Module) -> None:
    """Undoes :func:`enable`: the model runs on full sequences again.

    Args:
        transformer: a model that was enabled.

    Raises:
        ValueError: it wasn't.
    """
    state = getattr(transformer, _STATE, None)
    if state is None:
        raise ValueError(
            f"expected a model that was enabled, got a {type(transformer).__name__} that wasn't; "
            "call disable once, after enable"
        )
    state.remove()


_STATE = "_deepsp_diffusers"
"""The attribute of an enabled model."""

_CALL_SDPA = ("JointAttnProcessor2_0", "FusedJointAttnProcessor2_0")
"""Processors that call ``scaled_dot_product_attention`` once, on all that they get."""


class _Around:
    """Hooks that run a module in a context."""

    def __init__(self, context):
        self.context = context

    def enter(self, *_) -> None:
        self.context.__enter__()

    def leave(self, *_) -> None:
        self.context.__exit__(None, None, None)


class State:
    """What is changed of a model, and the lengths of its current forward."""

    def __init__(
        self,
        model: nn.Module,
        member: Member,
        core: str,
        options: dict[str, Any],
        average_gradients: bool,
    ):
        self.model, self.core, self.options = model, core, options
        self._member, self._averages = member, average_gradients
        self.handles: list[Any] = []
        self.processors: list[tuple[nn.Module, Any, Any]] = []
        """Each attention's processor, and its backend before."""
        self.forwards = 0
        self.totals: list[int] = []  # tokens of the sequences that this forward has sharded
        self.seen: set[tuple[int, ...]] = set()

    @property
    def member(self) -> Member:
        return member_of(self._member)

    @property
    def scale(self) -> float:
        """The factor of gradients."""
        return float(self.member[1]) if self._averages else 1.0

    def install(self, plan: dict[str, Any]) -> None:
        from diffusers.models._modeling_parallel import ContextParallelOutput

        setattr(self.model, _STATE, self)
        backend = use_backend(self)
        for module in self.model.modules():
            processor = getattr(module, "processor", None)
            if processor is None:
                continue
            if type(processor).__name__ not in PROCESSORS:
                raise ValueError(
                    f"expected attention processors among {', '.join(sorted(PROCESSORS))}, which "
                    f"have been compared with one process, got a {type(processor).__name__} in "
                    f"{type(self.model).__name__}; leave adapters, caches and set_attn_processor "
                    "out"
                )
            before = getattr(processor, "_attention_backend", None)
            self.processors.append((module, processor, before))
            if type(processor).__name__ in _CALL_SDPA:
                around = _Around(SdpaOverRanks(Lengths(self)))
                self._hook(module, around.enter, first=True)
                self.handles.append(module.register_forward_hook(around.leave, always_call=True))
            else:
                processor._attention_backend = backend
                processor._parallel_config = Lengths(self)
        self.model.set_attention_backend = self.set_core
        self.model.reset_attention_backend = functools.partial(self.set_core, "sdpa")
        self._hook(self.model, self._begin, first=True)
        for path, rules in plan.items():
            for module in _modules(self.model, path):
                if isinstance(rules, dict):
                    inputs = {k: r for k, r in rules.items() if not r.split_output}
                    outputs = {k: r for k, r in rules.items() if r.split_output}
                    if inputs:
                        self._hook(module, functools.partial(self._shard_inputs, rules=inputs))
                    if outputs:
                        self._hook_output(module, functools.partial(self._shard, rules=outputs))
                else:
                    single = isinstance(rules, ContextParallelOutput)
                    gathered = dict(enumerate([rules] if single else rules))
                    lengths = {n: Lengths(self) for n in gathered}
                    gather = functools.partial(self._gather, rules=gathered, lengths=lengths)
                    self._hook_output(module, gather)

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()
        for _, processor, backend in self.processors:
            if type(processor).__name__ not in _CALL_SDPA:
                processor._attention_backend, processor._parallel_config = backend, None
        for name in (_STATE, "set_attention_backend", "reset_attention_backend"):
            vars(self.model).pop(name, None)
        leave_backend(self)

    def set_core(self, backend: str) -> None:
        """The model's ``set_attention_backend``, while it is enabled."""
        check_core(backend)
        self.core = backend

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy of an enabled model is enabled, too."""
        self.__dict__.update(state)
        use_backend(self)

    def _hook(self, module: nn.Module, hook: Callable, first: bool = False) -> None:
        handle = module.register_forward_pre_hook(hook, with_kwargs=True, prepend=first)
        self.handles.append(handle)

    def _hook_output(self, module: nn.Module, hook: Callable) -> None:
        self.handles.append(module.register_forward_hook(hook))

    # ---- a forward

    @_disable_dynamo
    def _begin(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        self.forwards, self.totals = self.forwards + 1, []
        for attention, processor, _ in self.processors:
            backend = getattr(processor, "_attention_backend", "deepsp")
            if attention.processor is not processor or backend != "deepsp":
                raise ValueError(
                    f"expected the attention processors that {type(self.model).__name__} had when "
                    f"it was enabled, with their backend, got a "
                    f"{type(attention.processor).__name__} with {backend}, which would attend to a "
                    "rank's own tokens; call disable before set_attn_processor, and enable after "
                    "it. (The model's set_attention_backend chooses the core)"
                )
        named = _named(module, args, kwargs)
        tensors = [(name, x) for name, x in named.items() if isinstance(x, Tensor)]
        compare_batches(tensors, self.member, _ADVICE)

    def _local(self, x: Tensor, rule, is_image: bool = False) -> Tensor:
        dims, size = rule.expected_dims, self.member[1]
        if dims is not None and x.dim() != dims:
            return x
        if x.dim() == 2 and x.size(rule.split_dim) == 1:  # one for all tokens
            return x
        if is_image and x.size(rule.split_dim) < size:
            raise ValueError(
                f"expected an image token for each of {size} ranks in {type(self.model).__name__}, "
                f"got shape {tuple(x.shape)}; use larger images, or fewer ranks"
            )
        self.totals.append(x.size(rule.split_dim))
        return shard(x, rule.split_dim, self.member)

    def _shard_inputs(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], *, rules):
        named = _named(module, args, kwargs)
        for name, rule in rules.items():
            value = named.get(name)
            if isinstance(value, Tensor):
                named[name] = self._local(value, rule, name == "hidden_states")
            elif isinstance(value, (list, tuple)):
                of_each = rule if isinstance(rule, (list, tuple)) else [rule] * len(value)
                named[name] = [
                    x if x is None else self._local(x, r)
                    for x, r in zip(value, of_each, strict=True)
                ]
        return (), named

    def _shard(self, module: nn.Module, args: tuple, output, *, rules):
        return _mapped(output, lambda n, x: self._local(x, rules[n], True) if n in rules else x)

    def _gather(self, module: nn.Module, args: tuple, output, *, rules, lengths):
        def gather(n: int, x: Tensor) -> Tensor:
            rule = rules.get(n)
            if rule is None:
                return x
            (lens,) = lengths[n].of([x.size(rule.gather_dim)], x)
            full = unshard(x, rule.gather_dim, self.member, lens)
            return torch.ops.deepsp._scale_gradient(full, self.scale) if self.scale > 1 else full

        return _mapped(output, gather)


# ---- a plan's paths and tensors


def _modules(model: nn.Module, path: str) -> Iterator[nn.Module]:
    """The modules that a path of a plan names: ``blocks.*`` is each block."""
    before, star, after = path.partition("*")
    if not star:
        yield model.get_submodule(path)
        return
    for child in model.get_submodule(before.removesuffix(".")).children():
        yield from _modules(child, after.removeprefix("."))


def _named(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """A call's arguments by name."""
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _mapped(output, function: Callable[[int, Tensor], Tensor]):
    """An output, or the tensors of a tuple, with their places."""
    if isinstance(output, Tensor):
        return function(0, output)
    return type(output)(function(n, x) for n, x in enumerate(output))
