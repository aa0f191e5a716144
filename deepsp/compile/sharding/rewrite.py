"""Rewrites a graph for one device into one rank's graph.

Every value is replicated, or local (this rank's tokens of it), or both. A value computed from full
inputs alone (positions, masks, labels before a shift) is emitted in both forms, and the unused one
is dropped at the end. A value computed from parameters and tokens is local only: an op on it needs
a rule (``deepsp.compile.sharding.rules``) that says where the tokens are in its result; otherwise
it is refused, with the line of the user's code.

Gradients follow one convention: the gradient of a full value is the full gradient, the same on
every rank; that of a local value is local. So a full value that is used with a local one passes
through ``replicate``, which sums its gradient over the group in backward. A local value becomes
full by ``all_reduce`` or ``all_gather``, whose backwards need no communication."""

from __future__ import annotations

import operator
from dataclasses import replace

import sympy
import torch
from torch import fx
from torch._functorch.autograd_function import autograd_function_apply
from torch.fx.experimental.symbolic_shapes import free_symbols
from torch.utils._pytree import tree_leaves

from deepsp.compile.sharding import rules
from deepsp.compile.sharding.boundary import (
    caches_of,
    check_sharded,
    drop_unused_parameters,
    role_of,
    settle_gradients,
    summed_by_gathers,
)
from deepsp.compile.sharding.forms import Forms, Value
from deepsp.compile.sharding.nodes import (
    draws_inside,
    has_tensor,
    is_differentiated,
    is_random,
    is_tensor,
)
from deepsp.compile.sharding.normalize import COND, normalize
from deepsp.compile.sharding.report import CannotShard, Report, places
from deepsp.compile.sharding.tokens import Sequence, Tokens, difference, same, size_of
from deepsp.compile.sharding.watch import break_of
from deepsp.compile.sharding.writes import write

_aten = torch.ops.aten
_REPLICATED = torch.ops.deepsp.replicated.default


