"""Lookups, and ops along another dimension than the sequence."""

from __future__ import annotations

import torch
from torch import fx

from deepsp.compile.sharding.rules import Call, broadcast, overloads, refused, rule
from deepsp.compile.sharding.rules.views import broadcast_but
from deepsp.compile.sharding.tokens import Tokens

aten, ours = torch.ops.aten, torch.ops.deepsp

_AMONG = "along the sequence it depends on all earlier tokens, or on all of them"
refused("nonzero masked_select unique _unique2 searchsorted", _AMONG)
refused("bincount", "its length depends on all tokens; use F.one_hot(x, n), summed over the tokens")


@rule(*overloads("_fft_r2c _fft_c2r _fft_c2c"))
def fourier(call: Call) -> Tokens:
    """Along other dimensions than the sequence."""
    x, tokens = call.node.args[0], call.one_of()
    if tokens.dim in [d % len(call.shape(x)) for d in call["dim"]]:
        call.refuse(_AMONG)
    return tokens


@rule(aten.embedding.default)
def embedding(call: Call) -> Tokens:
    weight, index = call.node.args[:2]
    call.only(index)
    if call["scale_grad_by_freq"] or call["sparse"]:
        call.refuse("scale_grad_by_freq and sparse gradients need all tokens' indices at once")
    call.want(weight, None)
    return call.one_of()


@rule(aten.one_hot.default)
def one_hot(call: Call) -> Tokens:
    if call["num_classes"] == -1:
        call.refuse("num_classes is -1, which depends on all tokens; pass the number of classes")
    return call.one_of()


@rule(aten.softmax.int, aten.log_softmax.int)
def softmax(call: Call) -> Tokens:
    x, tokens = call.node.args[0], call.one_of()
    if call["dim"] % len(call.shape(x)) != tokens.dim:
        return tokens
    graph = call.graph

    def lower():
        dtype = call.node.meta["val"].dtype
        logs = log_softmax(graph, graph.call(aten.to.dtype, call.given(x), dtype), tokens.dim)
        result = logs if call.target is aten.log_softmax.int else graph.call(aten.exp.default, logs)
        return graph.call(aten.to.dtype, result, dtype)

    call.lower, call.said = lower, "over the tokens of all ranks"
    return tokens


def log_softmax(graph, x: fx.Node, dim: int) -> fx.Node:
    """Over a dimension of which each rank has a part: what the ranks send is the logarithm of the
    sum of their own exponentials. 16 bits become float32."""
    if graph.env[x].dtype in (torch.float16, torch.bfloat16):
        x = graph.call(aten.to.dtype, x, torch.float32)
    total = graph.call(aten.logsumexp.default, x, [dim], True)
    each = [1] * graph.size
    args = (total, dim, each, "partial", graph.rank, graph.name)
    total = graph.call(
        aten.logsumexp.default, graph.call(ours.all_gather.default, *args), [dim], True
    )
    return graph.call(aten.sub.Tensor, x, total)


@rule(
    *overloads(
        "_softmax _log_softmax softmin cumsum cumprod logcumsumexp cummax "
        "cummin argsort topk kthvalue argmax argmin glu"
    )
)
def along(call: Call):
    """Along another dimension; one result or several, of the same shape but for that dimension."""
    x, tokens = call.node.args[0], call.one_of()
    dim = call["dim"]
    if dim is None or dim % len(call.shape(x)) == tokens.dim:
        call.refuse(_AMONG)
    keeps = "keepdim" not in call.named or call["keepdim"]
    place = tokens.at(tokens.dim - (not keeps and dim % len(call.shape(x)) < tokens.dim))
    value = call.node.meta["val"]
    return [place for _ in value] if isinstance(value, (list, tuple)) else place


@rule(aten.bucketize.Tensor)
def bucketize(call: Call) -> Tokens:
    call.only(call.node.args[0])
    return call.one_of()


