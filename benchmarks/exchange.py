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
import math
import statistics
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import bench
import torch
import torch.distributed as dist
from exchange_contenders import contenders
from tqdm import tqdm

import deepsp

SIZES = [
    (1, 512, 8, 8, 64),
    (1, 4096, 8, 8, 64),
    (1, 4096, 8, 2, 64),
    (1, 4096, 8, 1, 64),
    (2, 2048, 8, 8, 64),
    (1, 16384, 32, 8, 128),
]


def measure(shape: tuple[int, ...], dtype_name: str, seconds: float) -> list[dict]:
    """Return a row for each contender at one size."""
    dtype = getattr(torch, dtype_name)
    deepsp.ranks.buffers.set_limit(4 << 30)  # what all contenders together keep
    torch.manual_seed(dist.get_rank())
    calls = contenders(shape, dtype)
    first = {name: 1e3 * bench.largest(bench.clock(call))[0] for name, call in calls.items()}
    counts = {name: count(call, dtype) for name, call in calls.items()}
    ms = bench.timed(calls, math.inf, warmups=0, seconds=seconds, least=10)
    deepsp.ranks.buffers.clear()
    b, s, heads, kv_heads, d = shape
    size = b * s * (2 * heads + 2 * kv_heads) * d * dtype.itemsize / dist.get_world_size()
    return [
        {
            "ranks": dist.get_world_size(),
            "size": shape,
            "dtype": dtype_name,
            "mib": size / 2**20,  # of q, k, v and the output of one rank
            "contender": name,
            "first_ms": first[name],
            "min_ms": min(ms[name]),
            "median_ms": statistics.median(ms[name]),
            **counts[name],
        }
        for name in calls
    ]


def count(call: Callable[[], None], dtype: torch.dtype) -> dict[str, float]:
    """Count collectives, copies and copied MiB of one call."""
    call()
    events = bench.profiled(call)
    seen = Counter(event.name for event in events)
    copied = 0
    for event in events:
        if event.name == "aten::copy_":
            copied += math.prod(event.input_shapes[0]) * dtype.itemsize
        elif event.name == "deepsp::copy":
            copied += event.concrete_inputs[0]
    return {
        "collectives": seen["deepsp::exchange"] + seen["c10d::alltoall_base_"],
        "copies": seen["deepsp::pack"] + seen["deepsp::merge"] + seen["aten::copy_"],
        "copied_mib": copied / 2**20,
    }


def copy_speed(seconds: float) -> list[dict]:
    """Compare the pack kernel with a plain copy of the same bytes between warm buffers: a group of
    one, where seq_to_heads is nothing but the pack."""
    results, group = [], dist.group.WORLD.group_name
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

            ms = bench.timed({"pack": pack, "plain": plain}, math.inf, seconds=seconds, least=1)
            gib = 2e3 * sum(x.nbytes for x in inputs) / 2**30
            pack_median, plain_median = (statistics.median(ms[n]) for n in ("pack", "plain"))
            results.append(
                {
                    "heads": heads,
                    "kv_heads": kv_heads,
                    "head_dim": d,
                    "dtype": str(dtype).removeprefix("torch."),
                    "pack_gib_s": gib / pack_median,
                    "plain_gib_s": gib / plain_median,
                    "ratio_median": plain_median / pack_median,
                    "ratio_min": min(ms["plain"]) / min(ms["pack"]),
                }
            )
    return results


def tables(rows: list[dict], speeds: list[dict]) -> list[bench.Table]:
    key = ("ranks", "size", "dtype")
    floors = {tuple(r[k] for k in key): r for r in rows if r["contender"] == "floor"}
    lines = []
    for row in rows:
        floor = floors[tuple(row[k] for k in key)]
        lines.append(
            [
                row["ranks"],
                ",".join(map(str, row["size"])),
                row["dtype"],
                f"{row['mib']:.1f}",
                row["contender"],
                f"{row['first_ms']:.1f}",
                " / ".join(f"{row[k]:.1f}" for k in ("min_ms", "median_ms")),
                " / ".join(f"{row[k] / floor[k]:.2f}" for k in ("min_ms", "median_ms")),
                row["collectives"],
                row["copies"],
                f"{row['copied_mib']:.1f}",
            ]
        )
    columns = ["P", "B,S,H,Hkv,D", "dtype", "MiB", "", "first", "min / median, ms", "× floor"]
    columns += ["collectives", "copies", "copied MiB"]
    made = [bench.Table("The exchange, forward + backward", columns, lines)]
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
    columns = ["heads, kv, D", "dtype", "pack, GiB/s", "plain copy", "ratio, median / min"]
    title = "The pack kernel next to a plain copy (read + written)"
    return [*made, bench.Table(title, columns, lines)]


def size(text: str) -> tuple[int, ...]:
    numbers = tuple(int(n) for n in text.split(","))
    if len(numbers) != 5:
        raise argparse.ArgumentTypeError(f"{text}: five numbers are right, B,S,H,Hkv,D")
    return numbers


def main() -> None:
    parser = bench.parser_of(
        __doc__,
        ranks=([2, 4], "group sizes"),
        dtypes=(["float32", "bfloat16"], "of q, k and v"),
        seconds=(4.0, "time for each size and dtype"),
        results=(Path, "folder for exchange.json and exchange.md"),
    )
    parser.add_argument("--sizes", type=size, nargs="+", default=SIZES, metavar="B,S,H,Hkv,D")
    args = parser.parse_args()
    rows: list[dict] = []
    cases = [(shape, dtype) for shape in args.sizes for dtype in args.dtypes]
    for group_size in args.ranks:
        with bench.ranks_on(bench.LOOPBACK, group_size) as ranks:
            for shape, dtype in tqdm(cases, desc=f"{group_size} ranks"):
                rows += ranks(measure, shape, dtype, args.seconds)
    with bench.ranks_on(bench.LOOPBACK, 1) as ranks:
        speeds = ranks(copy_speed, args.seconds / 4)
    paragraph = (
        "gloo on one machine, one thread a rank. MiB: q, k, v and the output of one rank. "
        "Interleaved in one run; times of the slowest rank."
    )
    results = {"exchange": rows, "pack": speeds}
    title, made = "The exchange of one attention layer", tables(rows, speeds)
    bench.report(args, "exchange", title, [paragraph], made, results)


if __name__ == "__main__":
    main()
