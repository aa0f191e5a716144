"""Stand-ins for the cache of transformers' models whose keys travel.

These models write keys into a cache while they are compressed, and continue with the keys that the
cache returns. In a model with deepsp's attention, hooks give each such attention a stand-in that
gathers over the ranks, for one call; a checkpoint's second forward calls the hooks again."""

from __future__ import annotations

import functools
import inspect
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch._compile import _disable_dynamo

from deepsp.integrations.transformers import absorbed, latents
from deepsp.integrations.transformers.arguments import settle
from deepsp.integrations.transformers.compressors import Entries
from deepsp.integrations.transformers.forward import REGISTRATIONS, running
from deepsp.integrations.transformers.indexers import Keys
from deepsp.integrations.transformers.latents import Latents
from deepsp.integrations.transformers.mixers import Sequence
from deepsp.integrations.transformers.stand_in import StandIn
from deepsp.ranks.groups import member_of

_PREPARED = "_deepsp_cache"
"""The attribute of models that :func:`prepare` has searched."""


@functools.cache
def _read_by(cls: type) -> tuple[frozenset[str], tuple[str, ...]]:
    """Return the names that a class's forward reads, and its arguments."""
    forward = inspect.unwrap(cls.forward)
    names = getattr(getattr(forward, "__code__", None), "co_names", ())
    parameters = tuple(inspect.signature(forward).parameters) if "update" in names else ()
    return frozenset(names), parameters[1:]


def _kind_of(module: nn.Module) -> type[StandIn] | None:
    """Return the class of an attention's stand-in; None: it writes no compressed keys."""
    names, arguments = _read_by(type(module))
    if "update" not in names:
        return None
    if "compressor" in names:
        return Entries
    # Layers of some models choose as the layer before did.
    if "indexer" in names and ("prev_topk_indices" in arguments or module.indexer is not None):
        return Keys
    return Latents if {"expand_kv", "kv_a_proj_with_mqa"} <= names else None


def prepare(model: nn.Module) -> None:
    """Register the hooks on a model's attentions that need a stand-in, once."""
    for module in () if hasattr(model, _PREPARED) else model.modules():
        # A model within this one may have been searched.
        if _kind_of(module) is not None and _enter not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_enter, with_kwargs=True)
            module.register_forward_hook(_leave, always_call=True)
    object.__setattr__(model, _PREPARED, True)


def cache_in(module: nn.Module) -> StandIn | None:
    """Return the stand-in of an attention that runs now."""
    if running.caches and running.caches[-1].module is module:
        return running.caches[-1]
    return None


@_disable_dynamo
def _enter(module: nn.Module, args: tuple, kwargs: dict[str, Any]):
    _leave(module)  # after an interrupted call
    registration = REGISTRATIONS.get(module.config._attn_implementation)
    kind, is_check = _kind_of(module), running.forward.is_check
    if registration is None or (is_check and kind is Latents):
        return None
    _, names = _read_by(type(module))
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
            positions = sequence.of_call if positions is None else positions
            lens = sequence.seq_lens
    if kind is Latents:
        kwargs["attention_mask"] = sequence  # settled: attention exchanges nothing again
        if not latents.are_less(module, registration, sequence, member, hidden):
            return (), kwargs
        cache: StandIn = Latents(module, lens, member)
    else:
        cache = kind(module, lens, member, sequence, hidden, positions)
        if not is_check:
            cache.check(registration)
    running.caches.append(cache)
    if kind is Keys and not is_check and absorbed.is_less(cache, registration):
        cache.replace(module, "expand_kv", partial(_keep, cache))
    # transformers 5.24 renamed it.
    name = "cache" if "cache" in names else "past_key_values"
    return (), {**kwargs, **cache.enter(kwargs), name: cache}


def _keep(cache: Keys, latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    cache.latents = latent, rotated
    return absorbed.unexpanded(cache.module, latent)


def _leave(module: nn.Module, *_) -> None:
    while (cache := cache_in(module)) is not None:
        running.caches.pop()
        cache.leave()
