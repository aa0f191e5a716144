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
import json
import os
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
from netlink import Netlink
from ranks import Ranks, about_machine
from report import Table, page, ratio, show
from tqdm import tqdm

import deepsp

HIDDEN = 512
KINDS = ("Mixtral", "Qwen3-MoE")
WAYS = DEALT, REPLICATED = "dealt out", "replicated"
EXCHANGE, BARE = "exchange alone", "bare collectives"
PLACES = {"memory": "shared memory", "messages": "messages", "link": "messages on the link"}


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

    def __init__(self, kind: str, args, group):
        from deepsp.integrations.transformers import shard_experts

        rank, size = dist.get_rank(), dist.get_world_size()
        self.group, self.layers = group, {name: make(kind, args.experts) for name in WAYS}
        config = self.layers[DEALT].experts.config
        self.num_experts = self.layers[DEALT].experts.num_experts
        # A config of its own: shard_experts changes it.
        self.layers[REPLICATED].experts.config = type(config)(**config.to_dict())
        self.layers[REPLICATED].experts.config._experts_implementation = args.experts
        shard_experts(self.layers[DEALT], group)
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
        found, self.x.grad = self.x.grad, None
        return [out.detach(), found]

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


_cases: dict = {}


def case_of(kind: str, args, place: str) -> Case:
    if place not in _cases:
        _cases[place] = group = dist.new_group()
        deepsp.transport(group, use="auto" if place == "memory" else "messages")
    if (kind, place) not in _cases:
        _cases[kind, place] = Case(kind, args, _cases[place])
    return _cases[kind, place]


def on_ranks(value: float, how: dist.ReduceOp.RedOpType = dist.ReduceOp.MAX) -> float:
    x = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(x, how)
    return x.item()


def timed(kind: str, args, place: str, way: str) -> dict[str, float]:
    """Seconds of one step, and of the sum of its gradients; or of an exchange."""
    torch.set_num_threads(1)
    case = case_of(kind, args, place)
    calls = {"exchange": case.exchange if way == EXCHANGE else case.bare}
    if way in WAYS:
        calls = {"step": lambda: case.step(way), "sum": lambda: case.sum_gradients(way)}
    found = {}
    for name, call in calls.items():
        dist.barrier()
        begin = time.perf_counter()
        call()
        found[name] = on_ranks(time.perf_counter() - begin)
    return found


