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
import json
import os
import random
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
from netlink import Netlink
from ranks import Ranks, about_machine
from report import Table, page, ratio
from tqdm import tqdm

import deepsp

HERE = Path(__file__).parent
MIXES = {"chat": (250, 0.8), "fine-tuning": (665, 1.5), "long": (1800, 1.5)}
SCALE = 8
COST = (1e-3, 2e-5)  # attention alone, which is all that this measures
WHOLE, DEALT = "the whole batch", "dealt out"
PLACES = {"memory": "shared memory", "messages": "messages", "link": "messages on the link"}


def lengths_of(mix: str, tokens: int, seed: int = 0) -> list[int]:
    """The documents of a row: of a mix, or ("0.25") one with that part of all tokens."""
    draws, found = random.Random(seed), []
    if mix == "one document":
        return [tokens]
    if mix not in MIXES:
        long = round(float(mix) * tokens)
        found = [long] * (long > 0)
        return found + [min(64, tokens - long - n) for n in range(0, tokens - long, 64)]
    median, sigma = MIXES[mix]
    while (left := tokens - sum(found)) > 0:
        length = round(draws.lognormvariate(0, sigma) * median / SCALE)
        found.append(max(1, min(length, left)))
    return found


class Case:
    def __init__(self, mix: str, args, group):
        rank, size = dist.get_rank(), dist.get_world_size()
        lengths = lengths_of(mix, args.tokens)
        self.deal = deepsp.deal_documents(lengths, size, cost=COST)
        own = {
            WHOLE: torch.arange(args.tokens).tensor_split(size)[rank],
            DEALT: self.deal.tokens(rank),
        }
        generator = torch.Generator().manual_seed(0)
        self.whole = [
            torch.randn(1, args.tokens, args.heads, args.dim, generator=generator) for _ in range(4)
        ]
        self.own, self.group = own, group
        self.inputs = {
            name: [x[:, index].clone().requires_grad_() for x in self.whole[:3]]
            for name, index in own.items()
        }
        borders = torch.tensor([0, *lengths]).cumsum(0)
        lens = [len(x) for x in torch.arange(args.tokens).tensor_split(size)]
        self.how = {WHOLE: {"documents": borders, "seq_lens": lens}, DEALT: {"deal": self.deal}}

    def step(self, name: str) -> list[torch.Tensor]:
        q, k, v = self.inputs[name]
        out = deepsp.distributed_attention(
            q, k, v, is_causal=True, group=self.group, **self.how[name]
        )
        grad = self.whole[3][:, self.own[name]]
        return [out, *torch.autograd.grad(out, (q, k, v), grad)]


_cases: dict = {}


def case_of(mix: str, args, place: str) -> Case:
    if place not in _cases:
        _cases[place] = group = dist.new_group()
        deepsp.transport(group, use="auto" if place == "memory" else "messages")
    key = mix, place
    if key not in _cases:
        _cases[key] = Case(mix, args, _cases[place])
    return _cases[key]


def slowest(value: float) -> float:
    x = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(x, dist.ReduceOp.MAX)
    return x.item()


def timed(mix: str, args, place: str, name: str) -> float:
    """Seconds of one step."""
    torch.set_num_threads(1)
    case = case_of(mix, args, place)
    dist.barrier()
    begin = time.perf_counter()
    case.step(name)
    return slowest(time.perf_counter() - begin)


def described(mix: str, args) -> dict:
    """Bytes that all ranks send, what the deal says, and how far results are apart."""
    case = case_of(mix, args, "messages")
    found = {"documents": len(case.deal.lengths), "longest": max(case.deal.lengths)}
    found |= {"shared": case.deal.shared, "imbalance": case.deal.imbalance, "bytes": {}}
    results = {}
    for name in case.inputs:
        case.step(name)
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
        ) as profile:
            results[name] = case.step(name)
        sent = sum(e.input_shapes[0][0] for e in profile.events() if e.name == "gloo:send")
        x = torch.tensor(sent, dtype=torch.float64)
        dist.all_reduce(x)
        found["bytes"][name] = x.item()
    full = [deepsp.unshard(x, 1, case.group) for x in results[WHOLE]]
    own = [case.deal.unshard(x, case.group) for x in results[DEALT]]
    found["off"] = max(
        ((a - b).abs().max() / b.abs().max()).item() for a, b in zip(own, full, strict=True)
    )
    return found


# ----------------------------------------------------------------------------- what is asked


