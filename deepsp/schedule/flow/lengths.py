"""Refuses computation with the length of a sharded dimension.

Models read sizes to shape other tensors, which is right on each rank. But a result that is computed
with a local length (a mean over tokens, a scale by the number of features) differs from that of one
process.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepsp.placement.functions import name_of

_TAKE_SIZES = {"view": 1, "reshape": 1, "unflatten": 2, "split": 1, "chunk": 1, "narrow": 1}
_SIZES = ("length", "shape", "size", "sizes", "split_size", "split_size_or_sections", "chunks")
_READ = {"size", "shape", "numel", "nelement", "len"}
_VALUES = {"full": 1, "new_full": 2}  # the position of the argument that isn't a size
_COMPUTE = {"add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide",
            "floor_divide", "pow", "float_power", "remainder", "fmod", "addcmul", "addcdiv", "lerp",
            "full_like", "fill", "tensor", "as_tensor", "scalar_tensor", "masked_fill", "clamp",
            "clip", "clamp_min", "clamp_max", "addmm", "baddbmm", "addbmm"}  # fmt: skip


class LocalNumber:
    """A number that is this rank's, where one process has another one. Arithmetic keeps the mark.

    exact: True: a local length or a divided attribute itself: one process has the full one. None: a
        quotient of two local numbers, which one process has, too, if it is the same on all ranks.
    """

    exact: bool | None = False


def is_local(number) -> bool:
    """Whether one process has another number."""
    return isinstance(number, LocalNumber) and number.exact is not None


class _Computable(LocalNumber):
    """One that may not be computed with: it comes from a local length."""


class RankLength(_Computable, int):
    pass


class RankNumber(_Computable, float):
    pass


class Divided(LocalNumber, int):
    """A number that the schedule has divided. Only its use as a size matters."""


def marked(number: int, cls: type = RankLength):
    """A local length, or a divided attribute."""
    local = cls(number)
    local.exact = True
    return local


def _arithmetic(name: str, base: type):
    def both(self, other):
        if isinstance(other, Tensor):
            return NotImplemented
        result = getattr(base, name)(self, other)
        if result is NotImplemented and base is int and isinstance(other, float):
            result = getattr(float, name)(float(self), other)
        if not isinstance(result, (int, float)):
            return result
        if isinstance(self, Divided) and not isinstance(other, _Computable):
            if not isinstance(result, int):
                return result
            result = Divided(result)
        else:
            result = RankLength(result) if isinstance(result, int) else RankNumber(result)
        locals_ = sum(map(is_local, (self, other)))
        if locals_ == 0 or (locals_ == 2 and "div" in name):
            result.exact = None
        return result

    return both


for _cls, _base in ((RankLength, int), (RankNumber, float), (Divided, int)):
    for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
        for _method in (f"__{_name}__", f"__r{_name}__"):
            setattr(_cls, _method, _arithmetic(_method, _base))
    _cls.__neg__ = lambda self: 0 - self


def sizes_of(func, args, kwargs) -> tuple:
    """The sizes that Python passes to a function that views or cuts, with their marks."""
    name = name_of(func)[0]
    if name not in _TAKE_SIZES:
        return ()
    sizes = [*args[_TAKE_SIZES[name] :], *(kwargs.get(key, ()) for key in _SIZES if key in kwargs)]
    if sizes and isinstance(sizes[0], (tuple, list)):
        sizes = sizes[0]
    return tuple(sizes)


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
        return torch.Size(_length(n, axis) if axis in (None, d) else n for d, n in enumerate(out))
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    if name == "size" and axis is not None and dim is not None and dim % x.dim() != axis:
        return out
    if name == "len" and axis not in (None, 0):
        return out
    return _length(out, axis if name != "numel" or x.dim() == 1 else None)


def _length(number: int, axis: int | None) -> RankLength:
    """A length that was read; an unknown axis may be any."""
    return RankLength(number) if axis is None else marked(number)


def check(flow, func, args, kwargs) -> None:
    """Refuses to compute with a number that :func:`read` marked."""
    values = [*args, *kwargs.values()]
    if not any(isinstance(x, LocalNumber) for x in values):
        return
    name = name_of(func)[0]
    if name in _VALUES:
        values = [*args[_VALUES[name] :], kwargs.get("fill_value")]
    elif name not in _COMPUTE:
        return
    number = next((x for x in values if isinstance(x, _Computable)), None)
    if number is not None:
        flow.fail(
            name,
            f"it computes with {number}, which comes from the length of a sharded dimension and is "
            "the local length, where one process has the full length. Gather before, or take the "
            "number from a Replicate tensor",
        )
    number = next(filter(is_local, values), None)
    if number is not None:
        flow.fail(
            name,
            f"it computes with {number}, which comes from an attribute that is divided "
            "(sch[...].divide), where one process has the full number. Divide attributes that are "
            "sizes only, or keep the full number in another attribute",
        )
