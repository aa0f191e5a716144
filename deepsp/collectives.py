"""SHIM, to be replaced: differentiable collectives along a dimension."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from deepsp.groups import Group, member_of
from deepsp.layout import seq_lens


def _pg(name):
    return dist.distributed_c10d._resolve_process_group(name)


def _sum(x, name):
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, group=_pg(name))
    return out


def _gather(x, dim, sizes, name):
    top = max(sizes)
    pad = [0, 0] * x.dim()
    pad[2 * (x.dim() - 1 - dim) + 1] = top - x.size(dim)
    mine = torch.nn.functional.pad(x, pad).contiguous()
    parts = [torch.empty_like(mine) for _ in sizes]
    dist.all_gather(parts, mine, group=_pg(name))
    return torch.cat([p.narrow(dim, 0, n) for p, n in zip(parts, sizes)], dim)


def _slice(x, dim, sizes, rank):
    return x.narrow(dim, sum(sizes[:rank]), sizes[rank]).clone()


class _Op(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, forward, backward):
        ctx.back = backward
        return forward(x)

    @staticmethod
    def backward(ctx, g):
        return ctx.back(g), None, None


def _check(value, allowed):
    if value not in allowed:
        raise ValueError(f"grad is {value!r}; 'replicated' or 'partial' is right")


def all_gather(x: Tensor, dim: int, group: Group = None, sizes: Sequence[int] | None = None, *, grad: str, reduce_dtype=None) -> Tensor:
    _check(grad, ("replicated", "partial"))
    rank, size, name = member_of(group)
    dim = dim % x.dim()
    sizes = [x.size(dim)] * size if sizes is None else list(sizes)
    back = (lambda g: _slice(g, dim, sizes, rank)) if grad == "replicated" else (lambda g: _slice(_sum(g, name), dim, sizes, rank))
    return _Op.apply(x, lambda t: _gather(t, dim, sizes, name), back)


def reduce_scatter(x: Tensor, dim: int, group: Group = None, sizes: Sequence[int] | None = None, *, reduce_dtype=None) -> Tensor:
    rank, size, name = member_of(group)
    dim = dim % x.dim()
    sizes = seq_lens(x.size(dim), group) if sizes is None else list(sizes)
    return _Op.apply(x, lambda t: _slice(_sum(t, name), dim, sizes, rank), lambda g: _gather(g, dim, sizes, name))


def all_reduce(x: Tensor, group: Group = None, *, grad: str, reduce_dtype=None) -> Tensor:
    _check(grad, ("replicated", "partial"))
    _, _, name = member_of(group)
    back = (lambda g: g) if grad == "replicated" else (lambda g: _sum(g, name))
    return _Op.apply(x, lambda t: _sum(t, name), back)


def scatter(x: Tensor, dim: int, group: Group = None, sizes: Sequence[int] | None = None, *, grad: str = "replicated") -> Tensor:
    _check(grad, ("replicated", "partial"))
    rank, size, name = member_of(group)
    dim = dim % x.dim()
    sizes = seq_lens(x.size(dim), group) if sizes is None else list(sizes)
    if grad == "partial":
        return x.narrow(dim, sum(sizes[:rank]), sizes[rank]).clone()
    return _Op.apply(x, lambda t: _slice(t, dim, sizes, rank), lambda g: _gather(g, dim, sizes, name))


def copy(x: Tensor, group: Group = None) -> Tensor:
    _, _, name = member_of(group)
    return _Op.apply(x, lambda t: t.view_as(t), lambda g: _sum(g, name))


def matmul_reduce_scatter(x: Tensor, weight: Tensor, bias: Tensor | None, dim: int, group: Group = None, sizes: Sequence[int] | None = None) -> Tensor:
    out = reduce_scatter(torch.nn.functional.linear(x, weight), dim, group, sizes)
    return out if bias is None else out + bias


def all_gather_matmul(x: Tensor, weight: Tensor, bias: Tensor | None, dim: int, group: Group = None, sizes: Sequence[int] | None = None) -> Tensor:
    return torch.nn.functional.linear(all_gather(x, dim, group, sizes, grad="partial"), weight, bias)
