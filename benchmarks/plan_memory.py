"""What deepsp.plan_memory predicts for a training step, and what the CPU's allocator counts.

Six small models with random weights, 1 and 2 ranks over gloo, the second step of AdamW. Measured
are the parameters, the optimizer's states, and the largest sum of what was allocated and not yet
freed during the step, by the memory events of torch.profiler, with the pool of exchange buffers, on
the rank that holds most. The plan doesn't count what `sync_gradients` leaves in that pool on CPUs,
three to four times the gradients, so the pool is measured before.
"""

from __future__ import annotations

from pathlib import Path

import bench
import torch
from tqdm import tqdm

CASES = [  # model, hidden, intermediate, layers, vocabulary, tokens, ranks, dtype, levers
    ("llama", 256, 688, 4, 2000, 1024, 1, "float32", {}),
    ("llama", 256, 688, 4, 2000, 2048, 2, "float32", {}),
    ("qwen3", 128, 384, 6, 16000, 2048, 1, "float32", {"checkpoint": True}),
    ("qwen3", 128, 384, 6, 16000, 2048, 2, "float32", {"checkpoint": True, "without_logits": True}),
    ("llama", 256, 688, 3, 8000, 1500, 2, "bfloat16", {"without_logits": True}),
    ("qwen2", 192, 512, 8, 1000, 3000, 2, "float64", {"checkpoint": True}),
]


def config_of(name, hidden, intermediate, layers, vocabulary, tokens):
    from transformers import AutoConfig

    return AutoConfig.for_model(
        name,
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        max_position_embeddings=tokens,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )


def measured(*case) -> int:
    """Return the peak in bytes, the largest over the ranks."""
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity, profile
    from transformers import AutoModelForCausalLM

    import deepsp
    from deepsp.integrations.transformers import register

    *sizes, tokens, _, dtype, levers = case
    register()
    torch.manual_seed(0)
    config = config_of(*sizes, tokens)
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="deepsp", dtype=getattr(torch, dtype)
    )
    if levers.get("checkpoint"):
        model.activation_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(config.vocab_size, (1, tokens))

    def step():
        batch, _ = deepsp.shard_batch({"input_ids": ids, "labels": ids})
        if levers.get("without_logits"):
            loss = deepsp.causal_lm_loss(model, batch)
        else:
            labels = batch.pop("shift_labels")
            loss = deepsp.cross_entropy(model(**batch, use_cache=False).logits, labels)
        loss.backward()
        # The pool of exchange buffers keeps what it once made; torch.profiler does not see it.
        pool = deepsp.ranks.buffers.idle_bytes()
        deepsp.sync_gradients(model)
        optimizer.step()
        del loss
        optimizer.zero_grad()
        return pool

    step()
    deepsp.ranks.buffers.clear()  # of what ran before
    kept = [*model.parameters()]
    kept += [x for s in optimizer.state.values() for x in s.values() if x.dim() > 0]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        pool = step()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        most = max(most, live)
    peak = torch.tensor(most + sum(x.nbytes for x in kept) + pool)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    return int(peak)


def predicted(*case):
    from deepsp import plan_memory

    *sizes, tokens, ranks, dtype, levers = case
    config = config_of(*sizes, tokens)
    return plan_memory(config, tokens, ranks, dtype=getattr(torch, dtype), **levers)


def main() -> None:
    parser = bench.parser_of(__doc__, out=(Path, "folder for plan_memory.md and .json"))
    args = parser.parse_args()
    args.results, rows = args.out, []
    for case in tqdm(CASES):
        model, *_, tokens, size, dtype, levers = case
        plan = predicted(*case)
        with bench.ranks_on(bench.LOOPBACK, size) as ranks:
            peak = ranks(measured, *case)
        mib = [f"{n / 2**20:.1f}" for n in (plan.total, peak)]
        how = [model, tokens, size, dtype, ", ".join(levers) or "none"]
        rows.append([*how, *mib, f"{plan.total / peak:.3f}", plan.phase])
    columns = ["model", "tokens", "ranks", "dtype", "levers", "predicted, MiB", "measured, MiB"]
    columns += ["predicted / measured", "peak in"]
    title = "Predicted and measured memory of a training step"
    paragraphs = [__doc__.split("\n\n")[1]]
    table = bench.Table("The second step", columns, rows)
    bench.report(args, "plan_memory", title, paragraphs, [table], {"rows": rows})


if __name__ == "__main__":
    main()
