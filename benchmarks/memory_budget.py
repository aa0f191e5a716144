"""Peak memory and step time over ``memory_budget``: what backward finds kept, and what it computes
again.

A transformer (float32, causal, pre-norm, 4 x wide GELU MLPs) on random tokens with AdamW, P ranks
of one thread over gloo, Inductor. Contenders, each in fresh processes, one after the other:

  backend, default           torch.compile(backend="deepsp"): torch's partitioner decides
  backend, budget b          the same with options={"memory_budget": b}
  backend, checkpoint        each layer in torch.utils.checkpoint, taken over by the backend
  by hand, default           DistributedAttention in the model, plain torch.compile
  by hand, checkpoint        the same, each layer in torch.utils.checkpoint: backward computes
                             attention again, and sends its inputs again

Step: median, without the first two. Memory: the peak of a step, above what the process held before
it, largest over the ranks: activations, gradients and buffers. Loss: of the first step, the largest
relative difference to "by hand, default".
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import bench
from tqdm import tqdm

DEFAULT, BUDGET, CHECKPOINT = "default", "budget", "checkpoint"
BACKEND, HAND = "backend", "by hand"


def make_model(args: argparse.Namespace, by_hand: bool, checkpointed: bool):
    import torch
    import torch.nn.functional as F
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    import deepsp

    def attend(q, k, v):  # [B, S, H, D]
        if by_hand:
            return deepsp.distributed_attention(q, k, v, is_causal=True)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norms = nn.ModuleList(nn.LayerNorm(args.dim) for _ in range(2))
            self.qkv = nn.Linear(args.dim, 3 * args.dim)
            self.out = nn.Linear(args.dim, args.dim)
            self.mlp = nn.Sequential(
                nn.Linear(args.dim, 4 * args.dim), nn.GELU(), nn.Linear(4 * args.dim, args.dim)
            )

        def forward(self, x):
            parts = self.qkv(self.norms[0](x)).unflatten(-1, (3, args.heads, -1)).unbind(2)
            x = x + self.out(attend(*parts).flatten(2))
            return x + self.mlp(self.norms[1](x))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(args.vocab, args.dim)
            self.blocks = nn.ModuleList(Block() for _ in range(args.layers))
            self.head = nn.Linear(args.dim, args.vocab)

        def forward(self, ids, labels):
            x = self.embed(ids)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False) if checkpointed else block(x)
            logits = self.head(x)
            if by_hand:
                return deepsp.cross_entropy(logits, labels)
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    torch.manual_seed(0)
    return Model()


def train(kind: str, mode: str, budget, args: argparse.Namespace) -> dict:
    """Return the step's time and memory, and the losses; run by every rank of a group."""
    import torch

    import deepsp

    model = make_model(args, kind == HAND, mode == CHECKPOINT)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    if kind == HAND:
        compiled = torch.compile(model)
    else:
        options = {"memory_budget": budget} if mode == BUDGET else {}
        compiled = torch.compile(model, backend="deepsp", options=options)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(args.vocab, (1, args.seq + 1), generator=generator)
    inputs = [tokens[:, :-1].clone(), tokens[:, 1:].clone()]
    if kind == HAND:
        inputs = [deepsp.shard(x, 1).clone() for x in inputs]
    else:
        deepsp.prepare_inputs(*inputs)

    def step() -> tuple[float, float]:
        begin = time.perf_counter()
        loss = compiled(*inputs)
        loss.backward()
        if kind == HAND:
            deepsp.sync_gradients(model)
        return 1e3 * (time.perf_counter() - begin), loss.item()

    losses, steps = [], []
    for _ in range(args.steps):
        (ms, loss), mib = bench.growth(step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
        steps.append((ms, mib))
    ms, mib = bench.largest(*[statistics.median(x) for x in zip(*steps[2:], strict=True)])
    return {"step_ms": ms, "mib": mib, "losses": losses}


def measure(kind: str, mode: str, budget, args: argparse.Namespace) -> dict:
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        with bench.ranks_on(bench.LOOPBACK, args.ranks) as ranks:
            return ranks(train, kind, mode, budget, args)


def title_of(kind: str, mode: str, budget) -> str:
    return f"{kind}, {mode} {budget:g}" if mode == BUDGET else f"{kind}, {mode}"


def table_of(title: str, results: dict[str, dict]) -> bench.Table:
    base = results[title_of(HAND, DEFAULT, None)]
    rows = [
        [
            name,
            f"{x['step_ms']:.0f}",
            f"{x['mib']:.0f}",
            f"{x['step_ms'] / base['step_ms']:.2f} time, {x['mib'] / base['mib']:.2f} memory",
            f"{abs(x['losses'][0] / base['losses'][0] - 1):.1e}",
        ]
        for name, x in results.items()
    ]
    columns = ["", "step, ms", "memory of a step, MiB", "× by hand, default", "loss, difference"]
    return bench.Table(title, columns, rows)


def draw(results: dict[str, dict], file: Path) -> None:
    with bench.picture(file, figsize=(8, 5)) as (_, axes):
        curve = {name: x for name, x in results.items() if BUDGET in name}
        mib, ms = ([x[key] for x in curve.values()] for key in ("mib", "step_ms"))
        axes.plot(mib, ms, "o-", label="memory_budget")
        for name, *place in zip(curve, mib, ms, strict=True):
            label = name.removeprefix(f"{BACKEND}, {BUDGET} ")
            axes.annotate(label, place, xytext=(6, 6), textcoords="offset points")
        for name, x in results.items():
            if name not in curve:
                axes.plot(x["mib"], x["step_ms"], "s" if HAND in name else "D", label=name)
        most = {key: 1.15 * max(x[key] for x in results.values()) for key in ("mib", "step_ms")}
        axes.set(xlabel="peak memory of a step, MiB", xlim=(0, most["mib"]))
        axes.set(ylabel="step, ms", ylim=(0, most["step_ms"]))
        axes.grid(alpha=0.3)
        axes.legend(loc="lower left")


def main() -> None:
    args = bench.parser_of(
        __doc__,
        budgets=([0.0, 0.2, 0.4, 0.6], "of memory_budget"),
        seq=(4096, "tokens"),
        ranks=(2, "that share a sequence"),
        layers=(4, "the model's layers"),
        dim=(256, "its features"),
        heads=(8, "its heads"),
        vocab=(512, "its vocabulary"),
        steps=(6, "of each contender"),
        results=(Path, "folder for memory_budget.md, .json and .png"),
    ).parse_args()
    contenders = [(kind, mode, None) for kind in (HAND, BACKEND) for mode in (DEFAULT, CHECKPOINT)]
    contenders += [(BACKEND, BUDGET, b) for b in sorted(args.budgets, reverse=True)]
    results = {}
    for contender in (bar := tqdm(contenders, unit="run")):
        bar.set_postfix_str(title_of(*contender))
        results[title_of(*contender)] = measure(*contender, args)
    table = table_of(f"S {args.seq}, P {args.ranks}", results)
    record = {"settings": vars(args), "results": results}
    title, about = "What backward keeps and computes again", "What the contenders are: `--help`."
    pictures = ("memory_budget.png",)
    bench.report(args, "memory_budget", title, [about], [table], record, pictures)
    if args.results:
        draw(results, args.results / "memory_budget.png")


if __name__ == "__main__":
    main()
