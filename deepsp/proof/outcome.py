"""Runs of a training step that leave no trace, and what they give."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from deepsp.ranks.groups import Member, is_dtensor
from deepsp.tokenwise.probe import restored
from deepsp.weights.partitioned import full_shape

_LARGE = 1 << 24
"""Elements of a parameter whose gradient is compared only if there is no smaller one."""
_DRAWS = ("drop", "jitter", "noise")
"""What the names of rates of random draws contain."""


@dataclass
class Outcome:
    """Of one run, on this rank.

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
    """Measures runs of a model.

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
        self.sharded = [m for m in model.modules() if isinstance(m, FSDPModule)]
        self.runs_backward = runs_backward or bool(self.sharded)

    def __call__(
        self, loss: Callable[[], Tensor], context: Callable = contextlib.nullcontext
    ) -> Outcome:
        """The outcome of a run that returns its loss, in a context that covers its backward."""
        for module in self.sharded:
            module.reshard()  # so that its parameters are those that have gradients
        parameters = few_parameters(self.model)
        every = list(self.model.parameters()) if self.runs_backward else []
        models = [self.model, *self.others]
        try:
            with precise(self.model), still(models), gradients_kept(every), context():
                value, gradients = loss(), {}
                if value.requires_grad:
                    gradients = gradients_of(value, parameters, self.member, self.runs_backward)
                return Outcome(value.detach(), None, gradients, buffers_of(models))
        except RuntimeError as error:
            if self.runs_backward or "Checkpointing is not compatible" not in str(error):
                raise
        self.runs_backward = True  # reentrant checkpoints
        return self(loss, context)


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
        found = [p.grad for p in parameters.values()]
    else:
        found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    averaged = {}
    for (name, p), gradient in zip(parameters.items(), found, strict=True):
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
        yield


@contextlib.contextmanager
def precise(model: nn.Module | None = None) -> Iterator[None]:
    """A context without autocast, nor the one that accelerate puts around a model's forward, and
    without TF32."""
    with contextlib.ExitStack() as stack:
        if model is not None and "_original_forward" in vars(model):
            stack.callback(setattr, model, "forward", model.forward)
            model.forward = model._original_forward
        stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        torch.set_float32_matmul_precision("highest")
        for kind in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def _without_draws(thing: Any, stack: contextlib.ExitStack) -> None:
    """Sets the rates of a module or a configuration to 0."""
    for name, rate in list(getattr(thing, "__dict__", {}).items()):
        draws = any(word in name for word in _DRAWS)
        draws |= name == "p" and isinstance(thing, nn.modules.dropout._DropoutNd)
        if draws and isinstance(rate, float) and rate > 0:
            stack.callback(setattr, thing, name, rate)
            setattr(thing, name, 0.0)


def buffers_of(models: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Copies of the buffers of models, by name."""
    return {n: x.clone() for model in models for n, x in model.named_buffers() if not x.is_meta}


@contextlib.contextmanager
def attributes_kept(thing: Any) -> Iterator[None]:
    """Restores attributes of numbers, strings, tensors, and containers of numbers and strings."""
    kept = {n: copy.deepcopy(x) for n, x in vars(thing).items() if _is_plain(x)}
    tensors = {n: (x, x.detach().clone()) for n, x in vars(thing).items() if isinstance(x, Tensor)}
    before = set(vars(thing))
    try:
        yield
    finally:
        for name, x in list(vars(thing).items()):
            if name not in before and (_is_plain(x) or isinstance(x, Tensor)):
                delattr(thing, name)
        vars(thing).update(kept)
        for name, (x, content) in tensors.items():
            vars(thing)[name] = x
            with torch.no_grad():
                x.copy_(content)


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))
