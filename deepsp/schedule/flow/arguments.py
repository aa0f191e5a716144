"""Arguments of the model."""

from __future__ import annotations

import copy
from collections.abc import Mapping, MutableMapping
from enum import Enum
from typing import Any

from torch import Tensor, nn


def copied(x, memo: dict[int, Any]):
    """A copy of the arguments, with new tensors and containers (a cache of keys and values, say):
    the dry run must not write into the caller's."""
    if id(x) in memo:
        return memo[id(x)]
    if isinstance(x, Tensor):
        copy_ = x.detach().clone()
        if x.requires_grad:
            copy_.requires_grad_()
        memo[id(x)] = copy_
        return copy_
    if type(x) in (list, tuple):
        return type(x)(copied(item, memo) for item in x)
    if isinstance(x, (type, Enum, nn.Module)) or callable(x):
        return x
    if not isinstance(x, (list, tuple, Mapping)) and not hasattr(x, "__dict__"):
        return x
    try:
        new = copy.copy(x)
    except Exception:  # a process group, a generator
        return x
    memo[id(x)] = new
    for key, value in vars(new).items() if hasattr(new, "__dict__") else ():
        new.__dict__[key] = copied(value, memo)
    if isinstance(x, tuple):  # a namedtuple
        return x._make(copied(v, memo) for v in x) if hasattr(x, "_make") else x
    if isinstance(new, MutableMapping):
        for key, value in list(new.items()):
            changed = copied(value, memo)
            if changed is not value:
                new[key] = changed
    elif isinstance(new, list):
        new[:] = [copied(value, memo) for value in x]
    return new


def call_key(model: nn.Module, args: tuple, kwargs: Mapping) -> tuple:
    """Calls with the same key have the same findings. Lengths count only as 0, 1 or more (a view
    of sizes of one is ambiguous), and numbers likewise."""

    def one(x):
        if isinstance(x, Tensor):
            sizes = tuple(min(n, 2) for n in x.shape)
            return x.dtype, x.device.type, sizes, x.requires_grad
        if isinstance(x, (list, tuple)):
            return tuple(one(item) for item in x)
        if isinstance(x, Mapping):
            return tuple((key, one(item)) for key, item in x.items())
        if isinstance(x, (bool, str, type(None), Enum)):
            return x
        if isinstance(x, int):
            return max(-1, min(x, 2))  # like sizes
        if isinstance(x, float):
            return (x > 0) - (x < 0)
        return type(x)

    modes = hash(tuple(m.training for m in model.modules()))
    trained = hash(tuple(p.requires_grad for p in model.parameters()))
    return modes, trained, one(args), one(kwargs)
