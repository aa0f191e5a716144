"""One tiny model of each of transformers' causal, masked and sequence-to-sequence families.

A family's configuration is its default with small numbers in place of known ones (``SIZES``);
``EXCEPTIONS`` has what a family needs besides.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from architectures import ARCHITECTURES, VOCAB, batch_of, build

from corpus.step import Case, Entry

SIZES: dict[int, tuple[str, ...]] = {
    VOCAB: ("vocab_size", "n_words", "src_vocab_size", "tgt_vocab_size", "text_vocab_size"),
    32: (
        "hidden_size", "d_model", "n_embd", "dim", "embed_dim", "embedding_size", "emb_dim",
        "hidden_dim", "word_embed_proj_dim", "attention_hidden_size", "encoder_hidden_size",
        "decoder_hidden_size", "lru_width", "rnn_width", "embedding_dim", "input_embedding_size",
    ),
    48: (
        "intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "n_inner",
        "ffn_hidden_size", "d_inner", "feed_forward_size", "dff", "dim_ff",
    ),
    2: (
        "num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers",
        "decoder_layers", "num_decoder_layers", "num_encoder_layers", "num_experts_per_tok",
        "moe_topk", "top_k_experts", "moe_k", "top_k", "num_key_value_heads", "num_kv_heads",
        "expert_top_k", "decoder_layers", "n_kv_head",
    ),
    4: (
        "num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads",
        "decoder_attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads",
        "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts",
    ),
    128: ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length"),
    8: (
        "head_dim", "d_kv", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
        "attention_head_size", "kv_channels", "chunk_size", "mamba_chunk_size",
        "attention_chunk_size",
    ),
    16: (
        "kv_lora_rank", "q_lora_rank", "moe_intermediate_size", "shared_expert_intermediate_size",
        "moe_shared_expert_intermediate_size", "expert_ffn_hidden_size",
    ),
    5: ("sliding_window", "attention_window_size", "window_size"),
    1: ("n_group", "topk_group", "first_k_dense_replace", "bos_token_id", "n_shared_experts"),
    0: ("pad_token_id",),
}  # fmt: skip
SMALL = {name: size for size, names in SIZES.items() for name in names}
SMALL |= {"eos_token_id": 2, "decoder_start_token_id": 2, "use_cache": False}
# Also where the default is None.
ALWAYS = {
    "pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id", "vocab_size",
    "head_dim", "num_key_value_heads", "n_shared_experts", "n_routed_experts",
    "num_experts_per_tok",
}  # fmt: skip

_LATENT = {"num_key_value_heads": 4}
_ROCBERT = {
    "pronunciation_embed_dim": 8, "pronunciation_vocab_size": VOCAB, "shape_embed_dim": 8,
    "shape_vocab_size": VOCAB,
}  # fmt: skip
_XMOD = {"languages": ["en_XX"], "default_language": "en_XX"}
_INKLING = {
    "unpadded_vocab_size": VOCAB, "swa_head_dim": 8, "sliding_window_size": 5, "rel_extent": 8,
    "log_scaling_n_floor": 8,
}  # fmt: skip
_FULL = {"attention_type": "original_full"}  # its own sparse attention wants 704 tokens
_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
EXCEPTIONS: dict[str, dict[str, Any]] = {
    "BailingHybridForCausalLM": {
        "layer_types": ["linear_attention", "full_attention"], "n_group": 1, "topk_group": 1,
        "num_experts_per_tok": 2,
    },
    "BigBirdForCausalLM": _FULL,
    "BigBirdForMaskedLM": _FULL,
    "BigBirdPegasusForCausalLM": _FULL,
    "BigBirdPegasusForConditionalGeneration": _FULL,
    "CodeGenForCausalLM": {"rotary_dim": 4},
    "CohereCompassForCausalLM": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"sliding_attention": _MROPE, "full_attention": _MROPE},
    },
    "Dots3NoteForCausalLM": _LATENT,
    "EsmcForMaskedLM": _LATENT,
    "Gemma3nForCausalLM": {
        "num_kv_shared_layers": 0, "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 8, "laurel_rank": 8,
    },
    "Gemma4ForCausalLM": {
        "num_kv_shared_layers": 0, "vocab_size_per_layer_input": VOCAB, "global_head_dim": 8,
        "hidden_size_per_layer_input": 8,
    },
    "Inkling2ForCausalLM": _INKLING,
    "Inkling2LoopForCausalLM": _INKLING,
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"]},
    "LukeForMaskedLM": {"entity_vocab_size": VOCAB, "entity_emb_size": 8},
    "NeoMMEForMaskedLM": {
        "rope_parameters": {"full_attention": {"partial_rotary_factor": 0.5}},
    },
    "RoCBertForCausalLM": _ROCBERT,
    "RoCBertForMaskedLM": _ROCBERT,
    "XmodForCausalLM": _XMOD,
    "XmodForMaskedLM": _XMOD,
    "ZayaForCausalLM": {"num_experts_per_tok": 1},
}  # fmt: skip
# Masks with the least number of float32; routers that stay in float32.
FLOAT32 = {
    "Inkling2ForCausalLM", "Inkling2LoopForCausalLM", "ProphetNetForCausalLM",
    "ProphetNetForConditionalGeneration", "XGLMForCausalLM",
}  # fmt: skip
# Recurrences and hyper-connections in float32: in float64 these, too, are equal up to 1e-9.
NEAR = {"DeepseekV4ForCausalLM": 1e-4, "HYV4ForCausalLM": 1e-5}
LEFT_OUT: dict[str, tuple[str, ...]] = {
    "Dynamo can't capture it, or breaks the graph, in one process, too": (
        "DbrxForCausalLM", "IBertForMaskedLM", "LEDForConditionalGeneration",
        "LongcatFlashForCausalLM", "LongformerForMaskedLM", "MraForMaskedLM",
        "Qwen4ExpForCausalLM",
        "YosoForMaskedLM",
    ),
    "it has a part for images or sound, as those of transformers' own list": (
        "AudioFlamingo3ForConditionalGeneration", "ModernVBertForMaskedLM", "MoshiForCausalLM",
        "MusicFlamingoForConditionalGeneration", "MusicgenForCausalLM",
        "MusicgenMelodyForCausalLM", "UltraVBertForMaskedLM",
    ),
    "it is made of two other models, or drafts for another one": (
        "EncoderDecoderModel", "Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM",
    ),
    "it takes other batches: bytes, as many labels as ids, lengths of its own": (
        "BltForCausalLM", "FSMTForConditionalGeneration", "PerceiverForMaskedLM",
        "ReformerForMaskedLM", "ReformerModelWithLMHead",
    ),
}  # fmt: skip


def shrunk(config_class, kind: str = "") -> dict[str, Any]:
    """Return small settings for what the default configuration has."""
    defaults = config_class().to_dict()
    layers = max(
        (v for k, v in defaults.items() if SMALL.get(k) == 2 and "layer" in k and v), default=0
    )
    settings: dict[str, Any] = {}
    for name, value in defaults.items():
        if name in ALWAYS or (name in SMALL and type(value) is int):
            settings[name] = SMALL[name]
        elif type(value) is float and ("drop" in name):
            settings[name] = 0.0
        elif type(value) is list and len(value) == layers > 2:
            settings[name] = [value[0], value[-1]]
    for name, part in config_class.sub_configs.items():
        if hasattr(part, "sub_configs") and defaults.get(name) is not None:
            settings[name] = shrunk(part)
    if "kv_lora_rank" in defaults:
        settings["num_key_value_heads"] = settings["num_attention_heads"]
    if kind == "causal" and "is_decoder" in defaults:
        settings["is_decoder"] = True
    if kind == "teacher-forced":
        settings["decoder_start_token_id"] = 2
    return settings


def _make(name: str, kind: str, length: int) -> Case:
    import transformers

    torch.manual_seed(0)
    settings = shrunk(getattr(transformers, name).config_class, kind) | EXCEPTIONS.get(name, {})
    dtype = torch.float32 if name in FLOAT32 else torch.float64
    batch = batch_of(kind, length)
    return Case(build(name, settings, dtype, batched=True), batch, dict.fromkeys(batch, 1))


def families() -> dict[str, Entry]:
    from transformers.models.auto import modeling_auto as auto

    left_out = {name for names in LEFT_OUT.values() for name in names}
    seen = {class_name for class_name, _, _ in ARCHITECTURES.values()} | left_out
    seen |= set(auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.values())
    entries = {}
    for kind, mapping in (
        ("causal", auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
        ("masked", auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES),
        ("teacher-forced", auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES),
    ):
        for name in dict.fromkeys(mapping.values()):
            if name not in seen:
                narrow = name in FLOAT32
                near, least = NEAR.get(name, 1e-3 if narrow else 1e-6), 1e-8 if narrow else 1e-12
                make = functools.partial(_make, name, kind)
                entries[name] = Entry("transformers' families", make, near, least)
                seen.add(name)
    return entries
