"""Which part of a parameter each rank holds: for parameters that a schedule shards, along any axis,
and for those of :func:`deepsp.shard_parameters`, along the first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from deepsp import collectives
from deepsp.ranks.groups import Member

_split = torch.ops.deepsp.token_split

SHARDS = "_deepsp_shards"
"""The module attribute with its shards. Not on the parameter, whose attributes ``copy.deepcopy``
drops."""


@dataclass(frozen=True, eq=False)
class ParameterShard:
    """A parameter or buffer that is sharded over ranks.

    Along ``axis`` it consists of ``parts``, one after another. Each part is split over the ranks
    like ``torch.tensor_split`` in units of ``units``; a rank holds its piece of the first part,
    then its piece of the second, and so on. A parameter without dimensions counts as one row."""

    name: str
    axis: int
    parts: tuple[int, ...]
    units: tuple[int, ...]
    shape: tuple[int, ...]  # of the full parameter
    member: Member

    def part_sizes(self, rank: int) -> list[int]:
        """The length of a rank's piece of each part."""
        size = self.member[1]
        return [
            _split(length // unit, size)[rank] * unit
            for length, unit in zip(self.parts, self.units, strict=True)
        ]

    @property
    def sizes(self) -> list[int]:
        """Length along the axis on each rank."""
        return [sum(self.part_sizes(rank)) for rank in range(self.member[1])]

    @property
    def local(self) -> int:
        return sum(self.part_sizes(self.member[0]))

    @property
    def local_shape(self) -> tuple[int, ...]:
        return (*self.shape[: self.axis], self.local, *self.shape[self.axis + 1 :])

    def ranges(self) -> list[tuple[int, int]]:
        """(begin, end) of this rank's piece of each part, in the full parameter."""
        rank, size, _ = self.member
        ranges, begin = [], 0
        for length, unit in zip(self.parts, self.units, strict=True):
            counts = _split(length // unit, size)
            first = begin + sum(counts[:rank]) * unit
            ranges.append((first, first + counts[rank] * unit))
            begin += length
        return ranges

    def take(self, full: Tensor) -> Tensor:
        """This rank's part of the full tensor: a copy, since a view would keep the full one
        alive."""
        rows = full.view(1) if full.dim() == 0 else full
        pieces = [rows.narrow(self.axis, a, b - a) for a, b in self.ranges()]
        return pieces[0].clone() if len(pieces) == 1 else torch.cat(pieces, self.axis)

    def gather(self, part: Tensor) -> Tensor:
        """The full tensor, from each rank's part. Every rank makes the call."""
        with torch.no_grad():
            full = collectives.all_gather(
                part.detach(), self.axis, self.member, self.sizes, grad="replicated"
            )
            if len(self.parts) == 1:
                return full.view(self.shape)
            by_rank = full.split(self.sizes, self.axis)
            by_part = zip(
                *(x.split(self.part_sizes(rank), self.axis) for rank, x in enumerate(by_rank)),
                strict=True,
            )
            return torch.cat([piece for pieces in by_part for piece in pieces], self.axis)

    def alike(self, other: ParameterShard) -> bool:
        return (self.axis, self.parts, self.units) == (other.axis, other.parts, other.units)


def shard_rows(name: str, shape: Sequence[int], member: Member) -> ParameterShard:
    """A shard of rows, of any number, zero too."""
    rows = shape[0] if shape else 1
    return ParameterShard(name, 0, (rows,), (1,), tuple(shape), member)


def make_shard(
    name: str,
    shape: Sequence[int],
    axis: int,
    parts: int | Sequence[int],
    unit: int | Sequence[int],
    member: Member,
) -> ParameterShard:
    """Makes a shard, after checking the arguments.

    Raises:
        ValueError: axis, parts or unit don't fit the parameter or the group.
    """
    if not -len(shape) <= axis < len(shape):
        raise ValueError(
            f"expected axis to be from {-len(shape)} to {len(shape) - 1} for {name} {list(shape)}, "
            f"got {axis}"
        )
    axis %= len(shape)
    length = shape[axis]
    if isinstance(parts, int):
        if parts < 1 or length % parts != 0:
            raise ValueError(
                f"expected parts to divide the length {length} of {name} along axis {axis}, got "
                f"{parts}: pass the sizes of the parts"
            )
        parts = [length // parts] * parts
    if sum(parts) != length or min(parts) < 1:
        raise ValueError(
            f"expected parts to add up to the length {length} of {name} along axis {axis}, got "
            f"{list(parts)}, which add up to {sum(parts)}"
        )
    units = [unit] * len(parts) if isinstance(unit, int) else list(unit)
    if len(units) != len(parts):
        raise ValueError(
            f"expected unit to be a number, or one for each of the {len(parts)} parts of {name}, "
            f"got {units}"
        )
    size = member[1]
    for part, one in zip(parts, units, strict=True):
        if one < 1 or part % one != 0:
            raise ValueError(
                f"expected unit to divide the part of {part} along axis {axis} of {name}, got {one}"
            )
        if part // one < size:
            what = "" if one == 1 else f" units of {one}"
            raise ValueError(
                f"expected {name} to have at least {size}{what or ' rows'} along axis {axis}, one "
                f"for each rank of the group, got {part // one}: shard another axis, or use a "
                "smaller group"
            )
    return ParameterShard(name, axis, tuple(parts), tuple(units), tuple(shape), member)


def shards_of(module: nn.Module) -> dict[str, ParameterShard]:
    """The shards among a module's own parameters and buffers, by name."""
    return vars(module).get(SHARDS, {})


def shard_key(name: str) -> str:
    """The name of a parametrized parameter's shard in ``named_parameters`` and ``state_dict``."""
    prefix, _, leaf = name.rpartition(".")
    return f"{prefix}.parametrizations.{leaf}.original".removeprefix(".")


def all_shards(module: nn.Module) -> Iterator[tuple[str, str, ParameterShard]]:
    """(key in ``state_dict()``, name without sharding, shard) for all sharded parameters and
    buffers of a module; for a tied one, once for each name."""
    for prefix, owner in module.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        for name, shard in shards_of(owner).items():
            yield dot + name, dot + name, shard
        if parametrize.is_parametrized(owner):
            for name, parametrizations in owner.parametrizations.items():
                shard = getattr(parametrizations[0], "rows", None)
                if isinstance(shard, ParameterShard):
                    yield shard_key(dot + name), dot + name, shard


def sharded(model: nn.Module) -> dict[str, ParameterShard]:
    """The shards of :func:`all_shards`, by key."""
    return {key: shard for key, _, shard in all_shards(model)}
