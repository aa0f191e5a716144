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
import ctypes
import gc
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import hybrid_layers as layers
import torch
import torch.distributed as dist
from compile import peak_mib, reset_peak
from netlink import Netlink
from ranks import Ranks, about_machine
from report import Table, page, ratio, show
from tqdm import tqdm

import deepsp

HERE = Path(__file__).parent
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
        given, taken = self.layer.in_proj.in_features, self.layer.out_proj.out_features
        if between:
            given, taken = self.layer.in_proj.out_features, self.layer.out_proj.in_features
            self.ways.pop(layers.STATE, None)
        x, grad = torch.randn(1, length, given), torch.randn(1, length, taken)
        self.x = x.chunk(size, 1)[rank].clone().requires_grad_()
        self.grad = grad.chunk(size, 1)[rank].clone()

    def step(self, way: Callable) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and input gradient."""
        layer = self.layer
        out = way(self.x) if self.between else layer.out_proj(way(layer.in_proj(self.x)))
        out.backward(self.grad)
        found, self.x.grad = self.x.grad, None
        layer.zero_grad()
        return out.detach(), found


def slowest(value: float) -> float:
    x = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(x, dist.ReduceOp.MAX)
    return x.item()


def differences(kind: str, length: int) -> dict[str, float]:
    """Of outputs and input gradients from those of one process, relative to the largest entry."""
    rank, size = dist.get_rank(), dist.get_world_size()
    case, whole = Case(kind, length), Case(kind, length)
    pieces = [torch.empty_like(case.x) for _ in range(size)]
    dist.all_gather(pieces, case.x.detach())
    whole.x = torch.cat(pieces, 1).requires_grad_()
    pieces = [torch.empty_like(case.grad) for _ in range(size)]
    dist.all_gather(pieces, case.grad)
    whole.grad = torch.cat(pieces, 1)
    expected = [x.chunk(size, 1)[rank] for x in whole.step(layers.whole(whole.layer))]
    found = {}
    for name, way in case.ways.items():
        pairs = zip(case.step(way), expected, strict=True)
        found[name] = slowest(max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs))
    return found


def received(kind: str, length: int) -> dict[str, float]:
    """Bytes that a rank receives in forward and backward, the mean over ranks."""
    group = dist.new_group()
    deepsp.transport(group, use="messages")
    case = Case(kind, length, group)
    case.ways.pop(layers.MEGATRON_BY_DEEPSP, None)
    found = {}
    for name, way in case.ways.items():
        case.step(way)
        layers.AllToAll.received = 0
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
        ) as profile:
            case.step(way)
        sent = sum(e.input_shapes[0][0] for e in profile.events() if e.name == "gloo:send")
        x = torch.tensor(sent + layers.AllToAll.received, dtype=torch.float64)
        dist.all_reduce(x)
        found[name] = x.item() / dist.get_world_size()
    return found


def timed(kind: str, length: int, name: str, between: bool, messages: bool, threads: int) -> float:
    """Seconds of one step."""
    torch.set_num_threads(threads)
    key = (kind, length, between)
    if key not in _cases:
        group = None
        if messages:
            group = _cases.setdefault("group", dist.new_group())
            deepsp.transport(group, use="messages")
        _cases[key] = Case(kind, length, group, between)
    case = _cases[key]
    dist.barrier()
    begin = time.perf_counter()
    case.step(case.ways[name])
    return slowest(time.perf_counter() - begin)


_cases: dict = {}


def tidy() -> None:
    deepsp.ranks.buffers.clear()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def memory(kind: str, length: int, name: str) -> float:
    """MiB of one step."""
    group = dist.new_group()
    deepsp.transport(group, use="messages")
    case, small = (Case(kind, n, group) for n in (length, 256))
    small.step(small.ways[name])
    tidy()
    reset_peak()
    before = peak_mib()
    case.step(case.ways[name])
    return slowest(peak_mib() - before)


# ----------------------------------------------------------------------------- what is asked


def names(size: int, between: bool = False) -> list[str]:
    if size == 1:
        return [layers.WHOLE]
    found = [layers.HEADS, layers.STATE, layers.MEGATRON, layers.MEGATRON_BY_DEEPSP]
    return [n for n in found if not (between and n == layers.STATE)]


def times(args, groups: dict[int, Ranks], between: bool, messages: bool, rounds: int) -> list[dict]:
    """By kind, length, number of ranks and contender; all in turns."""
    cases = [
        {"kind": kind, "length": length, "ranks": size, "name": name, "seconds": []}
        for kind in KINDS
        for length in args.lengths
        for size in groups
        for name in names(size, between)
        if not (messages and name == layers.MEGATRON_BY_DEEPSP)
    ]
    about = "on the link" if messages else "between projections" if between else "layers"
    bar = tqdm(total=len(cases) * rounds, desc=about, smoothing=0)
    for _ in range(rounds):
        for case in cases:
            threads = os.cpu_count() if case["ranks"] == 1 else 1
            seconds = groups[case["ranks"]](
                timed, case["kind"], case["length"], case["name"], between, messages, threads
            )
            case["seconds"].append(seconds)
            bar.update()
    bar.close()
    return cases


def measure(args) -> dict:
    found: dict = {"off": [], "bytes": [], "memory": []}
    groups = {size: Ranks(None, size).__enter__() for size in (1, *args.ranks)}
    for size in args.ranks:
        for kind in KINDS:
            off = groups[size](differences, kind, args.compare)
            found["off"].append({"kind": kind, "ranks": size, "off": off})
            if max(off.values()) > 1e-5:
                raise SystemExit(f"{kind} on {size} ranks differs from one process: {off}")
            counted = groups[size](received, kind, args.compare)
            found["bytes"].append({"kind": kind, "ranks": size, "bytes": counted})
    found["layers"] = times(args, groups, False, False, args.rounds)
    found["between"] = times(args, groups, True, False, 2 * args.rounds)
    for ranks in groups.values():
        ranks.__exit__(None)
    if args.rate and os.geteuid() == 0:
        own = argparse.Namespace(**vars(args) | {"lengths": args.lengths[:1]})
        with Netlink(2, args.rate) as link, Ranks(link) as ranks:
            found["link"] = times(own, {2: ranks}, False, True, args.rounds)
    # Freed tensors go back to the system, so that the peak is that of a step.
    os.environ |= {f"MALLOC_{name}_THRESHOLD_": str(2**16) for name in ("MMAP", "TRIM")}
    for size in tqdm((1, *args.ranks), desc="memory"):
        with Ranks(None, size) as ranks:
            for kind in KINDS:
                for name in names(size):
                    mib = [ranks(memory, kind, length, name) for length in args.lengths]
                    case = {"kind": kind, "ranks": size, "name": name, "mib": mib}
                    found["memory"].append(case)
    return found


# ----------------------------------------------------------------------------- tables


def of(seconds: list[float]) -> str:
    return f"{min(seconds):.2f} / {statistics.median(seconds):.2f}"


def tables(found: dict, args) -> list[Table]:
    result = []
    for part, title in (
        ("layers", "A layer, forward and backward"),
        ("between", "Between the projections: convolution, exchange, norm"),
        ("link", f"A layer on a link of {args.rate} a rank"),
    ):
        rows = []
        for case in found.get(part, []):
            key = [case[n] for n in ("kind", "length", "ranks")]
            base = next(
                (
                    c["seconds"]
                    for c in found[part]
                    if c["name"] == layers.MEGATRON
                    and [c[n] for n in ("kind", "length", "ranks")] == key
                ),
                None,
            )
            compared = "" if base is None else ratio(case["seconds"], base)
            rows.append([*map(str, key), case["name"], of(case["seconds"]), compared])
        columns = ["layer", "S", "P", "", "s: min / median", "of Megatron's way"]
        if rows:
            result.append((title, columns, rows))
    rows = [
        [
            x["kind"],
            str(x["ranks"]),
            name,
            f"{n / 1024:.0f}",
            f"{n / x['bytes'][layers.MEGATRON]:.2f}",
        ]
        for x in found["bytes"]
        for name, n in x["bytes"].items()
    ]
    columns = ["layer", "P", "", "KiB", "of Megatron's way"]
    result.append((f"What a rank receives, {args.compare} tokens", columns, rows))
    rows = []
    low, high = args.lengths[0], args.lengths[-1]
    for case in found["memory"]:
        slope = (case["mib"][-1] - case["mib"][0]) * 2**20 / (high - low)
        one = next(
            c["mib"] for c in found["memory"] if c["ranks"] == 1 and c["kind"] == case["kind"]
        )
        whole = (one[-1] - one[0]) * 2**20 / (high - low)
        rows.append(
            [
                case["kind"],
                str(case["ranks"]),
                case["name"],
                *(f"{x:.0f}" for x in case["mib"]),
                f"{slope / 1024:.1f}",
                f"{whole / slope:.2f}",
            ]
        )
    columns = [
        "layer",
        "P",
        "",
        *(f"MiB, S = {n}" for n in args.lengths),
        "KiB a token",
        "times lower",
    ]
    result.append(("Peak memory of a rank", columns, rows))
    return result


def markdown(found: dict, args) -> str:
    sizes = "; ".join(f"{kind}: {about}" for kind, about in SIZES.items())
    worst = max(max(x["off"].values()) for x in found["off"])
    return page(
        "Recurrent layers on a shared sequence",
        found["machine"],
        f"{HIDDEN} features. {sizes}. What the contenders are: `--help`.",
        f"Outputs and input gradients of {args.compare} tokens differ from those of one process by "
        f"at most {worst:.1e} of the largest entry (float32). With P = 4, ranks share the cores.",
        tables(found, args),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--lengths", type=int, nargs="+", default=[8192, 32768], help="tokens of the sequence")
    add("--ranks", type=int, nargs="+", default=[2, 4], help="group sizes")
    add("--rounds", type=int, default=3, help="timed steps of each contender (default: 3)")
    add("--compare", type=int, default=2048, help="tokens on which outputs and bytes are compared")
    add("--rate", default="500mbit", help="of the link, as tc writes it; '': no link")
    add("--note", default="with nothing else running", help="on the load, for the results")
    add("--results", type=Path, help="folder for hybrid.md and hybrid.json")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    found = measure(args)
    found["machine"] = about_machine(load, args.note)
    show(tables(found, args))
    if args.results:
        args.results.mkdir(parents=True, exist_ok=True)
        (args.results / "hybrid.md").write_text(markdown(found, args))
        (args.results / "hybrid.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
