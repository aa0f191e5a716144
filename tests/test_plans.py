"""The ready plans on transformers' models, next to one process that has everything, in float64."""

import copy
import os

import pytest
import torch
import torch.distributed as dist
from harness import on_ranks

import deepsp
from deepsp.schedule.ready import tensor_sequence_parallel


def _model(family, dropout=0.0, **options):
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers

    torch.manual_seed(0)
    if family == "gpt2":
        config = transformers.GPT2Config(
            n_embd=24,
            n_layer=2,
            n_head=6,
            vocab_size=50,
            n_positions=32,
            use_cache=False,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
            **options,
        )
        model = transformers.GPT2LMHeadModel(config)
        model.loss_type = "ForCausalLM"
    else:
        kinds = {
            "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
            "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
            "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
            "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        }
        make_config, make = kinds[family]
        settings = dict(
            hidden_size=24,
            intermediate_size=40,
            num_hidden_layers=2,
            num_attention_heads=12,
            num_key_value_heads=6,
            head_dim=4,
            vocab_size=50,
            max_position_embeddings=32,
            use_cache=False,
            attention_dropout=dropout,
        )
        model = make(make_config(**settings | options))
    model = model.double().train()
    with torch.no_grad():  # biases and norms, too, are random
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    return model


def _ids(length=9, batch=2):
    return torch.randint(50, (batch, length), generator=torch.Generator().manual_seed(3))


def _compare(model, built, length, close):
    ids = _ids(length)
    for m in (model, built):
        m.zero_grad(set_to_none=True)
    want = model(input_ids=ids, labels=ids)
    got = built(input_ids=ids, labels=ids)
    torch.testing.assert_close(got.loss, want.loss, **close)
    torch.testing.assert_close(got.logits, want.logits, **close)
    want.loss.backward()
    got.loss.backward()
    gradients = deepsp.full_state_dict(built, gradients=True)
    for name, p in model.named_parameters():
        torch.testing.assert_close(
            gradients[name], p.grad, **close, msg=lambda m, n=name: f"{n}: {m}"
        )


def _equals_one_process(family, overlap, options):
    model = _model(family, **options)
    sch = tensor_sequence_parallel(copy.deepcopy(model), overlap=overlap)
    built, optimizer = deepsp.build(sch, optimizer=lambda ps: torch.optim.AdamW(ps, lr=0.1))
    reference = torch.optim.AdamW(model.parameters(), lr=0.1)
    # An even number of tokens, and an uneven one; before a step, and behind it.
    close = dict(rtol=1e-9, atol=1e-9)
    for length in (9, 12):
        _compare(model, built, length, close)
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
    model = _model(family)
    if dist.get_rank() == 0:
        model.save_pretrained(folder)
    dist.barrier()
    with torch.device("meta"):
        empty = type(model)(model.config).double()
    empty.loss_type = "ForCausalLM"
    built, _ = deepsp.build(tensor_sequence_parallel(empty), checkpoint=folder)
    # Rotary frequencies aren't in the checkpoint, and float64 ones have float32's values.
    _compare(model.double(), built.train(), 9, dict(rtol=1e-6, atol=1e-6))


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gpt2"])
def test_from_a_checkpoint_on_the_meta_device(family, tmp_path):
    on_ranks(2, _from_safetensors, family, str(tmp_path))


def _after_shard_batch():
    from deepsp.integrations.transformers import register

    register()
    # Each rank keeps other tokens, [2, 9] like the next call's, which are the same on every rank.
    deepsp.shard_batch({"input_ids": torch.arange(36).view(2, 18) % 50})
    model = _model("llama")
    built, _ = deepsp.build(tensor_sequence_parallel(copy.deepcopy(model)))
    _compare(model, built, 9, dict(rtol=1e-9, atol=1e-9))


def test_after_a_batch_was_sharded():
    on_ranks(2, _after_shard_batch)
