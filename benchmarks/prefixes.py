"""Completions of one prompt: folded into a row, next to rows that repeat the prompt.

A Llama of transformers, forward, log-probabilities of completions and backward, float32, one thread
a rank, on 2 ranks of this machine that share each batch:

  rows          deepsp.shard_batch: each row is the prompt and one completion
  folded        deepsp.fold: the prompt once, and the completions behind it

in turns in one run. Losses and gradients of the two are compared. A time is that of the slowest
rank, peak memory that of the largest rank's step, above what it holds before (VmHWM; ranks send
messages, since memory that they shared would count for each). The last case has rows that share
nothing: what folding costs where there is nothing to fold.

    python benchmarks/prefixes.py
    python benchmarks/prefixes.py --completion 64 --rounds 1
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import bench
import torch
import torch.distributed as dist
from tqdm import tqdm

import deepsp

ROWS, FOLDED = WAYS = ("rows", "folded")
SIZES = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}


def make() -> torch.nn.Module:
    """A model, the same on every rank."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, max_position_embeddings=65536, use_cache=False)
    config._attn_implementation = "deepsp"
    return LlamaForCausalLM(config).train()


def batch_of(prompt: int, completion: int, rows: int) -> dict[str, torch.Tensor]:
    """Rows of one prompt, or, without one, that share nothing."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(0, SIZES["vocab_size"], (rows, prompt + completion), generator=draw)
    ids[:, :prompt] = ids[:1, :prompt]
    labels = ids.clone()
    labels[:, :prompt] = -100
    return {"input_ids": ids, "labels": labels}


# ------------------------------------------------------------------------- tasks of the ranks


def measure_case(
    prompt: int, completion: int, rows: int, timed: bool, args: argparse.Namespace
) -> dict:
    """Return milliseconds, or MiB, tokens and how far results are apart, by way."""
    from deepsp.integrations.transformers import register

    os.environ["DEEPSP_TRANSPORT"] = "messages"
    register()
    model, full = make(), batch_of(prompt, completion, rows)
    count = {}

    def step(way: str) -> list[torch.Tensor]:
        model.zero_grad()
        if way == FOLDED:
            local, fold = deepsp.fold(full)
            count[way] = sum(fold.seq_lens)
        else:
            local, lens = deepsp.shard_batch(full)
            count[way] = sum(lens) * rows
        labels = local.pop("shift_labels")
        hidden = model.model(**local).last_hidden_state
        log_probs = deepsp.token_log_probs(hidden, model.lm_head.weight, labels)
        if way == FOLDED:
            log_probs = fold.unfold(log_probs)  # on every rank
        loss = -log_probs.sum() / (rows * completion)
        loss.backward()
        of_rank = loss.detach() / (dist.get_world_size() if way == FOLDED else 1)
        return [of_rank, *(p.grad for p in model.parameters())]

    if timed:
        calls = {way: lambda way=way: step(way) for way in WAYS}
        return {"ms": bench.timed(calls, args.rounds, warmups=2)}
    report: dict = {"mib": {}, "tokens": count}
    results = {}
    for way in (FOLDED, ROWS):  # memory that stays after the larger would hide the smaller's
        values, mib = bench.growth(lambda way=way: step(way))
        results[way] = [x.clone() for x in values]
        report["mib"][way] = bench.largest(mib)[0]
        for x in results[way]:
            dist.all_reduce(x)
    pairs = zip(results[ROWS], results[FOLDED], strict=True)
    report["off"] = max(((a - b).abs().max() / a.abs().max()).item() for a, b in pairs)
    return report


# ------------------------------------------------------------------------------------- tables


def measure(args: argparse.Namespace) -> dict:
    results, n = {}, args.completion
    cases = [(4 * n, n, 8), (4 * n, n, 2), (n, n, 8), (0, 2 * n, 8)]
    for timed in (True, False):
        if not timed:
            bench.return_freed_memory()  # in ranks that start from now on: it costs time
        with bench.ranks_on(bench.LOOPBACK, 2) as ranks:
            for case in tqdm(cases, desc="times" if timed else "memory"):
                found = ranks(measure_case, *case, timed, args)
                results.setdefault("/".join(map(str, case)), {}).update(found)
    return results


def tables(results: dict) -> list[bench.Table]:
    rows = []
    for case, x in results.items():
        for way in WAYS:
            folded = way == FOLDED
            rows.append(
                [
                    *(f"{int(n):,}" for n in case.split("/")),
                    way,
                    f"{x['tokens'][way]:,}",
                    bench.min_median(x["ms"][way]),
                    bench.ratio(x["ms"][way], x["ms"][ROWS]) if folded else "–",
                    f"{x['mib'][way]:.0f}",
                    f"{x['mib'][way] / x['mib'][ROWS]:.2f}" if folded else "–",
                ]
            )
    columns = ["prompt", "completion", "rows", "", "tokens", "step, ms: min / median"]
    columns += ["time, of rows", "peak, MiB a rank", "peak, of rows"]
    return [bench.Table("A step", columns, rows)]


def main() -> None:
    args = bench.parser_of(
        __doc__,
        completion=(256, "tokens of a completion"),
        rounds=(5, "timed steps of each contender"),
        results=(Path, "folder for prefixes.md and prefixes.json"),
    ).parse_args()
    results = measure(args)
    worst = max(x["off"] for x in results.values())
    shape = ", ".join(f"{name} {n}" for name, n in SIZES.items())
    paragraphs = [
        f"{shape}. What is compared: `--help`.",
        f"Losses and gradients of the two ways differ by at most {worst:.1e} of the largest entry.",
    ]
    title = "Completions of one prompt: folded, and rows that repeat it"
    bench.report(args, "prefixes", title, paragraphs, tables(results), results)


if __name__ == "__main__":
    main()
