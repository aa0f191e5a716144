"""Masks of the full sequence, from a model's mask for this rank's tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from deepsp.data import last_batch
from deepsp.data.documents import Deal
from deepsp.data.fold import Fold
from deepsp.data.same_batch import carried, compare_carried
from deepsp.integrations.transformers.forward import running
from deepsp.integrations.transformers.patterns import (
    document_ranges,
    pattern_of,
    with_documents,
    without_documents,
)
from deepsp.ranks.groups import Member, on_all_ranks


@dataclass(frozen=True)
class Ranges:
    """A mask as :func:`deepsp.distributed_attention` takes it: whether it is causal, documents and
    a window, or how documents were dealt out."""

    is_causal: bool
    documents: Tensor | None
    window_size: tuple[int, int] | None
    deal: Deal | None = None


class Masks:
    """One kind of mask of one forward: the model's arguments for its own tokens, and, from the
    first attention layer on, the mask of the full sequence.

    transformers calls it like its own mask functions. ``user_mask``: the user's full mask.
    """

    seq_lens: list[int] | None = None
    ranges: Ranges | None = None
    """None if only a full mask can express it."""
    positions: Tensor
    """The positions of the full sequence."""
    of_call: Tensor | None
    """The model's own position_ids, where its layers don't pass them on."""
    full: bool
    """Whether ``pattern`` is the mask of the full sequence, apart from padding."""

    def __init__(
        self,
        batch_size: int,
        q_length: int,
        kv_length: int,
        q_offset: int | Tensor = 0,
        kv_offset: int = 0,
        mask_function: Callable | None = None,
        attention_mask: Tensor | None = None,
        local_size: int | None = None,
        allow_is_causal_skip: bool = False,
        allow_is_bidirectional_skip: bool = False,
        use_vmap: bool = False,
        user_mask: Tensor | None = None,
        **_,
    ):
        if int(q_offset) != 0 or int(kv_offset) != 0:
            raise ValueError(
                f"expected no past_key_values, got {int(q_offset)} tokens: a cache would hold this "
                "rank's tokens only; leave it out, and set model.config.use_cache = False"
            )
        self.batch_size, self.padding, self.local_size = batch_size, attention_mask, local_size
        self.user_mask, self.pattern = user_mask, mask_function
        call = running.forward
        self.of_call, self.deal = call.positions, call.deal
        self.has_own_positions = call.has_own_positions
        if self.deal is not None and self._hides_nothing(q_length):
            self.padding = None
        if self.deal is not None and (self.padding is not None or user_mask is not None):
            raise ValueError(
                "expected no attention_mask with a batch that deal_batch or fold made, which has "
                "no padding, got one; leave it out"
            )
        # transformers sets these if the mask is this pattern plus padding, and may be left out.
        self.causal, self.bidirectional = allow_is_causal_skip, allow_is_bidirectional_skip
        self.full, self.use_vmap = False, use_vmap
        if user_mask is None and not self.causal and not self.bidirectional:
            # Documents among this rank's tokens; those of the full sequence are found later.
            pattern = None if use_vmap else without_documents(mask_function)
            known = None if use_vmap else pattern_of(mask_function)
            if pattern is not None:
                self.pattern, self.causal = pattern, True
            elif known is not None:  # which a model doesn't let be left out: its indexer reads it
                self.causal = known.right == 0
            elif call.door is not None:
                self.full = True  # made before the decoder: by indices of the full sequence
            else:
                raise ValueError(
                    "expected a mask of causal attention, a window, padding and documents, got "
                    "other mask functions, whose meaning for a sharded sequence isn't known; pass "
                    "a full attention_mask of shape [B, 1, S, S]"
                )

    def _hides_nothing(self, length: int) -> bool:
        """Whether the padding is that of a rank's tokens alone, and all ones: models make it
        themselves (BioGpt)."""
        padding = self.padding
        return padding is not None and padding.size(-1) == length and bool(padding.all())

    @_disable_dynamo  # the lengths aren't known before, so compiled code breaks here
    def exchange(self, query: Tensor, key: Tensor, positions: Tensor, member: Member):
        """Finds every rank's number of tokens, and the mask of the full sequence. Returns each
        rank's positions."""
        rank, size, name = member
        if size > 1 and self._hides_nothing(query.size(2)):
            self.padding = None
        width = -1 if self.padding is None else self.padding.size(-1)
        # Compared before tensors of these sizes are sent.
        makes_positions = int(last_batch.has_positions(positions))
        first = last_batch.first_of(positions)
        dealt = 0 if self.deal is None else self.deal.digest
        local = [
            *(query.size(2), key.size(2), width, positions.size(0), makes_positions, first),
            *(carried(member), dealt),
        ]
        everyone = on_all_ranks(local, member, query.device)
        lens, key_lens, widths, rows, makes_positions, firsts, batches, deals = map(
            list, zip(*everyone, strict=True)
        )
        compare_carried(batches, member)
        if len(set(deals)) != 1:
            raise ValueError(
                "expected all ranks to pass the same deal, got different ones; call deal_batch or "
                "fold with the same batch on every rank, and pass all that it returns to the model"
            )
        length = sum(lens)
        if key_lens != lens:
            raise ValueError(
                f"expected key to have as many tokens as query ({lens}, by rank), got {key_lens}; "
                "neither a cache nor another sequence can be attended to"
            )
        check_padding(widths, length)
        if len(set(rows)) != 1:
            raise ValueError(
                f"expected position_ids to have as many rows on every rank, got {rows} by rank"
            )
        if self.deal is not None:
            self._check_deal(lens)
        positions = torch.ops.deepsp.all_gather(positions, 1, lens, "replicated", rank, name)
        self.positions, self.seq_lens, self._by_implementation = positions, lens, {}
        if self.deal is None and not all(makes_positions):
            check_positions(positions, lens)
        counts = count_on(firsts, lens)
        self.ranges = self._ranges(counts) if self.deal is None else self._ranges_of_deal()
        return positions.split(lens, 1)

    def _check_deal(self, lens: list[int]) -> None:
        if lens != self.deal.seq_lens:
            raise ValueError(
                f"expected the ranks to have {self.deal.seq_lens} tokens, as their deal says, got "
                f"{lens}; pass the batch as deal_batch or fold returns it"
            )

    def _ranges_of_deal(self) -> Ranges:
        pattern = pattern_of(self.pattern)
        if pattern is None:
            raise ValueError(
                "expected causal attention, windows or attention to all of a document's tokens "
                "with a deal, got another mask; use shard_batch"
            )
        longest = max(self.deal.lengths, default=0)
        window = pattern.window_size(longest)
        if not isinstance(self.deal, Fold):
            return Ranges(pattern.right == 0, None, window, self.deal)
        if pattern.right != 0 or pattern.chunk is not None:
            raise ValueError(
                "expected causal attention, maybe within a window, with folded prefixes, got "
                "another mask; use shard_batch, or leave fold_prefixes out"
            )
        if self.deal.deal is not None:
            return Ranges(True, None, window, self.deal.deal)
        return Ranges(True, self.deal.segments.documents, window)

    def _ranges(self, counts: bool) -> Ranges | None:
        """``counts``: whether all positions count each row's tokens from 0."""
        if self.user_mask is not None or self.full:
            return None
        pattern = pattern_of(self.pattern)
        if pattern is None:
            return None
        packed = self.causal and self.padding is None
        positions = (
            self.positions
            if packed
            else torch.arange(self.positions.size(1), device=self.positions.device)[None]
        )
        padding = None if self.padding is None or bool(self.padding.all()) else ~self.padding.bool()
        try:
            documents = document_ranges(
                pattern, positions, padding, self.batch_size, counts=counts or not packed
            )
        except LookupError:
            return None
        return Ranges(pattern.right == 0, documents, pattern.window_size(positions.size(1)))

    def mask_for(self, implementation: str, like: Tensor, config) -> Tensor | None:
        """The full mask for an attention implementation of transformers: for "sdpa", [B, 1, S, S],
        or None for causal attention or attention to all."""
        if self.user_mask is not None:
            return self.user_mask
        if implementation not in self._by_implementation:
            self._by_implementation[implementation] = self._make(implementation, like, config)
        return self._by_implementation[implementation]

    def _make(self, implementation: str, like: Tensor, config):
        from transformers import masking_utils

        make = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS._global_mapping.get(implementation)
        if make is None:  # as in transformers: it needs no mask
            return None
        length = self.positions.size(1)
        return make(
            **self._described(range(length), range(length)),
            allow_is_causal_skip=self.causal and not self.is_packed,
            allow_is_bidirectional_skip=self.bidirectional,
            dtype=like.dtype,
            config=config,
            device=like.device,
        )

    def rows(
        self,
        first: int,
        count: int,
        device: torch.device,
        seen: range | None = None,
        implementation: str = "sdpa",
    ) -> Tensor | None:
        """The mask of some queries, [B, 1, count, S], from the ``first`` of the full sequence on,
        for an attention implementation. ``seen``: of these keys only."""
        from transformers import masking_utils

        seen = range(self.positions.size(1)) if seen is None else seen
        if self.user_mask is not None:
            mask = self.user_mask[:, :, :, seen.start : seen.stop]
            return mask if mask.size(2) == 1 else mask[:, :, first : first + count]
        make = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS._global_mapping.get(implementation)
        return make and make(
            **self._described(range(first, first + count), seen),
            allow_is_causal_skip=False,
            device=device,
        )

    @functools.cached_property
    def _documents(self) -> Tensor | None:
        """[B, S]: to which document of its row each token belongs, as transformers finds them."""
        from transformers import masking_utils

        if not self.causal or self.padding is not None or self.user_mask is not None:
            return None
        return masking_utils.find_packed_sequence_indices(self.positions)

    @property
    def is_packed(self) -> bool:
        """Whether rows have several documents; known once ranks have exchanged positions."""
        return self._documents is not None

    def _described(self, queries: range, keys: range) -> dict[str, Any]:
        """The arguments by which transformers' mask functions make the mask."""
        pattern = self.pattern
        if self.is_packed:
            of_rows = (x.expand(self.batch_size, -1) for x in (self.positions, self._documents))
            pattern = with_documents(pattern, *of_rows)
        return {
            "batch_size": self.batch_size,
            "q_length": len(queries),
            "kv_length": len(keys),
            "q_offset": queries.start,
            "kv_offset": keys.start,
            "mask_function": pattern,
            "attention_mask": self.padding,
            "local_size": self.local_size,
            "use_vmap": self.full and self.use_vmap,
        }


