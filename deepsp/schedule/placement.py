"""Placements of tensors over a group, with the names of ``torch.distributed.tensor``:
``Replicate``, ``Shard(dim)`` and ``Partial``."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Replicate:
    """Every rank has the same full tensor: ``Replicate``."""

    def __str__(self) -> str:
        return "Replicate"


@dataclass(frozen=True)
class Shard:
    """Each rank has its local part along a dimension: ``Shard(axis)``.

    Args:
        axis: the dimension; None: unknown.
        origin: the sync or parameter shard that split the tensor; it knows the sizes.
    """

    axis: int | None = None
    origin: object | None = field(default=None, compare=False)

    def __str__(self) -> str:
        return f"Shard({'unknown axis' if self.axis is None else self.axis})"


@dataclass(frozen=True)
class Partial:
    """Each rank has a term; the full tensor is their sum over the ranks: ``Partial``."""

    def __str__(self) -> str:
        return "Partial"


Placement = Replicate | Shard | Partial
REPLICATE = Replicate()
PARTIAL = Partial()
