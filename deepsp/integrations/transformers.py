"""``attn_implementation="deepsp"`` for transformers' models, each rank with its tokens only.

A model of transformers runs as it is on this rank's part of a batch (:func:`deepsp.shard_batch`);
only its attention sees the whole sequence. transformers (5; tried with 5.23) has two registers for
that, and an entry in each is all the process-wide state there is here:

- the attention interface: what a model's attention layer calls with q, k and v;
- the mask interface: what a model calls once a forward for each kind of mask, with a function of
  the tokens' indices and the padding mask. Ours can't make a mask there: the model knows this
  rank's tokens only. It returns a :class:`_Masks`, which the model hands on to its attention layers
  as it would a mask. The first that gets it exchanges lengths and positions over the group, and has
  transformers itself make the mask of the whole sequence; the others find it there, and so does a
  checkpoint's second forward, which thus communicates no more than attention itself.

So a mask can't be dropped, nor be one rank's: attention that gets none refuses.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from deepsp.attention import distributed_attention
from deepsp.groups import Group, Member, member_of, on_all_ranks

_ELSEWHERE = {
    "num_items_in_batch", "output_hidden_states", "output_router_logits", "return_dict",
    "shift_labels", "cache_position",
}  # fmt: skip
"""Arguments of a model's forward that reach its attention, and mean nothing there."""


def register(group: Group = None, chunks: int = 1, name: str = "deepsp") -> None:
    """Makes ``attn_implementation=name`` (or ``model.set_attn_implementation(name)``) attention
    over sequences that are sharded over ``group``.

    Args:
        group: the sequence group; None: the default group at the time of a forward.
        chunks: as in :func:`deepsp.distributed_attention`.
        name: under which models find it; another one for each further group. Again with the same
            name: replaces what was there, also for models that have it already.

    The model gets this rank's ``input_ids`` and ``position_ids`` and the whole ``attention_mask``,
    as :func:`deepsp.shard_batch` returns them, at least one token on every rank, and no ``labels``:
    its own loss would be that of this rank's tokens. Ranks may hold different numbers of tokens.
    The result is this rank's part of what one process computes with ``"sdpa"``: causal or not,
    with grouped heads, sliding windows or chunks, padding ([B, S], or a mask [B, 1, S, S]), and
    documents in one row that restart ``position_ids`` (in causal attention without
    ``attention_mask``, as there). Any mask other than causal needs memory for S x S bools.

    Raises (the model's forward):
        ValueError: what can't be right: ``position_ids`` that start from 0 on every rank (left out,
            or documents that all end where a rank's tokens do); ``attention_mask`` of this rank's
            tokens only; a cache; masks made of a model's own functions; attention with sinks,
            softcap, relative biases or other arguments; cross-attention of other lengths; models
            that don't make masks by the mask interface or don't pass on ``position_ids``.
    """
    import transformers
    from transformers import masking_utils

    if "q_length" not in inspect.signature(masking_utils.sdpa_mask).parameters:
        raise RuntimeError(
            f"transformers {transformers.__version__} makes masks in another way than 5, for which "
            "this is written; install transformers 5"
        )
    if chunks < 1:
        raise ValueError(f"chunks is {chunks}; at least 1 is right")
    member = None if group is None else member_of(group)
    transformers.AttentionInterface.register(
        name, functools.partial(_attention, member=member, chunks=chunks)
    )
    transformers.AttentionMaskInterface.register(name, _Masks)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: _Masks | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    position_ids: Tensor | None = None,
    *,
    member: Member | None,
    chunks: int,
    **kwargs,
) -> tuple[Tensor, None]:
    """What transformers calls: query [B, Hq, S_r, D], key and value [B, Hkv, S_r, D] to
    [B, S_r, Hq, D]."""
    _check_arguments(module, kwargs)
    if isinstance(attention_mask, Tensor):
        # A mask [B, 1, S, S] of the user's, which transformers passes on. (Asked again by each
        # layer how long the ranks' parts are: nothing of ours has gone through the model.)
        masks = _Masks(query.size(0), query.size(2), query.size(2), given=attention_mask)
    elif isinstance(attention_mask, _Masks):
        masks = attention_mask
    else:
        raise ValueError(
            f"attention_mask of {type(module).__name__} is {attention_mask!r}: this model doesn't "
            "make its masks by transformers' mask interface, so what they mean for a sharded "
            "sequence isn't known; deepsp.DistributedAttention in a layer of your own is right"
        )
    if masks.seq_lens is None:  # the first layer's
        masks.exchange(query, key, position_ids, member_of(member))
    length = sum(masks.seq_lens)
    window = masks.local_size
    windowed = sliding_window is not None and sliding_window < length and masks.given is None
    if windowed and window != sliding_window:
        raise ValueError(
            f"sliding_window of {type(module).__name__} is {sliding_window}, but its mask has "
            f"{'none' if window is None else f'one of {window}'}; the same is right"
        )
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    out = distributed_attention(
        *(x.transpose(1, 2) for x in (query, key, value)),
        attn_mask=masks.whole,
        dropout_p=dropout,
        # As "sdpa": no mask is made where this says the same.
        is_causal=bool(is_causal) and masks.whole is None and length > 1,
        scale=scaling,
        enable_gqa=query.size(1) != key.size(1),
        group=member_of(member),
        seq_lens=masks.seq_lens,
        chunks=chunks,
    )
    return out, None


