"""The whole exchange of one attention layer, forward and backward, without the attention.

Contenders, interleaved in one run, one thread a rank, over gloo on this machine:

  deepsp     deepsp.DistributedAttention around an attention that does nothing
  compiled   the same under torch.compile
  messages   the same in a group whose ranks don't share memory
  deepspeed  DeepSpeed's DistributedAttention, where heads divide by the ranks
  yunchang   yunchang's UlyssesAttention, likewise (both: pip install ".[bench]")
  torch      the same written with torch alone: for each tensor permute + contiguous,
             all_to_all_single, permute + contiguous
  floor      as many bare all_to_all_single as deepsp has exchanges, of the same bytes, on
             warm buffers

The attention that does nothing returns preallocated contiguous out, dq, dk and dv. A time is that
of the slowest rank; "first" is a contender's first call. Collectives, copies (of whole tensors, by
our kernels and by aten) and what they copied are counted by the profiler over one forward and
backward.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import platform
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from exchange_contenders import contenders

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
    first_ms: float
    min_ms: float
    median_ms: float
    collectives: int
    copies: int
    copied_mib: float


def measure(shape, dtype, seconds: float) -> list[Row]:
    run = contenders(shape, dtype)
    times: dict[str, list[float]] = {name: [] for name in run}
    first = {}
    for name, call in run.items():
        dist.barrier()
        start = time.perf_counter()
        call()
        first[name] = slowest([time.perf_counter() - start])[0]
    counts = {name: count(call, dtype) for name, call in run.items()}
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
        ms = slowest(taken)
        rows.append(
            Row(
                dist.get_world_size(),
                shape,
                str(dtype).removeprefix("torch."),
                mib,
                name,
                first[name],
                min(ms),
                statistics.median(ms),
                *counts[name],
            )
        )
    return rows


def slowest(seconds: list[float]) -> list[float]:
    """The slowest rank's, in ms."""
    taken = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return [t * 1e3 for t in taken.tolist()]


def count(call: Callable[[], None], dtype: torch.dtype) -> tuple[int, int, float]:
    """Collectives, copies and copied MiB of one call."""
    call()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, record_shapes=True) as profile:
        call()
    seen = Counter(event.name for event in profile.events())
    collectives = seen["deepsp::exchange"] + seen["c10d::alltoall_base_"]
    copies = seen["deepsp::pack"] + seen["deepsp::merge"] + seen["aten::copy_"]
    copied = 0
    for event in profile.events():
        if event.name == "aten::copy_":
            copied += math.prod(event.input_shapes[0]) * dtype.itemsize
        elif event.name == "deepsp::copy":
            copied += event.concrete_inputs[0]
    return collectives, copies, copied / 2**20


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
    deepsp.ranks.buffers.set_limit(4 << 30)  # what all contenders together keep
    for shape in args.sizes:
        for dtype in args.dtypes:
            torch.manual_seed(rank)
            rows = measure(shape, getattr(torch, dtype), args.seconds)
            deepsp.ranks.buffers.clear()
            if rank == 0:
                queue.put(rows)
    dist.barrier()
    dist.destroy_process_group()


EXCHANGE = [
    "P",
    "B,S,H,Hkv,D",
    "dtype",
    "MiB",
    "",
    "first",
    "min / median, ms",
    "× floor",
    "collectives",
    "copies",
    "copied MiB",
]
COPIES = ["heads, kv, D", "dtype", "pack, GiB/s", "plain copy", "ratio, median / min"]


def tables(rows: list[Row], speeds: list[dict]) -> list[tuple[str, list[str], list[list[str]]]]:
    """(title, columns, rows) of what was measured."""
    lines = []
    for key, group in itertools.groupby(rows, lambda r: (r.ranks, r.size, r.dtype)):
        by_name = {row.contender: row for row in group}
        base = by_name["floor"]
        lines += [
            [
                str(key[0]),
                ",".join(map(str, key[1])),
                key[2],
                f"{row.mib:.1f}",
                row.contender,
                f"{row.first_ms:.1f}",
                f"{row.min_ms:.1f} / {row.median_ms:.1f}",
                f"{row.min_ms / base.min_ms:.2f} / {row.median_ms / base.median_ms:.2f}",
                str(row.collectives),
                str(row.copies),
                f"{row.copied_mib:.1f}",
            ]
            for row in by_name.values()
        ]
    found = [("The exchange, forward + backward", EXCHANGE, lines)]
    if speeds:
        lines = [
            [
                f"{s['heads']},{s['kv_heads']},{s['head_dim']}",
                s["dtype"],
                f"{s['pack_gib_s']:.1f}",
                f"{s['plain_gib_s']:.1f}",
                f"{s['ratio_median']:.2f} / {s['ratio_min']:.2f}",
            ]
            for s in speeds
        ]
        found.append(("The pack kernel next to a plain copy (read + written)", COPIES, lines))
    return found


def show(rows: list[Row], speeds: list[dict]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=140)
    for title, columns, lines in tables(rows, speeds):
        table = Table(*columns, title=title)
        for line in lines:
            table.add_row(*line, end_section=columns is EXCHANGE and line[4] == "yunchang")
        console.print(table)


def markdown(found: dict, rows: list[Row], speeds: list[dict]) -> str:
    machine = found["machine"]
    lines = [
        f"`{machine['command']}`: gloo on one machine, one thread a rank, {machine['cpus']} cores, "
        f"torch {machine['torch']}, load {machine['load']:.1f} at the start. MiB: q, k, v and the "
        "output of one rank. Interleaved in one run; times of the slowest rank.",
        "",
    ]
    for title, columns, table in tables(rows, speeds):
        lines += [f"## {title}", "", "| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
        lines += ["| " + " | ".join(row) + " |" for row in table] + [""]
    return "\n".join(lines)


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
    parser.add_argument("--results", type=Path, help="folder for exchange.json and exchange.md")
    args = parser.parse_args()
    load = os.getloadavg()[0]

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
    found = {
        "machine": {
            "command": "python benchmarks/exchange.py " + " ".join(sys.argv[1:]),
            "cpus": os.cpu_count(),
            "processor": platform.processor(),
            "load": load,
            "torch": torch.__version__,
        },
        "exchange": [asdict(row) for row in rows],
        "pack": speeds,
    }
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1))
    if args.results:
        args.results.mkdir(parents=True, exist_ok=True)
        (args.results / "exchange.json").write_text(json.dumps(found, indent=1))
        (args.results / "exchange.md").write_text(markdown(found, rows, speeds))


if __name__ == "__main__":
    main()
