"""All that needs a GPU, in one command: ``make gpu-test``.

Ops on CUDA tensors over gloo with two ranks on one GPU; in an NCCL group of one rank, where nothing
travels, and where it sends to itself by collectives (DEEPSP_TEST_COLLECTIVES), or through symmetric
memory; on several GPUs, if there are, through each other's memory. opcheck and Inductor on CUDA;
the kernels' speed against a copy of the same bytes.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from common import TIGHT, draw, timed
from gather import cast_bandwidth, gathered, sharded_training
from launches import (
    capture,
    large,
    never_waited_for,
    odd_rows,
    streams,
    threads,
    waited_for_twice,
)
from torch.library import opcheck

import deepsp

op = torch.ops.deepsp


def attention(q, k, v, **kwargs):
    readers = q.size(2) // k.size(2)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(readers, 1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, **kwargs).transpose(1, 2)


def uneven(total):
    lens = deepsp.ranks.seq_lens(total)
    if len(lens) > 1:
        lens[0] -= 2
        lens[-1] += 2
    return lens


def exchange_values():
    """Every dtype and stride against indexing, both ways, bit for bit."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64,
                  torch.uint8, torch.bool):  # fmt: skip
        for dims in ((8, 8, 8), (64, 64, 128), (7, 5, 3), (65, 1, 33)):
            for layout in ("bshd", "bhsd", "slices"):
                lens = uneven(13)
                counts = (6, 3, 3)
                whole = [
                    (draw(2, 13, h, d, seed=i) * 10).to(dtype)
                    for i, (h, d) in enumerate(zip(counts, dims, strict=True))
                ]
                mine = [x.split(lens, 1)[rank] for x in whole]
                if layout == "bhsd":
                    mine = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in mine]
                if layout == "slices":
                    mine = [torch.stack([x, x], -1).flatten(3)[..., ::2] for x in mine]
                there = deepsp.seq_to_heads(mine, seq_lens=lens)
                q, kv = deepsp.attention.local_heads(6, num_kv_heads=3)
                for x, y, h in zip(whole, there, (q, kv, kv), strict=True):
                    assert torch.equal(y, x[:, :, h.start : h.stop]), (dtype, dims, layout)
                (back,) = deepsp.heads_to_seq(there[:1], [6], seq_lens=lens)
                assert torch.equal(back, mine[0]), (dtype, dims, layout)
                if dtype.is_floating_point:
                    _, k, _ = deepsp.heads_to_seq(there, counts, seq_lens=lens)
                    reads = torch.zeros(3, device="cuda", dtype=torch.float64)
                    for p in range(size):
                        begin, end = op.head_split(6, 3, size, p)[2:]
                        reads[begin:end] += 1
                    expected = (mine[1].double() * reads[:, None]).to(dtype)
                    assert torch.equal(k, expected), (dtype, dims, layout)


def attention_gradients():
    """Output and gradients against one process on the whole sequence, float64."""
    rank = dist.get_rank()
    for heads, kv_heads, chunks in ((8, 8, 1), (8, 2, 1), (6, 3, 2), (9, 3, 3)):
        lens = uneven(17)
        shapes = (heads, kv_heads, kv_heads)
        whole = [draw(2, 17, h, 16, seed=i) for i, h in enumerate(shapes)]
        full = [x.clone().requires_grad_() for x in whole]
        mine = [x.split(lens, 1)[rank].clone().requires_grad_() for x in whole]
        expected = attention(*full, is_causal=True)
        out = deepsp.distributed_attention(
            *mine, is_causal=True, enable_gqa=True, seq_lens=lens, chunks=chunks
        )
        grad = draw(*expected.shape, seed=9)
        g_expected = torch.autograd.grad(expected, full, grad)
        g_out = torch.autograd.grad(out, mine, grad.split(lens, 1)[rank])
        for a, b in zip([out, *g_out], [expected, *g_expected], strict=True):
            torch.testing.assert_close(a, b.split(lens, 1)[rank], **TIGHT)


