"""The pass over graphs that gather in a wide dtype what is used in a narrow one."""

import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from harness import on_ranks
from reference import draw
from torch.fx.experimental.proxy_tensor import make_fx

from deepsp.compile import (
    FuseGatherCast,
    RegatherInBackward,
    fuse_gather_cast,
    regather_in_backward,
)
from deepsp.compile.gathers import find_gathers, uses_of
from deepsp.compile.graphs import bytes_of, computes, is_collective
from deepsp.compile.overlap import KeepOverlap

c10d = torch.ops._c10d_functional
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
E4M3 = torch.float8_e4m3fn


# ------------------------------------------------------------------------------------- helpers


def _group():
    return dist.get_world_size(), dist.group.WORLD.group_name


def _gathered(x):
    return c10d.wait_tensor(c10d.all_gather_into_tensor(x, *_group()))


def _scattered(x, kind="sum"):
    return c10d.wait_tensor(c10d.reduce_scatter_tensor(x, kind, *_group()))


def _convert(x, dtype):
    return torch.ops.prims.convert_element_type(x, dtype)


def _shard(*shape, seed=0):
    """Other numbers on every rank."""
    return draw(*shape, seed=seed + 100 * dist.get_rank(), dtype=F32)


def _targets(graph):
    return [str(n.target) for n in graph.nodes if n.op == "call_function"]


def _gather_dtypes(graph):
    """What is gathered, and as what, in the order of the launches."""
    values = [root.meta["val"] for gather in find_gathers(graph) for root in gather.outputs]
    return [(str(v.dtype).removeprefix("torch."), tuple(v.shape)) for v in values]


def _received(graph):
    """Bytes that arrive from other ranks: those of every collective's output."""
    ranks = dist.get_world_size()
    return sum(bytes_of(n) for n in graph.nodes if is_collective(n)) * (ranks - 1) // ranks


def _valid(gm):
    """lint, and every node's noted value is what its inputs give."""
    from deepsp.compile.graphs import _fake_inputs

    gm.graph.lint()
    gm.recompile()
    for node in gm.graph.nodes:
        if node.op != "call_function" or "val" not in node.meta:
            continue
        mode, args, kwargs = _fake_inputs(node)
        with mode:
            values = node.target(*args, **kwargs)
        noted = node.meta["val"]
        one = isinstance(values, torch.Tensor) or not isinstance(values, (list, tuple))
        for new, old in zip(*([x] if one else x for x in (values, noted)), strict=True):
            if isinstance(new, torch.Tensor):
                assert (new.dtype, new.shape, new.stride()) == (
                    (old.dtype, old.shape, old.stride())
                ), (node, new, old)


def _same(a, b):
    """The same bits, layout and dtype."""
    assert a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride(), (a, b)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    assert torch.equal(a.contiguous().view(bits), b.contiguous().view(bits)), (a, b)


def _agreed(gm):
    """Every rank launches the same collectives, in the same order."""
    mine = [
        (str(n.target), [str(v.dtype) for v in torch.utils._pytree.tree_leaves(n.meta["val"])])
        for n in gm.graph.nodes
        if is_collective(n)
    ]
    all_of_them = [None] * dist.get_world_size()
    dist.all_gather_object(all_of_them, mine)
    assert all(other == mine for other in all_of_them), all_of_them


def _fused(function, *inputs, mode="fake", exact=True, **options):
    """Traces, fuses, checks, runs both; gives the graph as it was, as it is, and the report."""
    options.setdefault("combine_bytes", 0)
    old = make_fx(function, tracing_mode=mode)(*inputs)
    new = make_fx(function, tracing_mode=mode)(*inputs)
    report = fuse_gather_cast(new.graph, **options)
    _valid(new)
    _agreed(new)
    again = [(n.name, n.args) for n in new.graph.nodes]
    second = fuse_gather_cast(new.graph, **options)
    assert str(again) == str([(n.name, n.args) for n in new.graph.nodes])  # nothing left to do
    assert not second.rewrites and not second.combined and not second.bytes_saved
    results = [torch.utils._pytree.tree_leaves(g(*inputs)) for g in (old, new)]
    for a, b in zip(*results, strict=True):
        if exact:
            _same(a, b)
        else:
            torch.testing.assert_close(a, b)
    storages = [x.untyped_storage().data_ptr() for x in results[1] if x.numel()]
    before = [x.untyped_storage().data_ptr() for x in results[0] if x.numel()]
    assert len(set(storages)) == len(set(before))  # what was apart is apart
    return old.graph, new.graph, report


# ---------------------------------------------------------------------------------- the cast


def _plain(x):
    return (_gathered(x) * 1).to(BF16)


