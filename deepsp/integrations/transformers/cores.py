"""transformers' own attention implementations, for the full sequence of some heads."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from deepsp.integrations.transformers.indexers import Keys, Rows
from deepsp.integrations.transformers.masks import Masks, ours


def check_core(core: str) -> None:
    """Raises unless ``core`` is "auto" or an implementation that can compute attention."""
    from transformers import AttentionInterface

    names = sorted(set(AttentionInterface._global_mapping) - ours())
    names = ["auto", *(name for name in names if not name.startswith("paged|"))]
    if core not in names:
        raise ValueError(f"expected core to be one of {names}, got {core!r}")


_OF_LAYERS = {"position_ids", "dropout", "scaling", "is_causal"}
_OF_LAYERS |= {"sliding_window", "softcap", "s_aux"}
"""Arguments of an implementation that deepsp's attention passes in any case."""


def required_by(name: str) -> frozenset[str]:
    """The further arguments of the implementation ``name`` that a model's call must have, such as
    TRL's of a tree of prefixes. They are of the full sequence."""
    from transformers import AttentionInterface

    function = AttentionInterface._global_mapping.get(name, check_core)
    parameters = inspect.signature(function).parameters.values()
    required = (p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty)
    return frozenset(required) - _OF_LAYERS


class Core:
    """A local attention (:class:`deepsp.DistributedAttention`, layout "bhsd") by the implementation
    ``name`` of transformers."""

    def __init__(self, name: str, module: nn.Module, masks: Masks, arguments: dict[str, Any]):
        from transformers import AttentionInterface

        self.function = AttentionInterface._global_mapping[name]
        self.name, self.module, self.masks, self.arguments = name, module, masks, arguments
        self.taken = _declared(self.function)
        # The mask also contains causality and the window.
        refused = [n for n in ("softcap", "s_aux") if n in arguments and n not in self.taken]
        if arguments["dropout"] > 0 and "dropout" not in self.taken:
            refused.append("dropout")
        if refused:
            raise ValueError(
                f"expected no {refused[0]} in {type(module).__name__}, got one: {name!r} doesn't "
                "take it; register with another core, such as 'auto'"
            )

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, head_indices: Tensor) -> Tensor:
        arguments = {n: x for n, x in self.arguments.items() if n in self.taken}
        if "s_aux" in arguments:
            arguments["s_aux"] = arguments["s_aux"][head_indices]
        mask = self.masks.mask_for(self.name, q, self.module.config)
        if isinstance(mask, Tensor) and mask.dim() == 4 and mask.size(1) > 1:
            mask = mask[:, head_indices]
        seen = _Seen(self.module, q.size(1) // k.size(1))
        out = self.function(seen, q, k, v, mask, position_ids=self.masks.positions, **arguments)[0]
        return out.transpose(1, 2)


def attend_to_chosen(
    name: str,
    keys: Keys,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Rows | Tensor,
    arguments: dict[str, Any],
) -> Tensor:
    """Attend from local queries to all keys, [B, H, S, D] each, by the implementation ``name``,
    which gets the indexer's choice."""
    if not isinstance(mask, Rows):
        raise ValueError(
            f"expected core 'auto' with {type(keys.module).__name__}, which writes the indexer's "
            f"choice into its mask, got {name!r}; register without core"
        )
    from transformers import AttentionInterface

    function = AttentionInterface._global_mapping[name]
    taken, arguments = _declared(function), {n: x for n, x in arguments.items() if x is not None}
    missing = [n for n in arguments if n not in taken and n not in ("dropout", "scaling")]
    if missing:
        raise ValueError(
            f"expected a core that takes {missing[0]} with {type(keys.module).__name__}, which "
            f"needs it, got {name!r}; register with core='auto'"
        )
    mask = keys.sequence.rows(keys.first, keys.count, query.device, implementation=name)
    how = {n: x for n, x in arguments.items() if n in taken}
    return function(keys.module, query, key, value, mask, position_ids=keys.positions, **how)[0]


class _Seen:
    """An attention layer with another number of query heads for each kv head: this rank's."""

    def __init__(self, module: nn.Module, groups: int):
        self.__dict__.update(_module=module, num_key_value_groups=groups)

    def __getattr__(self, name: str):
        return getattr(self._module, name)


def _declared(function: Callable) -> set[str]:
    parameters = inspect.signature(function).parameters.values()
    return {p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
