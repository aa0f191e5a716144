"""Linear layers that sum over tokens, and convolutions. Other products have rows only."""

from __future__ import annotations

from dataclasses import replace

import torch

from deepsp import placement
from deepsp.compile.sharding.rules import Call, by_rows, overloads, refused, rule
from deepsp.compile.sharding.rules.views import PADS
from deepsp.compile.sharding.tokens import Tokens, same, size_of
from deepsp.placement import SUM, Row

aten = torch.ops.aten

_BORDERS = "a convolution along the sequence needs other ranks' tokens at the borders"
refused("convolution conv_transpose1d conv_transpose2d conv_transpose3d _convolution", _BORDERS)
refused("conv_tbc", _BORDERS)
_NOT_CAUSAL = (
    "it is a convolution that sees tokens after each one's own; if it should be causal, pad before "
    "the sequence only, F.pad(x, (kernel_size - 1, 0)), or by kernel_size - 1 on both sides and "
    "keep the first tokens, conv(x)[..., :x.size(-1)]"
)
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


@rule(*overloads("conv1d conv2d conv3d"))
def convolution(call: Call) -> Tokens:
    """[B, C, ...]. Patches that don't overlap become tokens; else each token sees those before."""
    x, weight = call.node.args[:2]
    call.only(x)
    tokens, graph = call.one_of(), call.graph
    if tokens.dim < 2:
        return by_rows(call)

    def along(name):
        value = call[name]
        return value if isinstance(value, str) else value[(tokens.dim - 2) % len(value)]

    size = call.shape(weight)[tokens.dim]
    full = call.shape(x)[tokens.dim]
    count = call.out[tokens.dim]
    padding = along("padding") if size != 1 or along("padding") != "same" else 0
    padding = 0 if padding == "valid" else padding
    if along("stride") == 1 and size != 1:
        return _causal(call, tokens, padding, (size - 1) * along("dilation"))
    disjoint = along("stride") == size and padding == 0 and along("dilation") == 1
    if not disjoint or not graph.equal(size_of(count * size), full):
        call.refuse(_BORDERS)
    if size == 1:
        return tokens
    if graph.values[x].full is None:
        call.refuse("it makes patches of tokens that are sharded")
    patches = Tokens(tokens.dim, count, graph.sequence(count))
    call.want(x, replace(patches, inner=size))
    return patches


def _causal(call: Call, tokens: Tokens, padding: int | str, before: int) -> Tokens:
    """A rank computes the results whose last token it has, of the ``before`` tokens before it, too.
    Padding behind the sequence is the last rank's; that before it are the first rank's zeros."""
    x, graph, dim = call.node.args[0], call.graph, tokens.dim
    if padding == "same" or padding > before or not tokens.alone:
        call.refuse(_NOT_CAUSAL if padding == "same" else _BORDERS)
    ends = tokens.extended(0, padding) if padding else tokens
    window = ends.sequence if padding == before else None
    if window is None:
        window, _ = call.window(ends.sequence, before - padding, ends.length)
    new = Tokens(dim, call.out[dim], window)
    unshifted = call.tokens(x.args[0]) if x.target in PADS else tokens
    if unshifted and same(new.length, unshifted.length) and new.sequence != unshifted.sequence:
        call.refuse(_NOT_CAUSAL)

    def padded(node, sizes: list[int]):
        sizes = [0] * (2 * (len(call.shape(x)) - 1 - dim)) + sizes
        return graph.call(aten.constant_pad_nd.default, node, sizes, 0)

    def lower():
        graph.settle(ends.sequence, before)
        rank, local = graph.rank, call.operand(x)
        if padding and rank == graph.size - 1:
            local = padded(local, [0, padding])
        args = (local, before, dim, graph.lens(ends), rank, graph.name)
        earlier = graph.call(torch.ops.deepsp.previous_tokens.default, *args)
        local = graph.call(aten.cat.default, [earlier, local], dim)
        kept = graph.int_(new.sequence.lens[rank])
        empty = ends.sequence.lens[rank] == 0
        padding_of = call["padding"]
        if not isinstance(padding_of, str):
            dims = range(len(call.shape(x)) - 2)
            padding_of = [0 if d == dim - 2 else padding_of[d % len(padding_of)] for d in dims]
        # A rank without tokens convolves one that nobody reads.
        out = call.replaced(input=padded(local, [0, 1]) if empty else local, padding=padding_of)
        if not empty and new.sequence == ends.sequence:
            return out
        first = graph.int_(size_of(ends.sequence.lens[rank] - new.sequence.lens[rank]))
        return graph.call(aten.narrow.default, out, dim, first, kept)

    call.lower, call.decision = lower, f"{before} tokens before each rank's own"
    return new
