"""Calls of deepsp's kernels in Inductor's code.

A start may read its inputs until the wait, and the result of a wait may be a view of a receive
buffer, next to others. So Inductor must not reuse what a start reads before the wait, nor a result
at all, though it may free one: it is told that a result aliases something. What is written in place
waits, too: :mod:`~deepsp.compile.lowering.overlap` ties each wait to its start's inputs. And
Inductor must not leave out a call on a rank whose results are empty, since the other ranks make
it."""

from __future__ import annotations

import functools
import sys

from torch._inductor import ir
from torch._inductor.lowering import fallback_handler, lowerings
from torch._inductor.virtualized import V
from torch.utils import _pytree as pytree
from torch.utils._ordered_set import OrderedSet

from deepsp.compile.lowering.inductor_table import ops


def _lowering(op):
    call = fallback_handler(op, add_to_fallback_set=False)

    @functools.wraps(call)
    def lowered(*args, **kwargs):
        before = len(V.graph.operations)
        results = call(*args, **kwargs)
        operations = V.graph.operations[before:]
        for operation in operations:
            operation.has_side_effects = lambda: True
        calls = [x for x in operations if isinstance(x, ir.FallbackKernel)]
        for x in calls:
            x.alias_names = [x.get_name()]
        _release(calls)
        if op._opname.endswith("_start"):
            _hold(calls)
        return results

    return lowered


def _hold(starts: list) -> None:
    """Keeps Inductor from reusing what starts read."""
    readers, never = _reads_in_flight(), V.graph.never_reuse_buffers
    for start in starts:
        # Ordered, so that all ranks schedule alike.
        start._deepsp_reads = OrderedSet(dep.name for dep in start.get_read_writes().reads)
        for name in start._deepsp_reads:
            if name in readers or name not in never:  # else it is never reused anyway
                readers[name] = readers.get(name, 0) + 1
                never.add(name)


def _release(calls: list) -> None:
    """Lets Inductor reuse, after calls that read what starts have returned, what these starts
    read, unless another start in flight reads it, too."""
    readers = _reads_in_flight()
    for call in calls:
        for buffer in pytree.tree_leaves(call.inputs):
            start = buffer.inputs[0] if isinstance(buffer, ir.MultiOutput) else buffer
            if not (reads := getattr(start, "_deepsp_reads", None)):
                continue
            # The first of its buffers is enough: a start of several chunks has read its inputs.
            start._deepsp_reads = OrderedSet()
            V.graph.additional_star_deps[call.get_operation_name()] |= reads
            for name in [x for x in reads if x in readers]:
                readers[name] -= 1
                if readers[name] == 0:
                    del readers[name]
                    V.graph.never_reuse_buffers.discard(name)


def _reads_in_flight() -> dict[str, int]:
    """How many starts in flight read each buffer of the graph that is lowered."""
    return vars(V.graph).setdefault("_deepsp_reads_in_flight", {})


def install() -> None:
    """Adds the lowerings to Inductor's table."""
    for op in ops():
        lowerings[op] = _lowering(op)


def uninstall() -> None:
    """Undoes :func:`install`."""
    for op in ops():
        lowerings.pop(op, None)


sys.modules["deepsp.patches"].finish(__name__)  # which imports this module
