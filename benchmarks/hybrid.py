"""A gated delta net layer and a Mamba 2 layer on a sequence that ranks share, forward and backward.

The layers (benchmarks/hybrid_layers.py) have the parts, functions and proportions that they have in
transformers, at an eighth of the size of Qwen3.5's 9B and Nemotron-H's 8B: 512 features, float32,
one row. Contenders, interleaved in one run over gloo on this machine, one thread a rank:

  by heads       deepsp: previous_tokens before the convolution, DistributedRecurrence by heads
  by state       the same by state (state="pass")
  Megatron's     an all-to-all of the whole output of in_proj, the gate included; convolution,
                 recurrence and norm on all tokens of some heads; an all-to-all back. Written with
                 torch, with one collective each way and one copy before it (Megatron makes more: it
                 also undoes and redoes the order of tokens that its attention wants)
  .. deepsp's    the same steps around deepsp's exchange, through shared memory
     exchange
  one process    the whole sequence, on as many threads as there are cores

First, outputs and input gradients are compared with those of one process. A time is that of the
slowest rank. "Between the projections" leaves out both projections, and has a recurrence that does
nothing: what is left is the convolution, the exchange and the norm. On the link (needs root;
benchmarks/netlink.py), deepsp sends messages. Bytes are those that a rank receives, counted from
gloo's sends in a group that sends messages. Memory is what the largest rank's process takes at most
above what it held before (VmHWM), by messages: memory that ranks share would count for each of
them.
"KiB a token" is what the longest sequence takes more than the shortest, a token.

The delta rule is transformers' function in segments of 1024 tokens, with the state handed on: its
backward takes time that is quadratic in the length.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
from collections.abc import Callable
from pathlib import Path

import bench
import hybrid_layers as layers
import torch
import torch.distributed as dist
from tqdm import tqdm

HIDDEN = 512
KINDS = {
    "gated delta net": lambda: layers.GatedDeltaNet(HIDDEN, heads=8, dim=64),
    "Mamba 2": lambda: layers.Mamba2(HIDDEN, heads=16, dim=64, groups=4, state=32, chunk=128),
}
SIZES = {
    "gated delta net": "8 value heads on 4 key heads of 64, chunks of 64",
    "Mamba 2": "16 heads of 64, 4 groups, a state of 32, chunks of 128",
}


class Case:
    """A layer and this rank's part of its input and output gradient."""

    def __init__(self, kind: str, length: int, group=None, between: bool = False):
        torch.manual_seed(0)
        rank, size = dist.get_rank(), dist.get_world_size()
        self.layer, self.between = KINDS[kind](), between
        if between:
            layers.do_nothing(self.layer)
        self.ways = layers.ways(self.layer, group)
        features = self.layer.in_proj.in_features, self.layer.out_proj.out_features
        if between:
            features = self.layer.in_proj.out_features, self.layer.out_proj.in_features
            self.ways.pop(layers.STATE, None)
        x, grad = (torch.randn(1, length, n) for n in features)
        self.x = x.chunk(size, 1)[rank].clone().requires_grad_()
        self.grad = grad.chunk(size, 1)[rank].clone()

    def step(self, way: Callable) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output and the input's gradient."""
        layer = self.layer
        out = way(self.x) if self.between else layer.out_proj(way(layer.in_proj(self.x)))
        out.backward(self.grad)
        gradient, self.x.grad = self.x.grad, None
        layer.zero_grad()
        return out.detach(), gradient


# ------------------------------------------------------------------------- tasks of the ranks


