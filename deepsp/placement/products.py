"""Sums of products. Sharded along a dimension of the result, the result is sharded; along a
dimension that is summed, it is partial."""

from __future__ import annotations

from deepsp.placement import dims
from deepsp.placement.table import SUM, Op, Row, row, rule, sharded


def contract(op: Op, operands: list[tuple], output: list) -> list[Row]:
    """``operands``: a tensor and a label for each of its dimensions. Dimensions with the same label
    go together; labels that ``output`` lacks are summed. A size of one broadcasts."""
    labeled = []
    for x, labels in operands:
        sizes = zip(labels, op.shape(x), strict=True)
        labeled.append((x, [None if op.is_one(size) else label for label, size in sizes]))
    # A diagonal: ranks would have blocks of it in one dimension only.
    diagonal = {label for _, each in labeled for label in each if each.count(label) > 1}
    labels = dict.fromkeys(label for _, each in labeled for label in each if label is not None)
    rows = []
    for label in sorted(labels.keys() - diagonal, key=lambda label: label not in output):
        inputs = [(x, each.index(label) if label in each else None) for x, each in labeled]
        rows += row(output.index(label) if label in output else SUM, *inputs)
    for x, _ in labeled:
        rows += row(SUM, *((y, SUM if y is x else None) for y, _ in labeled))
    return rows


def _pair(op: Op, labels_of, a, b) -> list[Row]:
    (left, right), output = labels_of(len(op.shape(a)), len(op.shape(b)))
    return contract(op, [(a, left), (b, right)], output)


def _added(op: Op, rows: list[Row], bias, ndim: int) -> list[Row]:
    """The rows of a product plus a bias."""
    shape = op.shape(bias)
    rows_with_bias = []
    for r in rows:
        place = r.outputs
        if isinstance(place, int):
            dim = place - ndim + len(shape)
            place = None if dim < 0 or op.is_one(shape[dim]) else dim
        rows_with_bias += row(r.outputs, *r.inputs, (bias, place))
    return rows_with_bias


@rule("linear")
def linear(op: Op) -> list[Row]:
    x, bias = op["input"], op["bias"]
    rows = _pair(op, dims.linear, x, op["weight"])
    return rows if bias is None else _added(op, rows, bias, len(op.shape(x)))


@rule("matmul mm bmm mv dot vdot inner")
def matmul(op: Op) -> list[Row]:
    a, b = op.values[:2]
    return _pair(op, dims.linear if op.target._opname == "inner" else dims.matmul, a, b)


@rule("addmm baddbmm addmv")
def addmm(op: Op) -> list[Row]:
    bias, a, b = op.values[:3]
    ndim = max(len(op.shape(a)), len(op.shape(b))) - (len(op.shape(b)) == 1)
    rows = _added(op, _pair(op, dims.matmul, a, b), bias, ndim)
    if op["beta"] == 0:  # the bias isn't read
        kept = [[x for x in r.inputs if x[0] is not bias or x[1] != SUM] for r in rows]
        rows = [Row(tuple(k), r.outputs) for k, r in zip(kept, rows, strict=True)]
    return rows


@rule("einsum")
def einsum(op: Op) -> list[Row]:
    tensors = op["tensors"]
    labels, output = dims.einsum(op["equation"], [len(op.shape(x)) for x in tensors])
    return contract(op, list(zip(tensors, labels, strict=True)), output)


@rule("outer ger")
def outer(op: Op) -> list[Row]:
    a, b = op.values[:2]
    return contract(op, [(a, ["rows"]), (b, ["columns"])], ["rows", "columns"])


@rule("bilinear", "it mixes its features")
def bilinear(op: Op) -> list[Row]:
    a, b = op["input1"], op["input2"]
    return sharded(range(len(op.shape(a)) - 1), [a, b])


@rule("gru_cell lstm_cell rnn_tanh_cell rnn_relu_cell", "it mixes its features")
def cell(op: Op) -> list[Row]:
    """[rows, features] and states, each row alone."""
    states = op["hx"] if isinstance(op["hx"], (list, tuple)) else [op["hx"]]
    return row(0, (op["input"], 0), *((x, 0) for x in states))


@rule("cdist", "it sums over the last dimension")
def cdist(op: Op) -> list[Row]:
    """[..., P, M] and [..., R, M] to [..., P, R]."""
    a, b = op["x1"], op["x2"]
    n = max(len(op.shape(a)), len(op.shape(b)))
    rows = row(n - 2, (a, len(op.shape(a)) - 2), (b, None))
    rows += row(n - 1, (a, None), (b, len(op.shape(b)) - 2))
    if len(op.shape(a)) == len(op.shape(b)):
        rows += sharded(range(n - 2), [a, b])
    return rows


@rule(
    "conv1d conv2d conv3d",
    "a convolution along the sharded dimension needs other ranks' elements at the borders",
)
def convolution(op: Op) -> list[Row]:
    """[B, C, ...] or [C, ...]."""
    x, weight, bias = op["input"], op["weight"], op["bias"]
    shape = op.shape(x)
    space = [("space", n) for n in range(len(op.shape(weight)) - 2)]
    kernel = [("kernel", n) for n in range(len(space))]
    batch = ["batch"] * (len(shape) == len(op.shape(weight)))
    rows = contract(
        op, [(x, [*batch, "in", *space]), (weight, ["out", "in", *kernel])], [*batch, "out", *space]
    )
    windows = (len(batch), len(batch) + len(space))
    rows = [
        r
        for r in rows
        if not (isinstance(r.place(x), int) and windows[0] < r.place(x) <= windows[1])
        and not (isinstance(r.place(weight), int) and r.place(weight) > 1)
        and (op["groups"] == 1 or r.place(x) in (None, SUM) or r.place(x) < len(batch))
        and (op["groups"] == 1 or not isinstance(r.place(weight), int))
    ]
    if bias is None:
        return rows
    all_rows = []
    for r in rows:
        all_rows += row(
            r.outputs,
            *r.inputs,
            (bias, 0 if r.outputs == len(batch) else SUM if r.outputs == SUM else None),
        )
    return all_rows
