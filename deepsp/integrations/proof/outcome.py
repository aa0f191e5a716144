"""Runs of a training step that leave no trace, and what they give."""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.utils.stateless import _reparametrize_module

from deepsp.data import last_batch
from deepsp.ranks.groups import Member, is_dtensor
from deepsp.sequence.tokenwise.probe import restored
from deepsp.weights.partitioned import full_shape, is_away
from deepsp.weights.shard_gradient import shard_member

_LARGE = 1 << 24
"""Elements of a parameter whose gradient is compared only if there is no smaller one."""
_WIDE = 1 << 30
"""Weights of models that run in float32."""
_SMALL = 1000
"""Entries of a list or dictionary that is restored."""
_DRAWS = ("drop", "jitter", "noise")
"""What the names of rates of random draws contain."""


@dataclass
class Outcome:
    """What one run leaves on this rank.

    Attributes:
        loss: of the step; None: it returned none.
        counted: the number of tokens that count in the loss; None: not known.
        gradients: by parameter; None: it has none.
        buffers: those of the model after the run, by name.
        results: what else the run returns, by name.
    """

    loss: Tensor | None = None
    counted: int | None = None
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    results: dict[str, Tensor] = field(default_factory=dict)


class Measure:
    """Measures runs of a model: in float32, if its weights are narrower, plain tensors, and few.

    Attributes:
        is_wide: whether it is so.

    Args:
        model: without DDP or an engine around it.
        others: further models that a run may change.
        member: rank, size and name of the group over which gradients are averaged.
        runs_backward: as in :func:`gradients_of`. It is found out, unless FSDP isn't FSDP2.
    """

    def __init__(
        self,
        model: nn.Module,
        others: Sequence[nn.Module],
        member: Member,
        runs_backward: bool = False,
    ):
        self.model, self.others, self.member = model, others, member
        self.is_wide = _can_be_wide([model, *others])
        self.sharded = [m for m in model.modules() if isinstance(m, FSDPModule)]
        self.runs_backward = runs_backward or bool(self.sharded)

    def __call__(
        self, loss: Callable[[], Tensor], context: Callable = contextlib.nullcontext
    ) -> Outcome:
        """The outcome of a run that returns its loss, in a context that covers its backward."""
        for module in self.sharded:
            module.reshard()  # so that its parameters are those that have gradients
        every = list(self.model.parameters()) if self.runs_backward else []
        models = [self.model, *self.others]
        try:
            with contextlib.ExitStack() as stack:
                for x in (precise(*models), still(models), gradients_kept(every)):
                    stack.enter_context(x)
                for model in models:
                    stack.enter_context(_wide(model, self.is_wide))
                stack.enter_context(context())
                parameters = few_parameters(self.model)
                value, gradients = loss(), {}
                if value.requires_grad:
                    gradients = gradients_of(value, parameters, self.member, self.runs_backward)
                return Outcome(value.detach(), None, gradients, buffers_of(models))
        except RuntimeError as error:
            if self.is_wide and "dtype" in str(error).lower():
                self.is_wide = False  # the model says itself in what it computes
            elif self.runs_backward or "checkpoint" not in str(error).lower():
                raise
            else:
                self.runs_backward = True  # reentrant checkpoints
        return self(loss, context)


_NARROW = (torch.bfloat16, torch.float16)


def _can_be_wide(models: Sequence[nn.Module]) -> bool:
    """Whether models can run with weights in float32 in the place of theirs."""
    parameters = [p for model in models for p in model.parameters()]
    compiled = any(m._compiled_call_impl is not None for model in models for m in model.modules())
    plain = all(type(p) is nn.Parameter and p.is_floating_point() for p in parameters)
    plain &= not any(is_away(p) or shard_member(p) is not None for p in parameters)
    narrow = any(p.dtype in _NARROW for p in parameters)
    return narrow and plain and not compiled and sum(p.numel() for p in parameters) <= _WIDE


@contextlib.contextmanager
def _wide(model: nn.Module, is_wide: bool) -> Iterator[None]:
    """In this context a model has weights and buffers in float32 in the place of narrower ones."""
    if not is_wide:
        yield
        return
    narrow = {
        n: x.detach().float().requires_grad_(x.requires_grad)
        for n, x in (*model.named_parameters(), *model.named_buffers())
        if x.dtype in _NARROW
    }
    with _reparametrize_module(model, narrow, tie_weights=True):
        yield


def few_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Trained parameters near a model's input and near its output."""
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    small = [(n, p) for n, p in trained if p.numel() <= _LARGE] or trained
    return dict(small[:4] + small[-4:])


def gradients_of(
    loss: Tensor, parameters: Mapping[str, Tensor], member: Member, runs_backward: bool
) -> dict[str, Tensor | None]:
    """Gradients, averaged over a group as wrappers do.

    Args:
        loss: with a graph.
        parameters: by name.
        member: rank, size and name of the group.
        runs_backward: whether all of backward runs, with its hooks, as FSDP and reentrant
            checkpoints need.
    """
    if runs_backward:
        loss.backward()
        gradients = [p.grad for p in parameters.values()]
    else:
        gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    averaged = {}
    for (name, p), gradient in zip(parameters.items(), gradients, strict=True):
        local = gradient.to_local() if is_dtensor(gradient) else gradient
        if local is None:
            local = p.to_local() if is_dtensor(p) else p.new_zeros(full_shape(p))
            local = torch.zeros_like(local)
        if not (runs_backward and is_dtensor(p)):  # else FSDP has averaged its part
            total = torch.ops.deepsp.all_reduce(local.detach(), "replicated", *member)
            local = total / member[1]
        averaged[name] = local
    return averaged


