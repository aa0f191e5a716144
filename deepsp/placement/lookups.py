"""Lookups by index, and losses."""

from __future__ import annotations

from deepsp.placement.pointwise import broadcast
from deepsp.placement.table import MEAN, SUM, Op, Row, along, row, rule, sharded

_REDUCED = {0: None, 1: MEAN, 2: SUM}


@rule("embedding", "it looks up rows of a table that is sharded")
def embedding(op: Op) -> list[Row]:
    weight, index = op["weight"], op["indices"]
    ndim = len(op.shape(index))
    rows = sharded(range(ndim), [index])
    return rows + row(ndim, (index, None), (weight, 1)) + row(SUM, (index, None), (weight, SUM))


@rule(
    "gather take_along_dim scatter scatter_add scatter_reduce",
    "it is looked up along the sharded dimension",
)
def by_index(op: Op) -> list[Row]:
    """All operands have the same dimensions, and are sharded alike."""
    operands = op.operands
    ndim = len(op.shape(operands[0]))
    if op["dim"] is None:
        return []
    dim = op["dim"] % ndim
    rows = sharded((d for d in range(ndim) if d != dim), operands)
    if op.target._opname == "gather":  # each index reads the full tensor
        rows += row(dim, (op["self"], None), (op["index"], dim))
    return rows


@rule("index_fill", "it writes a piece of the sharded dimension")
def index_fill(op: Op) -> list[Row]:
    return along(op, [op["dim"]])


@rule("index_select", "it is looked up along the sharded dimension")
def index_select(op: Op) -> list[Row]:
    x, index = op["self"], op["index"]
    dim = op["dim"] % len(op.shape(x))
    return along(op, [dim], linear=True) + row(dim, (x, None), (index, 0))


@rule("index", "it is looked up along the sharded dimension")
def index(op: Op) -> list[Row]:
    """A replicated table, indexed by sharded indices, or a sharded one, indexed in other
    dimensions."""
    x, indices = op["self"], list(op["indices"])
    chosen = [n for n in indices if n is not None]
    places = [i for i, n in enumerate(indices) if n is not None]
    if any(not op.dtype(n).is_floating_point and op.dtype(n).itemsize == 1 for n in chosen):
        return _masked(op, x, indices)
    if not places or places != list(range(places[0], places[-1] + 1)):
        return []
    ndim = max(len(op.shape(n)) for n in chosen)
    rows = []
    for d in range(len(op.shape(x))):
        if d not in places:
            to = d + (ndim - len(places)) * (places[0] < d)
            rows += row(to, (x, d), *((n, None) for n in chosen))
    for r in broadcast(op, chosen):
        rows += row(r.outputs + places[0], (x, None), *r.inputs)
    return rows + row(SUM, (x, SUM), *((n, None) for n in chosen))


def _masked(op: Op, x, indices) -> list[Row]:
    """Indexing by one mask; the dimensions after the mask's can be sharded."""
    if len(indices) != 1:
        return []
    (mask,) = indices
    width = len(op.shape(mask))
    rows = [
        r for d in range(width, len(op.shape(x))) for r in row(d - width + 1, (x, d), (mask, None))
    ]
    return rows + row(SUM, (x, SUM), (mask, None))


@rule("bucketize.Tensor")
def bucketize(op: Op) -> list[Row]:
    return along(op, [])


@rule(
    "cross_entropy_loss nll_loss nll_loss_nd nll_loss2d multi_margin_loss multilabel_margin_loss",
    "its classes (the vocabulary) are sharded",
)
def of_classes(op: Op) -> list[Row]:
    """[classes], [rows, classes] or [batch, classes, ...]."""
    x, target, weight = op["self"], op["target"], op["weight"]
    ndim = len(op.shape(x))
    classes, combine = min(1, ndim - 1), _REDUCED[op["reduction"]]
    alike = len(op.shape(target)) == ndim  # probabilities, or a target for each class
    rows = []
    for d in range(ndim):
        if d == classes:
            continue
        behind = d - (d > classes)
        places = [(x, d), (target, d if alike else behind), (weight, None)]
        rows += row(behind if combine is None else combine, *places)
    return rows


@rule(
    "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy kl_div soft_margin_loss "
    "binary_cross_entropy_with_logits poisson_nll_loss",
    "it is reduced over the sharded dimension",
)
def elementwise(op: Op) -> list[Row]:
    combine = _REDUCED[op["reduction"]]
    rows = broadcast(op, op.operands)
    return rows if combine is None else [Row(r.inputs, combine) for r in rows]
