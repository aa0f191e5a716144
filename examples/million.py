"""Fine-tune Qwen3 8B on sequences of a million tokens, by TRL's SFTTrainer, on 8 GPUs or more.

All ranks share each sequence. FSDP2 shards the weights, each layer is a checkpoint whose input goes
to the host, the MLPs run in tiles, and the loss has no logits. docs/million.md explains each line.

    python examples/million.py --plan                 # memory and time, before anything is loaded
    python examples/million.py --small                # a tiny model on 2 CPU ranks, and on one
    torchrun --standalone --nproc-per-node 8 examples/million.py --text books.txt
    torchrun --nnodes 2 --node-rank 0 --nproc-per-node 8 --rdzv-endpoint node0:29500 \\
        examples/million.py --text books.txt          # and with --node-rank 1 on the other machine

No GPU has run it. Its parts have run on one (docs/gpus.md), and all of it on CPUs when small.
"""

import argparse
import functools
import json
import os
import sys
import time
from pathlib import Path

import torch
from finetune import byte_tokenizer, compare, passages, quiet, show
from side_by_side import LOGS, leave, run

import deepsp

LEVERS = ("tiles", "chunked-loss", "checkpoints", "offload")
GIB = 2**30
NORM_TOLERANCE = 1e-4  # relative


def qwen3_8b(seq_len: int):
    """The shape of Qwen/Qwen3-8B."""
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=seq_len,
        rope_parameters=rope(seq_len),
    )


def rope(seq_len: int) -> dict:
    """YaRN, which extends positions beyond the 32,768 of Qwen3's training."""
    return {
        "rope_type": "yarn",
        "rope_theta": 1_000_000,
        "factor": max(1.0, seq_len / 32768),
        "original_max_position_embeddings": 32768,
    }


def tiny(vocab_size: int, seq_len: int):
    from transformers import Qwen3Config, Qwen3ForCausalLM, set_seed

    set_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocab_size,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=seq_len,
        )
    )


def use_offload(decoder: torch.nn.Module) -> None:
    """Keeps the inputs of the decoder's checkpointed layers on the host until backward."""
    forward = decoder.forward

    @functools.wraps(forward)
    def offloaded(*args, **kwargs):
        with deepsp.offload():
            return forward(*args, **kwargs)

    decoder.forward = offloaded


