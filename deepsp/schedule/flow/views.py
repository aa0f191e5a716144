"""How placements follow views, indexing and what puts tensors together."""

from __future__ import annotations

import torch
from torch import Tensor

from deepsp import dims
from deepsp.schedule.flow.values import Call, Place, Split
from deepsp.schedule.placement import REPLICATE


def _dims(x: Tensor, dims) -> list[int]:
    return [d % max(x.dim(), 1) for d in ([dims] if isinstance(dims, int) else dims)]


def _varargs(call: Call, name: str):
    """dims or sizes that come as several ints or as one sequence."""
    if len(call.args) > 1:
        rest = call.args[1:]
        return rest[0] if len(rest) == 1 and not isinstance(rest[0], int) else rest
    return call.kwargs[name]


def _moved(call: Call, how, *args) -> Place:
    """``how``: the order in which it puts dimensions, from their number and ``args``."""
    x = call.args[0]
    place = call.place(x)
    if not isinstance(place, Split) or place.axis is None:
        return place
    return place.at(how(x.dim(), *args).index(place.axis))


def transpose(call: Call, out: Tensor) -> Place:
    if call.name == "permute":
        return _moved(call, dims.permute, _varargs(call, "dims"))
    if call.name in ("transpose", "swapaxes", "swapdims"):
        first = call.arg(1, "dim0", call.kwargs.get("axis0"))
        return _moved(call, dims.transpose, first, call.arg(2, "dim1", call.kwargs.get("axis1")))
    return _moved(call, dims.turn, call.name)


def movedim(call: Call, out: Tensor) -> Place:
    return _moved(call, dims.movedim, call.arg(1, "source"), call.arg(2, "destination"))


def squeeze(call: Call, out: Tensor) -> Place:
    x, given = call.args[0], call.arg(1, "dim")
    value = call.value(x)
    gone = range(x.dim()) if given is None else _dims(x, given)
    gone = [d for d in gone if x.dim() > 0 and x.size(d) == 1]
    if value.split and value.place.axis in gone:
        call.fail_split(value, "the sharded axis is squeezed away")
    return _moved(call, dims.without, gone)


def as_complex(call: Call, out: Tensor) -> Place:
    x = call.args[0]
    value = call.value(x)
    if value.split and value.place.axis == x.dim() - 1:
        call.fail_split(value, "the real and the imaginary part are on different ranks")
    return call.place(x)


def as_real(call: Call, out: Tensor) -> Place:
    return call.place(call.args[0])


def unsqueeze(call: Call, out: Tensor) -> Place:
    return _moved(call, dims.unsqueeze, call.arg(1, "dim"))


def expand(call: Call, out: Tensor) -> Place:
    x = call.args[0]
    place = call.place(x)
    if not isinstance(place, Split) or place.axis is None:
        return place
    axis = place.axis + out.dim() - x.dim()
    if out.size(axis) != x.size(place.axis):
        call.fail_split(call.value(x), "the sharded axis is repeated")
    return place.at(axis)


def repeat_interleave(call: Call, out: Tensor) -> Place:
    x = call.args[0]
    place = call.place(x)
    dim, times = call.arg(2, "dim"), call.arg(1, "repeats")
    if not isinstance(place, Split):
        return place
    if dim is None or place.axis is None or not isinstance(times, int):
        call.fail_split(call.value(x), "it is repeated")
    if dim % x.dim() != place.axis:
        return place
    return Split(place.axis, tuple(p * times for p in place.parts), place.origin)


def _cut(call: Call, x: Tensor, begin: int, length: int, dim: int) -> Place:
    """What a piece [begin, begin + length) along ``dim`` of x is."""
    value = call.value(x)
    place = value.place
    if not isinstance(place, Split) or (length == x.size(dim) and begin == 0):
        return place
    if place.axis is None:
        call.fail_split(value, "a piece of a sharded tensor is taken")
    if place.axis != dim:
        return place
    at, parts = 0, []
    for part in place.parts:
        if begin <= at < begin + length and at + part <= begin + length:
            parts.append(part)
        at += part
    if sum(parts) != length or length == 0:
        known = f" of {', '.join(map(str, place.parts))} here" if len(place.parts) > 1 else ""
        call.fail_split(
            value,
            f"[{begin}:{begin + length}] is taken along axis {dim}, along which each rank has its "
            f"local part only{known} (for a weight of several projections, pass parts= to shard)",
        )
    return Split(dim, tuple(parts), place.origin)


def split(call: Call, out) -> list[Place]:
    x = call.args[0]
    position = 2 if call.name != "unbind" else 1
    dim = call.arg(position, "dim", call.kwargs.get("axis", 0)) % x.dim()
    if call.name == "unbind":
        return [_select(call, x, dim)] * len(out)
    found, begin = [], 0
    for piece in out:
        found.append(_cut(call, x, begin, piece.size(dim), dim))
        begin += piece.size(dim)
    return found


def narrow(call: Call, out: Tensor) -> Place:
    x = call.args[0]
    dim, begin = call.arg(1, "dim") % x.dim(), call.arg(2, "start")
    return _cut(call, x, int(begin) % max(x.size(dim), 1), out.size(dim), dim)


def select(call: Call, out: Tensor) -> Place:
    x = call.args[0]
    return _select(call, x, call.arg(1, "dim") % x.dim())


