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
from pathlib import Path

import bench
from collective_contenders import measure_collectives, measure_linears
from tensor_parallel_step import measure_step
from tqdm import tqdm

SHAPES = [(1, 4096, 512), (1, 16384, 1024), (2, 4096, 512), (4, 4096, 512), (32, 512, 512)]
LINEARS = [((1, 4096, 512), 2048), ((2, 2048, 512), 2048)]
DTYPES = ["float32", "bfloat16"]
PARTS = ["collectives", "linears", "step"]


def tasks_of(args: argparse.Namespace) -> list[tuple[str, dict, tuple]]:
    """Return (part, what to note of it, function and arguments)."""
    tasks = []
    if "collectives" in args.parts:
        for kind in ("all_gather", "reduce_scatter"):
            for shape in SHAPES:
                for dtype in args.dtypes:
                    note = {"kind": kind, "shape": shape, "dtype": dtype}
                    task = measure_collectives, kind, shape, dtype, args.repeats
                    tasks.append(("collectives", note, task))
    if "linears" in args.parts:
        for shape, columns in LINEARS:
            note = {"shape": shape, "columns": columns, "dtype": "float32"}
            tasks.append(("linears", note, (measure_linears, shape, columns, args.repeats)))
    if "step" in args.parts:
        names = ("hidden", "layers", "heads", "vocab", "batch", "seq")
        shape = {name: getattr(args, name) for name in names}
        tasks.append(("step", {"shape": shape}, (measure_step, shape, args.steps)))
    return tasks


def run(args: argparse.Namespace) -> dict:
    results: dict = {part: [] for part in PARTS}
    for size in args.ranks:
        for rate in args.rates:
            with bench.ranks_on(rate, size) as ranks:
                for part, note, task in tqdm(tasks_of(args), desc=f"{size} ranks, {rate}"):
                    case = {"ranks": f"{size}, {rate}", **note, "times": ranks(*task)}
                    results[part].append(case)
    return results


def rows_of(cases: list[dict], title: str, base: str, *more) -> list[list]:
    """Return a row for each contender: times, also relative to ``base``; and what functions of
    (contender's results, all results) return."""
    rows = []
    for case in cases:
        times = case["times"]
        for name, of in times.items():
            share = bench.ratio(of["ms"], times[base]["ms"])
            columns = [title.format(**case), name, bench.min_median(of["ms"]), share]
            rows.append([*columns, *(column(of, times) for column in more)])
    return rows


def loss_difference(of: dict, times: dict) -> str:
    pairs = zip(of["losses"], times["one process"]["losses"], strict=True)
    return f"{max(abs(a - b) for a, b in pairs):.1e}"


def tables(results: dict) -> list[bench.Table]:
    collectives = rows_of(
        results["collectives"],
        "{ranks}, {kind}, {shape}, {dtype}",
        "floor",
        lambda of, _: of["launches"],
        lambda of, times: "" if of is times["floor"] else of["copies"],
    )
    linears = rows_of(results["linears"], "{ranks}, {shape}, {columns} columns", "plain")
    model = "{ranks}, {shape[layers]} layers of {shape[hidden]}, {shape[vocab]} words, "
    model += "{shape[batch]} x {shape[seq]} tokens"
    steps = rows_of(results["step"], model, "torch tensor.parallel", loss_difference)
    ms = "ms, min / median"
    made = [
        bench.Table(
            "One collective along dimension 1, forward and backward",
            ["ranks, link, what, shape", "", ms, "× floor", "launches", "copies"],
            collectives,
        ),
        bench.Table(
            "Two linears between them, forward and backward",
            ["ranks, link, input, columns", "", ms, "× plain"],
            linears,
        ),
        bench.Table(
            "A training step",
            ["ranks, link, model", "", ms, "× torch", "loss, largest difference"],
            steps,
        ),
    ]
    return [table for table in made if table.rows]


def main() -> None:
    args = bench.parser_of(
        __doc__,
        parts=(PARTS, "what to measure", PARTS),
        ranks=([2], "group sizes"),
        rates=([bench.LOOPBACK], "of the links, 500mbit, say (root, iproute2), or loopback"),
        dtypes=(DTYPES, "of the collectives", DTYPES),
        repeats=(15, "of each collective and layer"),
        steps=(7, "training steps of each contender"),
        hidden=(512, "features of the model"),
        layers=(4, "of the model"),
        heads=(8, "of the model"),
        vocab=(8192, "of the model"),
        batch=(1, "sequences of a step"),
        seq=(1024, "tokens of a sequence"),
        results=(Path, "folder for collectives[_link].md and .json"),
    ).parse_args()
    results = run(args)
    name = "collectives" if args.rates == [bench.LOOPBACK] else "collectives_link"
    title, about = "Collectives along a dimension", __doc__.split(". A time")[0].replace("\n", " ")
    bench.report(args, name, title, [f"{about}."], tables(results), results)


if __name__ == "__main__":
    main()
