"""The buffer pool: blocks come back, others' data never shows, the limit holds."""

import threading

import torch
import torch.distributed as dist
from harness import on_ranks
from reference import draw

import deepsp


def _reuse():
    pool = deepsp.ranks.buffers
    pool.clear()
    assert pool.idle_bytes() == 0
    x = draw(1, 512, 4, 64, dtype=torch.float32)
    (y,) = deepsp.seq_to_heads([x])
    address = y.untyped_storage().data_ptr()
    in_use = pool.idle_bytes()
    view = y[0, :1]
    del y
    assert pool.idle_bytes() == in_use, "a view still holds the block"
    del view
    assert pool.idle_bytes() > in_use
    (y,) = deepsp.seq_to_heads([x])
    assert y.untyped_storage().data_ptr() == address
    # What autograd saved holds its block, too.
    x.requires_grad_()
    (z,) = deepsp.seq_to_heads([x])
    loss = (z * z).sum()
    idle = pool.idle_bytes()
    held = z.untyped_storage().data_ptr()
    del z
    assert pool.idle_bytes() == idle
    (other,) = deepsp.seq_to_heads([x])
    assert other.untyped_storage().data_ptr() != held
    loss.backward()
    torch.testing.assert_close(x.grad, 2 * x.detach())
    del loss, other, y
    assert pool.idle_bytes() > idle


def test_blocks_come_back():
    on_ranks(1, _reuse)
    on_ranks(2, _reuse, apart="messages")


def _limit():
    pool = deepsp.ranks.buffers
    before = pool.limit()
    pool.clear()
    try:
        pool.set_limit(1 << 20)
        assert pool.limit() == 1 << 20
        for tokens in (64, 1000, 300, 2000, 64, 700):
            kept = [deepsp.seq_to_heads([torch.ones(1, tokens, 4, 32)]) for _ in range(3)]
            del kept
            assert pool.idle_bytes() <= 1 << 20
        assert pool.idle_bytes() > 0
        pool.set_limit(0)
        assert pool.idle_bytes() == 0
    finally:
        pool.set_limit(before)


def test_limit():
    on_ranks(2, _limit)


def _threads():
    """Blocks are taken and given back from many threads at once (local: no collectives)."""
    group = dist.group.WORLD.group_name
    failures = []

    def work(seed):
        for n in range(200):
            x = torch.full((1, 1 + (seed * 7 + n * 13) % 50, 4, 64), float(seed))
            (y,) = torch.ops.deepsp.seq_to_heads([x], [x.size(1)], 0, group)
            if not (y == seed).all():
                failures.append(seed)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_many_threads():
    on_ranks(1, _threads)


def _steady():
    """A training loop's memory is flat: after the first steps, nothing new is taken."""
    x = draw(1, 256, 8, 64, dtype=torch.float32).requires_grad_()
    levels = []
    for _ in range(12):
        out = deepsp.distributed_attention(x, x, x, is_causal=True, chunks=2)
        out.sum().backward()
        del out
        levels.append(deepsp.ranks.buffers.idle_bytes())
    assert len(set(levels[3:])) == 1, levels


def test_training_memory_is_flat():
    on_ranks(2, _steady, apart="messages")
