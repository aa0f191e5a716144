"""Placement rules for ops that cut or join a tensor along the sharded axis: they depend on the
parts of a rank's tensor."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from deepsp.schedule.flow import items, reshapes
from deepsp.schedule.flow.lengths import is_local
from deepsp.schedule.flow.values import Split, TracedCall, TracedPlacement, Value


def _cut(call: TracedCall, begin: int, length: int, dim: int) -> TracedPlacement:
    """The place of elements [begin, begin + length) along the sharded axis."""
    x = call["self"]
    value = call.value(x)
    offset, parts = 0, []
    for part in value.place.parts:
        if begin <= offset < begin + length and offset + part <= begin + length:
            parts.append(part)
        offset += part
    by_hand = value.place.merged and not any(map(is_local, call.flow.sizes))
    if sum(parts) != length or length == 0 or (by_hand and length < offset):
        parts = value.place.parts
        lengths = f" of {', '.join(map(str, parts))} here" if len(parts) > 1 else ""
        call.fail_split(
            value,
            f"[{begin}:{begin + length}] is taken along axis {dim}, along which each rank has its "
            f"local part only{lengths} (for a weight of several projections, pass parts= to shard)",
        )
    return replace(value.place, axis=dim, parts=tuple(parts))


def _along(call: TracedCall) -> int | None:
    """The dimension of a cut, if it is the sharded one."""
    x = call["self"]
    dim = call["dim"] % max(x.dim(), 1)
    return dim if call.value(x).split and call.place(x).axis == dim else None


def split(call: TracedCall, outs) -> list[TracedPlacement] | None:
    dim = _along(call)
    if dim is None:
        return None
    heads = items.cut(call, outs)
    if heads is not None:
        return heads
    _check_list(call, outs, dim)
    cuts, begin = [], 0
    for piece in outs:
        cuts.append(_cut(call, begin, piece.size(dim), dim))
        begin += piece.size(dim)
    return cuts


def _check_list(call: TracedCall, outs, dim: int) -> None:
    """Refuses a list that is shorter than in one process: of pieces of a given size, or of a given
    number of pieces."""
    if any(map(is_local, call.flow.sizes)):
        return
    size, value = outs[0].size(dim), call.value(call["self"])
    if call.name == "split" and len(outs) == 1:
        _check_count(call.flow, "split", value, size, size)
    if call.name == "split" and len(outs) != len(value.place.parts):
        call.fail_split(
            value,
            f"it takes pieces of {size} along axis {dim}, and these aren't this rank's heads "
            f"(unit={size} in shard shows that they are) or parts (parts=)",
        )
    if call.name in ("chunk", "unsafe_chunk") and len(outs) < call["chunks"]:
        call.fail_split(
            value,
            f"{call['chunks']} chunks are taken along axis {dim}, and this rank has {len(outs)}",
        )


def unbind(call: TracedCall, outs) -> list[TracedPlacement] | None:
    return None if _along(call) is None else items.cut(call, outs)


def piece(call: TracedCall, out: Tensor) -> TracedPlacement | None:
    """``slice`` and ``narrow``."""
    dim, x = _along(call), call["self"]
    value = call.value(x)
    begin, step = call["start"] or 0, call["step"] or 1
    if dim is None:
        return value.place if value.split and out.shape == x.shape and begin == 0 else None
    begin, _, _ = slice(int(begin), None).indices(x.size(dim))
    if step == 1 and begin == 0 and out.size(dim) == x.size(dim):
        if call.name == "narrow" and not any(map(is_local, call.flow.sizes)):
            _check_count(call.flow, call.name, value, call["length"], x.size(dim))
        return value.place
    if step != 1:
        parts = value.place.parts
        to_end = call["end"] is None or call["end"] >= x.size(dim)
        if begin >= step or not to_end or any(n % step != 0 for n in parts):
            call.fail_split(
                value,
                f"every {step}th element is taken along axis {dim}, and this rank's parts, of "
                f"{', '.join(map(str, parts))}, aren't multiples of {step} taken to their end",
            )
        # Without the origin, whose units are longer.
        return replace(value.place, parts=tuple(n // step for n in parts), origin=None)
    return _cut(call, begin, out.size(dim), dim)


def check_slices(flow, x: Tensor, index) -> None:
    """Refuses ``x[:, :6]`` and ``x[:, -6:]`` where a rank has fewer than six elements: it takes all
    of them, and one process may have more. Python clamps the numbers before it calls an op."""
    value = flow.value(x)
    if not value.split or value.place.axis is None:
        return
    items = index if isinstance(index, tuple) else (index,)
    taken = [_dims_taken(item) for item in items]
    dim = 0
    for item, count in zip(items, taken, strict=True):
        if item is Ellipsis:
            dim += x.dim() - sum(taken)
        elif isinstance(item, slice) and dim == value.place.axis:
            for number in (item.stop, None if item.start is None else -item.start):
                _check_count(flow, "slice", value, number, x.size(dim))
        dim += count


def _dims_taken(item) -> int:
    if item is None or item is Ellipsis:
        return 0
    return item.dim() if isinstance(item, Tensor) and item.dtype == torch.bool else 1


def _check_count(flow, name: str, value: Value, count, size: int) -> None:
    """``count``: how many elements are taken, from one end."""
    is_fixed = isinstance(count, int) and not is_local(count)
    if is_fixed and size <= count < size * flow.member[1]:
        flow.fail(
            name,
            f"{count} elements are taken along axis {value.place.axis}, of which this rank has "
            f"{size}, and one process may have more than {count}; {value.name} is {value.place}: "
            "sync it with all_gather before (mode='fwd_pre' here, or 'fwd_post' where it comes "
            "from)",
        )


def cat(call: TracedCall, out: Tensor) -> TracedPlacement | None:
    """Along the sharded axis, the result has the parts of one tensor after those of the other."""
    tensors = [t for t in call["tensors"] if t.numel() > 0 or t.dim() > 1] or list(call["tensors"])
    dim = call["dim"] % max(out.dim(), 1)
    values = [call.value(t) for t in tensors]
    first = next((v for v in values if v.split), None)
    if first is None or len(tensors) == 1 or any(not v.split for v in values):
        return None
    if any(v.place.axis != dim for v in values):
        return None
    return Split(dim, tuple(p for v in values for p in v.place.parts), first.place.origin)


def check_left(call: TracedCall, out: Tensor) -> None:
    """Refuses to repeat heads 0 times, by ``num_heads // num_kv_heads`` of a rank, say."""
    value = next((v for t, v in call.tensors if v.split and t.numel() > 0), None)
    if value is not None and out.numel() == 0:
        call.fail(
            f"it repeats {value.name}, which is {value.place}, 0 times, and nothing is left of it; "
            "the number of repeats is a quotient of local numbers: divide all attributes that it "
            "is computed from, such as num_heads and num_key_value_heads (sch[...].divide)"
        )


