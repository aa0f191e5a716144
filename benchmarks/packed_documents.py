"""Packed documents: their ranges next to a mask of all pairs of tokens, on 2 ranks.

One attention, forward and backward, over a causal row of equal documents: the time of each, one
after the other in turns, the most memory that tensors of rank 0 take at a time, and the largest
difference of gradients in float64.
"""

import argparse
import statistics
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm

import deepsp


def attention(q, k, v, documents, mask):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    how = {"documents": documents, "is_causal": True} if mask is None else {"attn_mask": mask()}
    out = deepsp.distributed_attention(*leaves, **how)
    out.backward(torch.ones_like(out))
    return [x.grad for x in leaves]


def peak(run) -> int:
    """Bytes that tensors made in ``run`` take at most at a time."""
    deepsp.ranks.buffers.clear()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        run()
    level = most = 0
    for event in sorted(_allocations(found), key=lambda event: event.start_time_ns):
        level += event.typed[1].alloc_size
        most = max(most, level)
    return most


def _allocations(found):
    pending = list(found.profiler.kineto_results.experimental_event_tree())
    while pending:
        event = pending.pop()
        pending += event.children
        if isinstance(event.typed[1], torch._C._profiler._ExtraFields_Allocation):
            yield event


def measure(rank: int, ranks: int, store: str, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    shape = (1, args.tokens // ranks, args.heads, args.head_dim)
    documents = torch.arange(0, args.tokens + 1, args.tokens // args.documents)

    def mask():  # made once a step, as transformers makes it
        number = torch.arange(args.tokens) // (args.tokens // args.documents)
        causal = torch.ones(args.tokens, args.tokens, dtype=torch.bool).tril_()
        return causal.logical_and_(number[:, None] == number)

    ways = {"ranges": None, "mask": mask}
    torch.manual_seed(rank)
    x = [torch.randn(shape) for _ in range(3)]
    times = {name: [] for name in ways}
    rounds = tqdm(range(args.rounds), desc="rounds", disable=rank != 0)
    for _ in rounds:
        for name, made in ways.items():
            dist.barrier()
            begin = time.perf_counter()
            attention(*x, documents, made)
            times[name].append(time.perf_counter() - begin)
    memory = {
        name: peak(lambda made=made: attention(*x, documents, made)) for name, made in ways.items()
    }
    args.tokens //= args.smaller
    shape = (1, args.tokens // ranks, args.heads, args.head_dim)
    documents = torch.arange(0, args.tokens + 1, args.tokens // args.documents)
    x = [torch.randn(shape, dtype=torch.float64) for _ in range(3)]
    pairs = zip(*(attention(*x, documents, made) for made in ways.values()), strict=True)
    off = torch.stack([(a - b).abs().max() for a, b in pairs]).max()
    dist.all_reduce(off, dist.ReduceOp.MAX)
    if rank == 0:
        for name in ways:
            low, mid = min(times[name]), statistics.median(times[name])
            print(f"{name:8}{low:8.2f} s min {mid:8.2f} s median {memory[name] / 2**20:8.0f} MiB")
        fast = min(times["mask"]) / min(times["ranges"])
        print(f"{'ratio':8}{fast:8.1f}{'':20}{memory['mask'] / memory['ranges']:16.1f}")
        print(f"largest difference of gradients, float64, {args.tokens} tokens: {off.item():.1e}")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    import tempfile

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=16384, help="of the row")
    parser.add_argument("--documents", type=int, default=8, help="of equal lengths")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3, help="timed steps of each way")
    parser.add_argument("--smaller", type=int, default=4, help="by what, to compare gradients")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, args=(2, f"{folder}/store", args), nprocs=2)


if __name__ == "__main__":
    main()
