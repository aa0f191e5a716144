"""Diffusion transformers of diffusers over sharded sequences of image, video and text tokens.

A model's own plan (``_cp_plan``) says which tensors are sharded and where the output is gathered.
Hooks of this model do that, and its attention processors get a backend of diffusers that attends
over all ranks' tokens."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deepsp.attention import parts
from deepsp.attention.distributed import distributed_attention
from deepsp.data.same_batch import compare_batches
from deepsp.data.sharding import shard, unshard
from deepsp.ranks.groups import Group, Member, member_of, on_all_ranks

MODELS = (
    "FluxTransformer2DModel", "Flux2Transformer2DModel", "QwenImageTransformer2DModel",
    "WanTransformer3DModel", "LTXVideoTransformer3DModel",
)  # fmt: skip
"""The classes that :func:`enable` takes. LTX 2 isn't among them: its plan leaves audio whole."""

_ADVICE = (
    "draw noise and timesteps, and load images and prompts, alike on all ranks of a group: seed "
    "their generators alike, and let samplers count groups"
)


def enable(
    transformer: nn.Module,
    group: Group = None,
    *,
    chunks: int = 1,
    query_parts: int | str = "auto",
    average_gradients: bool = False,
) -> None:
    """Shards the tokens of a diffusion transformer over a group, by the model's own plan.

    Every rank of the group passes the same inputs to the model, and gets the full output. Numbers
    of tokens and heads needn't divide by the ranks. A rank's gradients are the share of its tokens:
    :func:`deepsp.sync_gradients` sums them. Attention is torch's
    ``scaled_dot_product_attention``; cross-attention to tokens that every rank has in full stays on
    the rank.

    Args:
        transformer: one of :data:`MODELS`: a model whose ``_cp_plan`` shards all that it attends
            to.
        group: the sequence group.
        chunks: as in :func:`deepsp.distributed_attention`; ``query_parts``, too.
        query_parts: how queries are split.
        average_gradients: scales gradients by the number of ranks, for wrappers that average over
            all ranks, as DDP does.

    Raises:
        ValueError: it is another model, is parallel already, or has dropout. A forward raises if
            the ranks' inputs differ, or for a mask or causal attention that isn't supported.
    """
    plan = getattr(transformer, "_cp_plan", None)
    if not any(cls.__name__ in MODELS for cls in type(transformer).__mro__) or not plan:
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
    state = _State(transformer, member_of(group), options, average_gradients)
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


class _State:
    """What is changed of a model, and the lengths of its current forward."""

    def __init__(
        self, model: nn.Module, member: Member, options: dict[str, Any], average_gradients: bool
    ):
        self.model, self.member, self.options = model, member, options
        self.scale = float(member[1]) if average_gradients else 1.0
        self.handles: list[Any] = []
        self.processors: list[tuple[Any, Any]] = []  # with their backends before
        self.forwards = 0
        self.totals: list[int] = []  # tokens of the sequences that this forward has sharded
        self.seen: set[tuple[int, ...]] = set()

    def install(self, plan: dict[str, Any]) -> None:
        from diffusers.models._modeling_parallel import ContextParallelOutput

        setattr(self.model, _STATE, self)
        backend = _use_backend()
        for module in self.model.modules():
            processor = getattr(module, "processor", None)
            if hasattr(processor, "_attention_backend") and hasattr(processor, "_parallel_config"):
                self.processors.append((processor, processor._attention_backend))
                processor._attention_backend = backend
                processor._parallel_config = _Lengths(self)
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
                    lengths = {n: _Lengths(self) for n in gathered}
                    gather = functools.partial(self._gather, rules=gathered, lengths=lengths)
                    self._hook_output(module, gather)

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()
        for processor, backend in self.processors:
            processor._attention_backend, processor._parallel_config = backend, None
        if hasattr(self.model, _STATE):
            delattr(self.model, _STATE)
            _leave_backend()

    def _hook(self, module: nn.Module, hook: Callable, first: bool = False) -> None:
        handle = module.register_forward_pre_hook(hook, with_kwargs=True, prepend=first)
        self.handles.append(handle)

    def _hook_output(self, module: nn.Module, hook: Callable) -> None:
        self.handles.append(module.register_forward_hook(hook))

    # ---- a forward

    def _begin(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        self.forwards, self.totals = self.forwards + 1, []
        named = _named(module, args, kwargs)
        found = [(name, x) for name, x in named.items() if isinstance(x, Tensor)]
        compare_batches(found, self.member, _ADVICE)

    def _local(self, x: Tensor, rule) -> Tensor:
        if rule.expected_dims is not None and x.dim() != rule.expected_dims:
            return x
        self.totals.append(x.size(rule.split_dim))
        return shard(x, rule.split_dim, self.member)

    def _shard_inputs(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], *, rules):
        named = _named(module, args, kwargs)
        for name, rule in rules.items():
            given = named.get(name)
            if isinstance(given, Tensor):
                named[name] = self._local(given, rule)
            elif isinstance(given, (list, tuple)):
                of_each = zip(given, rule, strict=True)
                named[name] = [self._local(x, r) if x is not None else x for x, r in of_each]
        return (), named

    def _shard(self, module: nn.Module, args: tuple, output, *, rules):
        return _mapped(output, lambda n, x: self._local(x, rules[n]) if n in rules else x)

    def _gather(self, module: nn.Module, args: tuple, output, *, rules, lengths):
        def gather(n: int, x: Tensor) -> Tensor:
            rule = rules.get(n)
            if rule is None:
                return x
            (lens,) = lengths[n].of([x.size(rule.gather_dim)], x)
            full = unshard(x, rule.gather_dim, self.member, lens)
            return torch.ops.deepsp._scale_gradient(full, self.scale) if self.scale > 1 else full

        return _mapped(output, gather)


