"""Distillation without logits, next to TRL's, forward and backward.

Each rank has its share of one sequence's tokens, float32, one thread a rank. Contenders take turns:

  deepsp        deepsp.linear_kl over the full sequence
  trl_chunked   TRL's ChunkedDivergenceFunction, which its DistillationTrainer uses, on each rank's
                own tokens, without communication
  trl_logits    all logits of a rank's own tokens, and GKDTrainer.generalized_jsd_loss

A time is CPU time, the slowest rank's, so that other programs on the machine count little: a rank
has one thread and waits for nothing but the loss's sum. Memory is the most that the larger rank's
process takes in a step (VmHWM) above what it holds before it: hidden states and weights. The
gradients of the student's hidden states and weight are part of it. The first step of each contender
is measured for memory, too. Losses and gradients are compared.

    python benchmarks/distill.py
    python benchmarks/distill.py --tokens 2048 --vocab 8000
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import bench
import torch
import torch.distributed as dist
from tqdm import tqdm

import deepsp

OURS, CHUNKED, LOGITS = WAYS = ("deepsp", "trl_chunked", "trl_logits")
DIVERGENCES = {1.0: "reverse KL", 0.5: "Jensen-Shannon", 0.0: "forward KL"}


def cpu_clock(call: Callable[[], object]) -> float:
    """Return the seconds of CPU time of a call that all ranks start together."""
    dist.barrier()
    begin = time.process_time()
    call()
    return time.process_time() - begin


def measure(beta: float, args: argparse.Namespace) -> dict:
    """Return milliseconds and MiB by way, and the largest differences from deepsp's results."""
    from trl.experimental.gkd.gkd_trainer import GKDTrainer
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    tokens = args.tokens // dist.get_world_size()
    weights = torch.Generator().manual_seed(0)
    inputs = torch.Generator().manual_seed(1 + dist.get_rank())

    def draw(*shape: int, generator: torch.Generator) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * (2 / shape[1] ** 0.5) ** 0.5

    hidden = draw(tokens, args.width, generator=inputs).requires_grad_()
    weight = draw(args.vocab, args.width, generator=weights).requires_grad_()
    other = draw(tokens, args.teacher_width, generator=inputs)
    head = draw(args.vocab, args.teacher_width, generator=weights)
    labels = torch.zeros(tokens, dtype=torch.long)

    def ours() -> torch.Tensor:
        return deepsp.linear_kl(hidden, weight, other, head, labels, beta=beta)

    def chunked() -> torch.Tensor:
        each, _ = ChunkedDivergenceFunction.apply(hidden, weight, None, other, head, None, beta)
        return each.sum() / args.tokens

    def logits() -> torch.Tensor:
        student = torch.nn.functional.linear(hidden, weight)
        teacher = torch.nn.functional.linear(other, head)
        loss = GKDTrainer.generalized_jsd_loss(student, teacher, beta=beta, reduction="sum")
        return loss / args.tokens

    def step(way: str) -> list[torch.Tensor]:
        loss = {OURS: ours, CHUNKED: chunked, LOGITS: logits}[way]()
        return [loss.detach(), *torch.autograd.grad(loss, (hidden, weight))]

    report: dict = {"mib": {}, "ms": {}, "off": {}}
    for way in WAYS:
        begin = time.process_time()
        (loss, *gradients), mib = bench.growth(lambda way=way: step(way))
        report["mib"][way] = bench.largest(mib)[0]
        report["ms"][way] = bench.largest(1e3 * (time.process_time() - begin))
        loss = loss.item() if way == OURS else bench.summed(loss.item())
        if way == OURS:
            expected, compared = loss, gradients
            continue
        off = [
            ((a - b).abs().max() / b.abs().max()).item()
            for a, b in zip(compared, gradients, strict=True)
        ]
        report["off"][way] = max(abs(expected - loss) / abs(loss), *bench.largest(*off))
        del gradients
    del compared
    calls = {way: lambda way=way: step(way) for way in WAYS}
    times = bench.timed(calls, args.rounds - 1, warmups=0, clock=cpu_clock)
    report["ms"] = {way: report["ms"][way] + times[way] for way in WAYS}
    return report


def tables(results: dict) -> list[bench.Table]:
    rows = []
    for beta, x in results.items():
        for way in WAYS:
            rows.append(
                [
                    f"{DIVERGENCES[float(beta)]} ({beta})",
                    way,
                    bench.min_median([ms / 1e3 for ms in x["ms"][way]]),
                    bench.ratio(x["ms"][way], x["ms"][CHUNKED]),
                    f"{x['mib'][way]:.0f}",
                    f"{x['mib'][way] / x['mib'][CHUNKED]:.3f}",
                ]
            )
    columns = ["divergence (beta)", "", "CPU time, s: min / median", "time, of trl_chunked"]
    columns += ["peak, MiB a rank", "peak, of trl_chunked"]
    return [bench.Table("A step", columns, rows)]


def main() -> None:
    args = bench.parser_of(
        __doc__,
        tokens=(8192, "of the sequence"),
        vocab=(32000, "classes"),
        width=(1024, "the student's"),
        teacher_width=(2048, "the teacher's"),
        ranks=(2, "processes"),
        rounds=(3, "steps of each contender"),
        results=(Path, "folder for distill.md and distill.json"),
        note=("", "on the load, for the results"),
    ).parse_args()
    results = {}
    with bench.ranks_on(bench.LOOPBACK, args.ranks) as ranks:
        for beta in tqdm(DIVERGENCES, desc="divergences"):
            results[str(beta)] = ranks(measure, beta, args)
    worst = max(max(x["off"].values()) for x in results.values())
    paragraphs = [
        f"TRL {version('trl')}. {args.tokens:,} tokens on {args.ranks} ranks, {args.vocab:,} "
        f"classes, a student of width {args.width:,} and a teacher of {args.teacher_width:,}, "
        f"float32, {args.rounds} steps of each contender. What is compared: `--help`.",
        f"Losses and gradients of all ways differ by at most {worst:.1e} of the largest entry.",
    ]
    bench.report(
        args, "distill", "Distillation without logits", paragraphs, tables(results), results
    )


if __name__ == "__main__":
    main()
