"""A new graph, and what is known of its nodes: their values on one rank, and sizes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import sympy
import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.fx.proxy import GraphAppendingTracer
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from deepsp.compile.sharding.report import CannotShard
from deepsp.compile.sharding.tokens import Sequence, Size, Tokens, same, size_of, symbols_of

_aten = torch.ops.aten

# Meta that new nodes inherit: the user's line, and whether backward recomputes them.
_PASSED_ON = ("stack_trace", "nn_module_stack", "source_fn_stack", "custom", "seq_nr")
_PASSED_ON += ("recompute", "ac_graph_id")


def is_tensor(value) -> bool:
    return isinstance(value, torch.Tensor)


def has_tensor(value) -> bool:
    return any(is_tensor(x) for x in tree_leaves(value))


def is_differentiated(value) -> bool:
    return is_tensor(value) and value.requires_grad


def is_random(target) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


def draws(node: fx.Node) -> bool:
    """Whether a call draws random numbers: dropout with rate 0 or in evaluation doesn't."""
    if node.op != "call_function" or not is_random(node.target):
        return False
    arguments = {a.name: x for a, x in zip(node.target._schema.arguments, node.args, strict=False)}
    arguments |= node.kwargs
    rate = arguments.get("dropout_p", arguments.get("p", 1.0))
    return (
        not (isinstance(rate, (int, float)) and rate == 0) and arguments.get("train") is not False
    )


def draws_inside(gm: fx.GraphModule) -> bool:
    """Whether a graph draws random numbers, or a function inside one of its ops does."""
    graphs = [m.graph for m in gm.modules() if isinstance(m, fx.GraphModule)]
    return any(draws(node) for graph in graphs for node in graph.nodes)


def values_of(target, args, kwargs):
    """A node's value, from fake values. The compiler differentiates an op that holds functions;
    here it only matters whether its results require grad."""
    if not isinstance(target, torch._ops.HigherOrderOperator):
        return target(*args, **kwargs)
    leaves = tree_leaves((args, kwargs))
    differentiated = any(is_differentiated(x) for x in leaves)
    with torch._C._AutoDispatchBelowAutograd():
        values = target(*args, **kwargs)
    if differentiated and torch.is_grad_enabled():
        tree_map(lambda x: x.requires_grad_() if x.is_floating_point() else x, values)
    return values


