"""Masks of the full sequence, from what a model asks for of this rank's tokens."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch import Tensor

from deepsp import data
from deepsp.groups import Member, on_all_ranks


class Masks:
    """One kind of mask of one forward: what the model asks for of its own tokens, and, from the
    first attention layer on, what that is for the full sequence.

    Called as transformers calls a mask function of its own. ``given``: the full mask, made by the
    user.
    """

    seq_lens: list[int] | None = None
    full: Tensor | None = None

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
        given: Tensor | None = None,
        **_,
    ):
        if int(q_offset) != 0 or int(kv_offset) != 0:
            raise ValueError(
                f"expected no past_key_values, got {int(q_offset)} tokens: a cache would hold this "
                "rank's tokens only; leave it out, and set model.config.use_cache = False"
            )
        self.batch_size, self.padding, self.local_size = batch_size, attention_mask, local_size
        self.given, self.pattern = given, mask_function
        # What transformers says where a mask is its own pattern and padding, and may be left out.
        self.causal, self.bidirectional = allow_is_causal_skip, allow_is_bidirectional_skip
        if given is None and not self.causal and not self.bidirectional:
            # Documents in this rank's own tokens: those of the full sequence are found later.
            self.pattern = None if use_vmap else _without_documents(mask_function)
            self.causal = True
            if self.pattern is None:
                raise ValueError(
                    "expected a mask of causal attention, a window, padding and documents, got "
                    "other mask functions, whose meaning for a sharded sequence isn't known; pass "
                    "a full attention_mask of shape [B, 1, S, S]"
                )

    @torch.compiler.disable  # what follows isn't known before: compiled code breaks here
    def exchange(self, query: Tensor, key: Tensor, positions: Tensor, member: Member):
        """Finds every rank's number of tokens, and the mask of the full sequence. Returns every
        rank's positions."""
        rank, _, name = member
        width = -1 if self.padding is None else self.padding.size(-1)
        # Compared before anything of those sizes is sent.
        known = int(data.are_handed_out(positions))
        said = [query.size(2), key.size(2), width, positions.size(0), known]
        everyone = on_all_ranks(said, member, query.device)
        lens, key_lens, widths, rows, made = map(list, zip(*everyone, strict=True))
        length = sum(lens)
        if key_lens != lens:
            raise ValueError(
                f"expected key to have as many tokens as query ({lens}, by rank), got {key_lens}; "
                "neither a cache nor another sequence can be attended to"
            )
        allowed = {-1} if -1 in widths else {length}
        if set(widths) != allowed:
            raise ValueError(
                f"expected attention_mask of the full sequence, {length} tokens, on every rank, or "
                f"on none, got {[None if w < 0 else w for w in widths]} by rank"
            )
        if len(set(rows)) != 1:
            raise ValueError(
                f"expected position_ids to have as many rows on every rank, got {rows} by rank"
            )
        positions = torch.ops.deepsp.all_gather(positions, 1, lens, "replicated", rank, name)
        if not all(made):
            _check_positions(positions, lens)
        self.full = self._full(length, positions) if self.given is None else self.given
        self.seq_lens = lens
        return positions.split(lens, 1)

    def _full(self, length: int, positions: Tensor) -> Tensor | None:
        """[B, 1, S, S], or None where causal attention, or attention to all, is meant."""
        from transformers import masking_utils

        pattern, documents = self.pattern, None
        if self.causal and self.padding is None:
            documents = masking_utils.find_packed_sequence_indices(positions)
        if documents is not None:
            pattern = masking_utils.packed_sequence_compatibility_function(
                pattern, *(x.expand(self.batch_size, -1) for x in (positions, documents))
            )
        return masking_utils.sdpa_mask(
            self.batch_size,
            length,
            length,
            mask_function=pattern,
            attention_mask=self.padding,
            local_size=self.local_size,
            allow_is_causal_skip=self.causal and documents is None,
            allow_is_bidirectional_skip=self.bidirectional,
            device=positions.device,
        )


def _check_positions(positions: Tensor, lens: list[int]) -> None:
    """Raises where each rank's positions, of more than one rank, count its own tokens from 0.
    Where shard_batch has made them, documents do."""
    own = torch.cat([torch.arange(n, device=positions.device) for n in lens])
    if sum(n > 0 for n in lens) > 1 and bool((positions == own).all()):
        raise ValueError(
            "expected position_ids of the full sequence, but they count from 0 on every rank, as "
            "they do if they are left out; pass the position_ids of deepsp.shard_batch. (Documents "
            "that all end where a rank's tokens do look the same: put each in a row of its own)"
        )


def _without_documents(mask_function: Callable) -> Callable | None:
    """The pattern that transformers made a mask of a rank's documents from (by
    ``packed_sequence_compatibility_function``); None if ``mask_function`` isn't one."""
    from transformers import masking_utils

    # Compared with one of the same make: there is no other way to ask.
    like = masking_utils.packed_sequence_compatibility_function(lambda: None, None, None)
    if mask_function.__code__ is not like.__code__:
        return None
    made = [inspect.getclosurevars(f).nonlocals["mask_functions"] for f in (mask_function, like)]
    if [f.__code__ for f in made[0]] != [f.__code__ for f in made[1]]:
        return None
    return inspect.getclosurevars(made[0][1]).nonlocals["mask_function"]
