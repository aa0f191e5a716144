"""Windows of tokens: convolutions, pools, patches. A rank is sent the tokens at the borders of its
windows that other ranks have."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx
from torch.utils._sympy.functions import FloorDiv

from deepsp.compile.sharding.joined import padded
from deepsp.compile.sharding.redistribute import ranges
from deepsp.compile.sharding.rules import Call, by_rows, overloads, refused, rule
from deepsp.compile.sharding.rules.reductions import centered, mean_of, widened
from deepsp.compile.sharding.tokens import Size, Tokens, product, quotient, same, size_of

aten = torch.ops.aten

_BORDERS = "it makes windows of tokens, some of which other ranks have"
refused("convolution _convolution conv_tbc conv_transpose1d", _BORDERS)
refused("conv_transpose2d conv_transpose3d", _BORDERS)


def _each(value, spatial: int) -> list:
    """An argument for each of the last dimensions: one number stands for all."""
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    return values * spatial if len(values) == 1 else values


def _without(values: list, place: int) -> list:
    """The padding that is left to the op: along the tokens, it is done."""
    return [0 if d == place else n for d, n in enumerate(values)]


def windows(
    call: Call,
    tokens: Tokens,
    size: int,
    stride: int = 1,
    padding: int = 0,
    dilation: int = 1,
    fill: float = 0.0,
    count: Size | None = None,
):
    """Gives each rank some of ``count`` windows: their tokens in the result, and a function that
    makes the input that they read, with its padding. Where a rank has none, the input is padding
    for one, which :func:`_finish` takes off."""
    x, graph, dim = call.node.args[0], call.graph, tokens.dim
    have, count = call.unmerged(tokens), call.out[dim] if count is None else count
    begin, end, inside = have.sequence.inside or (0, have.length, have.sequence)
    more = size_of(count - have.length)
    if stride == 1 and same(count, end - begin):  # without what was put before it or behind
        sequence = inside
    elif stride == 1 and graph.holds(more >= 0):
        sequence = have.extended(0, more).sequence
    elif stride == 1 and graph.holds(have.sequence.lens[-1] + more > 0):
        sequence = have.sequence.longer(more)
    else:
        sequence = graph.sequence(count)
    graph.note_empty(sequence)
    want, pads = [], []
    for rank in range(graph.size):
        begin, many = sequence.begin(rank), sequence.lens[rank]
        if same(many, 0):
            want.append([(0, 0)])
            pads.append((0, (size - 1) * dilation + 1))
            continue
        first = size_of(begin * stride - padding)
        last = size_of((begin + many - 1) * stride - padding + (size - 1) * dilation + 1)
        before = size_of(-first) if graph.holds(first < 0) else 0
        after = size_of(last - have.length) if graph.holds(last > have.length) else 0
        if graph.holds(last - after <= first + before):  # padding only
            call.refuse("it makes windows of padding only; pad less")
        want.append([(size_of(first + before), size_of(last - after - first - before))])
        pads.append((before, after))

    def lower() -> fx.Node:
        new = ranges(graph, x, have, want)
        if pads[graph.rank] != (0, 0):
            new = padded(graph, new, dim, pads[graph.rank], fill)
        return new

    call.decision = "windows of tokens, with those at the ranks' borders"
    return Tokens(dim, count, sequence), lower


def _finish(call: Call, new: Tokens, out: fx.Node) -> fx.Node:
    """Without the window that a rank makes which has none."""
    if same(new.sequence.lens[call.graph.rank], 0):
        out = call.graph.call(aten.narrow.default, out, new.dim, 0, 0)
    return out


@rule(*overloads("conv1d conv2d conv3d"))
def convolution(call: Call) -> Tokens:
    """[B, C, ...]."""
    x, weight = call.node.args[:2]
    call.only(x)
    tokens, spatial, graph = call.one_of(), len(call.shape(weight)) - 2, call.graph
    place = tokens.dim - (len(call.shape(x)) - spatial)
    if place < 0:
        return by_rows(call)
    sizes = call.shape(weight)[2:]
    strides, spread = (_each(call[name], spatial) for name in ("stride", "dilation"))
    padding = call["padding"]
    if padding == "same":  # behind, there may be one more
        padding = [(n - 1) * d for n, d in zip(sizes, spread, strict=True)]
        if any(n % 2 for d, n in enumerate(padding) if d != place):
            call.refuse("padding='same' has one more behind than before; pad by F.pad")
        padding = [n // 2 for n in padding]
    padding = _each(0 if padding == "valid" else padding, spatial)
    how = [values[place] for values in (sizes, strides, padding, spread)]
    if how[:3] == [1, 1, 0]:
        return tokens
    new, taken = windows(call, tokens, *how)

    def lower():
        op = getattr(aten, call.target._opname).default  # the other takes words for the padding
        others = _without(padding, place), call["dilation"], call["groups"]
        products = graph.mapped((weight, call["bias"]), call.operand)
        out = graph.call(op, taken(), *products, call["stride"], *others)
        return _finish(call, new, out)

    call.lower = lower
    return new


@rule(*overloads("avg_pool1d avg_pool2d avg_pool3d max_pool1d max_pool2d max_pool3d"))
def pool(call: Call) -> Tokens:
    name, tokens = call.target._opname, call.one_of()
    most, spatial = name.startswith("max"), int(name[-2])
    place = tokens.dim - (len(call.shape(call.node.args[0])) - spatial)
    if place < 0:
        return by_rows(call)
    padding = _each(call["padding"], spatial)
    every = [call["kernel_size"], call["stride"] or call["kernel_size"], padding]
    every.append(call["dilation"] if most else 1)
    how = [_each(value, spatial)[place] for value in every]
    if call["ceil_mode"] or (not most and padding[place] and not call["count_include_pad"]):
        call.refuse(
            "it pools windows that reach beyond the sequence; pass ceil_mode=False and "
            "count_include_pad=True, or pad before"
        )
    new, taken = windows(call, tokens, *how, -torch.inf if most else 0.0)

    def lower():
        left = _without(padding, place)
        return _finish(call, new, call.replaced(self=taken(), padding=left))

    call.lower = lower
    return new


@rule(*overloads("adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d"))
def adaptive(call: Call) -> Tokens | None:
    """Windows of one size; one window is a mean."""
    x, tokens, graph = call.node.args[0], call.one_of(), call.graph
    spatial = int(call.target._opname[-2])
    place = tokens.dim - (len(call.shape(x)) - spatial)
    if place < 0:
        return by_rows(call)
    size, count = list(call["output_size"]), call.out[tokens.dim]
    if all(same(n, 1) for n in call.out[-spatial:]):
        dims = list(range(-spatial, 0))
        total = product(call.shape(x)[-spatial:])

        call.lower = lambda: mean_of(graph, call.operand(x), dims, total)
        return None
    wide = quotient(call.shape(x)[tokens.dim], count)
    if wide is None:
        call.refuse("it pools windows of different sizes; pass a divisor of the number of tokens")
    new, taken = windows(call, tokens, wide, wide)

    def lower_windows():
        size[place] = graph.int_(new.sequence.lens[graph.rank])
        return call.replaced(self=taken(), output_size=size)

    call.lower = lower_windows
    return new


@rule(*overloads("upsample_nearest1d.vec upsample_nearest2d.vec upsample_nearest3d.vec"))
def nearest(call: Call) -> Tokens:
    """Repeats tokens a whole number of times."""
    x, tokens, graph = call.node.args[0], call.one_of(), call.graph
    if tokens.dim < 2:
        return tokens
    whole = [quotient(n, m) for n, m in zip(call.out[2:], call.shape(x)[2:], strict=True)]
    scales = call["scale_factors"]
    if scales is not None and [float(n or 0) for n in whole] != list(scales):
        whole = [None] * len(whole)
    if (times := whole[tokens.dim - 2]) is None or not tokens.plain.alone:
        call.refuse("it interpolates tokens by a fraction; pass a whole scale_factor")
    new = replace(tokens.plain, inner=times)

    def lower():
        part, local = new.part(call.out, graph.rank)[2:], call.operand(x)
        if none := same(part[tokens.dim - 2], 0):
            local = padded(graph, local, tokens.dim, (0, 1))
            part[tokens.dim - 2] = times
        out = graph.call(call.target, local, graph.shape(part), None)
        return graph.call(aten.narrow.default, out, tokens.dim, 0, 0) if none else out

    call.lower = lower
    return new


@rule(aten.unfold.default)
def unfold(call: Call) -> Tokens:
    tokens = call.one_of()
    if call["dimension"] % len(call.shape(call.node.args[0])) != tokens.dim:
        return by_rows(call)
    new, taken = windows(call, tokens, call["size"], call["step"])
    call.lower = lambda: _finish(call, new, call.replaced(self=taken()))
    return new


@rule(aten.im2col.default)
def im2col(call: Call) -> Tokens:
    """[B, C, height, width] -> [B, C * window, windows]: rows of windows."""
    tokens = call.one_of()
    if tokens.dim == 0:
        return tokens
    if tokens.dim != 2:
        call.refuse(_BORDERS)
    sizes = [call[name][0] for name in ("kernel_size", "stride", "padding", "dilation")]
    sides = []
    for d in range(2):
        wide = call.shape(call.node.args[0])[2 + d] + 2 * call["padding"][d]
        reach = call["dilation"][d] * (call["kernel_size"][d] - 1) + 1
        sides.append(size_of(FloorDiv(size_of(wide - reach), call["stride"][d]) + 1))
    high, wide = sides
    new, taken = windows(call, tokens, *sizes, count=high)

    def lower():
        padding = [0, call["padding"][1]]
        return _finish(call, new, call.replaced(self=taken(), padding=padding))

    call.lower = lower
    return replace(new, inner=size_of(wide))


@rule(aten.batch_norm.default)
def batch_norm(call: Call) -> Tokens:
    """In training, means and variances are those of all ranks' tokens, as in SyncBatchNorm."""
    x, tokens, graph = call["input"], call.one_of(), call.graph
    if not call["training"] or tokens.dim == 1:
        return by_rows(call)
    call.only(x)
    shape = call.shape(x)
    dims = [d for d in range(len(shape)) if d != 1]
    count = product(shape[d] for d in dims)

    def lower():
        local = graph.call(aten.to.dtype, call.operand(x), widened(call.node.meta["val"].dtype))
        mean, rest = centered(graph, local, dims, count)
        spread = mean_of(graph, graph.call(aten.mul.Tensor, rest, rest), dims, count)
        for name, now in (("running_mean", mean), ("running_var", spread)):
            if call[name] is not None:
                now = graph.call(aten.flatten.using_ints, graph.call(aten.detach.default, now))
                if name == "running_var":  # without bias
                    now = graph.call(aten.mul.Scalar, now, graph.int_(count))
                    now = graph.call(aten.div.Scalar, now, graph.int_(size_of(count - 1)))
                old = graph.full(call[name])
                new = graph.call(aten.mul.Scalar, old, 1 - call["momentum"])
                now = graph.call(aten.mul.Scalar, now, call["momentum"])
                graph.call(aten.copy_.default, old, graph.call(aten.add.Tensor, new, now))
        scale = graph.call(aten.add.Scalar, spread, call["eps"])
        scale = graph.partial_grad(graph.call(aten.rsqrt.default, scale))
        out = graph.call(aten.mul.Tensor, rest, scale)
        each = [1, shape[1], *[1] * (len(shape) - 2)]
        for op, name in ((aten.mul.Tensor, "weight"), (aten.add.Tensor, "bias")):
            if call[name] is not None:
                y = graph.call(aten.view.default, call.operand(call[name]), graph.shape(each))
                out = graph.call(op, out, y)
        return graph.call(aten.to.dtype, out, call.node.meta["val"].dtype)

    call.lower, call.decision = lower, "statistics of all ranks' tokens"
    return tokens
