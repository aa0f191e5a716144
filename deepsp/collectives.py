"""Differentiable collectives along any dimension of a tensor.

A tensor that is ``Shard(dim)`` has a local part on every rank; one that is ``Partial`` has a term
of a sum on every rank. The argument ``grad`` states which gradient of the full tensor every rank
has in backward. ``"replicated"``: the full gradient, since every rank uses the full tensor in the
same way. ``"partial"``: a partial gradient, since the ranks use it differently (each with its own
columns of a weight, for example); the gradient is the sum over ranks.

Sums of 16-bit floats are taken in ``reduce_dtype`` (None: float32), in rank order; on the wire they
keep their dtype.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deepsp.ops import Pending
from deepsp.ranks.groups import Group, member_of
from deepsp.ranks.lengths import check_dim, seq_lens

_op = torch.ops.deepsp
_SUMMED = {
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.bool,
}


def sum_over_ranks(x: Tensor, group: Group = None) -> Tensor:
    """The sum of all ranks' tensors, without a gradient: for what a model counts or averages over
    its tokens and keeps in a buffer, such as the load of each expert. ::

        counts = torch.bincount(chosen.flatten(), minlength=experts)
        self.load += deepsp.sum_over_ranks(counts, group)

    Args:
        x: as in :func:`all_reduce`, of the same shape on every rank.
        group: the ranks.

    Returns:
        A new tensor, the same on every rank.

    Raises:
        ValueError: this process isn't in the group, or the dtype can't be summed.
    """
    return all_reduce(x.detach(), group, grad="replicated")


def all_gather(
    x: Tensor,
    dim: int,
    group: Group = None,
    sizes: Sequence[int] | None = None,
    *,
    grad: str,
    reduce_dtype: torch.dtype | None = None,
) -> Tensor:
    """Gathers the local tensors of all ranks along ``dim``, in rank order: ``Shard(dim)`` to
    ``Replicate``.

    Args:
        x: the local tensor, any dtype.
        dim: the dimension; may be negative.
        group: the ranks.
        sizes: the size along ``dim`` on each rank; None: the same on all ranks.
        grad: "replicated": the gradient of ``x`` is its slice of the full gradient. "partial": its
            slice of the sum of the ranks' gradients (a reduce-scatter).
        reduce_dtype: the dtype in which that sum is taken; None: float32 for 16-bit floats, else
            that of ``x``.

    Returns:
        A new tensor, the same on every rank.

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
    """Sums the tensors of all ranks and keeps this rank's part along ``dim``: ``Partial`` to
    ``Shard(dim)``. The gradient of ``x`` is the all-gather of the local gradients.

    Args:
        x: float64, float32, bfloat16 or float16, of the same shape on every rank.
        dim: the dimension; may be negative.
        group: the ranks.
        sizes: how many of ``x.size(dim)`` each rank gets; None: split like ``torch.tensor_split``.
        reduce_dtype: the dtype in which the sum is taken; None: float32 for 16-bit floats, else
            that of ``x``.

    Returns:
        A new local tensor in the dtype of ``x``.

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
    """Takes this rank's part along ``dim`` of a tensor that every rank has: ``Replicate`` to
    ``Shard(dim)``. Nothing is sent in forward.

    Args:
        x: the full tensor, the same on every rank, any dtype.
        dim: the dimension; may be negative.
        group: the ranks.
        sizes: how many of ``x.size(dim)`` each rank gets; None: split like ``torch.tensor_split``.
        grad: "replicated": every rank gets the full gradient, the all-gather of the local ones.
            "partial": its local gradient, with zeros elsewhere.

    Returns:
        A new local tensor.

    Raises:
        ValueError: ``dim``, ``sizes`` or ``grad`` doesn't fit.
    """
    rank, _, name = member_of(group)
    return _op.scatter(x, dim, _split(x, dim, group, sizes), grad, rank, name)


def all_reduce(
    x: Tensor, group: Group = None, *, grad: str, reduce_dtype: torch.dtype | None = None
) -> Tensor:
    """Sums the tensors of all ranks: ``Partial`` to ``Replicate``.

    Args:
        x: float64, float32, bfloat16, float16, int64, int32, int8, uint8 or bool, of the same shape
            on every rank.
        group: the ranks.
        grad: "replicated": the gradient of ``x`` is that of the sum. "partial": it is the sum of
            the ranks' gradients.
        reduce_dtype: the dtype in which the sum is taken; None: float32 for 16-bit floats, else
            that of ``x``.

    Returns:
        A new tensor in the dtype of ``x``, the same on every rank.

    Raises:
        ValueError: ``grad`` doesn't fit, or ``x`` has a dtype that can't be reduced: float8,
            complex, int16.
    """
    _check_summed(x)
    return _op.all_reduce(x, grad, *member_of(group), reduce_dtype=reduce_dtype)


def replicate(x: Tensor, group: Group = None) -> Tensor:
    """Marks a replicated tensor that each rank uses differently, such as for its own tokens: the
    gradient becomes the sum of the ranks' gradients. In forward nothing is computed or sent.

    Args:
        x: the full tensor, the same on every rank: float64, float32, bfloat16 or float16.
        group: the ranks.

    Returns:
        A view of ``x``.

    Raises:
        ValueError: the group doesn't exist, or this process isn't in it.
    """
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
    part is multiplied while the next is in flight, in forward and backward.

    Only the local ``x`` is saved for backward, which gathers it again. There is no second
    derivative. This is the column-parallel linear layer of Megatron-LM's sequence parallelism
    (Korthikanti et al., 2022, arXiv:2205.05198).

    Args:
        x: [.., n, .., K], the local tensor along ``dim``: float64, float32, bfloat16 or float16.
        weight: [M, K], this rank's columns of the output, in the dtype of ``x``.
        bias: [M], or None.
        dim: the gathered dimension, not the last; may be negative.
        group: the ranks.
        sizes: the size along ``dim`` on each rank; None: the same on all ranks.
        reduce_dtype: the dtype in which the gradient of ``x`` is summed over ranks; None: float32
            for 16-bit floats, else that of ``x``.

    Returns:
        [.., sum(sizes), .., M], a new tensor.

    Raises:
        ValueError: shapes, dtypes, ``dim`` or ``sizes`` don't fit.
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
    """``reduce_scatter(linear(x, weight), dim) + bias``, pipelined: on gloo, one rank's part is in
    flight while the next is computed, in forward and backward. There is no second derivative.

    This is the row-parallel linear layer of Megatron-LM's sequence parallelism (Korthikanti et al.,
    2022, arXiv:2205.05198).

    Args:
        x: [.., n, .., K], full along ``dim``, with this rank's K input features: float64, float32,
            bfloat16 or float16.
        weight: [M, K], in the dtype of ``x``.
        bias: [M], or None: the full bias, which is added once.
        dim: the scattered dimension, not the last; may be negative.
        group: the ranks.
        sizes: how many of ``x.size(dim)`` each rank gets; None: split like ``torch.tensor_split``.
        reduce_dtype: the dtype in which the sum is taken; None: float32 for 16-bit floats, else
            that of ``x``.

    Returns:
        [.., sizes[rank], .., M], a new local tensor.

    Raises:
        ValueError: shapes, dtypes, ``dim`` or ``sizes`` don't fit.
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
    """Launches :func:`all_gather`; ``.wait()`` returns its result. In backward, the reverse
    collective is in flight during the backward of the ops between start and wait.

    Args:
        x: as in :func:`all_gather`, as are the others.
        dim: the dimension; may be negative.
        group: the ranks.
        sizes: the size along ``dim`` on each rank; None: the same on all ranks.
        grad: "replicated" or "partial".
        reduce_dtype: the dtype in which gradients are summed.

    Returns:
        A :class:`deepsp.ops.Pending` of the full tensor.

    Raises:
        ValueError: ``dim``, ``sizes`` or ``grad`` doesn't fit.
    """
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
    """Launches :func:`reduce_scatter`; ``.wait()`` returns its result. In backward, the reverse
    collective is in flight during the backward of the ops between start and wait.

    Args:
        x: as in :func:`reduce_scatter`, as are the others.
        dim: the dimension; may be negative.
        group: the ranks.
        sizes: how many of ``x.size(dim)`` each rank gets; None: split like ``torch.tensor_split``.
        reduce_dtype: the dtype in which the sum is taken.

    Returns:
        A :class:`deepsp.ops.Pending` of the local tensor.

    Raises:
        ValueError: ``dim``, ``sizes`` or a dtype doesn't fit.
    """
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
    """:func:`scatter` with ``grad="replicated"``, in two halves: in backward, the all-gather of the
    gradient is in flight during the backward of the ops between start and wait.

    Args:
        x: as in :func:`scatter`, as are the others.
        dim: the dimension; may be negative.
        group: the ranks.
        sizes: how many of ``x.size(dim)`` each rank gets; None: split like ``torch.tensor_split``.

    Returns:
        A :class:`deepsp.ops.Pending` of the local tensor.

    Raises:
        ValueError: ``dim`` or ``sizes`` doesn't fit.
    """
    rank, _, name = member_of(group)
    sizes, shape = _split(x, dim, group, sizes), list(x.shape)
    buffer = _op.scatter_start(x, dim, sizes, rank, name)
    return Pending(lambda: _op.scatter_wait(buffer, dim, sizes, shape, rank, name)[0])


