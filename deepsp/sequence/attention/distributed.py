"""``scaled_dot_product_attention`` over a sequence that is sharded over a group, as a function."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from deepsp.data.borders import Segments, ranges_of
from deepsp.data.documents import Deal
from deepsp.ranks.groups import Group, Member, member_of
from deepsp.sequence.attention import function, parts
from deepsp.sequence.attention.balance import choose_exchange


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
    layout: str = "bshd",
    *,
    documents: Tensor | Segments | None = None,
    window_size: tuple[int, int] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    kv_chunk: int | None = None,
    query_parts: int | str = "auto",
    deal: Deal | None = None,
    exchange: str = "heads",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """``scaled_dot_product_attention`` over a sequence that is sharded over a group.

    The sharding is that of DeepSpeed-Ulysses (Jacobs et al., 2023, arXiv:2309.14509). If another
    rank has other lengths than ``seq_lens``, ``DEEPSP_DEBUG=1`` and the first call of
    :class:`DistributedAttention` report it, but not this function.

    Args:
        q: [B, S_r, Hq, D], this rank's tokens of all query heads; any number of them, more or fewer
            than ranks. Floating point, any dtype that ``scaled_dot_product_attention`` takes.
        k: [B, S_r, Hkv, D], in the dtype of q.
        v: [B, S_r, Hkv, Dv], in the dtype of q.
        attn_mask: bool, or added to the scores; for the full sequence, broadcastable to [B, Hq,
            S, S].
        dropout_p: the probability of dropping a weight. Masks differ between heads on all ranks,
            and are reproducible from ``torch.manual_seed`` with the same seed on every rank.
            Compiled code then recomputes attention in backward.
        is_causal: a token attends to itself and to the tokens before it in the full sequence.
        scale: of the scores; None: 1/sqrt(D).
        enable_gqa: query head j reads kv head ``j // (Hq // Hkv)``; needed if Hkv != Hq.
        group: the sequence group.
        seq_lens: the number of tokens of each rank, zero included; None: all ranks have as many as
            this one.
        chunks: the number of parts of each rank's heads; while attention works on one, the others
            are exchanged. Each part must leave every rank a query head. If a head's queries are
            split, the queries are cut instead, into at most 2.
        layout: "bshd", as the shapes here, or "sbhd" or "bhsd": the order of batch, sequence, heads
            and head_dim in q, k, v and the result. No layout costs a copy.
        documents: integers, the same on every rank: the documents that are packed into the full
            sequence. Either ``cu_seqlens`` [N + 1], their borders among the B * S tokens, row after
            row; or [N, 2], where each begins and ends, which may leave out tokens (padding). Tokens
            attend to those of their own document; tokens outside of all get 0. No mask is made:
            time and memory depend on the lengths of documents. Or a tree of segments
            (:class:`Segments`, or [N, 3] with parents) that share what they begin with: tokens also
            see those of their ancestors, and windows count positions along this path.
        window_size: (left, right), how many tokens before and after its own each token attends to;
            -1: all of them. With ``is_causal``, right is 0.
        softcap: scores become ``softcap * tanh(score / softcap)`` before the mask (Gemma 2,
            arXiv:2408.00118).
        sinks: [Hq], for each head one more score, whose value is 0 (GPT-OSS). Its gradients are
            partial: those of this rank's heads.
        kv_chunk: sends the keys and values of this many tokens (of the full sequence) at a time and
            merges the results by their log-sum-exp, so that a rank never holds those of the full
            sequence. Backward sends them once more (the idea is FPDT's, arXiv:2408.16978).
        query_parts: whether a head's queries are split over ranks. 1: no; each rank has whole
            heads, some one more than others, and there are at least as many heads as ranks. An int
            R, which divides the number of ranks P: heads are dealt out to groups of P / R ranks,
            and R ranks split each head's queries evenly. "auto": 1 if P divides the number of
            heads; else every rank has the same work (Hq / P heads), with some heads' queries split;
            documents and windows may make it less even. On a GPU it is 1 if there are at least as
            many heads as ranks. Keys and values stay whole. Over a mesh of two dimensions it is the
            size of the first one, so that each row has all heads. :func:`plan_attention` shows
            which rank computes what.
        deal: q, k and v are one row [1, S_r, H, D] of the documents that :func:`deal_documents`
            dealt out, in its order (:meth:`Deal.tokens`). Tokens attend to those of their own
            document; what ranks don't share isn't exchanged. ``seq_lens`` and ``documents`` follow
            from it, and heads' queries are split where a document has more ranks than there are
            heads.
        exchange: "heads": each rank gets all tokens of some heads. "keys": queries stay, and each
            rank gets the keys and values, of all heads, that its queries see: with a window those
            of the window's tokens, with documents none of other documents (in compiled code, where
            borders aren't known, they count as one). That is less where there are few kv heads for
            many ranks, or a short window; but causal attention without a window leaves the last
            rank twice the mean work. ``query_parts`` has no meaning then. Not with ``attn_mask``,
            dropout, ``chunks``, ``kv_chunk`` or ``deal``. "auto": "keys" where the rank that
            receives the most gets fewer bytes by them, and the busiest one has no more than 1.1
            times the work, documents aside; else, and with what "keys" doesn't take, "heads".
            :func:`plan_attention` shows the choice.
        return_lse: returns the log-sum-exp of each query's scores, too. It comes in the exchange of
            the output, and has gradients. What attends to other keys besides is merged by it
            (:func:`merge_attention`).

    Returns:
        [B, S_r, Hq, Dv], contiguous; in the layout "bhsd" a transposed view of that, as
        ``scaled_dot_product_attention`` returns it. With ``return_lse``, a pair of it and the
        log-sum-exp [B, S_r, Hq], in the order of ``layout`` ([B, Hq, S_r] in "bhsd"): float32, or
        float64 for float64; sinks are counted, and where a token sees nothing it is -inf.

    Raises:
        ValueError: arguments that don't fit each other or the group: ``documents``,
            ``window_size``, ``softcap``, ``sinks``, ``kv_chunk``, ``deal`` and ``return_lse`` don't
            combine with ``attn_mask`` or dropout, nor ``kv_chunk`` and ``deal`` with several
            chunks; a tree of segments that isn't causal.
    """
    parts.check_layout(layout)
    member = member_of(group)
    wanted = parts.validate(query_parts, group)
    call = parts.AttentionCall(q, k, v, layout, lens_of(deal, seq_lens, member), member, wanted)
    return attend_over(
        call,
        chunks,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        documents=documents,
        window_size=window_size,
        softcap=softcap,
        sinks=sinks,
        kv_chunk=kv_chunk,
        deal=deal,
        exchange=exchange,
        return_lse=return_lse,
    )


def lens_of(
    deal: Deal | None, seq_lens: Sequence[int] | None, member: Member
) -> Sequence[int] | None:
    """The number of tokens of each rank, as the caller or a deal says.

    Raises:
        ValueError: both say, or the deal is for another number of ranks.
    """
    if deal is None:
        return seq_lens
    if not isinstance(deal, Deal):
        raise ValueError(
            f"expected deal to be what deal_documents returns, got {type(deal).__name__}; of a "
            "fold, pass documents=fold.segments, or deal=fold.deal if there is one"
        )
    if deal.ranks != member[1]:
        raise ValueError(
            f"expected deal to be for the {member[1]} ranks of the group, got one for "
            f"{deal.ranks}; pass deal_documents(lengths, {member[1]})"
        )
    if seq_lens is not None and list(seq_lens) != deal.seq_lens:
        raise ValueError(
            f"expected seq_lens to be left out with deal, which says {deal.seq_lens}, got "
            f"{list(seq_lens)}"
        )
    return deal.seq_lens


def attend_over(
    call: parts.AttentionCall,
    chunks: int,
    attn_mask=None,
    dropout_p=0.0,
    is_causal=False,
    scale=None,
    enable_gqa=False,
    *,
    documents=None,
    window_size=None,
    deal=None,
    exchange="heads",
    return_lse=False,
    **options,
) -> Tensor | tuple[Tensor, Tensor]:
    (rank, _, name), lens = call.member, call.lens
    if exchange == "auto":
        may_be_keys = attn_mask is None and dropout_p == 0 and chunks == 1 and deal is None
        exchange = "heads"
        if may_be_keys and options.get("kv_chunk") is None:
            left, right = window_size or (-1, -1)
            heads = [x.size(call.layout.index("h")) for x in call.qkv]
            function.check_heads(*heads)
            window = (left, 0 if is_causal else right)
            exchange = choose_exchange(*heads[:2], tuple(lens), window, call.query_parts)
    if deal is not None:
        if documents is not None:
            raise ValueError(
                "expected no documents with deal, got some; deal has its own: leave them out"
            )
        if options.get("kv_chunk") is not None:
            raise ValueError(
                f"expected no kv_chunk with deal, got {options['kv_chunk']}; leave it out"
            )
        lens = [n for of_level in deal.lens for n in of_level]
        options["dealt"] = deal.documents(rank)
    else:
        options["query_parts"] = call.query_parts
        if documents is not None:
            documents = ranges_of(documents, call.batch, sum(lens), tree=True)
    draws = function.randomness_of(call.member, call.device) if dropout_p > 0 else nullcontext()
    ops = torch.ops.deepsp
    attend = ops.distributed_attention_with_lse if return_lse else ops.distributed_attention
    with draws:
        return attend(
            *call.qkv,
            attn_mask,
            dropout_p,
            is_causal,
            scale,
            enable_gqa,
            chunks,
            lens,
            rank,
            name,
            layout=call.layout,
            sharded_randomness=torch.compiler.is_compiling(),
            documents=documents,
            window_size=() if window_size is None else window_size,
            exchange=exchange,
            **options,
        )
