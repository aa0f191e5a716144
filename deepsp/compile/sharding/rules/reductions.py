"""Sums, extremes, norms and variances over tokens, combined across the ranks."""

from __future__ import annotations

import torch
from torch import fx

from deepsp.compile.sharding.joined import padded
from deepsp.compile.sharding.rules import Call, along_tokens, combined, overloads, refused
from deepsp.compile.sharding.tokens import Size, Tokens, product
from deepsp.placement.along import reduced

aten = torch.ops.aten

_STATISTICS = (
    "its statistics are taken over the tokens, and its running statistics would differ by rank"
)
refused("native_batch_norm cudnn_batch_norm _native_batch_norm_legit instance_norm", _STATISTICS)


def widened(dtype: torch.dtype) -> torch.dtype:
    """The dtype to sum in: a sum of 16-bit values may overflow before it is divided."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def of_each_rank(graph, x: fx.Node, dim: int, gradient: str = "replicated") -> fx.Node:
    """The ranks' results, each of size 1 along ``dim``, one after another."""
    each = [1] * graph.size
    return graph.call(
        torch.ops.deepsp.all_gather.default, x, dim, each, gradient, graph.rank, graph.name
    )


def mean_of(graph, local: fx.Node, dims: list[int], count: Size) -> fx.Node:
    """The mean over the tokens of all ranks, ``count`` elements; dimensions are kept."""
    total = graph.all_reduce(graph.call(aten.sum.dim_IntList, local, dims, True))
    return graph.call(aten.div.Scalar, total, graph.int_(count))


def centered(graph, local: fx.Node, dims: list[int], count: Size) -> tuple[fx.Node, fx.Node]:
    """The mean, and a rank's elements less it."""
    mean = mean_of(graph, local, dims, count)
    return mean, graph.call(aten.sub.Tensor, local, graph.partial_grad(mean))


def _finished(call: Call, result: fx.Node, dims: list[int]) -> fx.Node:
    """A reduced tensor that kept its dimensions, as the op returns it."""
    graph, value = call.graph, call.node.meta["val"]
    if not call["keepdim"]:
        result = graph.call(aten.squeeze.dims, result, dims)
    dtype = (value[0] if isinstance(value, tuple) else value).dtype
    return result if graph.env[result].dtype == dtype else graph.call(aten.to.dtype, result, dtype)


@combined(*overloads("sum mean nansum"))
def total(call: Call, tokens: Tokens) -> None:
    x = call.node.args[0]
    shape, dims = call.shape(x), reduced(call)
    graph, name = call.graph, call.target._opname
    op = aten.nansum.default if name == "nansum" else aten.sum.dim_IntList

    def lower():
        wide = widened(call.node.meta["val"].dtype)
        result = graph.all_reduce(graph.call(op, call.operand(x), dims, True, dtype=wide))
        if name == "mean":
            count = graph.int_(product(shape[d] for d in dims))
            result = graph.call(aten.div.Scalar, result, count)
        return _finished(call, result, dims)

    call.lower, call.decision = lower, "Partial, all-reduced"


@combined(*overloads("any all count_nonzero"))
def logical(call: Call, tokens: Tokens) -> None:
    x = call.node.args[0]
    dims = reduced(call)
    graph, name = call.graph, call.target._opname

    def lower():
        local = graph.call(aten.ne.Scalar, call.operand(x), 0)
        if name == "all":
            local = graph.call(aten.logical_not.default, local)
        keepdim = bool(call["keepdim"])
        counted = graph.call(aten.sum.dim_IntList, local, dims, keepdim, dtype=torch.int64)
        result = graph.all_reduce(counted)
        if name == "count_nonzero":
            return result
        result = graph.call(aten.gt.Scalar, result, 0)
        return graph.call(aten.logical_not.default, result) if name == "all" else result

    call.lower, call.decision = lower, "counted over all ranks"