def sixteen_bits():
    lens = uneven(64)
    rank = dist.get_rank()
    for dtype in (torch.bfloat16, torch.float16):
        whole = [draw(1, 64, h, 64, seed=h, dtype=dtype) for h in (8, 2)]
        q, k = (x.split(lens, 1)[rank] for x in whole)
        out = deepsp.distributed_attention(q, k, k, is_causal=True, enable_gqa=True, seq_lens=lens)
        expected = attention(*(x.double() for x in (*whole, whole[1])), is_causal=True)
        torch.testing.assert_close(
            out.double(), expected.split(lens, 1)[rank], rtol=3e-2, atol=3e-2
        )


def loss_and_rest():
    rank, size = dist.get_rank(), dist.get_world_size()
    lens = uneven(9)
    logits = draw(2, 9, 5).requires_grad_()
    labels = torch.arange(18, device="cuda").view(2, 9) % 5
    labels[:, 2] = -100
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    (full,) = torch.autograd.grad(expected, logits)
    mine = logits.detach().split(lens, 1)[rank].clone().requires_grad_()
    loss = deepsp.cross_entropy(mine, labels.split(lens, 1)[rank])
    torch.testing.assert_close(loss, expected, **TIGHT)
    (grad,) = torch.autograd.grad(loss, mine)
    torch.testing.assert_close(grad, full.split(lens, 1)[rank], **TIGHT)
    assert torch.equal(deepsp.unshard(mine.detach(), 1, seq_lens=lens), logits.detach())
    hidden, weight = draw(2, 9, 6, seed=3).requires_grad_(), draw(5, 6, seed=4).requires_grad_()
    expected = F.cross_entropy((hidden @ weight.T).flatten(0, 1), labels.flatten())
    full = torch.autograd.grad(expected, (hidden, weight))
    mine = hidden.detach().split(lens, 1)[rank].clone().requires_grad_()
    loss = deepsp.linear_cross_entropy(
        mine, weight, labels.split(lens, 1)[rank].contiguous(), chunk_tokens=2
    )
    torch.testing.assert_close(loss, expected, **TIGHT)
    grads = torch.autograd.grad(loss, (mine, weight))
    torch.testing.assert_close(grads[0], full[0].split(lens, 1)[rank], **TIGHT)
    share = deepsp.collectives.all_reduce(grads[1], grad="replicated")
    torch.testing.assert_close(share, full[1], **TIGHT)
    log_p = (hidden @ weight.T / 0.7).log_softmax(-1)
    expected = log_p.gather(-1, labels.clamp(min=0)[..., None])[..., 0] * (labels != -100)
    full = torch.autograd.grad(expected.exp().sum(), (hidden, weight))
    found, entropy = deepsp.token_log_probs(
        mine, weight, labels.split(lens, 1)[rank], temperature=0.7, entropy=True, chunk_tokens=2,
        outputs="full", seq_lens=lens,
    )  # fmt: skip
    torch.testing.assert_close(found, expected, **TIGHT)
    of_all = -(log_p.exp() * log_p).sum(-1) * (labels != -100)
    torch.testing.assert_close(entropy, of_all, **TIGHT)
    grads = torch.autograd.grad(found.exp().sum(), (mine, weight))
    torch.testing.assert_close(grads[0], full[0].split(lens, 1)[rank], **TIGHT)
    share = deepsp.collectives.all_reduce(grads[1], grad="replicated")
    torch.testing.assert_close(share, full[1], **TIGHT)
    torch.manual_seed(0)
    module = torch.nn.Linear(3, 4, device=labels.device)
    for p in module.parameters():
        p.grad = torch.full_like(p, rank + 1.0)
    deepsp.sync_gradients(module)
    assert (module.weight.grad == size * (size + 1) / 2).all()


