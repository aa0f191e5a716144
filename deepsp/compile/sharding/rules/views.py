"""Ops that move elements: reshapes, permutations, slices, concatenations."""

from __future__ import annotations

import sys
from dataclasses import replace

import sympy
import torch

from deepsp.compile.sharding import joined
from deepsp.compile.sharding.redistribute import ranges
from deepsp.compile.sharding.rules import Call, along_tokens, by_rows, decomposed, refused, rule
from deepsp.compile.sharding.tokens import (
    JOINED,
    Sequence,
    Size,
    Tokens,
    product,
    quotient,
    same,
    size_of,
)

aten = torch.ops.aten
PADS = (aten.pad.default, aten.constant_pad_nd.default)

_MOVED = "it moves tokens along the sequence, from one rank to another"
refused("rot90 as_strided tril_indices", _MOVED)
decomposed("diff expand_as view_as reshape_as")


@rule(
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.flatten.using_ints,
    aten.unflatten.int,
    aten.squeeze.default,
)
def reshape(call: Call) -> Tokens:
    x, out = call.node.args[0], call.out
    tokens = call.tokens(x)
    new = tokens.reshaped(call.shape(x), out)
    new = _rows_of(call, x, tokens.plain, out) if new is None else new
    if new is None:
        call.refuse(
            f"it reshapes {_text(call.shape(x))} to {_text(out)}, which splits the sequence "
            "differently from the ranks"
        )

    def lower():
        shape = call.graph.shape(new.part(out, call.graph.rank))
        # A local tensor's strides may differ from the full one's.
        return call.graph.call(aten.reshape.default, call.operand(x), shape)

    call.lower = lower
    return new


def _rows_of(call: Call, x, tokens: Tokens, out: list) -> Tokens | None:
    """Where the tokens are if their dimension is split into rows: each rank gets whole ones."""
    if not tokens.alone:
        return None
    shape = call.shape(x)
    before = product(shape[: tokens.dim])
    for dim, rows in enumerate(out):
        wide = quotient(tokens.length, rows)
        if wide is not None and same(product(out[:dim]), before):
            if isinstance(rows, int) and rows < call.graph.size:
                return None
            sequence = call.graph.sequence(rows)
            lens = tuple(size_of(n * wide) for n in sequence.lens)
            call.want(x, replace(tokens, sequence=Sequence(lens)))
            return Tokens(dim, rows, sequence)
    return None


def _text(shape) -> str:
    return "[" + ", ".join(str(n) for n in shape) + "]"


@rule(aten.squeeze.dim, aten.squeeze.dims)
def squeeze(call: Call) -> Tokens:
    x = call.node.args[0]
    shape, gone = call.shape(x), call["dim"]
    gone = [d % len(shape) for d in ([gone] if isinstance(gone, int) else gone)]
    gone = [d for d in gone if isinstance(shape[d], int) and shape[d] == 1]
    # Sizes of 1 in the full tensor only: a part may have one token.
    call.lower = lambda: call.graph.call(aten.squeeze.dims, call.operand(x), gone)
    return by_rows(call)


def window(call: Call, x, tokens: Tokens, begin, end):
    """This rank's tokens between ``begin`` and ``end``: where they are, and their nodes."""
    tokens = call.unmerged(tokens)
    sequence, before = call.window(tokens.sequence, begin, end)
    new = Tokens(tokens.dim, size_of(end - begin), sequence)
    rank, graph = call.graph.rank, call.graph

    def lower():
        length = new.sequence.lens[rank]
        if graph.mode.shape_env.bound_sympy(sympy.sympify(length)).upper == 0:
            length = 0  # Inductor doesn't compile a sum over symbolic sizes that are 0 for sure
        start, length = graph.int_(before[rank]), graph.int_(length)
        return graph.call(aten.narrow.default, call.operand(x), tokens.dim, start, length)

    return new, lower


