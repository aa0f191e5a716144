"""Sequences that were joined, such as those of an image and of a text: each rank has some tokens
of each."""

from __future__ import annotations

import torch
from torch import fx

from deepsp.compile.sharding.tokens import JOINED, Sequence, Size, Tokens, same, size_of

aten = torch.ops.aten


def taken(graph, x: fx.Node, dim: int, runs: list) -> fx.Node:
    """Runs of indices of a dimension, by begin and length, one after another."""
    pieces = [
        graph.call(aten.narrow.default, x, dim, graph.int_(first), graph.int_(many))
        for first, many in runs
    ]
    return pieces[0] if len(pieces) == 1 else graph.call(aten.cat.default, pieces, dim)


def padded(graph, x: fx.Node, dim: int, ends: tuple[Size, Size], value: float = 0) -> fx.Node:
    """With so many elements of ``value`` before and behind those of a dimension."""
    sizes = [0] * (2 * (graph.env[x].dim() - 1 - dim)) + graph.shape(ends)
    return graph.call(aten.constant_pad_nd.default, x, sizes, value)


def by_rank(graph, x: fx.Node, dim: int, sequence: Sequence) -> fx.Node:
    """A tensor of the full sequences, in the order of the ranks' tokens."""
    return taken(graph, x, dim, [run for r in range(graph.size) for run in sequence.pieces(r)])


def in_order(graph, x: fx.Node, dim: int, sequence: Sequence) -> fx.Node:
    """The inverse of :func:`by_rank`."""
    before, runs = [sequence.begin(r) for r in range(graph.size)], []
    for _, part in sequence.joined:
        runs += zip(before, part.lens, strict=True)
        before = [size_of(n + m) for n, m in zip(before, part.lens, strict=True)]
    return taken(graph, x, dim, runs)


def join(call, nodes: list, dim: int) -> Tokens:
    """The tokens of a concatenation in which each rank has some of every tensor."""
    parts: list[tuple[Size, Sequence]] = []
    for node in nodes:
        tokens = call.tokens(node).plain
        if tokens.dim != dim or not tokens.is_whole:
            call.refuse("it concatenates tokens that are sharded along different dimensions")
        parts += tokens.sequence.joined or ((tokens.length, tokens.sequence),)
    return Tokens(dim, call.out[dim], Sequence.join(parts), order=JOINED)


def part_of(call, x: fx.Node, tokens: Tokens, begin: Size, end: Size):
    """A slice of joined sequences, which must be some of these in full: where its tokens are, and a
    function that makes their node."""
    borders, graph = tokens.sequence.borders(), call.graph
    spans = [
        (i, j)
        for i in range(len(borders))
        for j in range(i + 1, len(borders))
        if same(borders[i], begin) and same(borders[j], end)
    ]
    if not spans or not tokens.is_whole:
        call.refuse(
            f"it selects tokens {begin} to {end} of sequences that were concatenated, which begin "
            f"and end at {', '.join(map(str, borders))}"
        )
    i, j = spans[0]
    parts = tokens.sequence.joined
    skipped, kept = (
        size_of(sum(part.lens[graph.rank] for _, part in some)) for some in (parts[:i], parts[i:j])
    )
    one = j - i == 1
    sequence = parts[i][1] if one else Sequence.join(parts[i:j])
    new = Tokens(tokens.dim, size_of(end - begin), sequence, order=None if one else JOINED)
    return new, lambda: taken(graph, call.operand(x), tokens.dim, [(skipped, kept)])