def dropout():
    """Ranks that are seeded alike drop other weights, in compiled code, too; gradients follow."""
    rank, size = dist.get_rank(), dist.get_world_size()
    total, heads = 32, 4
    mine = total // size

    def attend(q, k, v):
        return deepsp.distributed_attention(q, k, v, dropout_p=0.5)

    for dtype in (torch.float32, torch.bfloat16):
        zeros = draw(1, mine, heads, total, dtype=dtype).zero_()
        eye = torch.eye(total, dtype=dtype, device=zeros.device).view(1, total, 1, total)
        v = eye.expand(-1, -1, heads, -1).split(mine, 1)[rank].clone().requires_grad_()
        for call in (attend, torch.compile(attend, fullgraph=True)):
            torch._dynamo.reset()
            torch.manual_seed(7)
            out = call(zeros, zeros, v)
            weights = deepsp.collectives.all_gather(out.detach(), 1, grad="replicated")[
                0
            ].transpose(0, 1)
            kept = (weights != 0).float()  # [heads, queries, keys]
            for i in range(heads):
                assert all((kept[i] - kept[j]).abs().mean() > 0.3 for j in range(i)), (i, call)
            (grad,) = torch.autograd.grad(out.sum(), v)
            expected = weights.float().sum(1).T.split(mine)[rank].view(1, mine, heads, 1)
            torch.testing.assert_close(grad.float(), expected.expand_as(grad), rtol=0.02, atol=0.02)
        x = [draw(1, 16, h, 8, seed=h, dtype=dtype).requires_grad_() for h in (4, 2, 2)]
        found = []
        for _ in range(2):
            torch.manual_seed(3)
            seed, _ = op._dropout_seed(x[0], rank)
            assert seed.is_cpu
            out = op._attention_with_dropout(*x, None, 0.3, True, None, seed)
            found.append([out, *torch.autograd.grad(out.sum(), x)])
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b)


def op_checks():
    rank, size = dist.get_rank(), dist.get_world_size()
    name = dist.group.WORLD.group_name
    lens = uneven(4 * size)
    q = draw(2, lens[rank], 8, 6, dtype=torch.float32).requires_grad_()
    k = draw(2, lens[rank], 2, 6, dtype=torch.float32).requires_grad_()
    held = [x.detach().requires_grad_() for x in op.seq_to_heads([q, k], lens, rank, name)]
    with torch.autograd.set_detect_anomaly(True, check_nan=False):  # see tests/test_compile.py
        arriving = op.seq_to_heads_start([q, k], lens, 2, False, rank, name)
        leaving = op.heads_to_seq_start(held, [8, 2], lens, 0, 1, rank, name)
        arriving = [x.detach().requires_grad_() for x in arriving]
        leaving = leaving.detach().requires_grad_()
        shape = ([8, 2], [6, 6], 2)
        opcheck(op.seq_to_heads.default, ([q, k], lens, rank, name))
        opcheck(op.heads_to_seq.default, (held, [8, 2], lens, rank, name))
        opcheck(op.seq_to_heads_start.default, ([q, k], lens, 2, False, rank, name))
        opcheck(op.seq_to_heads_wait.default,
                (arriving[0], *shape, lens, 0, len(arriving), rank, name))  # fmt: skip
        opcheck(op.heads_to_seq_start.default, (held, [8, 2], lens, 0, 1, rank, name))
        opcheck(op.heads_to_seq_wait.default, ([leaving], *shape, lens, rank, name))
        opcheck(op.distributed_attention.default,
                (q, k, k, None, 0.0, True, None, True, 1, lens, rank, name))  # fmt: skip
        opcheck(op.all_reduce.default, (q, "partial", rank, size, name))
        opcheck(op.all_gather.default, (q, 1, lens, "partial", rank, name))


