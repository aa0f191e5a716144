"""Keeps the order start, compute, wait in Inductor's schedule.

Traced graphs have it: our ops launch as early and wait as late as data allows. But Inductor sorts
kernels anew, for peak memory, and knows no reason to launch an exchange before a product that
doesn't need it. This pass gives it one: what computes between an exchange and its wait comes after
the first and before the second, and so does every exchange that is launched between them. It adds
no memory to what the traced order needs, and leaves the order of collectives alone.
"""

from __future__ import annotations

import torch
from torch import fx
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
from torch.utils._ordered_set import OrderedSet

_aten = torch.ops.aten
_START = torch.ops._c10d_functional.all_to_all_single.default
_WAIT = torch.ops._c10d_functional.wait_tensor.default
_COMPUTE = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
}


def _computes(node: fx.Node) -> bool:
    return node.target in _COMPUTE or (
        node.op == "call_function" and "scaled_dot_product" in str(node.target)
    )


def _is_ours(node: fx.Node) -> bool:
    """Whether the node was made by a decomposition of ours."""
    return getattr(node.meta.get("original_aten"), "namespace", None) == "deepsp"


def keep_overlap(graph: fx.Graph) -> None:
    """A post-grad pass; changes graphs only that hold exchanges of ours."""
    place = {node: i for i, node in enumerate(graph.nodes)}
    nodes = list(place)
    starts = [n for n in nodes if n.target is _START and _is_ours(n)]
    after: dict[fx.Node, OrderedSet[fx.Node]] = {}
    for wait in graph.find_nodes(op="call_function", target=_WAIT):
        start = wait.args[0]
        if start not in starts:
            continue
        between = [n for n in nodes[place[start] + 1 : place[wait]] if _computes(n)]
        for node in between:
            after.setdefault(node, OrderedSet()).add(start)
        launched = [n for n in starts if place[start] < place[n] < place[wait]]
        if between or launched:
            after.setdefault(wait, OrderedSet()).update([*between, *launched[-1:]])
    in_order = sorted(after, key=place.__getitem__)
    preserve_node_ordering(graph, {node: after[node] for node in in_order})


class KeepOverlap(CustomGraphPass):
    """:func:`keep_overlap` after whatever pass was configured before."""

    def __init__(self, before):
        self.before = before

    def _others(self) -> list:
        if self.before is None:
            return []
        return list(self.before) if isinstance(self.before, (list, tuple)) else [self.before]

    def __call__(self, graph: fx.Graph) -> None:
        for other in self._others():
            other(graph)
        keep_overlap(graph)

    def uuid(self):
        others = [p.uuid() if isinstance(p, CustomGraphPass) else None for p in self._others()]
        if not all(others):
            return None  # Inductor doesn't cache
        return (get_hash_for_files((__file__,)), *others)


def install() -> None:
    """Adds the pass to Inductor's passes over final graphs. Whoever sets
    ``torch._inductor.config.post_grad_custom_post_pass`` later calls :func:`keep_overlap` there."""
    if not isinstance(config.post_grad_custom_post_pass, KeepOverlap):
        config.post_grad_custom_post_pass = KeepOverlap(config.post_grad_custom_post_pass)


def uninstall() -> None:
    """Undoes :func:`install`."""
    if isinstance(config.post_grad_custom_post_pass, KeepOverlap):
        config.post_grad_custom_post_pass = config.post_grad_custom_post_pass.before