class Rewriter(Forms):
    """One run over a normalised graph. Rules see it as ``call.graph``."""

    def __init__(
        self,
        gm,
        inputs: list,
        mode,
        member,
        gradients: str,
        outputs: str,
        chunks: int,
        query_parts: int | str,
    ):
        super().__init__(mode, member, gradients)
        self.gm, self.old = gm, gm.graph
        self.inputs, self.outputs = inputs, outputs
        self.chunks, self.query_parts = chunks, query_parts
        placeholders = zip(self.old.find_nodes(op="placeholder"), inputs, strict=True)
        differentiated = {n for n, x in placeholders if is_differentiated(x)}
        self.gathers = summed_by_gathers(self.old, self.name, differentiated)
        # New nodes computed from parameters and tokens: local ones, and full ones.
        self.worked: set[fx.Node] = set()
        self.repeated: dict[fx.Node, fx.Node] = {}
        self.alike: set[fx.Node] = set()  # placeholders that must be the same on all ranks
        self.attended: set[fx.Node] = set()  # old nodes of keys and values
        self.report = Report()
        self.drop_caches = False
        self.absent: set[fx.Node] = set()  # old outputs that are caches

    def run(self) -> fx.Graph:
        self._placeholders()
        self.walk()
        self.current = self.old.output_node()
        outputs = self.current.args[0]
        self.absent = caches_of(self, self.current.all_input_nodes)
        if self.absent and not self.drop_caches:
            raise CannotShard(
                "the graph returns the keys or values of attention, a cache, in training; set "
                "use_cache = False in the model's config, or pass drop_caches=True",
                next(iter(self.absent)),
            )
        self.absent_places = [i for i, n in enumerate(outputs) if n in self.absent]
        self.new.output(fx.node.map_arg(self.current.args[0], self._output))
        self.current = None
        self.new.eliminate_dead_code(is_impure_node=_is_impure)
        check_sharded(self)
        drop_unused_parameters(self)
        settle_gradients(self)
        self.new.eliminate_dead_code(is_impure_node=_is_impure)
        self.new.lint()
        self.report.count(self.new)
        return self.new

    def walk(self) -> None:
        """Visits all nodes between the placeholders and the output."""
        for node in self.old.nodes:
            self.current = node
            if node.op == "get_attr":
                self.values[node] = Value(self._attribute(node))
            elif node.op == "call_function":
                self._visit(node)
            if node in self.gathers:
                self.partial_grads.add(self.values[node].full)

    def _attribute(self, node: fx.Node) -> fx.Node:
        new = self.new.get_attr(node.target)
        new.meta = dict(node.meta)
        value = operator.attrgetter(node.target)(self.gm)
        self.env[new] = self.mode.from_tensor(value) if is_tensor(value) else value
        return new

    def _placeholders(self) -> None:
        marked = []
        for node, value in zip(self.old.find_nodes(op="placeholder"), self.inputs, strict=True):
            new = self.new.placeholder(node.name)
            new.meta = dict(node.meta)
            new.meta["val"] = value
            self.env[new] = value
            kind = isinstance(value, torch.nn.Parameter)
            self.values[node] = Value(new, of_parameter=kind)
            if node in self.gathers:
                self.partial_grads.add(new)
            elif kind:
                self.parameters_of_group.add(new)
            if isinstance(value, torch.SymInt):
                self.know(value, new)
            role = role_of(node)
            if role is not None or new in self.parameters_of_group:
                self.alike.add(new)
            if role is not None:
                marked.append((node, role))
        for node in self.new.find_nodes(op="placeholder"):
            value = self.env[node]
            for dim, n in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
                symbol = n.node.expr if isinstance(n, torch.SymInt) else None
                if symbol is not None and symbol.is_Symbol and symbol not in self.symbols:
                    self.symbols[symbol] = self.call(_aten.sym_size.int, node, dim)
        if not marked:
            raise CannotShard(
                "no input of this graph is known to hold tokens. Pass the inputs that "
                "deepsp.prepare_inputs returns, to a model that is captured as one graph"
                + break_of(self.gm)
            )
        for node, (name, dim) in marked:
            shape = self.shape_of(node)
            dim = dim % len(shape)
            length = shape[dim]
            if same(length, 1):
                continue  # broadcast over all tokens
            tokens = Tokens(dim, length, self.sequence(length))
            value = self.values[node]
            value.tokens, value.of_data = tokens, True
            # Cut here rather than at the first use.
            value.local = self.cut(self.partial_grad(value.full), shape, tokens)
            if value.local is not None and self.env[value.full].requires_grad:
                value.full = None
            self.report.note(node, f"{name}: Replicate -> Shard({dim})")

    def _visit(self, node: fx.Node) -> None:
        value = node.meta.get("val")
        if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
            return self._item(node)
        leaves = tree_leaves(value)
        if leaves and all(isinstance(x, (torch.SymInt, int)) for x in leaves):
            return self._size(node, value)
        if not any(is_tensor(x) for x in leaves):
            return self._plain(node)
        if getattr(node.target, "_schema", None) is not None and node.target._schema.is_mutable:
            return write(self, node)
        self.values[node] = self.visit_op(node, node.target)

    def _size(self, node: fx.Node, value) -> None:
        """A size, computed from the inputs' full sizes."""
        if isinstance(value, int) or not free_symbols(value) - set(self.symbols):
            self.values[node] = Value(self.int_(size_of(value)))
            return
        new = self.call(node.target, *self.mapped(node.args, self.full))
        self.know(value, new)
        self.values[node] = Value(new)

    def _plain(self, node: fx.Node) -> None:
        """A node without tensors: entering or leaving a mode, or an assert."""
        if isinstance(node.target, torch._ops.OpOverload) and not node.users:
            return  # a query, such as result_type
        if "assert" in str(node.target) or "constrain" in str(node.target):
            return
        args, kwargs = self.mapped((node.args, node.kwargs), self.full)
        self.values[node] = Value(self.call(node.target, *args, **kwargs))

    def mapped(self, args, function):
        return fx.node.map_arg(args, lambda n: self._as_size(n, function))

    def _as_size(self, node: fx.Node, function):
        value = self.values[node]
        return function(node) if has_tensor(node.meta.get("val")) else value.full

    def _item(self, node: fx.Node) -> None:
        source, index = self.values[node.args[0]], node.args[1]
        tokens = source.tokens[index] if isinstance(source.tokens, list) else None
        take = [None if x is None else self.item(x, index) for x in (source.full, source.local)]
        if tokens is None and take[1] is not None and take[0] is None:
            take = [take[1], None]
        flags = source.of_parameter, source.of_data, source.chosen
        self.values[node] = Value(take[0], take[1], tokens, *flags)
        if (node.args[0], index) in self.rank_values:
            self.rank_values[node] = self.rank_values[node.args[0], index]
            self.values[node] = Value(None, take[1], None, True, True)

    def item(self, node: fx.Node, index: int) -> fx.Node:
        """One of a node's results. An item of a new tuple is used directly, so that unused ones are
        dropped."""
        is_tuple = node.target is tuple
        return node.args[0][index] if is_tuple else self.call(operator.getitem, node, index)

    def attribute(self, value, name: str) -> fx.Node:
        """Adds a constant to the new graph, or a module for an op that holds a function."""
        while hasattr(self.gm, name):
            name += "_"
        setattr(self.gm, name, value)
        new = self.new.get_attr(name)
        self.env[new] = self.mode.from_tensor(value) if is_tensor(value) else value
        return new

    def inline(self, body: fx.GraphModule, inputs: list[fx.Node]):
        """Adds the nodes of a graph for these inputs; returns those of its outputs."""
        left, nodes = iter(inputs), {}
        for node in body.graph.nodes:
            if node.op == "placeholder":
                nodes[node] = next(left)
            elif node.op == "get_attr":
                nodes[node] = self.attribute(getattr(body, node.target), node.target)
            elif node.op == "call_function":
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), nodes.__getitem__)
                nodes[node] = self.call(node.target, *args, **kwargs)
        return fx.node.map_arg(body.graph.output_node().args[0], nodes.__getitem__)

    def visit_op(self, node: fx.Node, target) -> Value:
        operands = [n for n in node.all_input_nodes if has_tensor(n.meta.get("val"))]
        values = [self.values[n] for n in operands]
        flags = {
            "of_parameter": any(v.of_parameter for v in values),
            "of_data": any(v.of_data for v in values),
        }
        only_mine = any(v.full is None for v in values)
        # Random values are drawn once, in full; parts are cut from them.
        if not only_mine and (is_random(target) or not any(v.tokens for v in values)):
            return self._full_value(node, target, values, flags)
        call = rules.Call(self, node, target)
        try:
            tokens = rules.find(call)(call)
            if not tokens and not only_mine:  # a reduction of a replicated tensor as well
                return self._full_value(node, target, values, flags)
            local = self._as_written(node, target, call.lower())
        except CannotShard as error:
            self.rank_values.pop(node, None)
            # A value of parameters and tokens must not be computed in full on every rank, silently.
            if only_mine or (all(flags.values()) and not any(v.chosen for v in values)):
                raise error.with_way_out(node) from error.__cause__
            return self._full_value(node, target, values, flags)
        if node in self.rank_values:
            self.report.note(node, "local tokens")
            return Value(None, local, None, **flags)
        if not tokens:
            self.report.note(node, call.decision or "Replicate")
            return Value(local, of_parameter=True, of_data=True, chosen=target is _REPLICATED)
        self._check(node, local, tokens)
        if only_mine or (all(flags.values()) and not _of_pairs(self, node)):
            self.report.note(node, call.decision or places(tokens))
            self.worked.add(local)
            return Value(None, local, tokens, **flags)
        return Value(self.emit_full(node, target), local, tokens, **flags)

    def _full_value(self, node: fx.Node, target, values: list[Value], flags: dict) -> Value:
        """A value that every rank computes in full; and its part, if one dimension clearly holds
        the tokens."""
        full = self.emit_full(node, target)
        if all(flags.values()):
            self.repeated[full] = node
        tokens, chosen = None, target is _REPLICATED or any(v.chosen for v in values)
        if not chosen and (flags["of_data"] or not values) and is_tensor(node.meta["val"]):
            tokens = _placed(self, node, values)
        if tokens is None:
            return Value(full, **flags, chosen=chosen)
        local = self.cut(self.partial_grad(full), self.shape_of(node), tokens)
        return Value(full, local, tokens, **flags)

    def emit_full(self, node: fx.Node, target) -> fx.Node:
        # A gather sums its gradient, so no scaling is needed.
        form = self.all_of if node in self.gathers else self.full
        args, kwargs = self.mapped((node.args, node.kwargs), form)
        new = self._as_written(node, target, self.call(target, *args, **kwargs))
        functions, operands = [], ()
        if target is COND:
            functions, operands = args[1:3], args[3]
        elif target is autograd_function_apply:
            functions, operands = args[:1], args[2:]
        if self.size > 1 and any(self._draws(function, operands) for function in functions):
            raise CannotShard(
                "a function inside of it draws random numbers for replicated tensors, and every "
                "rank would draw different ones; draw them outside and pass them in",
                node,
            )
        if is_random(target) and self.size > 1:
            return rules.agree(self, node, target, args, kwargs, new)
        return new

    def _as_written(self, node: fx.Node, target, new: fx.Node) -> fx.Node:
        """The result of ``target``, in the dtype of the tensor that ``node`` writes to in place."""
        dtype = getattr(node.meta["val"], "dtype", None)
        if target is node.target or self.env[new].dtype == dtype:
            return new
        return self.call(_aten.to.dtype, new, dtype)

    def _draws(self, function: fx.Node, operands) -> bool:
        values = [self.env[x] if isinstance(x, fx.Node) else x for x in operands]
        values = [x.detach() if is_tensor(x) else x for x in values]
        return draws_inside(normalize(self.env[function], values, self.mode))

    def _check(self, node: fx.Node, local: fx.Node, tokens) -> None:
        """Checks the shape and dtype of a rule's result."""
        one = not isinstance(tokens, list)
        of_one_process = [node.meta["val"]] if one else list(node.meta["val"])
        parts = [self.env[local]] if one else list(self.env[local])
        for full, part, place in zip(
            of_one_process, parts, [tokens] if one else tokens, strict=True
        ):
            if full is None:
                continue
            shape = [size_of(n) for n in full.shape]
            if place is not None:
                fits = 0 <= place.dim < len(shape) and self.equal(shape[place.dim], place.full)
                if not fits or not self.equal(sum(place.sequence.lens), place.length):
                    raise CannotShard(
                        f"expected a tensor that can be {places(place)}, got shape "
                        f"{tuple(shape)}; this is a bug in deepsp's rule for it",
                        node,
                    )
            expected = place.part(shape, self.rank) if place else shape
            got = [size_of(n) for n in part.shape]
            if (
                part.dtype != full.dtype
                or len(got) != len(expected)
                or not all(self.equal(a, b) for a, b in zip(got, expected, strict=True))
            ):
                raise CannotShard(
                    f"expected a local tensor of shape {tuple(expected)} and {full.dtype}, got "
                    f"{tuple(got)} and {part.dtype}; this is a bug in deepsp's rule for it",
                    node,
                )

    def _output(self, node: fx.Node):
        value = self.values[node]
        if node in self.absent:
            self.report.note(node, "an output, a cache: not gathered")
            return self.call(_aten.empty.memory_format, [0])
        if value.full is not None:
            if self.outputs == "local" and value.tokens and value.local is not None:
                return value.local
            return self.full(node)
        if value.tokens is None or (self.outputs == "local" and value.tokens.is_sorted):
            raise CannotShard("it returns the order in which each rank sorted its own tokens", node)
        if self.outputs == "local" and value.tokens.alone:
            # As deepsp.shard cuts it.
            tokens = value.tokens
            even = self.holds(sympy.Eq(sympy.Mod(tokens.length, self.size), 0))
            sequence = Sequence.split(tokens.length, self.size, even)
            return self.part(node, replace(tokens, sequence=sequence))
        if self.outputs == "local":
            return value.local
        self.report.note(node, "an output: gathered, Replicate")
        return self.all_gather(value.local, self.shape_of(node), value.tokens)


