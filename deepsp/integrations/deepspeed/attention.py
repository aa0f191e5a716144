"""``deepspeed.sequence.layer.DistributedAttention``, as its callers call it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

import deepsp.attention
from deepsp.groups import Group
from deepsp.local import check_four


class DistributedAttention(nn.Module):
    """:class:`deepsp.DistributedAttention` with the signature of DeepSpeed 0.19's class (Jacobs
    et al., 2023, arXiv:2309.14509): change the import, and nothing else.

    Args:
        local_attention: called as ``local_attention(query, key, value, *args, **kwargs)`` with the
            whole sequence of some heads, [B, S, h, D] or [S, B, h, D] as they came in, kv heads by
            themselves; returns the query's shape (D may differ). What it gets is strided: it
            reshapes, where it would take views of contiguous tensors. A module stays where its
            parameters were in a ``state_dict``: under ``local_attn``.
        sequence_process_group: the sequence group.
        scatter_idx: the dimension of heads: 2.
        gather_idx: 0 or 1. Which one it is, ``batch_dim_idx`` says, call by call (as there).
        sp_stream: None. Streams of yours aren't waited for; :func:`deepsp.distributed_attention`
            hides the exchange without one, with ``chunks``.
        num_kv_heads: None, or the heads of key and value.

    Raises:
        ValueError: any other ``scatter_idx``, ``gather_idx`` or ``sp_stream``.

    Unlike DeepSpeed's, any number of heads, and of kv heads, from the number of ranks and one kv
    head on, is right, and backward is in both layouts.
    """

    def __init__(
        self,
        local_attention: Callable[..., Tensor],
        sequence_process_group: Group,
        scatter_idx: int = 2,
        gather_idx: int = 0,
        sp_stream=None,
        num_kv_heads: int | None = None,
    ):
        super().__init__()
        if not callable(local_attention):
            raise ValueError(
                f"local_attention is {local_attention!r}; a function or module that takes query, "
                "key and value is right"
            )
        if scatter_idx != 2:
            raise ValueError(f"scatter_idx is {scatter_idx}; 2, the dimension of heads, is right")
        if gather_idx not in (0, 1):
            raise ValueError(
                f"gather_idx is {gather_idx}; the sequence's dimension, 0 or 1, is right"
            )
        if sp_stream is not None:
            raise ValueError(
                f"sp_stream is {sp_stream!r}; None is right: tensors that another stream makes "
                "aren't waited for here"
            )
        self.local_attn = local_attention
        self.num_kv_heads = num_kv_heads
        self._by_batch_dim = [  # they hold nothing: no modules of this one
            deepsp.attention.DistributedAttention(
                self._attend, sequence_process_group, layout=layout
            )
            for layout in ("bshd", "sbhd")
        ]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        batch_dim_idx: int,
        rotary_pos_emb: Sequence[Tensor] | None = None,
        *args,
        **kwargs,
    ) -> Tensor:
        """This rank's query [B, S_r, Hq, D], key and value [B, S_r, Hkv, D] (``batch_dim_idx`` 0),
        or [S_r, B, ...] (1), as many tokens on every rank, to a contiguous tensor of the query's
        layout.

        ``rotary_pos_emb``: cosine and sine for the whole sequence, the first R <= D channels of a
        head, their halves paired; as DeepSpeed takes them, with dimensions 0 and 1 swapped: [1, S,
        1, R] if the sequence comes first in the query, [S, 1, 1, R] if the batch does. All else
        goes to the local attention."""
        if batch_dim_idx not in (0, 1):
            raise ValueError(f"batch_dim_idx is {batch_dim_idx!r}; 0 or 1 is right")
        distributed = self._by_batch_dim[batch_dim_idx]
        for x, of in ((query, "query"), (key, "key"), (value, "value")):
            check_four(x, of, distributed.layout)
        if self.num_kv_heads not in (None, key.size(2)):
            raise ValueError(
                f"key has {key.size(2)} heads, but num_kv_heads is {self.num_kv_heads}; the same "
                "is right"
            )
        rotary = None
        if rotary_pos_emb is not None:
            length = query.size(1 - batch_dim_idx) * distributed.member[1]
            rotary = self._rotary(rotary_pos_emb, batch_dim_idx, length, query.size(3))
        return distributed(query, key, value, rotary, args, kwargs)

    def _attend(self, q, k, v, rotary, args, kwargs) -> Tensor:
        if rotary is not None:
            q, k = (_rotated(x, *rotary) for x in (q, k))
        return self.local_attn(q, k, v, *args, **kwargs)

    @staticmethod
    def _rotary(
        given: Sequence[Tensor], batch_dim_idx: int, length: int, head_dim: int
    ) -> list[Tensor]:
        rotary = []
        for x, of in zip(given, ("cosine", "sine"), strict=True):
            right = [1, length, 1] if batch_dim_idx == 1 else [length, 1, 1]
            fits = x.dim() == 4 and list(x.shape[:3]) == right
            if not fits or x.size(3) % 2 != 0 or not 0 < x.size(3) <= head_dim:
                raise ValueError(
                    f"rotary_pos_emb's {of} has shape {tuple(x.shape)}; "
                    f"({', '.join(map(str, right))}, R), with an even R of at most {head_dim}, is "
                    f"right: the whole sequence's, with batch_dim_idx {batch_dim_idx}"
                )
            rotary.append(x.transpose(0, 1))
        return rotary


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned, passed = x.split([cos.size(3), x.size(3) - cos.size(3)], 3)
    a, b = turned.chunk(2, 3)
    turned = turned * cos + torch.cat([-b, a], 3) * sin
    return torch.cat([turned, passed], 3).type_as(x)
