"""Ops that move elements without changing them: permutations, slices, joins."""

from __future__ import annotations

from deepsp.placement import dims
from deepsp.placement.pointwise import broadcast
from deepsp.placement.table import SUM, Op, Row, along, row, rule, sharded


def moved(op: Op, order: dims.DimOrder) -> list[Row]:
    """``order``: for each dimension of the result, the operand's, or None."""
    x = op.operands[0]
    rows = [r for to, d in enumerate(order) if d is not None for r in row(to, (x, d))]
    return rows + row(SUM, (x, SUM))


def _ndim(op: Op) -> int:
    return len(op.shape(op.operands[0]))


@rule("transpose swapaxes swapdims")
def transpose(op: Op) -> list[Row]:
    return moved(op, dims.transpose(_ndim(op), *op.values[1:3]))


@rule("t numpy_T mT mH adjoint matrix_H")
def turn(op: Op) -> list[Row]:
    return moved(op, dims.turn(_ndim(op), op.target._opname))


@rule("permute")
def permute(op: Op) -> list[Row]:
    return moved(op, dims.permute(_ndim(op), op["dims"]))


@rule("movedim moveaxis")
def movedim(op: Op) -> list[Row]:
    return moved(op, dims.movedim(_ndim(op), op["source"], op["destination"]))


@rule("unsqueeze")
def unsqueeze(op: Op) -> list[Row]:
    return moved(op, dims.unsqueeze(_ndim(op), op["dim"]))


@rule("squeeze.dim squeeze.dims squeeze.default", "the sharded dimension is squeezed away")
def squeeze(op: Op) -> list[Row]:
    shape = op.shape(op["self"])
    wanted = range(len(shape)) if op["dim"] is None else dims.listed(op["dim"])
    gone = [d % len(shape) for d in wanted if shape and op.is_one(shape[d])]
    return moved(op, dims.without(len(shape), gone))


@rule("select unbind", "one index is taken along the sharded dimension")
def select(op: Op) -> list[Row]:
    return moved(op, dims.without(_ndim(op), [op["dim"]]))


@rule(
    "split split_with_sizes chunk tensor_split unsafe_split unsafe_chunk unsafe_split_with_sizes "
    "slice narrow",
    "a piece is taken along the sharded dimension",
)
def pieces(op: Op) -> list[Row]:
    return along(op, [op["dim"]], linear=True)


@rule("expand expand_as broadcast_to", "the sharded dimension is repeated")
def expand(op: Op) -> list[Row]:
    """Sizes among the arguments are those of each rank's result."""
    x, like = op["self"], op["other"]
    shape = op.shape(x)
    size = op["size"] if like is None else op.shape(like)
    behind = len(size) - len(shape)
    rows = []
    for d in range(len(size)):
        place = d - behind
        kept = place >= 0 and not op.is_one(shape[place])
        if like is not None:
            alone = op.is_one(size[d])
            rows += (
                []
                if alone and not kept
                else row(d, (x, place if kept else None), (like, None if alone else d))
            )
        elif kept:
            rows += row(d, (x, place))
    return rows + row(SUM, (x, SUM), (like, None))


@rule("flip roll", "it moves elements along the sharded dimension, from one rank to another")
def turned(op: Op) -> list[Row]:
    return along(op, dims.listed(op["dims"]) or range(_ndim(op)), linear=True)


@rule("unfold", "it makes windows of neighbouring elements, some of which other ranks have")
def unfold(op: Op) -> list[Row]:
    return along(op, [op["dimension"]], linear=True)


@rule("pad constant_pad_nd", "it adds elements to the sharded dimension, or takes some off")
def pad(op: Op) -> list[Row]:
    """``pad`` has two sizes for each dimension, the last dimension first."""
    ndim, sizes = _ndim(op), list(op["pad"])
    padded = [ndim - 1 - n // 2 for n, size in enumerate(sizes) if size != 0]
    return along(op, padded, linear=(op["value"] or 0) == 0)


@rule("tril triu", "it reads positions along the sharded dimension")
def triangle(op: Op) -> list[Row]:
    return along(op, [-2, -1], linear=True)


@rule("diagonal", "it reads positions along the sharded dimension")
def diagonal(op: Op) -> list[Row]:
    return moved(op, [*dims.without(_ndim(op), [op["dim1"], op["dim2"]]), None])


@rule("repeat", "the sharded dimension is repeated")
def repeat(op: Op) -> list[Row]:
    x, times = op["self"], op["repeats"]
    behind = len(times) - len(op.shape(x))
    rows = [
        r
        for d in range(len(op.shape(x)))
        if times[d + behind] == 1
        for r in row(d + behind, (x, d))
    ]
    return rows + row(SUM, (x, SUM))


@rule("cat concat concatenate", "tensors are joined along the sharded dimension")
def cat(op: Op) -> list[Row]:
    tensors = [x for x in op["tensors"] if len(op.shape(x)) > 1 or not _is_empty(op, x)]
    tensors = tensors or list(op["tensors"])
    ndim = len(op.shape(tensors[0]))
    dim = op["dim"] % max(ndim, 1)
    if len(tensors) == 1:
        dim = ndim  # no join
    rows = sharded((d for d in range(ndim) if d != dim), tensors)
    return rows + row(SUM, *((x, SUM) for x in tensors))


def _is_empty(op: Op, x) -> bool:
    return list(op.shape(x)) == [0]


@rule("stack")
def stack(op: Op) -> list[Row]:
    tensors = op["tensors"]
    ndim = len(op.shape(tensors[0]))
    dim = op["dim"] % (ndim + 1)
    rows = [r for d in range(ndim) for r in row(d + (dim <= d), *((x, d) for x in tensors))]
    return rows + row(SUM, *((x, SUM) for x in tensors))


@rule("broadcast_tensors")
def broadcast_tensors(op: Op) -> list[Row]:
    return broadcast(op, op["tensors"])


@rule("slice_scatter select_scatter", "it writes a piece of the sharded dimension")
def written(op: Op) -> list[Row]:
    """Replaces a part of another dimension than the sharded one."""
    x, new = op["self"], op["src"]
    ndim, gone = _ndim(op), op.target._opname == "select_scatter"
    dim = op["dim"] % ndim
    rows = [
        r for d in range(ndim) if d != dim for r in row(d, (x, d), (new, d - (gone and dim < d)))
    ]
    return rows + row(SUM, (x, SUM), (new, SUM))