def along_dim():
    """Collectives along every dimension, and the linear layers fused with them, against plain
    sums, float64."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for dim, shape in ((0, (7, 4, 6)), (1, (1, 7, 6)), (1, (3, 7, 6)), (-2, (5, 7, 6))):
        lens = uneven(7)
        each = [draw(*shape, seed=r) for r in range(size)]
        weights = [draw(*shape, seed=50 + r) for r in range(size)]
        total = sum(weights)

        def part(x, dim=dim, lens=lens):
            return x.split(lens, dim)[rank]

        x = part(each[0]).clone().requires_grad_()
        for grad, expected in (("replicated", weights[0]), ("partial", total)):
            y = deepsp.collectives.all_gather(x, dim, sizes=lens, grad=grad)
            assert torch.equal(y, each[0])
            w = weights[0 if grad == "replicated" else rank]
            (g,) = torch.autograd.grad((y * w).sum(), x)
            torch.testing.assert_close(g, part(expected), **TIGHT)
        x = each[rank].clone().requires_grad_()
        y = deepsp.collectives.reduce_scatter(x, dim, sizes=lens)
        torch.testing.assert_close(y, part(sum(each)), **TIGHT)
        (g,) = torch.autograd.grad((y * part(weights[0])).sum(), x)
        assert torch.equal(g, weights[0])
        y = deepsp.collectives.scatter(x, dim, sizes=lens)
        assert torch.equal(y, part(each[rank]))
        y = deepsp.collectives.all_reduce(each[rank], grad="partial")
        torch.testing.assert_close(y, sum(each), **TIGHT)
        half = deepsp.collectives.all_reduce(each[rank].bfloat16(), grad="partial")
        wide = sum(e.bfloat16().float() for e in each).bfloat16()
        torch.testing.assert_close(half, wide)

        w = draw(3, 6, seed=8).requires_grad_()
        x = part(each[0]).clone().requires_grad_()
        y = deepsp.collectives.all_gather_matmul(x, w, None, dim, sizes=lens)
        torch.testing.assert_close(y, F.linear(each[0], w), **TIGHT)
        g = torch.autograd.grad(y.sum(), (x, w))
        ones = torch.ones_like(y)
        torch.testing.assert_close(g[0], part(size * ones @ w), **TIGHT)
        torch.testing.assert_close(g[1], ones.flatten(0, -2).t() @ each[0].flatten(0, -2), **TIGHT)
        y = deepsp.collectives.matmul_reduce_scatter(each[rank], w, None, dim, sizes=lens)
        torch.testing.assert_close(y, part(sum(F.linear(e, w) for e in each)), **TIGHT)


def inductor():
    rank = dist.get_rank()
    lens = uneven(32)
    for chunks in (1, 2):
        torch._dynamo.reset()

        def layer(q, k, v, chunks=chunks):
            return deepsp.distributed_attention(
                q * 1.5, k + 1, v, is_causal=True, enable_gqa=True, seq_lens=lens, chunks=chunks
            ).sin()

        x = [draw(2, lens[rank], h, 16, seed=h + rank, dtype=torch.float32).requires_grad_()
             for h in (8, 4, 4)]  # fmt: skip
        expected = layer(*x)
        grad = torch.randn_like(expected)
        g_expected = torch.autograd.grad(expected, x, grad)
        out = torch.compile(layer, fullgraph=True)(*x)
        g_out = torch.autograd.grad(out, x, grad)
        for a, b in zip([out, *g_out], [expected, *g_expected], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def plain_layer(layer, x):
    """The layer on the whole sequence, with its parameters and nothing else of it."""
    q, k, v = (
        p(x).unflatten(-1, (heads, -1))
        for p, heads in (
            (layer.q_proj, layer.num_heads),
            (layer.k_proj, layer.num_kv_heads),
            (layer.v_proj, layer.num_kv_heads),
        )
    )
    return layer.o_proj(attention(q, k, v, is_causal=True).flatten(2))


def layer_gradients():
    """The whole layer: output and every gradient against one process, float64."""
    rank = dist.get_rank()
    for heads, kv_heads, chunks, overlap in (
        (8, 8, 1, True), (8, 2, 2, True), (6, 3, 3, True), (8, 4, 1, False),
    ):  # fmt: skip
        lens = uneven(17)
        torch.manual_seed(0)
        layer = deepsp.SequenceParallelAttention(
            24, heads, kv_heads, head_dim=16, bias=True, chunks=chunks, overlap=overlap,
            device="cuda", dtype=torch.float64,
        )  # fmt: skip
        x = draw(2, 17, 24).requires_grad_()
        mine = x.detach().split(lens, 1)[rank].clone().requires_grad_()
        grad = draw(2, 17, 24, seed=4)
        expected = plain_layer(layer, x)
        theirs = torch.autograd.grad(expected, [x, *layer.parameters()], grad)
        out = layer(mine, seq_lens=lens, is_causal=True)
        ours = torch.autograd.grad(out, [mine, *layer.parameters()], grad.split(lens, 1)[rank])
        torch.testing.assert_close(out, expected.split(lens, 1)[rank], **TIGHT)
        torch.testing.assert_close(ours[0], theirs[0].split(lens, 1)[rank], **TIGHT)
        for a, b in zip(ours[1:], theirs[1:], strict=True):
            a = a.clone()
            dist.all_reduce(a)
            torch.testing.assert_close(a, b, **TIGHT)


def layer_checks():
    """opcheck of the projections; autocast; Inductor."""
    rank, name = dist.get_rank(), dist.group.WORLD.group_name
    lens = uneven(8)
    x = draw(2, lens[rank], 5, dtype=torch.float32).requires_grad_()
    weights = [draw(n, 5, dtype=torch.float32).requires_grad_() for n in (48, 12)]
    biases = [draw(n, dtype=torch.float32).requires_grad_() for n in (48, 12)]
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        opcheck(op._project_to_heads_start.default,
                (x, weights, biases, [8, 2], lens, 2, False, rank, name))  # fmt: skip
        held = op.seq_to_heads([draw(2, lens[rank], 8, 6, dtype=torch.float32)], lens, rank, name)
        leaving = op.heads_to_seq_start(held, [8], lens, 0, 1, rank, name)
        leaving = leaving.detach().requires_grad_()
        output = draw(7, 48, dtype=torch.float32).requires_grad_()
        opcheck(op._heads_to_output_wait.default,
                ([leaving], output, None, 8, 2, lens, rank, name))  # fmt: skip
    torch.manual_seed(0)
    layer = deepsp.SequenceParallelAttention(64, 8, 4, rope_theta=1e4, chunks=2, device="cuda")
    torch._dynamo.reset()
    for dtype, tolerance in ((torch.float32, 1e-3), (torch.bfloat16, 5e-2)):
        y = draw(1, lens[rank], 64, dtype=torch.float32).requires_grad_()
        with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
            out = layer(y, seq_lens=lens, is_causal=True)
            compiled = torch.compile(layer, fullgraph=True)(y, seq_lens=lens, is_causal=True)
        assert out.dtype == dtype
        torch.testing.assert_close(compiled, out, rtol=tolerance, atol=tolerance)
        for a, b in zip(
            torch.autograd.grad(compiled.sum(), [y, *layer.parameters()]),
            torch.autograd.grad(out.sum(), [y, *layer.parameters()]),
            strict=True,
        ):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * 4)


def _union(spans):
    """Disjoint spans of the same points."""
    merged = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([begin, end])
    return merged


def overlap_profile():
    """Milliseconds in which something travels, in which the GPU computes, and in which both
    happen, from the profiler's trace of one forward and backward."""
    rank = dist.get_rank()
    layer = deepsp.SequenceParallelAttention(
        4096, 32, 8, chunks=4, device="cuda", dtype=torch.bfloat16
    )
    x = torch.randn(1, 8192, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def step():
        y = layer(x, is_causal=True)
        torch.autograd.grad(y, [x, *layer.parameters()], torch.ones_like(y))

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    dist.barrier()
    with torch.profiler.profile() as profile:
        step()
        torch.cuda.synchronize()
    travels, computes = [], []
    for event in profile.events():
        span = (event.time_range.start, event.time_range.end)
        name = event.name.lower()
        if name.startswith("gloo:") or ("nccl" in name and "kernel" in name):
            travels.append(span)
        elif event.device_type == torch.autograd.DeviceType.CUDA and "mem" not in name:
            computes.append(span)
    travels, computes = _union(travels), _union(computes)
    both = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in travels for b in computes)
    lengths = [sum(end - begin for begin, end in spans) / 1e3 for spans in (travels, computes)]
    return [
        f"rank {rank}: travelling {lengths[0]:.1f} ms, computing {lengths[1]:.1f} ms, "
        f"both at once {both / 1e3:.1f} ms"
    ]


