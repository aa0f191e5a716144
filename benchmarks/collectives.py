"""All-gather and reduce-scatter along dimension 1, and what is built of them, on gloo on this
machine; contenders interleaved in one run, one thread a rank. A time is that of the slowest rank.

collectives   forward and backward of one:
  deepsp              deepsp.collectives: all_gather(x, 1, grad="partial"), reduce_scatter(x, 1)
  transpose + dim 0   torch alone: transposed, along dimension 0, and transposed back
  functional          torch.distributed._functional_collectives' own, with autograd
  floor               bare sends and receives of the same bytes, on warm buffers
linears       all-gather, linear, gelu, linear, reduce-scatter, forward and backward: plain, with
              all_gather_matmul and matmul_reduce_scatter (pipelined), and the products alone
step          a training step of a transformers Llama, tensor parallel with sequence parallel, by
              deepsp.schedule.ready, by torch.distributed.tensor.parallel, and whole in each process

Copies are those of whole tensors, aten's and our kernels', as the profiler has them.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import platform
import statistics
import sys
from pathlib import Path

import torch
from collective_contenders import measure_collectives, measure_linears
from netlink import Netlink
from ranks import Ranks
from rich.console import Console
from rich.table import Table
from tensor_parallel_step import measure_step
from tqdm import tqdm

SHAPES = [(1, 4096, 512), (1, 16384, 1024), (2, 4096, 512), (4, 4096, 512), (32, 512, 512)]
LINEARS = [((1, 4096, 512), 2048), ((2, 2048, 512), 2048)]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LOOPBACK = "loopback"
PARTS = ("collectives", "linears", "step")


def both(ms: list[float]) -> str:
    return f"{min(ms):.1f} / {statistics.median(ms):.1f}"


def ratio(ms: list[float], base: list[float]) -> str:
    median = statistics.median
    return f"{min(ms) / min(base):.2f} / {median(ms) / median(base):.2f}"


def run(args: argparse.Namespace) -> dict:
    found: dict = {part: [] for part in PARTS}
    shape = {k: getattr(args, k) for k in ("hidden", "layers", "heads", "vocab", "batch", "seq")}
    for size, rate in itertools.product(args.ranks, args.rates):
        tasks = []
        if "collectives" in args.parts:
            tasks += [
                (
                    "collectives",
                    {"kind": kind, "shape": of, "dtype": dtype},
                    (measure_collectives, kind, of, DTYPES[dtype], args.repeats),
                )
                for kind in ("all_gather", "reduce_scatter")
                for of in SHAPES
                for dtype in args.dtypes
            ]
        if "linears" in args.parts:
            tasks += [
                (
                    "linears",
                    {"shape": of, "columns": columns, "dtype": "float32"},
                    (measure_linears, of, columns, torch.float32, args.repeats),
                )
                for of, columns in LINEARS
            ]
        if "step" in args.parts:
            tasks.append(("step", {"shape": shape}, (measure_step, shape, args.steps)))
        with contextlib.ExitStack() as stack:
            shaped = rate != LOOPBACK
            link = stack.enter_context(Netlink(size, rate)) if shaped else None
            ranks = stack.enter_context(Ranks(link, size))
            for part, about, task in tqdm(tasks, desc=f"{size} ranks, {rate}", leave=False):
                found[part].append({"ranks": f"{size}, {rate}", **about, "times": ranks(*task)})
            if shaped:
                link.set_rate(None)  # the ranks' good-bye need not wait
    return found


def tables(found: dict) -> list[tuple[str, list[str], list[list[str]]]]:
    result = []
    rows = []
    for case in found["collectives"]:
        times = case["times"]
        for name, of in times.items():
            rows.append(
                [
                    f"{case['ranks']}, {case['kind']}, {tuple(case['shape'])}, {case['dtype']}",
                    name,
                    both(of["ms"]),
                    ratio(of["ms"], times["floor"]["ms"]),
                    str(of["launches"]),
                    str(of["copies"]) if name != "floor" else "",
                ]
            )
    columns = ["ranks, link, what, shape", "", "ms, min / median", "× floor", "launches", "copies"]
    result.append(("One collective along dimension 1, forward and backward", columns, rows))
    rows = [
        [
            f"{case['ranks']}, {tuple(case['shape'])}, {case['columns']} columns",
            name,
            both(of["ms"]),
            ratio(of["ms"], case["times"]["plain"]["ms"]),
        ]
        for case in found["linears"]
        for name, of in case["times"].items()
    ]
    columns = ["ranks, link, input, columns", "", "ms, min / median", "× plain"]
    result.append(("Two linears between them, forward and backward", columns, rows))
    rows = []
    for case in found["step"]:
        times, of_model = case["times"], case["shape"]
        text = "{layers} layers of {hidden}, {vocab} words, {batch} x {seq} tokens"
        reference = times["one process"]["losses"]
        for name, of in times.items():
            far = max(abs(a - b) for a, b in zip(of["losses"], reference, strict=True))
            rows.append(
                [
                    f"{case['ranks']}, {text.format(**of_model)}",
                    name,
                    both(of["ms"]),
                    ratio(of["ms"], times["torch tensor.parallel"]["ms"]),
                    f"{far:.1e}",
                ]
            )
    columns = ["ranks, link, model", "", "ms, min / median", "× torch", "loss, largest difference"]
    result.append(("A training step", columns, rows))
    return [table for table in result if table[2]]


def markdown(found: dict) -> str:
    machine = found["machine"]
    lines = [
        "# Collectives along a dimension",
        "",
        f"`{machine['command']}`: {machine['cpus']} cores, {machine['cpu']}, torch "
        f"{machine['torch']}, load {machine['load']:.1f} at the start. {__doc__.split('.')[0]}.",
        "",
    ]
    for title, columns, rows in tables(found):
        lines += [f"## {title}", "", "| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
        lines += ["| " + " | ".join(row) + " |" for row in rows] + [""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], help="sizes of the group")
    parser.add_argument(
        "--rates",
        nargs="+",
        default=[LOOPBACK],
        help=f"of the link between ranks, 500mbit, say (root, iproute2), or {LOOPBACK}",
    )
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["float32", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=15, help="of each collective and layer")
    parser.add_argument("--steps", type=int, default=7, help="training steps of each contender")
    for name, default in [
        ("hidden", 512),
        ("layers", 4),
        ("heads", 8),
        ("vocab", 8192),
        ("batch", 1),
        ("seq", 1024),
    ]:
        parser.add_argument(f"--{name}", type=int, default=default, help="of the model")
    parser.add_argument("--results", type=Path, help="folder for collectives[_link].md and .json")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    found = run(args)
    found["machine"] = {
        "command": "python benchmarks/collectives.py " + " ".join(sys.argv[1:]),
        "cpus": os.cpu_count(),
        "cpu": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "load": load,
    }
    console = Console()
    for title, columns, rows in tables(found):
        table = Table(*columns, title=title)
        for row in rows:
            table.add_row(*row)
        console.print(table)
    if args.results:
        args.results.mkdir(parents=True, exist_ok=True)
        name = "collectives" if args.rates == [LOOPBACK] else "collectives_link"
        (args.results / f"{name}.json").write_text(json.dumps(found, indent=1))
        (args.results / f"{name}.md").write_text(markdown(found))


if __name__ == "__main__":
    main()
