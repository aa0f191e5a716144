"""Gradients of sharded parameters: norms and checks for infinities involve all ranks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from deepsp.ranks.groups import Member

_unscale = torch._amp_foreach_non_finite_check_and_unscale_
_NORMS = {"norm", "linalg_norm", "linalg_vector_norm", "linalg_matrix_norm", "_foreach_norm"}


class ShardGradient(Tensor):
    """The gradient of a part of a parameter. A plain tensor, except that

    - ``torch.amp.GradScaler`` finds the infinities of all ranks, so that all of them skip a step
      and keep the same scale (one all-reduce of one number a step);
    - its norm, which would differ by rank, raises.
    """

    member: Member

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if not torch.compiler.is_compiling() and func.__name__ in _NORMS:
            raise ValueError(
                f"{func.__name__} of a gradient that is sharded: the norm would differ between "
                "ranks. deepsp.clip_grad_norm_(model, max_norm) clips by the norm of the full "
                "gradient, and returns it; .as_subclass(torch.Tensor) is this rank's part as a "
                "plain tensor"
            )
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **(kwargs or {}))
        if func is _unscale:
            gradients, found_inf = args[:2]
            members = {g.member: None for g in gradients if isinstance(g, ShardGradient)}
            for rank, size, name in members:
                everywhere = torch.ops.deepsp.all_reduce(found_inf, "replicated", rank, size, name)
                found_inf.copy_(everywhere.clamp(max=1))
        return out


class _Mark:
    """A hook of a parameter. It records the group over which the parameter is sharded, and whether
    a schedule built the model; it makes the gradient of a part a :class:`ShardGradient`."""

    def __init__(self, member: Member | None, built: bool, averaged: bool):
        self.member, self.built, self.averaged = member, built, averaged

    def __call__(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is None or self.member is None or self.member[1] == 1:
            return
        if gradient.layout == torch.strided and not isinstance(gradient, ShardGradient):
            gradient = gradient.as_subclass(ShardGradient)
            gradient.member = self.member
            parameter.grad = gradient


def mark(
    parameter: Tensor, member: Member | None, built: bool = False, averaged: bool = False
) -> None:
    """Marks a parameter as sharded over a group, once. Copies of the parameter lose the mark.

    Args:
        member: rank, size and name of the group; None: every rank has the full parameter.
        built: whether a schedule built the model and makes its gradients full.
        averaged: whether gradients are averaged over the group, not summed.
    """
    if not (isinstance(parameter, nn.Parameter) and parameter.requires_grad and parameter.is_leaf):
        return
    if _mark_of(parameter) is None:
        parameter.register_post_accumulate_grad_hook(_Mark(member, built, averaged))


def _mark_of(parameter: Tensor) -> _Mark | None:
    hooks = (parameter._post_accumulate_grad_hooks or {}).values()
    return next((hook for hook in hooks if isinstance(hook, _Mark)), None)


def shard_member(parameter: Tensor) -> Member | None:
    """The group over which a parameter is sharded; None: it is replicated."""
    mark = _mark_of(parameter)
    return None if mark is None else mark.member


def is_sum(parameter: Tensor) -> bool:
    """Whether a parameter is sharded, and its gradient the sum over the group."""
    mark = _mark_of(parameter)
    return mark is not None and mark.member is not None and not mark.averaged


def is_built(parameter: Tensor) -> bool:
    """Whether a schedule built the model of a parameter."""
    mark = _mark_of(parameter)
    return mark is not None and mark.built


def plain(gradient: Tensor) -> Tensor:
    """This rank's part, as a plain tensor."""
    return gradient.as_subclass(Tensor) if isinstance(gradient, ShardGradient) else gradient
