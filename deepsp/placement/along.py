"""Ops that work along dimensions: reductions, softmax and the like, norms, pooling."""

from __future__ import annotations

import re

from deepsp.placement.dims import listed
from deepsp.placement.pointwise import broadcast
from deepsp.placement.table import ALL, ANY, MAX, MEAN, MIN, SUM, Op, Row, along, row, rule

_COMBINE = {
    "sum": SUM,
    "nansum": SUM,
    "count_nonzero": SUM,
    "mean": MEAN,
    "amax": MAX,
    "max": MAX,
    "amin": MIN,
    "min": MIN,
    "any": ANY,
    "all": ALL,
}


def reduced(op: Op) -> list[int]:
    """The dimensions that an op works along: all, if it is given none."""
    ndim = len(op.shape(op.operands[0]))
    dim = op["dim"] if op["dims"] is None else op["dims"]
    if not isinstance(dim, int) and not dim:
        return list(range(ndim))
    return [d % max(ndim, 1) for d in listed(dim)]


@rule(
    "sum nansum mean amax amin max min any all argmax argmin prod logsumexp var std var_mean "
    "std_mean median nanmedian nanmean count_nonzero mode aminmax norm linalg_vector_norm kthvalue",
    "it is reduced over the sharded dimension",
)
def reduction(op: Op) -> list[Row]:
    if len(op.operands) > 1:  # max(x, y)
        return broadcast(op, op.operands)
    x, name = op.operands[0], op.target._opname
    ndim = len(op.shape(x))
    over = reduced(op)
    gone = [] if op["keepdim"] else over
    combine = _COMBINE.get(name)
    if name in ("max", "min") and op["dim"] is not None:  # they also return indices
        combine = None
    rows = []
    for d in range(ndim):
        if d not in over:
            rows += row(d - sum(g < d for g in gone), (x, d))
        elif combine is not None:
            rows += row(combine, (x, d))
    return rows + (row(SUM, (x, SUM)) if name in ("sum", "mean") else [])


@rule(
    "softmax log_softmax _softmax _log_softmax softmin cumprod logcumsumexp cummax cummin sort "
    "argsort glu topk",
    "along the sharded dimension it depends on elements of other ranks",
)
def other(op: Op) -> list[Row]:
    return along(op, reduced(op))


@rule("cumsum diff", "along the sharded dimension it depends on elements of other ranks")
def running(op: Op) -> list[Row]:
    return along(op, [op["dim"]], linear=len(op.operands) == 1)


@rule(
    "_fft_r2c _fft_c2r _fft_c2c",
    "along the sharded dimension it depends on elements of other ranks",
)
def fourier(op: Op) -> list[Row]:
    return along(op, op["dim"])


@rule(
    "layer_norm native_layer_norm rms_norm _fused_rms_norm",
    "it takes statistics along the sharded dimension",
)
def norm(op: Op) -> list[Row]:
    return along(op, range(-len(op["normalized_shape"]), 0))


@rule("group_norm", "it takes statistics along the sharded dimension")
def group_norm(op: Op) -> list[Row]:
    return along(op, range(1, len(op.shape(op["input"]))))


@rule("batch_norm instance_norm", "it takes statistics along the sharded dimension")
def batch_norm(op: Op) -> list[Row]:
    """In evaluation, only the channel dimension can't be sharded."""
    ndim = len(op.shape(op["input"]))
    taken = op["training"] or op["use_input_stats"] or op["running_mean"] is None
    if op.target._opname == "instance_norm":
        return along(op, range(1, ndim))
    return along(op, range(ndim) if taken else [min(1, ndim - 1)])


@rule(
    "avg_pool1d avg_pool2d avg_pool3d max_pool1d max_pool2d max_pool3d adaptive_avg_pool1d "
    "adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d max_pool1d_with_indices "
    "max_pool2d_with_indices",
    "it makes windows of neighbouring elements, some of which other ranks have",
)
def pool(op: Op) -> list[Row]:
    """Pools over the last one, two or three dimensions."""
    return along(op, range(-int(re.search(r"(\d)d", op.target._opname)[1]), 0))