@rule(aten.slice.Tensor, aten.narrow.default)
def slice_(call: Call) -> Tokens:
    x, tokens = call.node.args[0], call.one_of()
    shape, out = call.shape(x), call.out
    dim = call["dim"] % len(shape)
    if dim != tokens.dim:
        return by_rows(call)
    if same(out[dim], shape[dim]) and call["step"] in (None, 1):
        call.lower = lambda: call.graph.call(aten.alias.default, call.operand(x))
        return tokens
    if call.graph.values[x].full is not None:
        call.refuse("it selects tokens of a replicated tensor")
    begin = _index(call, call["start"] if call["start"] is not None else 0, shape[dim])
    if call["step"] not in (None, 1) and not same(out[dim], 1):
        return _every(call, x, tokens, begin)
    if tokens.order == JOINED:
        new, call.lower = joined.part_of(call, x, tokens, begin, size_of(begin + out[dim]))
        return new
    if same(out[dim], 1):
        return _one_token(call, x, tokens, begin, keepdim=True)
    new, call.lower = window(call, x, tokens, begin, size_of(begin + out[dim]))
    return new


def _every(call: Call, x, tokens: Tokens, begin: Size) -> Tokens:
    """One token of every ``step``."""
    tokens = call.unmerged(tokens)
    graph, dim, step = call.graph, tokens.dim, call["step"]
    count = call.out[dim]
    sequence = graph.sequence(count)
    want = [
        [
            (
                size_of(begin + sequence.begin(r) * step),
                0 if same(n, 0) else size_of((n - 1) * step + 1),
            )
        ]
        for r, n in enumerate(sequence.lens)
    ]
    call.lower = lambda: graph.call(
        aten.slice.Tensor, ranges(graph, x, tokens, want), dim, 0, sys.maxsize, step
    )
    call.decision = "tokens moved between ranks"
    return Tokens(dim, count, sequence)


@along_tokens("flip roll")
def turned(call: Call, tokens: Tokens) -> Tokens:
    """Tokens go to the ranks that have their new places."""
    x, graph, dim, name = call.node.args[0], call.graph, tokens.dim, call.target._opname
    tokens = call.unmerged(tokens)
    if not call["dims"]:
        call.refuse("it moves the elements of merged dimensions; pass dims")
    length, lens = tokens.length, tokens.sequence.lens
    places = [d % len(call.shape(x)) for d in call["dims"]]
    shift: Size = 0
    if name == "roll":
        shifts = [_number(n) for n in call["shifts"]]
        shift = sum(n for d, n in zip(places, shifts, strict=True) if d == dim)
        if isinstance(shift, int) and isinstance(length, int):
            shift %= length
        if graph.holds(shift < 0):
            shift = size_of(shift + length)
        if graph.holds(shift < 0) or graph.holds(shift > length):
            call.refuse("it moves tokens by more than the length of the sequence")
    want = []
    for rank, n in enumerate(lens):
        first = tokens.sequence.begin(rank)
        if name == "flip":
            want.append([(size_of(length - first - n), n)])
            continue
        first = size_of(first - shift)
        wrapped = 0
        if graph.holds(first < 0):
            wrapped = n if graph.holds(first + n <= 0) else size_of(-first)
        want.append(
            [(size_of(first + length), wrapped), (size_of(first + wrapped), size_of(n - wrapped))]
        )

    def lower():
        new = ranges(graph, x, tokens, want)
        if name == "flip":
            return graph.call(aten.flip.default, new, places)
        others = [(n, d) for n, d in zip(call["shifts"], places, strict=True) if d != dim]
        if others:
            others = graph.mapped(tuple(zip(*others, strict=True)), graph.full)
            new = graph.call(aten.roll.default, new, *map(list, others))
        return new

    call.lower, call.decision = lower, "tokens moved between ranks"
    return tokens


@rule(aten.select_scatter.default, aten.slice_scatter.default)
def written(call: Call) -> Tokens:
    """Writes some tokens, on the ranks that have them."""
    x, new, graph = call["self"], call["src"], call.graph
    tokens = call.tokens(x)
    if tokens is None or call["dim"] % len(call.shape(x)) != tokens.dim:
        return by_rows(call)
    dim, one = tokens.dim, call.target is aten.select_scatter.default
    if call["step"] not in (None, 1):
        call.refuse("it writes one of several tokens; use torch.where with a mask of the tokens")
    if not call.is_fixed(x):
        call.refuse("it writes tokens into a replicated tensor")
    tokens, length = call.unmerged(tokens), call.shape(x)[dim]
    begin = _index(call, call["index"] if one else call["start"] or 0, length)
    count = 1 if one else call.shape(new)[dim]
    sequence, before = call.window(tokens.sequence, begin, size_of(begin + count))
    if one and call.tokens(new) is not None:
        call.refuse("it writes tokens into the place of one token")
    call.want(new, None if call.tokens(new) is None else Tokens(dim, count, sequence))
    rank = graph.rank

    def lower():
        part = call.operand(new)
        if one:
            part = graph.call(aten.unsqueeze.default, part, dim)
        if call.tokens(new) is None:
            # Take no tokens, but keep the gradient: every rank sums it.
            skipped = size_of(sum(sequence.lens[:rank]))
            part = graph.call(
                aten.narrow.default, part, dim, graph.int_(skipped), graph.int_(sequence.lens[rank])
            )
        first = graph.int_(before[rank])
        end = graph.int_(size_of(before[rank] + sequence.lens[rank]))
        return graph.call(aten.slice_scatter.default, call.operand(x), part, dim, first, end)

    call.lower = lower
    return tokens