def _select(call: Call, x: Tensor, dim: int) -> Place:
    value = call.value(x)
    place = value.place
    if not isinstance(place, Split):
        return place
    if place.axis == dim or place.axis is None:
        call.fail_split(value, f"one index is taken along axis {dim}")
    return _moved(call, dims.without, [dim])


def indices_of(x: Tensor, index) -> list:
    """One for each dimension of x (a bool tensor for several), and None for new ones."""
    index = list(index) if isinstance(index, tuple) else [index]
    taken = 0
    for i in index:
        if i is None or i is Ellipsis or isinstance(i, bool):
            continue
        taken += i.dim() if isinstance(i, Tensor) and _mask(i) else 1
    rest = [slice(None)] * (x.dim() - taken)
    at = next((n for n, i in enumerate(index) if i is Ellipsis), None)
    return index + rest if at is None else index[:at] + rest + index[at + 1 :]


def _mask(i: Tensor) -> bool:
    return i.dtype in (torch.bool, torch.uint8)


def getitem(call: Call, out: Tensor) -> Place:
    x, index = call.args[:2]
    value = call.value(x)
    place = value.place
    used = [v for t, v in call.tensors if t is not x]
    for v in used:
        if v.partial:
            call.fail_partial(v, "it is an index")
    sharded = [v for v in used if v.split]
    if not isinstance(place, Split):
        if not sharded:
            return place
        return _by_sharded(call, x, indices_of(x, index))
    if sharded and any(v.place.axis is None for v in sharded):
        call.fail_split(sharded[0], "it is an index of a sharded tensor")
    if sharded:
        call.fail("both a tensor and its index are sharded; gather one with all_gather")
    if place.axis is None:
        if all(full(i, 0) for i in indices_of(x, index)):
            return place
        call.fail_split(value, "a piece of a sharded tensor is taken")
    return _of_sharded(call, x, place, indices_of(x, index))


def full(i, size: int) -> bool:
    return (
        isinstance(i, slice)
        and i.start in (None, 0)
        and i.step in (None, 1)
        and (i.stop is None or (size > 0 and isinstance(i.stop, int) and i.stop >= size))
    )


def _of_sharded(call: Call, x: Tensor, place: Split, index: list) -> Place:
    tensors = [i for i in index if isinstance(i, (Tensor, list))]
    if len(tensors) > 1 or (tensors and any(isinstance(i, int) for i in index)):
        call.fail_split(call.value(x), "it is indexed by several tensors")
    dim = new = 0
    for i in index:
        if i is None:
            new += 1
        elif isinstance(i, slice):
            if dim == place.axis:
                begin, end, step = i.indices(x.size(dim))
                if step != 1:
                    call.fail_split(
                        call.value(x), f"every {step}th element is taken along axis {dim}"
                    )
                return _cut(call, x, begin, max(end - begin, 0), dim).at(new)
            dim, new = dim + 1, new + 1
        else:
            width = i.dim() if isinstance(i, Tensor) and _mask(i) else 1
            if dim <= place.axis < dim + width:
                call.fail_split(call.value(x), f"an index is taken along axis {place.axis}")
            dim += width
            if isinstance(i, Tensor):
                new += 1 if _mask(i) else i.dim()
            elif isinstance(i, list):
                new += 1
    call.fail("the indexed tensor has fewer dimensions than its placement says")


def _by_sharded(call: Call, x: Tensor, index: list) -> Place:
    """A replicated tensor, looked up by each rank's part of the indices."""
    tensors = [i for i in index if isinstance(i, Tensor)]
    if len(tensors) != 1 or _mask(tensors[0]) or any(isinstance(i, int) for i in index):
        call.fail_split(
            next(v for t, v in call.tensors if v.split), "it is one of several indices, or a mask"
        )
    place = call.place(tensors[0])
    if place.axis is None:
        return place
    before = next(n for n, i in enumerate(index) if isinstance(i, Tensor))
    return place.at(before + place.axis)


def cat(call: Call) -> Place:
    tensors = list(call.args[0] if call.args else call.kwargs["tensors"])
    ndim = max(t.dim() for t in tensors) + (call.name == "stack")
    dim = call.arg(1, "dim", call.kwargs.get("axis", 0)) % max(ndim, 1)
    tensors = [t for t in tensors if t.numel() > 0 or t.dim() > 1] or tensors
    values = [call.value(t) for t in tensors]
    partial = [v for v in values if v.partial]
    if partial:
        other = [v for v in values if not v.partial]
        if other:
            call.fail_partial(partial[0], f"it is joined with {other[0].name}, which isn't Partial")
        return partial[0].place
    sharded = [v for v in values if v.split]
    if not sharded:
        return REPLICATE
    place = sharded[0].place
    for v in values:
        if v.split and v.place.axis != place.axis:
            call.fail_split(v, f"it is joined with a tensor that is {place}")
        if v.replicated and not v.uniform:
            call.fail(
                f"{v.name}, which is Replicate, is joined with {sharded[0].name}, which is "
                f"{place}; gather that with all_gather, or split the other with scatter"
            )
    if place.axis is None:
        return place
    if call.name == "stack":
        return place.at(place.axis + (dim <= place.axis))
    if dim == place.axis and len(tensors) > 1:
        if any(v.replicated for v in values):
            call.fail_split(sharded[0], f"a Replicate tensor is joined to it along axis {dim}")
        parts = tuple(p for v in values if v.split for p in v.place.parts)
        return Split(dim, parts, place.origin)
    return place
