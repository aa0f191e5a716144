"""``torch.vmap`` in a captured graph, which FlexAttention's block masks are made with: replaced by
what it stands for, ops on tensors that have one more dimension."""

from __future__ import annotations

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta
from torch.utils._pytree import tree_leaves

from deepsp.compile.sharding.messages import CannotShard
from deepsp.compile.sharding.nodes import copy_of, is_differentiated

_STEP = {"_vmap_increment_nesting": 1, "_vmap_decrement_nesting": -1}


def flatten_vmaps(gm: fx.GraphModule, mode) -> fx.GraphModule:
    """``gm`` itself, or a copy in which no vmap is left, nor in the checkpoints that it holds."""
    bodies = {
        n.args[0].target: getattr(gm, n.args[0].target)
        for n in gm.graph.nodes
        if n.target is torch.ops.higher_order.tag_activation_checkpoint
    }
    flat = {name: flatten_vmaps(body, mode) for name, body in bodies.items()}
    there = any(_name(n) in _STEP for n in gm.graph.nodes)
    if not there and all(flat[name] is body for name, body in bodies.items()):
        return gm
    new = copy_of(gm)
    for name, body in flat.items():
        setattr(new, name, body)
    depth, region = 0, []
    for node in list(new.graph.nodes):
        depth += _STEP.get(_name(node), 0)
        if depth or region:
            region.append(node)
        if region and not depth:
            _flatten(new, region, mode)
            region = []
    new.recompile()
    return new


def _name(node: fx.Node) -> str:
    return getattr(node.target, "__name__", "")


def _flatten(gm: fx.GraphModule, region: list[fx.Node], mode) -> None:
    inside = set(region)
    given = list(dict.fromkeys(x for n in region for x in n.all_input_nodes if x not in inside))
    results = [n for n in region if any(user not in inside for user in n.users)]
    body = fx.Graph()
    copies = {x: body.placeholder(x.name) for x in given}
    for node in region:
        copies[node] = body.node_copy(node, copies.__getitem__)
    body.output([copies[n] for n in results])
    interpreter = fx.Interpreter(fx.GraphModule(gm, body))

    def run(*args):
        with preserve_node_meta():
            return interpreter.run(*args)

    values = [x.meta["example_value"] for x in given]
    if any(is_differentiated(x) for x in tree_leaves(values)):
        raise CannotShard("torch.vmap of a tensor that requires grad can't be traced", region[0])
    with mode:
        flat = make_fx(run, tracing_mode="real", _allow_non_fake_inputs=True)(*values)
    names = dict(zip(flat.graph.find_nodes(op="placeholder"), given, strict=True))
    for node in flat.graph.find_nodes(op="get_attr"):
        name = f"{region[0].name}_{node.target}"
        setattr(gm, name, getattr(flat, node.target))
        node.target = name
    with gm.graph.inserting_before(region[0]):
        found = gm.graph.graph_copy(flat.graph, names)
    for node, value in zip(results, found, strict=True):
        value.meta["example_value"] = node.meta["example_value"]
        node.replace_all_uses_with(value)
    for node in reversed(region):
        gm.graph.erase_node(node)