def projection_speed():
    """Products written into blocks, against one product and a pack."""
    name = dist.group.WORLD.group_name
    lines, tokens = [], 8192
    for hidden, heads, kv_heads, chunks in ((4096, 32, 8, 1), (4096, 32, 8, 4), (2048, 16, 16, 8)):
        x = torch.randn(1, tokens, hidden, device="cuda", dtype=torch.bfloat16)
        counts = [heads, kv_heads, kv_heads]
        weights = [
            torch.randn(h * 128, hidden, device="cuda", dtype=torch.bfloat16) for h in counts
        ]
        fused = torch.cat(weights)

        def blocks(x=x, weights=weights, counts=counts, chunks=chunks):
            op._project_to_heads_start(x, weights, [], counts, [tokens], chunks, False, 0, name)

        def one_and_pack(x=x, fused=fused, counts=counts, chunks=chunks):
            qkv = F.linear(x, fused).unflatten(-1, (-1, 128)).split(counts, 2)
            op.seq_to_heads_start(qkv, [tokens], chunks, False, 0, name)

        times = [timed(call) * 1e3 for call in (blocks, one_and_pack)]
        lines.append(
            f"project {hidden} to {heads},{kv_heads} in {chunks} chunks: {times[0]:.2f} ms, "
            f"one product and a pack {times[1]:.2f} ms"
        )
    return lines


