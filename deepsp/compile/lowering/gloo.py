"""Replaces all-gathers over gloo in final graphs by all-to-alls.

Two ``_c10d_functional.all_gather_into_tensor`` in flight over one gloo group write to wrong
addresses (with torch 2.13, without deepsp too: wrong numbers, or malloc aborts);
``torch.distributed``'s own all-gathers and functional all-to-alls don't.
"""

from __future__ import annotations

import torch
from torch import fx
from torch._inductor.fx_passes.control_dependencies import control_deps
from torch.distributed import distributed_c10d
from torch.utils._ordered_set import OrderedSet

from deepsp.compile.graphs import add, aten, replace, target_of, tie

_c10d = torch.ops._c10d_functional
_GATHER = _c10d.all_gather_into_tensor.default
_EXCHANGE = _c10d.all_to_all_single.default


def on_gloo(group, device: torch.device) -> bool:
    """``group``: its name, or the group itself, as torch 2.13 also takes it."""
    try:
        if isinstance(group, str):
            group = distributed_c10d._resolve_process_group(group)
        if not isinstance(group, distributed_c10d.ProcessGroup):
            return False  # an input of the graph, unknown here
        return group._get_backend(device).name() == "gloo"
    except (RuntimeError, ValueError):  # traced for a group of another process or device
        return False


def avoid_gathers(graph: fx.Graph) -> None:
    """Replaces each all-gather over gloo by an all-to-all that sends every rank the same."""
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
        if size == 1 or not on_gloo(group, value.device):
            continue
        rows = value.size(0)
        if not isinstance(rows, int):
            rows = add(aten.sym_size.int, (part, 0), before=node, like=node)
        sent = add(
            aten.repeat.default, (part, [size, *[1] * (value.dim() - 1)]), before=node, like=node
        )
        splits = [rows] * size
        exchanged = add(_EXCHANGE, (sent, splits, splits, group), before=node, like=node)
        replace(node, exchanged)
        graph.erase_node(node)
        if behind is not None:
            tie(graph, {exchanged: OrderedSet(behind)})