def differences(kind: str, length: int) -> dict[str, float]:
    """Return how far outputs and input gradients are from those of one process, relative to the
    largest entry."""
    rank, size = dist.get_rank(), dist.get_world_size()
    case, whole = Case(kind, length), Case(kind, length)

    def gathered(part: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(part) for _ in range(size)]
        dist.all_gather(parts, part)
        return torch.cat(parts, 1)

    whole.x = gathered(case.x.detach()).requires_grad_()
    whole.grad = gathered(case.grad)
    expected = [x.chunk(size, 1)[rank] for x in whole.step(layers.whole(whole.layer))]
    off = {}
    for name, way in case.ways.items():
        pairs = zip(case.step(way), expected, strict=True)
        off[name] = max(
            bench.largest(*[((a - b).abs().max() / b.abs().max()).item() for a, b in pairs])
        )
    return off


def received(kind: str, length: int) -> dict[str, float]:
    """Return the bytes that a rank receives in forward and backward, the mean over ranks."""
    case, received = Case(kind, length, bench.group_of("messages")), {}
    case.ways.pop(layers.MEGATRON_BY_DEEPSP, None)
    for name, way in case.ways.items():
        case.step(way)
        layers.AllToAll.received = 0
        events = bench.profiled(lambda way=way: case.step(way))
        total = bench.summed(bench.gloo_elements(events) + layers.AllToAll.received)
        received[name] = total / dist.get_world_size()
    return received


@functools.cache
def case_of(kind: str, length: int, between: bool, messages: bool) -> Case:
    return Case(kind, length, bench.group_of("messages") if messages else None, between)


def seconds(kind: str, length: int, name: str, between: bool, messages: bool) -> float:
    """Return the seconds of one step."""
    torch.set_num_threads(os.cpu_count() if dist.get_world_size() == 1 else 1)
    case = case_of(kind, length, between, messages)
    return bench.largest(bench.clock(lambda: case.step(case.ways[name])))[0]


def memory(kind: str, length: int, name: str) -> float:
    """Return the MiB of one step."""
    group = bench.group_of("messages")
    case, small = (Case(kind, n, group) for n in (length, 256))
    small.step(small.ways[name])
    _, mib = bench.growth(lambda: case.step(case.ways[name]))
    return bench.largest(mib)[0]


# ----------------------------------------------------------------------------- what is asked


def names(size: int, between: bool = False) -> list[str]:
    if size == 1:
        return [layers.WHOLE]
    ways = [layers.HEADS, layers.STATE, layers.MEGATRON, layers.MEGATRON_BY_DEEPSP]
    return [name for name in ways if not (between and name == layers.STATE)]


def times(lengths, groups: dict[int, bench.Ranks], between=False, messages=False, rounds=1) -> list:
    """Return seconds by kind, length, number of ranks and contender; all in turns."""
    cases = [
        {"kind": kind, "length": length, "ranks": size, "name": name, "seconds": []}
        for kind in KINDS
        for length in lengths
        for size in groups
        for name in names(size, between)
        if not (messages and name == layers.MEGATRON_BY_DEEPSP)
    ]
    about = "on the link" if messages else "between projections" if between else "layers"
    for case in tqdm(cases * rounds, desc=about, smoothing=0):
        task = case["kind"], case["length"], case["name"], between, messages
        case["seconds"].append(groups[case["ranks"]](seconds, *task))
    return cases


def measure(args: argparse.Namespace) -> dict:
    results: dict = {"off": [], "bytes": [], "memory": []}
    sizes = (1, *args.ranks)
    with contextlib.ExitStack() as stack:
        groups = {n: stack.enter_context(bench.ranks_on(bench.LOOPBACK, n)) for n in sizes}
        for size in args.ranks:
            for kind in KINDS:
                off = groups[size](differences, kind, args.compare)
                results["off"].append({"kind": kind, "ranks": size, "off": off})
                if max(off.values()) > 1e-5:
                    raise SystemExit(f"{kind} on {size} ranks differs from one process: {off}")
                counted = groups[size](received, kind, args.compare)
                results["bytes"].append({"kind": kind, "ranks": size, "bytes": counted})
        results["layers"] = times(args.lengths, groups, rounds=args.rounds)
        results["between"] = times(args.lengths, groups, between=True, rounds=2 * args.rounds)
    if args.rate and os.geteuid() == 0:
        with bench.ranks_on(args.rate) as ranks:
            groups = {2: ranks}
            results["link"] = times(args.lengths[:1], groups, messages=True, rounds=args.rounds)
    bench.return_freed_memory()
    for size in tqdm(sizes, desc="memory"):
        with bench.ranks_on(bench.LOOPBACK, size) as ranks:
            for kind in KINDS:
                for name in names(size):
                    mib = [ranks(memory, kind, length, name) for length in args.lengths]
                    case = {"kind": kind, "ranks": size, "name": name, "mib": mib}
                    results["memory"].append(case)
    return results


