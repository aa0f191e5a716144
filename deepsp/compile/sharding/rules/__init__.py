"""The pass's rules for ops.

For most ops, a row of :mod:`deepsp.placement` says what to do; :func:`by_rows` picks it by where
the operands' tokens are. An op has a rule here if a rank must compute something else than the same
op on its parts: sums over tokens, windows of them, attention.

A rule is a function of a :class:`Call`. It returns where the tokens are in the op's result, as
:class:`~deepsp.compile.sharding.tokens.Tokens` (a list of them for several results, None if every
rank has the full one). It also says what the rank computes with:

- ``call.want(node, tokens)``: this operand as the rank's part with its tokens there;
  ``call.want(node, None)``: the full operand. By default, an operand with tokens is passed as the
  rank's part, another one in full. ``call.gather(node, tokens)``: likewise, gathered from all
  ranks.
- ``call.lower = function``: a function without arguments that makes the new nodes, if they aren't
  the same op on those operands.
- ``call.refuse(reason)``: the result would not be that of one process.

Rules for ops of your own: :func:`rule`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from deepsp import placement
from deepsp.compile.sharding.nodes import has_tensor
from deepsp.compile.sharding.redistribute import movable
from deepsp.compile.sharding.report import CannotShard
from deepsp.compile.sharding.tokens import Sequence, Size, Tokens, same, symbols_of
from deepsp.placement import SUM, Row
from deepsp.placement.along import reduced
from deepsp.placement.table import overloads
from deepsp.sequence.recurrence.functions import captured

SHIFTED = "it combines tokens of different positions, as when a sequence is shifted"
OUTERMOST = (
    "; if tokens are made of several dimensions, as of images (height, width) and video (frames, "
    "...), mark the outermost one: prepare_inputs(..., seq_dim=that of the height, or the frames)"
)
_RULES: dict[Any, Callable] = {}  # by op, or by the name of a function of transformers' models
_REASONS: dict[Any, str] = {}
_DECOMPOSED: set = set()
_OF_OWN: list[Callable] = []  # the rule for ops with an operand that differs by rank
_FAMILIES = (
    "views",
    "products",
    "indexing",
    "reductions",
    "all_tokens",
    "windows",
    "attention",
    "flex",
    "losses",
    "functions",
    "sorting",
    "recurrences",
)


def rule(*ops) -> Callable:
    """Registers a rule for ops: ``@deepsp.compile.rule(torch.ops.mine.op.default)``.

    Args:
        ops: overloads. The decorated function takes a :class:`Call` and returns where the tokens
            are in the result.

    Returns:
        The decorator.

    Raises:
        ValueError: an op isn't an ``OpOverload``, such as ``torch.ops.aten.relu.default``.
    """
    for op in ops:
        if not isinstance(op, (torch._ops.OpOverload, torch._ops.HigherOrderOperator)):
            raise ValueError(
                f"expected op to be an overload, such as torch.ops.aten.relu.default, got {op!r}"
            )

    def register(function: Callable) -> Callable:
        for op in ops:
            _RULES[op] = function
        return function

    return register


def along_tokens(names: str) -> Callable:
    """Registers a rule for aten ops where they work along the tokens of their first operand;
    elsewhere, rows say what they do. The rule takes the call and those tokens."""

    def register(function: Callable) -> Callable:
        @rule(*overloads(names))
        def either(call: Call):
            tokens = call.tokens(call.operands[0])
            if not isinstance(tokens, Tokens) or tokens.dim not in reduced(call):
                return by_rows(call)
            return function(call, tokens)

        return function

    return register


def rule_of_rank_values(function: Callable) -> Callable:
    """Registers the rule for ops with an operand that each rank has for its own tokens."""
    _OF_OWN.append(function)
    return function


def decomposed(names: str) -> None:
    """Ops that are taken apart, since their parts have rules."""
    _DECOMPOSED.update(overloads(names))


def refused(names: str, reason: str) -> None:
    """Says why ops have no rule."""
    for op in overloads(names):
        _REASONS[op] = reason


def _load() -> None:
    for family in _FAMILIES:
        importlib.import_module(f"{__name__}.{family}")


def is_known(op) -> bool:
    """Whether an op has a rule, or a reason for having none."""
    _load()
    if op in _DECOMPOSED:
        return False
    return op in _RULES or op in _REASONS or placement.find(op) is not None


def find(call: Call) -> Callable:
    """The rule for a call, or one that refuses it."""
    _load()
    if any(n in call.graph.rank_values for n in call.operands):
        return _OF_OWN[0]
    exact = _RULES.get(captured.get(call.target, call.target))
    if exact is not None:
        return exact
    if call.target not in _REASONS and placement.find(call.target) is not None:
        return by_rows

    def refuse(call: Call):
        call.refuse(
            _REASONS.get(
                call.target,
                "there is no rule for it; if it works on each token alone, or you know what it "
                "does with tokens, register one with deepsp.compile.rule",
            )
        )

    return refuse


class Call(placement.Op):
    """One op of the user's graph, for its rule. Its tensors are nodes."""

    def __init__(self, graph, node: fx.Node, target):
        super().__init__(target, node.args, node.kwargs)
        self.graph, self.node = graph, node
        self.wants: dict[fx.Node, Tokens | None] = {}
        self.gathers: set[fx.Node] = set()
        self.lower: Callable = self.same_op
        self.decision = ""

    @property
    def operands(self) -> list[fx.Node]:
        """The nodes of tensors, each once."""
        return [n for n in self.node.all_input_nodes if has_tensor(n.meta.get("val"))]

    def tokens(self, node) -> Tokens | None:
        """Where an operand's tokens are; None if it has none."""
        return self.graph.values[node].tokens if isinstance(node, fx.Node) else None

    def shape(self, node: fx.Node) -> list[Size]:
        """The full shape of an operand."""
        return self.graph.shape_of(node)

    def dtype(self, tensor: fx.Node) -> torch.dtype:
        return tensor.meta["val"].dtype

    def is_one(self, size: Size) -> bool:
        return same(size, 1)

    def is_fixed(self, node: fx.Node) -> bool:
        """Whether each rank has only its own tokens of an operand."""
        return self.graph.values[node].full is None

    @property
    def out(self) -> list[Size]:
        """The full shape of the result, if it is one tensor."""
        return self.graph.shape_of(self.node)

    def refuse(self, reason: str):
        raise CannotShard(reason, self.node)

    def unmerged(self, tokens: Tokens) -> Tokens:
        """The tokens of a dimension that holds nothing else."""
        if not tokens.plain.alone:
            self.refuse("it works on tokens of a sequence that was merged with another dimension")
        return tokens.plain

    def want(self, node, tokens: Tokens | None) -> None:
        if isinstance(node, fx.Node):
            self.wants[node] = tokens

    def gather(self, node: fx.Node, tokens: Tokens | None = None) -> None:
        """Wants all ranks' tokens of an operand, or ``tokens`` of them."""
        self.wants[node] = tokens
        self.gathers.add(node)

    def only(self, *nodes) -> None:
        """Refuses tokens in any other operand."""
        for node in self.operands:
            if node not in nodes and self.tokens(node) is not None:
                self.refuse(f"{node.name}, an argument that must be replicated, is sharded")

    def window(self, sequence: Sequence, begin: Size, end: Size) -> tuple[Sequence, list[Size]]:
        """:meth:`Sequence.window`, settled by guards, which all ranks have, unless a border
        depends on more than lengths: an index that changes from call to call."""
        settled = symbols_of((begin, end)) <= symbols_of(self.graph.lengths)
        window, before = sequence.window(begin, end, self.graph.holds if settled else None)
        self.graph.note_empty(window)
        return window, before

    def operand(self, node: fx.Node):
        """The new node for an operand, in the wanted form."""
        tokens = self.wants.get(node, self.tokens(node))
        if node in self.graph.rank_values:
            return self.graph.values[node].local
        if node in self.gathers:
            return self.graph.gathered(node, tokens)
        if isinstance(tokens, list):
            return self.graph.values[node].local
        return self.graph.for_part(node) if tokens is None else self.graph.part(node, tokens)

    def arguments(self) -> tuple[tuple, dict]:
        return self.graph.mapped((self.node.args, self.node.kwargs), self.operand)

    def same_op(self):
        args, kwargs = self.arguments()
        return self.graph.call(self.target, *args, **kwargs)

    def replaced(self, /, **new):
        """The same op, with these arguments replaced."""
        args, kwargs = [], {}
        for argument in self.target._schema.arguments:
            value = new.get(argument.name, self.named[argument.name])
            if argument.name not in new:
                value = self.graph.mapped(value, self.operand)
            if argument.kwarg_only:
                kwargs[argument.name] = value
            else:
                args.append(value)
        return self.graph.call(self.target, *args, **kwargs)

    def one_of(self) -> Tokens:
        """The only tokens among the operands; others move there, or are refused."""
        kinds = {t.plain: t for t in map(self.tokens, self.operands) if t is not None}
        first, *others = kinds.values() or [None]
        if first is None or not all(movable(first, t) for t in others):
            self.refuse("its operands are sharded along different dimensions or sequences")
        if others:
            for node in self.operands:
                if self.tokens(node) is not None:
                    self.want(node, first)
        return first