def _views(cast):
    def function(x, y):
        w = _gathered(x)  # [P * 4, 6]
        a = cast(w.view(2, -1, 6).transpose(0, 1), BF16)
        whole = _gathered(y).view(dist.get_world_size(), 4, 5)
        parts = [whole.select(0, p).narrow(0, 0, 3) for p in range(dist.get_world_size())]
        b = cast(torch.cat(parts, 1).t(), F16)
        c, d = _gathered(y + 1).split([2, 3], 1)
        return a.float().sum() * b, cast(c, BF16) + 1, cast(d, BF16).t() @ cast(c, BF16)

    return function


def _bits_stay():
    size = dist.get_world_size()
    for cast in (lambda x, dtype: x.to(dtype), _convert):
        old, new, report = _fused(_views(cast), _shard(4, 6), _shard(4, 5))
        assert _received(new) * 2 == _received(old)
        assert report.bytes_saved == _received(old) - _received(new)
        dtypes = [dtype for dtype, _ in _gather_dtypes(new)]
        assert sorted(dtypes) == ["bfloat16", "bfloat16", "float16"]
    special = torch.tensor([torch.nan, torch.inf, 3e38, 1e-45, -0.0, 1.00390625])
    _fused(lambda x: _gathered(x).to(BF16), special)
    old, new, _ = _fused(lambda x: _gathered(x).to(BF16), special)
    assert _gather_dtypes(new) == [("bfloat16", (6 * size,))]
    # float64, and a shard of one's own that isn't contiguous
    old, new, _ = _fused(lambda x: _gathered(x.t()).to(BF16), _shard(3, 4).double())
    assert _received(new) * 4 == _received(old)
    # eight bits travel as bytes
    old, new, _ = _fused(lambda x: _gathered(x).view(-1, 2).to(E4M3).to(F32) + 1, _shard(4, 6))
    assert _received(new) * 4 == _received(old) and _gather_dtypes(new)[0][0] == "uint8"


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_cast_moves_in_front_and_the_bits_stay(ranks):
    on_ranks(ranks, _bits_stay)


def _nothing_to_fuse():
    x = _shard(4, 6)

    def masked(x):
        w = _gathered(x)
        return torch.ops.aten._to_copy(w, dtype=BF16, memory_format=torch.channels_last)

    def written(x):
        a, b = _gathered(x).split(2)[:2]
        a, b = a.to(BF16), b.to(BF16)
        return a.mul_(2), b

    alone = [
        lambda x: _gathered(x).to(torch.float64),
        lambda x: _gathered(x).to(torch.int8),
        lambda x: _gathered(x).to(torch.bool),
        lambda x: _gathered(x).to(torch.complex32),
        lambda x: _gathered(x.to(BF16)).to(F16),
        lambda x: _gathered(x.long()).to(BF16),
        lambda x: (_gathered(x) + 1).to(BF16),
        lambda x: _gathered(x).softmax(-1).to(BF16),
        lambda x: torch.cat([_gathered(x), x]).to(BF16),
        lambda x: torch.nn.functional.pad(_gathered(x), (0, 1), value=0.1).to(BF16),
        written,
    ]
    for function in alone:
        old, new, report = _fused(function, x)
        assert _gather_dtypes(new) == _gather_dtypes(old) and not report.rewrites, function
    make_fx(masked, tracing_mode="fake")(x.view(1, 4, 6, 1))
    old, new, report = _fused(masked, x.view(1, 4, 6, 1))
    assert not report.rewrites
    with pytest.raises(ValueError, match="prefetch_bytes is -1"):
        fuse_gather_cast(new, prefetch_bytes=-1)


def test_what_is_left_alone():
    on_ranks(2, _nothing_to_fuse)


def _shared():
    def shared(x):
        w = _gathered(x)
        a, b, c = w.to(BF16), w.view(-1).to(BF16), w.t().to(BF16)
        return a @ a.t(), b * 2, c.sum(1)

    size = dist.get_world_size()
    old, new, report = _fused(shared, _shard(4, 6))
    assert _gather_dtypes(new) == [("bfloat16", (4 * size, 6))] and report.bytes_saved

    def given_away(x):
        w = _gathered(x)
        return w.to(BF16), w.view(-1).to(BF16), w[:1].to(BF16)

    old, new, _ = _fused(given_away, _shard(4, 6))
    assert _gather_dtypes(new) == [("bfloat16", (4 * size, 6))]

    def two_dtypes(x):
        w = _gathered(x)
        return w.view(-1).to(BF16) + 1, w.t().to(E4M3).float() + 1, w.to(BF16) * 2

    old, new, _ = _fused(two_dtypes, _shard(4, 6))  # 2 + 1 < 4
    assert sorted(dtype for dtype, _ in _gather_dtypes(new)) == ["bfloat16", "uint8"]

    def too_many(x):
        w = _gathered(x)
        return w.to(BF16) + 1, w.to(F16) + 1  # 2 + 2 is no gain

    old, new, report = _fused(too_many, _shard(4, 6))
    assert _gather_dtypes(new) == _gather_dtypes(old) and not report.rewrites

    def wide(x):
        w = _gathered(x)
        return w.to(BF16), w.norm()

    old, new, report = _fused(wide, _shard(4, 6))
    assert _gather_dtypes(new) == _gather_dtypes(old) and not report.rewrites

    def wide_view(x):
        w = _gathered(x).view(-1)
        return w.to(BF16), w

    old, new, report = _fused(wide_view, _shard(4, 6))
    assert not report.rewrites


