"""Rewrites a graph for one device into one rank's share of it.

Every value is held whole by every rank, or the rank has its tokens of it, or both: what is made of
whole inputs alone (positions, masks, labels that are being shifted) is there in both forms, and the
one that nobody asks for is dropped at the end. What parameters make of tokens is there as a part
only: an op on it needs a rule (``deepsp.compile.rules``) that says where the tokens are in its
result, or it is refused, with the line of the user's code.

Gradients follow one convention, from which the rest follows: the gradient of a whole value is the
whole gradient, the same on every rank; that of a part is the part's. So a whole value that is used
with a part passes through ``replicate``, which sums its gradient over the group in backward; a part
becomes whole by ``all_reduce`` or ``unshard``, whose backwards need no communication.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_symbols
from torch.fx.proxy import GraphAppendingTracer
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from deepsp.compile import checkpointing, rules
from deepsp.compile.inputs import role_of
from deepsp.compile.messages import CannotShard, line_of, where
from deepsp.compile.normalize import check_supported, fake_inputs, normalize
from deepsp.compile.tokens import Sequence, Size, Tokens, same, size_of
from deepsp.groups import Group, member_of

GRADIENTS = ("sum", "local", "mean")
OUTPUTS = ("whole", "local")
BUCKET_BYTES = 25 << 20

_aten, _ours = torch.ops.aten, torch.ops.deepsp
# Copied again where only the share of a gradient is wanted: nothing is computed twice.
_CHEAP = {
    _aten.alias.default,
    _aten.detach.default,
    _aten.expand.default,
    _aten.permute.default,
    _aten.reshape.default,
    _aten.select.int,
    _aten.slice.Tensor,
    _aten.squeeze.dim,
    _aten.t.default,
    _aten.to.dtype,
    _aten.to.dtype_layout,
    _aten.to.device,
    _aten._to_copy.default,
    _aten.transpose.int,
    _aten.unsqueeze.default,
    _aten.view.default,
}


@dataclass
class Value:
    """What a node of the old graph has become. ``tokens``: where its tokens are, for several
    outputs a list; None where it has none."""

    whole: Any = None
    mine: Any = None
    tokens: Tokens | list[Tokens | None] | None = None
    of_parameter: bool = False
    of_data: bool = False  # made of what prepare_inputs has marked


@dataclass
class Decision:
    """What was decided for an op, for :func:`deepsp.compile.explain`."""

    name: str
    op: str
    shape: str
    what: str
    line: str


@dataclass
class Report:
    """What :func:`parallelize` did."""

    decisions: list[Decision] = field(default_factory=list)
    collectives: dict[str, int] = field(default_factory=dict)


class Parallelizer:
    """One run over a normalised graph. Rules see it as the ``graph`` of their call."""

    def __init__(self, gm: fx.GraphModule, inputs: list, mode, member, gradients, outputs):
        self.gm, self.old, self.new = gm, gm.graph, fx.Graph()
        self.inputs, self.mode = inputs, mode
        self.rank, self.size, self.name = member
        self.gradients, self.outputs = gradients, outputs
        self.values: dict[fx.Node, Value] = {}
        self.env: dict[fx.Node, Any] = {}  # of new nodes: the fake values
        self.symbols: dict[sympy.Symbol, fx.Node] = {}
        self.parts: dict[tuple, fx.Node] = {}
        self.shared: dict[fx.Node, fx.Node] = {}
        self.scaled: dict[fx.Node, fx.Node] = {}
        self.unscaled: dict[fx.Node, fx.Node] = {}
        self.parameters: dict[fx.Node, fx.Node] = {}  # what stands for a parameter's share: its
        self.lengths: dict[Size, Sequence] = {}
        self.rebound: set[fx.Node] = set()  # of the old graph: written to, so now something else
        self.report = Report()
        self.current: fx.Node | None = None

    # ------------------------------------------------------------------------- new nodes

    def call(self, target, *args, **kwargs) -> fx.Node:
        """A new node, with the values that it has on this rank."""
        return self._run(self.new.call_function(target, args, kwargs))

    def _run(self, node: fx.Node) -> fx.Node:
        if self.current is not None:
            for key in ("stack_trace", "nn_module_stack", "source_fn_stack", "custom", "seq_nr"):
                if key in self.current.meta:
                    node.meta[key] = self.current.meta[key]
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.env.__getitem__)
        try:
            with self.mode:
                value = node.target(*args, **kwargs)
        except (RuntimeError, ValueError, IndexError) as error:
            self.new.erase_node(node)
            raise CannotShard(str(error).splitlines()[0], self.current) from error
        self.env[node] = value
        node.meta["val"] = tree_map(
            lambda x: x.detach() if isinstance(x, torch.Tensor) else x, value
        )
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
                raise CannotShard(f"where the size {symbol} comes from isn't known", self.current)
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

    def sequence(self, length: Size) -> Sequence:
        for known, sequence in self.lengths.items():
            if same(known, length):
                return sequence
        # Two graphs at most: lengths that divide by the ranks need no padding anywhere.
        even = isinstance(length, int) or self.mode.shape_env.evaluate_expr(
            sympy.Eq(sympy.Mod(length, self.size), 0)
        )
        return self.lengths.setdefault(length, Sequence.split(length, self.size, bool(even)))

    # ------------------------------------------------------------------- forms of a value

    def shape_of(self, node: fx.Node) -> list[Size]:
        """The whole shape of a node of the old graph."""
        return [size_of(n) for n in node.meta["val"].shape]

    def whole(self, node: fx.Node):
        """The whole of an old node's value, for ops on whole values."""
        value = self.values[node]
        if value.whole is None:
            raise CannotShard(
                f"it needs all of {node.name}, of which each rank has its tokens only", self.current
            )
        local = self.gradients == "local" and torch.is_grad_enabled()
        if local and value.whole in self.parameters_of_group:
            if value.whole not in self.scaled:
                scaled = self.call(_ours.scale_gradient.default, value.whole, 1 / self.size)
                self.scaled[value.whole] = scaled
                self.unscaled[scaled] = value.whole
            return self.scaled[value.whole]
        return value.whole

    def for_part(self, node: fx.Node):
        """The whole of an old node's value, for ops on parts: its gradient becomes a sum."""
        value = self.values[node]
        if value.whole is None:
            raise CannotShard(
                f"it needs all of {node.name}, of which each rank has its tokens only", self.current
            )
        return self.share(value.whole)

    def share(self, whole: fx.Node):
        value = self.env[whole]
        differentiated = isinstance(value, torch.Tensor) and value.requires_grad
        # Under no_grad there is nothing to sum, and what is made there must not be used elsewhere.
        if not differentiated or not torch.is_grad_enabled() or self.size == 1:
            return whole
        if whole in self.shared:
            return self.shared[whole]
        if whole in self.parameters_of_group:
            share = self.call(_aten.alias.default, whole)
            self.parameters[share] = whole
        elif whole in self.unscaled:
            return self.share(self.unscaled[whole])
        elif whole.target in _CHEAP and self._tensors_of(whole) == [whole.args[0]]:
            share = self.call(
                whole.target, self.share(whole.args[0]), *whole.args[1:], **whole.kwargs
            )
        else:
            (share,) = self._replicate_wait(*self._replicate_start([whole]))
        self.shared[whole] = share
        return share

    def _tensors_of(self, node: fx.Node) -> list[fx.Node]:
        return [n for n in node.all_input_nodes if _is_tensor_like(self.env[n])]

    def _replicate_start(self, tensors: list[fx.Node]) -> tuple[list[fx.Node], fx.Node]:
        where_ = (self.rank, self.size, self.name)
        start = self.call(_ours.replicate_start.default, tensors, *where_)
        passed = self.call(operator.getitem, start, 0)
        passed = [self.call(operator.getitem, passed, i) for i in range(len(tensors))]
        return passed, self.call(operator.getitem, start, 1)

    def _replicate_wait(self, passed: list[fx.Node], token: fx.Node) -> list[fx.Node]:
        where_ = (self.rank, self.size, self.name)
        wait = self.call(_ours.replicate_wait.default, passed, token, *where_)
        return [self.call(operator.getitem, wait, i) for i in range(len(passed))]

    def part(self, node: fx.Node, tokens: Tokens):
        """This rank's part of an old node's value."""
        value = self.values[node]
        if value.mine is not None and value.tokens == tokens:
            return value.mine
        if value.whole is None:
            raise CannotShard(
                f"{node.name} has its tokens elsewhere, or others of them: tokens that meet must "
                "be the same ones",
                self.current,
            )
        shape = self.shape_of(node)
        if not 0 <= tokens.dim < len(shape) or not self.equal(shape[tokens.dim], tokens.whole):
            raise CannotShard(
                f"{node.name} has shape {tuple(shape)} where {tokens.whole} tokens in dimension "
                f"{tokens.dim} are needed",
                self.current,
            )
        key = (value.whole, tokens, torch.is_grad_enabled())
        if key not in self.parts:
            self.parts[key] = self._cut(self.share(value.whole), shape, tokens)
        return self.parts[key]

    def _cut(self, whole: fx.Node, shape: list[Size], tokens: Tokens) -> fx.Node:
        dim, begin = tokens.dim, tokens.sequence.begin(self.rank)
        count = tokens.sequence.lens[self.rank]
        if same(tokens.outer, 1):
            first, many = (size_of(x * tokens.inner) for x in (begin, count))
            return self.call(_aten.narrow.default, whole, dim, self.int_(first), self.int_(many))
        apart = [*shape[:dim], tokens.outer, tokens.length, tokens.inner, *shape[dim + 1 :]]
        apart = self.call(_aten.reshape.default, whole, self.shape(apart))
        cut = self.call(_aten.narrow.default, apart, dim + 1, self.int_(begin), self.int_(count))
        return self.call(_aten.reshape.default, cut, self.shape(tokens.part(shape, self.rank)))

    def unshard(self, mine: fx.Node, shape: list[Size], tokens: Tokens) -> fx.Node:
        """All ranks' parts as one."""
        dim, rank = tokens.dim, self.rank
        count = tokens.sequence.lens[rank]
        if not tokens.alone:
            apart = [*shape[:dim], tokens.outer, count, tokens.inner, *shape[dim + 1 :]]
            mine = self.call(_aten.reshape.default, mine, self.shape(apart))
            dim += 1
        out = self.call(_ours.unshard.default, mine, dim, self.lens(tokens), rank, self.name)
        if not tokens.alone:
            out = self.call(_aten.reshape.default, out, self.shape(shape))
        return out

    def all_reduce(self, mine: fx.Node) -> fx.Node:
        """The sum over all ranks, whole."""
        return self.call(_ours.all_reduce.default, mine, 1.0, self.rank, self.size, self.name)

    # --------------------------------------------------------------------------- the walk

    def run(self) -> fx.Graph:
        self._placeholders()
        for node in self.old.nodes:
            self.current = node
            if node.op == "get_attr":
                self.values[node] = Value(self._attribute(node))
            elif node.op == "call_function":
                self._visit(node)
            elif node.op == "output":
                self.new.output(fx.node.map_arg(node.args[0], self._output))
        self.current = None
        self.new.eliminate_dead_code(is_impure_node=_is_impure)
        self._drop_shares_without_gradient()
        self._bucket_parameters()
        self.new.eliminate_dead_code(is_impure_node=_is_impure)
        self.new.lint()
        self._count()
        return self.new

    def _attribute(self, node: fx.Node) -> fx.Node:
        new = self.new.get_attr(node.target)
        new.meta = dict(node.meta)
        value = operator.attrgetter(node.target)(self.gm)
        self.env[new] = self.mode.from_tensor(value) if _is_tensor(value) else value
        return new

    def _placeholders(self) -> None:
        self.parameters_of_group: set[fx.Node] = set()
        marked = []
        for node, value in zip(self.old.find_nodes(op="placeholder"), self.inputs, strict=True):
            new = self.new.placeholder(node.name)
            new.meta = dict(node.meta)
            new.meta["val"] = value
            self.env[new] = value
            kind = isinstance(value, torch.nn.Parameter)
            self.values[node] = Value(new, of_parameter=kind)
            if kind:
                self.parameters_of_group.add(new)
            if isinstance(value, torch.SymInt):
                self._know(value, new)
            role = role_of(node)
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
                "no input of this graph is known to hold tokens. Pass what deepsp.prepare_inputs "
                "returns, to a model that is captured as one graph" + _break_of(self.gm)
            )
        for node, (name, dim) in marked:
            shape = self.shape_of(node)
            dim = dim % len(shape)
            length = shape[dim]
            if same(length, 1):
                continue  # one for all tokens
            tokens = Tokens(dim, length, self.sequence(length))
            value = self.values[node]
            value.tokens, value.of_data = tokens, True
            # Cut at the end of the walk's first use would do as well; here it is at hand.
            value.mine = self._cut(self.share(value.whole), shape, tokens)
            if value.mine is not None and self.env[value.whole].requires_grad:
                value.whole = None
            self._note(node, f"{name}: cut in dimension {dim}")

    def _know(self, value: torch.SymInt, node: fx.Node) -> None:
        if value.node.expr.is_Symbol:
            self.symbols.setdefault(value.node.expr, node)

    def _visit(self, node: fx.Node) -> None:
        value = node.meta.get("val")
        if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
            return self._item(node)
        leaves = tree_leaves(value)
        if leaves and all(isinstance(x, (torch.SymInt, int)) for x in leaves):
            return self._size(node, value)
        if not any(_is_tensor(x) for x in leaves):
            return self._plain(node)
        if getattr(node.target, "_schema", None) is not None and node.target._schema.is_mutable:
            return self._mutation(node)
        self.values[node] = self._op(node, node.target)

    def _size(self, node: fx.Node, value) -> None:
        """A size: computed from the inputs' sizes, which are those of the whole."""
        if isinstance(value, int) or not free_symbols(value) - set(self.symbols):
            self.values[node] = Value(self.int_(size_of(value)))
            return
        new = self.call(node.target, *self._map(node.args, self.whole))
        self._know(value, new)
        self.values[node] = Value(new)

    def _plain(self, node: fx.Node) -> None:
        """No tensor comes out: modes that are entered and left, and asserts."""
        if "assert" in str(node.target) or "constrain" in str(node.target):
            return
        args, kwargs = self._map((node.args, node.kwargs), self.whole)
        self.values[node] = Value(self.call(node.target, *args, **kwargs))

    def _map(self, args, function):
        return fx.node.map_arg(args, lambda n: self._as_size(n, function))

    def _as_size(self, node: fx.Node, function):
        value = self.values[node]
        return function(node) if _is_tensor_like(node.meta.get("val")) else value.whole

    def _item(self, node: fx.Node) -> None:
        source, index = self.values[node.args[0]], node.args[1]
        tokens = source.tokens[index] if isinstance(source.tokens, list) else None
        take = [
            None if x is None else self.call(operator.getitem, x, index)
            for x in (source.whole, source.mine)
        ]
        if tokens is None and take[1] is not None and take[0] is None:
            take = [take[1], None]
        self.values[node] = Value(take[0], take[1], tokens, source.of_parameter, source.of_data)

    def _op(self, node: fx.Node, target) -> Value:
        operands = [n for n in node.all_input_nodes if _is_tensor_like(n.meta.get("val"))]
        values = [self.values[n] for n in operands]
        flags = {
            "of_parameter": any(v.of_parameter for v in values),
            "of_data": any(v.of_data for v in values),
        }
        only_mine = any(v.whole is None for v in values)
        random = torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())
        if not only_mine and (random or not any(v.tokens for v in values)):
            # What is random is drawn once: parts are cut from what every rank has.
            mine = None if operands or random else self._factory(node, target)
            return Value(self._emit_whole(node, target), *(mine or ()), **flags)
        call = rules.Call(self, node, target)
        try:
            tokens = rules.find(call)(call)
            if not tokens and not only_mine:  # a reduction of what is whole as well
                return Value(self._emit_whole(node, target), **flags)
            mine = call.lower()
        except CannotShard as error:
            # What parameters make of tokens is never computed whole, on every rank, in silence.
            if only_mine or all(flags.values()):
                raise error.at(node) from error.__cause__
            return Value(self._emit_whole(node, target), **flags)
        if not tokens:
            self._note(node, call.said or "all ranks have the result")
            return Value(mine, of_parameter=True, of_data=True)
        self._check(node, mine, tokens)
        if only_mine or all(flags.values()):
            self._note(node, call.said or _places(tokens))
            return Value(None, mine, tokens, **flags)
        return Value(self._emit_whole(node, target), mine, tokens, **flags)

    def _factory(self, node: fx.Node, target):
        """What is made of sizes alone may be made for this rank's tokens alone: an arange, or
        something filled."""
        shape = self.shape_of(node)
        found = [
            (d, length) for d, n in enumerate(shape) for length in self.lengths if same(n, length)
        ]
        if len(found) != 1 or isinstance(found[0][1], int):
            return None
        dim, length = found[0]
        tokens = Tokens(dim, length, self.lengths[length])
        return self._cut(self._emit_whole(node, target), shape, tokens), tokens

    def _emit_whole(self, node: fx.Node, target) -> fx.Node:
        args, kwargs = self._map((node.args, node.kwargs), self.whole)
        tags = getattr(target, "tags", ())
        new = self.call(target, *args, **kwargs)
        if torch.Tag.nondeterministic_seeded in tags and self.size > 1:
            return rules.agree(self, node, target, args, kwargs, new)
        return new

    def _check(self, node: fx.Node, mine: fx.Node, tokens) -> None:
        """Whether the part has the shape that it should have."""
        one = not isinstance(tokens, list)
        wholes = [node.meta["val"]] if one else list(node.meta["val"])
        parts = [self.env[mine]] if one else list(self.env[mine])
        for whole, part, place in zip(wholes, parts, [tokens] if one else tokens, strict=True):
            shape = [size_of(n) for n in whole.shape]
            if place is not None:
                fits = 0 <= place.dim < len(shape) and self.equal(shape[place.dim], place.whole)
                if not fits or not self.equal(sum(place.sequence.lens), place.length):
                    raise CannotShard(
                        f"its tokens were taken to be {_places(place)}, but it has shape "
                        f"{tuple(shape)}; this is a fault of deepsp's rule for it",
                        node,
                    )
            expected = place.part(shape, self.rank) if place else shape
            got = [size_of(n) for n in part.shape]
            if (
                part.dtype != whole.dtype
                or len(got) != len(expected)
                or not all(self.equal(a, b) for a, b in zip(got, expected, strict=True))
            ):
                raise CannotShard(
                    f"its part came out as {tuple(got)} {part.dtype}, not as "
                    f"{tuple(expected)} {whole.dtype}; this is a fault of deepsp's rule for it",
                    node,
                )

    def _mutation(self, node: fx.Node) -> None:
        """A write in place, done out of place where nobody sees the difference."""
        target = node.args[0]
        packet, overload = node.target._opname, node.target._overloadname
        aliases = self._aliases(target)
        if all(self.values[n].whole is not None for n in (*aliases, *node.all_input_nodes)):
            touched = [self.env[self.values[n].whole] for n in node.all_input_nodes]
            differentiated = any(_is_tensor(x) and x.requires_grad for x in touched)
            if differentiated and torch.is_grad_enabled():
                raise CannotShard(
                    "it writes into what is differentiated; write x = x.op(...)", node
                )
            self.values[node] = Value(self._emit_whole(node, node.target))
            self.parts.clear()
            for n in (*aliases, node):  # parts are cut anew
                value, tokens = self.values[n], self.values[n].tokens
                if isinstance(tokens, Tokens):
                    value.mine = self._cut(value.whole, self.shape_of(n), tokens)
            self.values[node] = self.values[target]
            return
        functional = getattr(getattr(_aten, packet.removesuffix("_"), None), overload, None)
        seen = [n for n in aliases if n is not target and self._used_behind(n, node)]
        if not packet.endswith("_") or functional is None or seen or target.op == "placeholder":
            raise CannotShard("it writes into a tensor that others see, too", node)
        result = self._op(node, functional)
        self.values[node] = self.values[target] = result
        self.rebound.add(target)

    def _aliases(self, node: fx.Node) -> list[fx.Node]:
        storage = StorageWeakRef(node.meta["val"].untyped_storage())
        return [
            n
            for n in self.values
            if isinstance(n.meta.get("val"), torch.Tensor)
            and StorageWeakRef(n.meta["val"].untyped_storage()) == storage
        ]

    def _used_behind(self, node: fx.Node, behind: fx.Node) -> bool:
        return any(behind < user for user in node.users)

    def _output(self, node: fx.Node):
        value = self.values[node]
        if value.whole is not None:
            if self.outputs == "local" and value.tokens and value.mine is not None:
                return value.mine
            return self.whole(node)
        if self.outputs == "local":
            return value.mine
        self._note(node, "an output: gathered")
        return self.unshard(value.mine, self.shape_of(node), value.tokens)

    # ------------------------------------------------------------------------- parameters

    def _drop_shares_without_gradient(self) -> None:
        """Parameters that no output is differentiated by get no gradient, as in one process."""
        reached, stack = set(), [self.new.output_node()]
        while stack:
            for node in stack.pop().all_input_nodes:
                leaves = tree_leaves(self.env[node])
                if node not in reached and any(_is_tensor(x) and x.requires_grad for x in leaves):
                    reached.add(node)
                    stack.append(node)
        there = set(self.new.nodes)
        for share, whole in list(self.parameters.items()):
            if share not in reached:
                if share in there:
                    share.replace_all_uses_with(whole)
                del self.parameters[share]

    def _bucket_parameters(self) -> None:
        """Gives parameters that are used with tokens the gradients that were asked for."""
        if self.gradients == "local":
            for share, whole in self.parameters.items():
                share.replace_all_uses_with(whole)
            return
        if self.gradients == "mean":
            for share, whole in self.parameters.items():
                with self.new.inserting_before(share):
                    new = self.call(_ours.scale_gradient.default, whole, float(self.size))
                share.replace_all_uses_with(new)
            return
        open_: dict[tuple, list[fx.Node]] = {}
        filled: dict[tuple, int] = {}
        for share, whole in self.parameters.items():
            value = self.env[whole]
            key = (value.dtype, value.device)
            if key not in open_ or filled[key] >= BUCKET_BYTES:
                if key in open_:
                    self._replace(open_[key])
                open_[key], filled[key] = [], 0
            open_[key].append(share)
            filled[key] += value.nbytes
        for bucket in open_.values():
            self._replace(bucket)

    def _replace(self, shares: list[fx.Node]) -> None:
        last = self.new.find_nodes(op="placeholder")[-1]
        with self.new.inserting_before(last.next):
            started = self._replicate_start([self.parameters[s] for s in shares])
        with self.new.inserting_before(shares[0]):
            for share, summed in zip(shares, self._replicate_wait(*started), strict=True):
                share.replace_all_uses_with(summed)

    # ----------------------------------------------------------------------------- report

    def _note(self, node: fx.Node, what: str) -> None:
        value = node.meta.get("val")
        shape = ", ".join(str(n) for n in value.shape) if _is_tensor(value) else ""
        self.report.decisions.append(
            Decision(node.name, where(node), f"[{shape}]", what, line_of(node))
        )

    def _count(self) -> None:
        for node in self.new.nodes:
            if node.op == "call_function" and str(node.target).startswith("deepsp."):
                name = str(node.target).removeprefix("deepsp.").removesuffix(".default")
                self.report.collectives[name] = self.report.collectives.get(name, 0) + 1


