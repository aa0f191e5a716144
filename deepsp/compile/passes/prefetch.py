"""Decides where gathers are launched, waited for and freed.

A graph is a row of anchors (products, other collectives and their waits, writes) with cheap nodes
between them. A gather is launched before an anchor: as early as its shard exists, if at most a
number of bytes is then in flight, or gathered and not yet used. It is waited for at its first use.
A gather that fits nowhere earlier is launched right before its use. Gathers are launched in the
order of their first uses.

Only anchors and gathered sizes count, never a node's place among all nodes: the graphs of ranks
with uneven parts have different cheap nodes.
"""

from __future__ import annotations

import bisect

from torch import fx
from torch.utils._ordered_set import OrderedSet

from deepsp.compile.graphs import bytes_of, computes, is_collective, is_wait, tensor_of, tie, writes
from deepsp.compile.passes.recognize import Gather, find_gathers, moved, uses_of


def peak(graph: fx.Graph) -> int:
    """The most bytes of gathered tensors in flight or alive at once, in the graph's order, if each
    is freed after its last use."""
    place = {node: i for i, node in enumerate(graph.nodes)}
    changes: list[tuple[int, int]] = []
    for gather in find_gathers(graph):
        uses = [place[user] for root in gather.outputs if root for user in uses_of(root)]
        last = max(uses, default=place[gather.nodes[-1]])
        changes += [(place[gather.start], gather.bytes), (last + 1, -gather.bytes)]
    alive = most = 0
    for _, change in sorted(changes):
        alive += change
        most = max(most, alive)
    return most


def _is_anchor(node: fx.Node) -> bool:
    return node.op == "call_function" and (
        computes(node) or is_collective(node) or is_wait(node) or writes(node)
    )


class _Launches:
    """Chooses the anchor before which each gather is launched."""

    def __init__(self, graph: fx.Graph, limit: int):
        self.nodes = list(graph.nodes)
        self.place = {node: i for i, node in enumerate(self.nodes)}
        self.gathers = find_gathers(graph)
        chains = {node for gather in self.gathers for node in gather.nodes}
        self.anchors = [n for n in self.nodes if _is_anchor(n) and n not in chains]
        self.writers = [i for i, anchor in enumerate(self.anchors) if writes(anchor)]
        self.slot = {}  # by node: how many anchors come before it
        slot = 0
        for node in self.nodes:
            self.slot[node] = slot
            slot += slot < len(self.anchors) and node is self.anchors[slot]
        self.floating = set(chains)  # nodes that move to where they are needed
        self.needs = {}  # by gathered tensor: the slot of its first use
        for gather in self.gathers:
            self.floating.update(self._ahead(gather.start))
            for root in gather.outputs:
                if root is not None:
                    inside = [n for n in moved(root) if n is root or self._calm(n, *n.users)]
                    uses = [self.slot[u] for n in inside for u in n.users if u not in inside]
                    self.needs[root] = min(uses, default=len(self.anchors))
                    self.floating.update(inside)
                    if any(self.slot[root] <= at < self.needs[root] for at in self.writers):
                        # The write may be to the shard, which must have been sent before.
                        self.needs[root] = self.slot[root]
                        self.floating.difference_update([*gather.nodes, *inside])
                        self.floating.add(gather.start)
        self._choose(limit)

    def _calm(self, node: fx.Node, *users: fx.Node) -> bool:
        """Whether no write comes between a node and its users, so that it may run later."""
        last = max((self.slot[user] for user in users), default=self.slot[node])
        return not any(self.slot[node] <= writer < last for writer in self.writers)

    def _ahead(self, start: fx.Node) -> list[fx.Node]:
        """The cheap nodes that compute a shard and may run later."""
        inputs, stack = {}, [start]
        while stack:
            for node in stack.pop().all_input_nodes:
                if node in inputs or _is_anchor(node) or node.op != "call_function":
                    continue
                if self._calm(node, start):
                    inputs[node] = None
                    stack.append(node)
        return list(inputs)

    def _need(self, gather: Gather) -> int:
        needs = [self.needs[root] for root in gather.outputs if root is not None]
        return min(needs, default=len(self.anchors))

    def _ready(self) -> dict[fx.Node, int]:
        """The first slot in which each node can run."""
        ready: dict[fx.Node, int] = {}
        slots = {anchor: i for i, anchor in enumerate(self.anchors)}
        for node in self.nodes:
            first = max((ready[n] for n in node.all_input_nodes), default=0)
            if node in slots:
                first = slots[node] + 1
            ready[node] = max(first, self.needs.get(node, 0))
        return ready

    def _choose(self, limit: int) -> None:
        ready = self._ready()
        load = [0] * (len(self.anchors) + 1)  # bytes not yet used, while an anchor runs
        self.launch: dict[fx.Node, int] = {}
        previous = 0
        for gather in sorted(self.gathers, key=self._need):  # stable: else in traced order
            start, need = gather.start, self._need(gather)
            # Keep the order of the shard's reads and writes.
            before = [i for i in self.writers if i < self.slot[start]]
            behind = [i for i in self.writers if i >= self.slot[start]]
            earliest = max(ready[start], previous, before[-1] + 1 if before else 0)
            begin = min([need, *behind])
            last_use = {root: self.needs[root] for root in gather.outputs if root is not None}

            def unused(slot: int, gather=gather, need=need, last_use=last_use) -> int:
                if slot < need:
                    return gather.bytes
                return sum(bytes_of(root) for root, until in last_use.items() if until > slot)

            while begin > earliest and load[begin - 1] + unused(begin - 1) <= limit:
                begin -= 1
            for slot in range(begin, max(last_use.values(), default=need)):
                load[slot] += unused(slot)
            self.launch[start] = previous = begin

    def order(self) -> list[fx.Node]:
        """All nodes, in their new order."""
        starts: dict[int, list[fx.Node]] = {}
        for start, slot in self.launch.items():
            starts.setdefault(slot, []).append(start)
        done: dict[fx.Node, None] = {}

        def emit(node: fx.Node) -> None:
            stack = [node]
            while stack:
                top = stack[-1]
                missing = [n for n in top.all_input_nodes if n not in done]
                if missing:
                    stack += sorted(missing, key=self.place.__getitem__, reverse=True)
                else:
                    done[stack.pop()] = None

        slot = 0
        for node in self.nodes:
            if node in done or (node in self.floating and node.op != "output"):
                continue
            anchor = slot < len(self.anchors) and node is self.anchors[slot]
            if anchor or node.op == "output":
                for n in sorted(node.all_input_nodes, key=self.place.__getitem__):
                    if n not in done:
                        emit(n)
                for start in starts.get(slot, []):
                    if start not in done:
                        emit(start)
                slot += 1
            if node.op == "output":
                for rest in self.nodes:  # nodes without users
                    if rest not in done and rest is not node:
                        emit(rest)
            emit(node)
        return list(done)


