"""Packed documents: their ranges next to a mask of all pairs of tokens, on 2 ranks.

One attention, forward and backward, over a causal row of equal documents: the time of each, one
after the other in turns, the most memory that tensors of rank 0 take at a time, and the largest
difference of gradients in float64.
"""

import argparse

import bench
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import deepsp


def attention(q, k, v, documents, mask):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    how = {"documents": documents, "is_causal": True} if mask is None else {"attn_mask": mask()}
    out = deepsp.distributed_attention(*leaves, **how)
    out.backward(torch.ones_like(out))
    return [x.grad for x in leaves]


def peak(run) -> int:
    """Return the bytes that tensors made in ``run`` take at most at a time."""
    deepsp.ranks.buffers.clear()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    level = most = 0
    for event in sorted(_allocations(profiled), key=lambda event: event.start_time_ns):
        level += event.typed[1].alloc_size
        most = max(most, level)
    return most


def _allocations(profiled):
    pending = list(profiled.profiler.kineto_results.experimental_event_tree())
    while pending:
        event = pending.pop()
        pending += event.children
        if isinstance(event.typed[1], torch._C._profiler._ExtraFields_Allocation):
            yield event


def ways(args: argparse.Namespace, tokens: int, dtype: torch.dtype) -> dict:
    """Return each way's call, on a row of so many tokens."""
    shape = (1, tokens // dist.get_world_size(), args.heads, args.head_dim)
    each = tokens // args.documents
    documents = torch.arange(0, tokens + 1, each)
    x = [torch.randn(shape, dtype=dtype) for _ in range(3)]

    def mask():  # made once a step, as transformers makes it
        number = torch.arange(tokens) // each
        causal = torch.ones(tokens, tokens, dtype=torch.bool).tril_()
        return causal.logical_and_(number[:, None] == number)

    return {
        "ranges": lambda: attention(*x, documents, None),
        "mask": lambda: attention(*x, documents, mask),
    }


def measure(args: argparse.Namespace) -> tuple[dict, dict, float]:
    """Return milliseconds and bytes by way, and the largest difference of gradients."""
    torch.manual_seed(dist.get_rank())
    calls = ways(args, args.tokens, torch.float32)
    ms = bench.timed(calls, args.rounds, warmups=0)
    memory = {name: peak(call) for name, call in calls.items()}
    small = ways(args, args.tokens // args.smaller, torch.float64)
    pairs = zip(*(call() for call in small.values()), strict=True)
    return ms, memory, max(bench.largest(*[(a - b).abs().max().item() for a, b in pairs]))


def main() -> None:
    args = bench.parser_of(
        __doc__,
        tokens=(16384, "of the row"),
        documents=(8, "of equal lengths"),
        heads=(4, "of q, k and v"),
        head_dim=(64, "of q, k and v"),
        rounds=(3, "timed steps of each way"),
        smaller=(4, "by what, to compare gradients"),
    ).parse_args()
    with bench.ranks_on(bench.LOOPBACK) as ranks:
        ms, memory, off = ranks(measure, args)
    for name in ms:
        times = bench.min_median(ms[name], ".0f")
        print(f"{name:8}{times:>16} ms, min / median {memory[name] / 2**20:8.0f} MiB")
    shares = bench.ratio(ms["mask"], ms["ranges"]), memory["mask"] / memory["ranges"]
    print(f"mask / ranges: {shares[0]} of the time, {shares[1]:.1f} of the memory")
    tokens = args.tokens // args.smaller
    print(f"largest difference of gradients, float64, {tokens} tokens: {off:.1e}")


if __name__ == "__main__":
    main()
