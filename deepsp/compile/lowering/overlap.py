"""Brings the order start, compute, wait into Inductor's schedule, and keeps it there.

Traced graphs mostly have it: deepsp's ops launch as early and wait as late as data allows. Two
things undo it. First, AOTAutograd puts recomputed nodes where they are needed, the wait right after
the start. So this pass moves starts, with their inputs, up to the collective before them, and waits
down to their first use. Second, Inductor sorts kernels for peak memory, and sees no reason to
launch an exchange before a product that doesn't need it. So this pass ties products between a start
and its wait behind the start and before the wait, and likewise exchanges that are launched between
the two.

The order of collectives doesn't change, and at most MAX_IN_FLIGHT bytes are brought into flight.

Waits for a view of what was launched become waits for that itself, and a call's wait is tied to
what the call sends: otherwise Inductor writes to what is sent while it is in flight.
"""

from __future__ import annotations

import itertools
import operator
import sys

import torch
from torch import Tensor, fx
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.utils._ordered_set import OrderedSet
from torch.utils._pytree import tree_leaves

from deepsp.compile.graphs import (
    OURS,
    VIEWS,
    WAIT,
    bytes_of,
    computes,
    data_of,
    forget,
    is_collective,
    is_op,
    is_wait,
    moves,
    passes,
    revalue,
    target_of,
    tensor_of,
    tie,
    uuid_after,
)
from deepsp.compile.lowering.gloo import avoid_gathers
from deepsp.compile.lowering.inductor_table import calls_kernels
from deepsp.compile.sharding.nodes import sources_of

_c10d = torch.ops._c10d_functional
_STARTS = {_c10d.all_to_all_single.default, _c10d.reduce_scatter_tensor.default}
_GATHER = _c10d.all_gather_into_tensor.default
MAX_IN_FLIGHT = 1 << 30


def _is_ours(node: fx.Node) -> bool:
    """Whether the node comes from an op of deepsp's."""
    return getattr(node.meta.get("original_aten"), "namespace", None) == OURS


def _is_start(node: fx.Node) -> bool:
    """Whether the node launches a collective of deepsp's that this pass may move. Another pass
    decides when weights are gathered."""
    made_by = getattr(node.meta.get("original_aten"), "_opname", "")
    return _is_ours(node) and (
        (node.target in _STARTS and not made_by.startswith("gather"))
        or (node.target is _GATHER and made_by.startswith("all_gather"))
        or (
            is_collective(node)
            and target_of(node)._opname.endswith("_start")
            and "gather_cast" not in made_by
        )
    )


def _waited_for(wait: fx.Node) -> list[fx.Node]:
    """The launches that a node waits for: one, or, by a call of a kernel, those of all chunks."""
    return _launches_of(data_of(wait)[0])


def _starts_read(node: fx.Node) -> list[fx.Node]:
    """The calls of starts whose buffers a call of ours reads."""
    launches = _launches_of(data_of(node))
    return [n for n in launches if _is_call(n) and target_of(n)._opname.endswith("_start")]


def _launches_of(buffers) -> list[fx.Node]:
    """The nodes that made these buffers, or lists of them."""
    nodes = [n for n in tree_leaves(buffers) if isinstance(n, fx.Node)]
    return [n.args[0] if n.target is operator.getitem else n for n in nodes]


def _is_call(node: fx.Node) -> bool:
    """Whether the node calls a kernel of ours."""
    return getattr(target_of(node), "namespace", None) == OURS


def _waits(nodes) -> list[fx.Node]:
    return [n for n in nodes if is_wait(n)]


def wait_for_launches(graph: fx.Graph) -> None:
    """Makes deepsp's waits take what was launched, of which decompositions give them views: a
    buffer's dtype and shape, and back."""
    for wait in graph.find_nodes(op="call_function", target=WAIT):
        launched, views = wait.args[0], []
        while launched.target in VIEWS and launched.target is not operator.getitem:
            views.append(launched)
            launched = launched.args[0]
        if views and _is_ours(wait) and _is_ours(launched) and is_collective(launched):
            wait.args = (launched,)
            revalue(wait)
            forget(views[::-1])


def raise_starts(graph: fx.Graph) -> None:
    """Moves products and other waits from before each exchange of deepsp's to behind it, down from
    the collective before it or the wait that it needs, unless too much would be in flight there.
    Cheap nodes stay: a gradient and its sum are one kernel, unless a start is between them."""
    for start in [n for n in graph.nodes if _is_start(n)]:
        nodes = list(graph.nodes)
        place = {node: i for i, node in enumerate(nodes)}
        needed = set(sources_of(start))
        barriers = [
            n
            for n in nodes[: place[start]]
            if n.op == "placeholder"
            or is_collective(n)
            or (n in needed and is_wait(n))
            or n.is_impure()
        ]
        if not barriers:
            continue
        after = barriers[-1]
        passed = OrderedSet[fx.Node]()
        for n in nodes[place[after] + 1 : place[start]]:
            late = computes(n) or is_wait(n) or not passed.isdisjoint(n.all_input_nodes)
            if n not in needed and late:
                passed.add(n)
        if not passed:
            continue
        waited = {n for wait in _waits(nodes[: place[after] + 1]) for n in _waited_for(wait)}
        flying = [n for n in nodes[: place[after] + 1] if _is_start(n) and n not in waited]
        if sum(bytes_of(n) for n in [*flying, start]) > MAX_IN_FLIGHT:
            continue
        for node in reversed(passed):
            start.append(node)


