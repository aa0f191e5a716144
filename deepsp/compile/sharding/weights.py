"""Weights that are sharded already: gathers in the user's graph, whose backwards sum gradients.

The gradient of a gathered weight is summed over its group by the gather itself. Where that group
holds all ranks of the sequence, the sum over them is in that: the weight's gradient is to be this
rank's share of it, whatever ``gradients`` says. Where it holds none of them but this one (data
ranks, say), a gathered weight is like any other value that all ranks have. Other collectives
between the sequence's ranks are refused: what their gradients would be isn't known.
"""

from __future__ import annotations

import operator

import torch
import torch.distributed as dist
from torch import fx

from deepsp.compile.sharding.messages import CannotShard
from deepsp.compile.sharding.nodes import has_tensor, is_random

_ours, _c10d = torch.ops.deepsp, torch.ops._c10d_functional
COMMUNICATE = ("deepsp", "c10d", "_c10d_functional", "_c10d_functional_autograd")
GATHERS = {
    _ours.gather_cast.default,
    _ours.gather_cast_coalesced.default,
    _ours.gather_through_float8.default,
    _c10d.all_gather_into_tensor.default,
    _c10d.all_gather_into_tensor_coalesced.default,
    torch.ops._c10d_functional_autograd.all_gather_into_tensor.default,
}
# What stands between a gather and what computes with it.
_PASSED = {operator.getitem, _c10d.wait_tensor.default}


def _group_of(node: fx.Node) -> str | None:
    """The name of the group that an op communicates in."""
    if getattr(node.target, "namespace", "") not in COMMUNICATE:
        return None
    for i, argument in enumerate(node.target._schema.arguments):
        if argument.name == "group_name":
            return node.args[i] if i < len(node.args) else node.kwargs[argument.name]
    return None


def summed_by_gathers(
    graph: fx.Graph, group_name: str, differentiated: set[fx.Node]
) -> set[fx.Node]:
    """The nodes of a graph whose gradients gathers sum over the sequence group: shards, and what
    was gathered of them, up to where it is computed with. ``differentiated``: placeholders.

    Raises:
        CannotShard: a gather over some, but not all, of the sequence's ranks; of more than a
            shard, or of one that is used otherwise, too; another collective between them.
    """
    resolve = torch._C._distributed_c10d._resolve_process_group
    of_sequence = set(dist.get_process_group_ranks(resolve(group_name)))
    gathered: set[fx.Node] = set()
    shards: set[fx.Node] = set()
    for node in graph.nodes:
        if node.target in _PASSED and node.all_input_nodes[0] in gathered:
            gathered.add(node)
            continue
        name = _group_of(node)
        ranks = set() if name is None else set(dist.get_process_group_ranks(resolve(name)))
        common = ranks & of_sequence
        if len(common) < 2:
            continue
        if node.target not in GATHERS:
            raise CannotShard(
                "it communicates with other ranks of the sequence group; the model must be written "
                "for one device, except for gathers of weights",
                node,
            )
        if common != of_sequence:
            raise CannotShard(
                "expected it to gather a weight over all ranks of the sequence group, "
                f"{sorted(of_sequence)}, or over this one only, got ranks {sorted(ranks)}",
                node,
            )
        gathered.add(node)
        for shard in node.all_input_nodes:
            shards |= _made_of(shard, node, differentiated)
    for node in shards:
        for user in node.users:
            if user not in shards | gathered and has_tensor(user.meta.get("val")):
                raise CannotShard(
                    f"it uses the shard {node.name}, which is gathered elsewhere; use the gathered "
                    "tensor",
                    user,
                )
    return gathered | shards


def _made_of(shard: fx.Node, gather: fx.Node, differentiated: set[fx.Node]) -> set[fx.Node]:
    """What a shard is made of, without what has no gradient: one parameter's shard, cast, viewed
    or scaled."""
    behind, stack = [], [shard]
    while stack:
        node = stack.pop()
        if node not in behind:
            behind.append(node)
            stack += node.all_input_nodes
    parameters = [n for n in behind if n in differentiated]
    random = [n for n in behind if is_random(n.target)]
    if len(parameters) > 1 or random:
        names = ", ".join(n.name for n in (parameters if len(parameters) > 1 else random))
        raise CannotShard(
            f"expected it to gather a parameter's shard, cast or viewed, got a tensor computed "
            f"from {names}",
            gather,
        )
    reached = set(parameters)
    for node in sorted(behind):
        if reached & set(node.all_input_nodes):
            reached.add(node)
    return reached
