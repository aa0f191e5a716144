"""What Dynamo captured, as few canonical aten ops: still differentiable, attention and losses still
one op each, sizes still symbolic, every op with the line of the user's code that it comes from."""

from __future__ import annotations

import functools
import itertools

import torch
from torch import fx
from torch._functorch.autograd_function import autograd_function_apply
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
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
from deepsp.compile.sharding.messages import CannotShard
from deepsp.compile.sharding.nodes import copy_of, values_of
from deepsp.compile.sharding.vmaps import flatten_vmaps


def fake_inputs(gm: fx.GraphModule, example_inputs) -> tuple[list, FakeTensorMode]:
    """What stands for each placeholder while tracing, and the mode that it belongs to."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    # Dynamo hands real tensors to backends; what stands for them, sizes symbolic, is noted here.
    noted = [n.meta.get("example_value", n.meta.get("val")) for n in placeholders]
    given = [x if y is None else y for x, y in zip(example_inputs, noted, strict=True)]
    mode = next((x.fake_mode for x in given if isinstance(x, FakeTensor)), None)
    if mode is None:
        mode = FakeTensorMode()
        given = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in given]
    return given, mode


_CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint
# Ops that hold functions, and have a rule.
_FLEX = torch.ops.higher_order.flex_attention
# Of what every rank has in full: which branch is taken is the same everywhere.
COND = torch.ops.higher_order.cond


def check_supported(gm: fx.GraphModule) -> None:
    """Refuses what would lose its meaning: ops that hold code of their own, and hooks.

    Raises:
        CannotShard: there is one.
    """
    for node in gm.graph.nodes:
        name = getattr(node.target, "__name__", str(node.target))
        if node.target is _CHECKPOINT:
            body = getattr(gm, node.args[0].target)
            if "_checkpoint_context_fn" in body.meta:
                raise CannotShard(
                    "a checkpoint's context_fn, which selects what is saved, can't be traced; "
                    "leave it out",
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
    """Runs what ``torch.utils.checkpoint`` holds as if it stood there, its nodes tagged for
    AOTAutograd's partitioner: computed again in backward. FlexAttention and functions of
    one's own stay one op."""

    _regions = itertools.count()

    def call_function(self, target, args, kwargs):
        if target in (_FLEX, COND, autograd_function_apply):
            return _one_op(target, args, kwargs)
        if target is torch._C._autograd._get_data_attr:
            return args[0].detach()  # .data, which no dispatcher sees
        if target is not _CHECKPOINT:
            return super().call_function(target, args, kwargs)
        body, *inputs = copy_of(args[0]), *args[1:]
        tags = {"recompute": CheckpointPolicy.PREFER_RECOMPUTE, "ac_graph_id": next(self._regions)}
        for node in body.graph.nodes:
            node.meta.update(tags)
        return _Inline(body).run(*inputs)


def _one_op(target, args, kwargs):
    """A node for an op that holds functions, which stay as Dynamo has captured them: traced into
    aten ops, what they read by position would lose the backward that vmap knows."""
    tracer = get_proxy_mode().tracer
    with disable_proxy_modes_tracing():
        out = values_of(target, args, kwargs)
    for module in tree_leaves(args):
        if isinstance(module, fx.GraphModule):
            tracer.root.register_module(tracer.get_fresh_qualname("function"), module)
    proxies = tree_map(tracer.unwrap_proxy, args)
    proxy = tracer.create_proxy("call_function", target, proxies, kwargs)
    return track_tensor_tree(out, proxy, constant=None, tracer=tracer)


@functools.cache
def _composite_ops() -> list:
    """The aten ops that are written in terms of others, and return tensors."""
    found = []
    for name in torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd"):
        namespace, _, name = name.partition("::")
        name, _, overload = name.partition(".")
        packet = getattr(torch.ops.aten, name, None) if namespace == "aten" else None
        op = getattr(packet, overload or "default", None)
        schema = getattr(op, "_schema", None)
        if schema and not schema.is_mutable and "Tensor" in str(schema).rpartition("->")[2]:
            found.append(op)
    return found


def normalize(gm: fx.GraphModule, inputs: list, mode: FakeTensorMode) -> fx.GraphModule:
    """A graph of aten ops with ``inputs``, fake tensors and sizes, for placeholders."""
    flat = flatten_vmaps(gm, mode)

    def run(*args):
        # Without it nodes would lose their stack traces, which messages need.
        with preserve_node_meta():
            return _Inline(flat).run(*args)

    with mode:
        traced = make_fx(
            run,
            # What no rule knows is taken apart, where it can be.
            {op: op.decompose for op in _composite_ops() if not rules.is_known(op)},
            pre_dispatch=True,
            tracing_mode="real",
            _allow_non_fake_inputs=True,
        )(*inputs)
    for new, old in zip(
        traced.graph.find_nodes(op="placeholder"),
        gm.graph.find_nodes(op="placeholder"),
        strict=True,
    ):
        new.meta = {**old.meta, "val": new.meta["val"]}
    _tell_apart(traced.graph)
    return traced


def _tell_apart(graph: fx.Graph) -> None:
    """A product of a tensor with itself takes it twice, each along an index of its own."""
    for node in graph.nodes:
        if getattr(node.target, "_opname", "") not in ("matmul", "mm", "bmm", "einsum"):
            continue
        seen = set()

        def own(x, seen=seen, node=node):
            if x not in seen:
                seen.add(x)
                return x
            with graph.inserting_before(node):
                new = graph.call_function(torch.ops.aten.alias.default, (x,))
            new.meta = {**node.meta, "val": x.meta["val"]}
            return new

        node.args = fx.node.map_arg(node.args, own)