def _is_impure(node: fx.Node) -> bool:
    """Whether a node must stay without users: writes, and calls that enter or leave modes. Random
    nodes needn't: only the form that is used draws numbers."""
    target = node.target
    if node.op != "call_function":
        return node.op in ("placeholder", "output")
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.is_mutable
    return getattr(target, "__name__", "") in (
        "_set_grad_enabled",
        "_enter_autocast",
        "_exit_autocast",
        "_enter_inference_mode",
        "_exit_inference_mode",
    )


def _placed(walk, node: fx.Node, values: list[Value]) -> Tokens | None:
    """The tokens of a full value: in the only dimension whose length is a known sequence's, or
    differs from it by a constant (shifted ids, a mask, an arange)."""
    dims = []
    for dim, n in enumerate(walk.shape_of(node)):
        if isinstance(n, int):
            # A constant size may be equal by chance: an operand's tokens must be in this dimension.
            if any(isinstance(v.tokens, Tokens) and _only(walk, node, v, dim) for v in values):
                dims.append((dim, n))
        elif any(same(n, x) for x in walk.lengths) or (
            values and any(difference(n, x) is not None for x in walk.lengths)
        ):
            dims.append((dim, n))
    if len(dims) != 1:
        return None
    dim, length = dims[0]
    return Tokens(dim, length, walk.sequence(length))


def _only(walk, node: fx.Node, operand: Value, dim: int) -> bool:
    """Whether a result's shape differs from an operand's in the number of tokens only."""
    shape, before = walk.shape_of(node), list(walk.env[operand.full].shape)
    if operand.tokens.dim != dim or len(before) != len(shape) or not operand.tokens.alone:
        return False
    return shape[dim] > 1 and all(
        same(size_of(a), b) for d, (a, b) in enumerate(zip(before, shape, strict=True)) if d != dim
    )


def _of_pairs(walk, node: fx.Node) -> bool:
    """Whether two dimensions hold tokens, as in a mask. Every rank has such a value in full, if it
    has the operands in full."""
    if not is_tensor(node.meta["val"]):
        return False  # several results
    shape = walk.shape_of(node)
    return sum(any(same(n, x) for x in walk.lengths) for n in shape if n != 1) > 1
