"""How placements follow losses, lookups and writes by index."""

from __future__ import annotations

from torch import Tensor

from deepsp.schedule.flow import views
from deepsp.schedule.flow.values import Call, Place
from deepsp.schedule.placement import PARTIAL, REPLICATE


def loss(call: Call) -> Place:
    """Losses with ``reduction``; those of classes have them along axis 1 (0 without a batch)."""
    x, target = call.arg(0, "input"), call.arg(1, "target")
    classes = call.name in ("cross_entropy", "nll_loss")
    kind = call.kwargs.get("reduction")
    if kind is None:
        kind = next((a for a in call.args[2:] if isinstance(a, str)), "mean")
    of, to = call.value(x), call.value(target)
    for v in (of, to):
        if v.partial:
            call.fail_partial(v, "this isn't linear")
    sharded = of if of.split else to if to.split else None
    if sharded is None:
        return REPLICATE
    place = sharded.place
    if classes and of.split and place.axis == min(1, x.dim() - 1):
        call.fail_split(of, "its classes (the vocabulary) are sharded")
    if kind == "mean":
        call.fail(
            f"{sharded.name} is {place}, and its local mean isn't the mean of the full tensor; use "
            "deepsp.cross_entropy, whose mean is over the tokens of all ranks, or sync it with "
            "all_gather before"
        )
    if place.axis is None:
        call.fail_split(sharded, "its classes can't be told from its tokens")
    at = place.axis - (1 if classes and of.split and place.axis > 1 else 0)
    for t, v in ((x, of), (target, to)):
        where = at + (1 if classes and t is x and at >= 1 and x.dim() > 1 else 0)
        if v.replicated and not v.uniform and where < t.dim() and t.size(where) != 1:
            call.fail(
                f"{sharded.name} is {place}, but {v.name} is Replicate; split it with scatter "
                "(labels: deepsp.shard), or gather the other with all_gather"
            )
        if v.split and v.place.axis != where:
            call.fail(
                f"expected {to.name} to be sharded like {of.name} ({of.place}), got {to.place}"
            )
    return PARTIAL if kind == "sum" else place.at(at)


def gather_along(call: Call) -> Place:
    """``x.gather(dim, index)``: both have the same axes."""
    x = call.args[0]
    dim, index = call.arg(1, "dim"), call.arg(2, "index")
    if not isinstance(dim, int):  # take_along_dim(x, indices, dim)
        dim, index = call.arg(2, "dim"), call.arg(1, "indices")
    of, by = call.value(x), call.value(index)
    for v in (of, by):
        if v.partial:
            call.fail_partial(v, "it is looked up")
    if not of.split and not by.split:
        return REPLICATE
    if dim is None or not (of.split and by.split) or of.place.axis != by.place.axis:
        call.fail(f"expected {of.name} to be sharded like its index ({by.place}), got {of.place}")
    if of.place.axis is None or dim % x.dim() == of.place.axis:
        call.fail_split(of, "it is looked up along the sharded axis")
    return of.place


def index_select(call: Call) -> Place:
    x, dim, index = call.args[0], call.arg(1, "dim") % call.args[0].dim(), call.arg(2, "index")
    of, by = call.value(x), call.value(index)
    if by.partial:
        call.fail_partial(by, "it is an index")
    if by.split:
        if not of.replicated:
            call.fail("both the tensor and its index are sharded; gather one with all_gather")
        return by.place.at(dim)
    if of.split and of.place.axis in (None, dim):
        call.fail_split(of, "it is looked up along the sharded axis")
    return of.place


def pad(call: Call) -> Place:
    x, sizes = call.arg(0, "input"), list(call.arg(1, "pad"))
    value = call.value(x)
    if value.partial and (call.arg(3, "value") or 0) != 0:
        call.fail_partial(value, "it is padded with what isn't zero")
    if value.split:
        padded = [x.dim() - 1 - n // 2 for n, size in enumerate(sizes) if size != 0]
        if padded and (value.place.axis is None or value.place.axis in padded):
            call.fail_split(value, "it is padded along the sharded axis")
    return value.place


def setitem(call: Call) -> Place:
    x, index, source = call.args[:3]
    held = call.value(x)
    given = call.place(source)
    if any(not v.replicated for t, v in call.tensors if t is not x and t is not source):
        call.fail("expected its indices to be Replicate; gather them with all_gather")
    if held.replicated and given is REPLICATE:
        return REPLICATE
    found = views.indices_of(x, index)
    if given is REPLICATE and held.split and held.place.axis is not None:
        at = 0
        for i in found:
            if i is None:
                continue
            one = not isinstance(source, Tensor) or source.numel() == 1
            if at == held.place.axis and views.full(i, x.size(at)) and one:
                return held.place
            at += 1
    if given == held.place and (given is PARTIAL or all(views.full(i, 0) for i in found)):
        return given
    call.fail(
        f"{held.name} is {held.place}, but what is written into it is {given}; sync the first with "
        "all_gather (if Partial, with all_reduce), or use where"
    )