def all_reduce_start(
    x: Tensor, group: Group = None, *, grad: str, reduce_dtype: torch.dtype | None = None
) -> Pending[Tensor]:
    """Launches :func:`all_reduce`; ``.wait()`` returns its result. In backward with
    ``grad="partial"``, the sum is in flight during the backward of the ops between start and wait.

    Args:
        x: as in :func:`all_reduce`, as are the others.
        group: the ranks.
        grad: "replicated" or "partial".
        reduce_dtype: the dtype in which the sum is taken.

    Returns:
        A :class:`deepsp.ops.Pending` of the sum.

    Raises:
        ValueError: ``grad`` doesn't fit, or ``x`` has a dtype that can't be reduced.
    """
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
            "expected x to be float64, float32, bfloat16, float16, int64, int32, int8, uint8 or "
            f"bool, got {str(x.dtype).removeprefix('torch.')}, which can't be reduced; pass {what}"
        )


def _equal(x: Tensor, dim: int, group: Group, sizes: Sequence[int] | None) -> list[int]:
    check_dim(x, dim)
    if sizes is None:
        return [x.size(dim)] * member_of(group)[1]
    return _checked(sizes, group)


def _split(x: Tensor, dim: int, group: Group, sizes: Sequence[int] | None) -> list[int]:
    check_dim(x, dim)
    return seq_lens(x.size(dim), group) if sizes is None else _checked(sizes, group)


def _checked(sizes: Sequence[int], group: Group) -> list[int]:
    size = member_of(group)[1]
    if len(sizes) != size:
        raise ValueError(
            f"expected sizes to have one entry for each of the {size} ranks of the group, got "
            f"{len(sizes)}"
        )
    return list(sizes)
