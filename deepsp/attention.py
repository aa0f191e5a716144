"""Attention over a sequence that is sharded over a group."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from deepsp.groups import Group, member_of
from deepsp.layout import lens_or_equal


def distributed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    group: Group = None,
    seq_lens: Sequence[int] | None = None,
    chunks: int = 1,
) -> Tensor:
    """``scaled_dot_product_attention`` over the whole sequence, of which each rank holds a part.

    Args:
        q: [B, S_r, Hq, D]: this rank's tokens of all query heads, at least as many heads as ranks.
        k: [B, S_r, Hkv, D].
        v: [B, S_r, Hkv, Dv].
        attn_mask: bool or additive, as for the whole sequence: broadcastable to [B, Hq, S, S].
        dropout_p: probability of dropping a weight.
        is_causal: a token attends to itself and the tokens before it, of the whole sequence.
        scale: of the scores; None: 1/sqrt(D).
        enable_gqa: query head j reads kv head ``j // (Hq // Hkv)``; needed where Hkv != Hq.
        group: the sequence group.
        seq_lens: tokens of each rank, zero too; None: all hold as many as this one.
        chunks: into how many parts each rank's heads are cut; while attention works on one, the
            exchange of the others is in flight. At most as many as leave every rank a query head in
            each.

    Returns:
        [B, S_r, Hq, Dv], contiguous.

    Raises:
        ValueError: arguments that don't fit each other or the group.

    The sharding is that of DeepSpeed-Ulysses (Jacobs et al., 2023, arXiv:2309.14509).
    """
    rank, size, name = member_of(group)
    return torch.ops.deepsp.distributed_attention(
        q,
        k,
        v,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        chunks,
        lens_or_equal(seq_lens, q.size(1), size),
        rank,
        name,
    )


class DistributedAttention(nn.Module):
    """Makes a local attention function see all tokens of this rank's heads.

    Args:
        local_attention: called as ``local_attention(q, k, v, *args, **kwargs)`` with
            q [B, S, h, D] and k, v [B, S, h_kv, D] (``h % h_kv == 0``), the whole sequence of some
            heads; returns [B, S, h, Dv]. None: ``scaled_dot_product_attention``, with its
            arguments, as :func:`distributed_attention` takes them.
        group: the sequence group.
        chunks: as in :func:`distributed_attention`; ``local_attention`` is called once a chunk.

    Each call of a local attention returns memory of its own, since what it returned before may
    still be on its way, and doesn't write to k and v, which chunks may share. Under autocast, q, k
    and v travel as they are given.

    Whatever a local attention knows per head (slopes, sinks, a block mask) it takes for this rank's
    heads: :func:`deepsp.local_heads`.
    """

    def __init__(
        self,
        local_attention: Callable[..., Tensor] | None = None,
        group: Group = None,
        chunks: int = 1,
    ):
        super().__init__()
        if chunks < 1:
            raise ValueError(f"chunks is {chunks}; at least 1 is right")
        self.local_attention = local_attention
        self.member = member_of(group)
        self.chunks = chunks

    def extra_repr(self) -> str:
        rank, size, _ = self.member
        return f"rank={rank}, size={size}, chunks={self.chunks}"

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *args,
        seq_lens: Sequence[int] | None = None,
        **kwargs,
    ) -> Tensor:
        """q [B, S_r, Hq, D], k and v [B, S_r, Hkv, D] -> [B, S_r, Hq, Dv]. ``seq_lens``: tokens of
        each rank; None: all hold as many as this one. Anything else goes to the local attention."""
        if self.local_attention is None:
            return distributed_attention(
                q, k, v, *args, group=self.member, seq_lens=seq_lens, chunks=self.chunks, **kwargs
            )
        for x, of in ((q, "q"), (k, "k"), (v, "v")):
            if x.dim() != 4:
                raise ValueError(
                    f"{of} has {x.dim()} dimensions; four are right: [batch, sequence, heads, "
                    "head_dim]"
                )
        if k.size(2) != v.size(2) or k.size(2) == 0 or q.size(2) % k.size(2) != 0:
            raise ValueError(
                f"q, k and v have {q.size(2)}, {k.size(2)} and {v.size(2)} heads; k and v need the "
                "same number, which divides that of q"
            )
        rank, size, name = self.member
        lens = lens_or_equal(seq_lens, q.size(1), size)
        batch, _, num_heads, _ = q.shape
        num_kv_heads = k.size(2)
        shape = ([num_heads, num_kv_heads, v.size(2)], [q.size(3), k.size(3), v.size(3)], batch)

        arriving = torch.ops.deepsp.seq_to_heads_start(
            [q, k, v], lens, self.chunks, False, rank, name
        )
        chunks = len(arriving)  # as many as the heads allow
        leaving, ks, vs = [], [], []
        for chunk in range(chunks):
            q_all, k_all, v_all = torch.ops.deepsp.seq_to_heads_wait(
                arriving[chunk], *shape, lens, chunk, chunks, rank, name
            )
            ks.append(k_all)
            vs.append(v_all)
            k_all, v_all = (
                torch.ops.deepsp.kv_of_chunk(x, num_heads, num_kv_heads, chunk, chunks, rank, size)
                for x in (ks, vs)
            )
            out = self.local_attention(q_all, k_all, v_all, *args, **kwargs)
            if out.dim() != 4 or out.shape[:3] != q_all.shape[:3]:
                raise ValueError(
                    f"local_attention returned shape {tuple(out.shape)}; "
                    f"{tuple(q_all.shape[:3])} and a head dimension is right"
                )
            leaving.append(
                torch.ops.deepsp.heads_to_seq_start(
                    [out], [num_heads], lens, chunk, chunks, rank, name
                )
            )
        return torch.ops.deepsp.heads_to_seq_wait(
            leaving, [num_heads], [out.size(3)], batch, lens, rank, name
        )[0]
