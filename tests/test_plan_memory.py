"""What is predicted for a training step, against what the allocator counts in one."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import deepsp

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))


def config(layers=4, **changes):
    from transformers import LlamaConfig

    sizes = {
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 500,
        "pad_token_id": 0,
        "max_position_embeddings": 4096,
    }
    return LlamaConfig(**sizes | changes)


MEASURED = """
import torch, torch.distributed as dist
import plan_memory as benchmark
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for levers in ({}, {"checkpoint": True, "without_logits": True}):
    case = "llama", 64, 160, 5, 500, 1024, 1, "float32", levers
    plan, found = benchmark.predicted(*case), benchmark.measured(*case)
    assert abs(plan.total / found - 1) < 0.08, (plan, found / 2**20)
"""


def test_measured():
    """In a process of its own, whose pool of buffers has nothing of other tests."""
    paths = ":".join(p for p in sys.path if p)
    done = subprocess.run(
        [sys.executable, "-c", MEASURED], capture_output=True, text=True, env={"PYTHONPATH": paths}
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_depth_is_linear():
    """Few layers say what many hold: as a run with all of them does."""
    from deepsp.memory.planning.fake_step import peaks_of_step

    for ranks, levers in ((2, {}), (2, {"checkpoint": True}), (8, {})):  # with 4 heads
        plan = deepsp.plan_memory(config(7), 128 * ranks, ranks, **levers)
        peaks, sizes, _, _ = peaks_of_step(
            config(7), 7, torch.float32, ranks, 1, 128 * ranks, False, False, "checkpoint" in levers
        )
        phase = peaks[plan.phase]
        held = sum(sizes)
        assert held == plan.parts["parameters"] and 2 * held == plan.parts["optimizer states"]
        for part in ("activations", "logits", "gradients"):
            assert plan.parts[part] == pytest.approx(phase[part], rel=0.01), part


def test_levers():
    """Each lowers the sum, and the parts that it is for."""
    model = nn.Module()
    model.config = config()
    long = {"seq_len": 2048, "batch_size": 2}
    plain = deepsp.plan_memory(model, **long)
    assert deepsp.plan_memory(config(), **long) == plain and plain.fits
    both = deepsp.plan_memory(model, ranks=2, **long)
    # What attention keeps is in an exchange's buffers, but for one rank.
    kept = [p.parts["activations"] + p.parts.get("exchange buffers", 0) for p in (plain, both)]
    assert kept[1] == pytest.approx(kept[0] / 2, rel=0.1)
    assert both.parts["parameters"] == plain.parts["parameters"]
    sharded = deepsp.plan_memory(model, ranks=2, sharded=True, **long)
    assert sharded.parts["optimizer states"] == both.parts["optimizer states"] / 2
    checkpoint = deepsp.plan_memory(model, ranks=2, checkpoint=True, **long)
    offload = deepsp.plan_memory(model, ranks=2, checkpoint=True, offload=True, **long)
    keeps = deepsp.plan_memory(model, ranks=2, checkpoint=True, keep_attention=True, **long)
    without = deepsp.plan_memory(model, ranks=2, without_logits=True, **long)
    tiled = deepsp.plan_memory(model, ranks=2, tiled=True, **long)
    parts = deepsp.plan_memory(model, ranks=2, checkpoint=True, kv_chunk=256, **long)
    assert tiled.parts["activations"] < both.parts["activations"]
    assert parts.parts["exchange buffers"] < checkpoint.parts["exchange buffers"]
    half = deepsp.plan_memory(model, ranks=2, dtype=torch.bfloat16, **long)
    assert plain.total > both.total > max(sharded.total, checkpoint.total, without.total)
    assert checkpoint.parts["activations"] < both.parts["activations"]
    assert offload.total < checkpoint.total
    text, tokens = config(), 2 * 1024
    heads = text.num_hidden_layers * text.num_attention_heads
    # For each token and head, the output and the log-sum-exp.
    assert keeps.total - checkpoint.total == tokens * heads * (text.head_dim + 1) * 4
    assert half.parts["parameters"] == both.parts["parameters"] / 2


def test_shards_of_a_larger_world():
    """In float32, beside a bfloat16 model: FSDP2's mixed precision."""
    setting = {"seq_len": 512, "ranks": 2, "dtype": torch.bfloat16, "sharded": True}
    two, wide = (deepsp.plan_memory(config(), **setting, **x).parts for x in ({}, {"world": 8}))
    mixed = deepsp.plan_memory(config(), **setting, world=8, shard_dtype=torch.float32).parts
    assert two["optimizer states"] == 4 * wide["optimizer states"] == 2 * mixed["optimizer states"]
    gathered = two["parameters"] - two["optimizer states"] / 2
    assert gathered > 0  # in bfloat16, whatever the shards are
    for plan in (wide, mixed):
        assert plan["parameters"] == plan["optimizer states"] / 2 + gathered


