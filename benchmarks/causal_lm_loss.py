"""Memory and time of a training step with deepsp.causal_lm_loss, next to one with all logits.

A small Llama with a large vocabulary on one rank's tokens: forward and backward, each way in a
process of its own, on one thread. Memory is the step's peak above what the process had before it,
with the model loaded and a short step done; time is CPU time. The layers are few and narrow, so
that the logits are what takes memory: that is what the ratio is about. The losses are compared.

    python benchmarks/causal_lm_loss.py
    python benchmarks/causal_lm_loss.py --vocab 128256 --tokens 2048 --dtype bfloat16
"""

import argparse
import sys
import time

import bench
import torch

WAYS = {"causal_lm_loss": "deepsp.causal_lm_loss", "logits": "all logits, deepsp.cross_entropy"}


def measure(way: str, args: argparse.Namespace) -> dict:
    """Return MiB, seconds of CPU time, and the loss, of one way."""
    import transformers

    import deepsp
    from deepsp.integrations.transformers import register

    register()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        intermediate_size=2 * args.hidden,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=args.tokens,
        attn_implementation="deepsp",
        use_cache=False,
        dtype=getattr(torch, args.dtype),
    )
    model = transformers.LlamaForCausalLM(config).to(getattr(torch, args.dtype))
    ids = torch.randint(args.vocab, (1, args.tokens))

    def step(ids: torch.Tensor) -> float:
        batch, _ = deepsp.shard_batch({"input_ids": ids, "labels": ids})
        model.zero_grad()
        if way == "causal_lm_loss":
            loss = deepsp.causal_lm_loss(model, batch, chunk_tokens=args.chunk_tokens)
        else:
            labels = batch.pop("shift_labels")
            loss = deepsp.cross_entropy(model(**batch).logits, labels)
        loss.backward()
        return loss.item()

    step(ids[:, :128])  # whatever is made once: the model's gradients, too
    losses, times = [], []

    def steps() -> None:
        for _ in range(args.steps):
            began = time.process_time()
            losses.append(step(ids))
            times.append(time.process_time() - began)

    _, mib = bench.growth(steps)
    return {"mib": mib, "seconds": times, "loss": losses[0]}


def main() -> None:
    args = bench.parser_of(
        __doc__,
        vocab=(32000, "classes"),
        tokens=(8192, "tokens on the rank"),
        hidden=(64, "features of a token"),
        dtype=("float32", "of the model", ("float32", "bfloat16")),
        chunk_tokens=(int, "tokens whose logits exist at a time; without it: for 32 MiB"),
        steps=(3, "steps of each way"),
    ).parse_args()
    results = {}
    for way in WAYS:
        with bench.ranks_on(bench.LOOPBACK, 1) as ranks:
            results[way] = ranks(measure, way, args)
    print(f"{args.tokens} tokens, {args.vocab} classes, {args.hidden} features, {args.dtype}:")
    for way, label in WAYS.items():
        x = results[way]
        print(
            f"{label:34} {x['mib']:7,.0f} MiB   {bench.min_median(x['seconds'], '.2f')} s of CPU, "
            f"min / median   loss {x['loss']:.6f}"
        )
    ours, theirs = (results[way] for way in WAYS)
    print(f"memory: 1/{theirs['mib'] / ours['mib']:.1f}")
    print(
        f"time:   {min(ours['seconds']) / min(theirs['seconds']):.2f} times the CPU time (minima)"
    )
    if abs(ours["loss"] - theirs["loss"]) > 1e-2 * theirs["loss"]:
        sys.exit("FAILED: the losses differ")


if __name__ == "__main__":
    main()
