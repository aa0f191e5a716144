"""Lookups, and ops along other dimensions than the sequence."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from deepsp.compile.sharding.joined import padded
from deepsp.compile.sharding.rules import Call, along_tokens, by_rows, decomposed, refused, rule
from deepsp.compile.sharding.tokens import Tokens, same

aten, ours = torch.ops.aten, torch.ops.deepsp

_AMONG = "along the sequence it depends on all earlier tokens, or on all of them"
refused("nonzero masked_select unique _unique2 searchsorted", _AMONG)
decomposed("nanmean take_along_dim")
refused("bincount", "its length depends on all tokens; use F.one_hot(x, n), summed over the tokens")


@rule(aten.embedding.default)
def embedding(call: Call) -> Tokens:
    if call["scale_grad_by_freq"] or call["sparse"]:
        call.refuse("scale_grad_by_freq and sparse gradients need all tokens' indices at once")
    return by_rows(call)


@rule(aten.one_hot.default)
def one_hot(call: Call) -> Tokens:
    if call["num_classes"] == -1:
        call.refuse("num_classes is -1, which depends on all tokens; pass the number of classes")
    return by_rows(call)


@rule(aten.index.Tensor)
def index(call: Call) -> Tokens | None:
    """Looks a table up by tokens, or indexes another dimension than the tokens."""
    x, indices = call.node.args[:2]
    chosen = [n for n in indices if isinstance(n, fx.Node)]
    places = [i for i, n in enumerate(indices) if isinstance(n, fx.Node)]
    if any(n.meta["val"].dtype in (torch.bool, torch.uint8) for n in chosen):
        call.refuse("its number of tokens depends on a mask, which other ranks don't know")
    if places != list(range(places[0], places[-1] + 1)):
        call.refuse("its indices are not next to each other")
    tokens = call.tokens(x)
    if tokens is None or tokens.dim not in places or not call.is_fixed(x):
        return by_rows(call)
    behind = len(call.shape(x)) - 1 - places[-1]

    def read(local, position):
        new = [
            position if d == tokens.dim else n and call.operand(n) for d, n in enumerate(indices)
        ]
        return call.graph.call(aten.index.Tensor, local, new)

    return _read(call, x, indices[tokens.dim], chosen, behind, read)


@along_tokens("gather index_select")
def gather(call: Call, tokens: Tokens) -> Tokens | None:
    x, position = call.node.args[0], call["index"]
    if not call.is_fixed(x):
        return by_rows(call)
    behind = 0 if call.target is aten.gather.default else len(call.out) - 1 - tokens.dim

    def read(local, position):
        return call.replaced(self=local, index=position)

    return _read(call, x, position, [position], behind, read)


def _read(call: Call, x, position, chosen: list, behind: int, read: Callable) -> Tokens | None:
    """Takes tokens by their positions. If every rank knows these, the rank that has a token
    broadcasts it, by a sum with the others' zeros; else every rank gets all tokens. ``behind``:
    how many dimensions of the result follow those of the positions."""
    tokens, graph = call.tokens(x), call.graph
    if any(call.is_fixed(n) for n in chosen):
        call.gather(x)
        call.decision = "tokens of all ranks, for this rank's positions"
        return by_rows(call)
    if not tokens.plain.alone or call.node.meta["val"].dtype is torch.bool:
        call.refuse("it indexes tokens by their position in the sequence")
    begin, count = tokens.plain.sequence.begin(graph.rank), tokens.plain.sequence.lens[graph.rank]

    def lower():
        local = call.operand(x)
        if same(count, 0):  # a token that isn't read
            local = padded(graph, local, tokens.dim, (0, 1))
        place = graph.call(aten.remainder.Scalar, call.operand(position), graph.int_(tokens.full))
        place = graph.call(aten.sub.Scalar, place, graph.int_(begin))
        inside = graph.call(
            aten.logical_and.default,
            graph.call(aten.ge.Scalar, place, 0),
            graph.call(aten.lt.Scalar, place, graph.int_(count)),
        )
        place = graph.call(aten.where.ScalarOther, inside, place, 0)
        taken = read(local, place)
        for _ in range(behind):
            inside = graph.call(aten.unsqueeze.default, inside, -1)
        return graph.all_reduce(graph.call(aten.where.ScalarOther, inside, taken, 0))

    for node in chosen:
        call.want(node, None)
    call.lower, call.decision = lower, "some tokens, broadcast to all ranks"
    return None


@rule(aten.index_put.default)
def index_put(call: Call) -> Tokens:
    """Writes one value where a mask over the first dimensions is true."""
    x, indices, values = call.node.args[:3]
    tokens = call.tokens(x)
    if tokens is not None and _in_features(call, indices, values, tokens):
        return tokens
    mask = indices[0] if len(indices) == 1 else None
    ndim = len(call.shape(mask)) if mask else 0
    if not mask or mask.meta["val"].dtype is not torch.bool or tokens is None:
        call.refuse("it indexes tokens by their position in the sequence")
    if len(call.shape(values)) > len(call.shape(x)) - ndim or call.tokens(values) is not None:
        call.refuse("it writes values in the order of the tokens that a mask selects")
    call.want(mask, tokens if tokens.dim < ndim else None)
    return tokens


def _in_features(call: Call, indices, values, tokens: Tokens) -> bool:
    """Whether it writes the same values into some features of each token."""
    x, chosen = call.node.args[0], [n for n in indices if n is not None]
    behind = [i for i, n in enumerate(indices) if n is not None]
    width = sum(
        len(call.shape(n)) if n.meta["val"].dtype in (torch.bool, torch.uint8) else 1
        for n in chosen
    )
    last = len(call.shape(x)) - width
    return (
        min(behind) > tokens.dim
        and behind == list(range(behind[0], behind[-1] + 1))
        and behind[0] == last
        and len(call.shape(values)) <= 1
        and all(call.tokens(n) is None for n in (*chosen, values))
    )


@rule(aten.masked_scatter.default)
def masked_scatter(call: Call) -> Tokens:
    """Rows of images, say, where a mask over tokens is true: the mask tells which."""
    x, mask, source = call.node.args
    tokens, graph = call.one_of(), call.graph
    if graph.values[mask].full is None or graph.values[source].full is None:
        call.refuse("its mask, or what it writes, differs by rank; compute them of full inputs")
    call.want(source, None)
    shape = call.shape(x)

    def lower():
        full = graph.call(aten.expand.default, graph.full(mask), graph.shape(shape))
        flat = graph.call(aten.reshape.default, full, [-1])
        place = graph.call(aten.cumsum.default, flat, 0)
        place = graph.call(aten.sub.Scalar, place, 1)
        place = graph.call(aten.clamp.default, place, 0)
        place = graph.call(aten.reshape.default, place, graph.shape(shape))
        local = call.operand(x)
        where, place = (graph.cut(y, shape, tokens) for y in (full, place))
        values = graph.call(aten.reshape.default, call.operand(source), [-1])
        taken = graph.call(aten.index.Tensor, values, [place])
        return graph.call(aten.where.self, where, taken, local)

    call.lower = lower
    return tokens
