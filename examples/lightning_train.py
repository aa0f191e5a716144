"""Train with Lightning on one process, then on sharded sequences, and compare.

A small Llama learns the sources of Python's standard library, byte by byte. The second training
differs in its strategy, `sequence_parallel(DDPStrategy)(sequence_parallel_size=ranks)`, and in the
model's attention. Losses must agree at every step, and so must the loss of the evaluation, or the
script exits with an error.

    python examples/lightning_train.py                             # two ranks on the CPU
    python examples/lightning_train.py --ranks 3 --seq-len 770     # parts of unequal length
    python examples/lightning_train.py --ranks 4 --sequence-ranks 2  # two groups
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from finetune import passages
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from transformers import LlamaConfig, LlamaForCausalLM

from deepsp.integrations.lightning import sequence_parallel
from deepsp.integrations.transformers import register

try:
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import DDPStrategy
except ImportError:
    import pytorch_lightning as pl
    from pytorch_lightning.strategies import DDPStrategy


LOSS_TOLERANCE = 1e-4  # what rounding explains in float32


class Sources(Dataset):
    """Rows of ``length`` bytes of the standard library's modules, and their labels."""

    def __init__(self, rows: int, length: int, first: int = 0):
        self.texts = passages(first + rows, length)[first:]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        ids = torch.tensor(list(self.texts[i].encode()))
        return {"input_ids": ids, "labels": ids}


class LanguageModel(pl.LightningModule):
    def __init__(self, seq_len: int, sharded: bool):
        super().__init__()
        self.seq_len, self.sharded, self.model, self.losses = seq_len, sharded, None, []

    def configure_model(self) -> None:
        if self.model is not None:
            return
        torch.manual_seed(0)
        self.model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=256,
                hidden_size=128,
                intermediate_size=344,
                num_hidden_layers=3,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=self.seq_len,
            )
        )
        if self.sharded:
            register(self.trainer.strategy.sequence_group, average_gradients=True)
            self.model.set_attn_implementation("deepsp")

    def training_step(self, batch: dict, number: int) -> torch.Tensor:
        loss = self.model(**batch).loss  # of the full batch
        self.log("loss", loss, sync_dist=True)
        return loss

    def on_train_batch_end(self, *_) -> None:
        self.losses.append(self.trainer.callback_metrics["loss"].item())
        if self.trainer.is_global_zero:
            print(f"step {len(self.losses)}: loss {self.losses[-1]:.4f}", flush=True)

    def validation_step(self, batch: dict, number: int) -> None:
        self.log("evaluation", self.model(**batch).loss, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def train(options: argparse.Namespace) -> None:
    """One training. The first process writes its losses."""
    torch.set_num_threads(1)
    sharded = options.ranks > 1
    groups = options.ranks // options.sequence_ranks
    rows = Sources(options.steps * options.batch, options.seq_len)
    # Lightning shuffles for several processes; one process takes the same order.
    sampler = None if sharded else DistributedSampler(rows, num_replicas=1, rank=0)
    evaluation = Sources(4, options.seq_len, first=options.steps * options.batch)
    strategy = "auto"
    if sharded:
        strategy = sequence_parallel(DDPStrategy)(sequence_parallel_size=options.sequence_ranks)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=options.ranks,
        strategy=strategy,
        max_epochs=1,
        gradient_clip_val=1.0,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = LanguageModel(options.seq_len, sharded)
    trainer.fit(
        module,
        DataLoader(rows, batch_size=options.batch // groups, sampler=sampler),
        DataLoader(evaluation, batch_size=options.batch // groups),
    )
    if trainer.is_global_zero:
        losses = [*module.losses, trainer.callback_metrics["evaluation"].item()]
        Path(options.output).write_text(json.dumps(losses))


def run(arguments: list[str]) -> list[float]:
    """The losses of a training; Lightning starts its further processes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "losses.json")
        command = [sys.executable, __file__, *arguments, "--output", str(path)]
        if subprocess.run(command).returncode:
            sys.exit("a training failed")
        return json.loads(path.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2, help="processes (default: 2)")
    parser.add_argument(
        "--sequence-ranks", type=int, help="ranks that share each sequence (default: all)"
    )
    parser.add_argument("--seq-len", type=int, default=512, help="tokens a row (default: 512)")
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps (default: 10)")
    parser.add_argument("--batch", type=int, default=2, help="rows a step, in all (default: 2)")
    parser.add_argument("--output", help=argparse.SUPPRESS)  # where a training writes its losses
    options = parser.parse_args()
    options.sequence_ranks = options.sequence_ranks or options.ranks
    if options.ranks % options.sequence_ranks:
        parser.error(f"expected --sequence-ranks to divide {options.ranks}")
    if options.batch % (options.ranks // options.sequence_ranks):
        parser.error("expected --batch to be a multiple of the number of groups")
    if options.output:
        train(options)
        return
    print("one process", flush=True)
    one = run([*sys.argv[1:], "--ranks", "1", "--sequence-ranks", "1"])
    print(f"\n{options.ranks} ranks", flush=True)
    sharded = run(sys.argv[1:])
    worst = max(abs(a - b) for a, b in zip(one, sharded, strict=True))
    if worst > LOSS_TOLERANCE:
        sys.exit(f"expected losses within {LOSS_TOLERANCE}, got a difference of {worst:.1e}")
    losses = f"loss {sharded[0]:.3f} -> {sharded[-2]:.3f}, evaluation {sharded[-1]:.3f}"
    print(f"\n{losses}, the same to {worst:.1e}")


if __name__ == "__main__":
    main()