@rule(aten.split_with_sizes.default)
def split(call: Call) -> list[Tokens]:
    x, tokens = call.node.args[0], call.one_of()
    if call["dim"] % len(call.shape(x)) != tokens.dim:
        return by_rows(call)
    if call.graph.values[x].full is not None:
        call.refuse("it splits a replicated tensor along the sequence")
    begin, parts, lowered = 0, [], []
    for piece in call.node.meta["val"]:
        end = size_of(begin + size_of(piece.shape[tokens.dim]))
        select = joined.part_of if tokens.order == JOINED else window
        new, lower = select(call, x, tokens, begin, end)
        parts.append(new)
        lowered.append(lower)
        begin = end
    call.lower = lambda: call.graph.call(tuple, [lower() for lower in lowered])
    return parts


def _number(value) -> Size:
    return value if isinstance(value, int) else size_of(value.meta["val"])


def _index(call: Call, value, length):
    """An index into the sequence, counted from its beginning and clamped."""
    value = _number(value)
    if isinstance(value, int) and value >= sys.maxsize:
        return length
    if call.graph.holds(value < 0):
        value = size_of(value + length)
    if call.graph.holds(value < 0):
        return 0
    return length if call.graph.holds(value > length) else value


def _one_token(call: Call, x, tokens: Tokens, begin, keepdim: bool) -> None:
    """The rank that has the token broadcasts it, by a sum with the others' zeros."""
    _, cut = window(call, x, tokens, begin, size_of(begin + 1))
    graph = call.graph

    def lower():
        dtype = call.node.meta["val"].dtype
        local = graph.call(aten.sum.dim_IntList, cut(), [tokens.dim], keepdim, dtype=dtype)
        return graph.all_reduce(local)

    call.lower, call.decision = lower, "one token, broadcast to all ranks"


@rule(aten.select.int)
def select(call: Call) -> Tokens | None:
    x, tokens = call.node.args[0], call.one_of()
    dim = call["dim"] % len(call.shape(x))
    if dim != tokens.dim:
        return by_rows(call)
    return _one_token(call, x, tokens, _index(call, call["index"], call.shape(x)[dim]), False)


@rule(aten.cat.default, aten.concat.default, aten.concatenate.default)
def cat(call: Call) -> Tokens:
    nodes = [n for n in call.node.args[0] if call.shape(n) != [0]]
    dim = call["dim"] % len(call.out)
    if len(nodes) == 1:  # the others are empty, as a cache at first
        (x,) = nodes
        call.lower = lambda: call.graph.call(aten.alias.default, call.operand(x))
        return call.one_of()
    if any(t is not None and t.dim == dim for t in map(call.tokens, nodes)):
        return _longer(call, nodes, dim)
    return by_rows(call)


def _longer(call: Call, nodes: list, dim: int) -> Tokens:
    """Puts replicated tokens before a sequence, on the first rank, or after it, on the last."""
    fixed = [n for n in nodes if call.graph.values[n].full is None]
    if len(fixed) == len(nodes):
        return joined.join(call, nodes, dim)
    if len(fixed) != 1:
        call.refuse(
            "it concatenates several sequences and tokens that every rank has; concatenate the "
            "sequences first"
        )
    (x,) = fixed
    tokens = call.tokens(x)
    if tokens.dim != dim or not same(tokens.outer, 1) or tokens.order is not None:
        call.refuse("it concatenates tokens that are sharded along different dimensions")
    graph, position = call.graph, nodes.index(x)
    before, after = (
        size_of(sum(call.shape(n)[dim] for n in others))
        for others in (nodes[:position], nodes[position + 1 :])
    )
    for node in nodes:
        if node is not x:
            call.want(node, None)

    def lower():
        taken = []
        for i, node in enumerate(nodes):
            new = call.operand(node)
            if i != position and graph.rank != (0 if i < position else graph.size - 1):
                # Take no tokens, but keep the gradient: every rank sums it.
                new = graph.call(aten.narrow.default, new, dim, 0, 0)
            taken.append(new)
        return graph.call(aten.cat.default, taken, dim)

    call.lower = lower
    return tokens.extended(before, after)