def train(options: argparse.Namespace) -> None:
    """One process of the training."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    world = int(os.environ.get("WORLD_SIZE", 1))
    size = options.sequence_ranks or world
    rows = options.steps * (world // size)  # each group has sequences of its own
    levers = set(LEVERS) - set(options.without) if world > 1 else set()
    more = {}
    if world > 1:
        from deepsp.integrations.transformers import sequence_parallel

        SFTTrainer = sequence_parallel(SFTTrainer)
        # No rank has logits: the loss takes hidden states, a chunk of tokens at a time.
        more = {"sequence_parallel_size": size, "without_logits": "chunked-loss" in levers}

    if options.small:
        from datasets import disable_progress_bars

        disable_progress_bars()
        torch.set_num_threads(1)
        tokenizer = byte_tokenizer()
        model = tiny(len(tokenizer), options.seq_len)
        texts = passages(rows, options.seq_len)
        arguments = {"use_cpu": True, "bf16": False}
    else:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        model = AutoModelForCausalLM.from_pretrained(
            options.model, dtype=torch.bfloat16, rope_parameters=rope(options.seq_len)
        )
        text = options.text.read_text()
        length = 6 * options.seq_len  # characters: more than enough for as many tokens
        if len(text) < rows * length:
            sys.exit(f"expected {rows * length} characters in --text, got {len(text)}")
        texts = [text[i : i + length] for i in range(0, rows * length, length)]
        arguments = {"bf16": True, "fsdp": True}

    if "tiles" in levers:
        deepsp.tile_(model)
    if "checkpoints" in levers:
        arguments["activation_checkpointing_kwargs"] = {"use_reentrant": False} | (
            {"context_fn": deepsp.checkpoint_policy()} if options.keep_attention else {}
        )
        if "offload" in levers:
            use_offload(model.get_decoder())
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(
            output_dir=options.output or options.save,
            max_length=options.seq_len,
            max_steps=options.steps,
            per_device_train_batch_size=1,
            activation_checkpointing="checkpoints" in levers,
            learning_rate=1e-3 if options.small else 1e-5,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            **arguments,
        ),
        train_dataset=Dataset.from_dict({"text": texts}),
        processing_class=tokenizer,
        **more,
    )
    if options.small:
        quiet(trainer)
    trainer.train()
    if options.output and trainer.is_world_process_zero():
        logs = [entry for entry in trainer.state.log_history if "loss" in entry]
        Path(options.output, LOGS).write_text(json.dumps(logs))
    if not options.output:
        trainer.save_model(options.save)
    leave()


def fits(size: float) -> str:
    return "" if size <= 0.9 * 80e9 else ": too much"


def plan(options: argparse.Namespace) -> None:
    """Print what the training takes on each rank, and what it would without each lever."""
    import simulate
    from tqdm import tqdm

    config, world = qwen3_8b(options.seq_len), options.ranks or 8
    ranks = options.sequence_ranks or world
    if ranks < 2 or world % ranks:
        sys.exit(
            f"expected two ranks or more that share a sequence, and --ranks {world} to be a "
            f"multiple of them, got {ranks}"
        )
    all_on = {"without_logits": True, "tiled": True, "checkpoint": True, "offload": True}
    cases = {
        "all levers": {},
        "all levers, --keep-attention": {"keep_attention": True},
        "--without tiles": {"tiled": False},
        "--without chunked-loss": {"without_logits": False},
        "--without offload": {"offload": False},
        "--without checkpoints offload": {"checkpoint": False, "offload": False},
    }
    plans = {}
    for name, change in tqdm(cases.items(), "plan", unit="case", leave=False, disable=None):
        plans[name] = deepsp.plan_memory(
            config,
            options.seq_len,
            ranks,
            dtype=torch.bfloat16,
            shard_dtype=torch.float32,
            sharded=True,
            world=world,
            **(all_on | change),
        )
    print(
        f"Qwen3 8B, {options.seq_len} tokens on {ranks} ranks, {world} H100. "
        "Forecasts: no GPU has run this.\n"
    )
    print(
        "Memory of a rank at its peak. A GPU of 80 GB has 74.5 GiB; more than 90 % of that is too"
    )
    print("much, since the allocator's idle blocks, NCCL and workspaces come on top.")
    for name, size in plans["all levers"].parts.items():
        print(f"  {name:<32}{size / GIB:>8.1f} GiB")
    for name, case in plans.items():
        print(f"  {name:<32}{case.total / GIB:>8.1f} GiB{fits(case.total)}, in {case.phase}")

    print("\nSeconds of a step, simulated (benchmarks/simulate.py)")
    steps = [
        simulate.simulate(
            simulate.MODELS["qwen3-8b"],
            options.seq_len,
            ranks,
            levers=simulate.Levers(keep_attention=keep, offload=True),
        )
        for keep in (False, True)
    ]
    print(f"  {'':<16}{'all levers':>12}{'--keep-attention':>20}")
    for part in simulate.PARTS:
        print(f"  {part:<16}{steps[0].parts[part]:>12.1f}{steps[1].parts[part]:>20.1f}")
    print(f"  {'step':<16}{steps[0].seconds:>12.1f}{steps[1].seconds:>20.1f}")
    if (options.seq_len, world) == (2**20, 8):
        print(
            "\nTRL's guide for the same model and length on 8 H100, by context parallelism: 380 s, "
            "56.2 GB (its claim, TRL 1.13)"
        )


def train_small(options: argparse.Namespace) -> None:
    """Trains the tiny model by plain TRL in one process, and on ranks with all levers."""
    began = time.monotonic()
    print("one process, plain SFTTrainer", flush=True)
    one = run(__file__, 1, sys.argv[1:])
    print(f"\n{options.ranks} ranks, all levers but FSDP2, which accelerate has on GPUs only")
    sys.stdout.flush()
    sharded = run(__file__, options.ranks, sys.argv[1:])
    show(one, sharded, options.ranks, "SFT")
    difference = compare(one, sharded, "SFT")["grad_norm"]
    if not difference <= NORM_TOLERANCE:
        sys.exit(f"expected gradient norms within {NORM_TOLERANCE}, got {difference:.1e}")
    print(f"the same to rounding, after {time.monotonic() - began:.0f} seconds")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--plan", action="store_true", help="print a forecast, and load nothing")
    add("--small", action="store_true", help="train a tiny model on CPU ranks and on one process")
    add("--ranks", type=int, help="for --plan (default: 8) and --small (default: 2)")
    add("--sequence-ranks", type=int, help="ranks that share a sequence (default: all)")
    add("--model", default="Qwen/Qwen3-8B", help="name or folder (default: Qwen/Qwen3-8B)")
    add("--text", type=Path, help="a file of text; each step learns the next part of it")
    add("--seq-len", type=int, help="tokens of a sequence (default: 1048576; --small: 4096)")
    add("--steps", type=int, default=3, help="optimizer steps (default: 3)")
    add("--keep-attention", action="store_true", help="checkpoints keep attention's output")
    add("--without", nargs="*", default=[], choices=LEVERS, help="levers to leave out")
    add("--save", default="qwen3-8b-million", help="folder for the trained model")
    add("--output", help=argparse.SUPPRESS)  # where a process of --small writes
    options = parser.parse_args()
    options.seq_len = options.seq_len or (4096 if options.small else 2**20)
    if options.plan:
        if options.without or options.model != parser.get_default("model"):
            parser.error("expected no --model and --without with --plan, which plans Qwen3 8B")
        plan(options)
    elif options.small and not options.output:
        options.ranks = options.ranks or 2
        train_small(options)
    elif not options.small and options.text is None:
        parser.error("expected --text, --plan or --small")
    else:
        train(options)


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
    main()
