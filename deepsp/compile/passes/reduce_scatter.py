"""Reduce-scatters in the dtype before a cast.

- Cast to a wider dtype, (views, copies,) reduce-scatter: a sum in the narrow dtype would be less
  exact, so an all-to-all sends the narrow bytes, and each rank sums them in the wide dtype and in
  rank order; ``"avg"`` divides the sum once, at the end. Only the order of additions differs from
  the reduce-scatter's. deepsp's op sums on the receiver already, unless the backend sums: it gets
  the narrow tensor.
- Maximum and minimum are the same in both dtypes: the cast moves after them.
- A cast to a narrower dtype *after* a reduce-scatter stays there: before it, it would round every
  term.
"""

from __future__ import annotations

import torch
from torch import fx

from deepsp.compile.graphs import (
    CONVERT,
    WAIT,
    add,
    aten,
    bytes_of,
    c10d,
    cast_to,
    copy_with,
    forget,
    is_narrower,
    is_op,
    moves,
    name_of,
    only_user,
    replace,
    revalue,
    sizes,
    tensor_inputs,
)

_REDUCE_SCATTER = c10d.reduce_scatter_tensor.default
_ALL_TO_ALL = c10d.all_to_all_single.default


def _widened(node: fx.Node) -> tuple[list[fx.Node], list[fx.Node]] | None:
    """If a tensor consists of casts from one narrower dtype, moved but not changed: the nodes
    between, in order, and the casts."""
    wide = node.meta["val"].dtype
    between, casts, stack = {}, {}, [node]
    while stack:
        node = stack.pop()
        if node in between or node in casts:
            continue
        if cast_to(node) == wide and is_narrower(node.args[0].meta["val"].dtype, wide):
            if node.args[0].meta["val"].dtype.itemsize == 1:
                return None  # gloo doesn't know eight-bit floats
            casts[node] = None
        elif moves(node) and node.target is not aten.view.dtype:
            between[node] = None
            stack += tensor_inputs(node)
        else:
            return None
    if len({cast.args[0].meta["val"].dtype for cast in casts}) != 1:
        return None
    return sorted(between), sorted(casts)


def _narrow_copy(node: fx.Node, between: list[fx.Node], casts: list[fx.Node]) -> fx.Node:
    """The same tensor in the narrow dtype, without the casts."""
    copies = {cast: cast.args[0] for cast in casts}
    for inner in between:
        copies[inner] = copy_with(inner, copies)
    return copies[node]


def _sum_here(start: fx.Node, wait: fx.Node, x: fx.Node, wide: torch.dtype) -> fx.Node:
    """Exchanges narrow blocks and sums them in the wide dtype, in rank order."""
    _, kind, ranks, group = start.args

    def at_start(target, *args, **kwargs):
        return add(target, args, kwargs, before=start, like=start)

    def at_wait(target, *args):
        return add(target, args, before=wait, like=wait)

    if not x.meta["val"].is_contiguous():
        x = at_start(aten.clone.default, x, memory_format=torch.contiguous_format)
    rows = at_start(aten.view.default, x, [ranks, -1])
    launched = at_start(_ALL_TO_ALL, rows, [1] * ranks, [1] * ranks, group)
    arrived = at_wait(WAIT, launched)
    total = None
    for rank in range(ranks):
        part = at_wait(CONVERT, at_wait(aten.select.int, arrived, 0, rank), wide)
        total = part if total is None else at_wait(aten.add.Tensor, total, part)
    if kind == "avg":
        total = at_wait(aten.div.Tensor, total, ranks)
    shape = sizes(x, wait)
    return at_wait(aten.view.default, total, [-1, *shape[1:]])


def _fuse_reduce_scatter(start: fx.Node, report) -> None:
    _, kind, ranks, _ = start.args
    wait, widened = only_user(start, WAIT), _widened(start.args[0])
    if wait is None or widened is None or kind not in ("sum", "avg", "max", "min"):
        return
    name, wide, received = start.name, start.meta["val"].dtype, bytes_of(start) * (ranks - 1)
    x = _narrow_copy(start.args[0], *widened)
    narrow = x.meta["val"].dtype
    if kind in ("sum", "avg"):
        new = _sum_here(start, wait, x, wide)
    else:
        new = add(WAIT, (copy_with(start, {start.args[0]: x}),), before=wait, like=wait)
        new = add(CONVERT, (new, wide), before=wait, like=wait)
    replace(wait, new)
    forget([*sorted([*widened[0], *widened[1]]), start, wait])
    report.note(
        f"{name}: {kind} of {name_of(wide)}, sent as {name_of(narrow)}",
        received * (wide.itemsize - narrow.itemsize) // wide.itemsize,
    )


def _fuse_our_reduce_scatter(start: fx.Node, wait: fx.Node, report) -> None:
    places = {a.name: i for i, a in enumerate(wait.target._schema.arguments)}
    inputs, wires = list(start.args[0]), list(wait.args[places["wire_dtypes"]])
    reduce_dtype = wait.args[places["reduce_dtype"]]
    widened = {
        i: wide
        for i, x in enumerate(inputs)
        # By default, float64 is summed in float64, and anything narrower in float32.
        if not (reduce_dtype is None and wires[i] == torch.float64) and (wide := _widened(x))
    }
    if start.kwargs.get("backend_sums") is not None:  # the dtype that travels
        return
    if not widened or reduce_dtype not in (None, torch.float32, torch.float64):
        return
    before = bytes_of(start)
    for i, wide in widened.items():
        inputs[i] = _narrow_copy(inputs[i], *wide)
        wires[i] = inputs[i].meta["val"].dtype
    start.update_arg(0, inputs)
    wait.update_arg(places["wire_dtypes"], wires)
    for node in (start, wait):
        revalue(node)
    for between, casts in widened.values():
        forget(sorted([*between, *casts]))
    ranks = len(start.args[1]) // len(inputs)
    report.note(
        f"{start.name}: sent as {', '.join(name_of(dtype) for dtype in wires)}",
        (before - bytes_of(start)) * (ranks - 1) // ranks,
    )


def fuse_casts(graph: fx.Graph, report) -> None:
    for start in list(graph.nodes):
        if start.target is _REDUCE_SCATTER:
            _fuse_reduce_scatter(start, report)
        elif is_op(start, "_reduce_scatter_cast_coalesced_start") and len(start.users) == 1:
            (wait,) = start.users
            if is_op(wait, "_reduce_scatter_cast_coalesced_wait"):
                _fuse_our_reduce_scatter(start, wait, report)
