"""Multi-head latent attention without an indexer (DeepSeek V3, Kimi, MiniCPM3): queries and outputs
are exchanged by heads, and the latents that keys and values are made from are gathered; each rank
makes those of its heads."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from deepsp.integrations.transformers.forward import Registration
from deepsp.integrations.transformers.masks import Masks, Ranges
from deepsp.ranks.groups import Member
from deepsp.sequence.attention.function import sdpa
from deepsp.sequence.attention.parts import by_tiles, resolve


def are_less(
    module: nn.Module, registration: Registration, masks: Masks, member: Member, hidden: Tensor
) -> bool:
    """Whether an attention's latents travel: they are fewer numbers than its keys and values, and
    one linear layer makes these of them. ``hidden``: [B, S_r, D]."""
    size, heads, made = member[1], module.num_heads, module.kv_b_proj
    plain = registration.core in ("auto", "sdpa") and registration.chunks == 1
    if not plain or registration.kv_chunk is not None or masks.deal is not None:
        return False
    if masks.ranges is None or (module.training and getattr(module, "attention_dropout", 0) > 0):
        return False
    if type(made) is not nn.Linear or "forward" in vars(made) or isinstance(made.weight, DTensor):
        return False  # adapters and quantization make all heads at once
    if resolve(registration.query_parts, heads, size, by_tiles(hidden.device, hidden.dtype)) != 1:
        return False
    latent = module.kv_lora_rank + module.qk_rope_head_dim
    expanded = heads * (module.qk_nope_head_dim + module.qk_rope_head_dim + module.v_head_dim)
    return size > 1 and heads >= size and latent * size < expanded


class Latents:
    """What such an attention gets in the place of a cache, in one call.

    Args:
        module: the attention.
        lens: the number of tokens of each rank.
        member: the sequence group.
    """

    def __init__(self, module: nn.Module, lens: list[int], member: Member):
        self.module, self.lens, self.member = module, lens, member
        rank, size, _ = member
        begin, end, _, _ = torch.ops.deepsp.head_split(
            module.num_heads, module.num_heads, size, rank
        )
        each = module.qk_nope_head_dim + module.v_head_dim
        self.rows = slice(begin * each, end * each)
        """Those of this rank's heads."""

    def update(self, latent: Tensor, rotated: Tensor, layer_idx: int, *_, **__):
        """[B, 1, S_r, D] to [B, 1, S, D], in one message."""
        rank, _, name = self.member
        both = torch.cat([latent, rotated], -1)
        both = torch.ops.deepsp.all_gather(both, 2, self.lens, "partial", rank, name)
        return both.split([latent.size(-1), rotated.size(-1)], -1)

    def enter(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Makes the module's linear layer that of this rank's heads, for this call. ``arguments``:
        of the call. Returns those that change."""
        made = self.module.kv_b_proj
        vars(made)["forward"] = partial(self._made, made)
        return {"cache": self}

    def leave(self) -> None:
        vars(self.module.kv_b_proj).pop("forward", None)

    def _made(self, made: nn.Linear, x: Tensor) -> Tensor:
        bias = None if made.bias is None else made.bias[self.rows]
        return F.linear(x, made.weight[self.rows], bias)

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
        """query [B, S_r, H, D], key and value [B, S, h, D] to [B, S_r, H, Dv]."""
        (rank, size, name), heads, ops = self.member, query.size(2), torch.ops.deepsp
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
