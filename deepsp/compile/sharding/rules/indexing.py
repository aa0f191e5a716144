"""Lookups, and ops along other dimensions than the sequence."""

from __future__ import annotations

import torch
from torch import fx

from deepsp.compile.sharding.rules import Call, by_rows, refused, rule
from deepsp.compile.sharding.tokens import Tokens

aten, ours = torch.ops.aten, torch.ops.deepsp

_AMONG = "along the sequence it depends on all earlier tokens, or on all of them"
refused("nonzero masked_select unique _unique2 searchsorted", _AMONG)
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


@rule(aten.softmax.int, aten.log_softmax.int)
def softmax(call: Call) -> Tokens:
    x, tokens = call.node.args[0], call.one_of()
    if call["dim"] % len(call.shape(x)) != tokens.dim:
        return by_rows(call)
    graph = call.graph

    def lower():
        dtype = call.node.meta["val"].dtype
        logs = log_softmax(graph, graph.call(aten.to.dtype, call.operand(x), dtype), tokens.dim)
        result = logs if call.target is aten.log_softmax.int else graph.call(aten.exp.default, logs)
        return graph.call(aten.to.dtype, result, dtype)

    call.lower, call.decision = lower, "over the tokens of all ranks"
    return tokens


def log_softmax(graph, x: fx.Node, dim: int) -> fx.Node:
    """Over a sharded dimension: each rank sends the logarithm of its sum of exponentials. 16-bit
    inputs become float32."""
    if graph.env[x].dtype in (torch.float16, torch.bfloat16):
        x = graph.call(aten.to.dtype, x, torch.float32)
    total = graph.call(aten.logsumexp.default, x, [dim], True)
    each = [1] * graph.size
    args = (total, dim, each, "partial", graph.rank, graph.name)
    total = graph.call(
        aten.logsumexp.default, graph.call(ours.all_gather.default, *args), [dim], True
    )
    return graph.call(aten.sub.Tensor, x, total)


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
    ndim = max(len(call.shape(n)) for n in chosen)
    tokens = call.tokens(x)
    if tokens is not None and tokens.dim in places and call.graph.values[x].full is None:
        return _chosen(call, x, indices, tokens, ndim, places[0])
    return by_rows(call)


def _chosen(call: Call, x, indices, tokens: Tokens, ndim: int, first: int) -> None:
    """Takes tokens by positions that every rank knows. The rank that has a token broadcasts it, by
    a sum with the others' zeros."""
    for n in indices:
        if isinstance(n, fx.Node) and call.graph.values[n].full is None:
            call.refuse("it indexes tokens by their position in the sequence")
        call.want(n, None)
    if not tokens.alone or not call.node.meta["val"].dtype.is_floating_point:
        call.refuse("it indexes tokens by their position in the sequence")
    graph = call.graph
    begin, count = tokens.sequence.begin(graph.rank), tokens.sequence.lens[graph.rank]

    def lower():
        local, chosen = call.operand(x), [n if n is None else call.operand(n) for n in indices]
        # Pad with one token of zeros, at which a rank reads tokens of other ranks.
        padding = [0] * (2 * (len(call.shape(x)) - tokens.dim))
        padding[-1] = 1
        local = graph.call(aten.constant_pad_nd.default, local, padding, 0)
        position = chosen[tokens.dim]
        behind = graph.call(aten.add.Scalar, position, graph.int_(tokens.length))
        position = graph.call(
            aten.where.self, graph.call(aten.lt.Scalar, position, 0), behind, position
        )
        position = graph.call(aten.sub.Scalar, position, graph.int_(begin))
        inside = graph.call(
            aten.logical_and.default,
            graph.call(aten.ge.Scalar, position, 0),
            graph.call(aten.lt.Scalar, position, graph.int_(count)),
        )
        last = graph.call(aten.full_like.default, position, graph.int_(count))
        chosen[tokens.dim] = graph.call(aten.where.self, inside, position, last)
        return graph.all_reduce(graph.call(aten.index.Tensor, local, chosen))

    call.lower, call.decision = lower, "some tokens, broadcast to all ranks"
    return None


@rule(aten.index_put.default)
def index_put(call: Call) -> Tokens:
    """Writes one value where a mask over the first dimensions is true."""
    x, indices, values = call.node.args[:3]
    tokens = call.tokens(x)
    mask = indices[0] if len(indices) == 1 else None
    ndim = len(call.shape(mask)) if mask else 0
    if not mask or mask.meta["val"].dtype is not torch.bool or tokens is None:
        call.refuse("it indexes tokens by their position in the sequence")
    if len(call.shape(values)) > len(call.shape(x)) - ndim or call.tokens(values) is not None:
        call.refuse("it writes values in the order of the tokens that a mask selects")
    call.want(mask, tokens if tokens.dim < ndim else None)
    return tokens
