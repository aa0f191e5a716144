"""Writes in place, done out of place: into views and several tensors before the walk, and during it
where a tensor is local or differentiated."""

from __future__ import annotations

import operator
from collections import defaultdict

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from deepsp.compile.sharding.forms import Value
from deepsp.compile.sharding.nodes import is_differentiated, is_random, is_tensor
from deepsp.compile.sharding.report import CannotShard
from deepsp.compile.sharding.tokens import Tokens
from deepsp.placement import Op, functional

_aten = torch.ops.aten


def _slice(base, new, view):
    _, dim, start, end, step = (*view.args, *(0, None, None, 1)[len(view.args) - 1 :])
    return _aten.slice_scatter.default, (base, new, dim, start, end, step)


def _select(base, new, view):
    return _aten.select_scatter.default, (base, new, *view.args[1:])


def _transpose(base, new, view):
    return _aten.transpose.int, (new, *view.args[1:])


# By view: the call that puts the new value of a view into its base.
_BACK = {_aten.slice.Tensor: _slice, _aten.select.int: _select, _aten.transpose.int: _transpose}


def storage_of(node: fx.Node) -> int | None:
    """The same number for all views of a tensor; None if it isn't a tensor."""
    value = node.meta.get("val")
    return StorageWeakRef(value.untyped_storage()).cdata if is_tensor(value) else None


def written(node: fx.Node) -> list[fx.Node]:
    """The tensors that an op writes into."""
    leaves = tree_leaves(Op(node.target, node.args, node.kwargs).written)
    return [n for n in leaves if isinstance(n, fx.Node)]


def results_out_of_place(gm: fx.GraphModule, mode) -> None:
    """Replaces ops that write into other arguments than the first, or into several (``out=``,
    foreach) by ops that return the results, and copies.

    Raises:
        CannotShard: there is no op that returns what this one writes.
    """
    for node in list(gm.graph.nodes):
        schema = getattr(node.target, "_schema", None)
        if schema is None or not schema.is_mutable or written(node) == [node.args[0]]:
            continue
        target, into = functional(node.target), written(node)
        if target is None:
            raise CannotShard("it writes into arguments in a way that isn't known", node)
        kept = {a.name for a in target._schema.arguments}
        kwargs = {name: x for name, x in node.kwargs.items() if name in kept}
        with gm.graph.inserting_before(node):
            result = _add_call(gm.graph, node, mode, target, node.args, kwargs)
            items = [result]
            if not is_tensor(result.meta["val"]):
                items = [
                    _add_call(gm.graph, node, mode, operator.getitem, (result, i))
                    for i in range(len(into))
                ]
            copies = []
            for old, new in zip(into, items, strict=True):
                if old.meta["val"].shape != new.meta["val"].shape:
                    raise CannotShard("it changes the size of the tensor that it writes into", node)
                copies.append(_add_call(gm.graph, node, mode, _aten.copy_.default, (old, new)))
        if is_tensor(node.meta.get("val")):
            node.replace_all_uses_with(copies[0])
        for user in list(node.users):
            user.replace_all_uses_with(copies[user.args[1]])
            gm.graph.erase_node(user)
        gm.graph.erase_node(node)


def _add_call(graph: fx.Graph, like: fx.Node, mode, target, args, kwargs=None) -> fx.Node:
    """Adds a call, with the line of the user's code of ``like``."""
    new = graph.call_function(target, args, kwargs or {})
    new.meta = {k: v for k, v in like.meta.items() if k != "val"}
    values, named = fx.node.map_arg((new.args, new.kwargs), lambda n: n.meta["val"])
    with mode, torch.no_grad(), enable_python_dispatcher():
        value = target(*values, **named)
    if not getattr(getattr(target, "_schema", None), "is_mutable", False):
        tensors = [n.meta["val"] for n in new.all_input_nodes if is_tensor(n.meta["val"])]
        touched = any(x.requires_grad for x in tensors)
        for x in tree_leaves(value):
            if is_tensor(x) and (x.is_floating_point() or x.is_complex()):
                x.requires_grad_(touched)
    new.meta["val"] = value
    return new


def views_out_of_place(gm: fx.GraphModule, mode) -> None:
    """Replaces writes into views of tensors that the graph computes. Other views of them that are
    used later are made again, of the new tensor."""
    inputs = {storage_of(n) for n in gm.graph.nodes if n.op in ("placeholder", "get_attr")}
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    alike = defaultdict(list)  # nodes by their storage
    for node in order:
        alike[storage_of(node)].append(node)
    differentiates, constants = True, set()  # what is made under no_grad
    for node in list(gm.graph.nodes):
        if getattr(node.target, "__name__", "") == "_set_grad_enabled":
            differentiates = node.args[0]
        if not differentiates:
            constants.add(node)
        schema = getattr(node.target, "_schema", None)
        if schema is None or not schema.is_mutable or functional(node.target) is None:
            continue
        views, base = [], node.args[0]
        while base.target in _BACK:
            views.append(base)
            base = base.args[0]
        storage = storage_of(base)
        if storage in inputs:
            continue
        if not differentiates and base not in constants:
            continue  # it writes values, and leaves what the tensor was made of
        late = [
            n
            for n in alike[storage]
            if n not in (base, node, *views)
            and order[n] < order[node]
            and any(order[user] > order[node] for user in n.users)
        ]
        if (views or late) and all(_reaches(n, base, storage) for n in late):
            _write_out_of_place(gm.graph, node, views, base, late, mode, order, alike)
    gm.graph.lint()


