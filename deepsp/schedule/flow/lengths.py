"""Lengths of sharded dimensions, which differ from those that one process would read.

Models read sizes to shape other tensors, which is right on each rank. What is computed with such a
number (a mean over tokens, a scale by the number of features) is not what one process computes: it
is refused.
"""

from __future__ import annotations

import operator

import torch
from torch import Tensor

from deepsp.schedule.flow import names
from deepsp.schedule.flow.values import Call

_READ = {"size", "shape", "numel", "nelement", "len"}
_VALUES = {"full": 1, "new_full": 2}  # where the argument is that isn't a size
_COMPUTE = (
    names.SUMS
    | names.PRODUCTS
    | names.QUOTIENTS
    | names.words(
        "rtruediv rdiv floor_divide floordiv rfloordiv pow rpow float_power remainder mod rmod "
        "fmod addcmul addcdiv lerp full_like fill tensor as_tensor scalar_tensor masked_fill "
        "clamp clip clamp_min clamp_max addmm baddbmm addbmm"
    )
)


class _OfRank:
    """A number that comes from this rank's part. Arithmetic with it gives such numbers."""


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


def read(call: Call, out):
    """What a function that reads sizes returns: those of a sharded dimension are marked."""
    if call.name not in _READ or not call.tensors:
        return out
    x, value = call.tensors[0]
    if not value.split:
        return out
    axis = value.place.axis
    if isinstance(out, torch.Size):
        return torch.Size(RankLength(n) if axis in (None, d) else n for d, n in enumerate(out))
    dim = call.arg(1, "dim")
    if call.name == "size" and axis is not None and dim is not None and dim % x.dim() != axis:
        return out
    if call.name == "len" and axis not in (None, 0):
        return out
    return _of_rank(out)


def check(call: Call) -> None:
    """Refuses to compute with what :func:`read` has marked."""
    if call.name in _VALUES:
        given = [*call.args[_VALUES[call.name] :], call.kwargs.get("fill_value")]
    elif call.name in _COMPUTE:
        given = [*call.args, *call.kwargs.values()]
    else:
        return
    if any(isinstance(x, _OfRank) for x in given):
        number = next(x for x in given if isinstance(x, _OfRank))
        call.fail(
            f"it computes with {number}, which comes from the length of a sharded dimension and is "
            "the local length, where one process has the full length. Gather before, or take the "
            "number from a Replicate tensor"
        )
