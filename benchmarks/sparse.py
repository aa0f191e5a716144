"""Attention that an indexer makes sparse: keys that travel, next to heads that do.

A layer of transformers' DeepSeek V3.2 (its attention, and a small MLP) in proportions of the
original at an eighth to a sixteenth of its sizes, forward and backward, float32, one thread a rank,
on 1, 2 and 4 ranks of this machine, which take turns over the lengths in one run:

  keys          register()'s way: latents and the indexer's keys are gathered; queries stay, and
                read the latents that they chose
  heads         DeepSpeed-Ulysses' way: queries, expanded keys and values, and outputs are exchanged
                by heads; the indexer's keys and its choice are gathered; attention has a mask
  alone         as "keys", in a group of one process

All of them compute attention for some queries at a time; the loss and gradients of the first two
are compared. A time is that of the slowest rank. Bytes are those that all ranks send, from the
shapes of what is exchanged; the gathered choice of "heads" is listed apart, and ratios leave it
out. Peak memory is the largest rank's in the step, above what it holds before (VmHWM; ranks send
messages, since memory that they shared would count for each).

    python benchmarks/sparse.py
    python benchmarks/sparse.py --tokens 2048 --rounds 1
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import os
import time
from pathlib import Path

import bench
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from tqdm import tqdm

import deepsp

KEYS, HEADS, ALONE = WAYS = ("keys", "heads", "alone")
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": 64,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "index_n_heads": 2,
    "index_head_dim": 16,
}


def make(tokens: int) -> torch.nn.Module:
    """A model of one layer, the same on every rank."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "deepseek_v32",
        **SIZES,
        vocab_size=64,
        num_hidden_layers=1,
        mlp_layer_types=["dense"],
        index_topk=tokens // 16,
        max_position_embeddings=tokens,
        use_cache=False,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="deepsp").train()


class Sent(TorchDispatchMode):
    """The bytes that this rank sends in exchanges of tokens."""

    def __init__(self, size: int):
        super().__init__()
        self.size, self.bytes, self.chosen = size, 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.__name__.split(".")[0]
        tensors = args[0] if args and isinstance(args[0], list) else args[:1]
        if name in ("seq_to_heads_start", "heads_to_seq_start", "heads_to_seq"):
            size = sum(x.nbytes for x in tensors)
            self.bytes += size * (self.size - 1) // self.size
        elif name in ("all_gather", "all_gather_start"):
            size = sum(x.nbytes for x in tensors) * (self.size - 1)
            self.bytes += size
            self.chosen += size if tensors[0].dtype == torch.int32 else 0
        elif name in ("reduce_scatter", "reduce_scatter_start"):
            self.bytes += sum(x.nbytes for x in tensors) * (self.size - 1) // self.size
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def by_heads():
    """Attention of all queries to all keys of this rank's heads."""
    from deepsp.integrations.transformers import absorbed, attention, caches, indexers, selected

    class Local(indexers.Keys):
        length = property(lambda self: self.count)

        def update(self, k, v, layer_idx, *_, **__):
            return k, v

    def attend(query, key, value, mask, dropout, scaling, sinks):
        keys = mask.keys
        rank, _, name = keys.member
        q, k, v = torch.ops.deepsp.seq_to_heads(
            [x.transpose(1, 2) for x in (query, key, value)], keys.lens, rank, name
        )
        everything = copy.copy(keys)
        everything.member, everything.count = None, sum(keys.lens)
        everything.lens = [everything.count]
        rows = indexers.Rows(keys.sequence, 0, everything.count, query.device)
        indices = torch.ops.deepsp.all_gather(mask.indices, 1, keys.lens, "replicated", rank, name)
        chosen = selected.Selected(everything, rows, query, everything.count, indices)
        out = selected.attend(
            *(x.transpose(1, 2) for x in (q, k, v)), chosen, dropout, scaling, sinks
        )
        heads = [query.size(1)]
        return torch.ops.deepsp.heads_to_seq([out], heads, keys.lens, rank, name)[0]

    before = caches.Keys, attention.attend, absorbed.is_less
    caches.Keys, attention.attend, absorbed.is_less = Local, attend, lambda *_: False
    try:
        yield
    finally:
        caches.Keys, attention.attend, absorbed.is_less = before


# ------------------------------------------------------------------------- tasks of the ranks