def sink_waits(graph: fx.Graph) -> None:
    """Moves each wait of deepsp's to its first use, with the views, copies and sums of received
    blocks that depend on nothing else."""
    sinks: set[fx.Node] = set()
    for node in graph.nodes:
        if is_wait(node):
            if _is_ours(node):
                sinks.add(node)
        elif (
            node.op == "call_function"
            and node.all_input_nodes
            and sinks.issuperset(node.all_input_nodes)
            and (moves(node) or _is_ours(node))
            and not is_collective(node)
        ):
            sinks.add(node)
    for node in reversed(list(graph.nodes)):
        if node in sinks and node.users:
            min(node.users).prepend(node)  # nodes compare by their order in the graph


def _gathers(node: fx.Node) -> bool:
    """Whether the node is a wait that launches an exchange of its own: where ranks sum parts, it
    gathers the sums."""
    return is_op(node, "all_reduce_wait")


def finish_sums(graph: fx.Graph) -> None:
    """Moves waits that launch an exchange to before the next one that the graph launches: where
    they are first used, and so where Inductor puts them, differs by rank."""
    following = dict(itertools.pairwise(n for n in graph.nodes if is_collective(n)))
    for wait in [n for n in graph.nodes if _gathers(n)]:
        behind = [following[n] for n in _waited_for(wait) if n in following]
        if behind and min(behind) < wait:
            min(behind).prepend(wait)
        for item in list(wait.users):  # others are tied to it
            if item.target is operator.getitem:
                wait.append(item)


def keep_overlap(graph: fx.Graph) -> None:
    """A post-grad pass, for graphs with deepsp's collectives, or with gathers that a pass of deepsp
    has moved."""
    wait_for_launches(graph)
    avoid_gathers(graph)
    raise_starts(graph)
    sink_waits(graph)
    finish_sums(graph)
    place = {node: i for i, node in enumerate(graph.nodes)}
    nodes = list(place)
    starts = [n for n in nodes if _is_start(n)]
    after: dict[fx.Node, OrderedSet[fx.Node]] = {}
    for wait, start in [(w, n) for w in _waits(nodes) for n in _waited_for(w) if n in starts]:
        between = [n for n in nodes[place[start] + 1 : place[wait]] if computes(n)]
        for node in between:
            after.setdefault(node, OrderedSet()).add(tensor_of(start))
        launched = [n for n in starts if place[start] < place[n] < place[wait]]
        if between or launched:
            ties = [*between, *map(tensor_of, launched[-1:])]
            after.setdefault(wait, OrderedSet()).update(ties)
    launches = [n for n in nodes if is_collective(n) or _gathers(n)]
    if any(map(_is_ours, launches)):
        # Ranks with uneven shards have different sizes, by which Inductor would sort.
        for first, second in itertools.pairwise(launches):
            after.setdefault(second, OrderedSet()).add(tensor_of(first))
    for node in filter(_is_call, nodes):
        # A start may read its inputs until the wait: nothing may be written there before.
        read = [n for start in _starts_read(node) for n in tree_leaves(data_of(start))]
        sent = [n for n in read if isinstance(n, fx.Node) and isinstance(n.meta.get("val"), Tensor)]
        if sent:
            after.setdefault(node, OrderedSet()).update(sent)
    tie(graph, after)


class KeepOverlap(CustomGraphPass):
    """:func:`keep_overlap` after the passes that were configured before, in graphs with deepsp's
    ops. It runs last because it ties collectives, so that no pass can move them."""

    def __init__(self, before):
        self.before = before

    def __call__(self, graph: fx.Graph) -> None:
        for other in passes(self.before):
            other(graph)
        if any(map(_is_ours, graph.nodes)):
            keep_overlap(graph)

    def uuid(self):
        return uuid_after(self.before, "keep_overlap", calls_kernels())


def install() -> None:
    """Adds the pass to Inductor's passes over final graphs. If you set
    ``torch._inductor.config.post_grad_custom_post_pass`` later, call :func:`keep_overlap` there:
    without it Inductor may also write to what is being sent (:func:`wait_for_launches`)."""
    if not isinstance(config.post_grad_custom_post_pass, KeepOverlap):
        config.post_grad_custom_post_pass = KeepOverlap(config.post_grad_custom_post_pass)


def uninstall() -> None:
    """Undoes :func:`install`."""
    if isinstance(config.post_grad_custom_post_pass, KeepOverlap):
        config.post_grad_custom_post_pass = config.post_grad_custom_post_pass.before


sys.modules["deepsp.patches"].finish(__name__)  # which imports this module