@combined(aten.amax.default, aten.amin.default, aten.max.default, aten.min.default)
def extreme(call: Call, tokens: Tokens) -> None:
    dims, most = reduced(call), call.target._opname.endswith("max")

    def lower():
        local = call.operand(call.node.args[0])
        return _finished(call, _extreme(call, local, tokens, dims, most), dims)

    call.lower, call.decision = lower, "compared over all ranks"


def _extreme(call: Call, local: fx.Node, tokens: Tokens, dims: list[int], most: bool) -> fx.Node:
    """Compares the ranks' extremes over the tokens. Equal ones share the gradient across ranks."""
    graph, dtype = call.graph, call.graph.env[local].dtype
    detached = graph.call(aten.detach.default, local)
    some = [graph.holds(n * tokens.inner > 0) for n in tokens.sequence.lens]  # alike on all ranks
    if not some[graph.rank]:
        least, greatest = -torch.inf, torch.inf
        if not dtype.is_floating_point:
            least, greatest = torch.iinfo(dtype).min, torch.iinfo(dtype).max
        detached = padded(graph, detached, tokens.dim, (0, 1), least if most else greatest)
    op = aten.amax.default if most else aten.amin.default
    extremes = graph.call(op, detached, dims, True)
    result = graph.call(op, of_each_rank(graph, extremes, tokens.dim), [tokens.dim], True)
    if not graph.differentiated(local):
        return result
    # Add a zero whose gradient is that of the mean of all equal elements.
    equal = graph.call(aten.eq.Tensor, graph.call(aten.detach.default, local), result)
    count = graph.call(aten.sum.dim_IntList, equal, dims, True, dtype=dtype)
    zeros = graph.call(aten.zeros_like.default, local)
    chosen = graph.call(aten.where.self, equal, local, zeros)
    chosen = graph.call(aten.sum.dim_IntList, chosen, dims, True)
    mean = graph.call(aten.div.Tensor, graph.all_reduce(chosen), graph.all_reduce(count))
    rest = graph.call(aten.sub.Tensor, mean, graph.call(aten.detach.default, mean))
    rest = graph.call(aten.add.Tensor, result, rest)
    # An infinite mean has no rounding, but isn't zero less itself.
    infinite = graph.call(aten.isinf.default, result)
    return graph.call(aten.where.self, infinite, mean, rest)


@along_tokens("linalg_vector_norm norm")
def norm(call: Call, tokens: Tokens) -> None:
    """A root of the sum of the ranks' powers."""
    x, graph, dims = call.node.args[0], call.graph, reduced(call)
    order = call["ord"] if "ord" in call.named else call["p"]
    order = 2 if order is None else order
    if order < 1 and order != -torch.inf:
        call.refuse(f"expected a norm of order 1 or more, got {order}; for 0, x.count_nonzero(dim)")

    def lower():
        wide = widened(call.node.meta["val"].dtype)
        local = graph.call(aten.to.dtype, call.operand(x), wide)
        if order != 2:
            local = graph.call(aten.abs.default, local)
        if abs(order) == torch.inf:
            result = _extreme(call, local, tokens, dims, order > 0)
        else:
            result = _norm(graph, local, order, dims)
        return _finished(call, result, dims)

    call.lower, call.decision = lower, "over the tokens of all ranks"


def _norm(graph, local: fx.Node, order, dims: list[int]) -> fx.Node:
    """Its gradient is zero where it is zero, as that of the op."""
    if order != 1:
        local = graph.call(aten.pow.Tensor_Scalar, local, order)
    total = graph.all_reduce(graph.call(aten.sum.dim_IntList, local, dims, True))
    if order == 1:
        return total
    zero = graph.call(aten.eq.Scalar, total, 0)
    root = graph.call(aten.masked_fill.Scalar, total, zero, 1)
    root = graph.call(aten.pow.Tensor_Scalar, root, 1 / order)
    return graph.call(aten.masked_fill.Scalar, root, zero, 0)


