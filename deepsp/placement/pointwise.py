"""Ops that compute each element on its own, with broadcasting."""

from __future__ import annotations

import torch

from deepsp.placement.table import ANYTHING, SUM, Op, Row, along, row, rule, sharded

_SUMS = {"add", "sub", "subtract", "rsub"}
_PRODUCTS = {"mul", "multiply"}
_QUOTIENTS = {"div", "divide", "true_divide"}
_LINEAR = {
    "to", "_to_copy", "clone", "contiguous", "detach", "alias", "neg", "negative", "positive",
    "lift_fresh", "lift_fresh_copy", "type_as", "conj", "resolve_conj", "resolve_neg", "real",
    "dropout", "native_dropout", "feature_dropout", "view_as_complex", "view_as_real",
}  # fmt: skip


def broadcast(op: Op, operands) -> list[Row]:
    """A row for each dimension of the result. Operands are aligned from the right."""
    shapes = [op.shape(x) for x in operands]
    if op.target._opname.startswith("_foreach") and len(set(map(len, shapes))) > 1:
        return []  # lists of tensors, each with its own dimensions
    ndim = max((len(s) for s in shapes), default=0)
    rows = []
    for dim in range(ndim):
        inputs = []
        for x, shape in zip(operands, shapes, strict=True):
            place = dim - (ndim - len(shape))
            inputs.append((x, None if place < 0 or op.is_one(shape[place]) else place))
        if any(place is not None for _, place in inputs):
            rows += row(dim, *inputs)
    return rows


# Ops without the pointwise tag, or with overloads that lack it.
@rule(
    """relu add sub mul div where masked_fill clamp clip pow to _to_copy clone contiguous detach
    alias lift_fresh lift_fresh_copy type_as float_power rsub celu selu elu silu gelu relu6 hardtanh
    hardswish leaky_relu mish softplus log_sigmoid dropout native_dropout alpha_dropout
    bernoulli __and__ __or__ __xor__ isnan isinf isfinite nan_to_num positive square logit erf
    sigmoid tanh threshold hardsigmoid softshrink hardshrink rrelu lerp addcmul addcdiv conj
    resolve_conj resolve_neg real complex polar fake_quantize_per_tensor_affine divide multiply
    subtract true_divide absolute negative not_equal greater less greater_equal less_equal isclose
    isreal fix deg2rad rad2deg floor_divide special_expit special_erf max.other min.other one_hot
    pin_memory ldexp requires_grad detach_"""
)
def pointwise(op: Op) -> list[Row]:
    name, operands = op.target._opname, op.operands
    if name in ("to", "type_as") and len(operands) == 2:  # only the other's dtype is used
        x, other = operands
        rows = sharded(range(len(op.shape(x))), [x], (other, ANYTHING))
        rows += row(SUM, (x, SUM), (other, ANYTHING)) if _is_float(op) else []
        return rows + row(None, (x, None), (other, ANYTHING))
    return broadcast(op, operands) + _sums(op)


def _is_float(op: Op) -> bool:
    """Whether a cast is to floating point, so that it commutes with sums up to rounding."""
    dtype = op["dtype"]
    return not isinstance(dtype, torch.dtype) or dtype.is_floating_point or dtype.is_complex


def _sums(op: Op) -> list[Row]:
    """Rows for linear ops, which commute with the sum over the ranks."""
    name, operands = op.target._opname.removesuffix("_"), op.operands
    if not operands:
        return []
    first, second = op["self"], op["other"]
    if name in _LINEAR:
        return row(SUM, (operands[0], SUM)) if _is_float(op) else []
    if name in _SUMS:
        if _is_tensor(op, second) and _is_tensor(op, first):
            return row(SUM, (first, SUM), (second, SUM))
        return row(SUM, (operands[0], SUM)) if second == 0 else []
    if name in _PRODUCTS:
        if not _is_tensor(op, second):
            return row(SUM, (first, SUM))
        return row(SUM, (first, SUM), (second, None)) + row(SUM, (first, None), (second, SUM))
    if name in _QUOTIENTS and op["rounding_mode"] is None:
        return row(SUM, (first, SUM), *([(second, None)] if _is_tensor(op, second) else []))
    if name == "masked_fill" and op["value"] == 0:
        return row(SUM, (first, SUM), (op["mask"], None))
    if name == "where" and op["condition"] is not None:
        chosen = [x for x in (first, second) if _is_tensor(op, x)]
        numbers = [x for x in (first, second) if not _is_tensor(op, x)]
        if chosen and all(x == 0 for x in numbers):
            return row(SUM, (op["condition"], None), *((x, SUM) for x in chosen))
    return []


def _is_tensor(op: Op, x) -> bool:
    return any(x is y for y in op.operands)


@rule("prelu")
def prelu(op: Op) -> list[Row]:
    """[B, C, ...]: a weight for each channel, or one for all."""
    x, weight = op["self"], op["weight"]
    each = not op.is_one(op.shape(weight)[-1]) if op.shape(weight) else False
    ndim = len(op.shape(x))
    channel = min(1, ndim - 1)
    return [
        r
        for d in range(ndim)
        for r in row(d, (x, d), (weight, 0 if each and d == channel else None))
    ]


@rule("view_as_complex", "its real and imaginary parts would be on different ranks")
def pairs(op: Op) -> list[Row]:
    return along(op, [-1], linear=True)


@rule("view_as_real")
def numbers(op: Op) -> list[Row]:
    return along(op, [], linear=True)


@rule(
    "zeros_like ones_like full_like empty_like rand_like randn_like randint_like fill zero normal "
    "uniform random exponential geometric cauchy log_normal"
)
def filled(op: Op) -> list[Row]:
    """The values don't depend on the tensor; only its sizes count."""
    return along(op, []) + row(None, (op["self"], ANYTHING))


@rule("new_zeros new_ones new_full new_empty new_empty_strided")
def new(op: Op) -> list[Row]:
    """Only the tensor's dtype and device are used."""
    return row(None, *((x, ANYTHING) for x in op.operands))


@rule("copy")
def copy(op: Op) -> list[Row]:
    """The destination takes the source's placement."""
    to, source = op["self"], op["src"]
    behind = len(op.shape(to)) - len(op.shape(source))
    rows = []
    for dim, size in enumerate(op.shape(to)):
        place = dim - behind
        if place < 0 or op.is_one(op.shape(source)[place]):
            rows += row(dim, (to, dim), (source, None)) if not op.is_one(size) else []
        else:
            rows += row(dim, (to, ANYTHING), (source, place))
    sums = row(SUM, (to, ANYTHING), (source, SUM))
    return (
        rows + sums + row(None, (to, None), (source, None)) + row(None, (to, SUM), (source, None))
    )


@rule("feature_dropout feature_alpha_dropout", "it drops channels for all tokens at once")
def channels(op: Op) -> list[Row]:
    """[B, C, ...]: drops full channels."""
    drops = op["train"] and op["p"]
    over = range(2, len(op.shape(op.operands[0]))) if drops else []
    return along(op, over, linear=op.target._opname == "feature_dropout")
