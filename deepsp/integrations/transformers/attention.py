"""The attention function for transformers' models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from deepsp.data.documents import Deal
from deepsp.integrations.transformers import indexers
from deepsp.integrations.transformers.cores import Core, core_of_chosen
from deepsp.integrations.transformers.forward import Registration, running
from deepsp.integrations.transformers.masks import Masks, Ranges
from deepsp.integrations.transformers.selected import Selected, attend
from deepsp.ranks.groups import Member, member_of
from deepsp.sequence.attention.distributed import distributed_attention
from deepsp.sequence.attention.module import DistributedAttention

COUNTS_OTHERWISE = "_deepsp_counts_otherwise"
"""The attribute of modules whose model makes other position_ids than 0, 1, 2, ..."""

_ELSEWHERE = {
    "labels",
    "logits_to_keep",
    "num_items_in_batch",
    "output_hidden_states",
    "output_router_logits",
    "return_dict",
    "shift_labels",
    "cache_position",
}
"""Arguments of a model's forward that reach its attention without a meaning there."""


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Masks | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    position_ids: Tensor | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    *,
    registration: Registration,
    **kwargs,
) -> tuple[Tensor, None]:
    """Called by transformers: query [B, Hq, S_r, D], key and value [B, Hkv, S_r, D] to [B, S_r, Hq,
    D]."""
    keys, core = indexers.keys_in(module), registration.core
    if keys is not None:
        chosen = {name: kwargs.pop(name, None) for name in indexers.CHOSEN}
        _check_arguments(module, kwargs)
        if core not in ("auto", "sdpa"):
            more = {"dropout": dropout, "scaling": scaling, "s_aux": s_aux, **chosen}
            return core_of_chosen(core, keys, query, key, value, more), None
        mask = Selected(keys, attention_mask, query, key.size(2), **chosen)
        return attend(query, key, value, mask, dropout, scaling, s_aux), None
    member = member_of(registration.member)
    masks = settle(module, query, attention_mask, position_ids, member, kwargs, key)
    chunks, query_parts = registration.chunks, registration.query_parts
    kv_chunk = registration.kv_chunk
    length = sum(masks.seq_lens)
    window = masks.local_size
    windowed = sliding_window is not None and sliding_window < length
    built = masks.user_mask is None and not masks.full
    if built and windowed and window != sliding_window:
        raise ValueError(
            f"expected sliding_window of {type(module).__name__} to be that of its mask "
            f"({window}), got {sliding_window}"
        )
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    more = {"softcap": softcap, "s_aux": s_aux, "sliding_window": sliding_window}
    if masks.deal is not None and (core != "auto" or dropout > 0):
        raise ValueError(
            f"expected core 'auto' and no dropout with a batch that deal_batch made, got {core!r} "
            f"and {dropout}; register with core='auto', and set attention_dropout to 0"
        )
    if core not in ("auto", "sdpa"):
        more |= {"dropout": dropout, "scaling": scaling, "is_causal": is_causal}
        call = Core(core, module, masks, {n: x for n, x in more.items() if x is not None})
        wrapped = DistributedAttention(call, member, chunks, "bhsd", query_parts)
        wrapped._compared = True  # masks.exchange compared
        out = wrapped(query, key, value, seq_lens=masks.seq_lens)
        return out.transpose(1, 2), None
    pattern = masks.ranges
    causal = bool(is_causal) and length > 1
    if core == "auto" and pattern is not None and (dropout == 0 or _is_plain(pattern, more)):
        # As in "sdpa": without a mask, the layer says whether attention is causal.
        plain = pattern.documents is None and pattern.window_size is None
        arguments = {
            "is_causal": causal if plain else pattern.is_causal,
            "documents": pattern.documents,
            "window_size": pattern.window_size,
            "softcap": softcap,
            "sinks": s_aux,
            "kv_chunk": kv_chunk,
            "deal": masks.deal,
        }
    else:
        mask = masks.mask_for("sdpa", query, module.config)
        arguments = {"attn_mask": mask, "is_causal": causal and mask is None}
        _check_masked(module, core, dropout, masks, softcap, s_aux, kv_chunk)
    out = distributed_attention(
        *(x.transpose(1, 2) for x in (query, key, value)),
        dropout_p=dropout,
        scale=scaling,
        enable_gqa=query.size(1) != key.size(1),
        group=member,
        seq_lens=masks.seq_lens,
        chunks=chunks,
        query_parts=query_parts,
        **arguments,
    )
    return out, None


def _is_plain(pattern: Ranges, more: dict[str, Any]) -> bool:
    """Whether scaled_dot_product_attention can compute it without a mask."""
    none = pattern.documents is None and pattern.window_size is None
    return none and more["softcap"] is None and more["s_aux"] is None


def _check_masked(module, core, dropout, masks, softcap, s_aux, kv_chunk) -> None:
    """Raises for arguments that only attention by blocks takes, with a full mask or dropout."""
    named = {"softcap": softcap, "s_aux": s_aux, "kv_chunk": kv_chunk}
    for name, value in named.items():
        if value is None:
            continue
        if core == "sdpa":
            why = "scaled_dot_product_attention doesn't take it; register with core='auto'"
        elif dropout > 0:
            why = f"dropout ({dropout}) isn't supported with it; set attention_dropout to 0"
        else:
            why = (
                "a mask that isn't causal attention, a window, documents and padding at the ends "
                "of rows isn't supported with it; pass position_ids and a padding mask [B, S]"
            )
        raise ValueError(f"expected no {name} in {type(module).__name__}, got one: {why}")