@along_tokens("var std var_mean std_mean")
def variance(call: Call, tokens: Tokens) -> None:
    x, graph, dims, name = call.node.args[0], call.graph, reduced(call), call.target._opname
    correction = call["correction"] if call["unbiased"] is None else int(call["unbiased"])
    correction = 1 if correction is None else correction
    count = product(call.shape(x)[d] for d in dims)
    several = name.endswith("_mean")

    def lower():
        value = call.node.meta["val"]
        wide = widened((value[0] if several else value).dtype)
        local = graph.call(aten.to.dtype, call.operand(x), wide)
        mean, rest = centered(graph, local, dims, count)
        size = graph.call(aten.sub.Scalar, _number(graph, count, mean), correction)
        if name.startswith("std"):  # whose gradient at zero is zero
            spread = _norm(graph, rest, 2, dims)
            size = graph.call(aten.sqrt.default, size)
        else:
            squares = graph.call(aten.mul.Tensor, rest, rest)
            spread = graph.all_reduce(graph.call(aten.sum.dim_IntList, squares, dims, True))
        results = [_finished(call, graph.call(aten.div.Tensor, spread, size), dims)]
        if several:
            results.append(_finished(call, mean, dims))
        return graph.call(tuple, results) if several else results[0]

    call.lower, call.decision = lower, "over the tokens of all ranks"


def _number(graph, size, like: fx.Node) -> fx.Node:
    value = graph.env[like]
    return graph.call(
        aten.full.default, [], graph.int_(size), dtype=value.dtype, device=value.device
    )


@along_tokens("logsumexp")
def logsumexp(call: Call, tokens: Tokens) -> None:
    x, graph, dims = call.node.args[0], call.graph, reduced(call)

    def lower():
        local = graph.call(aten.to.dtype, call.operand(x), widened(call.node.meta["val"].dtype))
        every = of_each_rank(graph, _log_sum(graph, local, dims), tokens.dim)
        return _finished(call, _log_sum(graph, every, [tokens.dim]), dims)

    call.lower, call.decision = lower, "over the tokens of all ranks"


def _log_sum(graph, x: fx.Node, dims: list[int]) -> fx.Node:
    """logsumexp, kept dimensions, whose gradient is zero where nothing is finite: a rank's part of
    a row may be masked, or empty, when the row isn't."""
    shift = graph.call(aten.logsumexp.default, graph.call(aten.detach.default, x), dims, True)
    infinite = graph.call(aten.isinf.default, shift)
    shift = graph.call(aten.masked_fill.Scalar, shift, infinite, 0)
    powers = graph.call(aten.exp.default, graph.call(aten.sub.Tensor, x, shift))
    total = graph.call(aten.sum.dim_IntList, powers, dims, True)
    none = graph.call(aten.eq.Scalar, total, 0)
    total = graph.call(aten.masked_fill.Scalar, total, none, 1)
    result = graph.call(aten.add.Tensor, graph.call(aten.log.default, total), shift)
    return graph.call(aten.masked_fill.Scalar, result, none, -torch.inf)


@along_tokens("softmax.int log_softmax.int")
def softmax(call: Call, tokens: Tokens) -> Tokens:
    graph, x = call.graph, call.node.args[0]

    def lower():
        dtype = call.node.meta["val"].dtype
        logs = log_softmax(graph, graph.call(aten.to.dtype, call.operand(x), dtype), tokens.dim)
        result = logs if call.target is aten.log_softmax.int else graph.call(aten.exp.default, logs)
        return graph.call(aten.to.dtype, result, dtype)

    call.lower, call.decision = lower, "over the tokens of all ranks"
    return tokens


