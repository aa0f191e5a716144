"""Step time and peak memory of the demo's model over the length of the sequence, on one process and
on ranks that share it.

The model and its data are those of examples/train.py (float32, AdamW, one sequence a step). P = 1
is plain PyTorch on the whole sequence, without deepsp; with more, each rank holds its part of the
tokens: shard_batch, DistributedAttention, cross_entropy and sync_gradients. Every case runs in
fresh processes of one thread each, over gloo on this machine.

  step     forward, backward, sync_gradients and the optimizer's step, on the slowest rank. After a
           warm-up step of at most 2048 tokens, steps are timed as long as another one fits in
           --seconds, but at least one: long sequences get one. (Memory that a size needs for the
           first time is part of that one.)
  memory   what a rank holds at most above what its process held before there was a model:
           parameters, gradients, the optimizer's state, activations and buffers. Largest over the
           ranks, from the kernel's VmHWM, which is reset before the model is made.
  loss     of the first timed step, the difference to that of the fewest ranks; more than rounding
           explains is an error.

With --checkpoints, each layer is in torch.utils.checkpoint: "layers" computes all of it again in
backward, "attention" keeps attention's output (deepsp.checkpoint_policy).

"× as fast" (median) and "× the memory" compare with the fewest ranks, too. With the defaults it
takes about 10 minutes on two free cores; the three cases of 32768 tokens are more than half of it.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import platform
import shlex
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from compile import peak_mib, reset_peak
from ranks import Ranks
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import deepsp

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from train import HEADS, TOLERANCES, Block, ByteTransformer, load_text

WARM_UP = 2048  # tokens
COLUMNS = [
    "S",
    "P",
    "checkpoints",
    "steps",
    "step, s: min / median",
    "tokens/s",
    "× as fast",
    "peak MiB",
    "× the memory",
    "loss",
]


def whole_loss(model: ByteTransformer, ids: Tensor) -> Tensor:
    """One process, plain PyTorch."""
    position_ids = torch.arange(ids.size(1))[None]

    def attend(block: Block, h: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in block.qkv(h, position_ids))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return block.o_proj(out.transpose(1, 2).flatten(-2))

    logits = model(ids, attend)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def sharded_loss(model: ByteTransformer, ids: Tensor, attention: torch.nn.Module) -> Tensor:
    batch, seq_lens = deepsp.shard_batch({"input_ids": ids, "labels": ids})

    def attend(block: Block, h: Tensor) -> Tensor:
        q, k, v = block.qkv(h, batch["position_ids"])
        out = attention(q, k, v, seq_lens=seq_lens, is_causal=True, enable_gqa=True)
        return block.o_proj(out.flatten(-2))

    return deepsp.cross_entropy(model(batch["input_ids"], attend), batch["shift_labels"])


def train(seq_len: int, seconds: float, checkpoints: str) -> dict:
    """Run by every rank of a group."""
    ids = load_text(None)[None, :seq_len].long()
    attention = deepsp.DistributedAttention()
    sharded = dist.get_world_size() > 1
    reset_peak()
    before = peak_mib()
    torch.manual_seed(0)
    model = ByteTransformer()
    if checkpoints != "none":
        how = {"context_fn": deepsp.checkpoint_policy()} if checkpoints == "attention" else {}
        for block in model.blocks:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, **how)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def step(ids: Tensor) -> float:
        loss = sharded_loss(model, ids, attention) if sharded else whole_loss(model, ids)
        loss.backward()
        if sharded:
            deepsp.sync_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    step(ids[:, :WARM_UP])
    times, losses = [], []
    while not times or sum(times) + times[-1] <= seconds:
        dist.barrier()
        begin = time.perf_counter()
        losses.append(step(ids))
        taken = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
        dist.all_reduce(taken, dist.ReduceOp.MAX)  # and so every rank stops at the same step
        times.append(taken.item())
    peaks = [0.0] * dist.get_world_size()
    dist.all_gather_object(peaks, peak_mib() - before)
    return {"seconds": times, "peak_mib": peaks, "losses": losses}


def rows_of(cases: list[dict]) -> list[list[str]]:
    rows = []
    for seq_len, group in itertools.groupby(cases, lambda case: case["seq_len"]):
        base, *_ = group = list(group)
        for case in group:
            median = statistics.median(case["seconds"])
            rows.append(
                [
                    str(seq_len),
                    str(case["ranks"]),
                    case["checkpoints"],
                    str(len(case["seconds"])),
                    f"{min(case['seconds']):.2f} / {median:.2f}",
                    f"{seq_len / median:.0f}",
                    f"{statistics.median(base['seconds']) / median:.2f}",
                    f"{max(case['peak_mib']):.0f}",
                    f"{max(case['peak_mib']) / max(base['peak_mib']):.2f}",
                    f"{difference(case, base):.1e}",
                ]
            )
    return rows


def difference(case: dict, base: dict) -> float:
    return abs(case["losses"][0] - base["losses"][0])


def notes(ranks: list[int]) -> str:
    """What a reader must know of this machine."""
    cores = os.cpu_count()
    many = ", ".join(str(p) for p in ranks if p > cores)
    if not many:
        return f"No more ranks than cores ({cores})."
    return (
        f"With P = {many}, ranks share the {cores} cores: these times show what {cores} cores do, "
        "not what a device for each rank would. What a rank holds doesn't depend on that."
    )


def draw(cases: list[dict], folder: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator

    def curves(axes, value) -> None:
        for ranks in sorted({case["ranks"] for case in cases}):
            of = [case for case in cases if case["ranks"] == ranks]
            label = "P = 1, plain PyTorch" if ranks == 1 else f"P = {ranks}"
            shared = ranks > os.cpu_count()
            if shared:
                label += f" (on {os.cpu_count()} cores)"
            x, y = [case["seq_len"] for case in of], [value(case) for case in of]
            axes.plot(x, y, "s--" if shared else "o-", label=label)
        lengths = sorted({case["seq_len"] for case in cases})
        axes.set_xticks(lengths, [f"{n / 1024:g}k" for n in lengths])
        axes.set_xlabel("tokens of the sequence")
        axes.grid(alpha=0.3)
        axes.legend()

    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    axes.set_xscale("log")
    axes.set_yscale("log")
    curves(axes, lambda case: statistics.median(case["seconds"]))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.set(ylabel="step, s", title="A training step")
    figure.savefig(folder / "train_time.png", dpi=110)

    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    curves(axes, lambda case: max(case["peak_mib"]))
    axes.set(ylabel="peak memory of a rank, MiB", title="What each rank must hold")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    figure.savefig(folder / "train_memory.png", dpi=110)


def write(cases: list[dict], about: dict, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    kinds = {case["checkpoints"] for case in cases}
    name = "train" if kinds == {"none"} else "checkpoints"
    (folder / f"{name}.json").write_text(json.dumps(about | {"cases": cases}, indent=1) + "\n")
    lines = [
        "# A training step over the length of the sequence",
        "",
        f"`{about['command']}`",
        "",
        f"{about['cpus']} cores ({about['cpu']}), load {about['load']:.2f} at the start, torch "
        f"{about['torch']}. What is measured: `--help`. {about['notes']}",
        "",
    ]
    lines += [f"| {' | '.join(x)} |" for x in (COLUMNS, ["---"] * len(COLUMNS), *rows_of(cases))]
    if name == "train":
        lines += ["", "![step time](train_time.png)", "", "![peak memory](train_memory.png)"]
        draw(cases, folder)
    (folder / f"{name}.md").write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--seq-lens",
        type=int,
        nargs="+",
        default=[4096, 8192, 16384, 32768],
        metavar="S",
        help="tokens of the sequence (default: 4096 8192 16384 32768)",
    )
    add(
        "--ranks",
        type=int,
        nargs="+",
        default=[1, 2, 4],
        metavar="P",
        help="that share a sequence (default: 1 2 4)",
    )
    add(
        "--checkpoints",
        nargs="+",
        default=["none"],
        choices=["none", "layers", "attention"],
        help="around each layer (default: none)",
    )
    add(
        "--seconds",
        type=float,
        default=8.0,
        help="for the timed steps of a case; one is always made (default: 8)",
    )
    add(
        "--results",
        type=Path,
        metavar="FOLDER",
        help="writes train.md, train.json, train_time.png and train_memory.png; checkpoints.* "
        "with --checkpoints",
    )
    args = parser.parse_args()
    longest = load_text(None).numel()
    if not all(2 <= s <= longest for s in args.seq_lens):
        parser.error(f"--seq-lens must be between 2 and {longest}, the bytes of text there are")
    if not all(1 <= p <= HEADS for p in args.ranks):
        parser.error(f"--ranks must be between 1 and {HEADS}, the model's number of query heads")

    from rich.console import Console
    from rich.table import Table
    from tqdm import tqdm

    about = {
        "command": shlex.join(["python", *sys.argv]),
        "settings": vars(args) | {"results": str(args.results)},
        "cpus": os.cpu_count(),
        "cpu": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "load": os.getloadavg()[0],
        "notes": notes(args.ranks),
    }
    todo = list(
        itertools.product(sorted(set(args.seq_lens)), sorted(set(args.ranks)), args.checkpoints)
    )
    # Attention decides, so that a case takes about S² / P, and the remaining time is about right.
    work = [s * s / min(p, os.cpu_count()) for s, p, _ in todo]
    form = "{desc} {percentage:3.0f}%|{bar}| {elapsed}, about {remaining} left"
    cases: list[dict] = []
    with tqdm(total=sum(work), bar_format=form) as bar:
        for (seq_len, size, kind), amount in zip(todo, work, strict=True):
            bar.set_description_str(f"S {seq_len}, P {size}")
            case = {"seq_len": seq_len, "ranks": size, "checkpoints": kind}
            with Ranks(None, size) as ranks:
                cases.append(case | ranks(train, seq_len, args.seconds, kind))
            bar.update(amount)

    table = Table(*COLUMNS, title="A training step of the demo's model", title_justify="left")
    for row in rows_of(cases):
        last = row[1] == str(max(args.ranks)) and row[2] == args.checkpoints[-1]
        table.add_row(*row, end_section=last)
    console = Console(width=120)
    console.print(table)
    console.print(about["notes"])
    if args.results:
        write(cases, about, args.results)
        console.print(f"written: into {args.results}")
    tolerance, _ = TOLERANCES["float32"]
    for _, group in itertools.groupby(cases, lambda case: case["seq_len"]):
        base, *others = group
        for case in others:
            if not difference(case, base) <= tolerance:  # NaN fails too
                raise SystemExit(
                    f"S {case['seq_len']}: the loss of {case['ranks']} ranks differs from that of "
                    f"{base['ranks']} by {difference(case, base):.1e}; at most "
                    f"{tolerance:.0e} is rounding"
                )


if __name__ == "__main__":
    main()
