"""Wrong input raises ValueError, naming the argument and the values, before anything is sent."""

import datetime
import os
import re
import time

import pytest
import torch
import torch.distributed as dist
from harness import Workers, on_ranks

import deepsp


def _all_raise(cases):
    wrong = []
    for call, message in cases:
        try:
            call()
        except ValueError as error:
            if not re.search(message, str(error)):
                wrong.append(f"{message!r} isn't in {error}")
        except Exception as error:
            wrong.append(f"{message!r}: {error!r}"[:300])
        else:
            wrong.append(f"{message!r}: went through")
    assert not wrong, "\n".join(wrong)


def _attention_errors():
    rank, size = dist.get_rank(), dist.get_world_size()
    q = torch.zeros(2, 4, 8, 6)
    kv = torch.zeros(2, 4, 2, 6)
    att = deepsp.distributed_attention
    mask = torch.zeros(8, 8)
    cases = [
        (lambda: att(q[:, :, :1], q[:, :, :1], q[:, :, :1]), "q has 1 heads, fewer than the 2"),
        (lambda: att(q, q[:, :, :3], q[:, :, :3], enable_gqa=True), "k has 3 heads.*divide the 8"),
        (lambda: att(q, kv, q, enable_gqa=True), "k has 2 heads, but v has 8"),
        (lambda: att(q, kv, kv), "enable_gqa=True"),
        (lambda: att(q, kv[:1], kv, enable_gqa=True), "k has batch size 1, but q has 2"),
        (lambda: att(q, kv, kv[:, :3], enable_gqa=True), "v has sequence length 3, but q has 4"),
        (lambda: att(q, kv.double(), kv, enable_gqa=True), "k is Double, but q is Float"),
        (lambda: att(q, kv, kv.to("meta"), enable_gqa=True), "v is on meta, but q is on cpu"),
        (lambda: att(q, kv[..., :5], kv, enable_gqa=True), "q has head_dim 6, but k has 5"),
        (lambda: att(q.int(), q.int(), q.int()), "q is Int; attention needs a floating-point"),
        (lambda: att(q[0], q[0], q[0]), "q has 3 dimensions; four are right"),
        (lambda: att(q, q, q, seq_lens=[4]), "seq_lens has 1 entries.*2 ranks"),
        (lambda: att(q, q, q, seq_lens=[4, 4, 4]), "seq_lens has 3 entries.*2 ranks"),
        (lambda: att(q, q, q, seq_lens=[5, 5]), r"length 4, but seq_lens\[\d\] of this rank is 5"),
        (lambda: att(q, q, q, seq_lens=[4, -4] if rank == 0 else [-4, 4]), "negative"),
        (lambda: att(q, q, q, seq_lens=[]), "seq_lens has 0 entries"),
        (lambda: att(q, q, q, chunks=0), "chunks is 0"),
        (lambda: att(q, q, q, dropout_p=1.5), "dropout_p is 1.5"),
        (lambda: att(q, q, q, torch.zeros(8, 7)), "attn_mask has size 7 in dimension 1"),
        (lambda: att(q, q, q, torch.zeros(3, 1, 8, 8)), "attn_mask has size 3 in dimension 0"),
        (lambda: att(q, q, q, torch.zeros(4, 8, 8)), "attn_mask has size 4.*heads"),
        (lambda: att(q, q, q, torch.zeros(8)), "attn_mask has 1 dimensions"),
        (lambda: att(q, q, q, mask.double()), "attn_mask is Double; bool or q's dtype"),
        (lambda: att(q, q, q, mask, is_causal=True), "attn_mask is given and is_causal"),
        (lambda: att(q, q, q, group="seq"), "group is 'seq'"),
        (lambda: att(q, q, q, mask.to("meta")), "attn_mask is on meta"),
        (lambda: deepsp.DistributedAttention(torch.add)(q[0], q, q), "q has 3 dimensions"),
        (lambda: deepsp.DistributedAttention(torch.add)(q, kv, q), "8, 2 and 8 heads"),
        (lambda: deepsp.seq_to_heads_start([q, q[0]]), r"inputs\[1\] has 3 dimensions"),
        (lambda: deepsp.DistributedAttention(chunks=0), "chunks is 0"),
        (lambda: deepsp.local_heads(1), "num_heads is 1, fewer than the 2"),
        (lambda: deepsp.local_heads(8, num_kv_heads=3), "num_kv_heads is 3.*divide"),
        (lambda: deepsp.seq_lens(-1), "total is -1"),
        (lambda: att(q, q, q, attn_mask=torch.ones(q.size(0), 8).bool()), r"mask\[:, None, None"),
    ]
    _all_raise(cases)
    # Nothing was sent: the group is in step.
    out = att(q, q, q)
    assert out.shape == q.shape and size == 2


def test_attention():
    on_ranks(2, _attention_errors)


