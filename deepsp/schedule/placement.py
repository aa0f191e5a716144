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


_NEEDED = {
    "all_gather": "Shard",
    "reduce_scatter": "Partial",
    "all_reduce": "Partial",
    "scatter": "Replicate",
    "seq_to_heads": "Shard",
    "heads_to_seq": "Shard",
}
_GATHERED = "each rank has the full tensor already, perhaps gathered twice: leave this out"
_ADVICE = {
    ("all_gather", "Replicate"): _GATHERED,
    ("all_gather", "Partial"): "use all_reduce, which sums it, or reduce_scatter, and gather that",
    ("scatter", "Partial"): "use reduce_scatter, which sums it too",
    ("scatter", "Shard"): "each rank has its local part already: leave this out",
}
_SUMMED = {
    "Replicate": "the sum over the ranks would be P times too large: leave this out, or shard what "
    "makes the tensor so that it is Partial, as the output of a Linear with sharded input features "
    "is",
    "Shard": "use all_gather, which joins the local parts: a sum would add up different parts",
}
_EXCHANGED = {
    "Replicate": "the ranks' copies would be taken for different local parts: use scatter before",
    "Partial": "use reduce_scatter before",
}


def misfit(op: str, placement: Placement) -> tuple[str, str] | None:
    """Which kind of placement a collective needs, and what to do, if it isn't this one's."""
    needed, kind = _NEEDED[op], type(placement).__name__
    if kind == needed:
        return None
    advice = _SUMMED if needed == "Partial" else _EXCHANGED
    return needed, _ADVICE[op, kind] if (op, kind) in _ADVICE else advice[kind]
