"""Rows: the ways in which an op can be computed on shards, keyed by its overload.

A rule is a function of an :class:`Op` and returns rows. It knows nothing of ranks, graphs or
gradients: the compile pass rewrites by its rows, and a schedule's dry run refuses by them. The form
is that of DTensor's single-dimension strategies (torch.distributed.tensor).
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload

Place = int | str | None
"""Of one tensor: ``None``, every rank has it (Replicate); an int, each rank has a part along that
dimension (Shard); a word, how the ranks' tensors combine to it (Partial), as :data:`SUM`."""

SUM, MEAN, MAX, MIN, ANY, ALL = "sum", "mean", "max", "min", "any", "all"
ANYTHING = ...
"""Of an input: it doesn't matter, since the op doesn't read it."""


class Op:
    """A call of an op, as rules see it. Tensors are whatever the caller has for them."""

    def __init__(self, target, args: Sequence, kwargs: Mapping):
        self.target = target
        self.named: dict[str, Any] = {}  # arguments by their names in the schema, with defaults
        schema = getattr(target, "_schema", None)
        for i, argument in enumerate(schema.arguments if schema is not None else ()):
            if argument.kwarg_only or i >= len(args):
                default = argument.default_value if argument.has_default_value() else None
                self.named[argument.name] = kwargs.get(argument.name, default)
            else:
                self.named[argument.name] = args[i]

    def __getitem__(self, name: str) -> Any:
        """An argument by its name in the op's schema; None if there is none."""
        return self.named.get(name)

    @property
    def values(self) -> list:
        return list(self.named.values())

    @property
    def operands(self) -> list:
        """The tensors among the arguments, each once."""
        raise NotImplementedError

    def shape(self, tensor) -> list:
        """Full sizes: ints, or expressions."""
        raise NotImplementedError

    def dtype(self, tensor) -> torch.dtype:
        raise NotImplementedError

    def is_one(self, size) -> bool:
        """Whether a size is known to be 1."""
        return isinstance(size, int) and size == 1


@dataclass(frozen=True)
class Row:
    """With ``inputs`` placed so, each rank's call of the op makes ``outputs``.

    inputs: a place for each operand; one that isn't named is replicated.
    outputs: of every result alike, or a tuple, one for each.
    """

    inputs: tuple[tuple[Any, Place], ...]
    outputs: Place | tuple[Place, ...]

    def place(self, tensor) -> Place:
        return next((place for x, place in self.inputs if x is tensor), None)

    @property
    def places(self) -> set:
        return {place for _, place in self.inputs}


@dataclass(frozen=True)
class Rule:
    rows: Callable[[Op], list[Row]]
    why: str  # what the op does along a dimension that has no row

    @property
    def family(self) -> str:
        return self.rows.__module__.rpartition(".")[2]


_RULES: dict[OpOverload, Rule] = {}
_FAMILIES = ("pointwise", "products", "moves", "along", "lookups", "attention")


def row(outputs, *inputs) -> list[Row]:
    """A list of one row; of none where a tensor that is given twice would need two places."""
    placed: list[tuple] = []
    for x, place in inputs:
        before = [p for y, p in placed if y is x]
        if before and before[0] != place:
            return []
        if not before and x is not None:
            placed.append((x, place))
    return [Row(tuple(placed), outputs)]


def rule(names: str, why: str = "") -> Callable:
    """Registers a rule for all overloads of the aten ops that are named, separated by blanks, or of
    those overloads alone that are (``max.dim``)."""

    def register(function: Callable) -> Callable:
        for op in overloads(names):
            _RULES[op] = Rule(function, why)
        return function

    return register


def overloads(names: str) -> Iterable[OpOverload]:
    """All overloads of aten ops; one that this version of torch lacks has none."""
    for name in names.split():
        name, _, overload = name.partition(".")
        packet = getattr(torch.ops.aten, name, None)
        for known in packet.overloads() if packet is not None else ():
            if not overload or known == overload:
                yield getattr(packet, known)


@functools.cache
def find(op: OpOverload) -> Rule | None:
    """The rule of an op, or of the one that makes what it writes (``add_``, ``out=``, foreach)."""
    if not _RULES:
        for family in _FAMILIES:
            importlib.import_module(f"deepsp.placement.{family}")
    known = _RULES.get(op)
    name = getattr(op, "_opname", "")
    if known is None and name.startswith("_foreach_"):  # the op of each tensor in its lists
        each = next(iter(overloads(name.removeprefix("_foreach_").removesuffix("_"))), None)
        known = find(each) if each is not None else None
        return known if known is not None and known.family == "pointwise" else None
    if known is None and torch.Tag.pointwise in getattr(op, "tags", ()):
        known = _RULES[torch.ops.aten.relu.default]
    if known is None:
        out_of_place = functional(op)
        known = None if out_of_place is None else find(out_of_place)
    return known


def functional(op: OpOverload) -> OpOverload | None:
    """The op that returns what ``op`` writes in place or into ``out=``; None if there is none."""
    schema = getattr(op, "_schema", None)
    if schema is None or not schema.is_mutable:
        return None
    name = op._opname.removesuffix("_")
    packet = getattr(getattr(torch.ops, op.namespace), name, None)
    if name != op._opname and not any(a.kwarg_only and a.alias_info for a in schema.arguments):
        return getattr(packet, op._overloadname, None)
    given = [(a.name, str(a.type)) for a in schema.arguments if a.alias_info is None]
    # Not packet.__getattr__: it makes a new overload, which no table of torch or deepsp knows.
    for overload in (getattr(packet, name) for name in packet.overloads()) if packet else ():
        known = [(a.name, str(a.type)) for a in overload._schema.arguments]
        if known == given and not overload._schema.is_mutable:
            return overload
    return None