@rule(*overloads("gather take_along_dim scatter scatter_add scatter_reduce"))
def by_index(call: Call) -> Tokens:
    """Along another dimension, every operand is cut alike."""
    nodes = call.operands
    dim = call["dim"]
    if dim is None:
        call.refuse(_AMONG)
    tokens = broadcast_but(call, nodes, dim)
    if tokens.dim == dim % len(call.out):
        call.refuse(_AMONG)
    return tokens


@rule(aten.index_select.default)
def index_select(call: Call) -> Tokens:
    x, dim, index = call.node.args
    tokens, chosen = call.tokens(x), call.tokens(index)
    dim %= len(call.shape(x))
    if chosen is not None and tokens is None:
        return chosen.at(dim)
    if chosen is not None or tokens.dim == dim:
        call.refuse("it indexes tokens by their position in the sequence")
    return tokens


@rule(aten.index.Tensor)
def index(call: Call) -> Tokens | None:
    """A table looked up by tokens; or tokens of which another dimension is indexed."""
    x, indices = call.node.args[:2]
    chosen = [n for n in indices if isinstance(n, fx.Node)]
    at = [i for i, n in enumerate(indices) if isinstance(n, fx.Node)]
    if any(n.meta["val"].dtype in (torch.bool, torch.uint8) for n in chosen):
        call.refuse("its number of tokens depends on a mask, which other ranks don't know")
    if at != list(range(at[0], at[-1] + 1)):
        call.refuse("its indices are not next to each other")
    ndim = max(len(call.shape(n)) for n in chosen)
    tokens = call.tokens(x)
    if tokens is not None and tokens.dim in at and call.graph.values[x].full is None:
        return _chosen(call, x, indices, tokens, ndim, at[0])
    if tokens is not None:
        if tokens.dim in at or any(call.tokens(n) is not None for n in chosen):
            call.refuse("it indexes tokens by their position in the sequence")
        return tokens.at(tokens.dim + (ndim - len(at)) * (at[0] < tokens.dim))
    out = call.out[at[0] : at[0] + ndim]
    tokens = broadcast(call, chosen, out)
    return tokens.at(tokens.dim + at[0])


def _chosen(call: Call, x, indices, tokens: Tokens, ndim: int, first: int) -> None:
    """Some tokens, by their positions, which every rank knows: who has one says so to the
    others."""
    for n in indices:
        if isinstance(n, fx.Node) and call.graph.values[n].full is None:
            call.refuse("it indexes tokens by their position in the sequence")
        call.want(n, None)
    if not tokens.alone or not call.node.meta["val"].dtype.is_floating_point:
        call.refuse("it indexes tokens by their position in the sequence")
    graph = call.graph
    begin, count = tokens.sequence.begin(graph.rank), tokens.sequence.lens[graph.rank]

    def lower():
        mine, given = call.given(x), [n if n is None else call.given(n) for n in indices]
        # One more token, so that there is one on each rank: of zeros, for what others have.
        padding = [0] * (2 * (len(call.shape(x)) - tokens.dim))
        padding[-1] = 1
        mine = graph.call(aten.constant_pad_nd.default, mine, padding, 0)
        at = given[tokens.dim]
        behind = graph.call(aten.add.Scalar, at, graph.int_(tokens.length))
        at = graph.call(aten.where.self, graph.call(aten.lt.Scalar, at, 0), behind, at)
        at = graph.call(aten.sub.Scalar, at, graph.int_(begin))
        inside = graph.call(
            aten.logical_and.default,
            graph.call(aten.ge.Scalar, at, 0),
            graph.call(aten.lt.Scalar, at, graph.int_(count)),
        )
        last = graph.call(aten.full_like.default, at, graph.int_(count))
        given[tokens.dim] = graph.call(aten.where.self, inside, at, last)
        return graph.all_reduce(graph.call(aten.index.Tensor, mine, given))

    call.lower, call.said = lower, "some tokens, broadcast to all ranks"
    return None


@rule(aten.index_put.default)
def index_put(call: Call) -> Tokens:
    """Where a mask of the first dimensions says so, one value for all."""
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
