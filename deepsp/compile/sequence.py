"""Other collectives of the sequence group as Inductor sees them."""

from __future__ import annotations

import math

import torch

_c10d = torch.ops._c10d_functional


def all_reduce(input, grad_scale, rank, size, group_name):
    if size == 1:
        return input.clone(memory_format=torch.contiguous_format)
    return _c10d.wait_tensor(_c10d.all_reduce(input.contiguous(), "sum", group_name))


def unshard(input, dim, seq_lens, rank, group_name):
    parts = len(seq_lens)
    if parts == 1:
        return input.clone(memory_format=torch.contiguous_format)
    longest = seq_lens[0]
    for length in seq_lens[1:]:
        longest = torch.sym_max(longest, length)
    dim = dim % input.dim()
    padding = [0] * (2 * (input.dim() - dim))
    padding[-1] = longest - seq_lens[rank]
    shard = torch.constant_pad_nd(input, padding).contiguous()
    gathered = _c10d.wait_tensor(
        _c10d.all_gather_into_tensor(shard.view(-1), parts, group_name)
    ).view(parts, *shard.shape)
    return torch.cat([gathered.select(0, p).narrow(dim, 0, seq_lens[p]) for p in range(parts)], dim)


def sum_start(inputs, rank, size, group_name):
    flat = torch.cat([x.reshape(-1) for x in inputs])
    if size == 1:
        return flat
    return _c10d.all_reduce(flat, "sum", group_name)


def sum_wait(buffer, shapes, dims, rank, size, group_name):
    landed = _c10d.wait_tensor(buffer) if size > 1 else buffer
    views, begin, at = [], 0, 0
    for dim in dims:
        shape = shapes[at : at + dim]
        numel = math.prod(shape)
        views.append(landed.narrow(0, begin, numel).view(shape))
        begin, at = begin + numel, at + dim
    return views
