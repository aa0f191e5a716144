"""What a tensor is over a group of ranks."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Whole:
    """Every rank has the same tensor."""

    def __str__(self) -> str:
        return "whole"


@dataclass(frozen=True)
class Sharded:
    """Each rank has its own part along ``axis``, counted from the front; None: along one that can't
    be told. ``origin``: who made it so, a sync or a parameter's shard; it knows the sizes."""

    axis: int | None = None
    origin: object | None = field(default=None, compare=False)

    def __str__(self) -> str:
        return "sharded" if self.axis is None else f"sharded along axis {self.axis}"


@dataclass(frozen=True)
class Partial:
    """The whole is the sum of the ranks' tensors."""

    def __str__(self) -> str:
        return "partial"


Placement = Whole | Sharded | Partial
WHOLE = Whole()
PARTIAL = Partial()
