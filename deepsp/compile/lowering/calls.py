"""Calls of deepsp's kernels in Inductor's code, in groups whose ranks write into each other's
memory.

A result may be a view of a receive buffer, next to others, and a wait leaves its result there. So
Inductor must not reuse these results' memory, which it would size by their strides. And it must not
leave out a call on a rank whose results are empty, since the other ranks make it."""

from __future__ import annotations

import functools
import sys

from torch._inductor import ir
from torch._inductor.lowering import fallback_handler, lowerings
from torch._inductor.virtualized import V
from torch.utils import _pytree as pytree

from deepsp.compile.lowering.inductor_table import mapped_ops


def _lowering(op):
    call = fallback_handler(op, add_to_fallback_set=False)

    @functools.wraps(call)
    def lowered(*args, **kwargs):
        known = len(V.graph.operations)
        results = call(*args, **kwargs)
        for operation in V.graph.operations[known:]:
            operation.has_side_effects = lambda: True
        for x in pytree.tree_leaves(results):
            if isinstance(x, ir.IRNode):
                V.graph.never_reuse_buffers.add(x.get_name())
        return results

    return lowered


def install() -> None:
    """Adds the lowerings to Inductor's table."""
    for op in mapped_ops():
        lowerings[op] = _lowering(op)


def uninstall() -> None:
    """Undoes :func:`install`."""
    for op in mapped_ops():
        lowerings.pop(op, None)


sys.modules["deepsp.patches"].finish(__name__)  # which imports this module
