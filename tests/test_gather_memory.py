"""Whose memory gathered shards lie in: fresh, whole when handed out, and nobody's afterwards."""

import time

import pytest
import torch
import torch.distributed as dist
from harness import on_ranks
from reference import draw, flat

import deepsp

op = torch.ops.deepsp
bf16, f32 = torch.bfloat16, torch.float32


def _here():
    return dist.get_rank(), dist.get_world_size(), dist.group.WORLD.group_name


def _storage(x):
    return x.untyped_storage().data_ptr()


def _fresh():
    rank, size, group = _here()
    where = (rank, group)
    for rows in (2, 140_000):
        x, y = torch.full((rows, 2), float(rank)), torch.ones(rows)
        sizes = [rows] * size
        whole = op.gather_cast(x, sizes, f32, *where)
        both = op.gather_cast_coalesced([x, y], sizes * 2, [f32, f32], *where)
        sums = op.reduce_scatter_cast(whole, sizes, f32, *where)
        more = op._reduce_scatter_cast_coalesced([whole, both[1]], sizes * 2, [f32, f32], *where)
        given = {_storage(t) for t in (x, y, whole, *both)}
        assert len(given) == 4 + (rows == 2)  # large ones arrive in one buffer
        assert len(given | {_storage(t) for t in (sums, *more)}) == len(given) + 3
        # Writing to one leaves all others alone, shards and outputs.
        both[0].fill_(-1)
        assert bool((both[1] == 1).all()) and bool((x == rank).all())
        whole.fill_(-2)
        assert bool((x == rank).all())
        # Each contribution is `whole`, whose rows of this rank were `rank`.
        assert all(bool((t == rank * size).all()) for t in (sums, more[0]))


@pytest.mark.parametrize("ranks", [1, 2])
def test_outputs_are_fresh(ranks):
    on_ranks(ranks, _fresh)


def _written_early():
    """The shard may be written to once its gather has started, the output once it is there,
    though a peer comes late: it gets what was there at the start."""
    rank, size, group = _here()
    rows, cols = 1024, 600
    sizes = [rows] * size
    for count in (1, 2):
        shards = [torch.full((rows, cols), float(rank + 10 * i)) for i in range(count)]
        shards += [torch.full((3, 5), float(rank + 70))] * (count - 1)
        lens = [len(x) for x in shards for _ in range(size)]
        dtypes = [f32] * len(shards)
        if rank == size - 1:
            time.sleep(0.3)
        buffer = op._gather_cast_coalesced_start(shards, lens, dtypes, rank, group)
        for x in shards:
            x.fill_(-1.0)
        shapes = [x.size(1) for x in shards]
        full = op._gather_cast_coalesced_wait(
            buffer, lens, shapes, [1] * len(shards), dtypes, rank, group
        )
        firsts = [y.view(size, -1)[:, ::511].clone() for y in full]
        for y in full:
            y.fill_(-3.0)
        if rank == 0:
            time.sleep(0.2)
        for y, base in zip(firsts, [0.0, 10.0][:count] + [70.0] * (count - 1), strict=True):
            assert torch.equal(y, (torch.arange(size) + base)[:, None].expand(y.shape)), base
        # Sums: what they are made of is theirs until they are there, and free afterwards.
        x = torch.full((rows * size, cols), float(rank + 1))
        sums = op.reduce_scatter_cast(x, sizes, f32, rank, group)
        x.fill_(float("nan"))
        assert bool((sums == size * (size + 1) / 2).all())


@pytest.mark.parametrize("ranks", [1, 3])
def test_writing_early(ranks):
    on_ranks(ranks, _written_early)


