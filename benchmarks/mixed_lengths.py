"""Attention to packed documents of different lengths, forward and backward: dealt out over the
ranks, so that only long ones are exchanged, against the exchange of the whole packed batch.

Both compute the same: q, k and v of one row, float32, causal within each document. Contenders take
turns in one run, one thread a rank, on this machine: through shared memory, by messages, and on
links of a set speed (needs root; benchmarks/netlink.py). Lengths are drawn from lognormal
distributions, at an eighth of their real size, as the whole row is. A time is that of the slowest
rank. Bytes are counted from gloo's sends.

The figure has one document with a part of all tokens, the others of 64 tokens each, on the link.
"""

from __future__ import annotations

import argparse
import random
import statistics
from pathlib import Path

import bench
import torch
import torch.distributed as dist
from tqdm import tqdm

import deepsp

MIXES = {"chat": (250, 0.8), "fine-tuning": (665, 1.5), "long": (1800, 1.5)}
SCALE = 8
COST = (1e-3, 2e-5)  # attention alone, which is all that this measures
WHOLE, DEALT = "the whole batch", "dealt out"


def lengths_of(mix: str, tokens: int, seed: int = 0) -> list[int]:
    """Return the lengths of a row's documents: of a mix, or ("0.25") one with that part of all
    tokens."""
    draws, lengths = random.Random(seed), []
    if mix == "one document":
        return [tokens]
    if mix not in MIXES:
        long = round(float(mix) * tokens)
        rest = [min(64, tokens - long - n) for n in range(0, tokens - long, 64)]
        return [long] * (long > 0) + rest
    median, sigma = MIXES[mix]
    while (left := tokens - sum(lengths)) > 0:
        length = round(draws.lognormvariate(0, sigma) * median / SCALE)
        lengths.append(max(1, min(length, left)))
    return lengths


class Case:
    """A row of documents both ways, and this rank's part of q, k, v and the output's gradient."""

    def __init__(self, mix: str, args: argparse.Namespace, place: str):
        rank, size = dist.get_rank(), dist.get_world_size()
        lengths = lengths_of(mix, args.tokens)
        self.deal = deepsp.deal_documents(lengths, size, cost=COST)
        tokens = {
            WHOLE: torch.arange(args.tokens).tensor_split(size)[rank],
            DEALT: self.deal.tokens(rank),
        }
        generator = torch.Generator().manual_seed(0)
        self.whole = [
            torch.randn(1, args.tokens, args.heads, args.dim, generator=generator) for _ in range(4)
        ]
        self.tokens, self.group = tokens, bench.group_of(place)
        self.inputs = {
            name: [x[:, index].clone().requires_grad_() for x in self.whole[:3]]
            for name, index in tokens.items()
        }
        borders = torch.tensor([0, *lengths]).cumsum(0)
        lens = [len(x) for x in torch.arange(args.tokens).tensor_split(size)]
        self.how = {WHOLE: {"documents": borders, "seq_lens": lens}, DEALT: {"deal": self.deal}}

    def step(self, name: str) -> list[torch.Tensor]:
        q, k, v = self.inputs[name]
        out = deepsp.distributed_attention(
            q, k, v, is_causal=True, group=self.group, **self.how[name]
        )
        grad = self.whole[3][:, self.tokens[name]]
        return [out, *torch.autograd.grad(out, (q, k, v), grad)]


def measure_times(mix: str, args: argparse.Namespace, place: str) -> dict[str, list[float]]:
    """Return the milliseconds of steps, by way."""
    case = Case(mix, args, place)
    ways = {name: lambda name=name: case.step(name) for name in case.inputs}
    return bench.timed(ways, args.rounds)


