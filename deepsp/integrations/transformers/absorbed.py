"""Attention to chosen latents, without keys and values: the layer that expands latents is absorbed
into queries and outputs, as DeepSeek's inference does (arXiv:2405.04434, section 2.1).

A head's score of a token is q · (W_k c) = (W_k^T q) · c for the token's latent c, and its output is
W_v times the weighted sum of latents. So all heads of a query read the same chosen latents: memory
doesn't depend on heads times tokens, and work depends on the number of chosen tokens only, which is
the same for late queries as for early ones."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from deepsp.integrations.transformers import indexers
from deepsp.integrations.transformers.forward import Registration
from deepsp.integrations.transformers.indexers import Keys
from deepsp.integrations.transformers.masks import Masks
from deepsp.integrations.transformers.selected import Selected
from deepsp.weights.partitioned import is_away


def is_less(keys: Keys, registration: Registration) -> bool:
    """Return whether chosen latents take less work than the keys and values of all tokens, and are
    what the module's attention reads."""
    module, masks = keys.module, keys.sequence
    expand = getattr(module, "kv_b_proj", None)
    # Adapters and quantized layers expand in their own ways; ZeRO 3 gathers in a module's call.
    if type(expand) is not nn.Linear or "forward" in vars(expand) or expand.bias is not None:
        return False
    if isinstance(expand.weight, DTensor) or is_away(expand.weight) or registration.core != "auto":
        return False
    if not isinstance(masks, Masks) or masks.user_mask is not None:
        return False
    if module.training and getattr(module, "attention_dropout", 0) > 0:
        return False
    chosen, tokens = getattr(module.config, "index_topk", None), sum(keys.lens)
    if chosen is None or not hasattr(module, "expand_kv"):
        return False
    latent = 2 * module.kv_lora_rank + module.qk_rope_head_dim
    expanded = module.qk_nope_head_dim + module.qk_rope_head_dim + module.v_head_dim
    return min(chosen, tokens) * latent < tokens / 2 * expanded


def unexpanded(module: nn.Module, latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values of the right shapes, [B, H, S, D], without data."""
    batch_size, _, length, _ = latent.shape
    empty = latent.detach().new_zeros(())
    dims = (module.qk_nope_head_dim + module.qk_rope_head_dim, module.v_head_dim)
    k, v = (empty.expand(batch_size, module.num_heads, length, n) for n in dims)
    return k, v


def attend(
    query: Tensor,
    latent: Tensor,
    rotated: Tensor,
    mask: Selected,
    scaling: float,
    sinks: Tensor | None,
) -> Tensor:
    """Attend from query [B, H, S_r, D] to the chosen of latent [B, 1, S, R] and rotated
    [B, 1, S, r]; return [B, S_r, H, Dv]. ``sinks``: [H].

    Some queries run at a time, and again in backward. Gradients of latents are added in float32 or
    wider."""
    module, indices = mask.keys.module, mask.indices
    rank, nope = latent.size(-1), module.qk_nope_head_dim
    weight = module.kv_b_proj.weight.view(module.num_heads, -1, rank)
    to_latent, to_value = weight.split([nope, module.v_head_dim], 1)
    q_nope, q_rotated = query.split([nope, query.size(-1) - nope], -1)
    absorbed = torch.matmul(q_nope, to_latent.to(q_nope.dtype))
    queries_all = torch.cat([absorbed, q_rotated], -1).transpose(1, 2)  # [B, S_r, H, R + r]
    both = torch.cat([latent, rotated], -1)[:, 0]  # [B, S, R + r]
    wide = both.float() if both.dtype in (torch.bfloat16, torch.float16) else both
    rows = torch.arange(len(both), device=both.device)[:, None, None] * both.size(1)

    def some(q: Tensor, tokens: Tensor, to_value: Tensor, queries: range) -> Tensor:
        chosen = indices[:, queries.start : queries.stop].long()
        length = mask.seen(queries)
        is_seen = (chosen >= 0) & (chosen < length)
        safe = torch.where(is_seen, chosen, 0)
        is_seen = is_seen & mask.mask.part(queries, range(length))[:, 0].gather(-1, safe)
        picked = tokens.flatten(0, 1).index_select(0, (safe + rows).flatten())
        picked = picked.view(*safe.shape, -1).to(q.dtype)  # [B, n, k, R + r]
        scores = torch.matmul(q, picked.transpose(-1, -2)) * scaling
        scores = scores.float() if scores.dtype in (torch.bfloat16, torch.float16) else scores
        scores = scores.masked_fill(~is_seen[:, :, None], torch.finfo(scores.dtype).min)
        if sinks is not None:
            last = sinks.to(scores.dtype).view(1, 1, -1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, last], -1)
        weights = scores.softmax(-1)[..., : safe.size(-1)]
        weights = weights.masked_fill(~is_seen[:, :, None], 0)  # also of queries that see none
        out = torch.matmul(weights.to(q.dtype), picked[..., :rank])
        return torch.matmul(out.transpose(1, 2), to_value.transpose(1, 2).to(q.dtype))

    size = indices.size(-1) * (both.size(-1) + query.size(1))
    every = [x for x in mask.keys.cut(max(1, indexers.ENTRIES // (len(both) * size))) if x]
    parts = []
    for queries in every:
        arguments = (queries_all[:, queries.start : queries.stop], wide, to_value, queries)
        if len(every) == 1:
            parts.append(some(*arguments))
        else:
            parts.append(
                checkpoint(some, *arguments, use_reentrant=False, preserve_rng_state=False)
            )
    return torch.cat(parts, 2).transpose(1, 2)
