"""Memory of a trainer's step on sharded sequences, with all logits and without.

A small Llama with a large vocabulary, float32, AdamW, one thread a rank: transformers' Trainer with
and without without_logits=True, and TRL's DPOTrainer, which has no logits in either case. Each way
runs in processes of its own. Memory is what the largest rank's process takes at most in the second
step (VmHWM) above what it holds before that step: the weights and AdamW's state. Ranks send
messages: memory that they shared would count for each of them. The losses of the first two are
compared. "Logits" is what one copy of a rank's logits would take.

    python benchmarks/trainer_memory.py
    python benchmarks/trainer_memory.py --vocab 128256 --tokens 4096 --ranks 4
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile

import bench
import torch
import torch.distributed as dist
from tqdm import tqdm

WAYS = {
    "logits": "Trainer, all logits",
    "without_logits": "Trainer, without_logits=True",
    "dpo": "DPOTrainer, a pair of rows",
}


def measure(way: str, args: argparse.Namespace) -> dict:
    """Return the MiB of the second step, and its loss."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "DEEPSP_TRANSPORT": "messages"}
    from transformers import TrainerCallback

    mib = []

    class Peak(TrainerCallback):
        def on_step_begin(self, arguments, state, control, **_):
            if state.global_step == 1:
                bench.trim()
                bench.reset_peak()
                mib.append(bench.status_mib("VmHWM"))

        def on_step_end(self, arguments, state, control, **_):
            mib.append(bench.status_mib("VmHWM"))

    trainer = make(way, args)
    trainer.add_callback(Peak())
    trainer.train()
    *_, before, after = mib
    loss = next(entry["loss"] for entry in reversed(trainer.state.log_history) if "loss" in entry)
    return {"mib": bench.largest(after - before)[0], "loss": loss}


def make(way: str, args: argparse.Namespace):
    """Return a trainer on rows of random tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

    from deepsp.integrations.transformers import SequenceParallelTrainer, sequence_parallel

    def model(seed: int):
        torch.manual_seed(seed)
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=args.vocab,
                hidden_size=args.hidden,
                intermediate_size=3 * args.hidden,
                num_hidden_layers=2,
                num_attention_heads=4,
                max_position_embeddings=args.tokens,
                pad_token_id=0,
            )
        )

    options = {
        "output_dir": tempfile.mkdtemp(),
        "use_cpu": True,
        "max_steps": 2,
        "logging_steps": 1,
        "per_device_train_batch_size": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "ddp_find_unused_parameters": False,
    }
    torch.manual_seed(0)
    rows = torch.randint(2, args.vocab, (2, args.tokens))
    more = {"sequence_parallel_size": dist.get_world_size()}
    if way != "dpo":
        data = [{"input_ids": row, "labels": row} for row in rows]
        more["without_logits"] = way == "without_logits"
        return SequenceParallelTrainer(
            model(0), TrainingArguments(**options), train_dataset=data, **more
        )
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from trl import DPOConfig, DPOTrainer

    names = ["<pad>", "<eos>", *map(str, range(2, args.vocab))]
    words = Tokenizer(models.WordLevel({name: n for n, name in enumerate(names)}, "<eos>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>"
    )

    def text(ids: torch.Tensor) -> str:
        return " ".join(map(str, ids.tolist()))

    half = args.tokens // 2
    pair = {
        "prompt": text(rows[0, :half]),
        "chosen": " " + text(rows[0, half:-1]),
        "rejected": " " + text(rows[1, half:-1]),
    }
    return sequence_parallel(DPOTrainer)(
        model(0),
        model(0),
        DPOConfig(max_length=None, bf16=False, **options),
        train_dataset=Dataset.from_list([pair] * 2),
        processing_class=tokenizer,
        **more,
    )


def main() -> None:
    args = bench.parser_of(
        __doc__,
        vocab=(32000, "classes"),
        tokens=(8192, "of a row, on all ranks"),
        hidden=(128, "features of a token"),
        ranks=(2, "that share each row"),
        ways=(list(WAYS), "what to measure", WAYS),
    ).parse_args()
    results = {}
    for way in tqdm(args.ways):
        with bench.ranks_on(bench.LOOPBACK, args.ranks) as ranks:
            results[way] = ranks(measure, way, args)
    print(
        f"{args.ranks} ranks, rows of {args.tokens} tokens, {args.vocab} classes, {args.hidden} "
        f"features, float32; load {bench.LOAD:.1f} to {os.getloadavg()[0]:.1f}"
    )
    here = -(-args.tokens // args.ranks)
    for way, result in results.items():
        logits = here * args.vocab * 4 / 2**20 * (2 if way == "dpo" else 1)
        print(
            f"{WAYS[way]:30} {result['mib']:7,.0f} MiB   logits {logits:7,.0f} MiB   "
            f"loss {result['loss']:.6f}"
        )
    if not {"logits", "without_logits"} <= results.keys():
        return
    whole, ours = (results[way] for way in ("logits", "without_logits"))
    print(f"without logits: 1/{whole['mib'] / ours['mib']:.1f} of the memory")
    if abs(whole["loss"] - ours["loss"]) > 1e-4:
        sys.exit("FAILED: the losses differ")


if __name__ == "__main__":
    main()
