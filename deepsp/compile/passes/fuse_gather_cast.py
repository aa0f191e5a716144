"""Moves casts in front of all-gathers, in graphs that know nothing of :func:`deepsp.gather_cast`,
then combines the gathers and launches them early.

Use::

    from torch._inductor import config
    from deepsp.compile import FuseGatherCast, RegatherInBackward

    config.post_grad_custom_post_pass = FuseGatherCast(config.post_grad_custom_post_pass)
    config.joint_custom_pre_pass = RegatherInBackward(config.joint_custom_pre_pass)

or :func:`fuse_gather_cast` on any functional graph whose nodes have ``meta["val"]``.

Rewrites:

- all-gather, wait, (views, copies,) cast to a narrower floating dtype, for ``_c10d_functional``
  and for deepsp's ops: cast, all-gather, wait, views. A cast commutes with an all-gather, so the
  bits are the same. Casts to the same dtype share one gather. Casts to several dtypes get one
  gather each if that is fewer bytes in all. A gather that is also used wide stays: a second, narrow
  one would only add bytes. Eight-bit floats are sent as bytes, because gloo doesn't know them.
- reduce-scatters after a cast to a wider dtype: see :mod:`deepsp.compile.passes.reduce_scatter`;
- then :mod:`deepsp.compile.passes.coalesce` and :mod:`deepsp.compile.passes.prefetch`.

Decisions depend only on the graph's products and collectives and on the gathered sizes. These are
the same on every rank, so the order of collectives is, too.

``TORCH_LOGS="deepsp.compile.passes.fuse_gather_cast"`` logs a summary (with a ``+``: each rewrite).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx.experimental.symbolic_shapes import statically_known_true

from deepsp.compile.graphs import (
    CONVERT,
    add,
    asks_sizes,
    aten,
    bytes_of,
    cast_to,
    copy_with,
    forget,
    is_collective,
    is_narrower,
    name_of,
    passes,
    replace,
    revalue,
    same_layout,
    uuid_after,
    writes,
)
from deepsp.compile.lowering.overlap import KeepOverlap, keep_overlap
from deepsp.compile.passes import coalesce, prefetch, reduce_scatter
from deepsp.compile.passes.recognize import Gather, find_gathers, moved, views_of

log = logging.getLogger(__name__)

COMBINE_BYTES = 1 << 20
PREFETCH_BYTES = 1 << 27


@dataclass
class Report:
    """What a pass did. Bytes: those that this rank receives, or gathered bytes that it holds."""

    rewrites: list[str] = field(default_factory=list)
    bytes_saved: int = 0
    combined: int = 0  # gathers that are now part of another's launch
    early: int = 0  # gathers with products between launch and wait
    peak_before: int = 0  # the most gathered bytes alive at once
    peak_after: int = 0
    collectives: list[str] = field(default_factory=list)  # in the order of their launches

    def note(self, rewrite: str, saved: int) -> None:
        log.debug("%s: %d bytes less", rewrite, saved)
        self.rewrites.append(rewrite)
        self.bytes_saved += saved

    def __str__(self) -> str:
        return (
            f"{len(self.rewrites)} rewritten, {self.bytes_saved} bytes less received; "
            f"{self.combined} gathers combined; {self.early} issued early; gathered bytes at the "
            f"peak, estimated: {self.peak_before} before, {self.peak_after} now"
        )


# ---------------------------------------------------------------------------------- all-gathers


def _casts(root: fx.Node) -> dict[torch.dtype, list[fx.Node]] | None:
    """By dtype, the casts to narrower dtypes of a gathered tensor; None if it has other uses."""
    wide = root.meta["val"].dtype
    inside = moved(root)
    if any(node.target is aten.view.dtype for node in inside):
        return None
    leaves = [u for n in inside for u in n.users if u not in set(inside) and not asks_sizes(u)]
    casts: dict[torch.dtype, list[fx.Node]] = {}
    for leaf in sorted(dict.fromkeys(leaves)):
        dtype = cast_to(leaf)
        if not is_narrower(dtype, wide):
            return None
        if any(writes(user) for view in views_of(leaf) for user in view.users):
            return None  # casts have their own memory; views of one gather would share it
        casts.setdefault(dtype, []).append(leaf)
    return casts or None


def _leaves_graph(node: fx.Node) -> bool:
    return any(user.op == "output" for view in views_of(node) for user in view.users)


def _split(gather: Gather, casts: list[fx.Node]) -> Gather:
    """A second gather of the same shard, for some of the casts."""
    (root,) = gather.outputs
    start = copy_with(gather.start, {})
    copies = {gather.start: start}
    for node in moved(root):
        copies[node] = copy_with(node, copies)
    for cast in casts:
        cast.replace_input_with(cast.args[0], copies[cast.args[0]])
    forget(list(copies.values()))
    forget(moved(root))
    return Gather(
        start, list(gather.shards), [copies[root]], [start, copies[root]], gather.ranks, False
    )


def _gather_as(gather: Gather, i: int, dtype: torch.dtype) -> None:
    """Gathers shard i in another dtype; the caller must fix the nodes that use it."""
    start, root = gather.start, gather.outputs[i]
    shard, wide = gather.shards[i], root.meta["val"].dtype
    if gather.ours:
        if shard.meta["val"].dtype != wide:
            # The value was rounded to ``wide`` first; keep that.
            shard = add(CONVERT, (shard, wide), before=start, like=start)
        for node in gather.nodes[:2]:
            names = [a.name for a in node.target._schema.arguments]
            if "dtype" in names:
                node.update_arg(names.index("dtype"), dtype)
            else:
                position = names.index("dtypes")
                node.update_arg(
                    position, [*node.args[position][:i], dtype, *node.args[position][i + 1 :]]
                )
    else:
        shard = add(CONVERT, (shard, dtype), before=start, like=start)
        if dtype.itemsize == 1:
            shard = add(aten.view.dtype, (shard, torch.uint8), before=start, like=start)
    gather.shards[i] = shard
    start.update_arg(0, shard if isinstance(start.args[0], fx.Node) else list(gather.shards))
    for node in gather.nodes:
        revalue(node)


def _cast_first(gather: Gather, i: int, dtype: torch.dtype, casts: list[fx.Node]) -> None:
    root = gather.outputs[i]
    after = moved(root)[1:]
    elements = root.meta["val"].numel()
    _gather_as(gather, i, dtype)
    if root.meta["val"].dtype != dtype:  # bytes
        view = add(aten.view.dtype, (root, dtype), before=root.next, like=casts[0])
        root.replace_all_uses_with(view, lambda user: user is not view)
    for node in after:
        revalue(node)
    for cast in casts:
        new, value = cast.args[0], cast.meta["val"]
        # An output of the graph must not share memory with another tensor, nor keep a larger one
        # alive. Everything else may be a view with the same layout.
        covers_all = len(casts) == 1 and statically_known_true(value.numel() == elements)
        if (_leaves_graph(cast) and not covers_all) or not same_layout(new.meta["val"], value):
            form = torch.contiguous_format if value.is_contiguous() else torch.preserve_format
            new = add(aten.clone.default, (new,), {"memory_format": form}, before=cast, like=cast)
        replace(cast, new)
        cast.graph.erase_node(cast)


def _fuse_gathers(graph: fx.Graph, report: Report) -> None:
    for gather in find_gathers(graph):
        for i, root in enumerate(gather.outputs):
            casts = root and _casts(root)
            if not casts:
                continue
            wide, bytes_wide = root.meta["val"].dtype, bytes_of(root)
            if len(casts) > 1:
                fewer = sum(dtype.itemsize for dtype in casts) < wide.itemsize
                if not fewer or len(gather.outputs) > 1 or gather.ours:
                    continue
            if gather.ours and min(dtype.itemsize for dtype in casts) == 1:
                continue
            parts = [(gather, i, *casts.popitem())]
            while casts:
                dtype, leaves = casts.popitem()
                parts.append((_split(gather, leaves), 0, dtype, leaves))
            for part in parts:
                _cast_first(*part)
            saved = bytes_wide * (gather.ranks - 1) // gather.ranks
            narrow = sum(dtype.itemsize for _, _, dtype, _ in parts)
            dtypes = ", ".join(name_of(dtype) for _, _, dtype, _ in parts)
            report.note(
                f"{gather.start.name}: gathered as {dtypes} instead of {name_of(wide)}",
                saved * (wide.itemsize - narrow) // wide.itemsize,
            )


# -------------------------------------------------------------------------------------- the pass


def _others(graph: fx.Graph) -> list[fx.Node]:
    """The other collectives, which the pass may not move, in order."""
    gathers = {gather.start for gather in find_gathers(graph)}
    return [node for node in graph.nodes if is_collective(node) and node not in gathers]


def fuse_gather_cast(
    graph: fx.Graph, *, prefetch_bytes: int = PREFETCH_BYTES, combine_bytes: int = COMBINE_BYTES
) -> Report:
    """Moves casts in front of all-gathers in a functional graph, in place; results don't change.

    Args:
        graph: nodes need ``meta["val"]``.
        prefetch_bytes: gathers are launched early as long as at most this many bytes are gathered
            or in flight before their first use; 0 launches each right before its use.
        combine_bytes: gathers are combined into launches of at most this many bytes; 0 combines
            none. Both count full tensors, after the gather.

    Returns:
        A :class:`Report` of what was done.

    Raises:
        ValueError: a node has no ``meta["val"]``, or a number of bytes is negative.
    """
    for name, value in (("prefetch_bytes", prefetch_bytes), ("combine_bytes", combine_bytes)):
        if value < 0:
            raise ValueError(f"expected {name} to be a number of bytes >= 0, got {value}")
    report = Report(peak_before=prefetch.peak(graph))
    others = _others(graph)
    _fuse_gathers(graph, report)
    reduce_scatter.fuse_casts(graph, report)
    report.combined = coalesce.combine(graph, combine_bytes)
    report.early = prefetch.schedule(graph, prefetch_bytes)
    report.peak_after = prefetch.peak(graph)
    report.collectives = [n.name for n in graph.nodes if is_collective(n)]
    graph.lint()
    still = [node for node in _others(graph) if node in others]
    if still != [node for node in others if node in still]:
        raise AssertionError(f"collectives have changed places: {others}, {still}")
    log.info("%s", report)
    return report


class FuseGatherCast(CustomGraphPass):
    """:func:`fuse_gather_cast` as an Inductor pass. Inductor then keeps the graph's order.

    deepsp's own pass, which ties collectives to each other, always runs last.

    Args:
        before: the value of ``torch._inductor.config.post_grad_custom_post_pass``: runs first.
        prefetch_bytes: as in :func:`fuse_gather_cast`.
        combine_bytes: as in :func:`fuse_gather_cast`.
    """

    def __init__(
        self,
        before=None,
        *,
        prefetch_bytes: int = PREFETCH_BYTES,
        combine_bytes: int = COMBINE_BYTES,
    ):
        self.before = before
        self.prefetch_bytes = prefetch_bytes
        self.combine_bytes = combine_bytes

    def __call__(self, graph: fx.Graph) -> None:
        for other in passes(self.before):
            for configured in passes(other.before) if isinstance(other, KeepOverlap) else [other]:
                configured(graph)
        fuse_gather_cast(
            graph, prefetch_bytes=self.prefetch_bytes, combine_bytes=self.combine_bytes
        )
        prefetch.keep_order(graph)
        keep_overlap(graph)

    def uuid(self):
        return uuid_after(self.before, __file__, self.prefetch_bytes, self.combine_bytes)
