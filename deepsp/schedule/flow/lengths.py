"""Refuses computation with the length of a sharded dimension.

Models read sizes to shape other tensors, which is right on each rank. But a result that is computed
with a local length (a mean over tokens, a scale by the number of features) differs from that of one
process.
"""

from __future__ import annotations

import operator

import torch
from torch import Tensor

from deepsp.placement.functions import name_of

_READ = {"size", "shape", "numel", "nelement", "len"}
_VALUES = {"full": 1, "new_full": 2}  # the position of the argument that isn't a size
_COMPUTE = set(
    [
        "add",
        "sub",
        "subtract",
        "mul",
        "multiply",
        "div",
        "divide",
        "true_divide",
        "floor_divide",
        "pow",
        "float_power",
        "remainder",
        "fmod",
        "addcmul",
        "addcdiv",
        "lerp",
        "full_like",
        "fill",
        "tensor",
        "as_tensor",
        "scalar_tensor",
        "masked_fill",
        "clamp",
        "clip",
        "clamp_min",
        "clamp_max",
        "addmm",
        "baddbmm",
        "addbmm",
    ]
)


class _OfRank:
    """A number computed from a local length. Arithmetic keeps the mark."""


class RankLength(_OfRank, int):
    pass


class RankNumber(_OfRank, float):
    pass


def _of_rank(number):
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        return number
    return RankLength(number) if isinstance(number, int) else RankNumber(number)


def _arithmetic(name: str):
    def both(self, other):
        if isinstance(other, Tensor):
            return NotImplemented
        result = getattr(type(self).__mro__[-2], name)(self, other)
        if result is NotImplemented and isinstance(self, int) and isinstance(other, float):
            result = getattr(float, name)(float(self), other)
        return _of_rank(result)

    return both


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    for _method in (f"__{_name}__", f"__r{_name}__"):
        for _cls in (RankLength, RankNumber):
            setattr(_cls, _method, _arithmetic(_method))
for _cls in (RankLength, RankNumber):
    _cls.__neg__ = lambda self: _of_rank(operator.neg(type(self).__mro__[-2](self)))


def read(flow, func, args, kwargs, out):
    """Marks the lengths of a sharded dimension among the sizes that a function returns."""
    name = name_of(func)[0]
    if name not in _READ or not args or not isinstance(args[0], Tensor):
        return out
    x = args[0]
    value = flow.value(x)
    if not value.split:
        return out
    axis = value.place.axis
    if isinstance(out, torch.Size):
        return torch.Size(RankLength(n) if axis in (None, d) else n for d, n in enumerate(out))
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    if name == "size" and axis is not None and dim is not None and dim % x.dim() != axis:
        return out
    if name == "len" and axis not in (None, 0):
        return out
    return _of_rank(out)


def check(flow, func, args, kwargs) -> None:
    """Refuses to compute with a number that :func:`read` marked."""
    values = [*args, *kwargs.values()]
    if not any(isinstance(x, _OfRank) for x in values):
        return
    name = name_of(func)[0]
    if name in _VALUES:
        values = [*args[_VALUES[name] :], kwargs.get("fill_value")]
    elif name not in _COMPUTE:
        return
    number = next((x for x in values if isinstance(x, _OfRank)), None)
    if number is not None:
        flow.fail(
            name,
            f"it computes with {number}, which comes from the length of a sharded dimension and is "
            "the local length, where one process has the full length. Gather before, or take the "
            "number from a Replicate tensor",
        )
