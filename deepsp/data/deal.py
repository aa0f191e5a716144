"""Deals batches out over a sequence group: each rank has a full batch, and gets its part of
each."""

from __future__ import annotations

import itertools
import math
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deepsp.data.roles import Path, Roles, leaves_of, map_leaves, name_of, named_values
from deepsp.data.sharding import full_batch
from deepsp.ranks.groups import Member, device_of
from deepsp.ranks.lengths import seq_lens


@dataclass
class DealtTensor:
    """A tensor's full shape and the dimension along which it is sharded; known to all ranks."""

    dtype: torch.dtype
    shape: list[int]
    dim: int | None
    device: str

    def local_shape(self, length: int) -> list[int]:
        return [length if d == self.dim else n for d, n in enumerate(self.shape)]

    def nbytes(self, length: int) -> int:
        return math.prod(self.local_shape(length)) * self.dtype.itemsize


@dataclass
class Described:
    """A full batch with a :class:`DealtTensor` for each tensor, and its roles."""

    batch: dict[str, Any]
    roles: Roles

    def nbytes(self, member: Member) -> list[int]:
        """Bytes of this rank's part of each tensor."""
        local = seq_lens(self.roles.length, member)[member[0]]
        return [part.nbytes(local) for _, part in leaves_of(self.batch, DealtTensor)]


def parts_of(
    batch: Mapping[str, Any], pad_to: int | None, ignore_index: int, **how: Any
) -> tuple[list[tuple[Path, Tensor]], bytes]:
    """The tensors of a batch before they are split, and the pickled :class:`Described` with the
    values that aren't tensors. ``how``: arguments of :func:`deepsp.data.roles.describe`. ValueError
    for batches that :func:`deepsp.shard_batch` refuses."""
    full, roles = full_batch(named_values(batch, how["dim"]), pad_to, ignore_index, **how)

    def part_of(path: Path, x: Tensor) -> DealtTensor:
        if x.layout != torch.strided:
            raise ValueError(f"expected {name_of(path)} to be dense, got {x.layout}; make it dense")
        place = roles.dim_of(path)
        return DealtTensor(
            x.dtype, list(x.shape), None if place is None else place % x.dim(), x.device.type
        )

    described = Described(map_leaves(part_of, full), roles)
    return leaves_of(full), pickle.dumps(described)


def exchange(
    described: Sequence[Described | None], full: Sequence[tuple[Path, Tensor]], member: Member
) -> list[Tensor]:
    """This rank's part of each rank's batch, as bytes, by rank: one all-to-all.

    Args:
        described: each rank's description; None: it has no batch.
        full: this rank's tensors.
        member: rank, size and name of the group.
    """
    rank, size, name = member
    device = device_of(member)
    sent, counts = [torch.empty(0, dtype=torch.uint8, device=device)], [0] * size
    if full:
        lens = seq_lens(described[rank].roles.length, member)
        dims = [part.dim for _, part in leaves_of(described[rank].batch, DealtTensor)]
        tensors = [(d, x.detach().to(device)) for d, (_, x) in zip(dims, full, strict=True)]
        for r, (place, x) in itertools.product(range(size), tensors):
            part = x if place is None else x.split(lens, place)[r]
            flat = part.reshape(-1)
            if flat.stride(0) != 1:  # a column: one token of several rows
                flat = flat.clone(memory_format=torch.contiguous_format)
            sent.append(flat.view(torch.uint8))
            counts[r] += sent[-1].numel()
    expected = [0 if k is None else sum(k.nbytes(member)) for k in described]
    received = sent[0].new_empty(sum(expected))
    group = dist.distributed_c10d._resolve_process_group(name)
    dist.all_to_all_single(received, torch.cat(sent), expected, counts, group=group)
    return list(received.split(expected))


def local_batch(
    described: Described, received: Tensor, member: Member, pin: bool
) -> tuple[dict[str, Any], list[int]]:
    """The local batch from its bytes, ``received``, and the number of tokens of each rank. ``pin``:
    put CPU tensors into pinned memory."""
    lens = seq_lens(described.roles.length, member)
    pieces = iter(received.split(described.nbytes(member)))

    def tensor(_: Path, part: DealtTensor) -> Tensor:
        # Clone: an aligned copy that lets the full buffer be freed.
        x = next(pieces).clone().view(part.dtype).view(part.local_shape(lens[member[0]]))
        x = x.to(part.device)
        return x.pin_memory() if pin and part.device == "cpu" else x

    return map_leaves(tensor, described.batch, DealtTensor), lens
