"""The dry run's records of tensors and calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from deepsp.placement import Op
from deepsp.schedule.placement import PARTIAL, REPLICATE, Partial, Placement, Replicate, Shard


@dataclass(frozen=True)
class Split:
    """A Shard with its axis counted from the front, and with the parts of this rank's tensor.

    axis: None: unknown.
    parts: this rank's tensor along the axis is a row of parts, each a rank's part of a full tensor:
        their lengths. One part: the ranks' tensors one after another are the full tensor. Several:
        fused projections, or tokens merged with the batch dimension before them.
    origin: the sync or parameter shard that split it.
    merged: the parts are rows of a merged dimension, and not projections.
    """

    axis: int | None
    parts: tuple[int, ...] = ()
    origin: object | None = field(default=None, compare=False)
    merged: bool = field(default=False, compare=False)

    def at(self, axis: int | None) -> Split:
        return replace(self, axis=axis)

    def __str__(self) -> str:
        if self.axis is None:
            return "Shard(unknown axis)"
        parts = f" in {len(self.parts)} parts" if len(self.parts) > 1 else ""
        return f"Shard({self.axis}){parts}"


@dataclass(frozen=True)
class Item:
    """One head of a list of this rank's heads: ``x.split(head_dim, -1)``, ``x.unbind(2)``.

    index, count: its place in the list of all ranks' heads, and how many there are.
    local: how many of them this rank has.
    made: how it was computed: the same for all items that were computed in the same way.
    origin: the sync or parameter shard that split the heads.
    """

    index: int
    count: int
    local: int
    made: object
    origin: object | None = field(default=None, compare=False)

    def __str__(self) -> str:
        return f"item {self.index} of a list of heads"


TracedPlacement = Replicate | Partial | Split | Item


def internal(placement: Placement, tensor: Tensor, rank: int) -> TracedPlacement:
    if not isinstance(placement, Shard):
        return placement
    if placement.axis is None:
        return Split(None, (), placement.origin)
    axis = placement.axis % tensor.dim()
    sizes = getattr(placement.origin, "part_sizes", None)
    parts = tuple(sizes(rank)) if sizes is not None else ()
    if sum(parts) != tensor.size(axis):
        parts = (tensor.size(axis),)
    return Split(axis, parts, placement.origin)


def public(place: TracedPlacement) -> Placement:
    assert not isinstance(place, Item)
    if not isinstance(place, Split):
        return place
    return Shard(place.axis if len(place.parts) == 1 else None, place.origin)


@dataclass(eq=False)
class Value:
    """One tensor at one time: a write in place gives the tensor a new value.

    carries: a gradient goes through it.
    uniform: the same number everywhere, as from ``torch.zeros``: it fits any placement.
    counted: it counts the elements of a sharded dimension, as ``torch.arange(x.size(1))`` does: its
        sizes of 1 aren't broadcast.
    random: it depends on random numbers, which differ between the dry run and later calls.
    noted: it will be compared across the ranks.
    made: how a replicated tensor was computed, if it was while there are items.
    name: for messages. since: the module that made it partial.
    state: of its gradient, found walking backwards: "replicated" | "partial" for a replicated
        tensor, "own" for others, None: it gets none. why: the entry that the gradient is from.
    """

    place: TracedPlacement
    carries: bool
    name: str
    uniform: bool = False
    counted: bool = False
    since: str = ""
    state: str | None = None
    why: Entry | None = None
    leaf: Tensor | None = None
    random: bool = False
    noted: bool = False
    made: object = None

    @property
    def replicated(self) -> bool:
        return self.place is REPLICATE

    @property
    def partial(self) -> bool:
        return self.place is PARTIAL

    @property
    def split(self) -> bool:
        return isinstance(self.place, Split)

    @property
    def item(self) -> bool:
        return isinstance(self.place, Item)


@dataclass(eq=False)
class Entry:
    """A call on the tape. ``sync``: the schedule's sync, if the call is one."""

    name: str
    module: str
    inputs: list[Value]
    outputs: list[Value]
    sync: Any = None

    def __str__(self) -> str:
        return f"{self.name} in {self.module}"


@dataclass(frozen=True)
class Trusted:
    """Marks a user's backward function, whose result the dry run trusts."""

    mode: str = "function"


