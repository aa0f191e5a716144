"""Fine-tune with TRL on one process, then on sharded sequences, and compare: SFT, and DPO after it.

A small Llama learns the sources of Python's standard library, byte by byte (`SFTTrainer`). From
what that has saved, it learns to prefer the source that follows to the same in swapped case
(`DPOTrainer`). The second training differs in two places: the classes are
`sequence_parallel(SFTTrainer)` and `sequence_parallel(DPOTrainer)`, and each gets
`sequence_parallel_size=ranks`. Losses, gradient norms, evaluation losses and DPO's rewards must
agree at every step, or the script exits with an error. It draws the curves into a picture.

    python examples/finetune.py                             # two ranks on the CPU
    python examples/finetune.py --ranks 3 --seq-len 2050    # parts of unequal length
    python examples/finetune.py --ranks 4 --sequence-ranks 2  # two groups, each with its batches
"""

import argparse
import json
import os
import sys
import sysconfig
import time
from pathlib import Path

import torch
from side_by_side import LOGS, leave, run

# What rounding explains in float32. Rewards, and DPO's loss, come from sums of hundreds of
# log-probabilities. Differences of gradient norms are relative.
TOLERANCE = {"SFT": 1e-4, "DPO": 1e-3}
NORM_TOLERANCE = 1e-3
REWARDS = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")
COMPARED = ("loss", "eval_loss", "grad_norm", *REWARDS)


def passages(count: int, length: int) -> list[str]:
    """Consecutive passages of ``length`` bytes from the standard library's modules."""
    text = ""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_text(encoding="utf-8").encode("ascii", "ignore").decode()
        if len(text) >= count * length:
            break
    if len(text) < count * length:
        sys.exit(f"expected {count * length} bytes of sources, got {len(text)}; take fewer --steps")
    return [text[i * length : (i + 1) * length] for i in range(count)]


