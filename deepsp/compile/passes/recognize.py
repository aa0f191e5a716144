"""Finds all-gathers in a graph, ``_c10d_functional``'s and deepsp's, and their tensors' uses."""

from __future__ import annotations

import operator
from dataclasses import dataclass

from torch import fx
from torch._inductor.fx_passes.control_dependencies import control_deps

from deepsp.compile.graphs import (
    VIEWS,
    WAIT,
    bytes_of,
    c10d,
    is_op,
    moves,
    only_user,
    tensor_inputs,
)

GATHER = c10d.all_gather_into_tensor.default
GATHER_COALESCED = c10d.all_gather_into_tensor_coalesced.default


@dataclass
class Gather:
    """One all-gather of one or several shards: ``nodes`` from the launch to the tensors."""

    start: fx.Node
    shards: list[fx.Node]
    outputs: list[fx.Node]  # the gathered tensors; None for one without users
    nodes: list[fx.Node]
    ranks: int
    ours: bool

    @property
    def bytes(self) -> int:
        """The bytes in flight: of all gathered tensors."""
        return bytes_of(self.start)

    @property
    def wires(self) -> int:
        """The bytes received from other ranks."""
        return self.bytes // self.ranks * (self.ranks - 1)


def _by_index(node: fx.Node, number: int) -> list[fx.Node | None] | None:
    """The getitem nodes of a list, None for unused items; None if the list has other users."""
    items: list[fx.Node | None] = [None] * number
    for user in node.users:
        if user.target is not operator.getitem or items[user.args[1]] is not None:
            return None
        items[user.args[1]] = user
    return items


def _gather(start: fx.Node) -> Gather | None:
    if start.target is GATHER:
        wait = only_user(start, WAIT)
        if wait is None:
            return None
        return Gather(start, [start.args[0]], [wait], [start, wait], start.args[1], False)
    if start.target is GATHER_COALESCED:
        items = _by_index(start, len(start.args[0]))
        if items is None:
            return None
        waits = [item and only_user(item, WAIT) for item in items]
        if [w is None for w in waits] != [i is None for i in items]:
            return None
        pairs = [n for pair in zip(items, waits, strict=True) for n in pair if n is not None]
        return Gather(start, list(start.args[0]), waits, [start, *pairs], start.args[1], False)
    if start.target is control_deps:
        return None
    if is_op(start, "gather_cast_start"):
        waits = list(start.users)
        if len(waits) != 1 or not is_op(waits[0], "gather_cast_wait"):
            return None
        return Gather(start, [start.args[0]], waits, [start, *waits], len(start.args[1]), True)
    if is_op(start, "_gather_cast_coalesced_start"):
        waits = list(start.users)
        if len(waits) != 1 or not is_op(waits[0], "_gather_cast_coalesced_wait"):
            return None
        shards = list(start.args[0])
        items = _by_index(waits[0], len(shards))
        if items is None:
            return None
        used = [item for item in items if item is not None]
        ranks = len(start.args[1]) // len(shards)
        return Gather(start, shards, items, [start, waits[0], *used], ranks, True)
    return None


def find_gathers(graph: fx.Graph) -> list[Gather]:
    """The all-gathers of deepsp and c10d, in the order of their launches. Leaves out those that are
    used before they are waited for, and those that are tied."""
    return [g for node in graph.nodes if (g := _gather(node)) is not None]


def moved(root: fx.Node) -> list[fx.Node]:
    """The nodes that hold only elements of a node, in order; the node itself is the first."""
    region, stack = {root}, [root]
    while stack:
        for user in stack.pop().users:
            if user not in region and moves(user) and region.issuperset(tensor_inputs(user)):
                region.add(user)
                stack.append(user)
    return sorted(region)


def uses_of(root: fx.Node) -> list[fx.Node]:
    """The users of a gathered tensor, or of its views and copies, other than views and copies."""
    inside = moved(root)
    return [user for node in inside for user in node.users if user not in inside]


def views_of(root: fx.Node) -> list[fx.Node]:
    """The nodes that share a node's memory; the node itself is the first."""
    views, stack = {root: None}, [root]
    while stack:
        for user in stack.pop().users:
            if user not in views and user.target in VIEWS:
                views[user] = None
                stack.append(user)
    return list(views)
