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
import ctypes
import gc
import json
import os
import shlex
import statistics
import sys
import tempfile
import time
from pathlib import Path

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
    """Run by every rank of a group."""
    import torch
    import torch.distributed as dist
    from compile import peak_mib, reset_peak

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
    losses, steps = [], []
    for _ in range(args.steps):
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # what is free must not hide what is used next
        dist.barrier()
        reset_peak()
        before = peak_mib()
        begin = time.perf_counter()
        loss = compiled(*inputs)
        loss.backward()
        if kind == HAND:
            deepsp.sync_gradients(model)
        steps.append((1e3 * (time.perf_counter() - begin), peak_mib() - before))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    found = torch.tensor([statistics.median(x) for x in zip(*steps[2:], strict=True)])
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return {"step_ms": found[0].item(), "mib": found[1].item(), "losses": losses}


def measure(kind: str, mode: str, budget, args: argparse.Namespace) -> dict:
    from ranks import Ranks

    with tempfile.TemporaryDirectory() as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        with Ranks(None, args.ranks) as ranks:
            return ranks(train, kind, mode, budget, args)


def title_of(kind: str, mode: str, budget) -> str:
    return f"{kind}, {mode} {budget:g}" if mode == BUDGET else f"{kind}, {mode}"


COLUMNS = ["", "step, ms", "memory of a step, MiB", "× by hand, default", "loss, difference"]


def rows_of(found: dict[str, dict]) -> list[list[str]]:
    base = found[title_of(HAND, DEFAULT, None)]
    return [
        [
            name,
            f"{x['step_ms']:.0f}",
            f"{x['mib']:.0f}",
            f"{x['step_ms'] / base['step_ms']:.2f} time, {x['mib'] / base['mib']:.2f} memory",
            f"{abs(x['losses'][0] / base['losses'][0] - 1):.1e}",
        ]
        for name, x in found.items()
    ]


def draw(found: dict[str, dict], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    curve = [x for name, x in found.items() if BUDGET in name]
    axes.plot([x["mib"] for x in curve], [x["step_ms"] for x in curve], "o-", label="memory_budget")
    for name, x in found.items():
        if BUDGET in name:
            label, shift = name.removeprefix(f"{BACKEND}, {BUDGET} "), (6, 6)
        else:
            axes.plot(x["mib"], x["step_ms"], "s" if HAND in name else "D", label=name)
            continue
        place = (x["mib"], x["step_ms"])
        axes.annotate(label, place, xytext=shift, textcoords="offset points")
    right, top = (1.15 * max(x[key] for x in found.values()) for key in ("mib", "step_ms"))
    axes.set(xlabel="peak memory of a step, MiB", ylabel="step, ms", xlim=(0, right), ylim=(0, top))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower left")
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--budgets",
        type=float,
        nargs="+",
        default=[0, 0.2, 0.4, 0.6],
        help="of memory_budget (default: 0 0.2 0.4 0.6)",
    )
    add("--seq", type=int, default=4096, help="tokens (default: 4096)")
    add("--ranks", type=int, default=2, help="that share a sequence (default: 2)")
    add("--layers", type=int, default=4, help="the model's layers (default: 4)")
    add("--dim", type=int, default=256, help="its features (default: 256)")
    add("--heads", type=int, default=8, help="its heads (default: 8)")
    add("--vocab", type=int, default=512, help="its vocabulary (default: 512)")
    add("--steps", type=int, default=6, help="of each contender (default: 6)")
    add("--results", type=Path, metavar="FOLDER", help="writes memory_budget.md, .json and .png")
    args = parser.parse_args()

    from importlib.metadata import version

    from rich.console import Console
    from rich.table import Table
    from tqdm import tqdm

    contenders = [(HAND, DEFAULT, None), (HAND, CHECKPOINT, None), (BACKEND, DEFAULT, None)]
    contenders += [(BACKEND, CHECKPOINT, None)]
    contenders += [(BACKEND, BUDGET, b) for b in sorted(args.budgets, reverse=True)]
    load, found = os.getloadavg()[0], {}
    with tqdm(contenders, unit="run") as bar:
        for contender in bar:
            bar.set_postfix_str(title_of(*contender))
            found[title_of(*contender)] = measure(*contender, args)
    rows = rows_of(found)
    table = Table(*COLUMNS, title=f"S {args.seq}, P {args.ranks}", title_justify="left")
    for row in rows:
        table.add_row(*row)
    console = Console(width=120)
    console.print(table)
    if args.results:
        args.results.mkdir(parents=True, exist_ok=True)
        command = shlex.join(["python", *sys.argv])
        record = {"command": command, "settings": vars(args), "load": load, "found": found}
        file = args.results / "memory_budget"
        file.with_suffix(".json").write_text(json.dumps(record, indent=1, default=str) + "\n")
        lines = ["# What backward finds kept", "", f"`{command}`", ""]
        lines += [
            f"{os.cpu_count()} cores, load {load:.2f} at the start, torch {version('torch')}. What "
            "the contenders are, and what is counted: `--help`.",
            "",
        ]
        lines += [f"| {' | '.join(x)} |" for x in (COLUMNS, ["---"] * len(COLUMNS), *rows)]
        lines += ["", "![memory and time](memory_budget.png)"]
        file.with_suffix(".md").write_text("\n".join(lines) + "\n")
        draw(found, file.with_suffix(".png"))
        console.print(f"written: {file}.*")


if __name__ == "__main__":
    main()