@contextlib.contextmanager
def gradients_kept(parameters: Iterable[Tensor]) -> Iterator[None]:
    """In this context parameters have no gradients at first; afterwards, those that they had."""
    kept = [(p, p.grad) for p in parameters]
    for p, _ in kept:
        p.grad = None
    try:
        yield
    finally:
        for p, gradient in kept:
            p.grad = gradient


@contextlib.contextmanager
def still(models: Sequence[nn.Module]) -> Iterator[None]:
    """A context for a run that leaves no trace, without draws in the models. Restores buffers,
    random numbers, and numbers in modules' attributes."""
    with contextlib.ExitStack() as stack:
        for model in models:
            stack.enter_context(restored(model))
            configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None))}
            for thing in (*model.modules(), *configs.values()):
                _without_draws(thing, stack)
        stack.enter_context(last_batch.kept())
        stack.callback(setattr, nn.functional, "dropout", nn.functional.dropout)
        nn.functional.dropout = _kept
        yield


def _kept(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """torch.nn.functional.dropout that drops nothing."""
    return input


@contextlib.contextmanager
def precise(*models: nn.Module) -> Iterator[None]:
    """A context without autocast, nor the one that accelerate puts around a model's forward, and
    without TF32."""
    with contextlib.ExitStack() as stack:
        for model in models:
            model = getattr(model, "_orig_mod", model)  # inside torch.compile
            if "_original_forward" in vars(model):
                stack.callback(setattr, model, "forward", model.forward)
                model.forward = model._original_forward
        stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        torch.set_float32_matmul_precision("highest")
        for kind in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


@contextlib.contextmanager
def watched_autocast(dtypes: set[torch.dtype]) -> Iterator[None]:
    """In this context ``dtypes`` gets bfloat16, the least precise one, when an autocast is entered,
    as a user's own loss may do."""

    def watched(*args: Any) -> None:
        enable(*args)
        dtypes.update({torch.bfloat16} if args[-1] else ())

    enable, torch.set_autocast_enabled = torch.set_autocast_enabled, watched
    try:
        yield
    finally:
        torch.set_autocast_enabled = enable


def _without_draws(thing: Any, stack: contextlib.ExitStack) -> None:
    """Sets the rates of a module or a configuration to 0."""
    for name, rate in list(getattr(thing, "__dict__", {}).items()):
        draws = any(word in name for word in _DRAWS)
        draws |= name == "p" and isinstance(thing, nn.modules.dropout._DropoutNd)
        if draws and isinstance(rate, float) and rate > 0:
            with contextlib.suppress(AttributeError):  # of a frozen configuration
                setattr(thing, name, 0.0)
                stack.callback(setattr, thing, name, rate)


def buffers_of(models: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Copies of the buffers of models, by name."""
    return {n: x.clone() for model in models for n, x in model.named_buffers() if not x.is_meta}


_CONTAINERS = (list, dict, deque)
_KEPT = (type(None), bool, int, float, str, tuple, Tensor, torch.Generator, *_CONTAINERS)


def _small(value: Any, depth: int = 3) -> Iterator[Any]:
    """Small containers in a value: TRL's metrics are lists in dictionaries in one."""
    if depth and isinstance(value, _CONTAINERS) and len(value) <= _SMALL:
        yield value
        for x in value.values() if isinstance(value, dict) else value:
            yield from _small(x, depth - 1)


@contextlib.contextmanager
def attributes_kept(thing: Any) -> Iterator[None]:
    """Restores attributes of numbers, strings, tensors, generators and containers, and what small
    containers have."""
    kept = {n: x for n, x in vars(thing).items() if isinstance(x, _KEPT)}
    before = set(vars(thing))
    contents = [(x, copy.copy(x)) for value in kept.values() for x in _small(value)]
    tensors = [(x, x.detach().clone()) for x in kept.values() if isinstance(x, Tensor)]
    states = [(x, x.get_state()) for x in kept.values() if isinstance(x, torch.Generator)]
    try:
        yield
    finally:
        for name in set(vars(thing)) - before:
            if isinstance(vars(thing)[name], _KEPT):
                delattr(thing, name)
        vars(thing).update(kept)
        for x, content in contents:
            pairs = (list(y.items() if isinstance(y, dict) else enumerate(y)) for y in (x, content))
            now, then = ([(n, id(y)) for n, y in items] for items in pairs)
            if now != then:
                x.clear()
                (x.update if isinstance(x, dict) else x.extend)(content)
        with torch.no_grad():
            for x, content in tensors:
                x.copy_(content)
        for generator, state in states:
            generator.set_state(state)
