"""Differentiable collectives along any dimension of a tensor.

Every rank of a group holds a part of a tensor along a dimension, or a share of a sum. What becomes
of gradients is said, not guessed: ``grad`` tells what every rank has of the gradient of what is
whole. ``"replicated"``: every rank goes on with it alike, and so has its whole gradient.
``"partial"``: ranks go on with it differently (each with its own columns of a weight, say), and
their gradients are shares, to be summed.

Sums of 16-bit floats are taken in ``reduce_dtype``, None: float32, in rank order; they travel as
they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deepsp.groups import Group, member_of
from deepsp.layout import seq_lens
from deepsp.ops import Pending

_op = torch.ops.deepsp
_SUMMED = {
    torch.float64, torch.float32, torch.bfloat16, torch.float16,
    torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool,
}  # fmt: skip


def all_gather(
    x: Tensor,
    dim: int,
    group: Group = None,
    sizes: Sequence[int] | None = None,
    *,
    grad: str,
    reduce_dtype: torch.dtype | None = None,
) -> Tensor:
    """The parts of all ranks along ``dim``, in rank order, on every rank: fresh.

    Args:
        x: this rank's part, any dtype.
        dim: negative ones count from the back.
        group: the ranks.
        sizes: size along ``dim`` on each rank; None: all hold as many as this one.
        grad: "replicated": the gradient of a part is its slice of the whole's; "partial": its slice
            of the sum of all ranks' (a reduce-scatter).
        reduce_dtype: in which that sum is taken.

    Raises:
        ValueError: ``dim``, ``sizes`` or ``grad`` doesn't fit.
    """
    rank, _, name = member_of(group)
    sizes = _equal(x, dim, group, sizes)
    return _op.all_gather(x, dim, sizes, grad, rank, name, reduce_dtype=reduce_dtype)


def reduce_scatter(
    x: Tensor,
    dim: int,
    group: Group = None,
    sizes: Sequence[int] | None = None,
    *,
    reduce_dtype: torch.dtype | None = None,
) -> Tensor:
    """This rank's part along ``dim`` of the sum over ranks: fresh. Its gradient is the all-gather
    of the parts'.

    Args:
        x: float64, float32, bfloat16 or float16.
        sizes: what each rank gets of ``x.size(dim)``; None: split like ``torch.tensor_split``.
        reduce_dtype: in which the sum is taken.

    Raises:
        ValueError: ``dim``, ``sizes`` or a dtype doesn't fit.
    """
    rank, _, name = member_of(group)
    sizes = _split(x, dim, group, sizes)
    return _op.reduce_scatter(x, dim, sizes, rank, name, reduce_dtype=reduce_dtype)


def scatter(
    x: Tensor,
    dim: int,
    group: Group = None,
    sizes: Sequence[int] | None = None,
    *,
    grad: str = "replicated",
) -> Tensor:
    """This rank's part along ``dim`` of what every rank holds whole: fresh; nothing travels.

    Args:
        x: the same on every rank, any dtype.
        sizes: what each rank gets of ``x.size(dim)``; None: split like ``torch.tensor_split``.
        grad: "replicated": every rank gets the whole gradient, the all-gather of the parts';
            "partial": its own part of it, with zeros beside.

    Raises:
        ValueError: ``dim``, ``sizes`` or ``grad`` doesn't fit.
    """
    rank, _, name = member_of(group)
    return _op.scatter(x, dim, _split(x, dim, group, sizes), grad, rank, name)


def all_reduce(
    x: Tensor,
    group: Group = None,
    *,
    grad: str,
    reduce_dtype: torch.dtype | None = None,
) -> Tensor:
    """The sum over ranks, on every rank: fresh. ``grad``: "replicated": the gradient passes
    through; "partial": the ranks' are summed.

    Raises:
        ValueError: ``x`` is of a dtype in which no sums travel: float8, complex, int16.
    """
    _check_summed(x)
    return _op.all_reduce(x, grad, *member_of(group), reduce_dtype=reduce_dtype)


def replicate(x: Tensor, group: Group = None) -> Tensor:
    """The tensor itself, which every rank holds whole and goes on with differently: its gradient is
    the sum of the ranks'."""
    member = member_of(group)
    tensors, token = _op.replicate_start([x], *member)
    (out,) = _op.replicate_wait(tensors, token, *member)
    return out


def all_gather_matmul(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dim: int,
    group: Group = None,
    sizes: Sequence[int] | None = None,
    *,
    reduce_dtype: torch.dtype | None = None,
) -> Tensor:
    """``linear(all_gather(x, dim, grad="partial"), weight, bias)``, pipelined: on gloo, one rank's
    part is multiplied while the next travels, forward and backward. For backward only ``x`` is
    kept, and gathered again. No second derivative.

    Args:
        x: [.., n, .., K]: this rank's part along ``dim``, which isn't the last dimension.
        weight, bias: [M, K] and [M] or None: this rank's columns of the output.
        sizes: size along ``dim`` on each rank; None: all hold as many as this one.

    Raises:
        ValueError: what doesn't fit.

    After Megatron-LM's sequence parallelism (Korthikanti et al., 2022, arXiv:2205.05198).
    """
    rank, _, name = member_of(group)
    sizes = _equal(x, dim, group, sizes)
    return _op.all_gather_matmul(x, weight, bias, dim, sizes, rank, name, reduce_dtype=reduce_dtype)


