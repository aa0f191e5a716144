"""Tiny vision-language models of transformers, by name, and batches of images and text for them.

``make(name)`` builds a model, ``batch(name, kind)`` what it is called with: full ids, pixels, grids
and labels."""

from __future__ import annotations

from typing import Any

import torch
import transformers as T

VOCAB, LENGTH, ROWS = 64, 37, 2
IMAGE, VIDEO, BEGIN, END = 60, 61, 62, 63

_TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}
_ROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
_TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": BEGIN,
    "vision_end_token_id": END,
}
_QWEN = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 32,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "initializer_range": 0.2,
}
# 16 patches of 2 x 2 pixels make an image, which has 4 tokens in Gemma 3 and InternVL.
_SIGLIP = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 2,
}
_LINEAR = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


def _qwen(name: str) -> Any:
    if name == "Qwen2.5-VL":
        vision = {**_QWEN, "window_size": 16, "fullatt_block_indexes": [1]}
        text = {**_TEXT, "rope_parameters": _ROPE}
        config = T.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **_TOKENS)
        return T.Qwen2_5_VLForConditionalGeneration(config)
    vision = {**_QWEN, "num_position_embeddings": 16}
    if name == "Qwen3-VL":
        text = {**_TEXT, "rope_parameters": _ROPE}
        vision["deepstack_visual_indexes"] = [0, 1]
        config = T.Qwen3VLConfig(text_config=text, vision_config=vision, **_TOKENS)
        return T.Qwen3VLForConditionalGeneration(config)
    rope = {**_ROPE, "partial_rotary_factor": 1.0}
    text = {**_TEXT, **_LINEAR, "rope_parameters": rope}
    config = T.Qwen3_5Config(text_config=text, vision_config=vision, **_TOKENS)
    return T.Qwen3_5ForConditionalGeneration(config)


def _gemma3() -> Any:
    text = {**_TEXT, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    config = T.Gemma3Config(
        text_config=T.Gemma3TextConfig(**text, sliding_window=9),
        vision_config=T.SiglipVisionConfig(**_SIGLIP, vision_use_head=False),
        mm_tokens_per_image=4,
        image_token_id=IMAGE,
        boi_token_id=BEGIN,
        eoi_token_id=END,
    )
    return T.Gemma3ForConditionalGeneration(config)


def _llava_onevision() -> Any:
    config = T.LlavaOnevisionConfig(
        text_config=T.Qwen2Config(**_TEXT),
        vision_config=T.SiglipVisionConfig(**{**_SIGLIP, "patch_size": 4}, vision_use_head=False),
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        image_grid_pinpoints=[[8, 8]],
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        vision_aspect_ratio="anyres_max_9",
    )
    return T.LlavaOnevisionForConditionalGeneration(config)


def _internvl() -> Any:
    vision = {**_SIGLIP, "image_size": [8, 8], "patch_size": [2, 2]}
    config = T.InternVLConfig(
        text_config=T.Qwen2Config(**_TEXT),
        vision_config=T.InternVLVisionConfig(**vision),
        image_token_id=IMAGE,
    )
    return T.InternVLForConditionalGeneration(config)


def _pali_gemma() -> Any:
    vision = T.SiglipVisionConfig(
        **{**_SIGLIP, "patch_size": 4}, vision_use_head=False, projection_dim=32
    )
    text = {**T.GemmaConfig(**_TEXT).to_dict(), "model_type": "gemma"}
    config = T.PaliGemmaConfig(
        text_config=text, vision_config=vision, image_token_id=IMAGE, projection_dim=32
    )
    return T.PaliGemmaForConditionalGeneration(config)


def _gemma4() -> Any:
    text = {
        **_TEXT,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB,
        "global_head_dim": 8,
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    }
    config = T.Gemma4Config(text_config=T.Gemma4TextConfig(**text), audio_config=None)
    config.vision_config = None
    return T.Gemma4ForConditionalGeneration(config)


QWENS = ["Qwen2.5-VL", "Qwen3-VL", "Qwen3.5"]
OTHERS = {"Gemma 3": _gemma3, "LLaVA-OneVision": _llava_onevision, "InternVL": _internvl}
NAMES = [*QWENS, *OTHERS]
OTHERS |= {"PaliGemma": _pali_gemma, "Gemma 4": _gemma4}


def make(name: str) -> Any:
    """A model with weights of its seed, in the default dtype."""
    model = _qwen(name) if name in QWENS else OTHERS[name]()
    model = model.to(torch.get_default_dtype()).train()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.05)
    return model


def batch(name: str, kind: str = "images", length: int = LENGTH, seed: int = 1) -> dict[str, Any]:
    """Kinds: "images" (two in the first row, one across the middle), "video" (and an image),
    "text" (no images), "padding" (on the left), "packed" (documents, by positions; for Qwen's of
    four rows), "restarts" (the same without the text's row).
    """
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 59, (ROWS, length), generator=generator)
    given: dict[str, Any] = {"input_ids": ids}
    if kind == "padding":
        given["attention_mask"] = torch.ones_like(ids)
        given["attention_mask"][1, :5] = 0
        ids[1, :5] = 0
    tokens = [4, 8, 6] if name in QWENS else [10 if name == "LLaVA-OneVision" else 4] * 3
    places = [(0, 2), (0, 14), (1, 16)]  # by row and first token; 18 is in the middle

    def put(token: int, row: int, at: int, n: int) -> None:
        ids[row, at - 1], ids[row, at + n] = BEGIN, END
        ids[row, at : at + n] = token

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.get_default_dtype())

    if kind != "text":
        images = [*zip(places, tokens, strict=True)][: 2 if kind == "video" else 3]
        for (row, at), n in images:
            put(IMAGE, row, at, n)
        if name in QWENS:
            grid = torch.tensor([[1, 4, n] for _, n in images])
            given["image_grid_thw"] = grid
            given["pixel_values"] = draw(int(grid.prod(-1).sum()), 3 * 2 * 4 * 4)
        elif name == "LLaVA-OneVision":
            given["pixel_values"] = draw(3, 2, 3, 8, 8)
            given["image_sizes"] = torch.tensor([[8, 8]] * 3)
        else:
            given["pixel_values"] = draw(3, 3, 8, 8)
    if kind == "video":  # of two frames; Qwen3-VL and Qwen3.5 put text between them
        frames = [(1, 10), (1, 20)] if name != "Qwen2.5-VL" else [(1, 14)]
        for row, at in frames:
            put(VIDEO, row, at, 12 // len(frames))
        given["video_grid_thw"] = torch.tensor([[2, 4, 6]])
        given["pixel_values_videos"] = draw(48, 3 * 2 * 4 * 4)
    if name in QWENS and kind != "text":
        given["mm_token_type_ids"] = (ids == IMAGE).int() + 2 * (ids == VIDEO).int()
    if name == "Gemma 3" and kind != "text":
        given["token_type_ids"] = (ids == IMAGE).int()
    if name == "PaliGemma":  # which needs both in training
        given |= dict.fromkeys(("token_type_ids", "attention_mask"), torch.ones_like(ids))
    labels = ids.masked_fill((ids >= IMAGE) | (ids == 0), -100)
    if kind in ("packed", "restarts"):
        row = torch.cat([torch.arange(12), torch.arange(length - 12)]).expand(ROWS, -1)
        fours = name in QWENS and kind == "packed"
        given["position_ids"] = row.expand(4, -1, -1) if fours else row
    return {**given, "labels": labels}
