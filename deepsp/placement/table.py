"""Rows: the ways in which an op can be computed on shards, keyed by its overload.

A rule is a function of an :class:`Op` that returns rows. It knows nothing of ranks, graphs or
gradients. The compile pass rewrites by the rows, and a schedule's dry run refuses by them. The form
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
"""The placement of a tensor. ``None``: every rank has it (Replicate). An int: each rank has a part
along that dimension (Shard). A word such as :data:`SUM`: how the ranks' tensors combine
(Partial)."""

SUM, MEAN, MAX, MIN, ANY, ALL = "sum", "mean", "max", "min", "any", "all"
ANYTHING = ...
"""The place of an input that the op doesn't read."""


class Op:
    """A call of an op, for rules. The caller decides what a tensor is."""

    def __init__(self, target, args: Sequence, kwargs: Mapping):
        self.target = target
        self.named: dict[str, Any] = {}  # all arguments by their schema names, with defaults
        schema = getattr(target, "_schema", None)
        for i, argument in enumerate(schema.arguments if schema is not None else ()):
            if argument.kwarg_only or i >= len(args):
                default = argument.default_value if argument.has_default_value() else None
                self.named[argument.name] = kwargs.get(argument.name, default)
            else:
                self.named[argument.name] = args[i]

    def __getitem__(self, name: str) -> Any:
        """An argument by its schema name; None if the op has none."""
        return self.named.get(name)

    @property
    def values(self) -> list:
        return list(self.named.values())

    @property
    def written(self) -> list:
        """The arguments that the op writes into, as its schema says."""
        schema = getattr(self.target, "_schema", None)
        arguments = schema.arguments if schema is not None else ()
        return [self[a.name] for a in arguments if a.alias_info and a.alias_info.is_write]

    @property
    def operands(self) -> list:
        """The tensors among the arguments, each once."""
        raise NotImplementedError

    def shape(self, tensor) -> list:
        """The full sizes: ints or expressions."""
        raise NotImplementedError

    def dtype(self, tensor) -> torch.dtype:
        raise NotImplementedError

    def is_one(self, size) -> bool:
        """Whether a size is known to be 1."""
        return isinstance(size, int) and size == 1


@dataclass(frozen=True)
class Row:
    """If each rank calls the op on inputs with these places, it makes outputs with these places.

    inputs: a place for each operand; one that isn't listed is replicated.
    outputs: the place of every result.
    """

    inputs: tuple[tuple[Any, Place], ...]
    outputs: Place

    def place(self, tensor) -> Place:
        return next((place for x, place in self.inputs if x is tensor), None)

    @property
    def places(self) -> set:
        return {place for _, place in self.inputs}


@dataclass(frozen=True)
class Rule:
    rows: Callable[[Op], list[Row]]
    why: str  # why a dimension has no row, for errors

    @property
    def family(self) -> str:
        return self.rows.__module__.rpartition(".")[2]


_RULES: dict[OpOverload, Rule] = {}
_FAMILIES = ("pointwise", "products", "moves", "along", "lookups", "attention")


def row(outputs, *inputs) -> list[Row]:
    """A list of one row; empty if a tensor that is passed twice would need two places."""
    placed: list[tuple] = []
    for x, place in inputs:
        before = [p for y, p in placed if y is x]
        if before and before[0] != place:
            return []
        if not before and x is not None:
            placed.append((x, place))
    return [Row(tuple(placed), outputs)]


def sharded(dims: Iterable[int], operands, *others) -> list[Row]:
    """A row for each of these dimensions, along which ``operands`` and the result are sharded.
    ``others``: further operands, with their places."""
    return [r for d in dims for r in row(d, *((x, d) for x in operands), *others)]


def along(op: Op, over: Iterable[int], linear: bool = False) -> list[Row]:
    """Rows for all dimensions of the first operand except ``over``, along which ranks depend on
    each other. The other operands are replicated."""
    x, *rest = op.operands
    others = [(y, None) for y in rest]
    ndim = len(op.shape(x))
    excluded = {d % max(ndim, 1) for d in over}
    rows = sharded((d for d in range(ndim) if d not in excluded), [x], *others)
    return rows + (row(SUM, (x, SUM), *others) if linear else [])


def rule(names: str, why: str = "") -> Callable:
    """Registers a rule for aten ops, whose names are separated by blanks: for all overloads of
    ``max``, or one overload, ``max.dim``."""

    def register(function: Callable) -> Callable:
        for op in overloads(names):
            _RULES[op] = Rule(function, why)
        return function

    return register


def overloads(names: str, namespace: str = "aten") -> Iterable[OpOverload]:
    """All overloads of ops, without those that this version of torch lacks."""
    for name in names.split():
        name, _, overload = name.partition(".")
        packet = getattr(getattr(torch.ops, namespace), name, None)
        for name_of in packet.overloads() if packet is not None else ():
            if not overload or name_of == overload:
                yield getattr(packet, name_of)


@functools.cache
def find(op: OpOverload) -> Rule | None:
    """The rule of an op; for ``add_``, ``out=`` and foreach, that of the op they are made from."""
    for family in _FAMILIES:
        importlib.import_module(f"deepsp.placement.{family}")
    rule = _RULES.get(op)
    name = getattr(op, "_opname", "")
    if rule is None and name.startswith("_foreach_"):  # the op on each tensor of the lists
        each = next(iter(overloads(name.removeprefix("_foreach_").removesuffix("_"))), None)
        rule = find(each) if each is not None else None
        return rule if rule is not None and rule.family == "pointwise" else None
    if rule is None and torch.Tag.pointwise in getattr(op, "tags", ()):
        rule = _RULES[torch.ops.aten.relu.default]
    if rule is None:
        out_of_place = functional(op)
        rule = None if out_of_place is None else find(out_of_place)
    return rule


def functional(op: OpOverload) -> OpOverload | None:
    """The op that returns the tensors that ``op`` writes in place or into ``out=``; None if there
    is none."""
    schema = getattr(op, "_schema", None)
    if schema is None or not schema.is_mutable:
        return None
    name = op._opname.removesuffix("_")
    packet = getattr(getattr(torch.ops, op.namespace), name, None)
    if name != op._opname and not any(a.kwarg_only and a.alias_info for a in schema.arguments):
        return getattr(packet, op._overloadname, None)
    wanted = [(a.name, str(a.type)) for a in schema.arguments if a.alias_info is None]
    # packet.__getattr__ would make a new overload, which no table knows.
    for overload in (getattr(packet, name) for name in packet.overloads()) if packet else ():
        arguments = [(a.name, str(a.type)) for a in overload._schema.arguments]
        if arguments == wanted and not overload._schema.is_mutable:
            return overload
    return None