def mask_of(*args, **kwargs) -> Masks:
    """What transformers calls to make a mask: one of a model within another, which has made it
    already, is that one."""
    return running.forward.mask or Masks(*args, **kwargs)


def count_on(firsts: list[int], lens: list[int]) -> bool:
    """Whether the ranks' positions, which begin with these, count the full sequence's tokens."""
    return firsts == [sum(lens[:rank]) for rank in range(len(lens))]


def check_padding(widths: list[int], length: int) -> None:
    """Raises unless the padding masks of all ranks have this length, or (-1) no rank has one."""
    if set(widths) not in ({-1}, {length}):
        raise ValueError(
            f"expected attention_mask of the full sequence, {length} tokens, on every rank, or "
            f"on none, got {[None if w < 0 else w for w in widths]} by rank"
        )


def check_positions(positions: Tensor, lens: list[int]) -> None:
    """Raises if the positions count each rank's tokens from 0, on more than one rank. Not called
    for positions of shard_batch: there, documents do so."""
    local = torch.cat([torch.arange(n, device=positions.device) for n in lens])
    if sum(n > 0 for n in lens) > 1 and bool((positions == local).all()):
        raise ValueError(
            "expected position_ids of the full sequence, but they count from 0 on every rank, as "
            "they do if they are left out; pass the position_ids of deepsp.shard_batch. (Documents "
            "that all end where a rank's tokens do look the same: put each in a row of its own)"
        )


def ours() -> set[str]:
    """The names under which deepsp's attention is registered."""
    from transformers import AttentionMaskInterface

    return {n for n, f in AttentionMaskInterface._global_mapping.items() if f is mask_of}
