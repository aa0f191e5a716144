"""Turns the graph that Dynamo captured into few canonical aten ops: still differentiable, attention
and losses one op each, sizes symbolic, each op with its line of the user's code. ``torch.vmap``, as
in FlexAttention's block masks, is replaced by the ops that it runs, and a write into a view by an
op out of place: ``y[..., :4] = x`` makes a new ``y``."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from contextlib import contextmanager

import torch
from torch import fx
from torch._functorch.autograd_function import autograd_function_apply
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    make_fx,
    track_tensor_tree,
)
from torch.fx.traceback import preserve_node_meta
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import CheckpointPolicy

from deepsp.compile.sharding import rules
from deepsp.compile.sharding.boundary import role_of
from deepsp.compile.sharding.nodes import copy_of, is_differentiated, values_of
from deepsp.compile.sharding.report import CannotShard
from deepsp.memory.activations.checkpoint import keeps_attention_only
from deepsp.sequence.recurrence.functions import captured


def fake_inputs(gm: fx.GraphModule, example_inputs) -> tuple[list, FakeTensorMode]:
    """The fake value of each placeholder, and their mode."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    # Dynamo passes real tensors to backends; the fake ones, with symbolic sizes, are in the meta.
    noted = [n.meta.get("example_value", n.meta.get("val")) for n in placeholders]
    inputs = [x if y is None else y for x, y in zip(example_inputs, noted, strict=True)]
    mode = next((x.fake_mode for x in inputs if isinstance(x, FakeTensor)), None)
    if mode is None:
        mode = FakeTensorMode()
        inputs = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in inputs]
    return inputs, mode


@contextmanager
def without_cache(mode: FakeTensorMode):
    """Fake tensors that aren't cached: with symbols for sizes an entry takes longer to make than
    the op, in models of up to ten layers or so; in deeper ones it saves a percent of the whole."""
    before, mode.cache_enabled = mode.cache_enabled, False
    try:
        yield
    finally:
        mode.cache_enabled = before


def equate_sizes(gm: fx.GraphModule, inputs: list) -> None:
    """Makes symbols of marked inputs that have the same value one symbol: the rows, and the tokens,
    of ids and labels, say. A product of two symbols doesn't tell that they are."""
    first: dict[tuple[bool, int], torch.SymInt] = {}
    for node, x in zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True):
        role = role_of(node)
        for dim in {0, role[1]} if role is not None else ():
            size = x.size(dim)
            if isinstance(size, torch.SymInt) and size.node.has_hint():
                key = dim == role[1], size.node.hint
                bool(first.setdefault(key, size) == size)  # a guard, by which symbols are one


_CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint
# Ops that hold functions and have a rule.
_FLEX = torch.ops.higher_order.flex_attention
# Its predicate is replicated, so all ranks take the same branch.
COND = torch.ops.higher_order.cond


def check_supported(gm: fx.GraphModule) -> None:
    """Refuses ops with untraceable code, and gradient hooks.

    Raises:
        CannotShard: there is one.
    """
    for node in gm.graph.nodes:
        name = getattr(node.target, "__name__", str(node.target))
        if node.target is _CHECKPOINT:
            body = getattr(gm, node.args[0].target)
            # Attention and what was exchanged are saved anyway.
            context_fn = body.meta.get("_checkpoint_context_fn")
            if context_fn is not None and not keeps_attention_only(context_fn):
                raise CannotShard(
                    "a checkpoint's context_fn, which selects what is saved, can't be traced; "
                    "leave it out, or pass deepsp.checkpoint_policy()",
                    node,
                )
            check_supported(body)
        elif node.target is autograd_function_apply:
            for body in node.args[:2]:
                check_supported(getattr(gm, body.target))
        elif isinstance(node.target, torch._ops.HigherOrderOperator) and node.target not in (
            _FLEX,
            COND,
        ):
            raise CannotShard("it contains code that can't be traced", node)
        if node.op != "placeholder" and "hook" in name:
            raise CannotShard("it has a gradient hook, which can't be traced", node)


class _Inline(fx.Interpreter):
    """Inlines the bodies of ``torch.utils.checkpoint``, and tags their nodes for AOTAutograd's
    partitioner to recompute. FlexAttention and autograd functions stay one op."""

    _regions = itertools.count()

    def run(self, *args):
        self._autocasts = []
        try:
            return super().run(*args)
        finally:
            while self._autocasts:
                self._autocasts.pop().__exit__(None, None, None)

    def call_function(self, target, args, kwargs):
        if target is _enter_autocast:
            # The tracer only notes it, but the dtypes of what follows depend on it.
            self._autocasts.append(torch.amp.autocast(*args).__enter__())
        elif target is _exit_autocast:
            self._autocasts.pop().__exit__(None, None, None)
        if target in (_FLEX, COND, autograd_function_apply) or target in captured:
            return _one_op(target, args, kwargs)
        if target is torch._C._autograd._get_data_attr:
            return args[0].detach()  # .data, which the dispatcher doesn't see
        if target is not _CHECKPOINT:
            return super().call_function(target, args, kwargs)
        body, *inputs = copy_of(args[0]), *args[1:]
        tags = {"recompute": CheckpointPolicy.PREFER_RECOMPUTE, "ac_graph_id": next(self._regions)}
        for node in body.graph.nodes:
            node.meta.update(tags)
        return _Inline(body).run(*inputs)


