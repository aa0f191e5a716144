"""Time and peak memory of a training step of layers like Llama 8B's on one GPU: transformers with
checkpoints, and deepsp with one setting more in each row. Losses must be equal."""

from __future__ import annotations

import argparse
import contextlib
import os
import time

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import deepsp
from deepsp.integrations.transformers import register

GIB = 2**30
# What each row has, besides a loss without logits: checkpoints ("layers"; "attention": they keep
# its result), what is tiled, and whether checkpoints go to the host.
ROWS = {
    "transformers, checkpoints": ("layers", (), False),
    "deepsp, checkpoints": ("layers", (), False),
    "deepsp, `checkpoint_policy`": ("attention", (), False),
    "+ tiled MLPs": ("attention", ("*.mlp",), False),
    "+ tiled norms": ("attention", ("*.mlp", "*norm"), False),
    "+ `offload`": ("attention", ("*.mlp", "*norm"), True),
}


def model_of(name: str, args: argparse.Namespace) -> LlamaForCausalLM:
    checkpoints, tiled, _ = ROWS[name]
    config = LlamaConfig(
        vocab_size=args.vocabulary,
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 7 // 2,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 128,
        num_key_value_heads=max(1, args.hidden // 512),
        max_position_embeddings=1 << 20,
        use_cache=False,
        attn_implementation="sdpa" if name.startswith("transformers") else "deepsp",
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(args.device):
        model = LlamaForCausalLM(config).train()
    torch.set_default_dtype(torch.float32)
    policy = {"context_fn": deepsp.checkpoint_policy()} if checkpoints == "attention" else {}
    model.gradient_checkpointing_enable({"use_reentrant": False, **policy})
    if tiled:
        deepsp.tile_(model, *tiled)
    return model


def loss_of(name: str, model: LlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    if name.startswith("transformers"):
        return model(input_ids=ids, labels=ids).loss
    batch, _ = deepsp.shard_batch({"input_ids": ids, "labels": ids})
    labels = batch.pop("shift_labels")
    with deepsp.offload() if ROWS[name][2] else contextlib.nullcontext():
        hidden = model.model(**batch).last_hidden_state
    return deepsp.linear_cross_entropy(hidden, model.lm_head.weight, labels)


def measure(name: str, args: argparse.Namespace) -> tuple[float, float, float]:
    """Seconds of the fastest of three steps, bytes above the weights, and the loss."""
    model = model_of(name, args)
    ids = torch.randint(0, args.vocabulary, (1, args.tokens), device=args.device)
    is_cuda = args.device == "cuda"
    if is_cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if is_cuda else 0
    seconds = []
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        if is_cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        loss = loss_of(name, model, ids)
        loss.backward()
        if is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() - before if is_cuda else 0
    return min(seconds), peak, float(loss.detach())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29577")
    backend = "nccl" if args.device == "cuda" else "gloo"
    dist.init_process_group(backend, rank=0, world_size=1)
    register()
    print(f"{args.layers} layers, {args.tokens} tokens, gradients included\n")
    print("| | s | GiB above weights |\n|---|--:|--:|")
    losses = []
    for name in ROWS:
        try:
            seconds, peak, loss = measure(name, args)
        except torch.cuda.OutOfMemoryError:
            print(f"| {name} | out of memory | |", flush=True)
            continue
        losses.append(loss)
        print(f"| {name} | {seconds:.2f} | {peak / GIB:.1f} |", flush=True)
    print(f"\nlosses: {losses}")
    dist.destroy_process_group()
    assert max(losses) - min(losses) < 2e-3 * max(losses), losses


if __name__ == "__main__":
    main()
