"""The attention function for transformers' models."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from deepsp.integrations.transformers import absorbed, caches
from deepsp.integrations.transformers.arguments import check_arguments, check_keys, settle
from deepsp.integrations.transformers.cores import Core, attend_to_chosen
from deepsp.integrations.transformers.forward import Registration
from deepsp.integrations.transformers.indexers import CHOSEN, Keys
from deepsp.integrations.transformers.masks import Masks, Ranges
from deepsp.integrations.transformers.selected import Selected, attend
from deepsp.ranks.groups import member_of
from deepsp.sequence.attention.distributed import distributed_attention
from deepsp.sequence.attention.module import DistributedAttention


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
    cache, core = caches.cache_in(module), registration.core
    if isinstance(cache, Keys):
        keys, chosen = cache, {name: kwargs.pop(name, None) for name in CHOSEN}
        check_arguments(module, kwargs)
        check_keys(module, key.size(2), keys.length)
        if core not in ("auto", "sdpa"):
            more = {"dropout": dropout, "scaling": scaling, "s_aux": s_aux, **chosen}
            return attend_to_chosen(core, keys, query, key, value, attention_mask, more), None
        chosen["has_sinks"] = s_aux is not None
        mask = Selected(keys, attention_mask, query, key.size(2), **chosen)
        if keys.latents is not None:
            return absorbed.attend(query, *keys.latents, mask, scaling, s_aux), None
        return attend(query, key, value, mask, dropout, scaling, s_aux), None
    member = member_of(registration.member)
    own = {name: kwargs.pop(name) for name in registration.required if name in kwargs}
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
            "expected core 'auto' and no dropout with a batch that deal_batch made, or folded "
            f"prefixes, got {core!r} and {dropout}; register with core='auto', and set "
            "attention_dropout to 0"
        )
    if core not in ("auto", "sdpa"):
        more |= {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, **own}
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
            "deal": pattern.deal,
        }
    else:
        mask = masks.mask_for("sdpa", query, module.config)
        arguments = {"attn_mask": mask, "is_causal": causal and mask is None}
        _check_masked(module, core, dropout, masks, softcap, s_aux, kv_chunk)
    qkv = [x.transpose(1, 2) for x in (query, key, value)]
    if cache is not None:  # of this rank's heads only
        return cache.attend(*qkv, scaling, pattern, arguments["is_causal"], softcap, s_aux), None
    out = distributed_attention(
        *qkv,
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
