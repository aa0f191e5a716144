"""Linear layers that sum over tokens, and convolutions. Other products have rows only."""

from __future__ import annotations

from dataclasses import replace

import torch

from deepsp import placement
from deepsp.compile.sharding.rules import Call, by_rows, refused, rule
from deepsp.compile.sharding.tokens import Tokens, size_of
from deepsp.placement import SUM, Row

aten = torch.ops.aten

_BORDERS = "a convolution along the sequence needs other ranks' tokens at the borders"
refused("convolution conv_transpose1d conv_transpose2d conv_transpose3d _convolution", _BORDERS)
refused("conv_tbc", _BORDERS)
refused("lstm gru rnn_tanh rnn_relu lstm_cell", "its recurrence goes from token to token")
refused("cov corrcoef", "it sums over tokens, and there is no rule for that")


@rule(aten.linear.default)
def linear(call: Call) -> Tokens | None:
    """Adds the bias once, after the sum over the ranks."""
    bias, graph = call["bias"], call.graph
    rows = placement.find(call.target).rows(call)
    for i, row in enumerate(rows):
        if row.outputs == SUM:
            rows[i] = Row(tuple(x for x in row.inputs if x[0] is not bias), SUM)
    tokens = by_rows(call, rows)

    def lower():
        total = graph.all_reduce(call.replaced(bias=None))
        return graph.call(aten.add.Tensor, total, graph.full(bias))

    if tokens is None and bias is not None:
        call.lower = lower
    return tokens


@rule(aten.conv1d.default, aten.conv2d.default, aten.conv3d.default)
def convolution(call: Call) -> Tokens:
    """[B, C, ...]. Patches that don't overlap become tokens."""
    x, weight = call.node.args[:2]
    call.only(x)
    tokens, graph = call.one_of(), call.graph
    if tokens.dim < 2:
        return by_rows(call)

    def along(name):
        given = call[name]
        return given[(tokens.dim - 2) % len(given)]

    size = call.shape(weight)[tokens.dim]
    full = call.shape(x)[tokens.dim]
    count = call.out[tokens.dim]
    disjoint = along("stride") == size and along("padding") == 0 and along("dilation") == 1
    if not disjoint or not graph.equal(size_of(count * size), full):
        call.refuse(_BORDERS)
    if size == 1:
        return tokens
    if graph.values[x].full is None:
        call.refuse("it makes patches of tokens that are sharded")
    patches = Tokens(tokens.dim, count, graph.sequence(count))
    call.want(x, replace(patches, inner=size))
    return patches
