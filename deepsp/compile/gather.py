"""The ops of sharded weights as Inductor sees them: see :mod:`deepsp.compile.lowering.decompositions`.

A rank's rows of all tensors make one block, padded to the largest rank's, so that one collective
of even parts moves them. Tensors of several dtypes share a block as bytes.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from deepsp.compile.exchange import is_zero

_c10d = torch.ops._c10d_functional


class ShardBlocks:
    """Sizes of one exchange, all that both directions need; the twin of csrc/layout/shards.h."""

    def __init__(self, sizes, row_shapes: list[list], dtypes: list[torch.dtype], rank: int):
        self.count = len(dtypes)
        self.parts = len(sizes) // self.count
        self.sizes = [sizes[i * self.parts : (i + 1) * self.parts] for i in range(self.count)]
        self.row_shapes, self.dtypes, self.rank = row_shapes, dtypes, rank
        self.rows = [math.prod(shape) for shape in row_shapes]
        self.dtype = max(dtypes, key=lambda dtype: dtype.itemsize)
        # In elements of the block's dtype where all have it, else in bytes.
        self.alike = all(dtype == self.dtype for dtype in dtypes)
        self.unit = self.dtype.itemsize if self.alike else 1

    def length(self, i: int, p: int):
        """What tensor i fills of rank p's block."""
        return self.sizes[i][p] * self.rows[i] * self.dtypes[i].itemsize // self.unit

    def piece(self, i: int, p: int):
        """What it takes: several tensors begin at multiples of 16 bytes."""
        if self.count == 1:
            return self.length(i, p)
        grain = 16 // self.unit
        return (self.length(i, p) + grain - 1) // grain * grain

    @property
    def slot(self):
        """The largest block."""
        largest = 0
        for p in range(self.parts):
            block = sum(self.piece(i, p) for i in range(self.count))
            largest = block if block > largest else largest
        return largest

    def pack(self, tensors: list[Tensor], p: int) -> Tensor:
        """The slot of rank p, of its rows of all tensors."""
        parts = []
        filled = 0
        for i, x in enumerate(tensors):
            flat = x.reshape(-1)
            flat = flat if self.alike else flat.view(torch.uint8)
            parts.append(_pad(flat, self.piece(i, p) - self.length(i, p)))
            filled = filled + self.piece(i, p)
        return _pad(parts[0] if len(parts) == 1 else torch.cat(parts), self.slot - filled)

    def unpack(self, slot: Tensor, i: int, p: int) -> Tensor:
        """Rank p's rows of tensor i in its slot."""
        begin = sum(self.piece(j, p) for j in range(i))
        flat = slot.narrow(0, begin, self.length(i, p))
        flat = flat if self.alike else flat.view(self.dtypes[i])
        return flat.view(self.sizes[i][p], *self.row_shapes[i])

    def as_buffer(self, flat: Tensor) -> Tensor:
        return flat if self.alike else flat.view(self.dtype)

    def as_units(self, buffer: Tensor) -> Tensor:
        return buffer if self.alike else buffer.view(torch.uint8)


def _pad(flat: Tensor, padding) -> Tensor:
    # Not cat with zeros: where there is nothing but padding, no trace of `flat` would be left, and
    # two such exchanges would be taken for one and the same, on this rank alone.
    return flat if is_zero(padding) else torch.constant_pad_nd(flat, [0, padding])


def _shapes(row_shapes, row_dims) -> list[list]:
    shapes, begin = [], 0
    for dims in row_dims:
        shapes.append(list(row_shapes[begin : begin + dims]))
        begin += dims
    return shapes


def gather_cast_coalesced_start(shards, sizes, dtypes, rank, group_name, *, reduce_dtype=None):
    b = ShardBlocks(sizes, [list(x.shape[1:]) for x in shards], dtypes, rank)
    block = b.pack([x.to(dtype) for x, dtype in zip(shards, dtypes, strict=True)], rank)
    if b.parts == 1:
        # An op never returns its input itself.
        return b.as_buffer(block.clone())
    gathered = _c10d.all_gather_into_tensor(block.contiguous(), b.parts, group_name)
    return b.as_buffer(gathered)


def gather_cast_coalesced_wait(buffer, sizes, row_shapes, row_dims, dtypes, rank, group_name):
    b = ShardBlocks(sizes, _shapes(row_shapes, row_dims), dtypes, rank)
    if b.parts > 1:
        buffer = _c10d.wait_tensor(buffer)
    slots = b.as_units(buffer).view(b.parts, b.slot)
    results = []
    for i in range(b.count):
        if b.count == 1 and all(n == b.sizes[0][0] for n in b.sizes[0]):
            results.append(slots.view(sum(b.sizes[0]), *b.row_shapes[0]))
        else:
            results.append(torch.cat([b.unpack(slots.select(0, p), i, p) for p in range(b.parts)]))
    return results


def reduce_scatter_cast_coalesced_start(inputs, sizes, rank, group_name):
    b = ShardBlocks(sizes, [list(x.shape[1:]) for x in inputs], [x.dtype for x in inputs], rank)
    whole = [x.split(b.sizes[i]) for i, x in enumerate(inputs)]
    sent = torch.cat([b.pack([parts[p] for parts in whole], p) for p in range(b.parts)])
    if b.parts == 1:
        return b.as_buffer(sent.clone())
    counts = [b.slot] * b.parts
    return b.as_buffer(_c10d.all_to_all_single(sent.contiguous(), counts, counts, group_name))


def reduce_scatter_cast_coalesced_wait(
    buffer, sizes, row_shapes, row_dims, wire_dtypes, dtypes, reduce_dtype, rank, group_name
):
    b = ShardBlocks(sizes, _shapes(row_shapes, row_dims), wire_dtypes, rank)
    if b.parts > 1:
        buffer = _c10d.wait_tensor(buffer)
    slots = b.as_units(buffer).view(b.parts, b.slot)
    results = []
    for i, dtype in enumerate(dtypes):
        wire = wire_dtypes[i]
        kept = reduce_dtype or (torch.float64 if wire == torch.float64 else torch.float32)
        within = torch.float64 if kept == torch.float64 else torch.float32
        total = b.unpack(slots.select(0, 0), i, rank).to(within).to(kept)
        for p in range(1, b.parts):
            total = (total.to(within) + b.unpack(slots.select(0, p), i, rank).to(within)).to(kept)
        # Fresh, also where nothing was summed or cast.
        results.append(total.to(dtype).clone() if b.parts == 1 else total.to(dtype))
    return results
