"""How placements follow what works along axes: reductions, softmax and the like, norms."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from deepsp.schedule.flow.pointwise import pointwise
from deepsp.schedule.flow.values import Call, Place, Split
from deepsp.schedule.placement import PARTIAL


def _dims(x: Tensor, dim) -> list[int] | None:
    if dim is None or (isinstance(dim, (tuple, list)) and len(dim) == 0):
        return None
    dims = [dim] if isinstance(dim, int) else list(dim)
    return [d % max(x.dim(), 1) for d in dims]


def reduction(position: int = 1, default=None, linear: bool = False, keep: int = 2):
    def rule(call: Call) -> Place:
        x = call.arg(0, "input")
        value = call.value(x)
        place = value.place
        dim = call.arg(position, "dim", call.kwargs.get("axis", default))
        if isinstance(dim, Tensor):
            return pointwise(call)  # max(x, y)
        if not isinstance(dim, (int, tuple, list, type(None))) or isinstance(dim, bool):
            dim = default
        if place is PARTIAL:
            if not linear:
                call.fail_partial(value, "this isn't linear")
            return place
        if not isinstance(place, Split):
            return place
        dims = _dims(x, dim)
        keepdim = bool(call.arg(keep, "keepdim", False))
        if dims is None or place.axis in dims or place.axis is None:
            if call.name in ("sum", "nansum", "count_nonzero"):
                if place.axis is None and dims is not None:
                    call.fail_split(value, "it is summed along one axis")
                if keepdim or dims is None or place.axis in dims:
                    return PARTIAL
            more = " (a sum can be: it is partial then)" if call.name == "mean" else ""
            call.fail_split(value, f"it is reduced over the sharded axis{more}")
        if keepdim:
            return place
        return place.at(place.axis - sum(d < place.axis for d in dims))

    return rule


def along(position: int, default=None, name: str = "dim", linear: bool = False):
    def rule(call: Call) -> Place:
        x = call.arg(0, "input")
        value = call.value(x)
        place = value.place
        if place is PARTIAL and not linear:
            call.fail_partial(value, "this isn't linear")
        if any(v is not value and not v.replicated for _, v in call.tensors):
            call.fail("expected its other arguments to be Replicate; gather them with all_gather")
        if not isinstance(place, Split):
            return place
        dims = _dims(x, call.arg(position, name, default))
        if dims is None or place.axis is None or place.axis in dims:
            call.fail_split(value, "it works along the sharded axis")
        return place

    return rule


def last(count: Callable[[Call], int], linear: bool = False):
    """Works along the last dimensions."""

    def rule(call: Call) -> Place:
        x = call.arg(0, "input")
        value = call.value(x)
        place = value.place
        if place is PARTIAL and not linear:
            call.fail_partial(value, "this isn't linear")
        for t, v in call.tensors:
            if t is not x and not v.replicated:
                call.fail(
                    f"{v.name} is {v.place}, which this function can't take; shard the norm "
                    "through the schedule, which takes its statistics over the group"
                )
        if isinstance(place, Split) and (place.axis is None or place.axis >= x.dim() - count(call)):
            call.fail_split(value, "it takes statistics along the sharded axis")
        return place

    return rule


def normalized(call: Call) -> int:
    shape = call.arg(1, "normalized_shape")
    return 1 if isinstance(shape, int) else len(shape)


def batch_norm(call: Call) -> Place:
    x = call.arg(0, "input")
    value = call.value(x)
    if value.partial:
        call.fail_partial(value, "this isn't linear")
    bad = [v for t, v in call.tensors if t is not x and not v.replicated]
    if value.split and (bad or value.place.axis == 1 or value.place.axis is None):
        call.fail_split(value, "its channels are sharded")
    if bad:
        call.fail(f"expected {bad[0].name} to be Replicate, got {bad[0].place}; use all_gather")
    training = call.arg(5, "training", call.kwargs.get("use_input_stats", False))
    if value.split and (training or (call.name == "instance_norm" and value.place.axis != 0)):
        call.fail_split(value, "its statistics would be those of this rank's part")
    return value.place


def group_norm(call: Call) -> Place:
    x = call.arg(0, "input")
    value = call.value(x)
    if value.partial:
        call.fail_partial(value, "this isn't linear")
    if value.split and value.place.axis != 0:
        call.fail_split(value, "its statistics would be those of this rank's part")
    if any(v is not value and not v.replicated for _, v in call.tensors):
        call.fail("expected its weight and bias to be Replicate; gather them with all_gather")
    return value.place
