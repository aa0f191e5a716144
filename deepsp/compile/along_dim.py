"""Collectives along a dimension as Inductor sees them: ``aten`` and ``_c10d_functional`` ops."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_c10d = torch.ops._c10d_functional


class Along:
    """A tensor of shape ``shape``, the whole's, shared out along ``dim``: Shard of
    csrc/layout/shards.h."""

    def __init__(self, shape, dim: int, sizes, rank: int):
        self.dim = dim % len(shape)
        self.shape, self.sizes, self.rank = list(shape), list(sizes), rank
        self.outer = math.prod(self.shape[: self.dim])
        self.inner = math.prod(self.shape[self.dim + 1 :])

    @classmethod
    def of_part(cls, part: Tensor, dim: int, sizes, rank: int) -> Along:
        shape = list(part.shape)
        shape[dim] = sum(sizes)
        return cls(shape, dim, sizes, rank)

    @property
    def parts(self) -> int:
        return len(self.sizes)

    @property
    def even(self) -> bool:
        return all(n == self.sizes[0] for n in self.sizes)

    def shape_of(self, p: int) -> list:
        return [*self.shape[: self.dim], self.sizes[p], *self.shape[self.dim + 1 :]]

    def block(self, p: int):
        return self.outer * self.sizes[p] * self.inner

    @property
    def slot(self):
        largest = self.block(0)
        for p in range(1, self.parts):
            other = self.block(p)
            largest = other if other > largest else largest
        return largest

    def pack(self, part: Tensor, p: int) -> Tensor:
        """Rank p's part in a slot, which it may not fill."""
        # Not cat with zeros: where a part is empty, no trace of it would be left, and two such
        # exchanges would be taken for one, on this rank alone.
        flat = part.reshape(-1)
        return flat if self.even else torch.constant_pad_nd(flat, [0, self.slot - self.block(p)])

    def unpack(self, slot: Tensor, p: int) -> Tensor:
        return slot.narrow(0, 0, self.block(p)).view(self.shape_of(p))

    def parts_of(self, whole: Tensor) -> tuple[Tensor, ...]:
        return whole.split(self.sizes, self.dim)


def all_gather_start(input, dim, sizes, grad, rank, group_name, *, reduce_dtype=None):
    along = Along.of_part(input, dim, sizes, rank)
    slot = along.pack(input, rank).view(1, -1)
    if along.parts == 1:
        return slot.clone()  # an op never returns its input itself
    return _c10d.all_gather_into_tensor(slot.contiguous(), along.parts, group_name)


def all_gather_wait(buffer, dim, sizes, shape, grad, rank, group_name):
    along = Along(shape, dim, sizes, rank)
    if along.parts > 1:
        buffer = _c10d.wait_tensor(buffer)
    if along.parts == 1 or (along.even and along.outer == 1):
        return [buffer.view(shape)]
    parts = [along.unpack(buffer.select(0, p), p) for p in range(along.parts)]
    return [torch.cat(parts, along.dim)]


def reduce_scatter_start(input, dim, sizes, rank, group_name):
    along = Along(input.shape, dim, sizes, rank)
    if along.parts == 1:
        return input.clone(memory_format=torch.contiguous_format).view(1, -1)
    if along.even and along.outer == 1:
        sent = input.reshape(along.parts, -1)
    else:
        parts = along.parts_of(input)
        sent = torch.stack([along.pack(part, p) for p, part in enumerate(parts)])
    counts = [1] * along.parts  # slots
    return _c10d.all_to_all_single(sent.contiguous(), counts, counts, group_name)


def reduce_scatter_wait(buffer, dim, sizes, shape, rank, group_name, *, reduce_dtype=None):
    along = Along(shape, dim, sizes, rank)
    if along.parts == 1:
        return buffer.view(shape).clone()
    buffer = _c10d.wait_tensor(buffer)
    kept = reduce_dtype or (torch.float64 if buffer.dtype == torch.float64 else torch.float32)
    within = torch.float64 if kept == torch.float64 else torch.float32
    # From the slots of all ranks, those of this rank's part.
    blocks = [
        buffer.select(0, p).narrow(0, 0, along.block(rank)).view(along.shape_of(rank)).to(within)
        for p in range(along.parts)
    ]
    total = blocks[0].to(kept)
    for block in blocks[1:]:
        total = (total.to(within) + block).to(kept)
    return total.to(buffer.dtype)


def scatter_start(input, dim, sizes, rank, group_name):
    along = Along(input.shape, dim, sizes, rank)
    slot = along.pack(along.parts_of(input)[rank].clone(), rank)
    return slot.view(1, -1).expand(along.parts, -1)


def scatter_wait(buffer, dim, sizes, shape, rank, group_name):
    along = Along(shape, dim, sizes, rank)
    return [along.unpack(buffer.select(0, rank), rank)]