def log_softmax(graph, x: fx.Node, dim: int, unseen: float | None = None) -> fx.Node:
    """Over a sharded dimension: each rank sends the logarithm of its sum of exponentials. 16-bit
    inputs become float32. ``unseen``: that logarithm where it is -inf on all ranks."""
    x = graph.call(aten.to.dtype, x, widened(graph.env[x].dtype))
    every = of_each_rank(graph, _log_sum(graph, x, [dim]), dim, "partial")
    total = _log_sum(graph, every, [dim])
    if unseen is not None:
        none = graph.call(aten.eq.Scalar, total, -torch.inf)
        total = graph.call(aten.masked_fill.Scalar, total, none, unseen)
    return graph.call(aten.sub.Tensor, x, total)


_EXTREMES = "max.dim min.dim argmax argmin topk"


@along_tokens(_EXTREMES)
def candidates(call: Call, tokens: Tokens) -> None:
    """The best of each rank's best."""
    x, graph, name = call.node.args[0], call.graph, call.target._opname
    if not isinstance(call["dim"], int) or not tokens.plain.alone:
        call.refuse(
            "it numbers the elements of merged dimensions; pass dim, the dimension of the tokens"
        )
    dim, lens = tokens.dim, tokens.plain.sequence.lens
    k = call["k"] if name == "topk" else 1
    if not all(graph.holds(n >= k) for n in lens):
        graph.fix(tokens.sequence)
    counts = [min(k, n) if isinstance(n, int) else k for n in lens]

    def best(x, many):
        if name == "topk":
            rest = dim, bool(call["largest"]), bool(call["sorted"])
            values, places = _two(graph, aten.topk.default, x, many, *rest)
        else:
            op = aten.max.dim if name.endswith("max") else aten.min.dim
            values, places = _two(graph, op, x, dim, True)
        return values, places

    def lower():
        local = call.operand(x)
        if counts[graph.rank]:
            values, places = best(local, counts[graph.rank])
        else:
            values = local
            places = graph.call(aten.zeros_like.default, local, dtype=torch.int64)
        begin = graph.int_(tokens.plain.sequence.begin(graph.rank))
        places = graph.call(aten.add.Scalar, places, begin)
        where = (dim, counts, "replicated", graph.rank, graph.name)
        values, places = (
            graph.call(torch.ops.deepsp.all_gather.default, y, *where) for y in (values, places)
        )
        values, chosen = best(values, k)
        places = graph.call(aten.gather.default, places, dim, chosen)
        results = [values, places]
        if name != "topk" and not call["keepdim"]:
            results = [graph.call(aten.squeeze.dim, y, dim) for y in results]
        return results[1] if name.startswith("arg") else graph.call(tuple, results)

    call.lower, call.decision = lower, "compared over all ranks"


def _two(graph, target, *args):
    both = graph.call(target, *args)
    return [graph.item(both, i) for i in range(2)]


@along_tokens("cumsum")
def cumulative(call: Call, tokens: Tokens) -> Tokens:
    """Adds the sum of the earlier ranks' tokens to each rank's own cumulative sum."""
    x, dim, graph = call.node.args[0], tokens.dim, call.graph
    call.unmerged(tokens)
    value = graph.values[x]
    if value.full is not None and not (value.of_parameter and value.of_data):
        call.refuse("every rank sums all tokens, which it has")

    def lower():
        dtype = call.node.meta["val"].dtype
        local = graph.call(aten.to.dtype, call.operand(x), dtype)
        local = graph.call(aten.to.dtype, local, widened(dtype))
        sums = graph.call(aten.sum.dim_IntList, local, [dim], True)
        sums = of_each_rank(graph, sums, dim, "partial")
        earlier = graph.call(aten.narrow.default, sums, dim, 0, graph.rank)
        earlier = graph.call(aten.sum.dim_IntList, earlier, [dim], True)
        result = graph.call(aten.cumsum.default, local, dim)
        result = graph.call(aten.add.Tensor, result, earlier)
        return graph.call(aten.to.dtype, result, dtype)

    call.lower, call.decision = lower, "the sums of the earlier ranks added"
    return tokens