def describe(mix: str, args: argparse.Namespace) -> dict:
    """Return the bytes that all ranks send, what the deal says, and how far results are apart."""
    case = Case(mix, args, "messages")
    report = {"documents": len(case.deal.lengths), "longest": max(case.deal.lengths)}
    report |= {"shared": case.deal.shared, "imbalance": case.deal.imbalance, "bytes": {}}
    for name in case.inputs:
        case.step(name)
        events = bench.profiled(lambda name=name: case.step(name))
        report["bytes"][name] = bench.summed(bench.gloo_elements(events))
    whole = [deepsp.unshard(x, 1, case.group) for x in case.step(WHOLE)]
    dealt = [case.deal.unshard(x, case.group) for x in case.step(DEALT)]
    pairs = zip(dealt, whole, strict=True)
    report["off"] = max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)
    return report


# ------------------------------------------------------------------------------------- tables


def measure(args: argparse.Namespace) -> dict:
    results: dict = {"times": [], "mixes": {}, "curve": []}
    for ranks, place in bench.in_places(args):
        mixes, parts = [*MIXES, "one document"], []
        if place == "link":
            parts = ["0", "0.25", "0.5", "0.75", "1"]
        for mix in tqdm([*mixes, *parts], desc=bench.PLACES[place]):
            if place == "messages":
                results["mixes"][mix] = ranks(describe, mix, args)
            ms = ranks(measure_times, mix, args, place)
            results["curve" if mix in parts else "times"].append(
                {"mix": mix, "place": place, "ms": ms}
            )
    return results


def tables(results: dict, args: argparse.Namespace) -> list[bench.Table]:
    rows = []
    for mix, x in results["mixes"].items():
        part = x["bytes"][DEALT] / x["bytes"][WHOLE]
        imbalance = f"{100 * x['imbalance']:.1f} %"
        rows.append(
            [mix, x["documents"], x["longest"], f"{x['shared']:.2f}", imbalance, f"{part:.2f}"]
        )
    columns = ["lengths", "documents", "longest", "shared", "imbalance", "bytes, of the whole's"]
    made = [bench.Table("What is sent", columns, rows)]
    columns = ["lengths", f"{WHOLE}, ms: min / median", f"{DEALT}, ms", "times as fast"]
    for place, title in bench.PLACES.items():
        rows = []
        for case in results["times"]:
            if case["place"] == place:
                whole, dealt = case["ms"][WHOLE], case["ms"][DEALT]
                times = [bench.min_median(ms, ".0f") for ms in (whole, dealt)]
                rows.append([case["mix"], *times, bench.ratio(whole, dealt)])
        if rows:
            title += f", {args.rate} a rank" * (place == "link")
            made.append(bench.Table(title, columns, rows))
    return made


def draw(results: dict, args: argparse.Namespace, file: Path) -> None:
    with bench.picture(file, figsize=(6.5, 3.6), dpi=150) as (_, axes):
        for name, colour in ((DEALT, "#1b6ca8"), (WHOLE, "#c44e52")):
            shares = [100 * float(case["mix"]) for case in results["curve"]]
            speeds = [args.tokens / statistics.median(c["ms"][name]) for c in results["curve"]]
            axes.plot(shares, speeds, "o-", color=colour, label=name)
        axes.set_xlabel("tokens in one long document, %")
        axes.set_ylabel("thousand tokens a second")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)


def main() -> None:
    args = bench.parser_of(
        __doc__,
        tokens=(8192, "of the packed row"),
        ranks=(4, "group size"),
        heads=(8, "of q, k and v"),
        dim=(64, "head_dim"),
        rounds=(5, "timed steps of each contender"),
        results=(Path, "folder for mixed_lengths.md, .json and .png"),
        **bench.LINK_OPTIONS,
    ).parse_args()
    results = measure(args)
    worst = max(x["off"] for x in results["mixes"].values())
    paragraphs = [
        f"{args.ranks} ranks, {args.tokens} tokens, {args.heads} heads of {args.dim}, float32; "
        "attention alone, forward and backward. What is compared: `--help`.",
        f"Results of the two differ by at most {worst:.1e} of the largest entry.",
    ]
    title, made = "Documents of different lengths", tables(results, args)
    bench.report(args, "mixed_lengths", title, paragraphs, made, results)
    if args.results and results["curve"]:
        draw(results, args, args.results / "mixed_lengths.png")


if __name__ == "__main__":
    main()
