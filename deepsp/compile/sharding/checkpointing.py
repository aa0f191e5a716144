"""Decides which tensors are saved for backward, and which are recomputed.

With a sharded sequence, attention is most of the work, and only its exchange waits for other ranks:
their results are saved. Computation on each token alone is cheap to repeat; a budget decides how
much of it is saved. Nodes are tagged as ``torch.utils.checkpoint`` tags them (``recompute``,
``ac_graph_id``), for AOTAutograd's partitioner. The nodes from one attention to the next are one
checkpoint: tensors that cross its border are saved, so that no checkpoint recomputes another's.
"""

from __future__ import annotations

import math

import torch
from torch import fx
from torch._higher_order_ops.flex_attention import flex_attention
from torch.fx.experimental import symbolic_shapes
from torch.utils.checkpoint import CheckpointPolicy

from deepsp.compile.sharding.nodes import COMMUNICATE, is_random, is_tensor

_ATTENTION = {
    torch.ops.deepsp.distributed_attention.default,
    torch.ops.deepsp._attention_of_cell.default,
    torch.ops.aten.scaled_dot_product_attention.default,
    flex_attention,
}


def _hint(size) -> int:
    if isinstance(size, int):
        return size
    if hasattr(symbolic_shapes, "optimization_hint"):
        return symbolic_shapes.optimization_hint(size, fallback=4096)
    return size.node.hint or 4096  # torch 2.11


def _bytes(value: torch.Tensor) -> int:
    return math.prod(_hint(n) for n in value.shape) * value.element_size()


def _must_stay(node: fx.Node) -> bool:
    """Whether a node is a collective, attention, or random, so that it must not be recomputed."""
    target = node.target
    return (
        target in _ATTENTION or getattr(target, "namespace", "") in COMMUNICATE or is_random(target)
    )


def _work(node: fx.Node) -> int:
    """Multiplications per element of the result."""
    name = getattr(node.target, "_opname", "")
    if name in ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum"):
        operands = [n.meta.get("val") for n in node.all_input_nodes]
        return max((_hint(x.shape[-1]) for x in operands if is_tensor(x) and x.dim()), default=1)
    return 1


def _is_view(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(r.alias_info is not None for r in schema.returns)


def keep_exchanged(graph: fx.Graph) -> None:
    """Saves collectives, attention and random tensors even if the model's own
    ``torch.utils.checkpoint`` would recompute them."""
    for node in graph.nodes:
        if "recompute" in node.meta and _must_stay(node):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def tag(graph: fx.Graph, budget: float, differentiated: set[fx.Node]) -> None:
    """Tags the nodes that backward recomputes, among ``differentiated`` (a mask is not in the
    budget). ``budget``: the fraction of the bytes of token-wise results that may be saved, products
    first, since they cost most to recompute."""
    stretch, candidates = 0, []
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if _must_stay(node):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            node.meta["ac_graph_id"] = stretch
            stretch += node.target in _ATTENTION
        elif node in differentiated:
            node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
            node.meta["ac_graph_id"] = stretch
            if not _is_view(node):
                candidates.append(node)
    left = budget * sum(_bytes(node.meta["val"]) for node in candidates)
    for node in sorted(candidates, key=_work, reverse=True):  # stable: else in graph order
        size = _bytes(node.meta["val"])
        if size <= left:
            left -= size
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
