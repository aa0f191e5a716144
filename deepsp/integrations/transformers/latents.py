"""Multi-head latent attention without an indexer (DeepSeek V3, Kimi, MiniCPM3): ranks exchange
queries and outputs by heads, and gather the latents; each rank expands these to keys and values of
its heads."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepsp.integrations.transformers.arguments import check_keys
from deepsp.integrations.transformers.forward import Registration
from deepsp.integrations.transformers.masks import Masks, Ranges
from deepsp.integrations.transformers.stand_in import StandIn
from deepsp.ranks.groups import Member
from deepsp.sequence.attention.function import sdpa
from deepsp.sequence.attention.parts import by_tiles, resolve


def is_plain(module: nn.Module, registration: Registration) -> bool:
    """Return whether deepsp's own attention runs, without dropout, and the layer that expands
    latents is nothing but its weight: no adapter, quantization, hook or wrapper of its own."""
    layer = module.kv_b_proj
    weight = getattr(layer, "_parameters", {}).get("weight")
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if type(layer) is not nn.Linear or type(weight) is not nn.Parameter:
        return False
    if "forward" in vars(layer) or any(getattr(layer, name) for name in hooks):
        return False
    drops = module.training and getattr(module, "attention_dropout", 0) > 0
    return registration.core == "auto" and not drops


def are_less(
    module: nn.Module, registration: Registration, masks: Masks, member: Member, hidden: Tensor
) -> bool:
    """Return whether latents travel: they can, and are fewer elements than keys and values.
    ``hidden``: [B, S_r, D]."""
    size, heads = member[1], module.num_heads
    if not is_plain(module, registration) or masks.ranges is None or masks.deal is not None:
        return False
    if registration.chunks != 1 or registration.kv_chunk is not None:
        return False
    if resolve(registration.query_parts, heads, size, by_tiles(hidden.device, hidden.dtype)) != 1:
        return False
    latent = module.kv_lora_rank + module.qk_rope_head_dim
    expanded = heads * (module.qk_nope_head_dim + module.qk_rope_head_dim + module.v_head_dim)
    return size > 1 and heads >= size and latent * size < expanded


class Latents(StandIn):
    """Stands in for the cache of such an attention, and restricts its ``kv_b_proj`` to this rank's
    heads during the call. Arguments are those of :class:`StandIn`."""

    def enter(self, arguments: dict[str, Any]) -> dict[str, Any]:
        module, (rank, size, _) = self.module, self.member
        heads, each = module.num_heads, module.qk_nope_head_dim + module.v_head_dim
        begin, end, _, _ = torch.ops.deepsp.head_split(heads, heads, size, rank)
        rows = slice(begin * each, end * each)
        self.replace(module.kv_b_proj, "forward", partial(_by_rows, module.kv_b_proj, rows))
        return {}

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None,
        pattern: Ranges,
        is_causal: bool,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Attend from query [B, S_r, H, D] to key and value [B, S, h, D]; return
        [B, S_r, H, Dv]."""
        (rank, size, name), heads, ops = self.member, query.size(2), torch.ops.deepsp
        check_keys(self.module, key.size(1), sum(self.lens))
        (query,) = ops.seq_to_heads([query], self.lens, rank, name)
        out = sdpa(
            query,
            key,
            value,
            is_causal=is_causal,
            scale=scale,
            where=(heads, size, rank),
            documents=pattern.documents,
            window_size=pattern.window_size,
            softcap=softcap,
            sinks=sinks,
        )
        return ops.heads_to_seq([out], [heads], self.lens, rank, name)[0]


def _by_rows(layer: nn.Linear, rows: slice, x: Tensor) -> Tensor:
    bias = None if layer.bias is None else layer.bias[rows]
    return F.linear(x, layer.weight[rows], bias)