# ------------------------------------------------------------------------------------- tables


def rows_of_times(cases: list[dict]) -> list[list]:
    keys = ("kind", "length", "ranks")
    by_case = {(*(c[k] for k in keys), c["name"]): c["seconds"] for c in cases}
    rows = []
    for (*key, name), seconds in by_case.items():
        base = by_case.get((*key, layers.MEGATRON))
        share = bench.ratio(seconds, base) if base else ""
        rows.append([*key, name, bench.min_median(seconds, ".2f"), share])
    return rows


def tables(results: dict, args: argparse.Namespace) -> list[bench.Table]:
    made, columns = [], ["layer", "S", "P", "", "s: min / median", "of Megatron's way"]
    for part, title in (
        ("layers", "A layer, forward and backward"),
        ("between", "Between the projections: convolution, exchange, norm"),
        ("link", f"A layer on a link of {args.rate} a rank"),
    ):
        if part in results:
            made.append(bench.Table(title, columns, rows_of_times(results[part])))
    rows = []
    for x in results["bytes"]:
        base = x["bytes"][layers.MEGATRON]
        for name, n in x["bytes"].items():
            rows.append([x["kind"], x["ranks"], name, f"{n / 1024:.0f}", f"{n / base:.2f}"])
    columns = ["layer", "P", "", "KiB", "of Megatron's way"]
    made.append(bench.Table(f"What a rank receives, {args.compare} tokens", columns, rows))
    rows, whole = [], {}
    for case in results["memory"]:
        kind, mib = case["kind"], case["mib"]
        kib = (mib[-1] - mib[0]) * 1024 / (args.lengths[-1] - args.lengths[0])
        whole.setdefault(kind, kib)  # the first is one process
        sizes = [f"{x:.0f}" for x in mib]
        rows.append(
            [kind, case["ranks"], case["name"], *sizes, f"{kib:.1f}", f"{whole[kind] / kib:.2f}"]
        )
    sizes = [f"MiB, S = {n}" for n in args.lengths]
    columns = ["layer", "P", "", *sizes, "KiB a token", "times lower"]
    return [*made, bench.Table("Peak memory of a rank", columns, rows)]


def main() -> None:
    args = bench.parser_of(
        __doc__,
        lengths=([8192, 32768], "tokens of the sequence"),
        ranks=([2, 4], "group sizes"),
        rounds=(3, "timed steps of each contender"),
        compare=(2048, "tokens on which outputs and bytes are compared"),
        results=(Path, "folder for hybrid.md and hybrid.json"),
        **bench.LINK_OPTIONS,
    ).parse_args()
    results = measure(args)
    sizes = "; ".join(f"{kind}: {about}" for kind, about in SIZES.items())
    worst = max(max(x["off"].values()) for x in results["off"])
    paragraphs = [
        f"{HIDDEN} features. {sizes}. What the contenders are: `--help`.",
        f"Outputs and input gradients of {args.compare} tokens differ from those of one process by "
        f"at most {worst:.1e} of the largest entry (float32). With P = 4, ranks share the cores.",
    ]
    title = "Recurrent layers on a shared sequence"
    bench.report(args, "hybrid", title, paragraphs, tables(results, args), results)


if __name__ == "__main__":
    main()