@pytest.mark.parametrize("ranks", [2, 3])
def test_casts_share_a_gather(ranks):
    on_ranks(ranks, _shared)


def _symbolic():
    def function(x, y):
        w, g = _gathered(x), y.to(F32)
        n = w.size(0)
        sizes = w.view(-1).size(0)
        return w.view(2, n // 2, x.size(1)).to(BF16) * sizes, _scattered(g)

    x, y = _shard(4, 6), _shard(6 * dist.get_world_size(), 5).to(BF16)
    _, new, report = _fused(function, x, y, mode="symbolic", exact=dist.get_world_size() == 2)
    assert len(report.rewrites) == 2 and _gather_dtypes(new)[0][0] == "bfloat16"
    gm = torch.fx.GraphModule({}, new)
    x, y = _shard(8, 6), _shard(2 * dist.get_world_size(), 5).to(BF16)
    for a, b in zip(gm(x, y), function(x, y), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("ranks", [2, 3])
def test_dynamic_shapes(ranks):
    on_ranks(ranks, _symbolic)


# ----------------------------------------------------------------------------- reduce-scatter


def _scatter_sums():
    size = dist.get_world_size()
    x = _shard(6 * size, 5).to(BF16)

    def function(kind):
        def scatter(x):
            parts = torch.cat([x.to(F32).view(size, -1), x.to(F32).view(size, -1)], 1)
            return _scattered(x.to(F32), kind), _scattered(parts, kind)

        return scatter

    for kind in ("sum", "avg"):
        old, new, report = _fused(function(kind), x, exact=False)
        assert _received_rs(new) * 2 == _received_rs(old) == report.bytes_saved * 2
        assert not any("reduce_scatter" in target for target in _targets(new))
        # Bitwise the sum in float32, in rank order.
        every = [torch.empty_like(x) for _ in range(size)]
        dist.all_gather(every, x)
        total = every[0].float()
        for other in every[1:]:
            total = total + other.float()
        total = total / size if kind == "avg" else total
        new_gm = torch.fx.GraphModule({}, new)
        _same(new_gm(x)[0], total.chunk(size)[dist.get_rank()].contiguous())
        if size == 2:
            _fused(function(kind), x)
        if size == 3:  # in another order, the first rank's summand would be left
            y = x if dist.get_rank() == 0 else torch.full_like(x, [3e9, -3e9][dist.get_rank() - 1])
            assert new_gm(y)[0].count_nonzero() == 0
    for kind in ("max", "min"):
        old, new, report = _fused(function(kind), x)
        assert _received_rs(new) * 2 == _received_rs(old) and len(report.rewrites) == 2

    def behind(x):  # would round every summand
        return _scattered(x).to(BF16)

    def ours_is_wide(x, y):
        return _scattered(x.to(F32) + 1), _scattered(x + 1), _scattered(y.to(BF16).to(F32) * 1)

    for f, args in ((behind, (x.float(),)), (ours_is_wide, (x, x.float()))):
        old, new, report = _fused(f, *args)
        assert _targets(new) == _targets(old) and not report.rewrites
    old, new, report = _fused(lambda x: _scattered(x.to(F32), "product"), x)
    assert not report.rewrites


def _received_rs(graph):
    """Bytes that leave for other ranks in reductions and exchanges."""
    ranks = dist.get_world_size()
    return sum(bytes_of(n.args[0]) * (ranks - 1) // ranks for n in graph.nodes if is_collective(n))


@pytest.mark.parametrize("ranks", [2, 3])
def test_reduce_scatters_send_narrow_and_sum_wide(ranks):
    on_ranks(ranks, _scatter_sums)


# --------------------------------------------------------------------------- combined gathers


def _combined():
    size = dist.get_world_size()

    def function(x, a, b, c, big, h):
        scale = _gathered(a).to(BF16)
        bias = _gathered(b.t())
        h = h * scale[: h.size(1)].float() + bias.sum()
        counts = _gathered(c)
        h = h @ _gathered(big).to(BF16).float()
        depends = _gathered((bias[:2] + 1).contiguous())  # not before bias is there
        return h + counts.sum(), depends, _gathered(x)

    inputs = (
        _shard(3), _shard(12), _shard(2, 3).double(), torch.arange(5) + dist.get_rank(),
        _shard(24 // size, 4), _shard(3, 24),
    )  # fmt: skip
    limit = size * 1000
    old, new, report = _fused(function, *inputs, combine_bytes=limit)
    counts = [len(g.outputs) for g in find_gathers(new)]
    assert report.combined == sum(n - 1 for n in counts) == len(find_gathers(old)) - len(counts)
    together = max(find_gathers(new), key=lambda g: len(g.outputs))
    assert {root.meta["val"].dtype for root in together.outputs} == {torch.uint8}
    kept = {next(iter(root.users)).meta["val"].dtype for root in together.outputs}
    assert kept == {BF16, torch.float64, torch.int64}
    assert len(counts) == 2 and sum(counts) == 6  # one depends on another's output
    for gather in find_gathers(new):
        assert gather.bytes <= limit

    # Less room: no launch passes the limit, and everything that fits alone stays alone.
    small = size * 60
    old, new, report = _fused(function, *inputs, combine_bytes=small)
    assert 0 < report.combined < 4
    assert all(g.bytes <= small or len(g.outputs) == 1 for g in find_gathers(new))

    def far(x, y, h):
        w = _gathered(x)
        h = h @ w
        for _ in range(12):
            h = h @ h
        return h @ _gathered(y)

    square = [_shard(4, 4 * size), _shard(4, 4 * size, seed=1), _shard(4 * size, 4 * size)]
    old, new, report = _fused(far, *square, combine_bytes=1 << 20)
    assert not report.combined
    two = dist.new_group(list(range(size))).group_name

    def other_group(x, y):
        return _gathered(x), c10d.wait_tensor(c10d.all_gather_into_tensor(y, size, two))

    old, new, report = _fused(other_group, *square[:2], combine_bytes=1 << 20)
    assert not report.combined


@pytest.mark.parametrize("ranks", [2, 3])
def test_small_gathers_that_are_needed_close_together_share_a_launch(ranks):
    on_ranks(ranks, _combined)


# ------------------------------------------------------------------------------------ schedule


def _mlp(h, *shards):
    for shard in shards:
        h = (h @ _gathered(shard)).relu()
    return h


def _unused(graph):
    """The most bytes of gathers, launched and not yet used, while an anchor runs."""
    nodes = list(graph.nodes)
    most = 0
    for at, node in enumerate(nodes):
        if not computes(node):
            continue
        bytes_ = 0
        for gather in find_gathers(graph):
            first = min(nodes.index(u) for root in gather.outputs for u in uses_of(root))
            if nodes.index(gather.start) < at < first:
                bytes_ += gather.bytes
        most = max(most, bytes_)
    return most


def _marks(graph_or_lines):
    """g: a gather is launched; w: waited for; m: a product."""
    marks = {
        "functional.all_gather_into_tensor": "g", "functional.wait_tensor": "w", "aten.mm": "m",
        "extern_kernels.mm(": "m", "functional.reduce_scatter": "r",
        "functional.all_to_all_single": "x", "functional.all_reduce": "a",
    }  # fmt: skip
    lines = graph_or_lines if isinstance(graph_or_lines, list) else _targets(graph_or_lines)
    return "".join(next((m for part, m in marks.items() if part in line), "") for line in lines)


def _prefetched():
    size = dist.get_world_size()
    layers, dim = 4, 12
    inputs = [_shard(5, dim), *(_shard(dim // size, dim, seed=i) for i in range(layers))]
    one = dim * dim * 4
    wanted = {
        0: "gwm" * 4,
        one - 1: "gwm" * 4,
        one: "gwgm" + "wgm" * 2 + "wm",
        2 * one: "gwggm" + "wgm" + "wm" * 2,
        100 * one: "gwgggm" + "wm" * 3,
    }
    for limit, marks in wanted.items():
        old, new, report = _fused(_mlp, *inputs, prefetch_bytes=limit)
        assert _marks(old) == "gwm" * 4
        assert _marks(new) == marks, (limit, _marks(new))
        assert _unused(new) <= limit
        assert report.early == sum(a == "g" for a in marks.split("m", 1)[0][1:]) + (
            marks.split("m", 1)[1].count("g") if limit >= one else 0
        )
        assert report.peak_before == one and report.peak_after <= one + limit

    def greedy(h, *shards):  # all at once, as somebody wrote it
        weights = [_gathered(shard) for shard in shards]
        for weight in weights:
            h = h @ weight
        return h

    old, new, report = _fused(greedy, *inputs, prefetch_bytes=one)
    assert _marks(old) == "gw" * 4 + "m" * 4 and _marks(new) == wanted[one]
    assert report.peak_before == 4 * one and report.peak_after == 2 * one

    def late(h, a, b):  # what the second gathers is computed
        reduced = c10d.all_reduce(h, "sum", _group()[1])
        h = h @ _gathered(a)
        c = h @ h.t()
        b = b + c.sum()
        return c @ (h @ _gathered(b)) + c10d.wait_tensor(reduced)

    old, new, report = _fused(late, *inputs[:3], prefetch_bytes=100 * one)
    assert _marks(new) == "gawmmgwmmw"

    def again(h, a, b, c, d):  # used, and used again: what counts is the first use
        w = _gathered(a)
        return h @ w @ _gathered(b) @ _gathered(c) @ w @ _gathered(d)

    old, new, report = _fused(again, *inputs, prefetch_bytes=one)
    assert _marks(new) == "gwgmwgmwgmmwm"


@pytest.mark.parametrize("ranks", [2, 3])
def test_gathers_are_early_within_the_limit(ranks):
    on_ranks(ranks, _prefetched)


def _written():
    """A shard is gathered before or after it is written, as it was."""

    def function(h, a, b):
        x = h @ _gathered(a)
        b.view(-1).add_(1)
        y = x @ _gathered(b)
        a.mul_(2)
        return y

    def copied(h, a, b):  # what is read before a write is read before it
        w = _gathered(a)
        kept, x = w.clone(), b * 2
        w.add_(1)
        y = h @ h
        b.mul_(3)
        return y @ kept @ w @ _gathered(x)

    size = dist.get_world_size()

    def inputs():
        return _shard(6, 6), _shard(6 // size, 6), _shard(6 // size, 6, seed=1)

    for f in (function, copied):
        gm = make_fx(f, tracing_mode="fake")(*inputs())
        expected = gm(*inputs())
        fuse_gather_cast(gm.graph, combine_bytes=1 << 20)
        gm.recompile()
        _same(gm(*inputs()), expected)


def test_a_write_is_not_passed():
    on_ranks(2, _written)


def _in_turn():
    """Other collectives keep their order, and every rank's graph says the same although ranks
    with uneven shares pad differently."""
    size, group = _group()
    rank = dist.get_rank()

    def function(h, *shards):
        for i, shard in enumerate(shards):
            if rank == 0:
                shard = torch.cat([shard, shard.new_zeros(1, shard.size(1))])[:-1]
                h = h * 1 + 0
            h = h @ _gathered(shard)
            h = h + c10d.wait_tensor(c10d.all_reduce(h, "sum", group))
            if i % 2:
                h = h + _scattered(torch.cat([h] * size)).to(BF16).float()
        return h

    inputs = [_shard(6, 12), *(_shard(12 // size, 12, seed=i) for i in range(4))]
    for limit in (0, 12 * 12 * 4, 1 << 20):
        for combine in (0, 1 << 20):
            _, new, _ = _fused(function, *inputs, prefetch_bytes=limit, combine_bytes=combine)
            others = [t for t in _targets(new) if "all_reduce" in t or "scatter" in t]
            assert ["reduce_scatter" in t for t in others] == [False, False, True] * 2


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_ranks_have_one_order(ranks):
    on_ranks(ranks, _in_turn)


# ----------------------------------------------------------------------------------- our ops


def _stand_ins():
    """Until the library has the ops: the same schemas, over broadcasts."""
    if hasattr(torch.ops.deepsp, "gather_cast_coalesced_start"):
        return
    lib = torch.library.Library("deepsp", "FRAGMENT")
    _stand_ins.lib = lib
    lib.define(
        "gather_cast_coalesced_start(Tensor[] shards, SymInt[] sizes, ScalarType[] dtypes, "
        "int rank, str group_name, *, ScalarType? reduce_dtype=None) -> Tensor"
    )
    lib.define(
        "gather_cast_coalesced_wait(Tensor buffer, SymInt[] sizes, SymInt[] row_shapes, "
        "int[] row_dims, ScalarType[] dtypes, int rank, str group_name) -> Tensor[]"
    )
    lib.define(
        "gather_cast_start(Tensor shard, SymInt[] sizes, ScalarType dtype, int rank, "
        "str group_name, *, ScalarType? reduce_dtype=None) -> Tensor"
    )
    lib.define(
        "gather_cast_wait(Tensor buffer, SymInt[] sizes, SymInt[] row_shape, ScalarType dtype, "
        "int rank, str group_name) -> Tensor"
    )
    lib.define(
        "reduce_scatter_cast_coalesced_start(Tensor[] inputs, SymInt[] sizes, int rank, "
        "str group_name) -> Tensor"
    )
    lib.define(
        "reduce_scatter_cast_coalesced_wait(Tensor buffer, SymInt[] sizes, SymInt[] row_shapes, "
        "int[] row_dims, ScalarType[] wire_dtypes, ScalarType[] dtypes, "
        "ScalarType? reduce_dtype, int rank, str group_name) -> Tensor[]"
    )

    def start(shards, sizes, dtypes, rank, group, reduce_dtype=None):
        ranks, meta, parts = len(sizes) // len(shards), shards[0].is_meta, []
        for i, (shard, dtype) in enumerate(zip(shards, dtypes, strict=True)):
            for p in range(ranks):
                rows = shard.new_empty(sizes[i * ranks + p], *shard.shape[1:], dtype=dtype)
                if p == rank:
                    rows.copy_(shard)
                if not meta:
                    dist.broadcast(rows, p)
                parts.append(rows.view(-1).view(torch.uint8))
        return torch.cat(parts)

    def wait(buffer, sizes, row_shapes, row_dims, dtypes, rank, group):
        ranks, outputs, at, shape_at = len(sizes) // len(dtypes), [], 0, 0
        for i, dtype in enumerate(dtypes):
            shape = row_shapes[shape_at : shape_at + row_dims[i]]
            shape_at += row_dims[i]
            shape = [sum(sizes[i * ranks : (i + 1) * ranks]), *shape]
            bytes_ = torch.Size(shape).numel() * dtype.itemsize
            outputs.append(buffer[at : at + bytes_].clone().view(dtype).view(shape))
            at += bytes_
        return outputs

    def scatter_start(inputs, sizes, rank, group):
        parts = [x.reshape(-1).contiguous().view(torch.uint8) for x in inputs]
        mine = torch.cat(parts)
        if mine.is_meta:
            return mine.new_empty(dist.get_world_size() * mine.numel())
        every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(every, mine)
        return torch.cat(every)

    def scatter_wait(buffer, sizes, row_shapes, row_dims, wires, dtypes, reduce_dtype, rank, group):
        ranks, outputs = len(sizes) // len(dtypes), []
        of_rank = buffer.view(ranks, -1)
        at = shape_at = 0
        for i, (wire, dtype) in enumerate(zip(wires, dtypes, strict=True)):
            mine = sizes[i * ranks : (i + 1) * ranks]
            shape = [sum(mine), *row_shapes[shape_at : shape_at + row_dims[i]]]
            shape_at += row_dims[i]
            bytes_ = torch.Size(shape).numel() * wire.itemsize
            blocks = [of_rank[p, at : at + bytes_].clone().view(wire) for p in range(ranks)]
            at += bytes_
            total = sum(b.view(shape).to(reduce_dtype or F32) for b in blocks)
            outputs.append(total.split(mine)[rank].to(dtype))
        return outputs

    for key in ("CPU", "Meta"):
        lib.impl("gather_cast_coalesced_start", start, key)
        lib.impl("gather_cast_coalesced_wait", wait, key)
        lib.impl(
            "gather_cast_start",
            lambda x, sizes, dtype, *where, **k: start([x], sizes, [dtype], *where),
            key,
        )
        lib.impl(
            "gather_cast_wait",
            lambda b, sizes, shape, dtype, *where: wait(
                b, sizes, shape, [len(shape)], [dtype], *where
            )[0],
            key,
        )
        lib.impl("reduce_scatter_cast_coalesced_start", scatter_start, key)
        lib.impl("reduce_scatter_cast_coalesced_wait", scatter_wait, key)


def _ours_gather(shards, dtypes, sizes):
    rank, where = dist.get_rank(), (dist.get_rank(), dist.group.WORLD.group_name)
    op, flat = torch.ops.deepsp, [s for of_shard in sizes for s in of_shard]
    assert all(s.size(0) == of_shard[rank] for s, of_shard in zip(shards, sizes, strict=True))
    if len(shards) == 1:
        buffer = op.gather_cast_start(shards[0], flat, dtypes[0], *where)
        return [op.gather_cast_wait(buffer, flat, list(shards[0].shape[1:]), dtypes[0], *where)]
    buffer = op.gather_cast_coalesced_start(shards, flat, dtypes, *where)
    shapes = [n for s in shards for n in s.shape[1:]]
    dims = [s.dim() - 1 for s in shards]
    return op.gather_cast_coalesced_wait(buffer, flat, shapes, dims, dtypes, *where)


def _ours():
    _stand_ins()
    size, rank = dist.get_world_size(), dist.get_rank()
    rows, others = [p + 1 for p in range(size)], [2] * size
    x, y = _shard(rows[rank], 4), _shard(2, 3, 2, seed=1)

    def retyped(x, y):
        a, b = _ours_gather([x, y], [F32, F32], [rows, others])
        tie = x.double() * 0 + (1 + 2**-11 + 2**-30)
        (c,) = _ours_gather([tie], [F32], [rows])  # rounded twice: down, not up
        return a.t().to(BF16) + 1, b.sum(), c.to(F16) * 2, c.view(-1).to(F16)

    old, new, report = _fused(retyped, x, y)
    dtypes = sorted(dtype for dtype, _ in _gather_dtypes(new))
    assert dtypes == ["bfloat16", "float16", "float32"] and report.bytes_saved > 0
    assert len(report.rewrites) == 2

    def alone(x, y):
        a, b = _ours_gather([x, y], [F32, BF16], [rows, others])
        return a.to(BF16) + 1, a + 1, b.to(F32), _ours_gather([x], [F32], [rows])[0].to(E4M3)

    old, new, report = _fused(alone, x, y)
    assert _gather_dtypes(new) == _gather_dtypes(old) and not report.rewrites

    def apart(x, y, h):
        a, b = _ours_gather([x, y], [BF16, F32], [rows, others])
        h = h @ a.float()
        (c,) = _ours_gather([y * 2], [F16], [others])
        return h + c.sum(), b

    h = _shard(4, sum(rows))
    old, new, report = _fused(apart, x, y, h, combine_bytes=1 << 20)
    assert report.combined == 1 and len(find_gathers(new)[0].outputs) == 3
    assert [dtype for dtype, _ in _gather_dtypes(new)] == ["bfloat16", "float32", "float16"]
    assert find_gathers(new)[0].ours

    layers = [_shard(12 // size, 12, seed=i) for i in range(4)]

    def mlp(h, *shards):
        for shard in shards:
            h = h @ _ours_gather([shard], [F32], [[12 // size] * size])[0].to(BF16).float()
        return h

    one = 12 * 12 * 2
    old, new, report = _fused(mlp, _shard(6, 12), *layers, prefetch_bytes=one)
    marks = ["gwm"[["start", "wait", "aten.mm"].index(part)] for target in _targets(new)
             for part in ("start", "wait", "aten.mm") if part in target]  # fmt: skip
    assert "".join(marks) == "gwgm" + "wgm" * 2 + "wm"

    op, where = torch.ops.deepsp, (rank, dist.group.WORLD.group_name)
    grads = _shard(sum(rows), 4).to(BF16), _shard(2 * size, 6).to(BF16)

    def scatter(a, b):
        sizes = [*rows, *others]
        inputs = [a.to(F32), b.view(-1, 3, 2).to(F32).mul(1)]
        buffer = op.reduce_scatter_cast_coalesced_start(inputs, sizes, *where)
        return op.reduce_scatter_cast_coalesced_wait(
            buffer, sizes, [4, 3, 2], [1, 2], [F32, F32], [F32, BF16], None, *where
        )

    old, new, report = _fused(scatter, *grads)
    (wait,) = [n for n in new.nodes if "scatter" in str(n.target) and "wait" in str(n.target)]
    assert wait.args[4] == [BF16, F32] and len(report.rewrites) == 1 and report.bytes_saved > 0


@pytest.mark.parametrize("ranks", [2, 3])
def test_our_own_gathers(ranks):
    on_ranks(ranks, _ours)


# ---------------------------------------------------------------------------------- Inductor


class _Weight(torch.autograd.Function):
    """Gathers wide and casts, as a wrapper that knows nothing of casts does."""

    @staticmethod
    def forward(ctx, shard):
        return _gathered(shard).to(BF16)

    @staticmethod
    def backward(ctx, grad):
        return _scattered(grad.float())


class _OurWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shard):
        rows = [shard.size(0)] * dist.get_world_size()
        return _ours_gather([shard], [BF16], [rows])[0].clone()

    @staticmethod
    def backward(ctx, grad):
        return _scattered(grad.float())


def _net(weight):
    def net(x, *shards):
        for shard in shards:
            x = (x @ weight.apply(shard)).sin()
        return x.float().sum()

    return net


def _patched(passes, joint):
    return torch._inductor.config.patch(
        post_grad_custom_post_pass=passes, joint_custom_pre_pass=joint, force_disable_caches=True
    )


def _inductor(order):
    """The code that Inductor writes keeps what the pass has scheduled, forward and backward, and
    keeps no gathered weight in between."""
    from torch._inductor.utils import run_fw_bw_and_get_code

    torch._dynamo.reset()
    size, dim = dist.get_world_size(), 24
    one = dim * dim * 2
    x = _shard(4, dim).to(BF16)
    shards = [(_shard(dim // size, dim, seed=i) / 4).requires_grad_() for i in range(4)]
    net, graphs = _net(_Weight), []
    with _patched(None, None):
        expected = torch.autograd.grad(torch.compile(net)(x, *shards), shards)
    torch._dynamo.reset()
    fuse = {"prefetch_bytes": one, "combine_bytes": 0}
    before = KeepOverlap(None) if order == "after" else None
    post = FuseGatherCast(before, **fuse)
    if order == "before":
        post = KeepOverlap(post)
    assert post.uuid() and RegatherInBackward().uuid()
    assert FuseGatherCast(lambda graph: None).uuid() is None
    assert FuseGatherCast().uuid() != FuseGatherCast(prefetch_bytes=1).uuid()

    def spy(graph):
        graphs.append(graph)
        post(graph)

    compiled = torch.compile(net, fullgraph=True)
    with _patched(spy, RegatherInBackward()):
        _, codes = run_fw_bw_and_get_code(lambda: compiled(x, *shards))
    gradients = torch.autograd.grad(compiled(x, *shards), shards)
    for a, b in zip(gradients, expected, strict=True):
        _same(a, b)
    (output,) = graphs[0].find_nodes(op="output")
    saved = [n.meta["val"] for n in output.all_input_nodes]
    assert not any(v.shape == (dim, dim) for v in saved), saved
    calls = [code[code.index("def call") :].splitlines() for code in codes]
    calls = [[x for x in lines if "(" in x.split("#")[0] and "assert_" not in x] for lines in calls]
    forward, backward = (_marks(lines) for lines in calls)
    assert forward == "gwgm" + "wgm" * 2 + "wm", forward
    # Three weights again, each behind dX of the layer after it; gradients leave as bf16.
    assert backward.count("g") == 3 and backward.count("x") == 4, backward
    assert "r" not in backward, backward
    assert backward.count("gw") <= 1, backward


@pytest.mark.parametrize("order", ["alone", "before", "after"])
def test_inductor_keeps_the_schedule(order):
    on_ranks(2, _inductor, order)


def _not_regathered():
    """Without the joint pass, gathered weights are kept: what the test above would miss."""
    torch._dynamo.reset()
    saved = []
    dim = 24
    x = _shard(4, dim).to(BF16)
    shards = [(_shard(dim // 2, dim, seed=i) / 4).requires_grad_() for i in range(2)]

    def note(graph):
        (output,) = graph.find_nodes(op="output")
        saved.append([n.meta["val"].shape for n in output.all_input_nodes])

    with _patched(note, None):
        torch.compile(_net(_Weight), fullgraph=True)(x, *shards).backward()
    assert (dim, dim) in saved[0], saved[0]


def test_without_the_joint_pass_weights_are_kept():
    on_ranks(2, _not_regathered)


def _joint(weight):
    """The marks lead another backend's partitioner, too."""
    from torch._functorch.aot_autograd import aot_function
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    _stand_ins()
    dim = 24
    x = _shard(4, dim).to(BF16)
    shards = [(_shard(dim // 2, dim, seed=i) / 4).requires_grad_() for i in range(3)]
    activation = _shard(2, 2).requires_grad_()
    inner, graphs, marked = _net(weight), [], []

    def net(x, a, *shards):
        return inner(x, *shards) + _Weight.apply(a.sin()).float().sin().sum()

    def partition(joint, args, **kwargs):
        marked.append(regather_in_backward(joint.graph))
        return min_cut_rematerialization_partition(joint, args, **kwargs)

    def compiler(gm, args):
        fuse_gather_cast(gm.graph)
        gm.recompile()
        graphs.append(gm)
        return gm

    expected = torch.autograd.grad(net(x, activation, *shards), [activation, *shards])
    compiled = aot_function(net, compiler, compiler, partition)
    gradients = torch.autograd.grad(compiled(x, activation, *shards), [activation, *shards])
    for a, b in zip(gradients, expected, strict=True):
        _same(a, b)
    assert marked == [3]  # not what is computed
    forward, backward = graphs
    (output,) = forward.graph.find_nodes(op="output")
    assert not any(n.meta["val"].shape == (dim, dim) for n in output.all_input_nodes)
    gathered = sum(len(g.outputs) for g in find_gathers(backward.graph))
    assert gathered == 2  # the first layer has no dX


@pytest.mark.parametrize("weight", [_Weight, _OurWeight])
def test_gathers_again_in_backward(weight):
    on_ranks(2, _joint, weight)


# -------------------------------------------------------------------------- import, exchanges

_LOGS = """
import torch, torch.distributed as dist
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore
import sys
import deepsp
assert "torch._inductor.decomposition" not in sys.modules, "import deepsp drags Inductor in"
assert deepsp.compile.fuse_gather_cast is deepsp.compile.gather_cast.fuse_gather_cast
dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
c10d = torch.ops._c10d_functional
f = lambda x: c10d.wait_tensor(c10d.all_gather_into_tensor(x, 4, "0")).to(torch.bfloat16)
deepsp.compile.fuse_gather_cast(make_fx(f, tracing_mode="fake")(torch.ones(8)).graph)
try:
    deepsp.compile.nothing
except AttributeError:
    print("done")
"""


@pytest.mark.parametrize("setting", ["", "deepsp.compile.gather_cast", "+deepsp"])
def test_logs(setting):
    environment = {**os.environ, "TORCH_LOGS": setting} if setting else None
    done = subprocess.run(
        [sys.executable, "-c", _LOGS], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0 and "done" in done.stdout, done.stderr[-3000:]
    assert ("1 rewritten, 48 bytes less received" in done.stderr) == bool(setting)
    assert ("peak, estimated: 128 before, 64 now" in done.stderr) == bool(setting)
    assert ("gathered as bfloat16 instead of float32" in done.stderr) == (setting[:1] == "+")
