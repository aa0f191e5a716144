"""What each torch op does to placements. The compile pass rewrites by these rows, and a schedule's
dry run refuses by them."""

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
