"""Rewrites of graphs that gather in a wide dtype what is used in a narrow one."""

import pytest
import torch
import torch.distributed as dist
from graphs import (
    BF16,
    E4M3,
    F16,
    F32,
    assert_same,
    c10d,
    convert,
    draw_shard,
    fuse,
    gather_dtypes,
    gathered,
    received_bytes,
    scattered,
    targets_of,
)
from harness import on_ranks
from torch.fx.experimental.proxy_tensor import make_fx

from deepsp.compile import fuse_gather_cast
from deepsp.compile.graphs import bytes_of, is_collective
from deepsp.compile.passes.recognize import find_gathers

# ---------------------------------------------------------------------------------- the cast


def _plain(x):
    return (gathered(x) * 1).to(BF16)


def _views(cast):
    def function(x, y):
        w = gathered(x)  # [P * 4, 6]
        a = cast(w.view(2, -1, 6).transpose(0, 1), BF16)
        whole = gathered(y).view(dist.get_world_size(), 4, 5)
        parts = [whole.select(0, p).narrow(0, 0, 3) for p in range(dist.get_world_size())]
        b = cast(torch.cat(parts, 1).t(), F16)
        c, d = gathered(y + 1).split([2, 3], 1)
        return a.float().sum() * b, cast(c, BF16) + 1, cast(d, BF16).t() @ cast(c, BF16)

    return function


def _bits_stay():
    size = dist.get_world_size()
    for cast in (lambda x, dtype: x.to(dtype), convert):
        old, new, report = fuse(_views(cast), draw_shard(4, 6), draw_shard(4, 5))
        assert received_bytes(new) * 2 == received_bytes(old)
        assert report.bytes_saved == received_bytes(old) - received_bytes(new)
        dtypes = [dtype for dtype, _ in gather_dtypes(new)]
        assert sorted(dtypes) == ["bfloat16", "bfloat16", "float16"]
    special = torch.tensor([torch.nan, torch.inf, 3e38, 1e-45, -0.0, 1.00390625])
    fuse(lambda x: gathered(x).to(BF16), special)
    old, new, _ = fuse(lambda x: gathered(x).to(BF16), special)
    assert gather_dtypes(new) == [("bfloat16", (6 * size,))]
    # float64, and a shard of one's own that isn't contiguous
    old, new, _ = fuse(lambda x: gathered(x.t()).to(BF16), draw_shard(3, 4).double())
    assert received_bytes(new) * 4 == received_bytes(old)
    # eight bits travel as bytes
    old, new, _ = fuse(lambda x: gathered(x).view(-1, 2).to(E4M3).to(F32) + 1, draw_shard(4, 6))
    assert received_bytes(new) * 4 == received_bytes(old) and gather_dtypes(new)[0][0] == "uint8"


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_cast_moves_in_front_and_the_bits_stay(ranks):
    on_ranks(ranks, _bits_stay)


def _nothing_to_fuse():
    x = draw_shard(4, 6)

    def masked(x):
        w = gathered(x)
        return torch.ops.aten._to_copy(w, dtype=BF16, memory_format=torch.channels_last)

    def written(x):
        a, b = gathered(x).split(2)[:2]
        a, b = a.to(BF16), b.to(BF16)
        return a.mul_(2), b

    alone = [
        lambda x: gathered(x).to(torch.float64),
        lambda x: gathered(x).to(torch.int8),
        lambda x: gathered(x).to(torch.bool),
        lambda x: gathered(x).to(torch.complex32),
        lambda x: gathered(x.to(BF16)).to(F16),
        lambda x: gathered(x.long()).to(BF16),
        lambda x: (gathered(x) + 1).to(BF16),
        lambda x: gathered(x).softmax(-1).to(BF16),
        lambda x: torch.cat([gathered(x), x]).to(BF16),
        lambda x: torch.nn.functional.pad(gathered(x), (0, 1), value=0.1).to(BF16),
        written,
    ]
    for function in alone:
        old, new, report = fuse(function, x)
        assert gather_dtypes(new) == gather_dtypes(old) and not report.rewrites, function
    make_fx(masked, tracing_mode="fake")(x.view(1, 4, 6, 1))
    old, new, report = fuse(masked, x.view(1, 4, 6, 1))
    assert not report.rewrites
    with pytest.raises(ValueError, match=r"prefetch_bytes to be .*, got -1"):
        fuse_gather_cast(new, prefetch_bytes=-1)


def test_what_is_left_alone():
    on_ranks(2, _nothing_to_fuse)


def _shared():
    def shared(x):
        w = gathered(x)
        a, b, c = w.to(BF16), w.view(-1).to(BF16), w.t().to(BF16)
        return a @ a.t(), b * 2, c.sum(1)

    size = dist.get_world_size()
    old, new, report = fuse(shared, draw_shard(4, 6))
    assert gather_dtypes(new) == [("bfloat16", (4 * size, 6))] and report.bytes_saved

    def given_away(x):
        w = gathered(x)
        return w.to(BF16), w.view(-1).to(BF16), w[:1].to(BF16)

    old, new, _ = fuse(given_away, draw_shard(4, 6))
    assert gather_dtypes(new) == [("bfloat16", (4 * size, 6))]

    def two_dtypes(x):
        w = gathered(x)
        return w.view(-1).to(BF16) + 1, w.t().to(E4M3).float() + 1, w.to(BF16) * 2

    old, new, _ = fuse(two_dtypes, draw_shard(4, 6))  # 2 + 1 < 4
    assert sorted(dtype for dtype, _ in gather_dtypes(new)) == ["bfloat16", "uint8"]

    def too_many(x):
        w = gathered(x)
        return w.to(BF16) + 1, w.to(F16) + 1  # 2 + 2 is no gain

    old, new, report = fuse(too_many, draw_shard(4, 6))
    assert gather_dtypes(new) == gather_dtypes(old) and not report.rewrites

    def wide(x):
        w = gathered(x)
        return w.to(BF16), w.norm()

    old, new, report = fuse(wide, draw_shard(4, 6))
    assert gather_dtypes(new) == gather_dtypes(old) and not report.rewrites

    def wide_view(x):
        w = gathered(x).view(-1)
        return w.to(BF16), w

    old, new, report = fuse(wide_view, draw_shard(4, 6))
    assert not report.rewrites


