"""nn.MultiheadAttention with sharded heads."""

from __future__ import annotations

import contextlib

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepsp import collectives
from deepsp.ranks.randomness import sharded_randomness
from deepsp.schedule.swap import Swapped
from deepsp.weights.rows import shards_of


class HeadsSharded(Swapped):
    """Its output is partial and lacks the bias of the output projection."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        batched = query.dim() == 3
        inputs = (query, key, value)
        if not batched:
            inputs = tuple(x.unsqueeze(0) for x in inputs)
        elif not self.batch_first:
            inputs = tuple(x.transpose(0, 1) for x in inputs)
        if is_causal and attn_mask is None:
            raise ValueError("expected attn_mask with is_causal=True, got None; pass the mask, too")
        q, k, v = self._projected(*inputs)
        bias = self._bias(attn_mask, key_padding_mask, q, batched)
        out, weights = self._attend(q, k, v, bias, need_weights)
        out = F.linear(out.transpose(1, 2).flatten(2), self.out_proj.weight)
        if weights is not None:
            weights = self._weights(weights, average_attn_weights)
        if not batched:
            out = out.squeeze(0)
            weights = None if weights is None else weights.squeeze(0)
        elif not self.batch_first:
            out = out.transpose(0, 1)
        return out, weights

    def _projected(self, *inputs: Tensor) -> list[Tensor]:
        """[B, S, E] each -> [B, heads of this rank, S, head_dim]."""
        weights = self.in_proj_weight.chunk(3)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        return [
            F.linear(x, w, b).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for x, w, b in zip(inputs, weights, biases, strict=True)
        ]

    def _bias(self, attn_mask, key_padding_mask, q, batched) -> Tensor | None:
        """The sum of both masks, to add to the scores; broadcasts to [B, heads, S, S]."""
        masks = []
        if attn_mask is not None:
            mask = _additive(attn_mask, q.dtype)
            if mask.dim() == 3:  # [B * all heads, S, S]
                mask = mask.unflatten(0, (q.size(0), -1))
                begin = shards_of(self)["in_proj_weight"].ranges()[0][0] // self.head_dim
                mask = mask.narrow(1, begin, self.num_heads)
            masks.append(mask)
        if key_padding_mask is not None:
            padding = _additive(key_padding_mask, q.dtype)
            padding = padding if batched else padding.unsqueeze(0)
            masks.append(padding[:, None, None, :])
        return sum(masks) if masks else None

    def _attend(self, q, k, v, bias, need_weights) -> tuple[Tensor, Tensor | None]:
        dropout_p = self.dropout if self.training else 0.0
        with self._random(dropout_p):
            if not need_weights:
                out = F.scaled_dot_product_attention(q, k, v, bias, dropout_p)
                return out, None
            scores = q @ k.transpose(-2, -1) / self.head_dim**0.5
            weights = F.dropout(
                torch.softmax(scores if bias is None else scores + bias, -1), dropout_p
            )
            return weights @ v, weights

    def _random(self, dropout_p: float):
        """Ranks have different heads, so they draw different dropout masks."""
        if dropout_p == 0:
            return contextlib.nullcontext()
        return sharded_randomness(shards_of(self)["in_proj_weight"].member)

    def _weights(self, weights: Tensor, average: bool) -> Tensor:
        """The weights of all ranks' heads: [B, S, S] averaged, or [B, all heads, S, S]."""
        shard = shards_of(self)["in_proj_weight"]
        if average:
            total = collectives.all_reduce(weights.sum(1), shard.member, grad="replicated")
            return total / (shard.parts[0] // self.head_dim)
        heads = [shard.part_sizes(r)[0] // self.head_dim for r in range(shard.member[1])]
        return collectives.all_gather(weights, 1, shard.member, heads, grad="replicated")

    def _reset_parameters(self) -> None:
        # The bounds of the full parameters, 3 E x E.
        shard = shards_of(self)["in_proj_weight"]
        bound = (6 / sum(shard.shape)) ** 0.5
        nn.init.uniform_(self.in_proj_weight, -bound, bound)
        bound = self.embed_dim**-0.5
        nn.init.uniform_(self.out_proj.weight, -bound, bound)
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))
