"""Experts that are dealt out over the ranks of a sequence, next to experts that every rank holds.

A sparse layer of transformers on this rank's tokens, forward and backward, float32, one thread a
rank: Mixtral's at an eighth of the 8x7B's width (8 experts, 2 a token), and Qwen3-MoE's at a
quarter of the 30B-A3B's width (128 small experts, 8 a token). Contenders take turns in one run over
gloo on this machine, through shared memory, by messages, and on links of a set speed (needs root;
benchmarks/netlink.py):

  dealt out     shard_experts: each rank holds 1/P of the experts, and computes these for the tokens
                of all ranks. After the step, the router's gradient is summed over the ranks
  replicated    each rank holds all experts, and computes its own tokens. After the step, all
                gradients are summed over the ranks (deepsp.sync_gradients)

First, outputs and gradients of the two are compared. A time is that of the slowest rank: the step,
the sum of the gradients, and both together. "Exchange alone" is expert_dispatch and expert_combine
of the step's rows, forward and backward, with nothing computed; its floor is as many bare
all_to_all_single of the same bytes on warm buffers.

Bytes are those that all ranks send, counted from gloo's sends in a group that sends messages, and
from the sizes of gloo's all-reduces, which send 2 (P - 1) / P of a tensor on each rank. What must
travel follows from the routing: each choice of an expert on another rank sends a row of hidden_size
there and one back, in forward and again in backward. The rest are the numbers of tokens.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import bench
import torch
import torch.distributed as dist
from tqdm import tqdm

import deepsp

HIDDEN = 512
KINDS = ("Mixtral", "Qwen3-MoE")
WAYS = DEALT, REPLICATED = "dealt out", "replicated"
EXCHANGE, BARE = "exchange alone", "bare collectives"


def make(kind: str, experts: str) -> torch.nn.Module:
    """A sparse layer of transformers, the same on every rank."""
    from transformers import MixtralConfig, Qwen3MoeConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    torch.manual_seed(0)
    if kind == "Mixtral":
        config = MixtralConfig(
            hidden_size=HIDDEN, intermediate_size=1792, num_local_experts=8, num_experts_per_tok=2
        )
        layer = MixtralSparseMoeBlock(config)
    else:
        config = Qwen3MoeConfig(
            hidden_size=HIDDEN, moe_intermediate_size=192, num_experts=128, num_experts_per_tok=8
        )
        layer = Qwen3MoeSparseMoeBlock(config)
    config._experts_implementation = experts
    layer.experts.config = config
    with torch.no_grad():
        for p in layer.parameters():
            p.normal_(std=p.size(-1) ** -0.5)
    return layer


class Case:
    """A layer both ways, and this rank's part of its input and output gradient."""

    def __init__(self, kind: str, args: argparse.Namespace, place: str):
        from deepsp.integrations.transformers import shard_experts

        rank, size = dist.get_rank(), dist.get_world_size()
        self.group = bench.group_of(place)
        self.layers = {name: make(kind, args.experts) for name in WAYS}
        config = self.layers[DEALT].experts.config
        self.num_experts = self.layers[DEALT].experts.num_experts
        # A config of its own: shard_experts changes it.
        self.layers[REPLICATED].experts.config = type(config)(**config.to_dict())
        self.layers[REPLICATED].experts.config._experts_implementation = args.experts
        shard_experts(self.layers[DEALT], self.group)
        whole = torch.randn(2, 1, args.tokens, HIDDEN)
        x, self.grad = (w.tensor_split(size, 1)[rank].clone() for w in whole)
        self.x = x.requires_grad_()
        with torch.no_grad():
            self.chosen = self.layers[REPLICATED].gate(x)[2].flatten()
        self.counts, self.rows, self.buffers = self._exchanged(rank, size)

    def _exchanged(self, rank: int, size: int):
        """Rows that each rank sends to each, this rank's rows in the order of their experts, and
        buffers for the bare collectives."""
        lens = torch.ops.deepsp.token_split(self.num_experts, size)
        of_expert = torch.arange(size).repeat_interleave(torch.tensor(lens))
        counts = torch.bincount(of_expert[self.chosen], minlength=size)
        every = [torch.empty_like(counts) for _ in range(size)]
        dist.all_gather(every, counts)
        rows = torch.randn(len(self.chosen), HIDDEN, requires_grad=True)
        received = torch.empty(sum(int(x[rank]) for x in every), HIDDEN)
        return torch.cat(every).tolist(), rows, (rows.detach().clone(), received)

    def step(self, way: str) -> list[torch.Tensor]:
        """Output and input gradient."""
        layer = self.layers[way]
        layer.zero_grad()
        out = layer(self.x)
        out.backward(self.grad)
        gradient, self.x.grad = self.x.grad, None
        return [out.detach(), gradient]

    def sum_gradients(self, way: str) -> None:
        deepsp.sync_gradients(self.layers[way], self.group)

    def exchange(self) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        name = dist._get_process_group_name(self.group)
        there = torch.ops.deepsp.expert_dispatch(self.rows, self.counts, rank, name)
        back = torch.ops.deepsp.expert_combine(there, self.counts, rank, name)
        torch.autograd.grad(back, self.rows, self.buffers[0])
        assert len(there) == sum(self.counts[rank::size])

    def bare(self) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        mine, received = self.counts[rank * size :][:size], self.counts[rank::size]
        near, far = self.buffers
        for _ in range(2):  # forward and backward
            dist.all_to_all_single(far, near, received, mine, group=self.group)
            dist.all_to_all_single(near, far, mine, received, group=self.group)

    def calls(self) -> dict:
        """Return what is timed, by way and part."""
        parts = {(EXCHANGE, "exchange"): self.exchange, (BARE, "exchange"): self.bare}
        for way in WAYS:
            parts[way, "step"] = lambda way=way: self.step(way)
            parts[way, "sum"] = lambda way=way: self.sum_gradients(way)
        return parts


