"""What Dynamo captured, as few canonical aten ops: still differentiable, attention and losses still
one op each, sizes still symbolic, every op with the line of the user's code that it comes from."""

from __future__ import annotations

import itertools

import torch
from torch import fx
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

from deepsp.compile.messages import CannotShard
from deepsp.compile.nodes import copy_of, values_of
from deepsp.compile.vmaps import flatten_vmaps


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


_WHY = {
    "autograd_function_apply": "the backward of a torch.autograd.Function can't be followed; make "
    "it an op with torch.library.custom_op, and register a rule for it",
}
_CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint
_FLEX = torch.ops.higher_order.flex_attention


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
                    "a checkpoint's context_fn, which selects what is kept, can't be followed; "
                    "leave it out",
                    node,
                )
            check_supported(body)
        elif isinstance(node.target, torch._ops.HigherOrderOperator) and node.target is not _FLEX:
            raise CannotShard(_WHY.get(name, "it holds code that can't be followed"), node)
        if node.op != "placeholder" and "hook" in name:
            raise CannotShard("a hook on its gradient can't be followed", node)


class _Inline(fx.Interpreter):
    """Runs what ``torch.utils.checkpoint`` holds as if it stood there, its nodes tagged for
    AOTAutograd's partitioner: computed again in backward. FlexAttention stays one op."""

    _regions = itertools.count()

    def call_function(self, target, args, kwargs):
        if target is _FLEX:
            return _one_op(target, args)
        if target is not _CHECKPOINT:
            return super().call_function(target, args, kwargs)
        body, *inputs = copy_of(args[0]), *args[1:]
        tags = {"recompute": CheckpointPolicy.PREFER_RECOMPUTE, "ac_graph_id": next(self._regions)}
        for node in body.graph.nodes:
            node.meta.update(tags)
        return _Inline(body).run(*inputs)


def _one_op(target, args):
    """A node for an op that holds functions, which stay as Dynamo has captured them: traced into
    aten ops, what they read by position would lose the backward that vmap knows."""
    tracer = get_proxy_mode().tracer
    with disable_proxy_modes_tracing():
        out = values_of(target, args, {})
    for module in tree_leaves(args):
        if isinstance(module, fx.GraphModule):
            tracer.root.register_module(tracer.get_fresh_qualname("function"), module)
    proxies = tree_map(tracer.unwrap_proxy, args)
    proxy = tracer.create_proxy("call_function", target, proxies, {})
    return track_tensor_tree(out, proxy, constant=None, tracer=tracer)


def normalize(gm: fx.GraphModule, inputs: list, mode: FakeTensorMode) -> fx.GraphModule:
    """A graph of aten ops with ``inputs``, fake tensors and sizes, for placeholders."""
    flat = flatten_vmaps(gm, mode)

    def run(*args):
        # Without it nodes would lose their stack traces, which messages need.
        with preserve_node_meta():
            return _Inline(flat).run(*args)

    with mode:
        traced = make_fx(run, pre_dispatch=True, tracing_mode="real", _allow_non_fake_inputs=True)(
            *inputs
        )
    for new, old in zip(
        traced.graph.find_nodes(op="placeholder"),
        gm.graph.find_nodes(op="placeholder"),
        strict=True,
    ):
        new.meta = {**old.meta, "val": new.meta["val"]}
    return traced
