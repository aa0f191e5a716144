"""Calls of deepsp's kernels in Inductor's code.

A start may read its inputs until the wait, and the result of a wait may be a view of a receive
buffer, next to others. So Inductor must not reuse what a start reads before the wait, nor a result
at all. What is written in place waits, too: :mod:`~deepsp.compile.lowering.overlap` ties each wait
to its start's inputs. And Inductor must not leave out a call on a rank whose results are empty,
since the other ranks make it."""

from __future__ import annotations

import functools
import sys

from torch._inductor import ir
from torch._inductor.lowering import fallback_handler, lowerings
from torch._inductor.virtualized import V
from torch.utils import _pytree as pytree

from deepsp.compile.lowering.inductor_table import ops


def _lowering(op):
    call = fallback_handler(op, add_to_fallback_set=False)

    @functools.wraps(call)
    def lowered(*args, **kwargs):
        before = len(V.graph.operations)
        results = call(*args, **kwargs)
        for operation in V.graph.operations[before:]:
            operation.has_side_effects = lambda: True
        if op._opname.endswith("_start"):
            _hold(V.graph.operations[before:])
        elif op._opname.endswith("_wait"):
            _release(V.graph.operations[before:])
        for x in pytree.tree_leaves(results):
            if isinstance(x, ir.IRNode):
                V.graph.never_reuse_buffers.add(x.get_name())
        return results

    return lowered


def _hold(operations: list) -> None:
    """Keeps Inductor from reusing what a start reads."""
    for operation in operations:
        if isinstance(operation, ir.FallbackKernel):
            read = {dep.name for dep in operation.get_read_writes().reads}
            operation._deepsp_held = read - V.graph.never_reuse_buffers
            V.graph.never_reuse_buffers |= operation._deepsp_held


def _release(operations: list) -> None:
    """Lets Inductor reuse, after a wait, what its starts read."""
    for wait in operations:
        if isinstance(wait, ir.FallbackKernel):
            for buffer in pytree.tree_leaves(wait.inputs):
                start = buffer.inputs[0] if isinstance(buffer, ir.MultiOutput) else buffer
                held = getattr(start, "_deepsp_held", set())
                V.graph.never_reuse_buffers -= held
                V.graph.additional_star_deps[wait.get_operation_name()] |= held


def install() -> None:
    """Adds the lowerings to Inductor's table."""
    for op in ops():
        lowerings[op] = _lowering(op)


def uninstall() -> None:
    """Undoes :func:`install`."""
    for op in ops():
        lowerings.pop(op, None)


sys.modules["deepsp.patches"].finish(__name__)  # which imports this module
