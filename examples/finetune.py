"""Train with transformers' Trainer on one process, then on sharded sequences, and compare.

A small Llama learns the sources of Python's standard library, byte by byte. The second training
differs in one line: `SequenceParallelTrainer(..., sequence_parallel_size=ranks)`. Losses, gradient
norms and evaluation losses must agree at every step, or the script exits with an error. It draws
both curves into a picture.

    python examples/finetune.py                             # two ranks on the CPU
    python examples/finetune.py --ranks 3 --seq-len 2050    # parts of unequal length
    python examples/finetune.py --ranks 4 --sequence-ranks 2  # two groups, each with its batches
"""

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import torch
from torch.utils.data import Dataset

# What rounding explains in float32, of a loss and relative of a gradient norm.
LOSS_TOLERANCE, NORM_TOLERANCE = 1e-4, 1e-3


class Sources(Dataset):
    """Rows of ``length`` bytes of the standard library's modules, and their labels."""

    def __init__(self, rows: int, length: int, first: int = 0):
        self.rows, self.length = rows, length
        begin, end = first * length, (first + rows) * length
        text = bytearray()
        for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
            text += path.read_bytes()
            if len(text) >= end:
                break
        if len(text) < end:
            sys.exit(f"expected {end} bytes of sources, got {len(text)}; take fewer --steps")
        self.bytes = torch.frombuffer(text, dtype=torch.uint8)[begin:end].long()

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        ids = self.bytes[i * self.length : (i + 1) * self.length]
        return {"input_ids": ids, "labels": ids}


def train(options: argparse.Namespace) -> None:
    """One process of a training. The first writes its log."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

    torch.set_num_threads(1)
    world = int(os.environ.get("WORLD_SIZE", 1))
    data_ranks = options.ranks // options.sequence_ranks
    batch = options.batch // (data_ranks if world > 1 else 1)
    arguments = TrainingArguments(
        output_dir=options.output,
        use_cpu=not torch.cuda.is_available(),
        per_device_train_batch_size=batch,
        per_device_eval_batch_size=batch,
        max_steps=options.steps,
        learning_rate=1e-3,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=max(1, options.steps // 2),
        save_strategy="no",
        report_to=[],
        ddp_find_unused_parameters=False,
    )
    set_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=128,
            intermediate_size=344,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=options.seq_len,
        )
    )
    data = {
        "train_dataset": Sources(options.steps * options.batch, options.seq_len),
        "eval_dataset": Sources(4, options.seq_len, first=options.steps * options.batch),
    }
    if world == 1:
        trainer = Trainer(model, arguments, **data)
    else:
        from deepsp.integrations.transformers import SequenceParallelTrainer

        trainer = SequenceParallelTrainer(
            model,
            arguments,
            **data,
            sequence_parallel_size=options.sequence_ranks,
            without_logits=options.without_logits,
        )
    trainer.train()
    if trainer.is_world_process_zero():
        Path(options.output, "log.json").write_text(json.dumps(trainer.state.log_history))


def run(ranks: int, arguments: list[str]) -> list[dict]:
    """The log of a training on so many processes."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable]
        if ranks > 1:
            command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command += [__file__, *arguments, "--output", folder]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        if subprocess.run(command, env=environment).returncode != 0:
            sys.exit(f"the training on {ranks} processes failed")
        return json.loads(Path(folder, "log.json").read_text())


def compare(one: list[dict], sharded: list[dict]) -> float:
    """The largest difference of a loss. Exits where rounding doesn't explain one."""
    worst = 0.0
    for a, b in zip(one, sharded, strict=True):
        for name in ("loss", "eval_loss", "grad_norm"):
            if name not in a:
                continue
            norm = name == "grad_norm"
            difference = abs(a[name] - b[name]) / (a[name] if norm else 1)
            worst = worst if norm else max(worst, difference)
            if not difference <= (NORM_TOLERANCE if norm else LOSS_TOLERANCE):
                sys.exit(f"step {a['step']}: {name} is {a[name]} in one process, {b[name]} sharded")
    return worst


def draw(one: list[dict], sharded: list[dict], ranks: int, path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for log, label, style in ((one, "one process", "-"), (sharded, f"{ranks} ranks", "--")):
        for name, marker in (("loss", None), ("eval_loss", "o")):
            points = [(entry["step"], entry[name]) for entry in log if name in entry]
            axes.plot(*zip(*points, strict=True), style, marker=marker, label=f"{label}, {name}")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per byte)")
    axes.legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2, help="processes (default: 2)")
    parser.add_argument(
        "--sequence-ranks", type=int, help="ranks that share each sequence (default: all)"
    )
    parser.add_argument("--seq-len", type=int, default=1024, help="tokens a row (default: 1024)")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps (default: 20)")
    parser.add_argument("--batch", type=int, default=2, help="rows a step, in all (default: 2)")
    parser.add_argument(
        "--without-logits", action="store_true", help="compute the loss without logits"
    )
    parser.add_argument(
        "--picture", type=Path, default=Path("build/finetune.png"), help="where the curves go"
    )
    parser.add_argument("--output", help=argparse.SUPPRESS)  # where a process of it writes
    options = parser.parse_args()
    options.sequence_ranks = options.sequence_ranks or options.ranks
    if options.ranks % options.sequence_ranks:
        parser.error(f"expected --sequence-ranks to divide {options.ranks}")
    if options.batch % (options.ranks // options.sequence_ranks):
        parser.error("expected --batch to be a multiple of the number of groups")
    if options.output:
        train(options)
        return
    print("one process, transformers' Trainer", flush=True)
    one = run(1, sys.argv[1:])
    print(f"\n{options.ranks} ranks, SequenceParallelTrainer", flush=True)
    sharded = run(options.ranks, sys.argv[1:])
    worst = compare(one, sharded)
    draw(one, sharded, options.ranks, options.picture)
    losses = [entry["loss"] for entry in sharded if "loss" in entry]
    print(f"\nloss {losses[0]:.3f} -> {losses[-1]:.3f}, the same to {worst:.1e}: {options.picture}")


if __name__ == "__main__":
    main()
