"""A module around a local attention function, which sees the full sequence of some heads."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack, handle_torch_function

from deepsp.data.documents import Deal
from deepsp.ranks.agreement import compare_calls
from deepsp.ranks.groups import Group, member_of
from deepsp.ranks.lengths import lens_or_equal
from deepsp.sequence.attention import chunks as auto_chunks
from deepsp.sequence.attention import function as local
from deepsp.sequence.attention import parts
from deepsp.sequence.attention.distributed import attend_over, lens_of


def _is_followed() -> bool:
    """Whether the schedule's dry run follows torch functions. Other modes (``torch.device``) must
    see the user's function run, so attention isn't one call for them."""
    modes = _get_current_function_mode_stack()
    return any(getattr(mode, "sees_attention_as_one_call", False) for mode in modes)


def _one_call(q, k, v, group_name, call, *seen) -> Tensor:
    """Attention by a function, as one call for the schedule's dry run; q, k and v are [B, S_r, H,
    D]. ``seen``: its other inputs."""
    if _is_followed():
        return handle_torch_function(_one_call, (), q, k, v, group_name, call, *seen)
    return call(q, k, v)


_one_call.__name__ = "deepsp.DistributedAttention"


class DistributedAttention(nn.Module):
    """Makes a local attention function see all tokens of this rank's heads.

    Args:
        local_attention: called as ``local_attention(q, k, v, *args, **kwargs)`` with q [B, S, h, D]
            and k, v [B, S, h_kv, D] (``h % h_kv == 0``), the full sequence of some heads; returns
            [B, S, h, Dv], or a tuple that begins with it and may have the log-sum-exp of scores,
            [B, h, S], next. All others in ``layout``. None:
            ``scaled_dot_product_attention``, with its arguments, as in
            :func:`distributed_attention`. If it declares an argument ``head_indices`` (by name:
            ``**kwargs`` declares nothing), it gets the global indices of its query heads there,
            int64 [h]; in ``query_indices`` those of the tokens of its queries, int64 [n]. A
            function that declares this gets q [B, n, h, D] if a head's queries are split, and must
            mask accordingly; n may be 0 in short sequences.
        group: the sequence group.
        chunks: as in :func:`distributed_attention`; ``local_attention`` is called once for each,
            and if a head's queries are split, once for each range of heads with the same queries.
            "auto": measured on the first call with a shape, by forward and backward passes (forward
            only without gradients) with 1, 2, 4, ... chunks, the same on every rank. Compiled code
            uses the last choice.
        layout: as in :func:`distributed_attention`.
        query_parts: as in :func:`distributed_attention`; "auto" is 1 for a local attention that
            doesn't declare ``query_indices``.
        exchange: as in :func:`distributed_attention`. With "keys", a local attention gets q [B,
            S_r, Hq, D] of this rank's tokens, and k and v of all tokens, [B, S, ...], whatever
            their heads and features are: they may be what keys and values are made from. It must
            declare ``query_indices``.

    Raises:
        ValueError: ``chunks`` or ``layout`` isn't one of these, or this process isn't in the group;
            when called, arguments that don't fit each other or the group.

    Each call of a local attention must return new memory, since its last result may still be in
    flight, and must not write to k and v, which chunks may share. Under autocast, q, k and v are
    sent in the dtype they have.

    A local attention must index its per-head values (slopes, sinks) by the heads that it sees:
    ``slopes[head_indices]``. Arguments about the sequence (``cu_seqlens``, position ids, a block
    mask) are those of the full sequence, the same on every rank. Its random numbers differ by rank
    and are reproducible from ``torch.manual_seed``, like dropout in :func:`distributed_attention`;
    in compiled code only within :func:`deepsp.sharded_randomness`.

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
        exchange: str = "heads",
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
        self.picked: int | None = None  # the last choice of "auto"
        self.layout = layout
        self.query_parts = parts.validate(query_parts, group)
        self._indices = local.indices_wanted(local_attention)
        self._declares_lse = local_attention is not None and (
            "return_lse" in local.declared_by(local_attention)
        )
        self.exchange = local.check_exchange(exchange, local_attention, self._indices, chunks)
        self._why_whole = local.why_whole(local_attention, self._indices)
        self._watch = local.Watch(local_attention)
        self._compared = False
        self._checked: tuple | None = None  # the sizes of the last plain call

    def extra_repr(self) -> str:
        rank, size, _ = self.member
        return (
            f"rank={rank}, size={size}, chunks={self.chunks!r}, layout={self.layout}, "
            f"query_parts={self.query_parts!r}, exchange={self.exchange!r}"
        )

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *args,
        seq_lens: Sequence[int] | None = None,
        return_lse: bool = False,
        **kwargs,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention of this rank's tokens.

        Args:
            q: [B, S_r, Hq, D], or as ``layout`` orders it.
            k: [B, S_r, Hkv, D].
            v: [B, S_r, Hkv, Dv].
            args: passed to the local attention, as is ``kwargs``.
            seq_lens: the number of tokens of each rank; None: all ranks have as many as this one.
            return_lse: as in :func:`distributed_attention`. A local attention then returns its
                log-sum-exp as the second of its results, as flash_attn and flex_attention do; it
                gets this argument if it declares it.
            kwargs: passed to the local attention. Without one: ``deal`` and the other options of
                :func:`distributed_attention`.

        Returns:
            [B, S_r, Hq, Dv], or as ``layout`` orders it; with ``return_lse``, a pair of it and the
            log-sum-exp, [B, S_r, Hq] in that order.

        Raises:
            ValueError: arguments that don't fit each other or the group, or what the local
                attention returns.
        """
        deal = kwargs.get("deal")
        traced = torch.compiler.is_compiling() or return_lse
        key = None if traced else self._call_key(q, k, v, seq_lens)
        if key is not None and key == self._checked and deal is None:
            return self._at_once(q, k, v, key[-1], args, kwargs)
        if deal is not None and self.local_attention is not None:
            raise ValueError(
                "expected no local_attention with deal, since documents of several lengths are "
                "attended to at once; leave local_attention out"
            )
        lens = lens_of(deal, seq_lens, self.member)
        call = parts.AttentionCall(
            q, k, v, self.layout, lens, self.member, self.query_parts, self._why_whole
        )
        if not self._compared and not torch.compiler.is_compiling():
            self._compare(call, deal, return_lse)
        if self.local_attention is None:
            names = ("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
            rest = (*local.PATTERN, "kv_chunk", "deal")
            local.check_sdpa_arguments(args, kwargs, names, rest)
        local.check_kwargs(self._indices, kwargs)
        if return_lse and self._declares_lse:
            kwargs = kwargs | {"return_lse": True}
        chunks = self.chunks
        if chunks == "auto":  # these cut tokens, not heads
            by_tokens = kwargs.get("kv_chunk") is not None or self.exchange != "heads"
            streams = deal is not None or (self.local_attention is None and by_tokens)
            chunks = 1 if streams else self._pick_chunks(call, args, kwargs)
        if key is not None and self._is_plain(call):
            self._checked = key if self._compared else None
            return self._at_once(q, k, v, key[-1], args, kwargs)
        return self._attend(call, chunks, args, kwargs, return_lse)

    def _is_plain(self, call: parts.AttentionCall) -> bool:
        """Whether a call with a key is of as many whole heads on each rank."""
        heads, kv_heads, v_heads = (x.size(2) for x in call.qkv)
        local.check_heads(heads, kv_heads, v_heads)
        even = heads % self.member[1] == kv_heads % self.member[1] == 0
        return even and call.query_parts == 1

    def _call_key(self, q: Tensor, k: Tensor, v: Tensor, seq_lens) -> tuple | None:
        """What :meth:`_is_plain` and the checks of a call depend on; None where it is traced or
        followed, or isn't one call of a function on [B, S, h, D]."""
        if self.local_attention is None or self._indices or self.chunks != 1:
            return None
        if self.layout != "bshd" or _is_followed():
            return None
        if any(x._has_symbolic_sizes_strides for x in (q, k, v)):
            return None
        size = self.member[1]
        lens = [*q.shape[1:2]] * size if seq_lens is None else lens_or_equal(seq_lens, None, size)
        return self.query_parts, q.shape, k.shape, v.shape, lens

    def _at_once(self, q: Tensor, k: Tensor, v: Tensor, lens: list[int], args, kwargs) -> Tensor:
        """Attention by one exchange each way, without Python between a start and its wait."""
        rank, _, name = self.member
        qkv = torch.ops.deepsp.seq_to_heads.default([q, k, v], lens, rank, name)
        with local.randomness_of(self.member, q.device):
            out = local.attend(self.local_attention, qkv, args, kwargs, self._watch)
        return torch.ops.deepsp.heads_to_seq.default([out], [q.size(2)], lens, rank, name)[0]

    def _attend(self, call: parts.AttentionCall, chunks: int, args, kwargs, return_lse=False):
        if self.local_attention is None:
            how = {"exchange": self.exchange, "return_lse": return_lse}
            return attend_over(call, chunks, *args, **how, **kwargs)
        if self.exchange == "keys":
            run = functools.partial(self._by_keys, call, args, kwargs, return_lse)
        else:
            run = functools.partial(self._by_function, call, chunks, args, kwargs, return_lse)
        qkv, order = call.by_tokens(), parts.ORDERS[self.layout]
        if torch.compiler.is_compiling() or not _is_followed():
            result = run(*qkv)
        else:
            seen = (args, kwargs, list(self.parameters()))
            result = _one_call(*qkv, self.member[2], run, *seen)
        if not return_lse:
            return result.permute(order)
        out, lse = result
        return out.permute(order), lse.permute(order[:3]).contiguous()

    def _by_function(
        self, call: parts.AttentionCall, chunks: int, args, kwargs, return_lse: bool, q, k, v
    ) -> Tensor | tuple[Tensor, Tensor]:
        local.check_heads(*(x.size(2) for x in (q, k, v)))
        (rank, _, name), lens, batch = self.member, call.lens, call.batch
        shape = ([x.size(2) for x in (q, k, v)], [x.size(3) for x in (q, k, v)], batch)
        how = {"query_parts": call.query_parts, "tokens_first": self.layout == "sbhd"}  # in memory

        def attend(part: parts.CellInputs) -> Tensor:
            indices = local.indices(self._indices, part.q, part.cell)
            return local.attend(
                self.local_attention,
                (part.q, part.k, part.v),
                args,
                kwargs | indices,
                self._watch,
                self.layout,
                return_lse=return_lse,
            )

        arriving = torch.ops.deepsp.seq_to_heads_start(
            [q, k, v], lens, chunks, False, rank, name, query_parts=call.query_parts
        )
        with local.randomness_of(self.member, call.device):
            leaving, dim = parts.attend(arriving, attend, shape, lens, self.member, **how)
        (out,) = torch.ops.deepsp.heads_to_seq_wait(
            leaving, shape[0][:1], [dim], batch, lens, rank, name, **how
        )
        return torch.ops.deepsp._split_log_sum(out) if return_lse else out

    def _by_keys(
        self, call: parts.AttentionCall, args, kwargs, return_lse: bool, q, k, v
    ) -> Tensor | tuple[Tensor, Tensor]:
        rank, lens = self.member[0], call.lens
        pair = parts.gather_pair(k.flatten(2), v.flatten(2), 1, lens, self.member)
        first = sum(lens[:rank])
        cell = parts.Cell((0, q.size(2)), ((first, first + lens[rank]),))
        indices = local.indices(self._indices, q, cell)
        k, v = (x.unflatten(2, like.shape[2:]) for x, like in zip(pair, (k, v), strict=True))
        with local.randomness_of(self.member, call.device):
            return local.attend(
                self.local_attention,
                tuple(parts.ordered(x, self.layout) for x in (q, k, v)),
                args,
                kwargs | indices,
                self._watch,
                self.layout,
                return_lse=return_lse,
            )

    def _pick_chunks(self, call: parts.AttentionCall, args, kwargs) -> int:
        if torch.compiler.is_compiling():
            return auto_chunks.picked_before(self.picked)
        _, _, name = self.member
        trains = any(call.needs_gradient())
        key = (
            "DistributedAttention",
            name,
            self.local_attention is None,
            self.layout,
            tuple(call.lens),
            *((x.shape, x.dtype) for x in call.qkv),
            call.device,
            trains,
            local.autocasts(call.device),
        )

        def run(chunks: int, inputs: list[Tensor]) -> Tensor:
            again = copy.copy(call)
            again.qkv = inputs
            return self._attend(again, chunks, args, kwargs)

        self.picked = auto_chunks.pick(
            key,
            run,
            call.qkv,
            (),
            self.member,
            num_heads=call.num_heads,
            query_parts=call.query_parts,
            trains=trains,
        )
        return self.picked

    def _compare(self, call: parts.AttentionCall, deal: Deal | None, return_lse: bool) -> None:
        s = self.layout.index("s")
        self._compared = compare_calls(
            "DistributedAttention",
            self.member,
            call.qkv[0],
            layout=self.layout,
            seq_lens=call.lens,
            shapes=[[n for d, n in enumerate(x.shape) if d != s] for x in call.qkv],
            dtype=call.qkv[0].dtype,
            chunks=self.chunks,
            query_parts=self.query_parts,
            gradients=call.needs_gradient(),
            deal=None if deal is None else deal.digest,
            exchange=self.exchange,
            return_lse=return_lse,
        )
