"""Sums over the group as Inductor sees them."""

from __future__ import annotations

import math

import torch

from deepsp.compile import along_dim

_c10d = torch.ops._c10d_functional


def _sums_on_arrival(dtype, reduce_dtype) -> bool:
    return dtype in (torch.bfloat16, torch.float16) and reduce_dtype != dtype


def _parts(elements, size: int) -> list:
    return [(elements + (size - 1 - p)) // size for p in range(size)]


def all_reduce(input, grad, rank, size, group_name, *, reduce_dtype=None):
    if size == 1:
        return input.clone(memory_format=torch.contiguous_format)
    if not _sums_on_arrival(input.dtype, reduce_dtype):
        return _c10d.wait_tensor(_c10d.all_reduce(input.contiguous(), "sum", group_name))
    group = (rank, size, group_name)
    buffer = all_reduce_start([input], grad, *group, reduce_dtype=reduce_dtype)
    (result,) = all_reduce_wait(
        buffer, input.shape, [input.dim()], grad, *group, reduce_dtype=reduce_dtype
    )
    return result


def all_reduce_start(inputs, grad, rank, size, group_name, *, reduce_dtype=None):
    flat = torch.cat([x.reshape(-1) for x in inputs])
    if _sums_on_arrival(flat.dtype, reduce_dtype):
        parts = _parts(flat.shape[0], size)
        return along_dim.reduce_scatter_start(flat, 0, parts, rank, group_name)
    if size == 1:
        return flat
    return _c10d.all_reduce(flat, "sum", group_name)


def all_reduce_wait(buffer, shapes, dims, grad, rank, size, group_name, *, reduce_dtype=None):
    if _sums_on_arrival(buffer.dtype, reduce_dtype):
        whole = [sum(math.prod(shape) for shape in _split(shapes, dims))]
        parts = _parts(whole[0], size)
        mine = along_dim.reduce_scatter_wait(
            buffer, 0, parts, whole, rank, group_name, reduce_dtype=reduce_dtype
        )
        gathered = along_dim.all_gather_start(mine, 0, parts, grad, rank, group_name)
        (landed,) = along_dim.all_gather_wait(gathered, 0, parts, whole, grad, rank, group_name)
    else:
        landed = _c10d.wait_tensor(buffer) if size > 1 else buffer
    views, begin = [], 0
    for shape in _split(shapes, dims):
        numel = math.prod(shape)
        views.append(landed.narrow(0, begin, numel).view(shape))
        begin = begin + numel
    return views


def _split(shapes, dims) -> list[list]:
    result, at = [], 0
    for dim in dims:
        result.append(list(shapes[at : at + dim]))
        at += dim
    return result