def _break_of(gm: fx.GraphModule) -> str:
    """Why Dynamo cut the user's code here."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return "; torch.compile(..., fullgraph=True) says where it isn't"
    at = reason.user_stack[-1] if reason.user_stack else None
    place = f"\n  {at.filename}:{at.lineno}, in {at.name}: {at.line}" if at else ""
    return f". The graph ends with a break: {reason.reason.splitlines()[0]}{place}"


def _behind(node: fx.Node):
    node = node.next
    while node.op != "root":
        yield node
        node = node.next


def _is_tensor(value) -> bool:
    return isinstance(value, torch.Tensor)


def _is_tensor_like(value) -> bool:
    return any(_is_tensor(x) for x in tree_leaves(value))


def _is_impure(node: fx.Node) -> bool:
    """What must stay though nobody uses it: writes, and modes that are entered or left. Random
    values needn't: of the two forms of one, only that which is used draws numbers."""
    target = node.target
    if node.op != "call_function":
        return node.op in ("placeholder", "output")
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.is_mutable
    return getattr(target, "__name__", "") in (
        "_set_grad_enabled", "_enter_autocast", "_exit_autocast", "_enter_inference_mode",
        "_exit_inference_mode",
    )  # fmt: skip


def _places(tokens) -> str:
    def one(t: Tokens | None) -> str:
        if t is None:
            return "whole"
        inside = "" if t.alone else f" ({t.outer} x {t.length} x {t.inner})"
        return f"tokens in dimension {t.dim}{inside}"

    return "; ".join(one(t) for t in tokens) if isinstance(tokens, list) else one(tokens)


