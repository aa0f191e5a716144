"""Recurrences of transformers' models: gated delta rules, state spaces. Dynamo captures each as one
op, around which heads are exchanged, or states, as in a registered model."""

from __future__ import annotations

import inspect
import sys

from torch import fx
from torch._dynamo.exc import TensorifyScalarRestartAnalysis, UnspecializeRestartAnalysis
from torch._guards import CompileContext
from torch.utils._pytree import tree_leaves

from deepsp.compile.sharding.nodes import is_tensor
from deepsp.compile.sharding.normalize import trace
from deepsp.compile.sharding.report import RECURRENCES, frames_of
from deepsp.compile.sharding.rules import _RULES, Call
from deepsp.compile.sharding.tokens import same
from deepsp.sequence.recurrence.functions import FUNCTIONS, Sharded, capture, captured

# Arguments by which a state, which generation keeps, goes in and out.
_STATES = (
    "initial_state",
    "initial_states",
    "output_final_state",
    "return_final_states",
    "return_last_state",
)


# Mamba 1's associative scan works by vmap, which can't be traced here; token by token can be.
_BY_TOKEN = {"mamba_selective_scan": {"use_associative_scan": False}}


class _Again(TensorifyScalarRestartAnalysis, UnspecializeRestartAnalysis):
    """Lets Dynamo capture a graph again: it takes the former from backends, and forgets for the
    latter what it noted about the path through the code, which changes."""


def capture_recurrences(gm: fx.GraphModule) -> None:
    """Makes the recurrences that Dynamo traced into one op each, and has it start again."""
    if CompileContext.current_compile_id() is None:
        return
    graphs = [m.graph for m in gm.modules() if isinstance(m, fx.GraphModule)]
    functions = {(file, name) for g in graphs for n in g.nodes for file, _, name, _ in frames_of(n)}
    again = False
    for module in list(sys.modules.values()):
        for file, name in functions:
            function = getattr(module, name, None) if name in RECURRENCES else None
            if getattr(module, "__file__", None) == file and function not in {None, *captured}:
                capture(function, name)
                again = True
    if again:
        raise _Again


def recurrence(call: Call):
    graph, name = call.graph, captured[call.target]
    bound = inspect.signature(inspect.unwrap(call.target)).bind(*call.node.args, **call.node.kwargs)
    kept = [x for n in _STATES if (x := bound.arguments.get(n)) not in (None, False)]
    if kept:
        call.refuse("it takes or returns a state, a cache; set use_cache = False in the config")
    tokens = call.one_of()
    dim = 2 if name == "mamba_selective_scan" else 1
    if tokens.dim != dim or not tokens.alone:
        call.refuse(f"expected the tokens of {name} in dimension {dim}, got {tokens.dim}")
    graph.fix(tokens.sequence)  # as its loops over chunks do
    for node in call.operands:
        shape = call.shape(node)
        if len(shape) > 2 and same(shape[dim], tokens.length):
            call.want(node, tokens)
        else:  # of every head
            call.want(node, None)
    out = call.node.meta["val"]

    def lower():
        sharded = Sharded(name, (graph.rank, graph.size, graph.name), graph.lens(tokens))
        sharded.cache["compared"] = True  # ranks compile alike
        function = FUNCTIONS[name](call.target, sharded)
        nodes = {n: call.operand(n) for n in call.operands}
        places = {n: i for i, n in enumerate(nodes)}

        def run(*tensors):
            args, kwargs = fx.node.map_arg(
                (call.node.args, call.node.kwargs | _BY_TOKEN.get(name, {})),
                lambda n: tensors[places[n]],
            )
            return function(*args, **kwargs)

        values = [graph.env[n] for n in nodes.values()]
        values = [x.detach().requires_grad_(x.requires_grad) for x in values]
        results = graph.inline(trace(run, values, graph.mode), list(nodes.values()))
        return graph.call(tuple, results) if isinstance(out, (tuple, list)) else results

    call.lower, call.decision = lower, "a recurrence, by heads or by state"
    places = [
        tokens if is_tensor(x) else None for x in tree_leaves(out, is_leaf=lambda x: x is None)
    ]
    return places if isinstance(out, (tuple, list)) else places[0]


for _name in RECURRENCES:
    _RULES[_name] = recurrence
