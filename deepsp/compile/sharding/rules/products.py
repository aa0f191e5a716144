"""Linear layers and products.

A product is sharded along one index of its operands. An index of the result stays sharded; over one
that is summed, each rank sums its tokens, and the ranks' sums are added. Where two operands are
sharded along different indices, as a query and a key are, the one that the result doesn't follow
is gathered: attention by hand has its queries' tokens on each rank, and all keys and values.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import fx

from deepsp import dims
from deepsp.compile.sharding.rules import Call, refused, rule
from deepsp.compile.sharding.tokens import Tokens, same, size_of

aten = torch.ops.aten

_BORDERS = "a convolution along the sequence needs other ranks' tokens at the borders"
refused("convolution conv_transpose1d conv_transpose2d conv_transpose3d _convolution", _BORDERS)
refused("conv_tbc", _BORDERS)
refused("lstm gru rnn_tanh rnn_relu lstm_cell", "its recurrence goes from token to token")
refused("cov corrcoef", "it sums over tokens, and there is no rule for that")


@rule(aten.cdist.default)
def cdist(call: Call) -> Tokens:
    """[..., P, M] and [..., R, M] to [..., P, R]: each row of one with all of the other."""
    x, y = call.node.args[:2]
    ndim = len(call.out)
    for node, other, place in ((x, y, -2), (y, x, -1)):
        tokens = call.tokens(node)
        if tokens is None or tokens.dim != len(call.shape(node)) - 2:
            continue
        if call.tokens(other) is not None and call.graph.values[other].full is None:
            call.refuse("both of its operands are sharded")
        call.want(other, None)
        return tokens.at(ndim + place)
    call.refuse("it sums over tokens, and there is no rule for that")


@dataclass
class Operand:
    """A node, a name for each of its dimensions (None: broadcast), and where its tokens are."""

    node: fx.Node
    labels: list
    tokens: Tokens | None
    fixed: bool  # each rank has its tokens only

    @property
    def label(self):
        return None if self.tokens is None else self.labels[self.tokens.dim]


def contract(call: Call, operands: list[tuple[fx.Node, list]], out: list) -> Tokens | None:
    """Wants the operands of a product so that one of their indices is sharded. Returns where the
    tokens are in the result, or None if the product sums over them; ``call.lower`` then adds the
    ranks' sums."""
    known = []
    for node, labels in operands:
        # A size of one is the same for all of an index.
        sizes = zip(labels, call.shape(node), strict=True)
        labels = [None if same(size, 1) else label for label, size in sizes]
        fixed = call.graph.values[node].full is None
        known.append(Operand(node, labels, call.tokens(node), fixed))
    label, tokens = _followed(call, known, out)
    for x in known:
        place = tokens.at(x.labels.index(label)) if label in x.labels else None
        if x.fixed and x.label != label:
            call.graph.attended.add(x.node)
            call.gather(x.node, place)
        else:
            call.want(x.node, place)
    if label in out:
        return tokens.at(out.index(label))
    call.lower = lambda: call.graph.all_reduce(call.same_op())
    call.said = "Partial, all-reduced"
    return None


def _followed(call: Call, known: list[Operand], out: list) -> tuple:
    """The index along which the product is sharded, and its tokens."""
    sharded = [x for x in known if x.fixed] or [x for x in known if x.tokens is not None]
    for x in sharded:
        if x.label in out:
            return x.label, x.tokens
    summed = sharded[0]
    # A square matrix that every rank has in full, as a mask: its rows are tokens, too.
    for x in known:
        for label, size in zip(x.labels, call.shape(x.node), strict=True):
            rows = label in out and summed.label in x.labels and label is not None
            if not x.fixed and rows and same(size, summed.tokens.full):
                return label, summed.tokens
    return summed.label, summed.tokens


def _product(call: Call, of, *operands: fx.Node) -> Tokens | None:
    """``of``: what says how the operands' dimensions go together."""
    labels, out = of(*(len(call.shape(x)) for x in operands))
    return contract(call, list(zip(operands, labels, strict=True)), out)


@rule(aten.linear.default)
def linear(call: Call) -> Tokens | None:
    tokens = _product(call, dims.linear, *call.node.args[:2])
    bias, graph = call["bias"], call.graph
    if bias is None:
        return tokens
    if tokens is not None:
        call.want(bias, tokens.at(0) if tokens.dim == len(call.out) - 1 else None)
        return tokens

    def lower():  # the bias is added once to what is summed over the ranks
        total = graph.all_reduce(call.replaced(bias=None))
        return graph.call(aten.add.Tensor, total, graph.full(bias))

    call.lower = lower
    return None


@rule(aten.matmul.default, aten.mm.default, aten.bmm.default, aten.mv.default, aten.dot.default)
def matmul(call: Call) -> Tokens | None:
    return _product(call, dims.matmul, *call.node.args[:2])


@rule(aten.addmm.default, aten.baddbmm.default)
def addmm(call: Call) -> Tokens | None:
    bias, a, b = call.node.args[:3]
    tokens = _product(call, dims.matmul, a, b)
    if tokens is None:
        call.refuse("it sums over tokens and adds a tensor; use two ops")
    shape = call.shape(bias)
    dim = tokens.dim - (len(call.out) - len(shape))
    call.want(bias, tokens.at(dim) if dim >= 0 and not same(shape[dim], 1) else None)
    return tokens


@rule(aten.einsum.default)
def einsum(call: Call) -> Tokens | None:
    equation, nodes = call.node.args[:2]
    inputs, out = dims.einsum(equation, [len(call.shape(n)) for n in nodes])
    return contract(call, [*zip(nodes, inputs, strict=True)], out)


@rule(aten.bilinear.default)
def bilinear(call: Call) -> Tokens:
    a, b = call.node.args[:2]
    call.only(a, b)
    tokens = call.one_of()
    if tokens.dim == len(call.out) - 1:
        call.refuse("the tokens are in its feature dimension, which it mixes")
    for x in (a, b):
        call.want(x, tokens)
    return tokens


@rule(aten.conv1d.default, aten.conv2d.default, aten.conv3d.default)
def convolution(call: Call) -> Tokens:
    """[B, C, ...]: patches that don't overlap are a token each."""
    x, weight = call.node.args[:2]
    call.only(x)
    tokens, graph = call.one_of(), call.graph
    if tokens.dim == 0:
        return tokens
    if tokens.dim == 1:
        call.refuse("the tokens are in its channel dimension, which it mixes")

    def along(name):
        given = call[name]
        return given[(tokens.dim - 2) % len(given)]

    size = call.shape(weight)[tokens.dim]
    full = call.shape(x)[tokens.dim]
    count = call.out[tokens.dim]
    apart = along("stride") == size and along("padding") == 0 and along("dilation") == 1
    if not apart or not graph.equal(size_of(count * size), full):
        call.refuse(_BORDERS)
    if size == 1:
        return tokens
    if graph.values[x].full is None:
        call.refuse("it makes patches of tokens that are sharded")
    patches = Tokens(tokens.dim, count, graph.sequence(count))
    call.want(x, replace(patches, inner=size))
    return patches
