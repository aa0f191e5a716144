"""Writes in place: they give the tensor, its views and its base new values."""

from __future__ import annotations

import torch
from torch import Tensor

from deepsp.schedule.flow.values import Entry, Split, TracedCall, Value


def overwrite(flow, call: TracedCall, outputs) -> None:
    """Refuses a write that would change the placement of a parameter or buffer."""
    for tensor, value in outputs:
        old = flow.value(tensor)
        if old.place == value.place or old.uniform:
            continue
        if old.leaf is not None and id(old.leaf) in flow.names:
            flow.fail(
                call.name,
                f"expected what is written into {old.name} to be {old.place}, got {value.place}",
            )


def pass_to_aliases(flow, call: TracedCall, outputs) -> None:
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
        for other, alias in others:
            if type(alias.place) is not type(value.place) and not alias.uniform:
                flow.fail(
                    call.name,
                    f"{value.name} is {value.place} and shares memory with {alias.name}, which is "
                    f"{alias.place}; use the function that isn't in place",
                )
            place = alias.place
            if type(place) is not type(value.place):
                if _same_axes(tensor, other):
                    place = value.place
                elif isinstance(value.place, Split):
                    place = Split(None, (), value.place.origin)
                else:
                    place = value.place
            new = Value(place, alias.carries or value.carries, alias.name, since=value.since)
            new.random = alias.random or value.random
            if new.carries:
                inputs = [v for v in (alias, value) if v.carries]
                flow.tape.append(Entry(call.name, flow.where(), inputs, [new]))
            if not (alias.leaf is not None and alias.leaf.requires_grad):
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
