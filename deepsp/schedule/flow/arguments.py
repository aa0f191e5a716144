"""Arguments of the model."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn


def copied(x, memo: dict[int, Tensor]):
    """The arguments with tensors of their own, lest the model's writes to them count twice."""
    if isinstance(x, Tensor):
        if id(x) not in memo:
            copy = x.detach().clone()
            memo[id(x)] = copy.requires_grad_(x.requires_grad) if x.is_leaf else copy
            if x.requires_grad:
                memo[id(x)].requires_grad_()
        return memo[id(x)]
    if type(x) in (list, tuple):
        return type(x)(copied(item, memo) for item in x)
    if type(x) is dict:
        return {key: copied(item, memo) for key, item in x.items()}
    return x


def call_key(model: nn.Module, args: tuple, kwargs: Mapping) -> tuple:
    """Calls with the same key have the same findings: lengths don't count, but whether they are
    0, 1 or more does (what a view merges can't be told from sizes of one)."""

    def one(x):
        if isinstance(x, Tensor):
            sizes = tuple(min(n, 2) for n in x.shape)
            return x.dtype, x.device.type, sizes, x.requires_grad
        if isinstance(x, (list, tuple)):
            return tuple(one(item) for item in x)
        if isinstance(x, Mapping):
            return tuple((key, one(item)) for key, item in x.items())
        if isinstance(x, (bool, str, type(None))):
            return x
        return type(x)

    modes = hash(tuple(m.training for m in model.modules()))
    trained = hash(tuple(p.requires_grad for p in model.parameters()))
    return modes, trained, one(args), one(kwargs)
