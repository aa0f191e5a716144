"""Replaces all-gathers over gloo in final graphs: by calls of deepsp's kernel, or, where something
reads them before they are waited for, by all-to-alls.

Two ``_c10d_functional.all_gather_into_tensor`` in flight over one gloo group write to wrong
addresses (with torch 2.13, without deepsp too: wrong numbers, or malloc aborts);
``torch.distributed``'s own all-gathers and functional all-to-alls don't.
"""

from __future__ import annotations

import operator

import torch
from torch import fx
from torch._inductor.fx_passes.control_dependencies import control_deps
from torch.distributed import distributed_c10d
from torch.utils._ordered_set import OrderedSet
from torch.utils._pytree import tree_leaves

from deepsp.compile.graphs import WAIT, add, aten, data_of, replace, sizes, target_of, tie
from deepsp.compile.lowering.inductor_table import calls_kernels

_c10d = torch.ops._c10d_functional
_GATHER = _c10d.all_gather_into_tensor.default
_EXCHANGE = _c10d.all_to_all_single.default


def gloo_group(group, device: torch.device) -> distributed_c10d.ProcessGroup | None:
    """The group if it is gloo's. ``group``: its name, or the group itself, as torch 2.13 also takes
    it."""
    try:
        if isinstance(group, str):
            group = distributed_c10d._resolve_process_group(group)
        if not isinstance(group, distributed_c10d.ProcessGroup):
            return None  # an input of the graph, unknown here
        return group if group._get_backend(device).name() == "gloo" else None
    except (RuntimeError, ValueError):  # traced for a group of another process or device
        return None


def avoid_gathers(graph: fx.Graph) -> None:
    """Replaces each all-gather over gloo by a call, or by an all-to-all that sends every rank the
    same."""
    for node in [n for n in graph.nodes if target_of(n) is _GATHER]:
        behind = None
        if node.target is control_deps:  # tied by a pass
            behind, inner, part, *_ = node.args
            called = getattr(graph.owning_module, inner.target).graph
            (call,) = called.find_nodes(op="call_function", target=_GATHER)
            size, group = call.args[1:]
        else:
            part, size, group = node.args
        value = part.meta["val"]
        over_gloo = None if size == 1 else gloo_group(group, value.device)
        if over_gloo is None:
            continue
        rows = value.size(0)
        if not isinstance(rows, int):
            rows = add(aten.sym_size.int, (part, 0), before=node, like=node)
        splits = [rows] * size
        readers = [n for n in node.users if node in tree_leaves(data_of(n))]
        if calls_kernels() and all(target_of(n) is WAIT for n in readers):
            launched = _called(node, part, splits, over_gloo, readers)
        else:
            repeats = [size, *[1] * (value.dim() - 1)]
            sent = add(aten.repeat.default, (part, repeats), before=node, like=node)
            launched = add(_EXCHANGE, (sent, splits, splits, group), before=node, like=node)
            replace(node, launched)
        graph.erase_node(node)
        if behind is not None:
            tie(graph, {launched: OrderedSet(behind)})


def _called(node: fx.Node, part: fx.Node, splits: list, group, waits: list[fx.Node]) -> fx.Node:
    """Replaces a gather and its waits by calls."""
    ours, graph = torch.ops.deepsp, node.graph
    where = ("replicated", group.rank(), group.group_name)
    launched = add(ours.all_gather_start.default, (part, 0, splits, *where), before=node, like=node)
    for wait in waits:
        rows, *rest = sizes(part, wait)
        if isinstance(rows, int):
            total = rows * len(splits)
        else:
            total = add(operator.mul, (rows, len(splits)), before=wait, like=wait)
        arguments = (launched, 0, splits, [total, *rest], *where)
        every = add(ours.all_gather_wait.default, arguments, before=wait, like=wait)
        replace(wait, add(operator.getitem, (every, 0), before=wait, like=wait))
        if wait.target is control_deps:
            tie(graph, {every: OrderedSet(wait.args[0])})
        graph.erase_node(wait)
    node.replace_all_uses_with(launched)  # calls that are tied behind the gather
    return launched