def _reaches(node: fx.Node, base: fx.Node, storage: int | None) -> bool:
    """Whether a tensor was made of ``base`` by views alone."""
    while node is not base:
        sources = [n for n in node.all_input_nodes if storage_of(n) == storage]
        if len(sources) != 1 or node.args[0] is not sources[0]:
            return False
        if node.target._schema.is_mutable:
            return False
        node = sources[0]
    return True


def _write_out_of_place(
    graph: fx.Graph, node: fx.Node, views: list, base: fx.Node, late: list, mode, order, alike
) -> None:
    def add(target, args, kwargs=None):
        new = _add_call(graph, node, mode, target, args, kwargs)
        order[new] = order[node]
        alike[storage_of(new)].append(new)
        return new

    with graph.inserting_before(node):
        view = node.args[0]
        is_copy = node.target is _aten.copy_.default  # has no derivative out of place
        written = node.args[1] if is_copy else add(functional(node.target), node.args, node.kwargs)
        if written.meta["val"].dtype != view.meta["val"].dtype:
            written = add(_aten.to.dtype, (written, view.meta["val"].dtype))
        if is_copy and written.meta["val"].shape != view.meta["val"].shape:
            written = add(_aten.expand_as.default, (written, view))
        if is_copy and not views:
            written = add(_aten.clone.default, (written,))
        replaced = {node.args[0]: written}
        for i, view in enumerate(views):
            below = views[i + 1] if i + 1 < len(views) else base
            replaced[below] = add(*_BACK[view.target](below, replaced[view], view))
        remade = {base: replaced[base]}

        def again(view):  # of the new base, so that the next write into either is seen in both
            if view not in remade:
                source = again(view.args[0])
                remade[view] = add(view.target, (source, *view.args[1:]), view.kwargs)
            return remade[view]

        for view in (*views, *late):
            again(view)
    for old, new in remade.items():
        old.replace_all_uses_with(new, lambda user: order[user] > order[node])
    node.replace_all_uses_with(remade[node.args[0]])
    graph.erase_node(node)


def write(walk, node: fx.Node) -> None:
    """A write in place. Where the tensor is local, or differentiated, it is done out of place, if
    it has no views."""
    target = node.args[0]
    aliases = _aliases(walk, target)
    forms = [x for n in aliases for x in (walk.values[n].full, walk.values[n].local) if x]
    if not torch.is_grad_enabled() and any(is_differentiated(walk.env[x]) for x in forms):
        raise CannotShard(
            "it writes under torch.no_grad() into a tensor that is differentiated; write into "
            "x.detach().clone(), or use torch.where",
            node,
        )
    out_of_place = functional(node.target)
    seen = [n for n in aliases if n is not target and _used_behind(n, node)]
    apart = out_of_place is not None and not seen and target.op != "placeholder"
    if all(walk.values[n].full is not None for n in (*aliases, *node.all_input_nodes)):
        touched = [walk.env[walk.values[n].full] for n in node.all_input_nodes]
        differentiated = any(is_differentiated(x) for x in touched) and torch.is_grad_enabled()
        if differentiated and apart:
            return _write_apart(walk, node, target, out_of_place)
        if differentiated:
            raise CannotShard(
                "it writes into a tensor that requires grad; write x = x.op(...)", node
            )
        new = walk.emit_full(node, node.target)
        if is_random(node.target):  # rank 0's numbers
            new = walk.call(_aten.copy_.default, walk.values[target].full, new)
        walk.values[node] = Value(new)
        walk.parts.clear()
        for n in (*aliases, node):  # their parts have changed
            value, tokens = walk.values[n], walk.values[n].tokens
            if isinstance(tokens, Tokens):
                value.local = walk.cut(walk.partial_grad(value.full), walk.shape_of(n), tokens)
        walk.values[node] = walk.values[target]
        return
    if not apart:
        raise CannotShard(
            "it writes into a tensor that shares memory with others; write x = x.op(...)", node
        )
    _write_apart(walk, node, target, out_of_place)


def _write_apart(walk, node: fx.Node, target: fx.Node, out_of_place) -> None:
    source = node.args[1] if node.target is _aten.copy_.default else None
    alike = source is not None and _like(node) == _like(source)
    result = walk.values[source] if alike else walk.visit_op(node, out_of_place)
    walk.values[node] = walk.values[target] = result
    walk.rebound.add(target)
    walk.collected = {key: new for key, new in walk.collected.items() if key[0] is not target}


def _like(node: fx.Node) -> tuple:
    return node.meta["val"].shape, node.meta["val"].dtype


def _aliases(walk, node: fx.Node) -> list[fx.Node]:
    storage = storage_of(node)
    return [n for n in walk.values if storage_of(n) == storage]


def _used_behind(node: fx.Node, behind: fx.Node) -> bool:
    return any(behind < user for user in node.users)
