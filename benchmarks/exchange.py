"""The whole exchange of one attention layer, forward and backward, without the attention.

Contenders, interleaved in one run, one thread a rank, over gloo on this machine:

  deepsp   deepsp.DistributedAttention around an attention that does nothing
  torch    the same written with torch alone: for each tensor permute + contiguous,
           all_to_all_single, permute + contiguous
  floor    as many bare all_to_all_single as deepsp has exchanges, of the same bytes, on
           warm buffers

The attention that does nothing returns preallocated contiguous out, dq, dk and dv. A time is that
of the slowest rank. Collectives and copies (of whole tensors, by our kernels and by aten) are
counted by the profiler over one forward and backward.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

import deepsp

SIZES = [
    (1, 512, 8, 8, 64),
    (1, 4096, 8, 8, 64),
    (1, 4096, 8, 2, 64),
    (1, 4096, 8, 1, 64),
    (2, 2048, 8, 8, 64),
    (1, 16384, 32, 8, 128),
]


@dataclass
class Row:
    """One contender at one size."""

    ranks: int
    size: tuple[int, ...]
    dtype: str
    mib: float  # of q, k, v and the output of one rank: what the exchange is about
    contender: str
    min_ms: float
    median_ms: float
    collectives: int
    copies: int


class Nothing(torch.autograd.Function):
    """An attention that costs nothing: its results were there before."""

    @staticmethod
    def forward(ctx, q, k, v, results):
        ctx.results = results
        return results[0]

    @staticmethod
    def backward(ctx, grad):
        return *ctx.results[1:], None


def do_nothing(results: dict) -> Callable[..., Tensor]:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        key = (q.shape, k.shape)
        if key not in results:
            results[key] = [torch.randn(x.shape, dtype=x.dtype) for x in (q, q, k, v)]
        return Nothing.apply(q, k, v, results[key])

    return attention


class TorchSeqToHeads(torch.autograd.Function):
    """[B, S/P, H, D] -> [B, S, H/P, D] with torch alone."""

    @staticmethod
    def forward(ctx, x):
        return torch_exchange(x, by_heads=True)

    @staticmethod
    def backward(ctx, grad):
        return torch_exchange(grad, by_heads=False)


class TorchHeadsToSeq(torch.autograd.Function):
    """[B, S, H/P, D] -> [B, S/P, H, D] with torch alone."""

    @staticmethod
    def forward(ctx, x):
        return torch_exchange(x, by_heads=False)

    @staticmethod
    def backward(ctx, grad):
        return torch_exchange(grad, by_heads=True)


def torch_exchange(x: Tensor, by_heads: bool) -> Tensor:
    size = dist.get_world_size()
    b, s, h, d = x.shape
    if by_heads:
        sent = x.reshape(b, s, size, h // size, d).permute(2, 0, 1, 3, 4).contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        return received.permute(1, 0, 2, 3, 4).reshape(b, size * s, h // size, d)
    sent = x.reshape(b, size, s // size, h, d).permute(1, 0, 2, 3, 4).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    return received.permute(1, 2, 0, 3, 4).reshape(b, s // size, size * h, d)


def torch_alone(q: Tensor, k: Tensor, v: Tensor, attention) -> Tensor:
    size = dist.get_world_size()
    if k.size(2) < size:  # a kv head for every rank
        k, v = (x.repeat_interleave(size // x.size(2), 2) for x in (k, v))
    return TorchHeadsToSeq.apply(attention(*(TorchSeqToHeads.apply(x) for x in (q, k, v))))


def floor(shape: tuple[int, ...], dtype: torch.dtype) -> Callable[[], None]:
    """The bare collectives: q, k and v together; the output; and both ways back."""
    b, s, heads, kv_heads, d = shape
    rank, size = dist.get_rank(), dist.get_world_size()
    lens = deepsp.seq_lens(s)

    def columns(p: int, kv: bool) -> int:
        q0, q1, kv0, kv1 = torch.ops.deepsp.head_split(heads, kv_heads, size, p)
        return (q1 - q0 + (2 * (kv1 - kv0) if kv else 0)) * d

    exchanges = []
    for kv in (True, False):
        by_tokens = [lens[rank] * b * columns(p, kv) for p in range(size)]
        by_heads = [n * b * columns(rank, kv) for n in lens]
        tokens, whole = (torch.randn(sum(x)).to(dtype) for x in (by_tokens, by_heads))
        there = (whole, tokens, by_heads, by_tokens)
        back = (tokens.clone(), whole.clone(), by_tokens, by_heads)
        exchanges += [there, back]

    def run() -> None:
        for received, sent, gets, gives in exchanges:
            dist.all_to_all_single(received, sent, gets, gives)

    return run


def contenders(shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Callable[[], None]]:
    b, s, heads, kv_heads, d = shape
    mine = deepsp.seq_lens(s)[dist.get_rank()]
    q, k, v = (
        torch.randn(b, mine, h, d, dtype=dtype).requires_grad_()
        for h in (heads, kv_heads, kv_heads)
    )
    grad = torch.randn(b, mine, heads, d, dtype=dtype)
    attention = do_nothing({})
    ours = deepsp.DistributedAttention(attention)

    def train(forward: Callable[[], Tensor]) -> Callable[[], None]:
        return lambda: torch.autograd.grad(forward(), (q, k, v), grad)

    return {
        "deepsp": train(lambda: ours(q, k, v)),
        "torch": train(lambda: torch_alone(q, k, v, attention)),
        "floor": floor(shape, dtype),
    }


def measure(shape, dtype, seconds: float) -> list[Row]:
    run = contenders(shape, dtype)
    counts = {name: count(call) for name, call in run.items()}
    times: dict[str, list[float]] = {name: [] for name in run}
    for call in run.values():
        call()
    begin = time.perf_counter()
    for repeat in itertools.count():
        # Every rank stops at the same repeat.
        done = torch.tensor([time.perf_counter() - begin > seconds and repeat >= 10])
        dist.broadcast(done, 0)
        if done:
            break
        for name, call in run.items():
            dist.barrier()
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    b, s, heads, kv_heads, d = shape
    mib = b * s * (2 * heads + 2 * kv_heads) * d * dtype.itemsize / dist.get_world_size() / 2**20
    rows = []
    for name, taken in times.items():
        slowest = torch.tensor(taken)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        ms = [t * 1e3 for t in slowest.tolist()]
        rows.append(
            Row(
                dist.get_world_size(),
                shape,
                str(dtype).removeprefix("torch."),
                mib,
                name,
                min(ms),
                statistics.median(ms),
                *counts[name],
            )
        )
    return rows


def count(call: Callable[[], None]) -> tuple[int, int]:
    """Collectives and copies of one call."""
    call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    seen = Counter(event.name for event in profile.events())
    collectives = seen["deepsp::exchange"] + seen["c10d::alltoall_base_"]
    copies = seen["deepsp::pack"] + seen["deepsp::merge"] + seen["aten::copy_"]
    return collectives, copies


def copy_speed(seconds: float) -> list[dict]:
    """The pack kernel against a plain copy of the same bytes between warm buffers: a group of
    one, where seq_to_heads is nothing but the pack."""
    results = []
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD.group_name
    for heads, kv_heads, d in ((4, 4, 64), (16, 4, 128), (8, 8, 128)):
        for dtype in (torch.float32, torch.bfloat16):
            s = (32 << 20) // ((heads + 2 * kv_heads) * d * dtype.itemsize)
            inputs = [torch.randn(1, s, h, d).to(dtype) for h in (heads, kv_heads, kv_heads)]
            warm = [torch.empty_like(x) for x in inputs]

            def pack(inputs=inputs, s=s):
                torch.ops.deepsp.seq_to_heads(inputs, [s], 0, group)

            def plain(inputs=inputs, warm=warm):
                for to, x in zip(warm, inputs, strict=True):
                    to.copy_(x)

            taken: dict[str, list[float]] = {"pack": [], "plain": []}
            begin = time.perf_counter()
            while time.perf_counter() - begin < seconds:
                for name, call in (("pack", pack), ("plain", plain)):
                    start = time.perf_counter()
                    call()
                    taken[name].append(time.perf_counter() - start)
            gib = 2 * sum(x.nbytes for x in inputs) / 2**30
            results.append(
                {
                    "heads": heads,
                    "kv_heads": kv_heads,
                    "head_dim": d,
                    "dtype": str(dtype).removeprefix("torch."),
                    "pack_gib_s": gib / statistics.median(taken["pack"]),
                    "plain_gib_s": gib / statistics.median(taken["plain"]),
                    "ratio_median": statistics.median(taken["plain"])
                    / statistics.median(taken["pack"]),
                    "ratio_min": min(taken["plain"]) / min(taken["pack"]),
                }
            )
    dist.destroy_process_group()
    return results


def work(rank: int, ranks: int, path: str, args, queue) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=ranks)
    for shape in args.sizes:
        for dtype in args.dtypes:
            torch.manual_seed(rank)
            rows = measure(shape, getattr(torch, dtype), args.seconds)
            deepsp.buffers.clear()
            if rank == 0:
                queue.put(rows)
    dist.barrier()
    dist.destroy_process_group()


def show(rows: list[Row], speeds: list[dict]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=120)
    table = Table(
        "P",
        "B,S,H,Hkv,D",
        "dtype",
        "MiB",
        "",
        "min ms",
        "median ms",
        "× floor min",
        "× floor median",
        "collectives",
        "copies",
        title="exchange, forward + backward",
    )
    for key, group in itertools.groupby(rows, lambda r: (r.ranks, r.size, r.dtype)):
        by_name = {row.contender: row for row in group}
        base = by_name["floor"]
        for row in by_name.values():
            table.add_row(
                str(key[0]),
                ",".join(map(str, key[1])),
                key[2],
                f"{row.mib:.0f}",
                row.contender,
                f"{row.min_ms:.2f}",
                f"{row.median_ms:.2f}",
                f"{row.min_ms / base.min_ms:.2f}",
                f"{row.median_ms / base.median_ms:.2f}",
                str(row.collectives),
                str(row.copies),
            )
        table.add_section()
    console.print(table)
    if speeds:
        table = Table(
            "heads, kv, D",
            "dtype",
            "pack GiB/s",
            "plain copy GiB/s",
            "median ratio",
            "min ratio",
            title="pack kernel against a plain copy (read + write)",
        )
        for s in speeds:
            table.add_row(
                f"{s['heads']},{s['kv_heads']},{s['head_dim']}",
                s["dtype"],
                f"{s['pack_gib_s']:.1f}",
                f"{s['plain_gib_s']:.1f}",
                f"{s['ratio_median']:.2f}",
                f"{s['ratio_min']:.2f}",
            )
        console.print(table)


def size(text: str) -> tuple[int, ...]:
    numbers = tuple(int(n) for n in text.split(","))
    if len(numbers) != 5:
        raise argparse.ArgumentTypeError(f"{text}: five numbers are right, B,S,H,Hkv,D")
    return numbers


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="group sizes")
    parser.add_argument("--sizes", type=size, nargs="+", default=SIZES, metavar="B,S,H,Hkv,D")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--seconds", type=float, default=4.0, help="time for each size and dtype")
    parser.add_argument("--no-kernels", action="store_true", help="leave out the pack kernel")
    parser.add_argument("--json", metavar="FILE", help="writes the figures, too")
    args = parser.parse_args()

    from tqdm import tqdm

    torch.set_num_threads(1)
    rows: list[Row] = []
    spawn = mp.get_context("spawn")
    with tqdm(total=len(args.ranks) * len(args.sizes) * len(args.dtypes), unit="case") as bar:
        for ranks in args.ranks:
            queue = spawn.SimpleQueue()
            with tempfile.TemporaryDirectory() as folder:
                group = mp.spawn(
                    work, (ranks, os.path.join(folder, "store"), args, queue), ranks, join=False
                )
                for _ in range(len(args.sizes) * len(args.dtypes)):
                    while queue.empty():
                        if group.join(timeout=0.05):
                            break
                    rows += queue.get()
                    bar.update()
                while not group.join():
                    pass
    speeds = [] if args.no_kernels else copy_speed(args.seconds / 4)
    show(rows, speeds)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(
                {
                    "machine": {
                        "cpus": os.cpu_count(),
                        "processor": platform.processor(),
                        "load": os.getloadavg(),
                        "torch": torch.__version__,
                    },
                    "exchange": [asdict(row) for row in rows],
                    "pack": speeds,
                },
                file,
                indent=1,
            )


if __name__ == "__main__":
    main()