def _one_op(target, args, kwargs):
    """A node for an op that holds functions, or is one of a model. These stay as Dynamo captured
    them: traced into aten ops, reads by position would lose their backward under vmap."""
    tracer = get_proxy_mode().tracer
    with disable_proxy_modes_tracing():
        out = values_of(target, args, kwargs)
    for module in tree_leaves(args):
        if isinstance(module, fx.GraphModule):
            tracer.root.register_module(tracer.get_fresh_qualname("function"), module)
    proxies = tree_map(tracer.unwrap_proxy, (args, kwargs))
    proxy = tracer.create_proxy("call_function", target, *proxies)
    return track_tensor_tree(out, proxy, constant=None, tracer=tracer)


@functools.cache
def _composite_ops() -> list:
    """The aten ops that are composed of others and return tensors."""
    ops = []
    for name in torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd"):
        namespace, _, name = name.partition("::")
        name, _, overload = name.partition(".")
        packet = getattr(torch.ops.aten, name, None) if namespace == "aten" else None
        op = getattr(packet, overload or "default", None)
        schema = getattr(op, "_schema", None)
        if schema and not schema.is_mutable and "Tensor" in str(schema).rpartition("->")[2]:
            ops.append(op)
    return ops


def trace(run: Callable, inputs: list, mode: FakeTensorMode) -> fx.GraphModule:
    """The aten ops of a function, still differentiable."""
    # Ops without a rule are decomposed if possible.
    table = {op: op.decompose for op in _composite_ops() if not rules.is_known(op)}
    with mode:
        return make_fx(
            run, table, pre_dispatch=True, tracing_mode="real", _allow_non_fake_inputs=True
        )(*inputs)


def normalize(gm: fx.GraphModule, inputs: list, mode: FakeTensorMode) -> fx.GraphModule:
    """A graph of aten ops with ``inputs``, fake tensors and sizes, for placeholders."""
    flat = flatten_vmaps(gm, mode)

    def run(*args):
        # Keeps the nodes' stack traces, which error messages need.
        with preserve_node_meta():
            return _Inline(flat).run(*args)

    traced = trace(run, inputs, mode)
    for new, old in zip(
        traced.graph.find_nodes(op="placeholder"),
        gm.graph.find_nodes(op="placeholder"),
        strict=True,
    ):
        new.meta = {**old.meta, "val": new.meta["val"]}
    _tell_apart(traced.graph)
    return traced


def _tell_apart(graph: fx.Graph) -> None:
    """Gives the second use of a tensor in a product with itself a separate node."""
    for node in graph.nodes:
        if getattr(node.target, "_opname", "") not in ("matmul", "mm", "bmm", "einsum"):
            continue
        seen = set()

        def separate(x, seen=seen, node=node):
            if x not in seen:
                seen.add(x)
                return x
            with graph.inserting_before(node):
                new = graph.call_function(torch.ops.aten.alias.default, (x,))
            new.meta = {**node.meta, "val": x.meta["val"]}
            return new

        node.args = fx.node.map_arg(node.args, separate)


_STEP = {"_vmap_increment_nesting": 1, "_vmap_decrement_nesting": -1}


def flatten_vmaps(gm: fx.GraphModule, mode) -> fx.GraphModule:
    """``gm``, or a copy without vmaps, also in its checkpoints."""
    bodies = {
        n.args[0].target: getattr(gm, n.args[0].target)
        for n in gm.graph.nodes
        if n.target is torch.ops.higher_order.tag_activation_checkpoint
    }
    flat = {name: flatten_vmaps(body, mode) for name, body in bodies.items()}
    has_vmap = any(_vmap_step(n) in _STEP for n in gm.graph.nodes)
    if not has_vmap and all(flat[name] is body for name, body in bodies.items()):
        return gm
    new = copy_of(gm)
    for name, body in flat.items():
        setattr(new, name, body)
    depth, region = 0, []
    for node in list(new.graph.nodes):
        depth += _STEP.get(_vmap_step(node), 0)
        if depth or region:
            region.append(node)
        if region and not depth:
            _flatten(new, region, mode)
            region = []
    new.recompile()
    return new


def _vmap_step(node: fx.Node) -> str:
    return getattr(node.target, "__name__", "")


def _flatten(gm: fx.GraphModule, region: list[fx.Node], mode) -> None:
    inside = set(region)
    outer = list(dict.fromkeys(x for n in region for x in n.all_input_nodes if x not in inside))
    results = [n for n in region if any(user not in inside for user in n.users)]
    body = fx.Graph()
    copies = {x: body.placeholder(x.name) for x in outer}
    for node in region:
        copies[node] = body.node_copy(node, copies.__getitem__)
    body.output([copies[n] for n in results])
    interpreter = fx.Interpreter(fx.GraphModule(gm, body))

    def run(*args):
        with preserve_node_meta():
            return interpreter.run(*args)

    values = [x.meta["example_value"] for x in outer]
    if any(is_differentiated(x) for x in tree_leaves(values)):
        raise CannotShard("torch.vmap of a tensor that requires grad can't be traced", region[0])
    with mode:
        flat = make_fx(run, tracing_mode="real", _allow_non_fake_inputs=True)(*values)
    names = dict(zip(flat.graph.find_nodes(op="placeholder"), outer, strict=True))
    for node in flat.graph.find_nodes(op="get_attr"):
        name = f"{region[0].name}_{node.target}"
        setattr(gm, name, getattr(flat, node.target))
        node.target = name
    with gm.graph.inserting_before(region[0]):
        copied = gm.graph.graph_copy(flat.graph, names)
    for node, value in zip(results, copied, strict=True):
        value.meta["example_value"] = node.meta["example_value"]
        node.replace_all_uses_with(value)
    for node in reversed(region):
        gm.graph.erase_node(node)