def settle(
    module: nn.Module,
    query: Tensor,
    attention_mask: Masks | Tensor | None,
    position_ids: Tensor | None,
    member: Member,
    arguments: dict[str, Any] | None = None,
    key: Tensor | None = None,
) -> Masks:
    """The model's mask, with the lengths and positions of all ranks, which the first layer
    exchanges. ``query``: [B, ..., S_r, D]."""
    masks, positions = masks_of(module, query, attention_mask, position_ids, arguments or {})
    if masks.seq_lens is None:
        parts = masks.exchange(query, query if key is None else key, positions, member)
        _check_rope(module, parts)
        if not masks.has_own_positions:
            _check_count(module, parts, masks.deal)
    return masks


def masks_of(
    module: nn.Module,
    query: Tensor,
    attention_mask: Masks | Tensor | None,
    position_ids: Tensor | None,
    arguments: dict[str, Any],
) -> tuple[Masks, Tensor]:
    """The model's mask and positions, from the arguments that its layer passes to attention.

    Raises:
        ValueError: this rank alone can see that it isn't attention over a sharded sequence.
    """
    if running.forward.door is not None:
        raise ValueError(
            f"expected an attention of transformers in {type(module).__name__}, which encodes "
            "images or sounds in full, got deepsp's; call model.set_attn_implementation("
            "{'text_config': 'deepsp'}), which leaves the other parts of the model as they are"
        )
    _check_arguments(module, arguments)
    if isinstance(attention_mask, Tensor):
        # The user's mask [B, 1, S, S], passed on by transformers. Each layer exchanges lengths
        # again, since nothing of deepsp's is passed through the model.
        masks = Masks(query.size(0), query.size(2), query.size(2), user_mask=attention_mask)
    elif isinstance(attention_mask, Masks):
        masks = attention_mask
    else:
        raise ValueError(
            "expected an attention_mask made by the mask interface of transformers, got "
            f"{attention_mask!r} in {type(module).__name__}: its meaning for a sharded sequence "
            "isn't known; use deepsp.DistributedAttention in a layer of your own"
        )
    position_ids = masks.of_call if position_ids is None else position_ids
    if masks.seq_lens is None and (
        position_ids is None or position_ids.dim() != 2 or position_ids.size(1) != query.size(2)
    ):
        got = "None" if position_ids is None else f"of shape {tuple(position_ids.shape)}"
        raise ValueError(
            f"expected the position_ids that reach the model's attention ({type(module).__name__}) "
            f"to be those of its {query.size(2)} tokens, [B, {query.size(2)}], got {got}; they "
            "show which tokens of the full sequence this rank has"
        )
    return masks, position_ids


def _check_rope(module: nn.Module, positions: list[Tensor]) -> None:
    """Raises if rotary embeddings are scaled by the length that a rank sees. ``positions``: by
    rank."""
    config = getattr(module, "config", None)
    parameters = getattr(config, "rope_parameters", None)
    for rope in [parameters, *parameters.values()] if isinstance(parameters, dict) else []:
        kind = rope.get("rope_type") if isinstance(rope, dict) else None
        if not isinstance(kind, str) or ("dynamic" not in kind and kind != "longrope"):
            continue
        longest = [int(x.max()) + 1 for x in positions if x.numel() > 0]
        border = rope.get("original_max_position_embeddings") or config.max_position_embeddings
        # Above the border, "dynamic" depends on the length itself.
        if kind == "longrope":
            differ = len({n > border for n in longest}) > 1
        else:
            differ = max(longest) > border and len(set(longest)) > 1
        if differ:
            raise ValueError(
                f"rope_type of {type(module).__name__} is {kind!r}, which scales by the sequence "
                f"length above {border} positions, but the ranks see positions up to "
                f"{[n - 1 for n in longest]} only; use sequences of at most {border} tokens, or "
                "another rope_type ('yarn', 'llama3', 'linear')"
            )


def _check_count(module: nn.Module, positions: list[Tensor], deal: Deal | None) -> None:
    """Raises if ``position_ids`` are 0, 1, 2, ... but the model's own count differently."""
    if not getattr(module, COUNTS_OTHERWISE, False):
        return
    full = torch.cat(list(positions), 1)
    counts = deal is None and bool((full == torch.arange(full.size(1), device=full.device)).all())
    if counts or (deal is not None and deal.makes_positions):
        maker = "deepsp.shard_batch" if deal is None else "deepsp.deal_batch"
        raise ValueError(
            f"position_ids are 0, 1, 2, ..., as {maker} makes them, but the model of "
            f"{type(module).__name__} by itself counts otherwise (from another number, or by "
            "attention_mask); put the position_ids of the full sequence into the batch before "
            f"{maker}"
        )


def _check_arguments(module: nn.Module, arguments: dict[str, Any]) -> None:
    for name, value in arguments.items():
        if value is None or value is False or name in _ELSEWHERE:
            continue
        if name == "use_cache":
            raise ValueError(
                "expected use_cache to be False, got True: a cache would hold this rank's tokens "
                "only; set model.config.use_cache = False"
            )
        got = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise ValueError(
            f"expected no {name} in {type(module).__name__}, got {got}: attention over a sharded "
            f"sequence doesn't support it; use a model (or a call) without {name}"
        )
