"""Heads one by one: the items of a list into which a rank cuts its part.

``x.split(head_dim, -1)`` and ``x.unbind(2)`` give a rank its own heads, and item n is another head
on each rank. The dry run hands out as many items as one process has, so that code that treats head
n in its own way shows. Any op may use an item, with items of the same number and with replicated
tensors, if it is called in the same way for every item; ``cat`` or ``stack`` of all items, in
order, is sharded again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from torch import Tensor

from deepsp.schedule.flow.lengths import is_local
from deepsp.schedule.flow.values import Entry, Item, Split, TracedCall, Value, tensors_in

_JOINS = {"cat", "concat", "concatenate", "stack"}


def cut(call: TracedCall, outs) -> list[Item] | None:
    """The items of a list of heads; None: it isn't one."""
    place, outs = call.place(call["self"]), list(outs)
    if len(place.parts) != 1:
        return None
    if call.name != "unbind":
        sizes = {t.size(call["dim"]) for t in outs}
        if len(sizes) != 1 or not _by_heads(call, place, sizes.pop()):
            return None
    call.flow.has_items = True
    made = _number(call)
    total = len(outs) * call.flow.member[1]
    return [Item(n, total, len(outs), made, place.origin) for n in range(len(outs))]


@dataclass(frozen=True)
class Joined:
    """The origin of heads that were joined. unit: the elements of one head."""

    unit: int


class HeadsError(TypeError, ValueError):
    """The length is read. Python's own code, such as list(), goes on without it."""


class Heads(tuple):
    """The items of all ranks. Their number can't be read: a call of the model has fewer."""

    def __len__(self):
        raise HeadsError(
            "expected no len() of a list of heads, since each rank has its own heads only; iterate "
            "over the list, without range()"
        )


def hand_out(flow, x: Tensor, outs):
    """The list that the model gets, if a function has cut ``x`` into this rank's heads."""
    values = [flow.value(t) for t in outs]
    if flow.value(x).item or not values or not all(v.item for v in values):
        return outs
    heads = list(outs)
    with flow.paused():
        for index in range(len(outs), values[0].place.count):
            like = index % len(outs)
            heads.append(outs[like].view_as(outs[like]))
            value = values[like]
            place = dataclasses.replace(value.place, index=index)
            flow.values[heads[-1]] = Value(place, value.carries, value.name, random=value.random)
            flow.tape.append(Entry("split", flow.where(), [value], [flow.values[heads[-1]]]))
    return Heads(heads)


def _by_heads(call: TracedCall, place: Split, size: int) -> bool:
    """Whether each piece is one head, and one process has as many pieces as all ranks have."""
    number = call.flow.sizes[0] if call.flow.sizes else None
    if call.name == "chunk":  # so many chunks are this rank's
        return is_local(number)
    if call.name != "split" or not isinstance(number, int) or is_local(number):
        return False
    unit = getattr(place.origin, "units", None) or [getattr(place.origin, "unit", None)]
    return number == size and size in (1, unit[0])


def place_of(call: TracedCall):
    """The places of an op's results, some of whose operands are items."""
    values = [v for _, v in call.tensors]
    first = next(v for v in values if v.item)
    item = first.place
    if call.name in _JOINS and len({v.place.index for v in values if v.item}) > 1:
        return _joined(call, values)
    if call.written or call.name.startswith("deepsp."):
        _refuse(call, first, "it writes into one, or communicates")
    for value in values:
        other = value.place
        alike = value.item and (other.index, other.count) == (item.index, item.count)
        if not alike and not value.replicated:
            _refuse(call, first, f"it is combined with {value.name}, which is {other}")
    made = _number(call)

    def places(out):
        count = len(list(tensors_in(out)))
        return [dataclasses.replace(item, made=(made, n)) for n in range(count)]

    return places


def _joined(call: TracedCall, values: list[Value]):
    first = next(v for v in values if v.item)
    places = [v.place for v in values]
    if not all(v.item for v in values):
        _refuse(call, first, "it is joined with a tensor that isn't one")
    if [p.index for p in places] != list(range(first.place.count)):
        _refuse(call, first, "not all of them are joined, each once and in order")
    if any(p.made != first.place.made for p in places):
        _refuse(call, first, "not all of them were computed in the same way")
    # This rank has the first of them, and the others stand for those of other ranks.
    call.keep_first("tensors", first.place.local)
    dim, count = call["dim"], first.place.local

    def places(out):
        length = out.size(dim)
        return [Split(dim % out.dim(), (length,), Joined(length // count))]

    return places


def note(call: TracedCall, value: Value, n: int) -> None:
    """Notes how the n-th result, which is replicated, was computed: the loop over the items may
    compute it for each again."""
    if not value.random and not call.written:
        value.made = (_number(call), n)


def _number(call: TracedCall) -> int:
    """A number for calls of an op with the same operands, or with items computed alike."""

    def describe(x):
        if isinstance(x, Tensor):
            value = call.flow.value(x)
            made = value.place.made if value.item else value.made
            return value if made is None else (value.item, made)
        if isinstance(x, Mapping):
            return tuple((key, describe(item)) for key, item in x.items())
        return tuple(map(describe, x)) if isinstance(x, (list, tuple)) else repr(x)

    key = call.target, describe(call.args), describe(call.kwargs)
    return call.flow.made.setdefault(key, len(call.flow.made))


def _refuse(call: TracedCall, value: Value, why: str) -> NoReturn:
    call.fail(
        f"{value.name} is {value.place}, which is another one on each rank, and {why}; treat all "
        "items alike, and join them in order with cat or stack before"
    )
