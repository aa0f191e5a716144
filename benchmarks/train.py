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

import functools
import itertools
import json
import os
import statistics
import sys
from pathlib import Path

import bench
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

import deepsp

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from train import HEADS, TOLERANCES, Block, ByteTransformer, load_text

WARM_UP = 2048  # tokens


def whole_loss(model: ByteTransformer, ids: Tensor) -> Tensor:
    """Return the loss of one process, by plain PyTorch."""
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
    """Return times and losses of steps, and each rank's peak of memory."""
    ids = load_text(None)[None, :seq_len].long()
    attention = deepsp.DistributedAttention()
    sharded = dist.get_world_size() > 1
    bench.reset_peak()
    before = bench.status_mib("VmHWM")
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
        # Every rank takes the slowest one's time, and so stops at the same step.
        times += bench.largest(bench.clock(lambda: losses.append(step(ids))))
    peaks = [0.0] * dist.get_world_size()
    dist.all_gather_object(peaks, bench.status_mib("VmHWM") - before)
    return {"seconds": times, "peak_mib": peaks, "losses": losses}


def table_of(cases: list[dict]) -> bench.Table:
    rows = []
    for seq_len, group in itertools.groupby(cases, lambda case: case["seq_len"]):
        base, *_ = group = list(group)
        for case in group:
            median = statistics.median(case["seconds"])
            rows.append(
                [
                    seq_len,
                    case["ranks"],
                    case["checkpoints"],
                    len(case["seconds"]),
                    bench.min_median(case["seconds"], ".2f"),
                    f"{seq_len / median:.0f}",
                    f"{statistics.median(base['seconds']) / median:.2f}",
                    f"{max(case['peak_mib']):.0f}",
                    f"{max(case['peak_mib']) / max(base['peak_mib']):.2f}",
                    f"{difference(case, base):.1e}",
                ]
            )
    columns = ["S", "P", "checkpoints", "steps", "step, s: min / median", "tokens/s", "× as fast"]
    columns += ["peak MiB", "× the memory", "loss"]
    return bench.Table("A training step of the demo's model", columns, rows)


def difference(case: dict, base: dict) -> float:
    return abs(case["losses"][0] - base["losses"][0])


def notes(ranks: list[int]) -> str:
    """Return what a reader must know of this machine."""
    cores = os.cpu_count()
    many = ", ".join(str(p) for p in ranks if p > cores)
    if not many:
        return f"No more ranks than cores ({cores})."
    return (
        f"With P = {many}, ranks share the {cores} cores: these times show what {cores} cores do, "
        "not what a device for each rank would. What a rank holds doesn't depend on that."
    )


def draw(cases: list[dict], cpus: int, folder: Path) -> None:
    def curves(axes, value) -> None:
        for ranks in sorted({case["ranks"] for case in cases}):
            of = [case for case in cases if case["ranks"] == ranks]
            label = "P = 1, plain PyTorch" if ranks == 1 else f"P = {ranks}"
            shared = ranks > cpus
            if shared:
                label += f" (on {cpus} cores)"
            x, y = [case["seq_len"] for case in of], [value(case) for case in of]
            axes.plot(x, y, "s--" if shared else "o-", label=label)
        lengths = sorted({case["seq_len"] for case in cases})
        axes.set_xticks(lengths, [f"{n / 1024:g}k" for n in lengths])
        axes.set_xlabel("tokens of the sequence")
        axes.grid(alpha=0.3)
        axes.legend()

    from matplotlib.ticker import LogLocator

    with bench.picture(folder / "train_time.png", figsize=(7, 4.5)) as (_, axes):
        axes.set_xscale("log")
        axes.set_yscale("log")
        curves(axes, lambda case: statistics.median(case["seconds"]))
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
        axes.set(ylabel="step, s", title=f"A training step, measured on {cpus} CPU cores")
    with bench.picture(folder / "train_memory.png", figsize=(7, 4.5)) as (_, axes):
        curves(axes, lambda case: max(case["peak_mib"]))
        title = "Peak memory of a rank, measured on CPUs"
        axes.set(ylabel="peak memory of a rank, MiB", title=title)
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)


def check(cases: list[dict]) -> None:
    """Raise if losses differ by more than rounding."""
    tolerance, _ = TOLERANCES["float32"]
    for seq_len, group in itertools.groupby(cases, lambda case: case["seq_len"]):
        base, *others = group
        for case in others:
            if not difference(case, base) <= tolerance:  # NaN fails too
                raise SystemExit(
                    f"S {seq_len}: the loss of {case['ranks']} ranks differs from that of "
                    f"{base['ranks']} by {difference(case, base):.1e}; at most {tolerance:.0e} is "
                    "rounding"
                )


def main() -> None:
    kinds = ["none", "layers", "attention"]
    parser = bench.parser_of(
        __doc__,
        seq_lens=([4096, 8192, 16384, 32768], "tokens of the sequence"),
        ranks=([1, 2, 4], "that share a sequence"),
        checkpoints=(["none"], "around each layer", kinds),
        seconds=(8.0, "for the timed steps of a case; one is always made"),
        results=(Path, "folder for train.md, .json and pictures; checkpoints.* with --checkpoints"),
        replot=(False, "draw the pictures from train.json in --results again; nothing is measured"),
    )
    args = parser.parse_args()
    if args.replot:
        if args.results is None:
            parser.error("--replot: expected --results, the folder that has train.json")
        record = json.loads((args.results / "train.json").read_text())
        draw(record["cases"], record.get("machine", record)["cpus"], args.results)
        return
    longest = load_text(None).numel()
    if not all(2 <= s <= longest for s in args.seq_lens):
        parser.error(f"--seq-lens must be between 2 and {longest}, the bytes of text there are")
    if not all(1 <= p <= HEADS for p in args.ranks):
        parser.error(f"--ranks must be between 1 and {HEADS}, the model's number of query heads")
    lengths, sizes = sorted(set(args.seq_lens)), sorted(set(args.ranks))
    todo = list(itertools.product(lengths, sizes, args.checkpoints))
    # Attention decides, so that a case takes about S² / P, and the remaining time is about right.
    work = [s * s / min(p, os.cpu_count()) for s, p, _ in todo]
    form = "{desc} {percentage:3.0f}%|{bar}| {elapsed}, about {remaining} left"
    cases: list[dict] = []
    with tqdm(total=sum(work), bar_format=form) as bar:
        for (seq_len, size, kind), amount in zip(todo, work, strict=True):
            bar.set_description_str(f"S {seq_len}, P {size}")
            case = {"seq_len": seq_len, "ranks": size, "checkpoints": kind}
            with bench.ranks_on(bench.LOOPBACK, size) as ranks:
                cases.append(case | ranks(train, seq_len, args.seconds, kind))
            bar.update(amount)
    name, pictures = "checkpoints", ()
    if args.checkpoints == ["none"]:
        name, pictures = "train", ("train_time.png", "train_memory.png")
    title = "A training step over the length of the sequence"
    about = f"What is measured: `--help`. {notes(args.ranks)}"
    results = {"settings": vars(args), "cases": cases}
    bench.report(args, name, title, [about], [table_of(cases)], results, pictures)
    print(notes(args.ranks))
    if args.results and pictures:
        draw(cases, os.cpu_count(), args.results)
    check(cases)


if __name__ == "__main__":
    main()