def kernel_bandwidth():
    """GB/s, read and written, of the pack (a group of one: nothing but the pack) and of a plain
    copy of the same bytes."""
    name = dist.group.WORLD.group_name
    lines = []
    for mib, heads, kv_heads, d, dtype in (
        (256, 32, 8, 128, torch.bfloat16), (256, 8, 8, 64, torch.bfloat16),
        (256, 32, 32, 128, torch.float32), (256, 8, 8, 65, torch.bfloat16),
        (256, 8, 8, 80, torch.bfloat16), (4, 32, 8, 128, torch.bfloat16),
        (16, 32, 8, 128, torch.bfloat16),
    ):  # fmt: skip
        s = (mib << 20) // ((heads + 2 * kv_heads) * d * dtype.itemsize)
        x = [torch.randn(1, s, h, d, device="cuda").to(dtype) for h in (heads, kv_heads, kv_heads)]
        flat = torch.cat([t.flatten() for t in x])
        to = torch.empty_like(flat)

        for y, t in zip(op.seq_to_heads(x, [s], 0, name), x, strict=True):
            assert torch.equal(y, t)
        plain = timed(lambda to=to, flat=flat: to.copy_(flat))
        pack = timed(lambda x=x, s=s: op.seq_to_heads(x, [s], 0, name))
        gb = 2 * flat.nbytes / 1e9
        lines.append(
            f"pack {mib} MiB of {heads},{kv_heads},{d} {dtype}: {gb / pack:.0f} GB/s, "
            f"plain copy {gb / plain:.0f}, ratio {plain / pack:.2f}"
        )
    return lines


def is_mapped():
    """Which way the tests behind it go."""
    found = deepsp.transport(device="cuda")
    assert found.machines == (tuple(range(dist.get_world_size())),), str(found)
    return [str(found)]