def measure_size(tokens: int, ways: tuple[str, ...], args: argparse.Namespace) -> dict:
    """Return milliseconds, bytes and MiB by way, and how far results are apart."""
    from deepsp.integrations.transformers import register

    os.environ["DEEPSP_TRANSPORT"] = "messages"
    register()
    size, model = dist.get_world_size(), make(tokens)
    ids = torch.randint(0, 64, (1, tokens), generator=torch.Generator().manual_seed(1))
    batch, _ = deepsp.shard_batch({"input_ids": ids, "labels": ids})

    def step(way: str) -> list[torch.Tensor]:
        with by_heads() if way == HEADS else contextlib.nullcontext():
            model.zero_grad()
            loss = model(**batch).loss
            loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    report: dict = {"bytes": {}, "chosen": {}, "mib": {}, "ms": {}}
    results = {}
    for way in ways:  # the first step warms nothing up that matters in steps of seconds
        with Sent(size) as sent:
            begin = time.perf_counter()
            values, mib = bench.growth(lambda way=way: step(way))
            report["ms"][way] = bench.largest(1e3 * (time.perf_counter() - begin))
        results[way] = [x.clone() for x in values]
        report["mib"][way] = bench.largest(mib)[0]
        report["bytes"][way] = bench.summed(sent.bytes)
        report["chosen"][way] = bench.summed(sent.chosen)
    if len(ways) > 1:
        for values in results.values():
            for x in values[1:]:
                dist.all_reduce(x)
        pairs = zip(*results.values(), strict=True)
        off = max(((a - b).abs().max() / b.abs().max().clamp_min(1e-30)).item() for a, b in pairs)
        report["off"] = bench.largest(off)[0]
    if sum(sum(ms) for ms in report["ms"].values()) < 60e3:
        calls = {way: lambda way=way: step(way) for way in ways}
        report["ms"] = bench.timed(calls, args.rounds, warmups=0)
    return report


# ------------------------------------------------------------------------------------- tables


def measure(args: argparse.Namespace) -> dict:
    results: dict = {}
    sizes = [int(n) for n in args.tokens.split(",")]
    with contextlib.ExitStack() as stack:
        ranks = {n: stack.enter_context(bench.ranks_on(bench.LOOPBACK, n)) for n in (1, 2, 4)}
        for tokens in tqdm(sizes, desc="lengths"):
            for n, call in ranks.items():
                ways = (ALONE,) if n == 1 else (KEYS, HEADS)
                results[f"{tokens}/{n}"] = call(measure_size, tokens, ways, args)
    return results


def tables(results: dict) -> list[bench.Table]:
    rows = []
    for case, x in results.items():
        tokens, n = case.split("/")
        alone = results[f"{tokens}/1"]["ms"][ALONE]
        for way, ms in x["ms"].items():
            of_heads = [
                f"{x['bytes'][way] / (x['bytes'][HEADS] - x['chosen'][HEADS]):.3f}"
                if way == KEYS
                else "–",
                bench.ratio(ms, x["ms"][HEADS]) if way == KEYS else "–",
            ]
            chosen, total = (x[name][way] / 2**20 for name in ("chosen", "bytes"))
            mib = f"{total - chosen:.2f}" + f" + {chosen:.2f}" * (chosen > 0)
            rows.append(
                [
                    f"{int(tokens):,}",
                    n,
                    way,
                    bench.min_median(ms),
                    bench.ratio(ms, alone),
                    mib,
                    *of_heads,
                    f"{x['mib'][way]:.0f}",
                ]
            )
    columns = ["tokens", "ranks", "", "step, ms: min / median", "of alone", "sent + choice, MiB"]
    columns += ["bytes, of heads", "time, of heads", "peak, MiB a rank"]
    return [bench.Table("A step of a layer", columns, rows)]


def main() -> None:
    args = bench.parser_of(
        __doc__,
        tokens=("8192,32768", "of the sequence, one or several lengths"),
        rounds=(3, "timed steps of each contender; 1 where they take minutes"),
        results=(Path, "folder for sparse.md and sparse.json"),
    ).parse_args()
    results = measure(args)
    worst = max(x.get("off", 0) for x in results.values())
    shape = ", ".join(f"{name} {n}" for name, n in SIZES.items())
    paragraphs = [
        f"{shape}; index_topk is 1/16 of the tokens. What is compared: `--help`.",
        f"Loss and gradients of the two ways differ by at most {worst:.1e} of the largest entry.",
    ]
    title = "Sparse attention by an indexer: keys that travel, and heads"
    bench.report(args, "sparse", title, paragraphs, tables(results), results)


if __name__ == "__main__":
    main()