@rule(*PADS)
def pad(call: Call) -> Tokens:
    """Padding before a sequence goes to the first rank, behind it to the last."""
    x, tokens = call.node.args[0], call.one_of()
    sizes, place = list(call["pad"]), 2 * (len(call.shape(x)) - 1 - tokens.dim)
    ends = sizes[place : place + 2]
    constant = call["mode"] in (None, "constant")
    constant = constant and all(isinstance(n, int) for n in ends)
    if not any(ends) or not constant or not tokens.plain.alone:
        return by_rows(call)
    graph, taken = call.graph, lambda: call.operand(x)
    if min(ends) < 0:  # it takes tokens off
        begin, end = max(-ends[0], 0), size_of(tokens.plain.length + min(ends[1], 0))
        tokens, taken = window(call, x, tokens.plain, begin, end)
        ends = [max(n, 0) for n in ends]

    def lower():
        mine = list(sizes)
        mine[place] = ends[0] * (graph.rank == 0)
        mine[place + 1] = ends[1] * (graph.rank == graph.size - 1)
        return call.replaced(self=taken(), pad=graph.mapped(mine, call.operand))

    call.lower = lower
    return tokens.extended(*ends)


@rule(aten.diagonal.default)
def diagonal(call: Call) -> Tokens:
    """Each rank has the diagonal of its rows, or columns."""
    x, tokens, graph = call.node.args[0], call.one_of(), call.graph
    dims = [call[name] % len(call.shape(x)) for name in ("dim1", "dim2")]
    if tokens.dim not in dims:
        return by_rows(call)
    if not tokens.plain.alone or call["offset"] or len({call.shape(x)[d] for d in dims}) > 1:
        call.refuse("it takes another diagonal than the main one of a square matrix of tokens")
    first = tokens.plain.sequence.begin(graph.rank)
    first = graph.int_(first if tokens.dim == dims[0] else size_of(-first))
    call.lower = lambda: graph.call(aten.diagonal.default, call.operand(x), first, *dims)
    return tokens.plain.at(len(call.out) - 1)


@rule(torch.ops.deepsp.replicated.default)
def replicated(call: Call) -> None:
    x, tokens, graph = call["input"], call.one_of(), call.graph
    call.lower = lambda: graph.all_gather(call.operand(x), call.shape(x), tokens)
    call.decision = "gathered, Replicate"


@rule(aten.repeat.default)
def repeat(call: Call) -> Tokens:
    x, tokens = call.node.args[0], call.one_of()
    times = call["repeats"]
    place = tokens.dim + len(times) - len(call.shape(x))
    if tokens.order is not None:
        call.refuse("it repeats tokens that were sorted")
    return replace(tokens.at(place), outer=size_of(tokens.outer * _number(times[place])))


@rule(aten.repeat_interleave.self_int)
def repeat_interleave(call: Call) -> Tokens:
    x, tokens = call.node.args[0], call.one_of()
    if call["dim"] is None:
        call.refuse("it repeats the elements of the flattened tensor; pass dim")
    if call["output_size"] is not None:
        args = call.graph.mapped((call["repeats"], call["dim"]), call.operand)
        call.lower = lambda: call.graph.call(call.target, call.operand(x), *args)
    if call["dim"] % len(call.shape(x)) != tokens.dim:
        return tokens
    if tokens.order is not None:
        call.refuse("it repeats tokens that were sorted")
    return replace(tokens, inner=size_of(tokens.inner * _number(call["repeats"])))


@rule(aten.expand.default, aten.broadcast_to.default)
def expand(call: Call) -> Tokens:
    x, out = call.node.args[0], call.out
    tokens = call.tokens(x)
    place = tokens.at(tokens.dim + len(out) - len(call.shape(x)))

    def lower():
        shape = call.graph.shape(place.part(out, call.graph.rank))
        return call.graph.call(aten.expand.default, call.operand(x), shape)

    call.lower = lower
    return place
