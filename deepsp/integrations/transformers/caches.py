"""What attentions of transformers' models get in the place of a cache, so that keys travel.

Models write keys into the cache that they are given while they are compressed, and go on with what
the cache returns. So an attention that does gets one that gathers over the ranks: hooks put it into
the attention's call, also into a checkpoint's second one, and only in a model with deepsp's
attention."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn
from torch._compile import _disable_dynamo

from deepsp.integrations.transformers import latents
from deepsp.integrations.transformers.arguments import settle
from deepsp.integrations.transformers.compressors import Entries
from deepsp.integrations.transformers.forward import REGISTRATIONS, running
from deepsp.integrations.transformers.indexers import Keys
from deepsp.integrations.transformers.latents import Latents
from deepsp.integrations.transformers.mixers import Sequence
from deepsp.ranks.groups import member_of

_PREPARED = "_deepsp_cache"
"""The attribute of attentions that have hooks."""


def _kind_of(module: nn.Module) -> type | None:
    """What an attention gets as its cache; None: it isn't one that writes compressed keys."""
    forward = inspect.unwrap(type(module).forward)
    names = set(getattr(getattr(forward, "__code__", None), "co_names", ()))
    if "update" not in names:
        return None
    if "compressor" in names:
        return Entries
    # Layers of some models choose as the layer before did.
    shares = "prev_topk_indices" in inspect.signature(forward).parameters
    if "indexer" in names and (shares or module.indexer is not None):
        return Keys
    return Latents if {"expand_kv", "kv_a_proj_with_mqa"} <= names else None


def prepare(model: nn.Module) -> None:
    """Gives those attentions of a model hooks."""
    for module in model.modules():
        if not hasattr(module, _PREPARED) and _kind_of(module) is not None:
            module.register_forward_pre_hook(_enter, with_kwargs=True)
            module.register_forward_hook(_leave, always_call=True)
            object.__setattr__(module, _PREPARED, True)


def cache_in(module: nn.Module) -> Keys | Latents | None:
    """What an attention that runs has as its cache."""
    if running.caches and running.caches[-1].module is module:
        return running.caches[-1]
    return None


@_disable_dynamo
def _enter(module: nn.Module, args: tuple, kwargs: dict[str, Any]):
    registration = REGISTRATIONS.get(module.config._attn_implementation)
    kind, is_check = _kind_of(module), running.forward.is_check
    if registration is None or (is_check and kind is Latents):
        return None
    names = [*inspect.signature(inspect.unwrap(type(module).forward)).parameters][1:]
    kwargs = {**dict(zip(names, args, strict=False)), **kwargs}
    hidden, sequence = kwargs["hidden_states"], kwargs.get("attention_mask")
    positions = kwargs.get("position_ids")
    if isinstance(positions, Tensor) and positions.dim() != 2:
        positions = None  # of several axes: the mask knows the tokens' places
    member, lens = None, [hidden.size(1)]
    if not is_check:
        member = member_of(registration.member)
        if isinstance(sequence, Sequence):
            sequence.exchange(hidden)
            lens = sequence.lens
        else:
            sequence = settle(module, hidden[:, None], sequence, positions, member)
            positions, lens = (
                sequence.of_call if positions is None else positions,
                sequence.seq_lens,
            )
    if kind is Latents:
        if not latents.are_less(module, registration, sequence, member, hidden):
            return None
        cache = Latents(module, lens, member)
    else:
        cache = kind(module, sequence, lens, member, hidden, positions)
        if not is_check:
            cache.check(registration)
    running.caches.append(cache)
    return (), {**kwargs, **cache.enter(kwargs)}


def _leave(module: nn.Module, args: tuple, output: Any) -> None:
    if (cache := cache_in(module)) is not None:
        running.caches.pop()
        cache.leave()
