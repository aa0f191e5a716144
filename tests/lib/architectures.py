"""Tiny models of transformers, by name: what the compile pass and ``register()`` are tried with.

``make(name)`` builds one, ``batch(name, length)`` what it is called with. Every model has a loss
of its own, of the labels in its batch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from corpus.step import Case, compare_gradients, training_step

import deepsp
from deepsp.integrations.transformers import register

VOCAB = 64
SMALL = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 128, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
GROUPED = {**SMALL, "num_key_value_heads": 2, "head_dim": 8}
# GPT-2's names.
OLD = {
    "vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2}
TWO_STACKS = {
    "vocab_size": VOCAB, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48, "max_position_embeddings": 128, "dropout": 0.0, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": 2,
}  # fmt: skip


def _rope(kind: str, **more) -> dict:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, **more}}


_LLAMA3 = {
    "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
}  # fmt: skip
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

_HYBRID = {**GROUPED, "num_hidden_layers": 3}
_LAYERS = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
_DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 12, "linear_conv_kernel_dim": 4,
}  # fmt: skip
_MAMBA = {
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_d_conv": 4,
    "mamba_expand": 2, "mamba_chunk_size": 8,
}  # fmt: skip
_LATENT = {
    "q_lora_rank": None, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 8, "mlp_layer_types": ["dense"] * 3,
}  # fmt: skip

# Models with recurrent layers.
HYBRIDS: dict[str, tuple[str, dict[str, Any], str]] = {
    "Qwen3-Next": (
        "Qwen3NextForCausalLM",
        {
            **_HYBRID, **_LAYERS, **_DELTA, **EXPERTS, "num_experts": 4,
            "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
            "mlp_only_layers": [0, 1, 2],
        },
        "causal",
    ),
    "Qwen3.5": ("Qwen3_5ForCausalLM", {**_HYBRID, **_LAYERS, **_DELTA}, "causal"),
    "OLMo Hybrid": (
        "OlmoHybridForCausalLM",
        {**_HYBRID, **_LAYERS, **_DELTA, "linear_num_key_heads": 4},
        "causal",
    ),
    "Kimi Linear": (
        "KimiLinearForCausalLM",
        {
            **_HYBRID, **_LAYERS, **_LATENT, "num_key_value_heads": 4, "linear_num_heads": 4,
            "linear_head_dim": 8, "linear_conv_kernel_dim": 4,
        },
        "causal",
    ),
    "Bamba": (
        "BambaForCausalLM",
        {**_HYBRID, **_MAMBA, "mamba_n_groups": 2, "attn_layer_indices": [1]},
        "causal",
    ),
    "Falcon-H1": (
        "FalconH1ForCausalLM", {**_HYBRID, **_MAMBA, "mamba_n_groups": 1, "mamba_d_ssm": 64},
        "causal",
    ),
    "Nemotron-H": (
        "NemotronHForCausalLM",
        {
            **{k: v for k, v in _HYBRID.items() if k != "num_hidden_layers"}, **_LAYERS,
            "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 8,
            "conv_kernel": 4, "chunk_size": 8, "expand": 2,
        },
        "causal",
    ),
    "Granite 4": (
        "GraniteMoeHybridForCausalLM",
        {
            **_HYBRID, **_LAYERS, **_MAMBA, "mamba_n_groups": 1, "num_local_experts": 0,
            "shared_intermediate_size": 32,
        },
        "causal",
    ),
    "Zamba2": (
        "Zamba2ForCausalLM",
        {
            **_HYBRID, "layers_block_type": ["linear_attention", "hybrid", "linear_attention"],
            "mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_headdim": 16,
            "n_mamba_heads": 4, "mamba_ngroups": 2, "chunk_size": 8, "num_mem_blocks": 1,
            "use_mem_rope": True,
        },
        "causal",
    ),
    "Jamba": (
        "JambaForCausalLM",
        {
            **_HYBRID, "attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 2,
            "num_experts_per_tok": 1, "expert_layer_period": 7, "expert_layer_offset": 6,
            "mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
        },
        "causal",
    ),
    "LFM2": (
        "Lfm2ForCausalLM",
        {
            **_HYBRID, "layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3,
            "block_auto_adjust_ff_dim": False,
        },
        "causal",
    ),
    "Mamba 2": (
        "Mamba2ForCausalLM",
        {
            "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4,
            "head_dim": 16, "state_size": 8, "n_groups": 2, "conv_kernel": 4, "expand": 2,
            "chunk_size": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        },
        "causal",
    ),
}  # fmt: skip

# Name: class of the model, its configuration, what it is called with.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any], str]] = {
    "Llama": ("LlamaForCausalLM", GROUPED, "causal"),
    "Llama, llama3 RoPE": (
        "LlamaForCausalLM", {**GROUPED, **_rope("llama3", **_LLAMA3)}, "causal",
    ),
    "Llama, yarn RoPE": (
        "LlamaForCausalLM",
        {**GROUPED, **_rope("yarn", original_max_position_embeddings=32)},
        "causal",
    ),
    "Llama, dynamic RoPE": (
        "LlamaForCausalLM",
        {**GROUPED, **_rope("dynamic"), "max_position_embeddings": 8},
        "causal",
    ),
    "Mistral": ("MistralForCausalLM", {**GROUPED, "sliding_window": 5}, "causal"),
    "Mistral, use_cache": (
        "MistralForCausalLM", {**GROUPED, "sliding_window": 11, "use_cache": True}, "causal",
    ),
    "Qwen2": ("Qwen2ForCausalLM", GROUPED, "causal"),
    "Qwen3": ("Qwen3ForCausalLM", GROUPED, "causal"),
    "Gemma": ("GemmaForCausalLM", GROUPED, "causal"),
    "Gemma 2": ("Gemma2ForCausalLM", {**GROUPED, "sliding_window": 5}, "causal"),
    "Phi": ("PhiForCausalLM", {**SMALL, "resid_pdrop": 0.0, "embd_pdrop": 0.0}, "causal"),
    "OLMo 2": ("Olmo2ForCausalLM", GROUPED, "causal"),
    "Cohere": ("CohereForCausalLM", GROUPED, "causal"),
    "StarCoder 2": (
        "Starcoder2ForCausalLM",
        {**GROUPED, "residual_dropout": 0.0, "embedding_dropout": 0.0},
        "causal",
    ),
    "GPT-2": (
        "GPT2LMHeadModel",
        {**OLD, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
        "causal",
    ),
    "GPT-J": (
        "GPTJForCausalLM",
        {**OLD, "rotary_dim": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
        "causal",
    ),
    "GPT-Neo": (
        "GPTNeoForCausalLM",
        {
            "vocab_size": VOCAB, "hidden_size": 32, "num_layers": 2, "num_heads": 4,
            "attention_types": [[["global", "local"], 1]], "window_size": 5,
            "max_position_embeddings": 128, "intermediate_size": 48, "resid_dropout": 0.0,
            "embed_dropout": 0.0, "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
        },
        "causal",
    ),
    "GPT-NeoX": ("GPTNeoXForCausalLM", {**SMALL, "hidden_dropout": 0.0}, "causal"),
    "OPT": (
        "OPTForCausalLM",
        {
            "vocab_size": VOCAB, "hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 48,
            "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 128,
            "dropout": 0.0, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        },
        "causal",
    ),
    "BLOOM": (
        "BloomForCausalLM",
        {
            "vocab_size": VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 4,
            "hidden_dropout": 0.0, "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
        },
        "causal",
    ),
    "Falcon": (
        "FalconForCausalLM",
        {
            "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2,
            "num_attention_heads": 4, "bos_token_id": 1, "eos_token_id": 2,
        },
        "causal",
    ),
    # In float32: the product of sorted tokens knows no other.
    "Mixtral": ("MixtralForCausalLM", {**GROUPED, **EXPERTS, "num_local_experts": 4}, "causal"),
    "Qwen3 MoE": (
        "Qwen3MoeForCausalLM",
        {**GROUPED, **EXPERTS, "num_experts": 4, "moe_intermediate_size": 24},
        "causal",
    ),
    "BERT": ("BertForMaskedLM", {**SMALL, **NO_DROPOUT}, "masked"),
    "RoBERTa": ("RobertaForMaskedLM", {**SMALL, **NO_DROPOUT}, "masked"),
    "ModernBERT": (
        "ModernBertForMaskedLM",
        {
            **SMALL, "local_attention": 6, "global_attn_every_n_layers": 2, "sep_token_id": 2,
            "cls_token_id": 1,
        },
        "masked",
    ),
    "T5": (
        "T5ForConditionalGeneration",
        {
            "vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2,
            "num_heads": 4, "dropout_rate": 0.0, "decoder_start_token_id": 0, "pad_token_id": 0,
            "eos_token_id": 1,
        },
        "teacher-forced",
    ),
    "BART": ("BartForConditionalGeneration", TWO_STACKS, "teacher-forced"),
    "ViT": (
        "ViTForImageClassification",
        {
            "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
            "intermediate_size": 48, "image_size": 24, "patch_size": 4, "num_labels": 5,
            **NO_DROPOUT,
        },
        "image",
    ),
    **HYBRIDS,
}  # fmt: skip


BATCHED_EXPERTS = {"Qwen3 MoE"}


def dtype(name: str) -> torch.dtype:
    return torch.float32 if name == "Mixtral" else torch.float64


def build(class_name: str, settings: dict[str, Any], dtype=torch.float64, batched=False):
    """A training model. ``batched``: experts by a product of batches, which knows float64."""
    import transformers

    model_class = getattr(transformers, class_name)
    config = model_class.config_class(**{"use_cache": False, **settings})
    model = model_class(config).to(dtype).train()
    if batched:
        model.set_experts_implementation("batched_mm")
    if not isinstance(getattr(model, "loss_type", None), str):
        model.loss_type = "ForCausalLM"  # some don't say, and warn, which Dynamo can't capture
    return model


def make(name: str, **more):
    """A model in ``dtype(name)``, training, its cache off unless the name says otherwise."""
    class_name, settings, _ = ARCHITECTURES[name]
    return build(class_name, {**settings, **more}, dtype(name), name in BATCHED_EXPERTS)


def batch(name: str, length: int, seed: int = 0, rows: int = 2) -> dict[str, torch.Tensor]:
    return batch_of(ARCHITECTURES[name][2], length, seed, rows)


def batch_of(kind: str, length: int, seed: int = 0, rows: int = 2) -> dict[str, torch.Tensor]:
    """The whole batch: its rows are padded behind, and the labels of padding don't count."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape, most=VOCAB):
        return torch.randint(3, most, shape, generator=generator)

    if kind == "image":
        pixels = torch.randn(rows, 3, 24, 24, generator=generator, dtype=torch.float64)
        return {"pixel_values": pixels, "labels": draw(rows, most=5)}
    ids = draw(rows, length)
    mask = torch.ones(rows, length, dtype=torch.int64)
    mask[0, -3:] = 0
    if kind == "teacher-forced":
        labels = draw(rows, length - 4)
        labels[0, -2:] = -100
        return {"input_ids": ids, "labels": labels, "attention_mask": mask}
    labels = ids.clone() if kind == "causal" else draw(rows, length)
    labels[mask == 0] = -100
    labels[0, : length // 2] = -100  # a rank without a valid token in a row
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def near(name: str) -> float:
    """What is called equal: most models compute norms and losses in float32, some recurrences."""
    return 1e-3 if dtype(name) == torch.float32 else 1e-5 if name in HYBRIDS else 1e-6


def least(name: str) -> float:
    """The absolute difference of gradients that always counts as equal."""
    return 1e-8 if name in HYBRIDS else 1e-12


def case(name: str, length: int, **more) -> Case:
    torch.manual_seed(0)
    model, whole = make(name, **more), batch(name, length)
    seq_dim = 2 if "pixel_values" in whole else 1
    return Case(model, whole, {n: seq_dim for n, x in whole.items() if x.dim() > seq_dim})


def through_compile_pass(
    name: str, length: int, ranks: int | None = None, inner: str = "eager", **more
) -> str | None:
    """A training step, of ``ranks`` in lock step, or (None) one rank's part: None if it equals one
    process, or why it is refused. ``inner``, the compiler, is "eager" where the pass alone is in
    question."""
    return training_step(name, case(name, length, **more), near(name), ranks, inner, least(name))


def through_register(name: str, length: int) -> str | None:
    """One rank's part of a training step: None if it equals one process, or why it is refused."""
    register()
    torch.manual_seed(0)
    reference = make(name)
    torch.manual_seed(0)
    kind = ARCHITECTURES[name][2]
    try:
        model = make(name, attn_implementation="deepsp")
        assert model.config._attn_implementation == "deepsp"
        whole = batch(name, length)
        if kind == "masked":
            whole["shift_labels"] = whole.pop("labels")
        if kind in ("image", "teacher-forced"):
            model(**{n: x for n, x in whole.items() if n != "labels"})
        part, lens = deepsp.shard_batch(whole)
        shifted = part.pop("shift_labels")
        logits = model(**part).logits
    except ValueError as error:
        return str(error)
    given = {n: x for n, x in whole.items() if n not in ("labels", "shift_labels")}
    expected_logits = reference(**given).logits
    target = whole.get("shift_labels")
    if target is None:
        target = F.pad(whole["labels"][:, 1:], (0, 1), value=-100)
    expected = F.cross_entropy(expected_logits.flatten(0, 1), target.flatten())
    loss = deepsp.cross_entropy(logits, shifted)
    expected.backward()
    loss.backward()
    deepsp.sync_gradients(model)
    mine = expected_logits.split(lens, 1)[dist.get_rank()]
    real = whole["attention_mask"].split(lens, 1)[dist.get_rank()].bool()
    torch.testing.assert_close(logits[real], mine[real], rtol=near(name), atol=near(name))
    torch.testing.assert_close(
        loss, expected, rtol=near(name), atol=0, msg=lambda m: f"{name}: {m}"
    )
    compare_gradients(name, model, reference, near(name), least(name))
    return None
