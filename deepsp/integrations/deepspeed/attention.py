"""deepsp's attention with the signature of ``deepspeed.sequence.layer.DistributedAttention``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from deepsp.ranks.groups import Group
from deepsp.ranks.lengths import check_four
from deepsp.sequence.attention import module
from deepsp.sequence.attention.function import check_function


class DistributedAttention(nn.Module):
    """:class:`deepsp.DistributedAttention` with the signature of DeepSpeed 0.19's class (Jacobs et
    al., 2023, arXiv:2309.14509): change only the import.

    Unlike DeepSpeed's, it supports any number of heads that is at least the number of ranks, any
    number of kv heads, and backward in both layouts.

    Args:
        local_attention: called as ``local_attention(query, key, value, *args, **kwargs)`` with the
            full sequence of some heads, [B, S, h, D] or [S, B, h, D] as in the call, kv heads not
            repeated; returns the query's shape (D may differ). Its inputs are strided: use reshape,
            not view. A module's parameters are under ``local_attn`` in a ``state_dict``, as in
            DeepSpeed.
        sequence_process_group: the sequence group.
        scatter_idx: the dimension of heads: 2.
        gather_idx: the dimension of the sequence, 0 or 1; ``batch_dim_idx`` decides in each call,
            as in DeepSpeed.
        sp_stream: None. deepsp doesn't wait for other streams; :func:`deepsp.distributed_attention`
            hides the exchange without one, with ``chunks``.
        num_kv_heads: the number of heads of key and value, or None.

    Raises:
        ValueError: any other ``scatter_idx``, ``gather_idx`` or ``sp_stream``; ``local_attention``
            can't be called.
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
                "expected local_attention to be a function or module that takes query, key and "
                f"value, got {local_attention!r}"
            )
        for layout in ("bshd", "sbhd"):
            check_function(
                local_attention, layout, "a function that transposes q, k, v and the output"
            )
        if scatter_idx != 2:
            raise ValueError(
                f"expected scatter_idx to be 2, the dimension of heads, got {scatter_idx}"
            )
        if gather_idx not in (0, 1):
            raise ValueError(
                f"expected gather_idx to be 0 or 1, the dimension of the sequence, got {gather_idx}"
            )
        if sp_stream is not None:
            raise ValueError(
                f"expected sp_stream to be None, got {sp_stream!r}; deepsp doesn't wait for "
                "tensors of another stream"
            )
        self.local_attn = local_attention
        self.num_kv_heads = num_kv_heads
        self._by_batch_dim = [  # in a list, so that they aren't submodules
            module.DistributedAttention(self._attend, sequence_process_group, layout=layout)
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
        """Attention of this rank's tokens; every rank has equally many.

        Args:
            query: [B, S_r, Hq, D] (``batch_dim_idx`` 0) or [S_r, B, Hq, D] (1).
            key: [B, S_r, Hkv, D] or [S_r, B, Hkv, D].
            value: like ``key``.
            batch_dim_idx: the dimension of the batch, 0 or 1.
            rotary_pos_emb: cosine and sine for the full sequence, for the first R <= D channels of
                a head, whose halves are pairs. As in DeepSpeed, dimensions 0 and 1 are swapped: [1,
                S, 1, R] if the sequence comes first in the query, [S, 1, 1, R] if the batch does.
            args: passed to the local attention.
            kwargs: passed to the local attention.

        Returns:
            A contiguous tensor in the query's layout.

        Raises:
            ValueError: shapes that don't fit each other or the group.
        """
        if batch_dim_idx not in (0, 1):
            raise ValueError(f"expected batch_dim_idx to be 0 or 1, got {batch_dim_idx!r}")
        distributed = self._by_batch_dim[batch_dim_idx]
        check_four({"query": query, "key": key, "value": value}, distributed.layout)
        ranks = distributed.member[1]
        if query.size(2) < ranks:
            raise ValueError(
                f"expected query to have at least {ranks} heads, one for each rank, got "
                f"{query.size(2)}; use fewer ranks, or deepsp.distributed_attention, whose ranks "
                "can share a head"
            )
        if self.num_kv_heads not in (None, key.size(2)):
            raise ValueError(
                f"expected key to have num_kv_heads ({self.num_kv_heads}) heads, got {key.size(2)}"
            )
        rotary = None
        if rotary_pos_emb is not None:
            length = query.size(1 - batch_dim_idx) * ranks
            rotary = self._rotary(rotary_pos_emb, batch_dim_idx, length, query.size(3))
        return distributed(query, key, value, rotary, args, kwargs)

    def _attend(self, q, k, v, rotary, args, kwargs) -> Tensor:
        if rotary is not None:
            q, k = (_rotated(x, *rotary) for x in (q, k))
        return self.local_attn(q, k, v, *args, **kwargs)

    @staticmethod
    def _rotary(
        angles: Sequence[Tensor], batch_dim_idx: int, length: int, head_dim: int
    ) -> list[Tensor]:
        rotary = []
        for x, name in zip(angles, ("cosine", "sine"), strict=True):
            right = [1, length, 1] if batch_dim_idx == 1 else [length, 1, 1]
            fits = x.dim() == 4 and list(x.shape[:3]) == right
            if not fits or x.size(3) % 2 != 0 or not 0 < x.size(3) <= head_dim:
                raise ValueError(
                    f"expected {name} of rotary_pos_emb to have shape "
                    f"({', '.join(map(str, right))}, R), for the full sequence and an even R of at "
                    f"most {head_dim} "
                    f"(batch_dim_idx is {batch_dim_idx}), got {tuple(x.shape)}"
                )
            rotary.append(x.transpose(0, 1))
        return rotary


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned, passed = x.split([cos.size(3), x.size(3) - cos.size(3)], 3)
    a, b = turned.chunk(2, 3)
    turned = turned * cos + torch.cat([-b, a], 3) * sin
    return torch.cat([turned, passed], 3).type_as(x)
