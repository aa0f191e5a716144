"""Moves tokens between ranks: from where a tensor has them to where an op needs them, as when a
sequence is shifted. A rank is sent the tokens that it lacks, and no others."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import fx

from deepsp.compile.sharding import joined
from deepsp.compile.sharding.report import CannotShard
from deepsp.compile.sharding.tokens import Size, Tokens, product, same, size_of

_aten, _ours = torch.ops.aten, torch.ops.deepsp

Runs = list[tuple[Size, Size]]
"""Consecutive tokens of the full sequence: begin and length of each run, in a part's order."""


@dataclass(frozen=True)
class Block:
    """Consecutive tokens of a part that are together in a rank's part before."""

    source: int  # the rank
    start: Size  # in its part
    length: Size
    travels: bool


def movable(have: Tokens, want: Tokens) -> bool:
    """Whether tokens need only go to other ranks to be where ``want`` has them."""
    have, want = have.plain, want.plain
    return (
        have.dim == want.dim
        and not (have.is_sorted or want.is_sorted)
        and same(have.length, want.length)
        and same(have.outer, want.outer)
        and same(have.inner, want.inner)
    )


def ranges(graph, node: fx.Node, tokens: Tokens, want: list[Runs]) -> fx.Node:
    """The tokens of an old node's value that each rank wants."""
    value = graph.values[node]
    if value.full is not None:
        return joined.taken(graph, graph.partial_grad(value.full), tokens.dim, want[graph.rank])
    return fetched(graph, value.local, graph.shape_of(node), tokens, want)


def fetched(graph, local: fx.Node, shape: list[Size], tokens: Tokens, want: list[Runs]) -> fx.Node:
    """The tokens that each rank wants instead of its part of a tensor of ``shape``."""
    have = [tokens.sequence.pieces(r) for r in range(graph.size)]
    dim, inner = tokens.dim, tokens.inner
    if same(tokens.outer, 1):
        have, want = (
            [[(size_of(b * inner), size_of(n * inner)) for b, n in runs] for runs in x]
            for x in (have, want)
        )
        return redistribute(graph, local, dim, have, want)
    part = [*shape[:dim], tokens.outer, tokens.sequence.lens[graph.rank], inner]
    x = graph.call(_aten.reshape.default, local, graph.shape([*part, *shape[dim + 1 :]]))
    x = redistribute(graph, x, dim + 1, have, want)
    count = size_of(tokens.outer * sum(n for _, n in want[graph.rank]) * inner)
    part = [*shape[:dim], count, *shape[dim + 1 :]]
    return graph.call(_aten.reshape.default, x, graph.shape(part))


def redistribute(graph, local: fx.Node, dim: int, have: list[Runs], want: list[Runs]) -> fx.Node:
    """A rank's tokens ``want[rank]`` along ``dim`` of a tensor of which each rank has ``have``.
    Ranks may want the same tokens; the gradients of a token are summed where it was."""
    rank, ranks = graph.rank, range(graph.size)
    blocks = [_blocks(graph, have, want[to], to) for to in ranks]
    if not any(b.travels for part in blocks for b in part):
        return _joined(graph, [_piece(graph, local, dim, b) for b in blocks[rank]], local, dim)
    blocks = [_with_arrival(part) for part in blocks]
    counts = [
        [
            size_of(sum(b.length for b in part if b.travels and b.source == source))
            for part in blocks
        ]
        for source in ranks
    ]
    sent = [
        _piece(graph, local, dim, b)
        for part in blocks
        for b in part
        if b.travels and b.source == rank
    ]
    rows = _joined(graph, sent, local, dim)
    rest = [size_of(n) for d, n in enumerate(graph.env[local].shape) if d != dim]
    rows = graph.call(_aten.movedim.int, rows, dim, 0)
    total = size_of(sum(counts[rank]))
    rows = graph.call(_aten.reshape.default, rows, graph.shape([total, product(rest)]))
    where = (graph.shape(n for row in counts for n in row), False, rank, graph.name)
    buffer = graph.call(_ours._rows_start.default, rows, *where)
    got = graph.call(_ours._rows_wait.default, buffer, *where)
    total = size_of(sum(row[rank] for row in counts))
    got = graph.call(_aten.reshape.default, got, graph.shape([total, *rest]))
    got = graph.call(_aten.movedim.int, got, 0, dim)
    pieces: dict[int, fx.Node] = {}
    arrived: Size = 0
    for n, b in sorted(enumerate(blocks[rank]), key=lambda x: x[1].source):  # as they arrive
        x = got if b.travels else local
        pieces[n] = _piece(graph, x, dim, replace(b, start=arrived) if b.travels else b)
        arrived = size_of(arrived + b.length) if b.travels else arrived
    return _joined(graph, [pieces[n] for n in sorted(pieces)], got, dim)


def _with_arrival(part: list[Block]) -> list[Block]:
    """If a rank would receive nothing, it sends itself a token: in its graph, too, the exchange has
    a result that is used, so that no compiler drops it there alone."""
    if not part or any(b.travels for b in part):
        return part
    first, *others = part
    rest = replace(first, start=size_of(first.start + 1), length=size_of(first.length - 1))
    return [replace(first, length=1, travels=True), rest, *others]


def _piece(graph, x: fx.Node, dim: int, block: Block) -> fx.Node:
    sizes = graph.int_(block.start), graph.int_(block.length)
    return graph.call(_aten.narrow.default, x, dim, *sizes)


def _joined(graph, pieces: list[fx.Node], like: fx.Node, dim: int) -> fx.Node:
    if not pieces:
        return graph.call(_aten.narrow.default, like, dim, 0, 0)
    return pieces[0] if len(pieces) == 1 else graph.call(_aten.cat.default, pieces, dim)


def _blocks(graph, have: list[Runs], want: Runs, to: int) -> list[Block]:
    """Where the tokens of rank ``to``'s part are now. Guards settle it, the same on all ranks."""
    sources, hint = [], graph.hint
    for rank, runs in enumerate(have):
        start: Size = 0
        for begin, length in runs:
            if hint(length):
                sources.append((rank, start, begin, size_of(begin + length)))
            start = size_of(start + length)
    sources.sort(key=lambda x: hint(x[2]))
    blocks = []
    for begin, length in want:
        end, covered = size_of(begin + length), begin
        for rank, start, first, last in sources:
            if hint(length) == 0 or hint(first) >= hint(end) or hint(last) <= hint(begin):
                continue
            low = begin if graph.holds(begin >= first) else first
            high = end if graph.holds(end <= last) else last
            if not graph.equal(low, covered) or not graph.holds(high > low):
                break
            covered = high
            start = size_of(start + low - first)
            blocks.append(Block(rank, start, size_of(high - low), rank != to))
        if not graph.equal(covered, end):
            raise CannotShard(
                f"it needs tokens {begin} to {end}, which the ranks don't have", graph.current
            )
    return blocks
