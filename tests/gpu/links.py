"""What links between GPUs carry, and the rates that benchmarks/simulate.py computes with."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import timed

import deepsp


def _slowest(seconds):
    x = torch.tensor(seconds, device="cuda", dtype=torch.float64)
    dist.all_reduce(x, dist.ReduceOp.MAX)
    return float(x)


def _exchange(group, each):
    """Seconds of an exchange in which each rank sends about so many bytes to each other one."""
    size = dist.get_world_size(group)
    x = torch.randn(1, max(1, each // 256), size, 128, device="cuda").to(torch.bfloat16)
    return _slowest(timed(lambda: deepsp.seq_to_heads([x], group=group)))


def transports_by_size():
    """Microseconds of an exchange by NCCL and through symmetric memory: where each is faster, so
    that "auto" may choose."""
    groups = {use: dist.new_group() for use in ("messages", "mapped")}
    for use, group in groups.items():
        deepsp.transport(group, use=use, device="cuda")
    lines = []
    for each in (1 << n for n in range(12, 29, 2)):
        nccl, mapped = (_exchange(group, each) * 1e6 for group in groups.values())
        lines.append(
            f"{each >> 10} KiB to each rank: NCCL {nccl:.0f} us, symmetric memory {mapped:.0f} us, "
            f"{each * (dist.get_world_size() - 1) / min(nccl, mapped) / 1e3:.0f} GB/s"
        )
    return lines if dist.get_rank() == 0 else []


def rates():
    """A table for benchmarks/machines.toml."""
    size = dist.get_world_size()
    a = torch.randn(8192, 4096, device="cuda").to(torch.bfloat16)
    w = torch.randn(14336, 4096, device="cuda").to(torch.bfloat16)
    products = 2 * a.numel() * w.size(0) / timed(lambda: F.linear(a, w))
    tokens, heads = 65536, 8
    x = [torch.randn(1, heads, tokens, 128, device="cuda").to(torch.bfloat16) for _ in range(3)]
    x = [t.requires_grad_() for t in x]
    work = 2 * tokens**2 * heads * 128  # of the causal half
    attend = work / timed(lambda: F.scaled_dot_product_attention(*x, is_causal=True))
    out = F.scaled_dot_product_attention(*x, is_causal=True)
    grad = torch.ones_like(out)
    back = 2.5 * work / timed(lambda: torch.autograd.grad(out, x, grad, retain_graph=True))
    flat = torch.empty(1 << 29, dtype=torch.uint8, device="cuda")
    to = torch.empty_like(flat)
    memory = 2 * flat.numel() / timed(lambda: to.copy_(flat))
    host = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
    to_host = host.numel() / timed(lambda: host.copy_(flat[: host.numel()], non_blocking=True))
    measured = {
        "products": products,
        "attend": attend,
        "attend_backward": back,
        "memory": memory,
        "host": to_host,
    }
    if size > 1:
        group = dist.group.WORLD
        launch, long = _exchange(group, 256), _exchange(group, 1 << 27)
        measured |= {
            "near": (size - 1) * (1 << 27) / (long - launch),
            "launch": launch,
            "size": size,
        }
    lines = [f"{name} = {value:.3g}" for name, value in measured.items()]
    name = torch.cuda.get_device_name()
    header = f"# One {name}, torch {torch.__version__}, {size} ranks: make gpu-test ONLY=links"
    return [header, "[measured]", *lines] if dist.get_rank() == 0 else []