class _Lengths:
    """The lengths on all ranks of the tensors that one place of a model gets. A processor has it
    as its parallel config: diffusers passes that on to the backend for sharded sequences."""

    def __init__(self, state: _State):
        self.state = state
        self._known: dict[tuple[int, ...], list[list[int]]] = {}
        self._forward = 0

    def of(self, sizes: Sequence[int], like: Tensor) -> list[list[int]]:
        """For each size, that of every rank. All ranks call it. Ranks exchange them once for all
        forwards that shard as many tokens; a checkpoint's second forward doesn't tell which it
        was, unless there was one only."""
        state, key = self.state, None
        if torch._C._current_graph_task_id() == -1:
            key = tuple(state.totals)
            state.seen.add(key)
            if self._forward == state.forwards:  # used twice in a forward
                key = None
            self._forward = state.forwards
        elif len(state.seen) == 1:
            (key,) = state.seen
        if key is not None and key in self._known:
            return self._known[key]
        everyone = on_all_ranks(list(sizes), state.member, like.device)
        found = [list(of_ranks) for of_ranks in zip(*everyone, strict=True)]
        if key is not None:
            self._known[key] = found
        return found


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    _parallel_config: _Lengths | None = None,
) -> Tensor:
    """The backend: [B, S_r, H, D], or, without a config, attention to keys in full."""
    if _parallel_config is None:
        return _sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    state = _parallel_config.state
    if is_causal or dropout_p > 0:
        raise ValueError(
            "expected attention without causality and dropout over sharded tokens, which aren't in "
            f"order, got is_causal={is_causal} and dropout_p={dropout_p}; leave them out"
        )
    lens, key_lens = _parallel_config.of([query.size(1), key.size(1)], query)
    across = lens != key_lens  # to another sequence, whose keys are sharded, too
    mask = _full_mask(attn_mask, key_lens, state.member, query.size(2) if across else 1)
    if across:
        rank, _, name = state.member
        key, value = (
            torch.ops.deepsp.all_gather(x, 1, key_lens, "partial", rank, name) for x in (key, value)
        )
        return _sdpa(query, key, value, mask, 0.0, False, scale, enable_gqa)
    return distributed_attention(
        query,
        key,
        value,
        mask,
        scale=scale,
        enable_gqa=enable_gqa or query.size(2) != key.size(2),
        group=state.member,
        seq_lens=lens,
        **state.options,
    )


def _full_mask(
    mask: Tensor | None, key_lens: list[int], member: Member, heads: int
) -> Tensor | None:
    """The mask [B, 1 or heads, 1, S] of all ranks' keys."""
    if mask is None:
        return None
    if mask.dim() == 2:
        mask = mask[:, None, None]
    if mask.dim() != 4 or mask.size(1) not in (1, heads) or mask.size(2) != 1:
        raise ValueError(
            "expected an attention mask of keys, [B, S_r] or [B, 1, 1, S_r], got shape "
            f"{tuple(mask.shape)}; masks that differ by head or query aren't supported"
        )
    return unshard(mask, -1, member, key_lens)


def _sdpa(query, key, value, mask, dropout_p, is_causal, scale, enable_gqa) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out = nn.functional.scaled_dot_product_attention(
        q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    return out.transpose(1, 2)


# ---- diffusers' table of backends

_users: list[None] = []
"""One entry for each enabled model."""


def _name():
    """An instance of diffusers' enum that isn't one of its members."""
    from diffusers.models.attention_dispatch import AttentionBackendName

    name = str.__new__(AttentionBackendName, "deepsp")
    name._name_, name._value_ = "DEEPSP", "deepsp"
    return name


def _use_backend():
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry as Table

    name = _name()
    if not _users:
        Table.register(name)(_attend)
    _users.append(None)
    return name


def _leave_backend() -> None:
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry as Table

    _users.pop()
    if not _users:
        name = _name()
        for table in (Table._backends, Table._constraints, Table._supported_arg_names):
            table.pop(name, None)


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