def test_long_sequences_are_estimated():
    """By lines through shorter ones; what fits was run as it is."""
    model, tokens = config(3), 40_000
    model.vocab_size = 3000
    levers = dict.fromkeys(("without_logits", "checkpoint"), True)
    exact = deepsp.plan_memory(model, tokens, 2, **levers)
    plan = deepsp.plan_memory(model, tokens, 2, **levers, limit=exact.total - 1)
    assert plan.alternatives[0].total == pytest.approx(exact.total, rel=0.01)
    plan = deepsp.plan_memory(model, tokens, 2, **levers, limit=round(1.5 * exact.total))
    assert plan.parts == exact.parts and plan.levers == exact.levers
    for factor, fits in ((1, True), (1.03, False)):
        there = deepsp.plan_memory(model, round(plan.longest * factor), 2, **levers)
        assert (there.total <= plan.limit) is fits


def test_limit(tmp_path):
    """The fewest levers, in their order, that fit; and a sequence as long as is said fits."""
    short = config(2)
    plain = deepsp.plan_memory(short, 1024, 2)
    assert deepsp.plan_memory(short, 1024, 2, limit=plain.total).levers == plain.levers
    plan = deepsp.plan_memory(short, 1024, 2, limit=plain.total - 1)
    assert plan.levers == plain.levers | {"without_logits": True} and plan.fits
    assert [p.fits for p in plan.alternatives] == [False, *[True] * 5]
    # For so small a model, the gathered weights take more than their shards save.
    longest = [
        p.longest for p in plan.alternatives if p.levers["checkpoint"] == p.levers["sharded"]
    ]
    assert longest == sorted(longest) and longest[0] < 1024 <= longest[1]
    for tokens, fits in ((plan.longest, True), (round(plan.longest * 1.03), False)):
        there = deepsp.plan_memory(short, tokens, 2, without_logits=True)
        assert (there.total <= plan.limit * 1.001) is fits
    nothing = deepsp.plan_memory(short, 1024, 2, limit="1 KB")
    off = [name for name, used in nothing.levers.items() if not used]
    assert not nothing.fits and off == ["keep_attention"] and nothing.longest == 0
    assert "does not fit in" in str(nothing) and "without_logits, sharded" in str(plan)
    assert nothing.limit == 1000
    pytest.importorskip("matplotlib")
    plan.plot(tmp_path / "plan.png")
    assert (tmp_path / "plan.png").stat().st_size > 5000


def test_other_models():
    """Experts in any dtype, and decoders that call their layers something else."""
    import transformers as t

    sizes = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    common = sizes | {"intermediate_size": 64, "num_key_value_heads": 2, "pad_token_id": 0}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    for config in (
        t.MixtralConfig(**common, **experts),
        t.Qwen3MoeConfig(**common, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
        t.GptOssConfig(**common, **experts, head_dim=8),
        t.GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4),
    ):
        for levers in ({}, {"without_logits": True, "tiled": True, "checkpoint": True}):
            plans = [
                deepsp.plan_memory(config, 64, 2, dtype=dtype, **levers).total
                for dtype in (torch.float32, torch.bfloat16)
            ]
            assert 1.5 < plans[0] / plans[1] < 2.2, (type(config), levers, plans)
    bert = t.BertConfig(**sizes, intermediate_size=64, is_decoder=True)
    plan = deepsp.plan_memory(bert, 64, 2, limit="1 KB")  # which has no MLPs to tile
    assert plan.levers["offload"] and not plan.levers["tiled"]
    for config, message in (
        (t.MambaConfig(**{n: sizes[n] for n in list(sizes)[:3]}), "num_attention_heads of MambaC"),
        (
            t.LlamaConfig(**common | {"num_hidden_layers": 0}),
            "num_hidden_layers .* int >= 1, got 0",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            deepsp.plan_memory(config, 64, 2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"seq_len": 0}, "seq_len to be an int >= 1, got 0"),
        ({"ranks": True}, "ranks to be an int >= 1, got True"),
        ({"batch_size": 1.5}, "batch_size to be an int >= 1, got 1.5"),
        ({"seq_len": 3, "ranks": 4}, "seq_len >= 4, a token for each rank, got 3"),
        ({"offload": True}, "offload with checkpoint=True"),
        ({"keep_attention": True}, "keep_attention with checkpoint=True"),
        ({"ranks": 4, "world": 6}, "world to be a multiple of ranks = 4, got 6"),
        ({"limit": "80 GX"}, "limit to be bytes or a string such as \"80 GB\", got '80 GX'"),
        ({"limit": -1}, "limit to be bytes .*, got -1"),
        ({"model": nn.Linear(2, 2)}, "causal language model of transformers .*, got Linear"),
    ],
)
def test_refused(given, message):
    given = {"model": config(), "seq_len": 64} | given
    with pytest.raises(ValueError, match=message):
        deepsp.plan_memory(given.pop("model"), **given)