def by_rows(call: Call, rows: list[Row] | None = None):
    """Wants the operands as the first row that fits their tokens does. Operands that are only local
    decide; the others are cut as needed. In a product, or element by element, an operand that is
    sharded along another dimension is gathered: attention by hand keeps its queries' tokens on each
    rank, and gathers keys and values.

    Returns:
        Where the tokens are in the results; None if the ranks' results combine to a full one.
    """
    rule = placement.find(call.target)
    rows = rule.rows(call) if rows is None else rows
    rows = [r for r in rows if SUM not in r.places]
    decides = [n for n in call.operands if call.is_fixed(n)] or call.operands
    decides = [n for n in decides if isinstance(call.tokens(n), Tokens)]
    fitting = []
    for node in decides:
        for row in rows:
            dim, place = call.tokens(node).dim, row.place(node)
            # An operand that isn't read decides only where it is written, or for a full result.
            unread = place is placement.ANYTHING and row.outputs in (None, dim)
            if place == dim or unread:
                fitting.append((node, row))
    if not fitting:
        call.refuse(rule.why or "its operands are sharded along different dimensions or sequences")
    out = call.node.meta["val"]
    shape = call.out if isinstance(out, torch.Tensor) else []

    def preference(x):
        """Where tokens are merged with another dimension, an operand that tells how is first."""
        node, row = x
        written = row.place(node) is placement.ANYTHING and row.outputs is not None
        merged = not same(call.tokens(node).inner, 1)
        return isinstance(row.outputs, str), written, call.shape(node) != shape, not merged

    first, row = min(fitting, key=preference)
    tokens = call.tokens(first)
    row = _by_rows_of_a_mask(call, rows, row, tokens)
    for node in call.operands:
        _want(call, node, row.place(node), tokens, rule)
    if isinstance(row.outputs, str):
        lower = _COMBINED.get(call.target)
        if lower is not None:
            lower(call, tokens)
        elif row.outputs == SUM:
            call.lower = lambda: call.graph.all_reduce(call.same_op())
            call.decision = "Partial, all-reduced"
        else:
            call.refuse(f"{rule.why}, and there is no rule for that")
        return None
    if row.outputs is None:  # full operands, whose gradients are full
        full = [n for n in call.operands if row.place(n) is None]
        args, kwargs = call.graph.mapped(
            (call.node.args, call.node.kwargs),
            lambda n: call.graph.full(n) if n in full else call.operand(n),
        )
        call.lower = lambda: call.graph.call(call.target, *args, **kwargs)
        return None
    place = tokens.at(row.outputs)
    several = isinstance(out, (list, tuple))
    return [place if isinstance(x, torch.Tensor) else None for x in out] if several else place


