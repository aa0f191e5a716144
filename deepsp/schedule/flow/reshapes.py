"""Placement rules of views that change sizes."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NoReturn

from torch import Tensor, nn

from deepsp.schedule.flow.lengths import Divided, is_local, marked
from deepsp.schedule.flow.values import Split, TracedCall, TracedPlacement

DIVIDED = "_deepsp_divided"
"""The module attribute with the names of the attributes that the schedule has divided."""


@contextlib.contextmanager
def divided(model: nn.Module) -> Iterator[None]:
    """Marks the attributes that the schedule has divided, in this context."""
    own = [(vars(m), name) for m in model.modules() for name in vars(m).get(DIVIDED, ())]
    for attributes, name in own:
        attributes[name] = marked(attributes[name], Divided)
    try:
        yield
    finally:
        for attributes, name in own:
            if isinstance(attributes.get(name), Divided):
                attributes[name] = int(attributes[name])


def reshaped(
    split: Split,
    before: tuple[int, ...],
    after: tuple[int, ...],
    free: int | None = None,
    within: bool = False,
) -> Split:
    """The place of a sharded tensor of sizes ``before``, viewed with sizes ``after``.

    Each of the axis's equal parts ends at ``top`` elements, counted from the innermost dimension.
    The axis of the view that contains ``top`` is the sharded one, if parts end at its rows.
    ``free``: the dimension given as -1; among sizes of one, it is the one that depends on the rank.
    ``within``: the dimensions before and after the axis stay as they are.
    """
    axis, parts = split.axis, split.parts
    if axis is None or 0 in before:
        return split.at(axis if len(before) == len(after) else None)
    if before == after and free in (None, axis):
        return split
    unknown = Split(None, (), split.origin)
    behind = before[axis + 1 :]
    inner = math.prod(behind)
    block = parts[0]
    if any(p != block for p in parts):  # unequal parts keep their axis, or it is unknown
        same = len(after) - len(behind) - 1
        kept = same >= 0 and after[same:] == before[axis:]
        return split.at(same) if kept else unknown
    top = block * inner
    if block == 1:
        return _of_one(split, inner, after, free)
    below = 1
    for new in range(len(after) - 1, -1, -1):
        if below < top <= below * after[new]:
            outer, rest = divmod(below * after[new], top)
            if rest or top % below:
                return unknown
            if top == below * after[new] and new > 0 and free != new:
                # The axis may also be one head's channels, and the axis before it the heads.
                left = _left_of(after, new, free)
                if left is not None and after[left] == 1:
                    if free == left and math.prod(before[:axis]) == 1 and not within:
                        return unknown
                    if free == left or _unit(split) == block:
                        return Split(left, (1,), split.origin)
                    if axis == 0 or before[axis - 1] != 1:
                        return unknown
                elif left is not None and _unit(split) in (None, 1, block):
                    return unknown
            return Split(new, (top // below,) * outer, split.origin)
        below *= after[new]
    return unknown


def _along(split: Split, before: tuple, after: tuple, dim: int) -> Split | None:
    """:func:`reshaped`, if the rank's part is rows of this dimension."""
    if split.axis is None or len(set(split.parts)) != 1 or 0 in (*before, *after):
        return None
    top, below = split.parts[0] * math.prod(before[split.axis + 1 :]), math.prod(after[dim + 1 :])
    count, rest = divmod(below * after[dim], top)
    if rest or count == 0 or top % below:
        return None
    return Split(dim, (top // below,) * count, split.origin)


def _of_one(split: Split, inner: int, after: tuple[int, ...], free: int | None) -> Split:
    """:func:`reshaped` for parts of length one, which may be at any size of one."""
    if free is not None:
        block, rest = divmod(inner, math.prod(after[free + 1 :]))
        if block > 0 and rest == 0 and after[free] % block == 0:
            return Split(free, (block,) * (after[free] // block), split.origin)
    return Split(None, (), split.origin)


def _left_of(after: tuple[int, ...], new: int, free: int | None) -> int | None:
    """The axis before ``new`` that may depend on the rank instead."""
    if free is None:
        return new - 1 if after[new - 1] == 1 else None
    between = after[free + 1 : new]
    return free if free < new and all(n == 1 for n in between) else None


def _unit(split: Split) -> int | None:
    units = getattr(split.origin, "units", None) or [getattr(split.origin, "unit", None)]
    return units[0]


def reshape(call: TracedCall, out: Tensor) -> TracedPlacement:
    place = call.place(call["self"])
    if not isinstance(place, Split):
        return place
    result = _reshape(call, place, out)
    return replace(result, merged=place.merged or len(result.parts) > len(place.parts))


def _reshape(call: TracedCall, place: Split, out: Tensor) -> Split:
    x = call["self"]
    begin, end = _changed(call, x)
    free = _free(call, begin)
    before, after = tuple(x.shape), tuple(out.shape)
    if place.axis is not None and not begin <= place.axis < end:
        return place.at(place.axis + (len(after) - len(before)) * (place.axis >= end))
    if call.name == "flatten":
        local = _along(place, before, after, begin)
    else:
        local = _by_numbers(call, place, before, after, free)
    if local is not None:
        return local
    result = reshaped(place, before, after, free, within=call.name == "unflatten")
    return result if result.axis is None else _by_hand(call, place, before, after, free, result)


def _by_hand(
    call: TracedCall, place: Split, before: tuple, after: tuple, free: int | None, to: Split
) -> Split:
    """``to``, if the weight's unit shows that a size that Python passes was divided by hand, where
    the view needs one that was: one process has a larger one."""
    marked = next(filter(is_local, call.flow.sizes), None)
    inner, unit = math.prod(before[place.axis + 1 :]), _unit(place)
    if unit in (None, 1) or inner * place.parts[0] % unit:  # 1, or one that was cut, says nothing
        unit = None
    else:
        unit *= inner
    if free is None:
        rows = math.prod(after[to.axis + 1 :])
        cuts = before != after and rows < inner * place.parts[0]
        if cuts and marked is not None and (unit is None or rows % unit):
            _refuse(call, f"{marked} is computed from a local length", place, after[to.axis])
    elif free < to.axis:
        if unit is None and marked is None:
            return to.at(None)
    else:
        # An axis that was cut: an outer part is sharded, and all ranks have the inner part in full.
        full = math.prod(after[free + 1 :]) >= inner and unit != math.prod(after[free:])
        if free > to.axis and before != after and full:
            what = f"given as -1 ({after[free]} here) is an inner one"
            _refuse(call, what, place, after[to.axis])
    return to


def _refuse(call: TracedCall, what: str, place: Split, size: int) -> NoReturn:
    call.fail(
        f"the size {what} of a tensor that is {place}, but its outer one ({size}), such as the "
        "number of heads, is sharded; divide that (the module's attribute) as the weight is "
        "sharded, by sch[...].divide, or by hand with unit=<the inner size> in shard, which shows "
        "that it is divided"
    )


def _changed(call: TracedCall, x: Tensor) -> tuple[int, int]:
    """The dimensions whose sizes an op changes, from the first to behind the last."""
    if call.name == "unflatten":
        dim = call["dim"] % x.dim()
        return dim, dim + 1
    if call.name == "flatten" and x.dim() > 0:
        return call["start_dim"] % x.dim(), call["end_dim"] % x.dim() + 1
    return 0, x.dim()


def _by_numbers(
    call: TracedCall, place: Split, before: tuple, after: tuple, free: int | None
) -> Split | None:
    """:func:`reshaped`, if Python's numbers show which size depends on the rank: a local length or
    a divided attribute; or one computed from those, or else the one given as -1."""
    sizes, begin = call.flow.sizes, _changed(call, call["self"])[0]
    if len(sizes) != len(call["size"] or call["shape"] or call["sizes"] or ()):
        return None
    marks = [d for d, n in enumerate(sizes, begin) if is_local(n)]
    exact = [d for d in marks if sizes[d - begin].exact]
    if len(exact) == 1:
        marks = exact
    elif free is not None and marks:
        marks.append(free)
    elif len(marks) == 1 and _is_after_one(sizes, before[begin:], marks[0] - begin):
        return None if 1 < (_unit(place) or 1) == place.parts[0] else place.at(None)
    fits = [at for d in marks if (at := _along(place, before, after, d)) is not None]
    return fits[0] if len(fits) == 1 else place.at(None) if fits else None


def _is_after_one(sizes: tuple, before: tuple, dim: int) -> bool:
    """Whether a size of one before a computed size may have been divided by hand."""
    kept = next((d for d, (a, b) in enumerate(zip(sizes, before, strict=False)) if a != b), 0)
    return sizes[dim] > 1 and 1 in sizes[kept:dim]


def _free(call: TracedCall, begin: int) -> int | None:
    """The dimension whose size was given as -1."""
    sizes = list(call["size"] or call["shape"] or call["sizes"] or ())
    return begin + sizes.index(-1) if -1 in sizes else None
