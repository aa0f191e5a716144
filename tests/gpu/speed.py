"""How fast kernels and products are, and what a layer hides."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import timed

import deepsp

op = torch.ops.deepsp


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
        (256, 32, 8, 128, torch.bfloat16),
        (256, 8, 8, 64, torch.bfloat16),
        (256, 32, 32, 128, torch.float32),
        (256, 8, 8, 65, torch.bfloat16),
        (256, 8, 8, 80, torch.bfloat16),
        (4, 32, 8, 128, torch.bfloat16),
        (16, 32, 8, 128, torch.bfloat16),
    ):
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


def cast_bandwidth():
    """The cast that packs many shards, against a copy of as many bytes read and written."""
    name = dist.group.WORLD.group_name
    lines = []
    for count, numel in ((1, 1 << 28), (100, 1 << 21), (512, 1 << 16)):
        shards = [torch.randn(numel, device="cuda") for _ in range(count)]
        sizes, targets = [numel] * count, [torch.bfloat16] * count
        # One rank: start is the cast alone.
        packed = timed(
            lambda shards=shards, sizes=sizes, targets=targets: op._gather_cast_coalesced_start(
                shards, sizes, targets, 0, name
            )
        )
        moved = count * numel * 6
        source = torch.empty(moved // 2, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        copied = timed(lambda target=target, source=source: target.copy_(source))
        lines.append(
            f"cast {count} x {numel} float32 to bfloat16: {moved / packed / 1e9:.0f} GB/s, "
            f"plain copy {moved / copied / 1e9:.0f}, ratio {copied / packed:.2f}"
        )
    return lines