class TracedCall(Op):
    """An op about to be called, on this rank's tensors.

    Attributes:
        name: the op's name, with its namespace unless that is aten; without overload and the
            underscore of an in-place op.
        tensors: (tensor, its value), in the order of the arguments.
    """

    def __init__(self, flow, target, args, kwargs, name: str | None = None):
        super().__init__(target, args, kwargs)
        self.flow, self.args, self.kwargs = flow, args, kwargs
        self.name = name or name_of(target)
        arguments = target._schema.arguments if target is not None else ()
        outs = {a.name for a in arguments if a.kwarg_only and a.alias_info is not None}
        read = {k: x for k, x in kwargs.items() if k not in outs}  # out= isn't read
        self._tensors = list(tensors_in((args, read)))
        self.tensors = [(t, flow.value(t)) for t in self._tensors]

    @property
    def operands(self) -> list[Tensor]:
        return list({id(t): t for t in self._tensors}.values())

    def shape(self, tensor: Tensor) -> list[int]:
        """A shape in which a size is 1 only if the full tensor's is: this rank's part of a sharded
        dimension may be 1. ``squeeze`` removes local sizes of 1, so it gets the local shape."""
        value, shape = self.flow.value(tensor), list(tensor.shape)
        place = value.place
        if value.counted:
            return [n + (n == 1) for n in shape]
        if isinstance(place, Split) and self.name != "squeeze":
            for dim in range(len(shape)) if place.axis is None else [place.axis]:
                shape[dim] = max(shape[dim], 1) * self.flow.member[1] + (self.flow.member[1] == 1)
        return shape

    def keep_first(self, name: str, count: int) -> None:
        """Calls the op with the first tensors of an argument that is a list."""
        tensors = list(self[name])[:count]
        if name in self.kwargs:
            self.kwargs = {**self.kwargs, name: tensors}
        else:  # the first argument
            self.args = (tensors, *self.args[1:])

    def dtype(self, tensor: Tensor) -> torch.dtype:
        return tensor.dtype

    def role(self, tensor: Tensor) -> str:
        """The op's name for an operand."""
        name = next((n for n, x in self.named.items() if x is tensor), None)
        count = next((i for i, t in enumerate(self.operands) if t is tensor), 0)
        return name or f"operand {count}"

    def value(self, x) -> Value | None:
        return self.flow.value(x) if isinstance(x, Tensor) else None

    def place(self, x) -> TracedPlacement:
        return self.flow.value(x).place if isinstance(x, Tensor) else REPLICATE

    def fail(self, text: str) -> NoReturn:
        self.flow.fail(self.name, text)

    def fail_partial(self, value: Value, text: str) -> NoReturn:
        at = f" at {value.since}" if value.since else ""
        self.fail(
            f"{text}; {value.name} is Partial: sync it{at} with mode='fwd_post' and all_reduce or "
            "reduce_scatter"
        )

    def fail_split(self, value: Value, text: str) -> NoReturn:
        fix = ""
        if value.place.axis is None:
            fix = (
                "a view has left open which of its sizes is this rank's part; read numbers of "
                "heads from the tensor (x.shape), or divide the module's attribute "
                "(sch[...].divide), and pass their size as unit= to shard; or "
            )
        self.fail(
            f"{text}; {value.name} is {value.place}: {fix}sync it with all_gather before "
            "(mode='fwd_pre' here, or 'fwd_post' where it comes from)"
        )


def name_of(target) -> str:
    name = target._opname.removesuffix("_")
    return name if target.namespace == "aten" else f"{target.namespace}.{name}"


def tensors_in(x) -> Iterator[Tensor]:
    """All tensors in nested containers."""
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, (list, tuple, set)):
        for item in x:
            yield from tensors_in(item)
    elif isinstance(x, Mapping):
        for item in x.values():
            yield from tensors_in(item)
    elif isinstance(x, slice):
        yield from tensors_in((x.start, x.stop, x.step))
    elif is_dataclass(x) and not isinstance(x, type):
        for f in fields(x):
            yield from tensors_in(getattr(x, f.name, None))


def differentiable(x: Tensor) -> bool:
    return x.dtype.is_floating_point or x.dtype.is_complex
