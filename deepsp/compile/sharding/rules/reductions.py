"""Sums, means and norms: over other dimensions as they are; over tokens summed across ranks."""

from __future__ import annotations

import torch

from deepsp.compile.sharding.rules import Call, overloads, refused, rule
from deepsp.compile.sharding.tokens import Tokens, product

aten = torch.ops.aten

_ALL = "over the tokens it depends on all of them, and there is no rule for that"
refused(
    "batch_norm native_batch_norm cudnn_batch_norm _native_batch_norm_legit instance_norm",
    "its statistics are taken over the tokens, and its running statistics would differ by rank",
)


@rule(aten.group_norm.default)
def group_norm(call: Call) -> Tokens:
    """[N, C, ...]: statistics over all but the first dimension."""
    x = call.node.args[0]
    call.only(x)
    if call.one_of().dim != 0:
        call.refuse("its statistics are taken over the tokens")
    return call.tokens(x)


def _dims(call: Call, ndim: int) -> list[int]:
    dims = call["dim"]
    if dims is None or dims == []:
        return list(range(ndim))
    return [d % ndim for d in ([dims] if isinstance(dims, int) else dims)]


def _left(call: Call, tokens: Tokens, dims: list[int]) -> Tokens:
    """Where tokens are once other dimensions are gone."""
    gone = 0 if call["keepdim"] else sum(d < tokens.dim for d in dims)
    return tokens.at(tokens.dim - gone)


@rule(*overloads("sum mean"))
def total(call: Call) -> Tokens | None:
    x, tokens = call.node.args[0], call.one_of()
    shape = call.shape(x)
    dims = _dims(call, len(shape))
    if tokens.dim not in dims:
        return _left(call, tokens, dims)
    graph, mean = call.graph, call.target._opname == "mean"

    def lower():
        dtype = call.node.meta["val"].dtype
        keepdim = bool(call["keepdim"])
        mine = call.given(x)
        # 16-bit sums are taken in float32, lest they overflow before they are divided.
        wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
        mine = graph.call(aten.sum.dim_IntList, mine, dims, keepdim, dtype=wide)
        result = graph.all_reduce(mine)
        if mean:
            count = graph.int_(product(shape[d] for d in dims))
            result = graph.call(aten.div.Scalar, result, count)
        return result if wide == dtype else graph.call(aten.to.dtype, result, dtype)

    call.lower, call.said = lower, "Partial, all-reduced"
    return None


@rule(*overloads("any all"))
def logical(call: Call) -> Tokens | None:
    x, tokens = call.node.args[0], call.one_of()
    dims = _dims(call, len(call.shape(x)))
    if tokens.dim not in dims:
        return _left(call, tokens, dims)
    graph, every = call.graph, call.target._opname == "all"

    def lower():
        mine = graph.call(aten.ne.Scalar, call.given(x), 0)
        if every:
            mine = graph.call(aten.logical_not.default, mine)
        keepdim = bool(call["keepdim"])
        counted = graph.call(aten.sum.dim_IntList, mine, dims, keepdim, dtype=torch.int64)
        result = graph.call(aten.gt.Scalar, graph.all_reduce(counted), 0)
        return graph.call(aten.logical_not.default, result) if every else result

    call.lower, call.said = lower, "counted over all ranks"
    return None


@rule(
    *overloads(
        "amax amin max min var std var_mean std_mean logsumexp norm linalg_vector_norm prod "
        "nansum nanmean median count_nonzero aminmax"
    )
)
def over_others(call: Call):
    """Over other dimensions only."""
    if len(call.operands) == 2:
        from deepsp.compile.sharding.rules.pointwise import pointwise

        return pointwise(call)
    x, tokens = call.node.args[0], call.one_of()
    dims = _dims(call, len(call.shape(x)))
    if "dim" not in call.named or tokens.dim in dims:
        call.refuse(_ALL)
    place = _left(call, tokens, dims)
    value = call.node.meta["val"]
    return [place for _ in value] if isinstance(value, (list, tuple)) else place


@rule(*overloads("layer_norm native_layer_norm rms_norm _fused_rms_norm"))
def last_dimensions(call: Call):
    x, tokens = call.node.args[0], call.tokens(call.node.args[0])
    call.only(x)
    if tokens is None or tokens.dim >= len(call.shape(x)) - len(call["normalized_shape"]):
        call.refuse("its statistics are taken over the tokens")
    value = call.node.meta["val"]
    return [tokens for _ in value] if isinstance(value, (list, tuple)) else tokens
