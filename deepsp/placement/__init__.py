"""What each torch op does to placements, said once: the compile pass rewrites by it, and a
schedule's dry run refuses by it."""

from deepsp.placement.table import (
    ALL,
    ANY,
    ANYTHING,
    MAX,
    MEAN,
    MIN,
    SUM,
    Op,
    Place,
    Row,
    Rule,
    find,
    functional,
)

__all__ = [
    "ALL", "ANY", "ANYTHING", "MAX", "MEAN", "MIN", "SUM", "Op", "Place", "Row", "Rule", "find",
    "functional",
]  # fmt: skip
