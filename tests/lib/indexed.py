"""Tiny models of transformers whose keys are compressed, by name: those whose attention chooses
among them by an indexer, and others.

``make(name)`` builds one whose indexers choose among a row's tokens, ``batch(kind, ...)`` what it
is called with.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

VOCAB, LENGTH, ROWS = 50, 29, 2
ENDS = [[12, 13, LENGTH], [5, 6, LENGTH]]
"""Where documents of packed rows end; some have one token."""

_TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}
_INDEX = {"index_topk": 8, "index_head_dim": 16, "index_n_heads": 2}
_MLA = {
    **_TEXT,
    **_INDEX,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
}
_SHARED = {"indexer_types": ["full", "shared", "full"]}

TEXT: dict[str, dict[str, Any]] = {
    "deepseek_v32": _MLA,
    "glm_moe_dsa": {**_MLA, **_SHARED},
    "hy_v4": {**_MLA, **_SHARED, "head_dim": 16},
    "axk2": {**_MLA, "gated_norm_rank": 4},
    "dots3_note_text": {
        **_MLA,
        "layer_types": ["indexed_attention", "sliding_attention", "indexed_attention"],
        "sliding_window": 7,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 16,
        "swa_qk_nope_head_dim": 8,
        "swa_v_head_dim": 16,
        "shared_experts_intermediate_size": 16,
    },
    "minimax_m3_vl_text": {
        **_TEXT,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rotary_dim": 8,
        "num_local_experts": 4,
        "dense_intermediate_size": 48,
        "shared_intermediate_size": 16,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_block_size": 4,
        "index_topk_blocks": 2,
    },
    "qwen4_exp_text": {
        **{name: x for name, x in _TEXT.items() if name != "intermediate_size"},
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 4,
        "shared_expert_intermediate_size": 16,
        "layer_types": ["linear_attention", "indexed_attention", "indexed_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "hc_count": 2,
        "hc_lowrank": 8,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "deepseek_v4": {
        **_TEXT,
        **_INDEX,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "q_lora_rank": 16,
        "n_routed_experts": 4,
        "sliding_window": 6,
        "o_groups": 2,
        "o_lora_rank": 8,
        "index_topk": 3,
        "hc_mult": 2,
        "hc_sinkhorn_iters": 3,
        "num_nextn_predict_layers": 0,
        "layer_types": [
            "sliding_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
        ],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "mlp_layer_types": ["moe"] * 3,
        "partial_rotary_factor": 0.5,
    },
}
_TOWER = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 2,
}
AROUND: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "mistral_large4": (
        {**_MLA, **_SHARED, "qk_nope_head_dim": 16, "no_rope_layers": [1, 0, 1]},
        {**_TOWER, "model_type": "pixtral"},
    ),
    "hy_v4_vl": (
        {
            **_MLA,
            **_SHARED,
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [2, 1, 1],
            },
        },
        {**_TOWER, "out_hidden_size": 32},
    ),
    "glm5_next": (
        {
            **_MLA,
            **_INDEX,
            "qk_rope_head_dim": 0,
            "qk_nope_head_dim": 16,
            "layer_types": ["linear_attention", "indexed_attention", "indexed_attention"],
            "indexer_types": ["full", "full", "shared"],
            "linear_head_dim": 8,
            "linear_num_heads": 4,
            "hc_mult": 2,
            "hc_sinkhorn_iters": 3,
            "index_kpool": 4,
        },
        {**_TOWER, "num_heads": 2, "depth": 1, "out_hidden_size": 32},
    ),
}
"""Vision-language models: their text and their tower."""
NAMES = [*TEXT, *AROUND]
_LATENT = {name: x for name, x in _MLA.items() if name not in {*_INDEX, "mlp_layer_types"}}
LATENT: dict[str, dict[str, Any]] = {
    **dict.fromkeys(["deepseek_v3", "minicpm3", "deepseek_v2"], _LATENT),
    **dict.fromkeys(["glm4_moe_lite", "axk1", "youtu"], _LATENT),
    "longcat_flash": {
        **_LATENT,
        "head_dim": 8,
        "num_layers": 1,
        "ffn_hidden_size": 48,
        "expert_ffn_hidden_size": 16,
        "moe_topk": 2,
        "zero_expert_num": 1,
    },
}
"""Models without an indexer whose keys and values are made from latents."""
BLOCKS = ["minimax_m3_vl_text", "deepseek_v4"]
"""Those whose blocks of tokens are counted from a row's beginning, for which rows aren't packed."""
EAGER = ["hy_v4", "hy_v4_vl", "deepseek_v4"]
"""Those that transformers computes by "eager" only."""


def make(name: str, **more: Any) -> Any:
    """A model with weights of its seed, in the default dtype, with transformers' attention.
    ``more``: of a text model's configuration."""
    torch.manual_seed(0)
    text = {**TEXT, **LATENT}.get(name)
    if text is not None:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **text, **more))
    else:
        text, vision = AROUND[name]
        config = AutoConfig.for_model(name, text_config=text, vision_config=vision)
        model = AutoModelForImageTextToText.from_config(config)
    model = model.to(torch.get_default_dtype()).train()
    if name not in ("minicpm3", "youtu"):
        model.set_experts_implementation("batched_mm")
    attend_by(model, name, "eager" if name in EAGER else "sdpa")
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return model


def attend_by(model: Any, name: str, attention: str) -> None:
    model.set_attn_implementation({"text_config": attention} if name in AROUND else attention)


def batch(kind: str = "plain", length: int = LENGTH) -> dict[str, torch.Tensor]:
    """Kinds: "plain", "left" and "right" (padding), "packed" (documents, by positions)."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCAB, (ROWS, length), generator=generator)
    inputs = {"input_ids": ids, "labels": ids.clone()}
    if kind in ("left", "right"):
        mask = torch.ones_like(ids)
        mask[1, slice(9) if kind == "left" else slice(-9, None)] = 0
        inputs |= {"attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    if kind == "packed":
        inputs["position_ids"] = torch.stack(
            [
                torch.cat([torch.arange(b - a) for a, b in itertools.pairwise([0, *ends])])
                for ends in ENDS
            ]
        )
    return inputs


def shifted(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """The labels of next tokens, [B, S]; -100 where a document ends."""
    labels = torch.nn.functional.pad(inputs["labels"][:, 1:], (0, 1), value=-100)
    if "position_ids" in inputs:
        for row, ends in enumerate(ENDS):
            labels[row, [end - 1 for end in ends]] = -100
    return labels
