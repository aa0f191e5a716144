"""Attention of this rank's queries to the keys that an indexer chose among all tokens'."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from deepsp.integrations.transformers.indexers import Keys, Rows


class Selected:
    """The mask of this rank's queries: what the model's mask, and its indexer, let them see.

    Args:
        keys: the call.
        mask: [B, 1, S_r, K]; a tensor, which the model made, is 0 where tokens are seen, or True.
        like: a query, [B, H, S_r, D].
        length: K.
        indices: [B, S_r, k], the tokens that each query sees; those below 0 are none.
        block_indices: [B, H, S_r, k], likewise blocks of tokens, by the indexer's heads.
        has_sinks: whether a first key is seen by all.
    """

    def __init__(
        self,
        keys: Keys,
        mask: Rows | Tensor,
        like: Tensor,
        length: int,
        indices: Tensor | None = None,
        block_indices: Tensor | None = None,
        has_sinks: bool = False,
    ):
        self.keys, self.mask, self.dtype, self.length = keys, mask, like.dtype, length
        self.indices, self.block_indices, self.has_sinks = indices, block_indices, has_sinks

    def seen(self, queries: range) -> int:
        """Return the number of keys, from the first on, that these queries may see."""
        causal = isinstance(self.mask, Rows) and self.mask.is_causal
        # A mask by blocks is added, and padding, which sees nothing, gets the mean of all.
        causal = causal and self.block_indices is None
        return self.keys.first + queries.stop if causal else self.length

    def part(self, queries: range) -> Tensor:
        mask = self._part(queries, self.seen(queries))
        return F.pad(mask, (1, 0), value=mask.dtype == torch.bool) if self.has_sinks else mask

    def _part(self, queries: range, length: int) -> Tensor:
        here, mask = slice(queries.start, queries.stop), self.mask
        if isinstance(mask, Rows):
            mask = mask.part(queries, range(length))
        else:
            mask = mask[:, :, here]
            mask = mask if mask.dtype == torch.bool else mask == 0
        if self.block_indices is not None:
            positions = self.keys.positions.expand(mask.size(0), -1)[:, here]
            blocks = self.block_indices[:, :, here]
            make = self.keys.module.indexer.build_block_mask
            return make(blocks, mask, length, self.dtype, mask.device, positions)
        if self.indices is None:
            return mask
        indices = self.indices[:, here].long()
        indices = indices.masked_fill((indices < 0) | (indices >= length), length)
        chosen = indices.new_zeros(*indices.shape[:2], length + 1, dtype=torch.bool)
        chosen = chosen.scatter_(-1, indices, True)[:, None, :, :length]
        if mask.dtype == torch.bool:
            return mask & chosen
        return mask.masked_fill(~chosen, torch.finfo(mask.dtype).min)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Selected,
    dropout: float,
    scaling: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attend from query [B, H, S_r, D] to key and value [B, Hkv, K, D]; return [B, S_r, H, Dv].
    ``sinks``: [H].

    Queries are computed in parts, so that no mask and no scores [S_r, K] are kept."""
    scaling = query.size(-1) ** -0.5 if scaling is None else scaling
    heads = query.size(1)
    if sinks is not None:
        query, key, value = _with_sinks(query, key, value, sinks / scaling)

    def some(q: Tensor, k: Tensor, v: Tensor, queries: range) -> Tensor:
        length = mask.seen(queries) + mask.has_sinks
        k, v = k[:, :, :length], v[:, :, :length]
        return F.scaled_dot_product_attention(
            q, k, v, mask.part(queries), dropout, scale=scaling, enable_gqa=heads != k.size(1)
        )

    # On CPU, and in masks by heads, all heads have scores.
    by_heads = query.device.type == "cpu" or mask.block_indices is not None
    parts = mask.keys.parts(heads if by_heads else 1)
    return in_parts(some, query, (key, value), parts, dropout > 0).transpose(1, 2)


def in_parts(
    compute: Callable[..., Tensor],
    query: Tensor,
    others: tuple[Tensor, ...],
    parts: list[range],
    draws: bool = False,
) -> Tensor:
    """Compute some queries at a time, and again in backward; return the joined results. One part
    that has all queries isn't computed again.

    Args:
        compute: called with a part of query, the others, and its range; returns [B, H, n, D].
        query: [B, H, S_r, D].
        others: further tensors.
        parts: consecutive ranges of queries, which may be empty.
        draws: whether ``compute`` draws random numbers.
    """
    parts = [part for part in parts if part]
    if len(parts) == 1:
        return compute(query, *others, *parts)
    results = [
        checkpoint(compute, q, *others, part, use_reentrant=False, preserve_rng_state=draws)
        for q, part in zip(query.split([*map(len, parts)], 2), parts, strict=True)
    ]
    return torch.cat(results, 2)


def _with_sinks(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Put a key in front whose score is each head's sink, and whose value is 0. Eight more
    features, which keep kernels' alignment, have the sink in queries and 1 in that key. In 16 bits
    the sink takes three of them, whose sum is as precise as float32."""
    rounded = [sinks.to(query.dtype)]
    for _ in range(2):
        sinks = (sinks - rounded[-1].to(sinks.dtype)).detach()
        rounded.append(sinks.to(query.dtype))
    features = torch.stack(rounded, -1).view(1, -1, 1, 3).expand(*query.shape[:3], 3)
    query = torch.cat([query, F.pad(features, (0, 5))], -1)
    first = F.pad(key.new_ones(*key.shape[:2], 1, 3), (key.size(-1), 5))
    key = torch.cat([first, F.pad(key, (0, 8))], 2)
    return query, key, F.pad(value, (0, 0, 1, 0))
