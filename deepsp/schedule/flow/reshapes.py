"""Placement rules of views that change sizes."""

from __future__ import annotations

import math

from torch import Tensor

from deepsp.schedule.flow.values import Split, TracedCall, TracedPlacement

DIVIDED = "_deepsp_divided"
"""The module attribute with the names of the attributes that the schedule has divided."""


def reshaped(
    split: Split, before: tuple[int, ...], after: tuple[int, ...], free: int | None = None
) -> Split:
    """The place of a sharded tensor of sizes ``before``, viewed with sizes ``after``.

    Each of the axis's equal parts ends at ``top`` elements, counted from the innermost dimension.
    The axis of the view that contains ``top`` is the sharded one, if parts end at its rows.
    ``free``: the dimension given as -1; among sizes of one, it is the one that depends on the rank.
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
    if block == 1:
        return _of_one(split, inner, after, free)
    top = block * inner
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
                    if free == left and math.prod(before[:axis]) == 1:
                        return unknown
                    if free == left or _unit(split) == block:
                        return Split(left, (1,), split.origin)
                    if axis == 0 or before[axis - 1] != 1:
                        return unknown
                elif left is not None and _unit(split) in (None, block):
                    return unknown
            return Split(new, (top // below,) * outer, split.origin)
        below *= after[new]
    return unknown


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
    x = call["self"]
    place = call.place(x)
    if not isinstance(place, Split):
        return place
    free = _free(call, x, out)
    if free and _is_divided(call, out.size(free - 1)):
        free -= 1  # view(B, T, num_heads, -1): the heads depend on the rank, not their size
    result = reshaped(place, tuple(x.shape), tuple(out.shape), free)
    if free is not None and result.axis is not None and place.axis is not None:
        # The axis was cut into a sharded outer part and an inner part that all ranks have in full.
        inner = math.prod(x.shape[place.axis + 1 :])
        # An inner size equal to the weight's unit isn't sharded (a unit of 1 says nothing).
        unit = _unit(place)
        if (
            (unit in (None, 1) or unit * inner != math.prod(out.shape[free:]))
            and free > result.axis
            and math.prod(out.shape[free + 1 :]) >= inner
            and x.shape != out.shape
        ):
            call.fail(
                f"the size given as -1 ({out.size(free)} here) is an inner one of a tensor that is "
                f"{place}, but its outer one, such as the number of heads, is sharded; divide that "
                "(the module's attribute) as the weight is sharded, by sch[...].divide, or by hand "
                "with unit=<the inner size> in shard, which shows that it is divided"
            )
    return result


def _is_divided(call: TracedCall, size: int) -> bool:
    """Whether a size can only be an attribute of a running module that the schedule divided."""
    divided, others = set(), set()
    for module in call.flow.stack:
        for name, value in vars(module).items():
            if isinstance(value, int) and not isinstance(value, bool):
                (divided if name in vars(module).get(DIVIDED, ()) else others).add(value)
    return size in divided - others


def _free(call: TracedCall, x: Tensor, out: Tensor) -> int | None:
    """The dimension whose size was given as -1."""
    begin = call["dim"] % x.dim() if call.name == "unflatten" else 0
    sizes = list(call["size"] or call["shape"] or call["sizes"] or ())
    return begin + sizes.index(-1) if -1 in sizes else None