# ------------------------------------------------------------------------- tasks of the ranks


def measure_times(kind: str, args: argparse.Namespace, place: str) -> dict:
    """Return milliseconds by way and part: of a step, of the sum of its gradients, of exchanges."""
    return bench.timed(Case(kind, args, place).calls(), args.rounds)


def sent(call, itemsize: int) -> float:
    """Return the bytes that all ranks send in a call, whose all-reduces are of elements of
    ``itemsize``."""
    events, size = bench.profiled(call), dist.get_world_size()
    reduced = bench.gloo_elements(events, "all_reduce") * itemsize
    return bench.summed(bench.gloo_elements(events) + reduced * 2 * (size - 1) / size)


def describe(kind: str, args: argparse.Namespace) -> dict:
    """Return bytes that ranks hold, bytes that they send, and how far results are apart."""
    case, size = Case(kind, args, "messages"), dist.get_world_size()
    report: dict = {"experts": case.num_experts, "held": {}, "sent": {}, "summed": {}}
    results = {}
    for way in WAYS:
        report["held"][way] = [None] * size
        weights = sum(p.nbytes for p in case.layers[way].experts.parameters())
        dist.all_gather_object(report["held"][way], weights)
        case.step(way)
        case.sum_gradients(way)
        report["sent"][way] = sent(lambda way=way: case.step(way), 8)  # numbers of tokens
        report["summed"][way] = sent(lambda way=way: case.sum_gradients(way), 4)
        results[way] = case.step(way)
        case.sum_gradients(way)
        results[way] += deepsp.full_state_dict(case.layers[way], gradients=True).values()
    pairs = zip(*results.values(), strict=True)
    report["off"] = max(
        bench.largest(*[((a - b).abs().max() / b.abs().max()).item() for a, b in pairs])
    )
    away = sum(n for i, n in enumerate(case.counts) if i // size != i % size)
    report["rows"], report["away"] = sum(case.counts), away
    # To the expert's rank and back, in forward and in backward.
    report["must"] = away * HIDDEN * case.x.element_size() * 2 * 2
    return report


# ------------------------------------------------------------------------------------- tables


def measure(args: argparse.Namespace) -> dict:
    results: dict = {"times": [], "kinds": {}}
    for ranks, place in bench.in_places(args):
        for kind in tqdm(KINDS, desc=bench.PLACES[place]):
            if place == "messages":
                results["kinds"][kind] = ranks(describe, kind, args)
            ms = ranks(measure_times, kind, args, place)
            for way in (*WAYS, EXCHANGE, BARE):
                parts = {part: ms[name, part] for name, part in ms if name == way}
                results["times"].append({"kind": kind, "place": place, "way": way, "ms": parts})
    return results


def tables(results: dict, args: argparse.Namespace) -> list[bench.Table]:
    weights, bytes_sent = [], []
    for kind, x in results["kinds"].items():
        for way in WAYS:
            held, dealt = x["held"][way], way == DEALT
            part = sum(held) / args.ranks / x["held"][REPLICATED][0]
            mib = f"{max(held) / 2**20:.2f}"
            weights.append([kind, x["experts"], way, mib, f"{part:.3f}"])
            bytes_sent.append(
                [
                    kind,
                    way,
                    f"{x['sent'][way] / 2**20:.3f}",
                    f"{x['must'] / 2**20:.3f}" if dealt else "–",
                    f"{x['summed'][way] / 2**20:.1f}",
                    f"{x['away']} of {x['rows']}" if dealt else "–",
                ]
            )
    columns = ["layer", "experts", "", "MiB on the fullest rank", "mean, of all experts"]
    made = [bench.Table("Expert weights that a rank holds", columns, weights)]
    columns = [
        "layer",
        "",
        "step, MiB",
        "must travel, MiB",
        "sum of gradients, MiB",
        "rows for others",
    ]
    made.append(bench.Table(f"What all ranks send, {args.tokens} tokens", columns, bytes_sent))
    for place, title in bench.PLACES.items():
        cases = {(c["kind"], c["way"]): c["ms"] for c in results["times"] if c["place"] == place}
        if cases:
            made += tables_of_times(title + f", {args.rate} a rank" * (place == "link"), cases)
    return made


def tables_of_times(title: str, cases: dict) -> list[bench.Table]:
    steps, exchanges = [], []
    for kind in KINDS:
        step = {way: cases[kind, way]["step"] for way in WAYS}
        sums = {way: cases[kind, way]["sum"] for way in WAYS}
        both = {w: [a + b for a, b in zip(step[w], sums[w], strict=True)] for w in WAYS}
        for way in WAYS:
            times = [bench.min_median(x[way]) for x in (step, sums, both)]
            shares = [bench.ratio(x[way], x[REPLICATED]) for x in (step, both)]
            steps.append([kind, way, *times, *shares])
        ours, floor = (cases[kind, way]["exchange"] for way in (EXCHANGE, BARE))
        exchanges.append(
            [kind, bench.min_median(ours), bench.min_median(floor), bench.ratio(ours, floor)]
        )
    columns = ["layer", "", "step, ms: min / median", "sum of gradients, ms", "both, ms"]
    columns += ["step, of replicated", "both, of replicated"]
    alone = ["layer", "exchange alone, ms", "floor, ms", "of the floor"]
    return [
        bench.Table(title, columns, steps),
        bench.Table(f"{title}: exchange alone", alone, exchanges),
    ]


def main() -> None:
    args = bench.parser_of(
        __doc__,
        tokens=(4096, "of the sequence"),
        ranks=(2, "group size"),
        rounds=(5, "timed steps of each contender"),
        experts=("grouped_mm", "transformers' experts_implementation, of both contenders"),
        results=(Path, "folder for experts.md and experts.json"),
        **bench.LINK_OPTIONS,
    ).parse_args()
    results = measure(args)
    worst = max(x["off"] for x in results["kinds"].values())
    about = (
        f"{args.ranks} ranks, {args.tokens} tokens, {HIDDEN} features, float32, experts computed by"
    )
    paragraphs = [
        f'{about} "{args.experts}". What is compared: `--help`.',
        f"Outputs and gradients of the two differ by at most {worst:.1e} of the largest entry.",
    ]
    title = "Experts dealt out over the ranks of a sequence"
    bench.report(args, "experts", title, paragraphs, tables(results, args), results)


if __name__ == "__main__":
    main()
