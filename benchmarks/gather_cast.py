"""Weights sharded in float32 and gathered in bfloat16: what casting before gathering saves.

Contenders, interleaved in one run, one thread a rank, over gloo, on a link of a set speed
(benchmarks/netlink.py: needs root and iproute2) and on this machine's loopback. Sizes are those of
the whole tensor in float32; "100 mixed" are 70 biases of 64 to 4096 and 30 small matrices, every
fifth of them gathered as float32.

gather:
  gather, then cast    all_gather_into_tensor in float32, then .to(bfloat16)
  cast, then gather    the shard .to(bfloat16), then all_gather_into_tensor
  FSDP2 unshard        fully_shard with MixedPrecisionPolicy(param_dtype=bfloat16); reshard untimed
  ours                 deepsp::gather_cast; for "100 mixed" one by one and coalesced
  cast and copy alone  the cast, and a copy for every other rank, without any of them: what memory
                       takes where ranks share it
  floor                bare irecv and isend of the same bfloat16 bytes, on warm buffers

reduce: gradients in bfloat16 to float32 sums of the rank's rows:
  upcast, then reduce-scatter    .to(float32), then reduce_scatter_tensor (gloo's is an all-reduce:
                                 twice the bytes)
  all-to-all, then sum           all_to_all_single in bfloat16, then a sum in float32
  ours, floor                    deepsp::reduce_scatter_cast; as above

step: one training step (AdamW) of a pre-norm causal transformer with all weights sharded; weights
are gathered for a layer's forward and again for its backward:
  compute              the same forward and backward with weights that are there; no optimizer
  unfused              torch alone: gather, then cast; upcast, then reduce-scatter
  FSDP2                fully_shard by block, param_dtype=bfloat16, reduce_dtype=float32
  FSDP2, ahead         the same with asynchronous unshards and forward prefetch by one block
  fused                deepsp.shard_parameters(prefetch_bytes=0)
  fused, prefetch      deepsp.shard_parameters()

A time is that of the slowest rank; where little is sent over a link, the mean of several calls in a
row (after a pause a link lets 256 KiB pass at once). Bytes on the wire are what a rank's interface
sent, headers included (the largest over the ranks). Peak memory is by how much the resident memory
grew at most during one call, its result included and with nothing idle kept from before.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from pathlib import Path

import gather_report
import torch
from gather_contenders import MIXED, measure, missing_ops, single
from gather_step import measure_step
from netlink import Netlink
from ranks import Ranks

import deepsp

PARTS = ["single", "mixed", "step"]
LOOPBACK = "loopback"


def cases_of(args: argparse.Namespace, ranks: int) -> list[tuple[str, list]]:
    cases = []
    if "single" in args.parts:
        sizes = [s for s in args.sizes if s * (ranks - 1) / ranks <= args.most]
        cases += [(f"{s:g} MiB", single(s)) for s in sizes]
    if "mixed" in args.parts:
        cases.append((gather_report.MIXED, MIXED))
    return cases


def tasks_of(args: argparse.Namespace, ranks: int) -> list[tuple[dict, tuple]]:
    """What to note of each task, and the task without its interface."""
    tasks = []
    repeats = (args.at_least, args.repeats)
    for name, parameters in cases_of(args, ranks):
        for direction in ("gather", "reduce"):
            note = {"part": direction, "case": name}
            tasks.append((note, (measure, direction, parameters, args.seconds, repeats)))
    if "step" in args.parts and ranks in args.step_ranks:
        shape = {
            name: getattr(args, name)
            for name in ("dim", "layers", "heads", "vocab", "batch", "seq", "lr")
        }
        tasks.append(({"part": "step"}, (measure_step, shape, args.step_repeats)))
    return tasks


def run(args: argparse.Namespace) -> list[dict]:
    from tqdm import tqdm

    tasks = {ranks: tasks_of(args, ranks) for ranks in args.ranks}
    found = []
    shaped = [rate for rate in args.rates if rate != LOOPBACK]
    total = len(args.rates) * sum(map(len, tasks.values()))
    with tqdm(total=total, unit="case") as bar:

        def all_tasks(ranks: Ranks, rate: str) -> None:
            interface = ranks.link and ranks.link.interface
            for note, (function, *arguments) in tasks[ranks.size]:
                bar.set_postfix_str(f"P {ranks.size}, {rate}, {' '.join(note.values())}")
                contenders = ranks(function, interface, *arguments)
                found.append(
                    {"ranks": ranks.size, "link": rate} | note | {"contenders": contenders}
                )
                bar.update()

        for size in args.ranks:
            if shaped:
                with Netlink(size, None) as link, Ranks(link, size) as ranks:
                    for rate in shaped:
                        link.set_rate(rate)
                        all_tasks(ranks, rate)
                    link.set_rate(None)  # the ranks' good-bye need not wait
            if LOOPBACK in args.rates:
                with Ranks(None, size) as ranks:
                    all_tasks(ranks, LOOPBACK)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--parts", nargs="+", default=PARTS, choices=PARTS, help="what to measure (default: all)")
    add(
        "--sizes",
        type=float,
        nargs="+",
        default=[1, 4, 16, 64, 256],
        metavar="MIB",
        help="of the single tensors (default: 1 4 16 64 256)",
    )
    add(
        "--most",
        type=float,
        default=128,
        metavar="MIB",
        help="leaves out single tensors of "
        "which a rank receives more in float32 (default: 128; 256 MiB on 2 ranks)",
    )
    add(
        "--rates",
        nargs="+",
        default=["500mbit", LOOPBACK],
        metavar="RATE",
        help=f"of the links, as tc writes it, or {LOOPBACK} (default: 500mbit {LOOPBACK})",
    )
    add("--ranks", type=int, nargs="+", default=[2, 4], help="group sizes (default: 2 4)")
    add("--repeats", type=int, default=20, help="of each contender, at most (default: 20)")
    add("--at-least", type=int, default=3, help="repeats, whatever they take (default: 3)")
    add("--seconds", type=float, default=4.0, help="for each case, if that is enough (default: 4)")
    add("--step-repeats", type=int, default=6, help="of the training step (default: 6)")
    add("--step-ranks", type=int, nargs="+", default=[2], help="of --ranks, with a training step")
    add("--dim", type=int, default=512, help="the transformer's features (default: 512)")
    add("--layers", type=int, default=4, help="its blocks (default: 4)")
    add("--heads", type=int, default=8, help="its heads (default: 8)")
    add("--vocab", type=int, default=1024, help="its vocabulary (default: 1024)")
    add("--batch", type=int, default=1, help="sequences of a rank (default: 1)")
    add("--seq", type=int, default=512, help="tokens of a sequence (default: 512)")
    add("--lr", type=float, default=1e-3, help="of AdamW (default: 0.001)")
    add(
        "--results",
        type=Path,
        metavar="FOLDER",
        help="writes gather_cast.md, .json and .png there, too",
    )
    args = parser.parse_args()
    for size in args.ranks:
        if any(rows % size for mib in args.sizes for (rows, _), _ in single(mib)) or 16 % size:
            parser.error(
                f"--ranks {size}: torch alone gathers shards of one size only; take ranks "
                "that divide 16 and the sizes' rows of 4 KiB"
            )

    from rich.console import Console

    console = Console(width=120)
    missing = missing_ops()
    if not hasattr(deepsp, "shard_parameters"):
        missing.append("shard_parameters")
    begin, load = time.perf_counter(), os.getloadavg()
    measured = run(args)
    found = {
        "command": shlex.join(["python", *sys.argv]),
        "settings": vars(args),
        "machine": {"cpus": os.cpu_count(), "load": load, "torch": torch.__version__},
        "minutes": (time.perf_counter() - begin) / 60,
        "missing": missing,
        "measured": measured,
    }
    gather_report.show(console, found)
    if args.results:
        gather_report.write(args.results, found)
        console.print(f"written: {args.results}/gather_cast.*")


if __name__ == "__main__":
    main()