@pytest.mark.parametrize("ranks", [2, 3])
def test_casts_share_a_gather(ranks):
    on_ranks(ranks, _shared)


def _symbolic():
    def function(x, y):
        w, g = gathered(x), y.to(F32)
        n = w.size(0)
        sizes = w.view(-1).size(0)
        return w.view(2, n // 2, x.size(1)).to(BF16) * sizes, scattered(g)

    x, y = draw_shard(4, 6), draw_shard(6 * dist.get_world_size(), 5).to(BF16)
    _, new, report = fuse(function, x, y, mode="symbolic", exact=dist.get_world_size() == 2)
    assert len(report.rewrites) == 2 and gather_dtypes(new)[0][0] == "bfloat16"
    gm = torch.fx.GraphModule({}, new)
    x, y = draw_shard(8, 6), draw_shard(2 * dist.get_world_size(), 5).to(BF16)
    for a, b in zip(gm(x, y), function(x, y), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("ranks", [2, 3])
def test_dynamic_shapes(ranks):
    on_ranks(ranks, _symbolic)


# ----------------------------------------------------------------------------- reduce-scatter


def _scatter_sums():
    size = dist.get_world_size()
    x = draw_shard(6 * size, 5).to(BF16)

    def function(kind):
        def scatter(x):
            parts = torch.cat([x.to(F32).view(size, -1), x.to(F32).view(size, -1)], 1)
            return scattered(x.to(F32), kind), scattered(parts, kind)

        return scatter

    for kind in ("sum", "avg"):
        old, new, report = fuse(function(kind), x, exact=False)
        assert _received_rs(new) * 2 == _received_rs(old) == report.bytes_saved * 2
        assert not any("reduce_scatter" in target for target in targets_of(new))
        # Bitwise the sum in float32, in rank order.
        every = [torch.empty_like(x) for _ in range(size)]
        dist.all_gather(every, x)
        total = every[0].float()
        for other in every[1:]:
            total = total + other.float()
        total = total / size if kind == "avg" else total
        new_gm = torch.fx.GraphModule({}, new)
        assert_same(new_gm(x)[0], total.chunk(size)[dist.get_rank()].contiguous())
        if size == 2:
            fuse(function(kind), x)
        if size == 3:  # in another order, the first rank's summand would be left
            y = x if dist.get_rank() == 0 else torch.full_like(x, [3e9, -3e9][dist.get_rank() - 1])
            assert new_gm(y)[0].count_nonzero() == 0
    for kind in ("max", "min"):
        old, new, report = fuse(function(kind), x)
        assert _received_rs(new) * 2 == _received_rs(old) and len(report.rewrites) == 2

    def behind(x):  # would round every summand
        return scattered(x).to(BF16)

    def ours_is_wide(x, y):
        return scattered(x.to(F32) + 1), scattered(x + 1), scattered(y.to(BF16).to(F32) * 1)

    for f, args in ((behind, (x.float(),)), (ours_is_wide, (x, x.float()))):
        old, new, report = fuse(f, *args)
        assert targets_of(new) == targets_of(old) and not report.rewrites
    old, new, report = fuse(lambda x: scattered(x.to(F32), "product"), x)
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
        scale = gathered(a).to(BF16)
        bias = gathered(b.t())
        h = h * scale[: h.size(1)].float() + bias.sum()
        counts = gathered(c)
        h = h @ gathered(big).to(BF16).float()
        depends = gathered((bias[:2] + 1).contiguous())  # not before bias is there
        return h + counts.sum(), depends, gathered(x)

    inputs = (
        draw_shard(3),
        draw_shard(12),
        draw_shard(2, 3).double(),
        torch.arange(5) + dist.get_rank(),
        draw_shard(24 // size, 4),
        draw_shard(3, 24),
    )
    limit = size * 1000
    old, new, report = fuse(function, *inputs, combine_bytes=limit)
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
    old, new, report = fuse(function, *inputs, combine_bytes=small)
    assert 0 < report.combined < 4
    assert all(g.bytes <= small or len(g.outputs) == 1 for g in find_gathers(new))

    def far(x, y, h):
        w = gathered(x)
        h = h @ w
        for _ in range(12):
            h = h @ h
        return h @ gathered(y)

    square = [
        draw_shard(4, 4 * size),
        draw_shard(4, 4 * size, seed=1),
        draw_shard(4 * size, 4 * size),
    ]
    old, new, report = fuse(far, *square, combine_bytes=1 << 20)
    assert not report.combined
    two = dist.new_group(list(range(size))).group_name

    def other_group(x, y):
        return gathered(x), c10d.wait_tensor(c10d.all_gather_into_tensor(y, size, two))

    old, new, report = fuse(other_group, *square[:2], combine_bytes=1 << 20)
    assert not report.combined


@pytest.mark.parametrize("ranks", [2, 3])
def test_small_gathers_that_are_needed_close_together_share_a_launch(ranks):
    on_ranks(ranks, _combined)
