"""Weights that are sharded already: gathers in the user's graph, whose backwards sum gradients.

The gradient of a gathered weight is summed over its group by the gather itself. Where that group
holds all ranks of the sequence, the sum over them is in that: the weight's gradient is to be this
rank's share of it, whatever ``gradients`` says. Where it holds none of them but this one (data
ranks, say), a gathered weight is like any other value that all ranks have.
"""

from __future__ import annotations

import operator

import torch
import torch.distributed as dist
from torch import fx

from deepsp.compile.messages import CannotShard

_ours, _c10d = torch.ops.deepsp, torch.ops._c10d_functional
_differentiable = torch.ops._c10d_functional_autograd
GATHERS = {
    _ours.gather_cast.default,
    _ours.gather_cast_coalesced.default,
    _ours.gather_through_float8.default,
    _c10d.all_gather_into_tensor.default,
    _differentiable.all_gather_into_tensor.default,
}
# What stands between a gather and what computes with it, or between a shard and its gather.
_PASSED = {operator.getitem, _c10d.wait_tensor.default, _ours.scale_gradient.default}


def _group_of(node: fx.Node) -> str:
    names = [argument.name for argument in node.target._schema.arguments]
    place = names.index("group_name")
    return node.args[place] if place < len(node.args) else node.kwargs["group_name"]


def summed_by_gathers(graph: fx.Graph, group_name: str) -> set[fx.Node]:
    """The nodes of a graph whose gradients gathers sum over the sequence group: shards, and what
    was gathered of them, up to where it is computed with.

    Raises:
        CannotShard: a gather over some, but not all, of the sequence's ranks.
    """
    resolve = torch._C._distributed_c10d._resolve_process_group
    of_sequence = set(dist.get_process_group_ranks(resolve(group_name)))
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.target in GATHERS:
            ranks = set(dist.get_process_group_ranks(resolve(_group_of(node))))
            common = ranks & of_sequence
            if common == of_sequence:
                found.add(node)
                stack = list(node.all_input_nodes)
                while stack:  # the shards
                    found.add(stack[-1])
                    stack += [n for n in stack.pop().all_input_nodes if n not in found]
            elif len(common) > 1:
                raise CannotShard(
                    f"it gathers a weight over ranks {sorted(ranks)}, some but not all of the "
                    f"sequence's, {sorted(of_sequence)}; all of them, or this one only, is right",
                    node,
                )
        elif node.target in _PASSED and node.all_input_nodes[0] in found:
            found.add(node)
    return found
