"""How placements follow functions of each number by itself, and casts."""

from __future__ import annotations

from torch import Tensor

from deepsp.schedule.flow import names
from deepsp.schedule.flow.values import Call, Place, Split
from deepsp.schedule.placement import PARTIAL, REPLICATE


def pointwise(call: Call) -> Place:
    """Each number comes from those at its place, with broadcasting."""
    if any(v.partial for _, v in call.tensors):
        return _partial(call)
    sharded = [(t, v) for t, v in call.tensors if v.split]
    if not sharded:
        return REPLICATE
    ndim = max(t.dim() for t, _ in call.tensors)
    first, of = sharded[0]
    place = of.place
    axis = None if place.axis is None else place.axis + ndim - first.dim()
    for t, v in sharded[1:]:
        if v.place.axis is None or axis is None:
            if v.place.axis is not None or axis is not None or t.shape != first.shape:
                unknown = of if axis is None else v
                call.fail_split(unknown, "it is combined with another sharded tensor")
        elif v.place.axis + ndim - t.dim() != axis or v.place.parts != place.parts:
            call.fail(
                f"{of.name} is {place}, of local shape {list(first.shape)}, but {v.name} is "
                f"{v.place}, of local shape {list(t.shape)}; gather one of them with all_gather"
            )
    for t, v in call.tensors:
        if not v.replicated or v.uniform or t.numel() == 1:
            continue
        if axis is None:
            call.fail_split(of, f"it is combined with {v.name}, which is Replicate")
        at = axis - ndim + t.dim()
        if at >= 0 and t.size(at) != 1:
            call.fail(
                f"{of.name} is {place}, of local shape {list(first.shape)}, but {v.name} is "
                f"Replicate, of shape {list(t.shape)}, and its axis {at} would be the same on "
                "every rank; gather the first with all_gather or split the second with scatter (a "
                "tensor made from local sizes, such as positions, must begin at this rank's place)"
            )
    return place.at(axis)


def _partial(call: Call) -> Place:
    """Only what is linear commutes with the sum over the ranks."""
    name = call.name
    partial = [v for _, v in call.tensors if v.partial]
    others = [v for _, v in call.tensors if not v.partial]
    value = partial[0]
    sharded = next((v for v in others if v.split), None)
    if sharded is not None:
        call.fail_partial(value, f"it is combined with {sharded.name}, which is {sharded.place}")
    if name in names.SUMS:
        numbers = [
            x for x in (*call.args[:2], call.kwargs.get("other")) if isinstance(x, (int, float))
        ]
        if others or any(n != 0 for n in numbers):
            other = others[0].name if others else str(numbers[0])
            call.fail_partial(value, f"{other}, which is Replicate, would count P times")
        return PARTIAL
    if name in names.PRODUCTS and len(partial) == 1:
        return PARTIAL
    if name in names.QUOTIENTS and len(partial) == 1 and call.place(call.args[0]) is PARTIAL:
        if call.kwargs.get("rounding_mode") is None:
            return PARTIAL
    elif name == "masked_fill":
        places = [call.place(x) for x in call.args[:2]]
        if places == [PARTIAL, REPLICATE] and call.arg(2, "value") == 0:
            return PARTIAL
    elif name == "where" and len(call.args) == 3 and call.place(call.args[0]) is REPLICATE:
        if all(
            call.place(x) is PARTIAL or (not isinstance(x, Tensor) and x == 0)
            for x in call.args[1:]
        ):
            return PARTIAL
    elif name in names.DROPOUTS - {"alpha_dropout", "feature_alpha_dropout", "rrelu"}:
        return PARTIAL
    call.fail_partial(value, "this isn't linear")


def same(call: Call) -> Place:
    x = call.args[0] if call.args else next(iter(call.kwargs.values()))
    place = call.place(x)
    if place is PARTIAL and call.name not in names.LINEAR_CASTS:
        _partial(call)
    return place


def like(call: Call) -> Place:
    """Of the sizes of another, if no others are given."""
    place = call.place(call.args[0])
    return place if isinstance(place, Split) else REPLICATE


def copy(call: Call) -> Place:
    """``x.copy_(y)``: x becomes y, broadcast."""
    target, source = call.args[:2]
    place = call.place(source)
    if isinstance(place, Split) and place.axis is not None:
        return place.at(place.axis + target.dim() - source.dim())
    held = call.value(target)
    if held.split and place is REPLICATE:
        return pointwise(call)
    return place