def copy_of(gm: fx.GraphModule) -> fx.GraphModule:
    """The same modules with a copy of the graph."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    return fx.GraphModule(gm, graph)


def sources_of(node: fx.Node) -> Iterator[fx.Node]:
    """A node and all that it is made of, each once."""
    seen, stack = {node}, [node]
    while stack:
        yield (node := stack.pop())
        new = [x for x in node.all_input_nodes if x not in seen]
        seen.update(new)
        stack += new


COMMUNICATE = ("deepsp", "c10d", "_c10d_functional", "_c10d_functional_autograd")


def group_of(node: fx.Node) -> str | None:
    """The name of the group in which an op communicates."""
    if getattr(node.target, "namespace", "") not in COMMUNICATE:
        return None
    for i, argument in enumerate(node.target._schema.arguments):
        if argument.name == "group_name":
            return node.args[i] if i < len(node.args) else node.kwargs[argument.name]
    return None


class Nodes:
    """A new graph, and what is known of its nodes."""

    def __init__(self, mode):
        self.mode = mode
        self.new = fx.Graph()
        self.env: dict[fx.Node, Any] = {}  # fake values of new nodes
        self.symbols: dict[sympy.Symbol, fx.Node] = {}
        self.current: fx.Node | None = None  # the old node for which new ones are made

    def call(self, target, *args, **kwargs) -> fx.Node:
        """Adds a node, with its value on this rank."""
        if target is _aten.cat.default:
            args = self._using_empty(args[0]), *args[1:]
        return self._run(self.new.call_function(target, args, kwargs))

    def _using_empty(self, pieces: list[fx.Node]) -> list[fx.Node]:
        """Pieces to concatenate, of which those without elements are used: a compiler takes them
        out, and with them, on this rank alone, the collectives that they come from."""

        def is_empty(x: fx.Node) -> bool:
            return any(isinstance(n, int) and n == 0 for n in self.env[x].shape)

        full = next((i for i, x in enumerate(pieces) if not is_empty(x)), None)
        new = list(pieces)
        for x in pieces:
            if full is not None and is_empty(x) and any(group_of(y) for y in sources_of(x)):
                none = self.call(_aten.any.default, self.call(_aten.detach.default, x))
                none = self.call(_aten.to.dtype, none, self.env[new[full]].dtype)
                new[full] = self.call(_aten.add.Tensor, new[full], none)  # adds 0
        return new

    def _run(self, node: fx.Node) -> fx.Node:
        if self.current is not None:
            for key in _PASSED_ON:
                if key in self.current.meta:
                    node.meta[key] = self.current.meta[key]
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.env.__getitem__)
        try:
            # Kernels that expand to symbolic sizes are Python's.
            with self.mode, enable_python_dispatcher():
                value = values_of(node.target, args, kwargs)
        except (RuntimeError, ValueError, IndexError) as error:
            self.new.erase_node(node)
            raise CannotShard(str(error).splitlines()[0], self.current) from error
        self.env[node] = value
        node.meta["val"] = tree_map(lambda x: x.detach() if is_tensor(x) else x, value)
        return node

    def int_(self, size: Size):
        """A size as an int, or as a node that computes it."""
        size = size_of(size)
        if isinstance(size, int):
            return size
        tracer = GraphAppendingTracer(self.new)
        last = next(iter(reversed(self.new.nodes)), None)
        values = {}
        for symbol in size.free_symbols:
            if symbol not in self.symbols:
                raise CannotShard(f"the origin of the size {symbol} isn't known", self.current)
            values[symbol] = fx.Proxy(self.symbols[symbol], tracer)
        result = sympy_interp(PythonReferenceAnalysis, values, size)
        for node in self.new.nodes if last is None else _behind(last):
            self._run(node)
        return result.node if isinstance(result, fx.Proxy) else int(result)

    def holds(self, relation) -> bool:
        """Whether a relation of sizes holds. This guards the graph: it is for such sizes only."""
        if isinstance(relation, bool) or relation in (sympy.true, sympy.false):
            return bool(relation)
        try:
            return bool(self.mode.shape_env.evaluate_expr(relation))
        except GuardOnDataDependentSymNode as error:
            raise CannotShard(
                f"a number of elements depends on data: whether {relation} isn't known before",
                self.current,
            ) from error

    def equal(self, a: Size, b: Size) -> bool:
        """Whether two sizes are equal. May add a guard, so ask only if they should be."""
        if same(a, b):
            return True
        a, b = sympy.sympify(a), sympy.sympify(b)
        return not (a.is_number and b.is_number) and self.holds(sympy.Eq(a, b))

    def hint(self, size: Size) -> int:
        """A size in the call for which the graph is compiled: not guarded."""
        if isinstance(size, int):
            return size
        hints = {s: self.env[self.symbols[s]].node.hint for s in size.free_symbols}
        if None in hints.values():
            raise CannotShard(f"the size {size} depends on data", self.current)
        return int(size.xreplace({s: sympy.Integer(n) for s, n in hints.items()}))

    def settle(self, sequence: Sequence, least: Size) -> None:
        """Guards that every rank has at least so many tokens. If one has fewer, the length becomes
        a constant: guards must be the same on all ranks, or some would compile alone."""
        if not all(self.holds(n >= least) for n in sequence.lens):
            self.fix(sequence)

    def fix(self, sequence: Sequence) -> None:
        """Makes the length of a sequence a constant, on all ranks, and begins anew."""
        symbols = symbols_of(sequence.lens)
        for symbol in symbols:
            int(self.env[self.symbols[symbol]])
        if symbols:
            raise CannotShard("its length has become a constant", self.current)

    def shape(self, sizes) -> list:
        return [self.int_(n) for n in sizes]

    def lens(self, tokens: Tokens) -> list:
        return [self.int_(n) for n in tokens.sequence.lens]

    def know(self, value: torch.SymInt, node: fx.Node) -> None:
        if value.node.expr.is_Symbol:
            self.symbols.setdefault(value.node.expr, node)


def _behind(node: fx.Node):
    node = node.next
    while node.op != "root":
        yield node
        node = node.next
