"""Writes in place: they give the tensor, its views and its base new values."""

from __future__ import annotations

import torch
from torch import Tensor

from deepsp.schedule.flow.values import Call, Entry, Split, Value


def overwrite(flow, call: Call, outputs) -> None:
    """Refuses a write that would change the placement of a parameter or buffer."""
    for tensor, value in outputs:
        held = flow.value(tensor)
        if held.place == value.place or held.uniform:
            continue
        if held.leaf is not None and id(held.leaf) in flow.names:
            flow.fail(
                call.name,
                f"expected what is written into {held.name} to be {held.place}, got {value.place}",
            )


def pass_to_aliases(flow, call: Call, outputs) -> None:
    """Gives a written tensor's views and its base new values, too."""
    for tensor, value in outputs:
        with torch._C.DisableTorchFunction():
            storage = _storage(tensor)
            if storage is None:
                continue
            others = [
                (t, v)
                for t, v in list(flow.values.items())
                if t is not tensor and v is not value and _storage(t) == storage
            ]
        for other, held in others:
            if type(held.place) is not type(value.place) and not held.uniform:
                flow.fail(
                    call.name,
                    f"{value.name} is {value.place} and shares memory with {held.name}, which is "
                    f"{held.place}; use the function that isn't in place",
                )
            place = held.place
            if type(place) is not type(value.place):
                if _same_axes(tensor, other):
                    place = value.place
                elif isinstance(value.place, Split):
                    place = Split(None, (), value.place.origin)
                else:
                    place = value.place
            new = Value(place, held.carries or value.carries, held.name, since=value.since)
            new.random = held.random or value.random
            if new.carries:
                inputs = [v for v in (held, value) if v.carries]
                flow.tape.append(Entry(call.name, flow.where(), inputs, [new]))
            if not (held.leaf is not None and held.leaf.requires_grad):
                flow.values[other] = new


def shares_memory(flow, tensor: Tensor) -> Value | None:
    """A tensor of the model that an unknown tensor is a view of."""
    storage = _storage(tensor)
    if storage is None:
        return None
    return next(
        (
            v
            for t, v in list(flow.values.items())
            if v.leaf is None and (v.carries or not v.replicated) and _storage(t) == storage
        ),
        None,
    )


def _storage(tensor: Tensor):
    try:
        return tensor.untyped_storage().data_ptr() or None  # None if it is empty
    except (RuntimeError, NotImplementedError):
        return None


def _same_axes(a: Tensor, b: Tensor) -> bool:
    return a.dim() == b.dim() and a.stride() == b.stride()
