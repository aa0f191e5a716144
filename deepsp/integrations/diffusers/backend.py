"""A backend of diffusers' attention that attends over all ranks' tokens."""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from deepsp.data.sharding import unshard
from deepsp.integrations.diffusers.lengths import Lengths
from deepsp.ranks.groups import Member
from deepsp.sequence.attention.distributed import distributed_attention
from deepsp.sequence.attention.module import DistributedAttention

if TYPE_CHECKING:
    from deepsp.integrations.diffusers.sharding import State


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    _parallel_config: Lengths | None = None,
) -> Tensor:
    """The backend: [B, S_r, H, D], or, without a config, attention to keys in full."""
    if _parallel_config is None:
        return _sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    state = _parallel_config.state
    if is_causal or dropout_p > 0:
        raise ValueError(
            "expected attention without causality and dropout over sharded tokens, which aren't in "
            f"order, got is_causal={is_causal} and dropout_p={dropout_p}; leave them out"
        )
    lens, key_lens = _parallel_config.of([query.size(1), key.size(1)], query)
    rank, _, name = state.member
    heads = attn_mask is not None and attn_mask.dim() == 4 and attn_mask.size(1) > 1
    across = lens != key_lens or heads  # to another sequence, whose keys are sharded, too
    mask = _full_mask(attn_mask, key_lens, state.member, query.size(2) if across else 1)
    enable_gqa = enable_gqa or query.size(2) != key.size(2)
    compute = functools.partial(_computed, state.core, mask=mask, scale=scale, gqa=enable_gqa)
    if across:
        key, value = (
            torch.ops.deepsp.all_gather(x, 1, key_lens, "partial", rank, name) for x in (key, value)
        )
        return compute(query, key, value)
    if state.core != "sdpa":
        options = {**state.options, "query_parts": 1}
        attention = DistributedAttention(lambda q, k, v: compute(q, k, v), state.member, **options)
        attention._compared = True  # the lengths were exchanged, and the model's inputs compared
        return attention(query, key, value, seq_lens=lens)
    return distributed_attention(
        query,
        key,
        value,
        mask,
        scale=scale,
        enable_gqa=enable_gqa,
        group=state.member,
        seq_lens=lens,
        **state.options,
    )


class SdpaOverRanks(TorchFunctionMode):
    """In this context, ``scaled_dot_product_attention`` is attention over all ranks' tokens: for a
    processor that calls it itself."""

    def __init__(self, lengths: Lengths):
        super().__init__()
        self.lengths = lengths

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is not nn.functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        query, key, value, *more = args
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        out = attend(q, k, v, *more, **(kwargs or {}), _parallel_config=self.lengths)
        return out.transpose(1, 2)


def check_core(core: str) -> None:
    """Raises unless ``core`` is "sdpa" or a backend of diffusers."""
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry as Table

    names = ["sdpa", *sorted(name.value for name in Table._backends if name.value != "deepsp")]
    if core not in names:
        raise ValueError(f"expected core to be one of {', '.join(names)}, got {core!r}")


def _computed(core, query, key, value, *, mask, scale, gqa) -> Tensor:
    """Attention to keys in full, by a backend of diffusers or by torch."""
    if core == "sdpa":
        return _sdpa(query, key, value, mask, 0.0, False, scale, gqa)
    from diffusers.models import attention_dispatch as theirs

    backend = theirs.AttentionBackendName(core)
    taken = theirs._AttentionBackendRegistry._supported_arg_names[backend]
    if mask is not None and "attn_mask" not in taken:
        raise ValueError(
            f"expected no attention mask with core={core!r}, which doesn't take one, got one; use "
            "core='sdpa'"
        )
    more = {"attn_mask": mask, "scale": scale, "enable_gqa": gqa}
    return theirs.dispatch_attention_fn(query, key, value, **more, backend=backend)


def _full_mask(
    mask: Tensor | None, key_lens: list[int], member: Member, heads: int
) -> Tensor | None:
    """The mask [B, 1 or heads, 1, S] of all ranks' keys."""
    if mask is None:
        return None
    if mask.dim() == 2:
        mask = mask[:, None, None]
    if mask.dim() != 4 or mask.size(1) not in (1, heads) or mask.size(2) != 1:
        raise ValueError(
            "expected an attention mask of keys, [B, S_r] or [B, 1, 1, S_r], got shape "
            f"{tuple(mask.shape)}; masks that differ by head or query aren't supported"
        )
    return unshard(mask, -1, member, key_lens)


def _sdpa(query, key, value, mask, dropout_p, is_causal, scale, enable_gqa) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out = nn.functional.scaled_dot_product_attention(
        q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    return out.transpose(1, 2)


# ---- diffusers' table of backends

_users: weakref.WeakSet[State] = weakref.WeakSet()
"""The states of enabled models, while which the backend is in the table."""


def _name():
    """An instance of diffusers' enum that isn't one of its members."""
    from diffusers.models.attention_dispatch import AttentionBackendName

    name = str.__new__(AttentionBackendName, "deepsp")
    name._name_, name._value_ = "DEEPSP", "deepsp"
    return name


def use_backend(state: State):
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry as Table

    name = _name()
    if name not in Table._backends:
        Table.register(name)(attend)
    _users.add(state)
    return name


def leave_backend(state: State) -> None:
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry as Table

    _users.discard(state)
    if not _users:
        name = _name()
        for table in (Table._backends, Table._constraints, Table._supported_arg_names):
            table.pop(name, None)