def _op_errors():
    op = torch.ops.deepsp
    rank, name = dist.get_rank(), dist.group.WORLD.group_name
    x = torch.zeros(1, 4, 4, 6)
    (y,) = op.seq_to_heads([x], [4, 4], rank, name)
    (buffer,) = op.seq_to_heads_start([x], [4, 4], 1, False, rank, name)
    cases = [
        (lambda: op.seq_to_heads([], [4, 4], rank, name), "inputs is empty"),
        (lambda: op.seq_to_heads([x], [4], 0, name), "seq_lens has 1 entries.*2 ranks"),
        (lambda: op.seq_to_heads([x], [], 0, name), "seq_lens is empty"),
        (lambda: op.seq_to_heads([x], [4, 4], rank, "nobody"), "no process group.*'nobody'"),
        (lambda: op.seq_to_heads([x], [4, 4], 1 - rank, name), "rank is .*but this process is"),
        (lambda: op.seq_to_heads([x], [4, 4], 2, name), "rank is 2"),
        (lambda: op.heads_to_seq([y], [4, 4], [4, 4], rank, name), "num_heads has 2 entries"),
        (lambda: op.heads_to_seq([y], [6], [4, 4], rank, name), "holds 3 of"),
        (lambda: op.heads_to_seq([y[:, :7]], [4], [4, 4], rank, name), "add up to 8"),
        (lambda: op.heads_to_seq([y, y], [4, 3], [4, 4], rank, name), r"inputs\[1\] has 3 heads"),
        (lambda: op.heads_to_seq_start([y], [4], [4, 4], 1, 1, rank, name), "chunk is 1"),
        (
            lambda: op.seq_to_heads_wait(buffer, [4], [5], 1, [4, 4], 0, 1, rank, name),
            "the buffer has shape",
        ),
        (
            lambda: op.seq_to_heads_wait(buffer, [4], [6, 6], 1, [4, 4], 0, 1, rank, name),
            "head_dims 2",
        ),
        (
            lambda: op.seq_to_heads_wait(buffer, [4], [-6], -1, [4, 4], 0, 1, rank, name),
            "negative",
        ),
        (
            lambda: op.heads_to_seq_wait([buffer] * 3, [4], [6], 1, [4, 4], rank, name),
            "the buffer|chunk",
        ),
        (
            lambda: op.heads_to_seq([y.int(), y.int()[:, :, :1]], [4, 1], [4, 4], rank, name),
            "only float64",
        ),
        (lambda: op.all_gather(x, 4, [4, 4], "partial", rank, name), "dim is 4"),
        (
            lambda: op.all_gather(x, 1, [4, 5] if rank else [5, 4], "partial", rank, name),
            "input has size 4",
        ),
        (lambda: op.pool_set_limit(-1), "bytes must not be negative"),
    ]
    _all_raise(cases)
    with pytest.raises(NotImplementedError, match="non-empty list"):  # PyTorch's own
        op.heads_to_seq([], [], [4, 4], rank, name)
    op.seq_to_heads_wait(buffer, [4], [6], 1, [4, 4], 0, 1, rank, name)
    dist.barrier()


def test_ops():
    on_ranks(2, _op_errors)


def _not_a_member():
    group = dist.new_group([0, 1])
    x = torch.zeros(1, 4, 4, 6)
    if dist.get_rank() == 2:
        for call in (
            lambda: deepsp.distributed_attention(x, x, x, group=group),
            lambda: deepsp.DistributedAttention(group=group),
            lambda: deepsp.shard(x, 1, group),
        ):
            with pytest.raises(ValueError, match="isn't in it"):
                call()
    else:
        deepsp.distributed_attention(x, x, x, group=group)


def test_a_rank_outside_the_group():
    on_ranks(3, _not_a_member)


def test_no_group_yet():
    with pytest.raises(ValueError, match="init_process_group"):
        deepsp.DistributedAttention()


def _mesh():
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (1, 2))
    with pytest.raises(ValueError, match="2 dimensions"):
        deepsp.DistributedAttention(group=mesh)


def test_a_mesh_of_two_dimensions():
    on_ranks(2, _mesh)


def _dies():
    x = torch.zeros(1, 4096, 8, 64)
    deepsp.distributed_attention(x[:, :8], x[:, :8], x[:, :8])
    if dist.get_rank() == 1:
        os._exit(1)
    start = time.monotonic()
    with pytest.raises(RuntimeError):
        deepsp.distributed_attention(x, x, x)
    return time.monotonic() - start


def _hangs():
    if dist.get_rank() == 1:
        time.sleep(8)
        return 0.0
    x = torch.zeros(1, 4096, 8, 64)
    start = time.monotonic()
    with pytest.raises(RuntimeError):
        deepsp.distributed_attention(x, x, x)
    return time.monotonic() - start


@pytest.mark.parametrize("fate", [_dies, _hangs])
def test_a_peer_that_dies_or_hangs(fate):
    timeout = datetime.timedelta(seconds=4)
    workers = Workers(2, timeout.total_seconds())
    try:
        fine, waited = workers.call(fate)[0]
    finally:
        workers.stop()
    assert fine, waited
    # Within the group's timeout, with room for a busy machine.
    assert waited < 3 * timeout.total_seconds()
