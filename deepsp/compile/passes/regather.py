"""Gathers weights again in backward instead of keeping them.

AOTAutograd's partitioner never recomputes a collective on its own: it saves gathered tensors for
backward, every layer's weights at once. Nodes that are marked to be recomputed make it save the
shard, which is alive anyhow, and launch the gather in the backward graph, where
:mod:`deepsp.compile.passes.prefetch` schedules it.
"""

from __future__ import annotations

from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.utils.checkpoint import CheckpointPolicy

from deepsp.compile.graphs import aten, cast_to, moves, passes, tensor_inputs, uuid_after, writes
from deepsp.compile.passes.recognize import find_gathers, moved

_AGAIN = CheckpointPolicy.MUST_RECOMPUTE


def _from_inputs(shards: list[fx.Node]) -> list[fx.Node] | None:
    """The nodes between graph inputs and shards, if they are only casts, views and copies."""
    ancestors, stack = {}, list(shards)
    while stack:
        node = stack.pop()
        if node.op in ("placeholder", "get_attr") or node in ancestors:
            if "tangents" in str(node.target):
                return None
            continue
        constant = not tensor_inputs(node) or node.target is aten.new_zeros.default
        if not (moves(node) or cast_to(node) is not None or (constant and not writes(node))):
            return None
        ancestors[node] = None
        stack += tensor_inputs(node)
    return list(ancestors)


def regather_in_backward(joint_graph: fx.Graph) -> int:
    """Marks gathers of weights to be recomputed in backward instead of saved, as ZeRO stage 3
    (Rajbhandari et al., 2020, arXiv:1910.02054) and FSDP do.

    Casts, views and copies around them are marked, too. Gathers of anything but graph inputs stay
    unmarked, and so do those inside a checkpoint, which have a policy already.

    Args:
        joint_graph: a joint graph of forward and backward, with gathers of ``_c10d_functional`` or
            deepsp.

    Returns:
        How many gathers were marked.
    """
    marked = 0
    for gather in find_gathers(joint_graph):
        before = _from_inputs(gather.shards)
        if before is None or "recompute" in gather.start.meta:
            continue
        marked += 1
        nodes = [*before, *gather.nodes]
        for root in gather.outputs:
            for node in moved(root) if root is not None else []:
                nodes.append(node)
                for cast in node.users:
                    if cast_to(cast) is not None:
                        nodes += moved(cast)
        for node in nodes:
            node.meta.setdefault("recompute", _AGAIN)
    return marked


class RegatherInBackward(CustomGraphPass):
    """:func:`regather_in_backward` as a pass of Inductor, for
    ``torch._inductor.config.joint_custom_pre_pass``.

    Args:
        before: the option's value before, which runs first.
    """

    def __init__(self, before=None):
        self.before = before

    def __call__(self, graph: fx.Graph) -> None:
        for other in passes(self.before):
            other(graph)
        regather_in_backward(graph)

    def uuid(self):
        return uuid_after(self.before, "regather_in_backward")