def repeat_interleave(call: TracedCall, out: Tensor) -> TracedPlacement | None:
    x = call["self"]
    value = call.value(x)
    if not value.split:
        return value.place
    dim, times = call["dim"], call["repeats"]
    if dim is None or value.place.axis is None or not isinstance(times, int):
        call.fail_split(value, "it is repeated")
    if dim % x.dim() != value.place.axis:
        return value.place
    check_left(call, out)
    call.flow.alike.note_numbers(f"the repeats of {call.name} in {call.flow.where()}", [times])
    return replace(value.place, parts=tuple(n * times for n in value.place.parts), origin=None)


RULES = {
    **dict.fromkeys(("split", "split_with_sizes", "chunk", "tensor_split", "unsafe_split",
                     "unsafe_chunk", "unsafe_split_with_sizes"), split),
    "unbind": unbind,
    "slice": piece,
    "narrow": piece,
    **dict.fromkeys(("cat", "concat", "concatenate"), cat),
    "repeat_interleave": repeat_interleave,
    **dict.fromkeys(("view", "reshape", "flatten", "unflatten", "ravel", "view_as", "reshape_as",
                     "_unsafe_view"), reshapes.reshape),
}  # fmt: skip
"""By op: the places of its results, from the call and the results. None: see the table of rows."""
