"""Attention over a sequence that is sharded over a group."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack, handle_torch_function

from deepsp import chunks as auto_chunks
from deepsp import local, parts
from deepsp.documents import ranges_of
from deepsp.groups import Group, compare_calls, member_of


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
    documents: Tensor | None = None,
    window_size: tuple[int, int] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    kv_chunk: int | None = None,
    query_parts: int | str = "auto",
) -> Tensor:
    """``scaled_dot_product_attention`` over a sequence that is sharded over a group.

    The sharding is that of DeepSpeed-Ulysses (Jacobs et al., 2023, arXiv:2309.14509). Lengths that
    differ from ``seq_lens`` on another rank are found with ``DEEPSP_DEBUG=1``, and by the first
    call of :class:`DistributedAttention`, but not here.

    Args:
        q: [B, S_r, Hq, D], this rank's tokens of all query heads; any number of them, more or fewer
            than ranks. Floating point, any dtype that ``scaled_dot_product_attention`` takes.
        k: [B, S_r, Hkv, D], in the dtype of q.
        v: [B, S_r, Hkv, Dv], in the dtype of q.
        attn_mask: bool, or added to the scores; that of the full sequence, broadcastable to [B, Hq,
            S, S].
        dropout_p: the probability of dropping a weight. Masks differ between heads on all ranks,
            and follow from ``torch.manual_seed`` if every rank calls it with the same seed.
            Compiled code then computes attention again in backward.
        is_causal: a token attends to itself and to the tokens before it in the full sequence.
        scale: of the scores; None: 1/sqrt(D).
        enable_gqa: query head j reads kv head ``j // (Hq // Hkv)``; needed if Hkv != Hq.
        group: the sequence group.
        seq_lens: the number of tokens of each rank, zero included; None: all ranks have as many as
            this one.
        chunks: the number of parts of each rank's heads; while attention works on one, the others
            are exchanged. At most as many as leave every rank a query head in each. Where ranks
            share heads, parts of its queries instead, at most 2.
        layout: "bshd", as the shapes here, or "sbhd" or "bhsd": the order of batch, sequence, heads
            and head_dim in q, k, v and the result. No layout costs a copy.
        documents: integers, the same on every rank: the documents that are packed into the full
            sequence. Either ``cu_seqlens`` [N + 1], their borders among the B * S tokens, row after
            row; or [N, 2], where each begins and ends, which may leave out tokens (padding). Tokens
            attend to those of their own document; tokens outside of all get 0. Time and memory go
            by the lengths of documents: no mask is made.
        window_size: (left, right), how many tokens before and after its own each token attends to;
            -1: all of them. With ``is_causal``, right is 0.
        softcap: scores become ``softcap * tanh(score / softcap)`` before the mask (Gemma 2,
            arXiv:2408.00118).
        sinks: [Hq], for each head one more score, whose value is 0 (GPT-OSS). Its gradients are
            partial, those of this rank's heads.
        kv_chunk: keys and values are sent and attended to this many tokens (of the full sequence)
            at a time, and merged by their log-sum-exp, so that a rank never holds those of the full
            sequence. Backward has them sent once more (the idea is FPDT's, arXiv:2408.16978).
        query_parts: how ranks share heads. 1: not at all; each rank has whole heads, some one more
            than others, and there are at least as many heads as ranks. An int R, which divides the
            number of ranks P: heads are dealt out to groups of P / R ranks, and R ranks share each
            head's queries evenly. "auto": 1 where P divides the number of heads; else every rank
            has the same share of the work (Hq / P heads), of which some heads' queries are cut;
            documents and windows may make it less even. On a GPU it is 1 wherever there are as many
            heads as ranks. Keys and values stay whole. Over a mesh of two dimensions it is the size
            of the first one, so that each row has all heads. :func:`plan_attention` says who
            computes what.

    Returns:
        [B, S_r, Hq, Dv], contiguous; in the layout "bhsd" a transposed view of that, as
        ``scaled_dot_product_attention`` returns it.

    Raises:
        ValueError: arguments that don't fit each other or the group: ``documents``,
            ``window_size``, ``softcap``, ``sinks`` and ``kv_chunk`` go with neither ``attn_mask``
            nor dropout, and ``kv_chunk`` with one chunk of heads.
    """
    parts.check_layout(layout)
    asked = parts.validate(query_parts, group)
    return _attend(
        parts.Call(q, k, v, layout, seq_lens, member_of(group), asked),
        *(chunks, attn_mask, dropout_p, is_causal, scale, enable_gqa),
        documents=documents,
        window_size=window_size,
        softcap=softcap,
        sinks=sinks,
        kv_chunk=kv_chunk,
    )


def _attend(
    call: parts.Call,
    chunks: int,
    attn_mask=None,
    dropout_p=0.0,
    is_causal=False,
    scale=None,
    enable_gqa=False,
    *,
    documents=None,
    window_size=None,
    **options,
) -> Tensor:
    (rank, _, name), lens = call.member, call.lens
    if documents is not None:
        documents = ranges_of(documents, call.batch, sum(lens))
    draws = local.randomness_of(call.member, call.device) if dropout_p > 0 else nullcontext()
    with draws:
        return torch.ops.deepsp.distributed_attention(
            *(*call.given, attn_mask, dropout_p, is_causal, scale, enable_gqa),
            *(chunks, lens, rank, name),
            layout=call.layout,
            sharded_randomness=torch.compiler.is_compiling(),
            documents=documents,
            window_size=() if window_size is None else window_size,
            query_parts=call.query_parts,
            **options,
        )


def _is_followed() -> bool:
    """Whether the schedule's dry run follows torch functions. Other modes (``torch.device``) are to
    stay on while the user's function runs, so it isn't hidden in one call from them."""
    modes = _get_current_function_mode_stack()
    return any(getattr(mode, "sees_attention_as_one_call", False) for mode in modes)


def _one_call(q, k, v, group_name, call, *seen) -> Tensor:
    """Attention by a function, q, k and v [B, S_r, H, D], as the schedule's dry run sees it;
    ``seen``: what else goes in."""
    if _is_followed():
        return handle_torch_function(_one_call, (), q, k, v, group_name, call, *seen)
    return call(q, k, v)


_one_call.__name__ = "deepsp.DistributedAttention"


class DistributedAttention(nn.Module):
    """Makes a local attention function see all tokens of this rank's heads.

    Args:
        local_attention: called as ``local_attention(q, k, v, *args, **kwargs)`` with q [B, S, h, D]
            and k, v [B, S, h_kv, D] (``h % h_kv == 0``), the full sequence of some heads; returns
            [B, S, h, Dv], or a tuple that begins with it. All in ``layout``. None:
            ``scaled_dot_product_attention``, with its arguments, as in
            :func:`distributed_attention`. If it declares an argument ``head_indices`` (by name:
            ``**kwargs`` declares nothing), it gets the global indices of its query heads there,
            int64 [h]; in ``query_indices`` those of the tokens of its queries, int64 [n]. Who
            declares that gets q [B, n, h, D] where ranks share heads, and masks accordingly; n may
            be 0 in short sequences.
        group: the sequence group.
        chunks: as in :func:`distributed_attention`; ``local_attention`` is called once for each,
            and where ranks share heads once for each range of heads with the same queries. "auto":
            measured on the first call with a shape, by forward and backward passes (forward only
            without gradients) with 1, 2, 4, ... chunks, the same on every rank. Compiled code uses
            the last choice.
        layout: as in :func:`distributed_attention`.
        query_parts: as in :func:`distributed_attention`; "auto" is 1 for a local attention that
            doesn't declare ``query_indices``.

    Raises:
        ValueError: ``chunks`` or ``layout`` isn't one of these, or this process isn't in the group;
            when called, arguments that don't fit each other or the group.

    Each call of a local attention returns new memory, since its last result may still be in flight,
    and doesn't write to k and v, which chunks may share. Under autocast, q, k and v are sent in the
    dtype they have.

    What a local attention knows per head (slopes, sinks) it must take for the heads that it sees:
    ``slopes[head_indices]``. What describes the sequence (``cu_seqlens``, position ids, a block
    mask) is that of the full sequence, the same on every rank. Its random numbers differ by rank
    and follow from ``torch.manual_seed``, as for dropout in :func:`distributed_attention`; in
    compiled code only if it is called within :func:`deepsp.sharded_randomness`.

    The first call compares lengths, shapes, dtypes and what needs a gradient across the group;
    compiled code doesn't.
    """

    def __init__(
        self,
        local_attention: Callable[..., Tensor] | None = None,
        group: Group = None,
        chunks: int | str = 1,
        layout: str = "bshd",
        query_parts: int | str = "auto",
    ):
        super().__init__()
        parts.check_layout(layout)
        local.check_function(
            local_attention,
            layout,
            "q, k and v in that order with layout='bhsd', or no local_attention: that is "
            "scaled_dot_product_attention in any layout",
        )
        auto_chunks.check(chunks)
        self.local_attention = local_attention
        self.member = member_of(group)
        self.chunks = chunks
        self.picked: int | None = None  # what "auto" has found last
        self.layout = layout
        self.query_parts = parts.validate(query_parts, group)
        self._indices = local.indices_wanted(local_attention)
        self._whole = local.why_whole(local_attention, self._indices)
        self._watch = local.Watch(local_attention)
        self._compared = False

    def extra_repr(self) -> str:
        rank, size, _ = self.member
        return (
            f"rank={rank}, size={size}, chunks={self.chunks!r}, layout={self.layout}, "
            f"query_parts={self.query_parts!r}"
        )

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *args,
        seq_lens: Sequence[int] | None = None,
        **kwargs,
    ) -> Tensor:
        """Attention of this rank's tokens.

        Args:
            q: [B, S_r, Hq, D], or as ``layout`` orders it.
            k: [B, S_r, Hkv, D].
            v: [B, S_r, Hkv, Dv].
            args: passed to the local attention, as is ``kwargs``.
            seq_lens: the number of tokens of each rank; None: all ranks have as many as this one.
            kwargs: passed to the local attention.

        Returns:
            [B, S_r, Hq, Dv], or as ``layout`` orders it.

        Raises:
            ValueError: arguments that don't fit each other or the group, or what the local
                attention returns.
        """
        call = parts.Call(
            *(q, k, v, self.layout, seq_lens, self.member, self.query_parts, self._whole)
        )
        if not self._compared and not torch.compiler.is_compiling():
            self._compare(call)
        if self.local_attention is None:
            known = ("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
            local.check_sdpa_arguments(args, kwargs, known, (*local.PATTERN, "kv_chunk"))
        local.check_kwargs(self._indices, kwargs)
        chunks = self.chunks
        if chunks == "auto":  # with kv_chunk, tokens come in parts, not heads
            streams = self.local_attention is None and kwargs.get("kv_chunk") is not None
            chunks = 1 if streams else self._pick_chunks(call, args, kwargs)
        return self._attend(call, chunks, args, kwargs)

    def _attend(self, call: parts.Call, chunks: int, args, kwargs) -> Tensor:
        if self.local_attention is None:
            return _attend(call, chunks, *args, **kwargs)
        run = functools.partial(self._by_function, call, chunks, args, kwargs)
        qkv, order = call.by_tokens(), parts.ORDERS[self.layout]
        if torch.compiler.is_compiling() or not _is_followed():
            return run(*qkv).permute(order)
        seen = (args, kwargs, list(self.parameters()))
        return _one_call(*qkv, self.member[2], run, *seen).permute(order)

    def _by_function(self, call: parts.Call, chunks: int, args, kwargs, q, k, v) -> Tensor:
        if k.size(2) != v.size(2) or k.size(2) == 0 or q.size(2) % k.size(2) != 0:
            raise ValueError(
                "expected k and v to have the same number of heads, which divides that of q, got "
                f"q, k and v with {q.size(2)}, {k.size(2)} and {v.size(2)} heads"
            )
        (rank, _, name), lens, batch = self.member, call.lens, call.batch
        shape = ([x.size(2) for x in (q, k, v)], [x.size(3) for x in (q, k, v)], batch)
        how = {"query_parts": call.query_parts, "tokens_first": self.layout == "sbhd"}  # in memory

        def attend(part: parts.Part) -> Tensor:
            given = local.indices(self._indices, part.q, part.cell)
            return local.attend(
                *(self.local_attention, (part.q, part.k, part.v), args, kwargs | given),
                *(self._watch, self.layout),
            )

        arriving = torch.ops.deepsp.seq_to_heads_start(
            [q, k, v], lens, chunks, False, rank, name, query_parts=call.query_parts
        )
        with local.randomness_of(self.member, call.device):
            leaving, dim = parts.attend(arriving, attend, shape, lens, self.member, **how)
        return torch.ops.deepsp.heads_to_seq_wait(
            leaving, shape[0][:1], [dim], batch, lens, rank, name, **how
        )[0]

    def _pick_chunks(self, call: parts.Call, args, kwargs) -> int:
        if torch.compiler.is_compiling():
            return auto_chunks.picked_before(self.picked)
        _, size, name = self.member
        trains = any(call.needs_gradient())
        key = (
            "DistributedAttention", name, self.local_attention is None, self.layout,
            tuple(call.lens), *((x.shape, x.dtype) for x in call.given), call.device, trains,
            local.autocasts(call.device),
        )  # fmt: skip
        heads = call.num_heads
        most = torch.ops.deepsp._chunks_in_force(heads, size, heads, call.query_parts)

        def run(chunks: int) -> None:
            again = copy.copy(call)
            again.given = mine = [x.detach().requires_grad_(trains) for x in call.given]
            # Hooks of our own, lest a checkpoint around us counts what is saved here.
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
                y = self._attend(again, chunks, args, kwargs)
            if trains:
                torch.autograd.grad(y, mine, torch.ones_like(y), allow_unused=True)

        self.picked = auto_chunks.pick(key, most, run, self.member, call.device)
        return self.picked

    def _compare(self, call: parts.Call) -> None:
        s = self.layout.index("s")
        self._compared = compare_calls(
            "DistributedAttention",
            self.member,
            call.given[0],
            layout=self.layout,
            seq_lens=call.lens,
            shapes=[[n for d, n in enumerate(x.shape) if d != s] for x in call.given],
            dtype=call.given[0].dtype,
            chunks=self.chunks,
            query_parts=self.query_parts,
            gradients=call.needs_gradient(),
        )
