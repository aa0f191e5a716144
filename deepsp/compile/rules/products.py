"""Linear layers and products: tokens may be rows, never what is summed over."""

from __future__ import annotations

import torch

from deepsp.compile.rules import BY_HAND, Call, broadcast, refused, rule
from deepsp.compile.tokens import Tokens

aten = torch.ops.aten

_MIXED = "it sums over tokens: a mixing along the sequence, or attention written by hand, which is \
to be torch.nn.functional.scaled_dot_product_attention"
refused(
    "conv1d conv2d conv3d convolution conv_transpose1d _convolution conv_tbc",
    "a convolution along the sequence needs other ranks' tokens at the borders",
)
refused("lstm gru rnn_tanh rnn_relu lstm_cell", "a recurrence goes from token to token")
refused("cov corrcoef cdist", _MIXED)


@rule(aten.linear.default)
def linear(call: Call) -> Tokens:
    x = call.node.args[0]
    call.only(x)
    tokens = call.one_of()
    if tokens.dim == len(call.shape(x)) - 1:
        call.refuse(_MIXED)
    return tokens


@rule(aten.matmul.default, aten.mm.default, aten.bmm.default, aten.mv.default, aten.dot.default)
def matmul(call: Call) -> Tokens:
    a, b = call.node.args[:2]
    return product(call, a, b)


@rule(aten.addmm.default, aten.baddbmm.default)
def addmm(call: Call) -> Tokens:
    bias, a, b = call.node.args[:3]
    tokens = product(call, a, b)
    shape = call.shape(bias)
    dim = tokens.dim - (len(call.out) - len(shape))
    cut = dim >= 0 and not (isinstance(shape[dim], int) and shape[dim] == 1)
    if not cut and call.tokens(bias) is not None:
        call.refuse("its operands have their tokens in different places")
    call.want(bias, tokens.at(dim) if cut else None)
    return tokens


def product(call: Call, a, b) -> Tokens:
    left, right = call.shape(a), call.shape(b)
    ta, tb = call.tokens(a), call.tokens(b)
    if ta is not None and ta.dim == len(left) - 1:
        call.refuse(_MIXED)
    if tb is not None and tb.dim == max(len(right) - 2, 0):
        call.refuse(_MIXED)
    rows = ta is not None and ta.dim == len(left) - 2
    columns = tb is not None and tb.dim == len(right) - 1
    ndim = len(call.out)
    if (rows and tb is not None) or (columns and ta is not None):
        call.refuse(BY_HAND)
    if rows:
        return ta.at(ndim - 2 if len(right) > 1 else ndim - 1)
    if columns:
        return tb.at(ndim - 1)
    # Tokens are a batch dimension.
    # A vector on the right leaves no dimension behind it.
    return broadcast(call, [a, b], call.out if len(right) > 1 else [*call.out, 1])


@rule(aten.einsum.default)
def einsum(call: Call) -> Tokens:
    equation, nodes = call.node.args[:2]
    if "." in equation or "->" not in equation:
        call.refuse("an einsum needs all its indices, and '->', to be sharded")
    inputs, out = equation.replace(" ", "").split("->")
    found = set()
    for letters, node in zip(inputs.split(","), nodes, strict=True):
        tokens = call.tokens(node)
        if tokens is not None:
            found.add((letters[tokens.dim], tokens.at(0)))
    if len(found) != 1:
        call.refuse(BY_HAND)
    ((letter, tokens),) = found
    if letter not in out:
        call.refuse(_MIXED)
    for letters, node in zip(inputs.split(","), nodes, strict=True):
        call.want(node, tokens.at(letters.index(letter)) if letter in letters else None)
    return tokens.at(out.index(letter))
