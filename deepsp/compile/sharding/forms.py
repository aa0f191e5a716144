"""The two forms of a value on one rank, full and local, and how one becomes the other."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils._sympy.functions import Max, Min

from deepsp.compile.sharding import joined
from deepsp.compile.sharding.nodes import Nodes, has_tensor, is_differentiated
from deepsp.compile.sharding.redistribute import fetched, movable
from deepsp.compile.sharding.report import CannotShard
from deepsp.compile.sharding.tokens import Sequence, Size, Tokens, difference, same, size_of

_FEW = 8  # tokens
_aten, _ours = torch.ops.aten, torch.ops.deepsp
# Views with exactly the elements of their input.
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
# Repeated for a partial gradient instead of adding a replicate: no computation is repeated.
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
    """The new forms of an old node: ``full`` and ``local``, this rank's part. ``tokens``: where the
    tokens are; a list for several outputs; None if it has none."""

    full: Any = None
    local: Any = None
    tokens: Tokens | list[Tokens | None] | None = None
    of_parameter: bool = False
    of_data: bool = False  # computed from inputs that prepare_inputs marked
    chosen: bool = False  # to be computed in full: made of what deepsp.replicated returns


class Forms(Nodes):
    """The new forms of every node of an old graph, on one of ``member``'s ranks."""

    def __init__(self, mode, member, gradients: str):
        super().__init__(mode)
        self.rank, self.size, self.name = member
        self.gradients = gradients
        self.values: dict[fx.Node, Value] = {}  # by nodes of the old graph
        self.lengths: dict[Size, Sequence] = {}
        self.parts: dict[tuple, fx.Node] = {}
        self.collected: dict[tuple, fx.Node] = {}
        self.rebound: set[fx.Node] = set()  # old nodes that a write has given a new value
        self.aliased: dict[fx.Node, fx.Node] = {}
        self.scaled: dict[fx.Node, fx.Node] = {}
        self.unscaled: dict[fx.Node, fx.Node] = {}
        self.parameters_of_group: set[fx.Node] = set()
        # Alias of a parameter with a partial gradient -> the parameter.
        self.parameters: dict[fx.Node, fx.Node] = {}
        # By old node, values that differ by rank because each has its own tokens only.
        self.rank_values: dict[Any, Any] = {}
        # Whether a rank may have no tokens of some tensor. Then two collectives may get the same
        # zeros there, and there alone, and must not be taken for one.
        self.has_empty = False
        # Full values with a partial gradient: a gather sums it.
        self.partial_grads: set[fx.Node] = set()

    def sequence(self, length: Size) -> Sequence:
        for other, sequence in self.lengths.items():
            if same(other, length):
                return sequence
        for other, sequence in self.lengths.items():
            more = difference(length, other)
            last = sequence.lens[-1]
            few = more and abs(more) <= _FEW and self.holds(last >= 2 * abs(more))
            if few and self.holds(last + more >= 2):
                # A sequence without its last tokens, say: no token moves.
                sequence = sequence.longer(more)
                self.lengths[length] = sequence
                self.note_empty(sequence)
                return sequence
        # At most two graphs: for lengths that divide by the ranks, and for all others.
        even = isinstance(length, int) or self.mode.shape_env.evaluate_expr(
            sympy.Eq(sympy.Mod(length, self.size), 0)
        )
        sequence = Sequence.split(length, self.size, bool(even))
        self.lengths[length] = sequence
        self.note_empty(sequence)
        # With one token, or none, a tensor's strides say less, and guards would differ by rank.
        self.settle(sequence, 2)
        return sequence

    def note_empty(self, sequence: Sequence) -> None:
        """Notes that some ranks have no tokens of a sequence, or may have none."""
        self.has_empty |= any(not isinstance(n, int) and n.has(Max, Min) for n in sequence.lens)
        self.has_empty |= any(same(n, 0) for n in sequence.lens)

    def shape_of(self, node: fx.Node) -> list[Size]:
        """The full shape of a node of the old graph."""
        return [size_of(n) for n in node.meta["val"].shape]

    def all_of(self, node: fx.Node) -> fx.Node:
        full = self.values[node].full
        if full is None:
            raise CannotShard(
                f"it needs the full {node.name}, but each rank has only its local tokens",
                self.current,
            )
        return full

    def full(self, node: fx.Node):
        """The full value of an old node, for ops on full values."""
        full = self.all_of(node)
        local = self.gradients == "local" and full in self.parameters_of_group
        if (local or full in self.partial_grads) and self.differentiated(full):
            if full not in self.scaled:
                scaled = self.call(_ours._scale_gradient.default, full, 1 / self.size)
                self.scaled[full] = scaled
                self.unscaled[scaled] = full
            return self.scaled[full]
        return full

    def for_part(self, node: fx.Node):
        """The full value of an old node, for ops on parts: its gradient is partial."""
        return self.partial_grad(self.all_of(node))

    def differentiated(self, node: fx.Node) -> bool:
        # Under no_grad nothing is summed, and nodes made there must not be used elsewhere.
        return is_differentiated(self.env[node]) and torch.is_grad_enabled()

    def partial_grad(self, full: fx.Node):
        """A full value, aliased so that its gradient may be partial."""
        if not self.differentiated(full) or self.size == 1 or full in self.partial_grads:
            return full
        if full in self.aliased:
            return self.aliased[full]
        if full in self.parameters_of_group:
            aliased = self.call(_aten.alias.default, full)
            self.parameters[aliased] = full
        elif full in self.unscaled:
            return self.partial_grad(self.unscaled[full])
        elif full.target in _CHEAP and self._tensors_of(full) == [full.args[0]]:
            aliased = self.call(
                full.target, self.partial_grad(full.args[0]), *full.args[1:], **full.kwargs
            )
        else:
            (aliased,) = self.replicate_wait(*self.replicate_start([full]))
        self.aliased[full] = aliased
        return aliased

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
        place = value.tokens if isinstance(value.tokens, Tokens) else None
        if value.local is not None and place is not None and place.plain == tokens.plain:
            return value.local
        shape = self.shape_of(node)
        if value.full is None:
            if place is None or not movable(place, tokens):
                raise CannotShard(
                    f"{node.name} is sharded along another dimension or over another sequence than "
                    "the tensors it is combined with",
                    self.current,
                )
            key = (value.local, tokens.plain, torch.is_grad_enabled())
            if key not in self.parts:
                want = [tokens.plain.sequence.pieces(r) for r in range(self.size)]
                self.parts[key] = fetched(self, value.local, shape, place.plain, want)
            return self.parts[key]
        if not 0 <= tokens.dim < len(shape) or not self.equal(shape[tokens.dim], tokens.full):
            raise CannotShard(
                f"expected {node.name} to have {tokens.full} tokens in dimension {tokens.dim}, "
                f"got shape {tuple(shape)}",
                self.current,
            )
        key = (value.full, tokens, torch.is_grad_enabled())
        if key not in self.parts:
            self.parts[key] = self.cut(self.partial_grad(value.full), shape, tokens)
        return self.parts[key]

    def cut(self, full: fx.Node, shape: list[Size], tokens: Tokens) -> fx.Node:
        self._check_order(tokens)
        self.note_empty(tokens.sequence)
        dim, runs = tokens.dim, tokens.sequence.pieces(self.rank)
        if same(tokens.outer, 1):
            scaled = [[size_of(n * tokens.inner) for n in run] for run in runs]
            return joined.taken(self, full, dim, scaled)
        split_shape = [*shape[:dim], tokens.outer, tokens.length, tokens.inner, *shape[dim + 1 :]]
        x = self.call(_aten.reshape.default, full, self.shape(split_shape))
        cut = joined.taken(self, x, dim + 1, runs)
        return self.call(_aten.reshape.default, cut, self.shape(tokens.part(shape, self.rank)))

    def gathered(self, node: fx.Node, tokens: Tokens | None = None) -> fx.Node:
        """All ranks' parts of an old node's value, or ``tokens`` of them, for ops on parts: its
        gradient is reduce-scattered over the ranks."""
        key = (node, torch.is_grad_enabled())
        value, shape = self.values[node], self.shape_of(node)
        if key not in self.collected:
            source = node.args[0] if node.target in _VIEWS else None
            is_part = source in self.values and self.values[source].full is None
            if is_part and not {source, node} & self.rebound:
                # Gather the view's input instead: heads, say, before they are repeated.
                args, kwargs = self.mapped((node.args[1:], node.kwargs), self.all_of)
                view = node.target is _aten.view.default
                target = _aten.reshape.default if view else node.target
                new = self.call(target, self.gathered(source), *args, **kwargs)
            else:
                new = self.all_gather(value.local, shape, value.tokens, "partial")
            self.collected[key] = new
        new = self.collected[key]
        return new if tokens is None else self.cut(new, shape, tokens)

    def all_gather(
        self, local: fx.Node, shape: list[Size], tokens: Tokens, gradient: str = "replicated"
    ) -> fx.Node:
        """Joins all ranks' parts."""
        self._check_order(tokens)
        dim, rank = tokens.dim, self.rank
        count = tokens.sequence.lens[rank]
        if not tokens.alone:
            split_shape = [*shape[:dim], tokens.outer, count, tokens.inner, *shape[dim + 1 :]]
            local = self.call(_aten.reshape.default, local, self.shape(split_shape))
            dim += 1
        out = self.call(
            _ours.all_gather.default, local, dim, self.lens(tokens), gradient, rank, self.name
        )
        if tokens.sequence.joined:
            out = joined.in_order(self, out, dim, tokens.sequence)
        if not tokens.alone:
            out = self.call(_aten.reshape.default, out, self.shape(shape))
        return out

    def _check_order(self, tokens: Tokens) -> None:
        if tokens.is_sorted:
            raise CannotShard(
                "each rank has sorted its own tokens, which are combined with unsorted ones here",
                self.current,
            )

    def all_reduce(self, local: fx.Node) -> fx.Node:
        """The sum over all ranks, replicated."""
        return self.call(
            _ours.all_reduce.default, local, "replicated", self.rank, self.size, self.name
        )