def parallelize(
    gm: fx.GraphModule,
    example_inputs,
    group: Group = None,
    gradients: str = "sum",
    outputs: str = "whole",
    memory_budget: float | None = None,
    report: Report | None = None,
) -> fx.GraphModule:
    """Turns a graph for one device into this rank's share of it, over the sequence.

    Args:
        gm: what Dynamo captured, with one tensor at least that :func:`deepsp.prepare_inputs` has
            marked. It isn't changed.
        example_inputs: as backends of ``torch.compile`` get them.
        group: the sequence group.
        gradients: "sum": every rank gets the full gradient of each parameter; "local": its share
            of it; "mean": its share times the group's size, for wrappers that average.
        outputs: "whole": what is sharded is gathered before it is returned; "local": returned as
            it is.
        memory_budget: 0 to 1: what backward may find kept of each token's own computation, of its
            bytes; attention and what was exchanged is kept always, the rest computed again. None:
            as the inner compiler decides.
        report: takes what was decided.

    Returns:
        A differentiable graph with the inputs and outputs of ``gm``, for any inner compiler.

    Raises:
        ValueError: something in the graph can't be sharded; the message says what, why, and where
            in the user's code. Nothing has been sent then.
    """
    if gradients not in GRADIENTS:
        raise ValueError(f"gradients is {gradients!r}; 'sum', 'local' or 'mean' is right")
    if outputs not in OUTPUTS:
        raise ValueError(f"outputs is {outputs!r}; 'whole' or 'local' is right")
    if memory_budget is not None and not 0 <= memory_budget <= 1:
        raise ValueError(f"memory_budget is {memory_budget}; from 0 to 1, or None, is right")
    member = member_of(group)
    does_nothing = all(n.op in ("placeholder", "output") for n in gm.graph.nodes)
    if (member[1] == 1 and memory_budget is None) or does_nothing:
        return gm
    check_supported(gm)
    inputs, mode = fake_inputs(gm, example_inputs)
    normal = normalize(gm, inputs, mode)
    normal.compile_subgraph_reason = getattr(gm, "compile_subgraph_reason", None)
    walk = Parallelizer(normal, inputs, mode, member, gradients, outputs)
    if report is not None:
        walk.report = report
    with mode:
        graph = walk.run()
    if memory_budget is not None and memory_budget < 1:
        checkpointing.tag(graph, memory_budget)
    return fx.GraphModule(normal, graph)