def byte_tokenizer():
    """Each byte is a token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = {token: n for n, token in enumerate(["<pad>", "<eos>", *alphabet])}
    made = Tokenizer(models.BPE(names, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def quiet(trainer) -> None:
    """Leaves the progress bar, without a line for each step: the logs are compared at the end."""
    from transformers.trainer_callback import ProgressCallback

    class Bar(ProgressCallback):
        def on_log(self, *args, **kwargs):
            pass

    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(Bar)


def train(options: argparse.Namespace) -> None:
    """One process of both trainings. The first writes their logs."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, set_seed
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    torch.set_num_threads(1)
    size = options.sequence_ranks if "WORLD_SIZE" in os.environ else 1
    if size > 1:
        from deepsp.integrations.transformers import sequence_parallel

        SFTTrainer, DPOTrainer = map(sequence_parallel, (SFTTrainer, DPOTrainer))
    more = {"sequence_parallel_size": size} if size > 1 else {}

    groups = int(os.environ.get("WORLD_SIZE", 1)) // size
    arguments = {
        "use_cpu": not torch.cuda.is_available(),
        "bf16": False,
        "per_device_train_batch_size": options.batch // groups,
        "per_device_eval_batch_size": options.batch // groups,
        "max_steps": options.steps,
        "max_length": options.seq_len,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "ddp_find_unused_parameters": False,
    }
    tokenizer = byte_tokenizer()
    set_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=344,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=options.seq_len,
        )
    )
    count = options.steps * options.batch
    texts = passages(count + 4, options.seq_len)
    rows = Dataset.from_dict({"text": texts})
    sft = SFTTrainer(
        model,
        SFTConfig(
            output_dir=options.output,
            learning_rate=1e-3,
            eval_strategy="steps",
            eval_steps=max(1, options.steps // 2),
            **arguments,
        ),
        train_dataset=rows.select(range(count)),
        eval_dataset=rows.select(range(count, count + 4)),
        processing_class=tokenizer,
        **more,
    )
    quiet(sft)
    sft.train()
    saved = f"{options.output}/sft"
    sft.save_model(saved)
    sft.accelerator.wait_for_everyone()

    half = options.seq_len // 2
    pairs = [
        {"prompt": text[:half], "chosen": text[half:], "rejected": text[half:].swapcase()}
        for text in texts[:count]
    ]
    dpo = DPOTrainer(
        AutoModelForCausalLM.from_pretrained(saved),
        AutoModelForCausalLM.from_pretrained(saved),
        DPOConfig(output_dir=options.output, learning_rate=1e-4, beta=0.1, **arguments),
        train_dataset=Dataset.from_list(pairs),
        processing_class=tokenizer,
        **more,
    )
    quiet(dpo)
    dpo.train()
    if dpo.is_world_process_zero():
        logs = {"SFT": sft.state.log_history, "DPO": dpo.state.log_history}
        Path(options.output, LOGS).write_text(json.dumps(logs))
    leave()


def compare(one: list[dict], sharded: list[dict], name: str) -> dict[str, float]:
    """The largest difference of each number. Exits where rounding doesn't explain one."""
    worst: dict[str, float] = {}
    for a, b in zip(one, sharded, strict=True):
        for key in filter(a.__contains__, COMPARED):
            if key == "rewards/accuracies" and a["step"] == 1:
                continue  # the policy is the reference, and rewards are rounding
            norm = key == "grad_norm"
            difference = abs(a[key] - b[key]) / (a[key] if norm else 1)
            worst[key] = max(worst.get(key, 0.0), difference)
            if not difference <= (NORM_TOLERANCE if norm else TOLERANCE[name]):
                sys.exit(
                    f"{name}, step {a['step']}: {key} is {a[key]} in one process, {b[key]} sharded"
                )
    return worst


def show(one: list[dict], sharded: list[dict], ranks: int, name: str) -> None:
    """A line for each step: one process / ranks."""
    keys = [key for key in ("loss", "grad_norm", *REWARDS[:2]) if key in one[0]]
    print(f"\n{name}: one process / {ranks} ranks")
    print("step" + "".join(f"{key:>24}" for key in keys))
    for a, b in zip(one, sharded, strict=True):
        if "loss" in a:
            cells = (f"{a[key]:.5f} / {b[key]:.5f}" for key in keys)
            print(f"{a['step']:4}" + "".join(f"{cell:>24}" for cell in cells))


def draw(one: dict, sharded: dict, ranks: int, path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    panels = {
        ("SFT", "loss (nats per byte)"): ("loss", "eval_loss"),
        ("DPO", "loss"): ("loss",),
        ("DPO", "rewards"): ("rewards/chosen", "rewards/rejected"),
    }
    figure, every = plt.subplots(1, len(panels), figsize=(13, 4), layout="constrained")
    for axes, ((name, label), keys) in zip(every, panels.items(), strict=True):
        for logs, where, style in ((one, "one process", "-"), (sharded, f"{ranks} ranks", "--")):
            for key in keys:
                points = [(entry["step"], entry[key]) for entry in logs[name] if key in entry]
                marker = "o" if key == "eval_loss" else None
                x, y = zip(*points, strict=True)
                axes.plot(x, y, style, marker=marker, label=f"{where}, {key}")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set(title=name, xlabel="step", ylabel=label)
        axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--ranks", type=int, default=2, help="processes (default: 2)")
    add("--sequence-ranks", type=int, help="ranks that share each sequence (default: all)")
    add("--seq-len", type=int, default=1024, help="tokens a row (default: 1024)")
    add("--steps", type=int, default=10, help="optimizer steps of each training (default: 10)")
    add("--batch", type=int, default=2, help="rows or pairs a step, in all (default: 2)")
    add("--picture", type=Path, default=Path("build/finetune.png"), help="where the curves go")
    add("--output", help=argparse.SUPPRESS)  # where a process of it writes
    options = parser.parse_args()
    options.sequence_ranks = options.sequence_ranks or options.ranks
    if options.ranks % options.sequence_ranks:
        parser.error(f"expected --sequence-ranks to divide {options.ranks}")
    if options.batch % (options.ranks // options.sequence_ranks):
        parser.error("expected --batch to be a multiple of the number of groups")
    if options.output:
        train(options)
        return
    began = time.monotonic()
    print("one process: SFTTrainer, then DPOTrainer", flush=True)
    one = run(__file__, 1, sys.argv[1:])
    print(f"\n{options.ranks} ranks: sequence_parallel of both", flush=True)
    sharded = run(__file__, options.ranks, sys.argv[1:])
    for name, log in sharded.items():
        show(one[name], log, options.ranks, name)
        worst = compare(one[name], log, name)
        print("the same to " + ", ".join(f"{x:.1e} ({key})" for key, x in worst.items()))
    draw(one, sharded, options.ranks, options.picture)
    print(f"\n{options.picture}, after {time.monotonic() - began:.0f} seconds")


if __name__ == "__main__":
    main()