GLOO_2 = [
    exchange_values,
    attention_gradients,
    sixteen_bits,
    loss_and_rest,
    dropout,
    op_checks,
    along_dim,
    inductor,
    layer_gradients,
    layer_checks,
    overlap_profile,
    gathered,
    sharded_training,
    odd_rows,
    waited_for_twice,
]
ONE = [large, streams, threads, capture, never_waited_for]
SPEED = [kernel_bandwidth, projection_speed, cast_bandwidth]
GPUS = torch.cuda.device_count()
# Through symmetric memory: what is captured in a graph goes by NCCL, and is tested there.
MAPPED = [is_mapped, *GLOO_2, large, streams, threads]
# Backend, ranks, whether one rank sends to itself, the transport, tests.
RUNS = [
    ("gloo", 2, False, "auto", GLOO_2),
    ("nccl", 1, False, "auto", [*GLOO_2, *ONE, *SPEED]),
    ("nccl", 1, True, "auto", [*GLOO_2, *ONE]),
    ("nccl", 1, True, "mapped", MAPPED),
    *(("nccl", ranks, False, "mapped", MAPPED) for ranks in {min(GPUS, 4)} if ranks > 1),
]
RESULTS = Path(__file__).parents[2] / "benchmarks/results"


def work(
    rank: int, size: int, backend: str, collectives: bool, transport: str, tests, path: str, queue
) -> None:
    os.environ["DEEPSP_TEST_COLLECTIVES"] = str(int(collectives))
    os.environ["DEEPSP_TRANSPORT"] = transport
    torch.cuda.set_device(rank if backend == "nccl" else 0)
    dist.init_process_group(
        backend, init_method=f"file://{path}", rank=rank, world_size=size,
        timeout=datetime.timedelta(seconds=90),
    )  # fmt: skip
    for test in tests:
        start, error, lines = time.perf_counter(), None, None
        try:
            lines = test()
        except Exception:
            error = traceback.format_exc()
        queue.put((rank, test.__name__, time.perf_counter() - start, error, lines))
        if error:
            break  # the ranks are out of step
    else:
        dist.barrier()
        dist.destroy_process_group()
    queue.close()
    queue.join_thread()
    os._exit(0)  # threads of a broken group must not keep the process


def results_of(run: str, size: int, arguments: tuple, count: int, report) -> tuple[int, int]:
    """Runs the tests on ``size`` ranks. Returns how many passed and failed."""
    spawn = mp.get_context("spawn")
    queue = spawn.Queue()
    passed = failed = 0
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "store")
        group = [
            spawn.Process(target=work, args=(rank, size, *arguments, path, queue))
            for rank in range(size)
        ]
        for process in group:
            process.start()
        seen = dict.fromkeys(range(size), 0)
        open_ranks = set(seen)
        while open_ranks:
            try:
                rank, name, seconds, error, lines = queue.get(timeout=200)
            except Exception:
                report(f"FAILED {run}: no answer from ranks {open_ranks}")
                failed += len(open_ranks)
                break
            seen[rank] += 1
            if error or seen[rank] == count:
                open_ranks.discard(rank)
            failed, passed = failed + bool(error), passed + (not error)
            word = "FAILED" if error else "passed"
            report(f"{word} {run}, rank {rank}: {name} {seconds:.1f} s")
            for line in [error] if error else lines or []:
                report(f"    {line}")
        for process in group:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
    return passed, failed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("only", nargs="*", help="parts of the names of tests (default: all)")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("gpu-test: there is no GPU here")
    device = torch.cuda.get_device_name()
    said = []

    def report(line: str) -> None:
        said.append(line)
        print(line, flush=True)

    report(f"{device}, torch {torch.__version__}, {datetime.date.today()}")
    passed = failed = 0
    for backend, size, collectives, transport, tests in RUNS:
        tests = [t for t in tests if not args.only or any(n in t.__name__ for n in args.only)]
        if tests:
            mapped = ", mapped" * (transport == "mapped")
            run = f"{backend} x {size}" + ", collectives" * collectives + mapped
            arguments = backend, collectives, transport, tests
            found = results_of(run, size, arguments, len(tests), report)
            passed, failed = passed + found[0], failed + found[1]
    report(f"{passed} passed, {failed} failed")
    if not args.only:
        name = "_".join(device.lower().replace("nvidia", "").split())
        text = "\n".join(["# make gpu-test", "", "```text", *said, "```", ""])
        (RESULTS / f"gpu_{name}.md").write_text(text)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