def measure(args) -> dict:
    mixes = [*MIXES, "one document"]
    found: dict = {"times": [], "mixes": {}, "curve": []}

    def run(ranks: Ranks, of: list[str], place: str, rounds: int) -> list[dict]:
        cases = [
            {"mix": mix, "place": place, "name": name, "seconds": []}
            for mix in of
            for name in (WHOLE, DEALT)
        ]
        for turn in tqdm(range(rounds + 1), desc=PLACES[place]):
            for case in cases:
                seconds = ranks(timed, case["mix"], args, place, case["name"])
                if turn:  # the first one warms up
                    case["seconds"].append(seconds)
        return cases

    with Ranks(None, args.ranks) as ranks:
        for mix in mixes:
            found["mixes"][mix] = ranks(described, mix, args)
        for place in ("memory", "messages"):
            found["times"] += run(ranks, mixes, place, args.rounds)
    if args.rate and os.geteuid() == 0:
        with Netlink(args.ranks, args.rate) as link, Ranks(link) as ranks:
            found["times"] += run(ranks, mixes, "link", args.rounds)
            found["curve"] = run(ranks, ["0", "0.25", "0.5", "0.75", "1"], "link", args.rounds)
    return found


# ----------------------------------------------------------------------------- tables


def tables(found: dict, args) -> list[Table]:
    rows = []
    for mix, x in found["mixes"].items():
        part = x["bytes"][DEALT] / x["bytes"][WHOLE]
        rows.append(
            [
                mix,
                str(x["documents"]),
                str(x["longest"]),
                f"{x['shared']:.2f}",
                f"{100 * x['imbalance']:.1f} %",
                f"{part:.2f}",
            ]
        )
    columns = ["lengths", "documents", "longest", "shared", "imbalance", "bytes, of the whole's"]
    result = [("What travels", columns, rows)]
    for place, title in PLACES.items():
        rows = []
        cases = [c for c in found["times"] if c["place"] == place]
        for whole, dealt in zip(cases[::2], cases[1::2], strict=True):
            a, b = whole["seconds"], dealt["seconds"]
            rows.append(
                [
                    whole["mix"],
                    *(f"{min(x):.3f} / {statistics.median(x):.3f}" for x in (a, b)),
                    ratio(a, b),
                ]
            )
        if rows:
            named = f"{title[0].upper()}{title[1:]}" + f", {args.rate} a rank" * (place == "link")
            columns = ["lengths", f"{WHOLE}, s: min / median", f"{DEALT}, s", "times as fast"]
            result.append((named, columns, rows))
    return result


def draw(found: dict, args, file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.5, 3.6), layout="constrained")
    for name, colour in ((DEALT, "#1b6ca8"), (WHOLE, "#c44e52")):
        cases = [c for c in found["curve"] if c["name"] == name]
        shares = [100 * float(c["mix"]) for c in cases]
        speeds = [args.tokens / statistics.median(c["seconds"]) / 1e3 for c in cases]
        axes.plot(shares, speeds, "o-", color=colour, label=name)
    axes.set_xlabel("tokens in one long document, %")
    axes.set_ylabel("thousand tokens a second")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(file, dpi=150)


def markdown(found: dict, args) -> str:
    worst = max(x["off"] for x in found["mixes"].values())
    return page(
        "Documents of different lengths",
        found["machine"],
        f"{args.ranks} ranks, {args.tokens} tokens, {args.heads} heads of {args.dim}, float32; "
        "attention alone, forward and backward. What is compared: `--help`.",
        f"Results of the two differ by at most {worst:.1e} of the largest entry.",
        tables(found, args),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--tokens", type=int, default=8192, help="of the packed row (default: 8192)")
    add("--ranks", type=int, default=4, help="group size (default: 4)")
    add("--heads", type=int, default=8)
    add("--dim", type=int, default=64, help="head_dim")
    add("--rounds", type=int, default=5, help="timed steps of each contender (default: 5)")
    add("--rate", default="500mbit", help="of the link, as tc writes it; '': no link")
    add("--note", default="with nothing else running", help="on the load, for the results")
    add("--results", type=Path, help="folder for mixed_lengths.md, .json and .png")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    found = measure(args)
    found["machine"] = about_machine(load, args.note)
    text = markdown(found, args)
    print(text)
    if args.results:
        args.results.mkdir(parents=True, exist_ok=True)
        (args.results / "mixed_lengths.md").write_text(text)
        (args.results / "mixed_lengths.json").write_text(json.dumps(found, indent=1) + "\n")
        if found["curve"]:
            draw(found, args, args.results / "mixed_lengths.png")


if __name__ == "__main__":
    main()
