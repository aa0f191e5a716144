"""``torch.autograd.Function``: its forward and its backward are graphs, each sharded by the same
rules as the graph around them.

Gradients follow the pass's convention inside, too: the gradient of a replicated tensor is the full
gradient, that of a local one is local.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._functorch.autograd_function import autograd_function_apply as op
from torch.utils._pytree import tree_map

from deepsp.compile.sharding.backend import Rewriter
from deepsp.compile.sharding.forms import Value
from deepsp.compile.sharding.nodes import draws_inside, is_tensor
from deepsp.compile.sharding.normalize import normalize
from deepsp.compile.sharding.rules import Call, rule
from deepsp.compile.sharding.tokens import Tokens


@dataclass
class Passed:
    """An input or output of a body: its full value, its value on this rank, and its node."""

    full: Any
    local: Any
    tokens: Tokens | None = None
    node: Any = None


class Body(Rewriter):
    """A forward or a backward, rewritten for ``inputs`` on this rank."""

    def __init__(self, outer: Rewriter, body: fx.GraphModule, inputs: list[Passed]):
        full = [_detached(x.full) for x in inputs]
        member = (outer.rank, outer.size, outer.name)
        normal = normalize(body, full, outer.mode)
        super().__init__(
            normal, full, outer.mode, member, outer.gradients, "local", 1, outer.query_parts
        )
        self.lengths = outer.lengths
        for old, value in zip(self.old.find_nodes(op="placeholder"), inputs, strict=True):
            new = self.new.placeholder(old.name)
            self.env[new] = new.meta["val"] = _detached(value.local)
            self.values[old] = Value(new, of_parameter=True, of_data=True)
            if value.tokens is not None:
                self.values[old] = Value(None, new, value.tokens, True, True)
            if isinstance(value.local, torch.SymInt):
                self.know(value.local, new)
        self.walk()

    @property
    def results(self):
        """The body's outputs, as old nodes."""
        return self.old.output_node().args[0]

    def passed(self, node) -> Passed:
        if not isinstance(node, fx.Node):
            return Passed(node, node, None, node)
        value = self.values[node]
        new = value.local if value.full is None else value.full
        local = self.env[new] if isinstance(new, fx.Node) else new
        tokens = value.tokens if value.full is None else None
        return Passed(node.meta["val"], local, tokens, new)

    def gradient(self, node, passed: Passed):
        if node is None:
            return None
        return self.full(node) if passed.tokens is None else self.part(node, passed.tokens)

    def returning(self, results) -> fx.GraphModule:
        self.new.output(results)
        self.new.eliminate_dead_code()
        return fx.GraphModule(self.gm, self.new)


def _detached(value):
    return value.detach() if is_tensor(value) else value


def _argument(graph: Rewriter, node) -> Passed:
    """An argument: this rank's part, if it has tokens, else the full value."""
    if not isinstance(node, fx.Node):
        return Passed(node, node, None, node)
    value, tokens = graph.values[node], graph.values[node].tokens
    if not is_tensor(node.meta["val"]):
        new = value.full
    elif tokens is not None:
        new = graph.part(node, tokens)
    else:
        new = graph.full(node)
    local = graph.env[new] if isinstance(new, fx.Node) else new
    return Passed(node.meta["val"], local, tokens, new)


@rule(op)
def function(call: Call):
    graph, node = call.graph, call.node
    if node.kwargs.get("dirty_idx"):
        call.refuse("it is a torch.autograd.Function that writes into its inputs")
    forward, backward = (graph.env[graph.values[n].full] for n in node.args[:2])
    inputs = [_argument(graph, x) for x in node.args[2:]]

    forward_body = Body(graph, forward, inputs)
    outs, saved = tree_map(forward_body.passed, forward_body.results)
    several = isinstance(outs, (tuple, list))
    results = list(outs) if several else [outs]

    back = Body(graph, backward, [*results, *saved])
    gradients = back.results if isinstance(back.results, (tuple, list)) else (back.results,)
    gradients = [back.gradient(x, passed) for x, passed in zip(gradients, inputs, strict=True)]
    if draws_inside(back.gm):
        call.refuse(
            "its backward draws random numbers, which would be the same on all ranks; draw them "
            "in its forward and save them with ctx.save_for_backward"
        )
    bodies = [
        forward_body.returning(tree_map(lambda x: x.node, (outs, tuple(saved)))),
        back.returning(tuple(gradients)),
    ]

    def lower():
        modules = [graph.attribute(x, f"{node.name}_{i}") for i, x in enumerate(bodies)]
        return graph.call(op, *modules, *(x.node for x in inputs), **node.kwargs)

    call.lower, call.decision = lower, "an autograd.Function, sharded inside"
    places = [x.tokens for x in results]
    return places if several else places[0]