def matmul_reduce_scatter(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dim: int,
    group: Group = None,
    sizes: Sequence[int] | None = None,
    *,
    reduce_dtype: torch.dtype | None = None,
) -> Tensor:
    """``reduce_scatter(linear(x, weight), dim) + bias``, pipelined: on gloo, one rank's part
    travels while the next is computed, forward and backward. No second derivative.

    Args:
        x: [.., n, .., K]: all of ``dim``, which isn't the last, and this rank's K columns.
        weight, bias: [M, K] and [M] or None: the bias is whole, and added once.
        sizes: what each rank gets of ``x.size(dim)``; None: split like ``torch.tensor_split``.

    Raises:
        ValueError: what doesn't fit.
    """
    rank, _, name = member_of(group)
    sizes = _split(x, dim, group, sizes)
    return _op.matmul_reduce_scatter(
        x, weight, bias, dim, sizes, rank, name, reduce_dtype=reduce_dtype
    )


def all_gather_start(
    x: Tensor,
    dim: int,
    group: Group = None,
    sizes: Sequence[int] | None = None,
    *,
    grad: str,
    reduce_dtype: torch.dtype | None = None,
) -> Pending[Tensor]:
    """:func:`all_gather` in two halves: launched here, finished by ``.wait()``. Differentiable; in
    backward, the way back is in flight during the backward of whatever stood between."""
    rank, _, name = member_of(group)
    sizes = _equal(x, dim, group, sizes)
    buffer = _op.all_gather_start(x, dim, sizes, grad, rank, name, reduce_dtype=reduce_dtype)
    shape = list(x.shape)
    shape[dim] = sum(sizes)
    return Pending(lambda: _op.all_gather_wait(buffer, dim, sizes, shape, grad, rank, name)[0])


def reduce_scatter_start(
    x: Tensor,
    dim: int,
    group: Group = None,
    sizes: Sequence[int] | None = None,
    *,
    reduce_dtype: torch.dtype | None = None,
) -> Pending[Tensor]:
    """:func:`reduce_scatter` in two halves."""
    rank, _, name = member_of(group)
    sizes, shape = _split(x, dim, group, sizes), list(x.shape)
    buffer = _op.reduce_scatter_start(x, dim, sizes, rank, name)
    return Pending(
        lambda: _op.reduce_scatter_wait(
            buffer, dim, sizes, shape, rank, name, reduce_dtype=reduce_dtype
        )
    )


def scatter_start(
    x: Tensor, dim: int, group: Group = None, sizes: Sequence[int] | None = None
) -> Pending[Tensor]:
    """:func:`scatter` in two halves, for its backward: the gradient's all-gather is in flight
    during the backward of whatever stood between."""
    rank, _, name = member_of(group)
    sizes, shape = _split(x, dim, group, sizes), list(x.shape)
    buffer = _op.scatter_start(x, dim, sizes, rank, name)
    return Pending(lambda: _op.scatter_wait(buffer, dim, sizes, shape, rank, name)[0])


def all_reduce_start(
    x: Tensor,
    group: Group = None,
    *,
    grad: str,
    reduce_dtype: torch.dtype | None = None,
) -> Pending[Tensor]:
    """:func:`all_reduce` in two halves."""
    _check_summed(x)
    member, shape = member_of(group), list(x.shape)
    buffer = _op.all_reduce_start([x], grad, *member, reduce_dtype=reduce_dtype)
    return Pending(
        lambda: _op.all_reduce_wait(
            buffer, shape, [len(shape)], grad, *member, reduce_dtype=reduce_dtype
        )[0]
    )


def _check_summed(x: Tensor) -> None:
    if x.dtype not in _SUMMED:
        what = "x.to(torch.bfloat16)"
        if x.is_complex():
            what = "torch.view_as_real(x)"
        elif not x.is_floating_point():
            what = "x.to(torch.int32)"
        raise ValueError(
            f"x: expected float64, float32, bfloat16, float16, int64, int32, int8, uint8 or bool, "
            f"got {str(x.dtype).removeprefix('torch.')}, in which no sums travel; pass {what}"
        )


def _check_dim(x: Tensor, dim: int) -> None:
    if not -x.dim() <= dim < x.dim():
        raise ValueError(
            f"dim is {dim}, but the tensor has {x.dim()} dimensions; {-x.dim()} to {x.dim() - 1} "
            "is right"
        )


def _equal(x: Tensor, dim: int, group: Group, sizes: Sequence[int] | None) -> list[int]:
    _check_dim(x, dim)
    if sizes is None:
        return [x.size(dim)] * member_of(group)[1]
    return _checked(sizes, group)


def _split(x: Tensor, dim: int, group: Group, sizes: Sequence[int] | None) -> list[int]:
    _check_dim(x, dim)
    return seq_lens(x.size(dim), group) if sizes is None else _checked(sizes, group)


def _checked(sizes: Sequence[int], group: Group) -> list[int]:
    size = member_of(group)[1]
    if len(sizes) != size:
        raise ValueError(
            f"sizes has {len(sizes)} entries, but the group has {size} ranks; one entry for each "
            "is right"
        )
    return list(sizes)