def sent(call, itemsize: int) -> float:
    """Bytes that all ranks send in a call, whose all-reduces are of elements of ``itemsize``."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
    ) as profile:
        call()
    events, size = profile.events(), dist.get_world_size()
    messages = sum(e.input_shapes[0][0] for e in events if e.name == "gloo:send")
    reduced = sum(e.input_shapes[0][0] for e in events if e.name == "gloo:all_reduce") * itemsize
    return on_ranks(messages + reduced * 2 * (size - 1) / size, dist.ReduceOp.SUM)


def described(kind: str, args) -> dict:
    """Bytes that ranks hold, bytes that they send, and how far results are apart."""
    torch.set_num_threads(1)
    case = case_of(kind, args, "messages")
    size = dist.get_world_size()
    found: dict = {"experts": case.num_experts, "held": {}, "sent": {}, "summed": {}}
    results = {}
    for way in WAYS:
        held = sum(p.nbytes for p in case.layers[way].experts.parameters())
        every: list = [None] * size
        dist.all_gather_object(every, held)
        found["held"][way] = every
        case.step(way)
        case.sum_gradients(way)
        found["sent"][way] = sent(lambda way=way: case.step(way), 8)  # numbers of tokens
        found["summed"][way] = sent(lambda way=way: case.sum_gradients(way), 4)
        results[way] = case.step(way)
        case.sum_gradients(way)
        results[way] += deepsp.full_state_dict(case.layers[way], gradients=True).values()
    found["off"] = max(
        on_ranks(((a - b).abs().max() / b.abs().max()).item())
        for a, b in zip(*results.values(), strict=True)
    )
    away = sum(n for i, n in enumerate(case.counts) if i // size != i % size)
    found["rows"], found["away"] = sum(case.counts), away
    # To the expert's rank and back, in forward and in backward.
    found["must"] = away * HIDDEN * case.x.element_size() * 2 * 2
    return found


# ----------------------------------------------------------------------------- what is asked


def measure(args) -> dict:
    found: dict = {"times": [], "kinds": {}}

    def run(ranks: Ranks, place: str) -> None:
        cases = [
            {"kind": kind, "place": place, "way": way, "seconds": {}}
            for kind in KINDS
            for way in (*WAYS, EXCHANGE, BARE)
        ]
        for turn in tqdm(range(args.rounds + 1), desc=PLACES[place]):
            for case in cases:
                parts = ranks(timed, case["kind"], args, place, case["way"])
                if turn:  # the first one warms up
                    for name, seconds in parts.items():
                        case["seconds"].setdefault(name, []).append(seconds)
        found["times"].extend(cases)

    with Ranks(None, args.ranks) as ranks:
        for kind in KINDS:
            found["kinds"][kind] = ranks(described, kind, args)
        for place in ("memory", "messages"):
            run(ranks, place)
    if args.rate and os.geteuid() == 0:
        with Netlink(args.ranks, args.rate) as link, Ranks(link) as ranks:
            run(ranks, "link")
    return found


# ----------------------------------------------------------------------------- tables


def milliseconds(seconds: list[float]) -> str:
    return f"{1e3 * min(seconds):.1f} / {1e3 * statistics.median(seconds):.1f}"


def tables(found: dict, args) -> list[Table]:
    rows = []
    for kind, x in found["kinds"].items():
        for way in WAYS:
            held = max(x["held"][way])
            part = sum(x["held"][way]) / args.ranks / x["held"][REPLICATED][0]
            rows.append([kind, str(x["experts"]), way, f"{held / 2**20:.2f}", f"{part:.3f}"])
    columns = ["layer", "experts", "", "MiB on the fullest rank", "mean, of all experts"]
    result = [("Expert weights that a rank holds", columns, rows)]
    rows = []
    for kind, x in found["kinds"].items():
        for way in WAYS:
            must = x["must"] / 2**20 if way == DEALT else 0
            rows.append(
                [
                    kind,
                    way,
                    f"{x['sent'][way] / 2**20:.3f}",
                    f"{must:.3f}" if must else "–",
                    f"{x['summed'][way] / 2**20:.1f}",
                    f"{x['away']} of {x['rows']}" if must else "–",
                ]
            )
    columns = [
        "layer",
        "",
        "step, MiB",
        "must travel, MiB",
        "sum of gradients, MiB",
        "rows for other ranks",
    ]
    result.append((f"What all ranks send, {args.tokens} tokens", columns, rows))
    for place, title in PLACES.items():
        named = f"{title[0].upper()}{title[1:]}" + f", {args.rate} a rank" * (place == "link")
        cases = {(c["kind"], c["way"]): c["seconds"] for c in found["times"] if c["place"] == place}
        rows, moved = [], []
        for kind in KINDS if cases else ():
            both = {}
            for way in WAYS:
                x = cases[kind, way]
                both[way] = [a + b for a, b in zip(x["step"], x["sum"], strict=True)]
            for way in WAYS:
                x = cases[kind, way]
                rows.append(
                    [
                        kind,
                        way,
                        milliseconds(x["step"]),
                        milliseconds(x["sum"]),
                        milliseconds(both[way]),
                        ratio(x["step"], cases[kind, REPLICATED]["step"]),
                        ratio(both[way], both[REPLICATED]),
                    ]
                )
            ours, floor = (cases[kind, way]["exchange"] for way in (EXCHANGE, BARE))
            moved.append([kind, milliseconds(ours), milliseconds(floor), ratio(ours, floor)])
        if rows:
            columns = [
                "layer",
                "",
                "step, ms: min / median",
                "sum of gradients, ms",
                "both, ms",
                "step, of replicated",
                "both, of replicated",
            ]
            result.append((named, columns, rows))
            columns = ["layer", "exchange alone, ms", "floor, ms", "of the floor"]
            result.append((f"{named}: exchange alone", columns, moved))
    return result


def markdown(found: dict, args) -> str:
    worst = max(x["off"] for x in found["kinds"].values())
    return page(
        "Experts dealt out over the ranks of a sequence",
        found["machine"],
        f"{args.ranks} ranks, {args.tokens} tokens, {HIDDEN} features, float32, experts computed "
        f'by "{args.experts}". What is compared: `--help`.',
        f"Outputs and gradients of the two differ by at most {worst:.1e} of the largest entry.",
        tables(found, args),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--tokens", type=int, default=4096, help="of the sequence (default: 4096)")
    add("--ranks", type=int, default=2, help="group size (default: 2)")
    add("--rounds", type=int, default=5, help="timed steps of each contender (default: 5)")
    add(
        "--experts",
        default="grouped_mm",
        help="transformers' experts_implementation, of both contenders (default: grouped_mm)",
    )
    add("--rate", default="500mbit", help="of the link, as tc writes it; '': no link")
    add("--note", default="with nothing else running", help="on the load, for the results")
    add("--results", type=Path, help="folder for experts.md and experts.json")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    found = measure(args)
    found["machine"] = about_machine(load, args.note)
    show(tables(found, args))
    if args.results:
        args.results.mkdir(parents=True, exist_ok=True)
        (args.results / "experts.md").write_text(markdown(found, args))
        (args.results / "experts.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
