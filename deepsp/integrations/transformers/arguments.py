"""The sequence that a layer's tokens belong to, from the arguments that it passes to attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from deepsp.data.documents import Deal
from deepsp.integrations.transformers.forward import running
from deepsp.integrations.transformers.masks import Masks
from deepsp.ranks.groups import Member

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


def check_keys(module: nn.Module, count: int, expected: int) -> None:
    """Raises unless an attention whose keys travel has those of all ranks."""
    if count != expected:
        raise ValueError(
            f"expected {type(module).__name__} to attend to {expected} keys, those that its cache "
            f"returned, got {count}: it doesn't use its cache as transformers' own models do; use "
            "deepsp.DistributedAttention(function, exchange='keys') in a layer of your own"
        )


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
    check_arguments(module, arguments)
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


def check_arguments(module: nn.Module, arguments: dict[str, Any]) -> None:
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
