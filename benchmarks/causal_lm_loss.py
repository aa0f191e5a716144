"""Memory and time of a training step with deepsp.causal_lm_loss, next to one with all logits.

A small Llama with a large vocabulary on one rank's tokens: forward and backward, each way in a
process of its own, on one thread. Memory is the step's peak above what the process had before it,
with the model loaded and a short step done; time is CPU time. The layers are few and narrow, so
that the logits are what takes memory: that is what the ratio is about. The losses are compared.

    python benchmarks/causal_lm_loss.py
    python benchmarks/causal_lm_loss.py --vocab 128256 --tokens 2048 --dtype bfloat16
"""

import argparse
import json
import statistics
import subprocess
import sys
import time

import torch

GOAL = 1 / 10
WAYS = {"causal_lm_loss": "deepsp.causal_lm_loss", "logits": "all logits, deepsp.cross_entropy"}


def status_mib(name: str) -> float:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(name)) / 2**10


def measure(args: argparse.Namespace) -> dict:
    """One way, in this process."""
    import torch.distributed as dist
    import transformers
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import deepsp
    from deepsp.integrations.transformers import register

    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
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
        if args.way == "causal_lm_loss":
            loss = deepsp.causal_lm_loss(model, batch, chunk_tokens=args.chunk_tokens)
        else:
            labels = batch.pop("shift_labels")
            loss = deepsp.cross_entropy(model(**batch).logits, labels)
        loss.backward()
        return loss.item()

    step(ids[:, :128])  # whatever is made once: the model's gradients, too
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak starts from here
    before, losses, times = status_mib("VmRSS"), [], []
    for _ in range(args.steps):
        began = time.process_time()
        losses.append(step(ids))
        times.append(time.process_time() - began)
    return {"mib": status_mib("VmHWM") - before, "seconds": times, "loss": losses[0]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--vocab", type=int, default=32000, help="classes (default: 32000)")
    add("--tokens", type=int, default=8192, help="tokens on the rank (default: 8192)")
    add("--hidden", type=int, default=64, help="features of a token (default: 64)")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the model")
    add(
        "--chunk-tokens", type=int, help="tokens whose logits exist at a time (default: for 32 MiB)"
    )
    add("--steps", type=int, default=3, help="steps of each way (default: 3)")
    add("--way", choices=tuple(WAYS), help="measure this one only, and print JSON")
    args = parser.parse_args()
    if args.way:
        print(json.dumps(measure(args)))
        return
    found = {}
    for way in WAYS:
        command = [sys.executable, __file__, *sys.argv[1:], "--way", way]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found[way] = json.loads(done.stdout.splitlines()[-1])
    print(f"{args.tokens} tokens, {args.vocab} classes, {args.hidden} features, {args.dtype}:")
    for way, label in WAYS.items():
        seconds = found[way]["seconds"]
        print(
            f"{label:34} {found[way]['mib']:7,.0f} MiB   min {min(seconds):.2f} s of CPU, "
            f"median {statistics.median(seconds):.2f} s   loss {found[way]['loss']:.6f}"
        )
    ours, theirs = (found[way] for way in WAYS)
    ratio = ours["mib"] / theirs["mib"]
    print(f"memory: 1/{1 / ratio:.1f} (goal: at most 1/{1 / GOAL:.0f})")
    print(
        f"time:   {min(ours['seconds']) / min(theirs['seconds']):.2f} times the CPU time (minima)"
    )
    if abs(ours["loss"] - theirs["loss"]) > 1e-2 * theirs["loss"]:
        sys.exit("FAILED: the losses differ")


if __name__ == "__main__":
    main()