def _dropped():
    """Nobody waits: the group stays usable, and what arrives late harms nobody."""
    rank, size, group = _here()
    deepsp.ranks.buffers.clear()
    x = torch.full((4096, 64), float(rank))
    sizes = [4096] * size
    for _ in range(3):
        op.gather_cast_start(x, sizes, f32, rank, group)
        other = op.gather_cast(x + 5, sizes, f32, rank, group)
        op._reduce_scatter_cast_coalesced_start([other], sizes, rank, group)
        expected = (torch.arange(size) + 5.0).repeat_interleave(4096)[:, None].expand(other.shape)
        assert torch.equal(other, expected)
        del other
    assert deepsp.ranks.buffers.idle_bytes() > 0
    # Not waited for by autograd, either: the output is never used.
    w = x.clone().requires_grad_()
    op.gather_cast(w, sizes, bf16, rank, group)
    op.gather_cast_start(w, sizes, bf16, rank, group)
    full = op.gather_cast(w, sizes, f32, rank, group)
    full.sum().backward()
    assert torch.equal(w.grad, torch.full_like(w, float(size)))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_start_without_a_wait(ranks):
    on_ranks(ranks, _dropped)


def _poison(shapes):
    """Pool blocks of these sizes, full of what is NaN in every dtype."""
    rank, size, group = _here()
    kept = [
        op.gather_cast(
            torch.full(shape, -1, dtype=torch.int32).view(f32), [shape[0]] * size, f32, rank, group
        )
        for shape in shapes
    ]
    del kept


def _poisoned(anomaly):
    """No element that nobody wrote shows: neither in results nor, in anomaly mode, in buffers that
    are larger than what arrives."""
    rank, size, group = _here()
    deepsp.ranks.buffers.clear()
    rows = [[700, 1, 130][:size], [3, 0, 1][:size], [0, 5, 400][:size]]
    sizes, dtypes = flat(rows), [bf16, f32, torch.float64]
    shapes = [[513], [7], [9, 50]]
    with torch.autograd.set_detect_anomaly(anomaly, check_nan=anomaly):
        for _ in range(3):
            _poison([(n, 1024) for n in (*range(16, 64, 16), *range(64, 385, 64), 600, 900, 1300)])
            x = [
                draw(lens[rank], *shape, seed=rank).float().requires_grad_()
                for lens, shape in zip(rows, shapes, strict=True)
            ]
            full = op.gather_cast_coalesced(x, sizes, dtypes, rank, group)
            for y, lens, shape, dtype in zip(full, rows, shapes, dtypes, strict=True):
                parts = [draw(n, *shape, seed=p).float() for p, n in enumerate(lens)]
                assert torch.equal(y, torch.cat(parts).to(dtype))
            full[0].sum().backward()
            assert all(bool((t.grad == (size if t is x[0] else 0)).all()) for t in x)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_nothing_shows_that_nobody_wrote(ranks):
    on_ranks(ranks, _poisoned, False)
    on_ranks(ranks, _poisoned, True)


def _anomaly_on_one_rank():
    rank, size, group = _here()
    x = draw(2048, 256, seed=rank).float().requires_grad_()
    small = draw(3, seed=rank).float().requires_grad_()
    sizes = [2048] * size + [3] * size
    with torch.autograd.set_detect_anomaly(rank == 0):
        y = op.gather_cast_coalesced([x, small], sizes, [bf16, f32], rank, group)
        grads = torch.autograd.grad(y, [x, small], [torch.ones_like(t) for t in y])
    assert all(bool((g == size).all()) for g in grads)


def test_anomaly_mode_on_one_rank_only():
    on_ranks(2, _anomaly_on_one_rank)


def _steady():
    """A training loop's memory is flat."""
    rank, size, group = _here()
    x = [draw(256, 512, seed=rank).float().requires_grad_(), draw(8, 64).float().requires_grad_()]
    sizes = [256] * size + [8] * size
    levels = []
    for _ in range(8):
        full = op.gather_cast_coalesced(x, sizes, [bf16, bf16], rank, group)
        sum(y.float().square().sum() for y in full).backward()
        del full
        levels.append(deepsp.ranks.buffers.idle_bytes())
    assert len(set(levels[3:])) == 1, levels


def test_training_memory_is_flat():
    on_ranks(2, _steady, apart="messages")
