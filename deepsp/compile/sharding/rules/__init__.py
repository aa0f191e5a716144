"""What each op does with tokens: one small rule per family of ops.

A rule is a function of a :class:`Call`. It says where the tokens are in the op's result, given
where they are in its operands, by returning
:class:`~deepsp.compile.sharding.tokens.Tokens` (a list of them for several results, None where
every rank then has the full one), and what the rank computes with:

- ``call.want(node, tokens)``: this operand as the rank's part with its tokens there;
  ``call.want(node, None)``: full. Without either, an operand is given as its own part, or full
  where it has no tokens. ``call.gather(node, tokens)``: likewise, gathered from all ranks first.
- ``call.lower = function``: a function without arguments that makes the new nodes, where that is
  not the same op on those operands.
- ``call.refuse(reason)``: the result isn't the same computation.

Rules for ops of your own: :func:`rule`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from deepsp.compile.sharding.messages import CannotShard
from deepsp.compile.sharding.nodes import has_tensor
from deepsp.compile.sharding.tokens import Size, Tokens, same

SHIFTED = "it combines tokens of different positions, as when a sequence is shifted"
OUTERMOST = (
    "; if tokens are made of several dimensions, as of images (height, width) and video (frames, "
    "...), mark the outermost one: prepare_inputs(..., seq_dim=that of the height, or the frames)"
)
_RULES: dict[Any, Callable] = {}
_REASONS: dict[Any, str] = {}
_FAMILIES = (
    "pointwise", "views", "products", "indexing", "reductions", "attention", "flex", "losses",
    "functions", "sorting",
)  # fmt: skip


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


def overloads(names: str) -> list:
    """All overloads of the aten ops that are named, separated by blanks. One that this version of
    torch lacks has none."""
    found = []
    for name in names.split():
        packet = getattr(torch.ops.aten, name, None)
        if packet is not None:
            found += [getattr(packet, overload) for overload in packet.overloads()]
    return found


def refused(names: str, reason: str) -> None:
    """Says why ops have no rule."""
    for op in overloads(names):
        _REASONS[op] = reason


def _load() -> None:
    for family in _FAMILIES:
        importlib.import_module(f"{__name__}.{family}")


def is_known(op) -> bool:
    """Whether there is a rule for an op, or a reason why there is none."""
    _load()
    return op in _RULES or op in _REASONS or torch.Tag.pointwise in op.tags


def find(call: Call) -> Callable:
    """The rule for a call, or one that refuses it."""
    _load()
    if any(n in call.graph.own for n in call.operands):
        from deepsp.compile.sharding.rules.sorting import follow

        return follow
    known = _RULES.get(call.target)
    if known is not None:
        return known
    if torch.Tag.pointwise in getattr(call.target, "tags", ()):
        from deepsp.compile.sharding.rules.pointwise import pointwise

        return pointwise

    def refuse(call: Call):
        call.refuse(
            _REASONS.get(
                call.target,
                "there is no rule for it; if it works on each token alone, or you know what it "
                "does with tokens, register one with deepsp.compile.rule",
            )
        )

    return refuse


class Call:
    """One op of the user's graph, as a rule sees it."""

    def __init__(self, graph, node: fx.Node, target):
        self.graph, self.node, self.target = graph, node, target
        self.wants: dict[fx.Node, Tokens | None] = {}
        self.gathers: set[fx.Node] = set()
        self.lower: Callable = self.same_op
        self.said = ""
        self._bind()

    def _bind(self) -> None:
        """Arguments by their names in the schema, with defaults."""
        self.named: dict[str, Any] = {}
        schema = getattr(self.target, "_schema", None)
        if schema is None:
            return
        given = list(self.node.args)
        for i, argument in enumerate(schema.arguments):
            if argument.kwarg_only or i >= len(given):
                default = argument.default_value if argument.has_default_value() else None
                self.named[argument.name] = self.node.kwargs.get(argument.name, default)
            else:
                self.named[argument.name] = given[i]

    def __getitem__(self, name: str):
        """An argument by its name in the op's schema."""
        return self.named.get(name)

    @property
    def operands(self) -> list[fx.Node]:
        """The nodes of tensors, each once."""
        return [n for n in self.node.all_input_nodes if has_tensor(n.meta.get("val"))]

    def tokens(self, node) -> Tokens | None:
        """Where an operand's tokens are; None where it has none."""
        return self.graph.values[node].tokens if isinstance(node, fx.Node) else None

    def shape(self, node: fx.Node) -> list[Size]:
        """The full shape of an operand."""
        return self.graph.shape_of(node)

    @property
    def out(self) -> list[Size]:
        """The full shape of the result, if it is one tensor."""
        return self.graph.shape_of(self.node)

    def refuse(self, reason: str):
        raise CannotShard(reason, self.node)

    def want(self, node, tokens: Tokens | None) -> None:
        if isinstance(node, fx.Node):
            self.wants[node] = tokens

    def gather(self, node: fx.Node, tokens: Tokens | None = None) -> None:
        """Wants all ranks' tokens of an operand; of these, ``tokens``."""
        self.wants[node] = tokens
        self.gathers.add(node)

    def only(self, *nodes) -> None:
        """Refuses tokens in any other operand."""
        for node in self.operands:
            if node not in nodes and self.tokens(node) is not None:
                self.refuse(f"{node.name}, an argument that must be replicated, is sharded")

    def given(self, node: fx.Node):
        """The new node for an operand, as it was wanted."""
        tokens = self.wants.get(node, self.tokens(node))
        if node in self.graph.own:
            return self.graph.values[node].mine
        if node in self.gathers:
            return self.graph.gathered(node, tokens)
        if isinstance(tokens, list):
            return self.graph.values[node].mine
        return self.graph.for_part(node) if tokens is None else self.graph.part(node, tokens)

    def arguments(self) -> tuple[tuple, dict]:
        return self.graph.mapped((self.node.args, self.node.kwargs), self.given)

    def same_op(self):
        args, kwargs = self.arguments()
        return self.graph.call(self.target, *args, **kwargs)

    def replaced(self, **new):
        """The same op, with other arguments for some that are named."""
        args, kwargs = [], {}
        for argument in self.target._schema.arguments:
            value = new.get(argument.name, self.named[argument.name])
            if argument.name not in new:
                value = self.graph.mapped(value, self.given)
            if argument.kwarg_only:
                kwargs[argument.name] = value
            else:
                args.append(value)
        return self.graph.call(self.target, *args, **kwargs)

    def one_of(self) -> Tokens:
        """The only tokens among the operands; refuses several that aren't the same."""
        found = {t.plain: t for t in map(self.tokens, self.operands) if t is not None}
        if len(found) != 1:
            self.refuse("its operands are sharded along different dimensions or sequences")
        return next(iter(found.values()))


