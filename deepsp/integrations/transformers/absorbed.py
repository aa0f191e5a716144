"""Attention to chosen latents, without keys and values: the layer that expands latents is absorbed
into queries and outputs, as DeepSeek's inference does (arXiv:2405.04434, section 2.1).

A head's score of a token is q · (W_k c) = (W_k^T q) · c for the token's latent c, and its output is
W_v times the weighted sum of latents. So all heads of a query read the same chosen latents, keys
and values of all tokens aren't made, and a late query takes as much work as an early one."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from deepsp.integrations.transformers import indexers
from deepsp.integrations.transformers.forward import Registration
from deepsp.integrations.transformers.indexers import Keys
from deepsp.integrations.transformers.latents import is_plain
from deepsp.integrations.transformers.masks import Masks
from deepsp.integrations.transformers.selected import Selected, in_parts


def is_less(keys: Keys, registration: Registration) -> bool:
    """Return whether attention reads chosen latents: it can, and that takes less work than all
    tokens' keys and values."""
    module, masks = keys.module, keys.sequence
    if not hasattr(module, "expand_kv") or not is_plain(module, registration):
        return False
    if not isinstance(masks, Masks) or masks.user_mask is not None:
        return False
    chosen, tokens = getattr(module.config, "index_topk", None), sum(keys.lens)
    if chosen is None or module.kv_b_proj.bias is not None:
        return False
    latent = 2 * module.kv_lora_rank + module.qk_rope_head_dim
    expanded = module.qk_nope_head_dim + module.qk_rope_head_dim + module.v_head_dim
    return min(chosen, tokens) * latent < tokens / 2 * expanded


def unexpanded(module: nn.Module, latent: Tensor) -> tuple[Tensor, Tensor]:
    """Return tensors of the shapes of keys and values, [B, H, S, D], that share one zero."""
    batch_size, _, length, _ = latent.shape
    zero = latent.detach().new_zeros(())
    dims = (module.qk_nope_head_dim + module.qk_rope_head_dim, module.v_head_dim)
    k, v = (zero.expand(batch_size, module.num_heads, length, n) for n in dims)
    return k, v


def attend(
    query: Tensor,
    latent: Tensor,
    rotated: Tensor,
    mask: Selected,
    scaling: float,
    sinks: Tensor | None,
) -> Tensor:
    """Attend from query [B, H, S_r, D] to the chosen tokens of latent [B, 1, S, R] and rotated
    [B, 1, S, r]; return [B, S_r, H, Dv]. ``sinks``: [H].

    Queries are computed in parts. Gradients of latents are added in float32 or wider."""
    module, indices = mask.keys.module, mask.indices
    rank, nope = latent.size(-1), module.qk_nope_head_dim
    weight = module.kv_b_proj.weight.view(module.num_heads, -1, rank)
    both = torch.cat([latent, rotated], -1)[:, 0]  # [B, S, R + r]
    wide = both.float() if both.dtype in (torch.bfloat16, torch.float16) else both
    rows = torch.arange(len(both), device=both.device)[:, None, None] * both.size(1)

    def some(q: Tensor, tokens: Tensor, weight: Tensor, queries: range) -> Tensor:
        dtype, length = q.dtype, mask.seen(queries)
        to_latent, to_value = weight.to(dtype).split([nope, module.v_head_dim], 1)
        q = torch.cat([q[..., :nope] @ to_latent, q[..., nope:]], -1).transpose(1, 2)
        chosen = indices[:, queries.start : queries.stop].long()
        is_seen = (chosen >= 0) & (chosen < length)
        safe = torch.where(is_seen, chosen, 0)
        is_seen = is_seen & mask.mask.part(queries, range(length))[:, 0].gather(-1, safe)
        picked = tokens.flatten(0, 1).index_select(0, (safe + rows).flatten())
        picked = picked.view(*safe.shape, -1).to(dtype)  # [B, n, k, R + r]
        scores = (q @ picked.transpose(-1, -2)) * scaling  # [B, n, H, k]
        scores = scores.float() if scores.dtype in (torch.bfloat16, torch.float16) else scores
        scores = scores.masked_fill(~is_seen[:, :, None], torch.finfo(scores.dtype).min)
        if sinks is not None:
            last = sinks.to(scores.dtype).view(1, 1, -1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, last], -1)
        weights = scores.softmax(-1)[..., : safe.size(-1)]
        # Zero, too, where a query sees no token.
        weights = weights.masked_fill(~is_seen[:, :, None], 0).to(dtype)
        out = (weights @ picked[..., :rank]).transpose(1, 2)
        return out @ to_value.transpose(1, 2)

    size = indices.size(-1) * (both.size(-1) + query.size(1))
    parts = mask.keys.cut(max(1, indexers.ENTRIES // (len(both) * size)))
    return in_parts(some, query, (wide, weight), parts).transpose(1, 2)