def _check_arguments(module: nn.Module, arguments: dict[str, Any]) -> None:
    for name, value in arguments.items():
        if value is None or value is False or name in _ELSEWHERE:
            continue
        if name == "use_cache":
            raise ValueError(
                "use_cache is True: a cache would hold this rank's tokens only; set "
                "model.config.use_cache = False"
            )
        said = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise ValueError(
            f"{name} of {type(module).__name__} is {said}: attention over a sharded sequence "
            "doesn't know it; a model (or a call of it) without it is right"
        )


class _Masks:
    """One kind of mask of one forward: what the model asks for of its own tokens, and, from the
    first attention layer on, what that is for the whole sequence.

    Called as transformers calls a mask function of its own. ``given``: the whole mask, made by the
    user.
    """

    seq_lens: list[int] | None = None
    whole: Tensor | None = None

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
                f"past_key_values has {int(q_offset)} tokens: a cache would hold this rank's "
                "tokens only; leave it out, and set model.config.use_cache = False"
            )
        self.batch_size, self.padding, self.local_size = batch_size, attention_mask, local_size
        self.given, self.pattern = given, mask_function
        # What transformers says where a mask is its own pattern and padding, and may be left out.
        self.causal, self.bidirectional = allow_is_causal_skip, allow_is_bidirectional_skip
        if given is None and not self.causal and not self.bidirectional:
            # Documents in this rank's own tokens: those of the whole sequence are found later.
            self.pattern = None if use_vmap else _without_documents(mask_function)
            self.causal = True
            if self.pattern is None:
                raise ValueError(
                    "the model's mask is more than causal attention, a window, padding and "
                    "documents: what its functions mean for a sharded sequence isn't known; pass a "
                    "whole attention_mask of shape [B, 1, S, S]"
                )

    @torch.compiler.disable  # what follows isn't known before: compiled code breaks here
    def exchange(self, query: Tensor, key: Tensor, positions: Tensor | None, member: Member):
        """Every rank's number of tokens, and the mask of the whole sequence."""
        if positions is None or positions.dim() != 2 or positions.size(1) != query.size(2):
            found = "None" if positions is None else f"of shape {tuple(positions.shape)}"
            raise ValueError(
                f"position_ids that reach the model's attention are {found}; those of its "
                f"{query.size(2)} tokens, [B, {query.size(2)}], are right: whether they are the "
                "whole sequence's can't be seen without"
            )
        rank, _, name = member
        width = -1 if self.padding is None else self.padding.size(-1)
        # Compared before anything of those sizes is sent.
        said = [query.size(2), key.size(2), width, positions.size(0)]
        everyone = on_all_ranks(said, member, query.device)
        lens, key_lens, widths, rows = (list(column) for column in zip(*everyone, strict=True))
        length = sum(lens)
        if key_lens != lens:
            raise ValueError(
                f"key has {key_lens} tokens by rank, but query has {lens}; the same are right: "
                "neither a cache nor another sequence can be attended to"
            )
        allowed = {-1} if -1 in widths else {length}
        if set(widths) != allowed:
            raise ValueError(
                "attention_mask has, by rank, "
                f"{[None if w < 0 else w for w in widths]} tokens; the whole sequence's {length} "
                "on every rank, or no mask on any, is right"
            )
        if len(set(rows)) != 1:
            raise ValueError(f"position_ids have {rows} rows by rank; the same are right")
        positions = torch.ops.deepsp.all_gather(positions, 1, lens, "replicated", rank, name)
        _check_positions(positions, lens)
        self.whole = self._whole(length, positions) if self.given is None else self.given
        self.seq_lens = lens

    def _whole(self, length: int, positions: Tensor) -> Tensor | None:
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
    """Raises where each rank's positions, of more than one rank, count its own tokens from 0."""
    own = torch.cat([torch.arange(n, device=positions.device) for n in lens])
    if sum(n > 0 for n in lens) > 1 and bool((positions == own).all()):
        raise ValueError(
            "position_ids count from 0 on every rank, as they do if they are left out; those of "
            "the whole sequence are right: position_ids of deepsp.shard_batch. (Documents that all "
            "end where a rank's tokens do look the same: give them a row each instead)"
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