def _by_rows_of_a_mask(call: Call, rows: list[Row], summed: Row, tokens: Tokens) -> Row:
    """The row to use instead of a sum over tokens, for a square matrix that every rank has in full:
    a mask has tokens in its rows, too."""
    if summed.outputs != SUM:
        return summed
    for row in rows:
        for node, place in row.inputs:
            if (
                isinstance(row.outputs, int)
                and isinstance(place, int)
                and summed.place(node) is not None
                and not call.is_fixed(node)
                and same(call.shape(node)[place], tokens.full)
            ):
                return row
    return summed


def _want(call: Call, node: fx.Node, place, tokens: Tokens, rule: placement.Rule) -> None:
    have = call.tokens(node)
    wanted = tokens.at(place) if isinstance(place, int) else None
    if place is placement.ANYTHING:
        return
    if call.is_fixed(node) and isinstance(have, Tokens):
        if wanted is not None and have.dim == place:
            if have.plain != wanted.plain:
                if not movable(have, wanted):
                    call.refuse(SHIFTED)
                call.decision = "tokens moved between ranks"
        elif not rule.why or node in call.gathers:
            if rule.family == "products":  # attention by hand: keys and values
                call.graph.attended.add(node)
            return call.gather(node, wanted)
        else:
            call.refuse(f"{node.name}, an argument that must be replicated, is sharded")
    if wanted is not None and not call.graph.equal(call.shape(node)[place], tokens.full):
        call.refuse(
            f"expected {node.name} to have {tokens.full} tokens in dimension {place}, got "
            f"{call.shape(node)[place]}"
        )
    call.want(node, wanted)


_COMBINED: dict[Any, Callable] = {}


def combined(*ops) -> Callable:
    """Registers how ranks' results combine, for rows that say so: a function of the call and its
    tokens that sets ``call.lower``."""

    def register(function: Callable) -> Callable:
        for op in ops:
            _COMBINED[op] = function
        return function

    return register


def agree(graph, node: fx.Node, target, args, kwargs, new: fx.Node) -> fx.Node:
    """Makes a random value that every rank holds in full the same on all: rank 0's."""
    aten = torch.ops.aten
    attends = target is aten.scaled_dot_product_attention.default
    if attends and (args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)) == 0:
        return new
    dropout, drawn = target is aten.dropout.default, new
    if dropout:
        if not args[2] or args[1] == 0:
            return new
        ones = graph.call(aten.ones_like.default, args[0])
        drawn = graph.call(aten.dropout.default, graph.call(aten.detach.default, ones), *args[1:])
    value = graph.env[drawn]
    if not isinstance(value, torch.Tensor) or value.requires_grad:
        raise CannotShard("it is random, and every rank would draw different numbers", node)
    drawn = graph.all_reduce(graph.call(aten.mul.Scalar, drawn, int(graph.rank == 0)))
    return graph.call(aten.mul.Tensor, args[0], drawn) if dropout else drawn
