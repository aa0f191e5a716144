"""The ready plans on transformers' models, next to one process that has everything, in float64."""

import copy

import pytest
import torch
import torch.distributed as dist
from harness import on_ranks
from scheduled import compare_transformer, make_transformer

import deepsp
from deepsp.schedule.ready import tensor_sequence_parallel


def _equals_one_process(family, overlap, options):
    model = make_transformer(family, **options)
    sch = tensor_sequence_parallel(copy.deepcopy(model), overlap=overlap)
    built, optimizer = deepsp.build(sch, optimizer=lambda ps: torch.optim.AdamW(ps, lr=0.1))
    reference = torch.optim.AdamW(model.parameters(), lr=0.1)
    # An even number of tokens, and an uneven one; before a step, and behind it.
    close = dict(rtol=1e-9, atol=1e-9)
    for length in (9, 12):
        compare_transformer(model, built, length, close)
        optimizer.step()
        reference.step()
    whole = deepsp.full_state_dict(built)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(whole[name], value, rtol=1e-7, atol=1e-7)
    mine = sum(p.numel() for p in built.parameters())
    total = sum(p.numel() for p in model.parameters())
    assert mine < total / dist.get_world_size() * 1.6  # one more head than others, whole norms


@pytest.mark.parametrize(
    ("ranks", "family", "overlap", "options"),
    [
        (2, "llama", False, {"attention_bias": True}),
        (3, "llama", False, {"tie_word_embeddings": True}),
        (2, "llama", True, {"attn_implementation": "eager"}),
        (2, "gpt2", False, {}),
        (3, "gpt2", True, {}),
        (4, "gpt2", False, {"attn_implementation": "eager"}),
        (2, "qwen3", False, {}),
        (2, "qwen2", True, {}),
        (2, "mistral", False, {"sliding_window": 5}),
    ],
)
def test_equals_one_process(ranks, family, overlap, options):
    on_ranks(ranks, _equals_one_process, family, overlap, options)


def _from_safetensors(family, folder):
    model = make_transformer(family)
    if dist.get_rank() == 0:
        model.save_pretrained(folder)
    dist.barrier()
    with torch.device("meta"):
        empty = type(model)(model.config).double()
    empty.loss_type = "ForCausalLM"
    built, _ = deepsp.build(tensor_sequence_parallel(empty), checkpoint=folder)
    # Rotary frequencies aren't in the checkpoint, and float64 ones have float32's values.
    compare_transformer(model.double(), built.train(), 9, dict(rtol=1e-6, atol=1e-6))


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gpt2"])
def test_from_a_checkpoint_on_the_meta_device(family, tmp_path):
    on_ranks(2, _from_safetensors, family, str(tmp_path))


def _after_shard_batch():
    from deepsp.integrations.transformers import register

    register()
    # Each rank keeps other tokens, [2, 9] like the next call's, which are the same on every rank.
    deepsp.shard_batch({"input_ids": torch.arange(36).view(2, 18) % 50})
    model = make_transformer("llama")
    built, _ = deepsp.build(tensor_sequence_parallel(copy.deepcopy(model)))
    compare_transformer(model, built, 9, dict(rtol=1e-9, atol=1e-9))


def test_after_a_batch_was_sharded():
    on_ranks(2, _after_shard_batch)
