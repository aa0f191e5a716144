"""Sums, means and norms over tokens, combined across the ranks."""

from __future__ import annotations

import torch

from deepsp.compile.sharding.rules import Call, by_rows, combined, overloads, refused, rule
from deepsp.compile.sharding.tokens import Tokens, product
from deepsp.placement.along import reduced

aten = torch.ops.aten

_STATISTICS = (
    "its statistics are taken over the tokens, and its running statistics would differ by rank"
)
refused("native_batch_norm cudnn_batch_norm _native_batch_norm_legit instance_norm", _STATISTICS)


@combined(*overloads("sum mean"))
def total(call: Call, tokens: Tokens) -> None:
    x = call.node.args[0]
    shape = call.shape(x)
    dims = reduced(call)
    graph, mean = call.graph, call.target._opname == "mean"

    def lower():
        dtype = call.node.meta["val"].dtype
        keepdim = bool(call["keepdim"])
        local = call.operand(x)
        # Sum 16-bit values in float32: the sum may overflow before it is divided.
        wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
        local = graph.call(aten.sum.dim_IntList, local, dims, keepdim, dtype=wide)
        result = graph.all_reduce(local)
        if mean:
            count = graph.int_(product(shape[d] for d in dims))
            result = graph.call(aten.div.Scalar, result, count)
        return result if wide == dtype else graph.call(aten.to.dtype, result, dtype)

    call.lower, call.decision = lower, "Partial, all-reduced"


@combined(*overloads("any all"))
def logical(call: Call, tokens: Tokens) -> None:
    x = call.node.args[0]
    dims = reduced(call)
    graph, every = call.graph, call.target._opname == "all"

    def lower():
        local = graph.call(aten.ne.Scalar, call.operand(x), 0)
        if every:
            local = graph.call(aten.logical_not.default, local)
        keepdim = bool(call["keepdim"])
        counted = graph.call(aten.sum.dim_IntList, local, dims, keepdim, dtype=torch.int64)
        result = graph.call(aten.gt.Scalar, graph.all_reduce(counted), 0)
        return graph.call(aten.logical_not.default, result) if every else result

    call.lower, call.decision = lower, "counted over all ranks"


@combined(aten.amax.default, aten.amin.default, aten.max.default, aten.min.default)
def extreme(call: Call, tokens: Tokens) -> None:
    """Compares the ranks' extremes over the tokens. Equal ones share the gradient across ranks."""
    x = call.node.args[0]
    dims = reduced(call)
    graph, most = call.graph, call.target._opname.endswith("max")

    def lower():
        local, dtype = call.operand(x), call.node.meta["val"].dtype
        detached = graph.call(aten.detach.default, local)
        if not graph.holds(tokens.sequence.lens[graph.rank] * tokens.inner > 0):  # no tokens
            info = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
            padding = [0] * (2 * (len(call.shape(x)) - tokens.dim))
            padding[-1] = 1
            fill = info.min if most else info.max
            detached = graph.call(aten.constant_pad_nd.default, detached, padding, fill)
        op = aten.amax.default if most else aten.amin.default
        extremes = graph.call(op, detached, dims, True)
        every = graph.call(
            torch.ops.deepsp.all_gather.default,
            extremes,
            tokens.dim,
            [1] * graph.size,
            "replicated",
            graph.rank,
            graph.name,
        )
        kept = graph.call(op, every, [tokens.dim], True)
        result = kept if call["keepdim"] else graph.call(aten.squeeze.dims, kept, dims)
        if not graph.differentiated(local):
            return result
        # Add a zero whose gradient is that of the mean of all equal elements.
        equal = graph.call(aten.eq.Tensor, graph.call(aten.detach.default, local), kept)
        count = graph.call(aten.sum.dim_IntList, equal, dims, bool(call["keepdim"]), dtype=dtype)
        zeros = graph.call(aten.zeros_like.default, local)
        chosen = graph.call(aten.where.self, equal, local, zeros)
        chosen = graph.call(aten.sum.dim_IntList, chosen, dims, bool(call["keepdim"]))
        mean = graph.call(aten.div.Tensor, graph.all_reduce(chosen), graph.all_reduce(count))
        rest = graph.call(aten.sub.Tensor, mean, graph.call(aten.detach.default, mean))
        return graph.call(aten.add.Tensor, result, rest)

    call.lower, call.decision = lower, "compared over all ranks"


@rule(aten.cumsum.default)
def cumulative(call: Call) -> Tokens:
    """Adds the sum of the earlier ranks' tokens to each rank's own cumulative sum."""
    x, tokens = call.node.args[0], call.one_of()
    dim, graph = tokens.dim, call.graph
    if call["dim"] % len(call.shape(x)) != dim:
        return by_rows(call)
    if not tokens.plain.alone:
        call.refuse("it sums tokens of a sequence that was merged with another dimension")
    value = graph.values[x]
    if value.full is not None and not (value.of_parameter and value.of_data):
        call.refuse("every rank sums all tokens, which it has")

    def lower():
        dtype = call.node.meta["val"].dtype
        wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
        local = graph.call(aten.to.dtype, call.operand(x), dtype)
        local = graph.call(aten.to.dtype, local, wide)
        total = graph.call(aten.sum.dim_IntList, local, [dim], True)
        args = (total, dim, [1] * graph.size, "partial", graph.rank, graph.name)
        sums = graph.call(torch.ops.deepsp.all_gather.default, *args)
        earlier = graph.call(aten.narrow.default, sums, dim, 0, graph.rank)
        earlier = graph.call(aten.sum.dim_IntList, earlier, [dim], True)
        result = graph.call(aten.cumsum.default, local, dim)
        result = graph.call(aten.add.Tensor, result, earlier)
        return graph.call(aten.to.dtype, result, dtype)

    call.lower, call.decision = lower, "the sums of the earlier ranks added"
    return tokens
