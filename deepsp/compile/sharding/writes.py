"""Writes in place, done out of place: ``y[..., :4] = x`` makes a new ``y``."""

from __future__ import annotations

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_map

from deepsp.compile.sharding.forms import Value
from deepsp.compile.sharding.messages import CannotShard
from deepsp.compile.sharding.nodes import is_differentiated, is_random, is_tensor
from deepsp.compile.sharding.tokens import Tokens

_aten = torch.ops.aten


def _slice(base, new, view):
    _, dim, start, end, step = (*view.args, *(0, None, None, 1)[len(view.args) - 1 :])
    return _aten.slice_scatter.default, (base, new, dim, start, end, step)


def _select(base, new, view):
    return _aten.select_scatter.default, (base, new, *view.args[1:])


def _transpose(base, new, view):
    return _aten.transpose.int, (new, *view.args[1:])


# What a base is once a view of it has become ``new``.
_BACK = {
    _aten.slice.Tensor: _slice,
    _aten.select.int: _select,
    _aten.transpose.int: _transpose,
}


def storage_of(node: fx.Node) -> int | None:
    """What tells whether two tensors are views of one; None for what isn't a tensor."""
    value = node.meta.get("val")
    return StorageWeakRef(value.untyped_storage()).cdata if is_tensor(value) else None


def functional(target):
    """The op that makes what an op in place writes, or None."""
    if not getattr(target, "_opname", "").endswith("_"):
        return None
    packet = getattr(_aten, target._opname.removesuffix("_"), None)
    return getattr(packet, target._overloadname, None)


def views_out_of_place(gm: fx.GraphModule, mode) -> None:
    """Replaces writes into views of what the graph itself has made, where no other view of it is
    used afterwards."""
    inputs = {storage_of(n) for n in gm.graph.nodes if n.op in ("placeholder", "get_attr")}
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    for node in list(gm.graph.nodes):
        schema = getattr(node.target, "_schema", None)
        if schema is None or not schema.is_mutable or functional(node.target) is None:
            continue
        views, base = [], node.args[0]
        while base.target in _BACK:
            views.append(base)
            base = base.args[0]
        storage = storage_of(base)
        if not views or storage in inputs:
            continue
        others = set(gm.graph.nodes) - {base, node, *views}
        late = [
            n
            for n in others
            if storage_of(n) == storage
            and order.get(n, 0) < order[node]
            and any(order.get(user, 0) > order[node] for user in n.users)
        ]
        if not late:
            _replace(gm.graph, node, views, base, mode, order)
    gm.graph.lint()


def _replace(graph: fx.Graph, node: fx.Node, views: list, base: fx.Node, mode, order) -> None:
    def add(target, args, kwargs=None):
        new = graph.call_function(target, args, kwargs or {})
        new.meta = {k: v for k, v in node.meta.items() if k != "val"}
        values = fx.node.map_arg((new.args, new.kwargs), lambda n: n.meta["val"])
        with mode, torch.no_grad():
            value = target(*values[0], **values[1])
        touched = any(
            is_tensor(n.meta["val"]) and n.meta["val"].requires_grad for n in new.all_input_nodes
        )
        new.meta["val"] = tree_map(lambda x: x.requires_grad_(touched), value)
        order[new] = order[node]
        return new

    with graph.inserting_before(node):
        if node.target is _aten.copy_.default:  # which has no derivative out of place
            view, written = node.args[:2]
            if written.meta["val"].dtype != view.meta["val"].dtype:
                written = add(_aten.to.dtype, (written, view.meta["val"].dtype))
            if written.meta["val"].shape != view.meta["val"].shape:
                written = add(_aten.expand_as.default, (written, view))
        else:
            written = add(functional(node.target), node.args, node.kwargs)
        replaced = {views[0]: written}
        for i, view in enumerate(views):
            below = views[i + 1] if i + 1 < len(views) else base
            replaced[below] = add(*_BACK[view.target](below, replaced[view], view))
    for old, new in replaced.items():
        old.replace_all_uses_with(new, lambda user: order[user] > order[node])
    node.replace_all_uses_with(written)
    graph.erase_node(node)


def in_place(walk, node: fx.Node) -> None:
    """A write in place, done out of place where nobody sees the difference."""
    target = node.args[0]
    aliases = _aliases(walk, target)
    if all(walk.values[n].full is not None for n in (*aliases, *node.all_input_nodes)):
        touched = [walk.env[walk.values[n].full] for n in node.all_input_nodes]
        differentiated = any(is_differentiated(x) for x in touched)
        if differentiated and torch.is_grad_enabled():
            raise CannotShard(
                "it writes into a tensor that requires grad; write x = x.op(...)", node
            )
        new = walk.emit_full(node, node.target)
        if is_random(node.target):  # what the ranks agreed on
            new = walk.call(_aten.copy_.default, walk.values[target].full, new)
        walk.values[node] = Value(new)
        walk.parts.clear()
        for n in (*aliases, node):  # parts are cut anew
            value, tokens = walk.values[n], walk.values[n].tokens
            if isinstance(tokens, Tokens):
                value.mine = walk.cut(value.full, walk.shape_of(n), tokens)
        walk.values[node] = walk.values[target]
        return
    out_of_place = functional(node.target)
    seen = [n for n in aliases if n is not target and _used_behind(n, node)]
    if out_of_place is None or seen or target.op == "placeholder":
        raise CannotShard("it writes into a tensor that shares memory with others", node)
    result = walk.visit_op(node, out_of_place)
    walk.values[node] = walk.values[target] = result
    walk.rebound.add(target)
    walk.collected = {key: new for key, new in walk.collected.items() if key[0] is not target}


def _aliases(walk, node: fx.Node) -> list[fx.Node]:
    storage = storage_of(node)
    return [n for n in walk.values if storage_of(n) == storage]


def _used_behind(node: fx.Node, behind: fx.Node) -> bool:
    return any(behind < user for user in node.users)
