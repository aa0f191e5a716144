"""New nodes, each with the values that it has on this rank; sizes among them."""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch.fx.proxy import GraphAppendingTracer
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from deepsp.compile.sharding.messages import CannotShard
from deepsp.compile.sharding.tokens import Size, Tokens, same, size_of

# Where a node comes from, and whether backward is to compute it again.
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
    """Whether a call draws random numbers: dropout of nothing, or in evaluation, doesn't."""
    if node.op != "call_function" or not is_random(node.target):
        return False
    given = {a.name: x for a, x in zip(node.target._schema.arguments, node.args, strict=False)}
    given |= node.kwargs
    rate = given.get("dropout_p", given.get("p", 1.0))
    return not (isinstance(rate, (int, float)) and rate == 0) and given.get("train") is not False


def draws_inside(gm: fx.GraphModule) -> bool:
    """Whether a graph draws random numbers, or the functions do that its ops hold."""
    graphs = [m.graph for m in gm.modules() if isinstance(m, fx.GraphModule)]
    return any(draws(node) for graph in graphs for node in graph.nodes)


def values_of(target, args, kwargs):
    """What a node has, of fake values. How an op that holds functions is differentiated is left to
    whoever compiles it: here it matters that it is."""
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
    """The same modules with a graph of its own."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    return fx.GraphModule(gm, graph)


class Nodes:
    """A new graph, and what is known of it while it grows."""

    def __init__(self, mode):
        self.mode = mode
        self.new = fx.Graph()
        self.env: dict[fx.Node, Any] = {}  # of new nodes: the fake values
        self.symbols: dict[sympy.Symbol, fx.Node] = {}
        self.current: fx.Node | None = None  # of the old graph: where new nodes come from

    def call(self, target, *args, **kwargs) -> fx.Node:
        """A new node, with the values that it has on this rank."""
        return self._run(self.new.call_function(target, args, kwargs))

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
        known = {}
        for symbol in size.free_symbols:
            if symbol not in self.symbols:
                raise CannotShard(f"the origin of the size {symbol} isn't known", self.current)
            known[symbol] = fx.Proxy(self.symbols[symbol], tracer)
        result = sympy_interp(PythonReferenceAnalysis, known, size)
        for node in self.new.nodes if last is None else _behind(last):
            self._run(node)
        return result.node if isinstance(result, fx.Proxy) else int(result)

    def holds(self, relation) -> bool:
        """Whether a relation of sizes holds; the graph is then for sizes of which it does."""
        if isinstance(relation, bool) or relation in (sympy.true, sympy.false):
            return bool(relation)
        return bool(self.mode.shape_env.evaluate_expr(relation))

    def equal(self, a: Size, b: Size) -> bool:
        """Whether two sizes are one. Only asked of what should be."""
        if same(a, b):
            return True
        a, b = sympy.sympify(a), sympy.sympify(b)
        return not (a.is_number and b.is_number) and self.holds(sympy.Eq(a, b))

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
