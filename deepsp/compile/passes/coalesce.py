"""Combines small all-gathers whose results are used close together into one launch.

``_c10d_functional.all_gather_into_tensor_coalesced`` copies nothing on NCCL (one group call) and
runs on gloo, in eager and under Inductor. Packing the shards into one block would cost two more
copies: 16 gathers of 4 kB on two gloo ranks took 2.5 ms one by one, 0.31 ms coalesced, 0.34 ms
packed. gloo has two limits. It packs the tensors as the first one's dtype, so several dtypes come
out wrong, silently, unless they are sent as bytes, as here. And it can't coalesce CUDA tensors, so
those aren't combined. deepsp's ops take lists in any case.
"""

from __future__ import annotations

import bisect
import operator

import torch
from torch import fx

from deepsp.compile.graphs import (
    WAIT,
    add,
    aten,
    computes,
    forget,
    is_collective,
    is_op,
    is_wait,
    replace,
    writes,
)
from deepsp.compile.lowering.gloo import gloo_group
from deepsp.compile.passes.recognize import GATHER, GATHER_COALESCED, Gather, find_gathers, uses_of

# At most this many products between the first uses of combined gathers: a layer's, not a model's.
NEAR = 8


def _ahead(node: fx.Node, place: dict[fx.Node, int], after: int) -> list[fx.Node] | None:
    """The inputs of a node that run after place ``after``, in order; None if one of them is more
    than a view, cast or other cheap node."""
    ancestors, stack = {}, list(node.all_input_nodes)
    while stack:
        n = stack.pop()
        if n in ancestors or place[n] < after:
            continue
        if n.op not in ("call_function", "get_attr"):
            return None
        if computes(n) or is_collective(n) or is_wait(n) or writes(n):
            return None
        ancestors[n] = None
        stack += n.all_input_nodes
    return sorted(ancestors, key=place.__getitem__)


def _key(gather: Gather) -> tuple | None:
    """Gathers with the same key can share a launch."""
    start = gather.start
    if any(root is None for root in gather.outputs):
        return None
    device = gather.outputs[0].meta["val"].device
    if start.target is GATHER:
        if gather.shards[0].meta["val"].dim() == 0:
            return None
        if device.type != "cpu" and gloo_group(start.args[2], device) is not None:
            return None
        return (GATHER, device, *start.args[1:])
    if gather.ours:
        sums = [start.kwargs.get(name) for name in ("reduce_dtype", "backend_sums")]
        return ("ours", device, *start.args[3:], *sums, gather.ranks)
    return None


def _join(gathers: list[Gather]) -> None:
    first = gathers[0].start
    dtypes = {gather.shards[0].meta["val"].dtype for gather in gathers}
    as_bytes = len(dtypes) > 1
    shards = []
    for gather in gathers:
        (shard,) = gather.shards
        if as_bytes:
            if not shard.meta["val"].is_contiguous():
                form = {"memory_format": torch.contiguous_format}
                shard = add(aten.clone.default, (shard,), form, before=first, like=shard)
            shard = add(aten.view.dtype, (shard, torch.uint8), before=first, like=shard)
        shards.append(shard)
    start = add(GATHER_COALESCED, (shards, *first.args[1:]), before=first, like=first)
    for i, gather in enumerate(gathers):
        (old,) = gather.outputs
        item = add(operator.getitem, (start, i), before=first, like=old)
        new = add(WAIT, (item,), before=old, like=old)
        if as_bytes:
            new = add(aten.view.dtype, (new, old.meta["val"].dtype), before=old, like=old)
        replace(old, new)
    for gather in gathers:
        forget(gather.nodes)


def _join_ours(gathers: list[Gather], place: dict[fx.Node, int]) -> None:
    first = gathers[0].start
    first_wait = min((gather.nodes[1] for gather in gathers), key=place.__getitem__)
    sizes, dtypes, row_shapes, row_dims = [], [], [], []
    for gather in gathers:
        start, wait = gather.nodes[:2]
        sizes += start.args[1]
        row_shapes += wait.args[2]
        if is_op(start, "gather_cast_start"):
            dtypes.append(start.args[2])
            row_dims.append(len(wait.args[2]))
        else:
            dtypes += start.args[2]
            row_dims += wait.args[3]
    ours = torch.ops.deepsp
    shards = [shard for gather in gathers for shard in gather.shards]
    where = first.args[3:]  # rank and group
    args = (shards, sizes, dtypes, *where)
    target = ours._gather_cast_coalesced_start.default
    start = add(target, args, first.kwargs, before=first, like=first)
    args = (start, sizes, row_shapes, row_dims, dtypes, *where)
    target = ours._gather_cast_coalesced_wait.default
    wait = add(target, args, gathers[0].nodes[1].kwargs, before=first_wait, like=first_wait)
    outputs = [output for gather in gathers for output in gather.outputs]
    for i, output in enumerate(outputs):
        replace(output, add(operator.getitem, (wait, i), before=output, like=output))
    for gather in gathers:
        forget(gather.nodes)


def combine(graph: fx.Graph, limit: int) -> int:
    """Combines gathers into launches of at most ``limit`` bytes; returns how many were removed."""
    place = {node: i for i, node in enumerate(graph.nodes)}
    products = [place[node] for node in graph.nodes if computes(node)]
    written = [place[node] for node in graph.nodes if writes(node)]

    def first_use(gather: Gather) -> int:
        uses = [place[user] for root in gather.outputs for user in uses_of(root)]
        return bisect.bisect_left(products, min(uses, default=len(place)))

    open_: dict[tuple, list[Gather]] = {}
    joined: list[list[Gather]] = []
    ahead: dict[fx.Node, list[fx.Node]] = {}
    needs: dict[fx.Node, int] = {}
    for gather in find_gathers(graph):
        key = _key(gather)
        if key is None or gather.bytes > limit:
            continue
        needs[gather.start] = first_use(gather)
        bucket = open_.get(key)
        if bucket is not None:
            begin, end = place[bucket[0].start], place[gather.start]
            calm = bisect.bisect(written, begin) == bisect.bisect(written, end)
            before = _ahead(gather.start, place, begin) if calm else None
            fits = sum(g.bytes for g in (*bucket, gather)) <= limit
            near = [needs[g.start] for g in (*bucket, gather)]
            if fits and before is not None and max(near) - min(near) <= NEAR:
                ahead[gather.start] = before
                bucket.append(gather)
                continue
        open_[key] = [gather]
        joined.append(open_[key])
    gone = 0
    for bucket in joined:
        if len(bucket) < 2:
            continue
        for gather in bucket[1:]:
            for node in ahead[gather.start]:
                if bucket[0].start < node:
                    bucket[0].start.prepend(node)
        if bucket[0].ours:
            _join_ours(bucket, place)
        else:
            _join(bucket)
        gone += len(bucket) - 1
    return gone