def schedule(graph: fx.Graph, limit: int) -> int:
    """Moves launches and waits; returns how many gathers have products between the two. At most
    ``limit`` bytes are gathered and unused at any time, except for gathers launched right before
    their use."""
    plan = _Launches(graph, limit)
    if not plan.gathers:
        return 0
    order = plan.order()
    if order != plan.nodes:
        last = order[0]
        if last is not plan.nodes[0]:
            plan.nodes[0].prepend(last)
        for node in order[1:]:
            if last.next is not node:
                last.append(node)
            last = node
    return sum(bool(_between(order, gather)) for gather in plan.gathers)


def _between(order: list[fx.Node], gather: Gather) -> list[fx.Node]:
    """The products while a gather is in flight."""
    place = {node: i for i, node in enumerate(order)}
    waits = [place[node] for node in gather.nodes if is_wait(node)]
    stop = min(waits, default=len(order))
    return [node for node in order[place[gather.start] : stop] if computes(node)]


def keep_order(graph: fx.Graph) -> None:
    """Ties launches, products and waits to each other, so that Inductor keeps their order: a launch
    after the product before it (an earlier launch would gather too much at once), the next product
    after the launch, and the wait after the last product and launch before it."""
    place = {node: i for i, node in enumerate(graph.nodes)}
    products = [node for node in place if computes(node)]
    product_places = [place[node] for node in products]
    gathers = find_gathers(graph)
    behind: dict[fx.Node, OrderedSet[fx.Node]] = {}

    def put(node: fx.Node, *others: fx.Node) -> None:
        behind.setdefault(node, OrderedSet()).update(others)

    for i, gather in enumerate(gathers):
        begin = bisect.bisect(product_places, place[gather.start])
        launched = tensor_of(gather.start)
        if begin > 0:
            put(gather.start, products[begin - 1])
        for wait in (node for node in gather.nodes if is_wait(node)):
            end = bisect.bisect(product_places, place[wait])
            if begin < end:
                put(products[begin], launched)
                put(wait, products[end - 1])
            later = [g for g in gathers[i + 1 :] if place[g.start] < place[wait]]
            if later:
                put(wait, tensor_of(later[-1].start))
    tie(graph, behind)
