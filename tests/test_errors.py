"""Wrong input raises ValueError, naming the argument and the values, before anything is sent."""

import datetime
import os
import time

import pytest
import torch
import torch.distributed as dist
from calls import all_raise
from harness import Workers, on_ranks

import deepsp


def _attention_errors():
    rank, size = dist.get_rank(), dist.get_world_size()
    q = torch.zeros(2, 4, 8, 6)
    kv = torch.zeros(2, 4, 2, 6)
    att = deepsp.distributed_attention
    mask = torch.zeros(8, 8)
    cases = [
        (
            lambda: att(q[:, :, :1], q[:, :, :1], q[:, :, :1], query_parts=1),
            r"as many query heads as ranks \(2\) with query_parts 1, got 1",
        ),
        (
            lambda: att(q, q[:, :, :3], q[:, :, :3], enable_gqa=True),
            r"heads of k to divide that of q \(8\), got 3",
        ),
        (
            lambda: att(q, kv, q, enable_gqa=True),
            r"v to have the number of heads of k \(2\), got 8",
        ),
        (lambda: att(q, kv, kv), "enable_gqa=True"),
        (
            lambda: att(q, kv[:1], kv, enable_gqa=True),
            r"k to have the batch size of q \(2\), got 1",
        ),
        (
            lambda: att(q, kv, kv[:, :3], enable_gqa=True),
            r"v to have the sequence length of q \(4\), got 3",
        ),
        (
            lambda: att(q, kv.double(), kv, enable_gqa=True),
            r"k to have the dtype of q \(float32\), got float64",
        ),
        (
            lambda: att(q, kv, kv.to("meta"), enable_gqa=True),
            r"v to be on the device of q \(cpu\), got meta",
        ),
        (
            lambda: att(q, kv[..., :5], kv, enable_gqa=True),
            r"k to have the head_dim of q \(6\), got 5",
        ),
        (lambda: att(q.int(), q.int(), q.int()), "q to have a floating-point dtype, got int32"),
        (lambda: att(q[0], q[0], q[0]), r"q to have 4 dimensions \[batch, seq.*, got 3"),
        (lambda: att(q, q, q, seq_lens=[4]), "seq_lens to have one entry .* 2 ranks.*got 1"),
        (lambda: att(q, q, q, seq_lens=[4, 4, 4]), "seq_lens to have one entry .* 2 ranks.*got 3"),
        (lambda: att(q, q, q, seq_lens=[5, 5]), r"length 5, which is seq_lens\[\d\], .*, got 4"),
        (lambda: att(q, q, q, seq_lens=[4, -4] if rank == 0 else [-4, 4]), ">= 0, got -4"),
        (lambda: att(q, q, q, seq_lens=[]), "seq_lens to have one entry .*got 0"),
        (lambda: att(q, q, q, chunks=0), "expected chunks >= 1.*, got 0"),
        (lambda: att(q, q, q, dropout_p=1.5), "0 <= dropout_p <= 1, got 1.5"),
        (
            lambda: att(q, q, q, torch.zeros(8, 7)),
            "attn_mask to have size 8 or 1 in dimension 1.*, got 7",
        ),
        (
            lambda: att(q, q, q, torch.zeros(3, 1, 8, 8)),
            "attn_mask to have size 2 or 1 in dimension 0.*, got 3",
        ),
        (
            lambda: att(q, q, q, torch.zeros(4, 8, 8)),
            r"attn_mask to have size 8 .*\(heads\), .*, got 4",
        ),
        (lambda: att(q, q, q, torch.zeros(8)), "attn_mask to have 2 to 4 dimensions.*, got 1"),
        (
            lambda: att(q, q, q, mask.double()),
            r"attn_mask to be bool or .* q \(float32\), got float64",
        ),
        (
            lambda: att(q, q, q, mask, is_causal=True),
            "expected attn_mask or is_causal=True, got both",
        ),
        (lambda: att(q, q, q, group="seq"), "expected group to be .*, got 'seq'"),
        (lambda: att(q, q, q, mask.to("meta")), "attn_mask to be on the device of q .*, got meta"),
        (
            lambda: deepsp.DistributedAttention(torch.add)(q[0], q, q),
            "q to have 4 dimensions .*, got 3",
        ),
        (
            lambda: deepsp.DistributedAttention(torch.add)(q, kv, q),
            "q, k and v with 8, 2 and 8 heads",
        ),
        (
            lambda: deepsp.seq_to_heads_start([q, q[0]]),
            r"inputs\[1\] to have 4 dimensions .*, got 3",
        ),
        (lambda: deepsp.DistributedAttention(chunks=0), "expected chunks >= 1.*, got 0"),
        (lambda: deepsp.sequence.attention.local_heads(1), "num_heads >= 2, .*, got 1"),
        (
            lambda: deepsp.sequence.attention.local_heads(8, num_kv_heads=3),
            r"num_kv_heads to divide num_heads \(8\), got 3",
        ),
        (lambda: deepsp.ranks.seq_lens(-1), "total >= 0, got -1"),
        (lambda: att(q, q, q, attn_mask=torch.ones(q.size(0), 8).bool()), r"mask\[:, None, None"),
    ]
    all_raise(cases)
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
        (lambda: op.seq_to_heads([], [4, 4], rank, name), "expected inputs .*, got an empty list"),
        (
            lambda: op.seq_to_heads([x], [4], 0, name),
            "seq_lens to have one entry .* 2 ranks.*got 1",
        ),
        (lambda: op.seq_to_heads([x], [], 0, name), "expected seq_lens .*, got an empty list"),
        (
            lambda: op.seq_to_heads([x], [4, 4], rank, "nobody"),
            "group_name to be the name of a process group.*'nobody'",
        ),
        (
            lambda: op.seq_to_heads([x], [4, 4], 1 - rank, name),
            "rank to be .*, the rank of this process",
        ),
        (lambda: op.seq_to_heads([x], [4, 4], 2, name), "0 <= rank < 2, .*seq_lens, got 2"),
        (
            lambda: op.heads_to_seq([y], [4, 4], [4, 4], rank, name),
            "num_heads to have one entry .* 1 inputs, got 2",
        ),
        (
            lambda: op.heads_to_seq([y], [6], [4, 4], rank, name),
            r"to have 3 heads, .*num_heads\[0\] = 6 .*, got 2",
        ),
        (
            lambda: op.heads_to_seq([y[:, :7]], [4], [4, 4], rank, name),
            "length 8, the sum of seq_lens, got 7",
        ),
        (
            lambda: op.heads_to_seq([y, y], [4, 3], [4, 4], rank, name),
            r"heads of inputs\[1\] to divide .*\(4\), got 3",
        ),
        (
            lambda: op.heads_to_seq_start([y], [4], [4, 4], 1, 1, rank, name),
            "0 <= chunk < 1, .*, got 1",
        ),
        (
            lambda: op.seq_to_heads_wait(buffer, [4], [5], 1, [4, 4], 0, 1, rank, name),
            r"the buffer .* to have shape \[\d+\], got \[\d+\]",
        ),
        (
            lambda: op.seq_to_heads_wait(buffer, [4], [6, 6], 1, [4, 4], 0, 1, rank, name),
            "num_heads and head_dims .*, got 1 and 2 entries",
        ),
        (
            lambda: op.seq_to_heads_wait(buffer, [4], [-6], -1, [4, 4], 0, 1, rank, name),
            ">= 0, got -[16]",
        ),
        (
            lambda: op.heads_to_seq_wait([buffer] * 3, [4], [6], 1, [4, 4], rank, name),
            "the buffer|chunk",
        ),
        (
            lambda: op.heads_to_seq([y.int(), y.int()[:, :, :1]], [4, 1], [4, 4], rank, name),
            "expected float64, .*, got int32",
        ),
        (
            lambda: op.all_gather(x, 4, [4, 4], "partial", rank, name),
            r"dim to be in \[-4, 3\] .*, got 4",
        ),
        (
            lambda: op.all_gather(x, 1, [4, 5] if rank else [5, 4], "partial", rank, name),
            "input to have size 5 .*, got 4",
        ),
        (lambda: op._pool_set_limit(-1), "bytes >= 0, got -1"),
    ]
    all_raise(cases)
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

    mesh = init_device_mesh("cpu", (1, 1, 2))
    with pytest.raises(ValueError, match="got one of 3 dimensions"):
        deepsp.DistributedAttention(group=mesh)


def test_a_mesh_of_three_dimensions():
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
