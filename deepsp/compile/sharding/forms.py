"""The forms of a value: full, on every rank, and this rank's part; and how one becomes the
other."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from deepsp.compile.sharding.messages import CannotShard
from deepsp.compile.sharding.nodes import Nodes, has_tensor, is_differentiated
from deepsp.compile.sharding.tokens import Sequence, Size, Tokens, same, size_of

_aten, _ours = torch.ops.aten, torch.ops.deepsp
# Views that hold no more, and no less, than what they are taken of.
_VIEWS = {
    _aten.alias.default,
    _aten.expand.default,
    _aten.permute.default,
    _aten.reshape.default,
    _aten.squeeze.dim,
    _aten.t.default,
    _aten.transpose.int,
    _aten.unsqueeze.default,
    _aten.view.default,
}
# Copied again where only a partial gradient is wanted: nothing is computed twice.
_CHEAP = _VIEWS | {
    _aten.detach.default,
    _aten.select.int,
    _aten.slice.Tensor,
    _aten.to.dtype,
    _aten.to.dtype_layout,
    _aten.to.device,
    _aten._to_copy.default,
}


@dataclass
class Value:
    """What a node of the old graph has become. ``tokens``: where its tokens are, for several
    outputs a list; None where it has none."""

    full: Any = None
    mine: Any = None
    tokens: Tokens | list[Tokens | None] | None = None
    of_parameter: bool = False
    of_data: bool = False  # made of what prepare_inputs has marked


class Forms(Nodes):
    """What every node of an old graph has become in a new one, on one of ``member``'s ranks."""

    def __init__(self, mode, member, gradients: str):
        super().__init__(mode)
        self.rank, self.size, self.name = member
        self.gradients = gradients
        self.values: dict[fx.Node, Value] = {}  # by nodes of the old graph
        self.lengths: dict[Size, Sequence] = {}
        self.parts: dict[tuple, fx.Node] = {}
        self.collected: dict[tuple, fx.Node] = {}
        self.rebound: set[fx.Node] = set()  # of the old graph: written to, so now something else
        self.shared: dict[fx.Node, fx.Node] = {}
        self.scaled: dict[fx.Node, fx.Node] = {}
        self.unscaled: dict[fx.Node, fx.Node] = {}
        self.parameters_of_group: set[fx.Node] = set()
        # What stands for a parameter with a partial gradient -> the parameter.
        self.parameters: dict[fx.Node, fx.Node] = {}
        # What each rank has for its own tokens alone, by nodes of the old graph.
        self.own: dict[Any, Any] = {}
        # Full values whose gradients are partial already: a gather sums them.
        self.shares: set[fx.Node] = set()

    def sequence(self, length: Size) -> Sequence:
        for known, sequence in self.lengths.items():
            if same(known, length):
                return sequence
        # Two graphs at most: lengths that divide by the ranks need no padding anywhere.
        even = isinstance(length, int) or self.mode.shape_env.evaluate_expr(
            sympy.Eq(sympy.Mod(length, self.size), 0)
        )
        return self.lengths.setdefault(length, Sequence.split(length, self.size, bool(even)))

    def shape_of(self, node: fx.Node) -> list[Size]:
        """The full shape of a node of the old graph."""
        return [size_of(n) for n in node.meta["val"].shape]

    def all_of(self, node: fx.Node) -> fx.Node:
        full = self.values[node].full
        if full is None:
            raise CannotShard(
                f"it needs the full {node.name}, of which each rank has only its local tokens",
                self.current,
            )
        return full

    def full(self, node: fx.Node):
        """The full value of an old node, for ops on full values."""
        full = self.all_of(node)
        local = self.gradients == "local" and full in self.parameters_of_group
        if (local or full in self.shares) and self.differentiated(full):
            if full not in self.scaled:
                scaled = self.call(_ours._scale_gradient.default, full, 1 / self.size)
                self.scaled[full] = scaled
                self.unscaled[scaled] = full
            return self.scaled[full]
        return full

    def for_part(self, node: fx.Node):
        """The full value of an old node, for ops on parts: its gradient becomes a sum."""
        return self.share(self.all_of(node))

    def differentiated(self, node: fx.Node) -> bool:
        # Under no_grad there is nothing to sum, and what is made there must not be used elsewhere.
        return is_differentiated(self.env[node]) and torch.is_grad_enabled()

    def share(self, full: fx.Node):
        """A full value whose gradient is partial."""
        if not self.differentiated(full) or self.size == 1 or full in self.shares:
            return full
        if full in self.shared:
            return self.shared[full]
        if full in self.parameters_of_group:
            share = self.call(_aten.alias.default, full)
            self.parameters[share] = full
        elif full in self.unscaled:
            return self.share(self.unscaled[full])
        elif full.target in _CHEAP and self._tensors_of(full) == [full.args[0]]:
            share = self.call(full.target, self.share(full.args[0]), *full.args[1:], **full.kwargs)
        else:
            (share,) = self.replicate_wait(*self.replicate_start([full]))
        self.shared[full] = share
        return share

    def _tensors_of(self, node: fx.Node) -> list[fx.Node]:
        return [n for n in node.all_input_nodes if has_tensor(self.env[n])]

    def replicate_start(self, tensors: list[fx.Node]) -> tuple[list[fx.Node], fx.Node]:
        where_ = (self.rank, self.size, self.name)
        start = self.call(_ours.replicate_start.default, tensors, *where_)
        passed = self.call(operator.getitem, start, 0)
        passed = [self.call(operator.getitem, passed, i) for i in range(len(tensors))]
        return passed, self.call(operator.getitem, start, 1)

    def replicate_wait(self, passed: list[fx.Node], token: fx.Node) -> list[fx.Node]:
        where_ = (self.rank, self.size, self.name)
        wait = self.call(_ours.replicate_wait.default, passed, token, *where_)
        return [self.call(operator.getitem, wait, i) for i in range(len(passed))]

    def part(self, node: fx.Node, tokens: Tokens):
        """This rank's part of an old node's value."""
        value = self.values[node]
        here = value.tokens if isinstance(value.tokens, Tokens) else None
        if value.mine is not None and here is not None and here.plain == tokens.plain:
            return value.mine
        if value.full is None:
            raise CannotShard(
                f"{node.name} is sharded along another dimension or over another sequence than "
                "the tensors it is combined with",
                self.current,
            )
        shape = self.shape_of(node)
        if not 0 <= tokens.dim < len(shape) or not self.equal(shape[tokens.dim], tokens.full):
            raise CannotShard(
                f"expected {node.name} to have {tokens.full} tokens in dimension {tokens.dim}, "
                f"got shape {tuple(shape)}",
                self.current,
            )
        key = (value.full, tokens, torch.is_grad_enabled())
        if key not in self.parts:
            self.parts[key] = self.cut(self.share(value.full), shape, tokens)
        return self.parts[key]

    def cut(self, full: fx.Node, shape: list[Size], tokens: Tokens) -> fx.Node:
        self._check_order(tokens)
        dim, begin = tokens.dim, tokens.sequence.begin(self.rank)
        count = tokens.sequence.lens[self.rank]
        if same(tokens.outer, 1):
            first, many = (size_of(x * tokens.inner) for x in (begin, count))
            return self.call(_aten.narrow.default, full, dim, self.int_(first), self.int_(many))
        apart = [*shape[:dim], tokens.outer, tokens.length, tokens.inner, *shape[dim + 1 :]]
        apart = self.call(_aten.reshape.default, full, self.shape(apart))
        cut = self.call(_aten.narrow.default, apart, dim + 1, self.int_(begin), self.int_(count))
        return self.call(_aten.reshape.default, cut, self.shape(tokens.part(shape, self.rank)))

    def gathered(self, node: fx.Node, tokens: Tokens | None = None) -> fx.Node:
        """All ranks' parts of an old node's value, or ``tokens`` of them, for ops on parts: its
        gradient is summed over the ranks, each of which gets its tokens' back."""
        key = (node, torch.is_grad_enabled())
        value, shape = self.values[node], self.shape_of(node)
        if key not in self.collected:
            source = node.args[0] if node.target in _VIEWS else None
            there = source in self.values and self.values[source].full is None
            if there and not {source, node} & self.rebound:
                # What is gathered is what a view is taken of: heads, say, before they are repeated.
                args, kwargs = self.mapped((node.args[1:], node.kwargs), self.all_of)
                view = node.target is _aten.view.default
                target = _aten.reshape.default if view else node.target
                new = self.call(target, self.gathered(source), *args, **kwargs)
            else:
                new = self.all_gather(value.mine, shape, value.tokens, "partial")
            self.collected[key] = new
        new = self.collected[key]
        return new if tokens is None else self.cut(new, shape, tokens)

    def all_gather(
        self, mine: fx.Node, shape: list[Size], tokens: Tokens, gradient: str = "replicated"
    ) -> fx.Node:
        """All ranks' parts as one."""
        self._check_order(tokens)
        dim, rank = tokens.dim, self.rank
        count = tokens.sequence.lens[rank]
        if not tokens.alone:
            apart = [*shape[:dim], tokens.outer, count, tokens.inner, *shape[dim + 1 :]]
            mine = self.call(_aten.reshape.default, mine, self.shape(apart))
            dim += 1
        out = self.call(
            _ours.all_gather.default, mine, dim, self.lens(tokens), gradient, rank, self.name
        )
        if not tokens.alone:
            out = self.call(_aten.reshape.default, out, self.shape(shape))
        return out

    def _check_order(self, tokens: Tokens) -> None:
        if tokens.order is not None:
            raise CannotShard(
                "each rank has sorted its own tokens, which are combined with unsorted ones here",
                self.current,
            )

    def all_reduce(self, mine: fx.Node) -> fx.Node:
        """The sum over all ranks, replicated."""
        return self.call(
            _ours.all_reduce.default, mine, "replicated", self.rank, self.size, self.name
        )
