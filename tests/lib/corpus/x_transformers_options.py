"""x-transformers' options, each in a tiny model."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from corpus.step import Case, Entry
from corpus.tokens import VOCAB, language_batch

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "flash": {"attn_flash": True},
    "encoder": {"encoder": True},
    "rotary": {"rotary_pos_emb": True},
    "rotary, scaled": {"rotary_pos_emb": True, "rotary_xpos": True},
    "ALiBi": {"alibi_pos_bias": True, "alibi_num_heads": 2},
    "T5 bias": {"rel_pos_bias": True},
    "one kv head": {"attn_one_kv_head": True},
    "kv heads": {"attn_kv_heads": 2},
    "RMS norm": {"use_rmsnorm": True},
    "scale norm": {"use_scalenorm": True},
    "post-norm": {"pre_norm": False},
    "sandwich norm": {"sandwich_norm": True},
    "scaled residual": {"scale_residual": True},
    "gated residual": {"gate_residual": True},
    "residual streams": {"num_residual_streams": 2},
    "residual attention": {"residual_attn": True},
    "GLU": {"ff_glu": True, "ff_swish": True},
    "ReLU squared": {"ff_relu_squared": True, "ff_no_bias": True},
    "macaron": {"macaron": True},
    "sandwich": {"sandwich_coef": 1},
    "talking heads": {"attn_pre_talking_heads": True, "attn_post_talking_heads": True},
    "q k norm": {"attn_qk_norm": True},
    "head scale": {"attn_head_scale": True},
    "gated values": {"attn_gate_values": True},
    "attention on attention": {"attn_on_attn": True},
    "soft clamp": {"softclamp_output": True, "attn_softclamp_logits": True},
    "top k keys": {"attn_sparse_topk": 3},
    "memory kv": {"attn_num_mem_kv": 2},
    "shifted tokens": {"shift_tokens": 1},
    "memory tokens": {"num_memory_tokens": 2},
}


class Model(nn.Module):
    def __init__(self, encoder: bool = False, num_memory_tokens: int = 0, **options: Any):
        super().__init__()
        from x_transformers import Decoder, Encoder, TransformerWrapper

        layers = (Encoder if encoder else Decoder)(
            dim=32, depth=2, heads=4, attn_dim_head=8, **options
        )
        self.net = TransformerWrapper(
            num_tokens=VOCAB, max_seq_len=64, num_memory_tokens=num_memory_tokens,
            attn_layers=layers,
        )  # fmt: skip

    def forward(self, ids, labels):
        logits = self.net(ids)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def _make(name: str, length: int) -> Case:
    torch.manual_seed(0)
    return Case(Model(**OPTIONS[name]).double(), *language_batch(length))


X_TRANSFORMERS = {
    f"x-transformers, {n}": Entry("x-transformers", functools.partial(_make, n)) for n in OPTIONS
}