def broadcast(call: Call, nodes, out: list[Size]) -> Tokens:
    """Aligns operands from the right, as broadcasting does, and wants each so; returns where the
    tokens are in the result."""
    found, fixed = {}, {}
    for node in nodes:
        tokens = call.tokens(node)
        if tokens is not None:
            found[node] = tokens.at(tokens.dim + len(out) - len(call.shape(node)))
            # What is only there in parts decides; the rest can be cut as needed.
            if call.graph.values[node].full is None:
                fixed[node] = found[node]
    # Of several, that of an operand that isn't broadcast: the smaller ones are gathered.
    deciding = fixed or found
    first = next((n for n in deciding if call.shape(n) == out), next(iter(deciding)))
    tokens = deciding[first]
    if any(t.plain != tokens.plain and t.dim == tokens.dim for t in deciding.values()):
        call.refuse(SHIFTED)
    for node in nodes:
        shape = call.shape(node)
        dim = tokens.dim - (len(out) - len(shape))
        elsewhere = node in fixed and fixed[node].dim != tokens.dim
        take = call.gather if elsewhere else call.want
        if dim < 0 or (isinstance(shape[dim], int) and shape[dim] == 1):
            take(node, None)
        elif not same(shape[dim], tokens.full):
            call.refuse(
                f"expected {node.name} to have {tokens.full} tokens in dimension {dim}, got "
                f"{shape[dim]}"
            )
        else:
            take(node, tokens.at(dim))
    return tokens


def agree(graph, node: fx.Node, target, args, kwargs, new: fx.Node) -> fx.Node:
    """A random value that every rank holds in full must be the same on each: rank 0's."""
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
