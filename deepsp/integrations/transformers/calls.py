"""What happens before a model of transformers is called.

A model's attention may never come to us: it has none, computes it itself, or was left on "sdpa".
So in a process in which :func:`register` was called, calls of ``PreTrainedModel`` go through
:func:`_call`, and models that can't take attention of ours say so when they are made. Both are
attributes of that class: ``del PreTrainedModel.__call__`` takes out the first, and putting back the
``__wrapped__`` of ``PreTrainedModel.get_correct_attn_implementation`` the second.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from deepsp import data
from deepsp.integrations.transformers.check import CALLED, CHECKED, check, implementations

_names: set[str] = set()
"""Under which names attention of ours is registered: so that a call finds out soon."""

_KNOWN = {
    "input_ids", "inputs_embeds", "attention_mask", "position_ids", "token_type_ids",
    "num_items_in_batch", "shift_labels", "cache_position",
}  # fmt: skip
"""Tensors that a model may be given: the check knows what becomes of them, or attention does, or
nothing does."""


def install(name: str) -> None:
    """Has calls of all models noticed, and those checked that find their attention under
    ``name``."""
    from transformers import PreTrainedModel

    _names.add(name)
    if PreTrainedModel.__call__ is _call:
        return
    given = PreTrainedModel.get_correct_attn_implementation

    @functools.wraps(given)
    def get_correct_attn_implementation(self, requested_attention, *args, **kwargs):
        # A model asks for it while it is made.
        known = self._supports_attention_backend or self._can_set_attn_implementation()
        if requested_attention in _names and not known:
            raise ValueError(
                f"attn_implementation is {requested_attention!r}, but {type(self).__name__} "
                "computes its attention itself, without the AttentionInterface of transformers; "
                "try the compile pass, torch.compile(backend='deepsp'), with 'sdpa'"
            )
        return given(self, requested_attention, *args, **kwargs)

    PreTrainedModel.__call__ = _call
    PreTrainedModel.get_correct_attn_implementation = get_correct_attn_implementation


def _call(self, *args, **kwargs):
    name = self.config._attn_implementation
    of_parts = [getattr(self.config, key, None) for key in self.config.sub_configs]
    if name in _names or any(c is not None and c._attn_implementation in _names for c in of_parts):
        # Compiled code breaks off here once, and attention breaks it off anyway.
        if getattr(self, CHECKED, None) != name:
            _first(self)
        if getattr(self, CALLED, False):
            _check_arguments(self, args, kwargs)
    elif not torch.compiler.is_compiling():
        check_alone(self, _given(self, args, kwargs))
    return nn.Module.__call__(self, *args, **kwargs)


def ensure_checked(model: nn.Module) -> None:
    """Checks a model now if its first forward would."""
    if _names and getattr(model, CHECKED, None) != model.config._attn_implementation:
        _first(model)


@torch.compiler.disable
def _first(model: nn.Module) -> None:
    if implementations(model) and not any(p.is_meta for p in model.parameters()):
        check(model)


def _given(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    # Compiled code can't ask; what is passed by place there is input_ids.
    ask = len(args) > 0 and not torch.compiler.is_compiling()
    names = inspect.signature(model.forward).parameters if ask else ("input_ids",)
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _check_arguments(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    given = _given(model, args, kwargs)
    of = type(model).__name__
    if given.get("labels") is not None:
        raise ValueError(
            f"expected no labels in the call of {of}, whose loss would be that of this rank's "
            "tokens only; leave labels out, and use deepsp.cross_entropy(logits, shift_labels) "
            "with the shift_labels that deepsp.shard_batch returns"
        )
    if given.get("use_cache"):
        raise ValueError(
            "expected use_cache to be False, got True: a cache would hold this rank's tokens only; "
            "set model.config.use_cache = False for training, or call "
            "model.set_attn_implementation('sdpa') for generate()"
        )
    if given.get("output_router_logits"):
        raise ValueError(
            "expected output_router_logits to be False, got True: aux_loss would be that of this "
            "rank's tokens only; leave it out"
        )
    if given.get("logits_to_keep"):
        raise ValueError(
            "expected no logits_to_keep, since the last tokens of this rank are not those of the "
            "sequence; leave it out, or call model.set_attn_implementation('sdpa') for generate()"
        )
    for name, value in given.items():
        if isinstance(value, Tensor) and name not in _KNOWN:
            raise ValueError(
                f"expected no {name} in the call of {of}, got shape {tuple(value.shape)}: {of} was "
                "checked to work on each token alone without it. Put other modalities into "
                "inputs_embeds before deepsp.shard_batch"
            )


def check_alone(model: nn.Module, given: dict[str, Any]) -> None:
    """Raises where a model whose attention isn't ours is given one rank's tokens."""
    tokens = (given.get(name) for name in ("input_ids", "inputs_embeds"))
    if any(map(data.is_handed_out, tokens)) and not implementations(model):
        from deepsp.attention import DistributedAttention
        from deepsp.layer import SequenceParallelAttention
        from deepsp.weights.rows import shards_of

        ours = (DistributedAttention, SequenceParallelAttention)
        if any(isinstance(m, ours) or shards_of(m) for m in model.modules()):
            return
        raise ValueError(
            f"attention of {type(model).__name__} is {model.config._attn_implementation!r}, but it "
            "is called with the tokens that deepsp.shard_batch gave this rank, so each rank would "
            "attend to its own tokens only; call model.set_attn_implementation("
            f"{min(_names, default='deepsp')!r})"
        )
