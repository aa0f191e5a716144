"""Prints what the compile pass does to a model, op by op: why an op is refused, or where too much
is communicated."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepsp.compile.sharding.backend import parallelize
from deepsp.compile.sharding.report import CannotShard, Decision, Report
from deepsp.ranks.groups import Group


@dataclass
class Explanation:
    """The result of :func:`explain`. It prints as a table of ops, with the shapes of one process
    and the placements of results.

    Placements have the names of ``torch.distributed.tensor``: ``Replicate`` is the whole tensor on
    each rank, ``Shard(dim)`` a part of that dimension, and ``Partial`` a summand. ``Shard(0) of 2 x
    tokens x 1`` has tokens merged with other dimensions. The placement before an arrow is an
    operand's.

    Attributes:
        decisions: one for each op that works on sharded tensors.
        collectives: how many of each of deepsp's ops the graphs have, in forward.
        refused: why a graph can't be sharded, or None.
    """

    decisions: list[Decision]
    collectives: dict[str, int]
    refused: str | None

    def __str__(self) -> str:
        rows = [("op", "full shape", "its result", "line")]
        rows += [(d.op, d.shape, d.what, d.line) for d in self.decisions]
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines = [
            "  ".join([*(x.ljust(w) for x, w in zip(row, widths, strict=False)), row[3]]).rstrip()
            for row in rows
        ]
        lines.append("")
        counted = ", ".join(f"{n} {name}" for name, n in sorted(self.collectives.items()))
        lines.append(f"collectives: {counted or 'none'}")
        if self.refused:
            lines += ["", self.refused]
        return "\n".join(lines)


def explain(model, *args, group: Group = None, **kwargs) -> Explanation:
    """Reports what ``torch.compile(model, backend="deepsp")`` would do, without doing it.

    ``model`` is called once, as it is, with inputs that :func:`deepsp.prepare_inputs` has marked.

    Args:
        model: a module or a function.
        args: its inputs.
        group: the sequence group.
        kwargs: its inputs by name.

    Returns:
        An :class:`Explanation`, whose ``refused`` says why a graph can't be sharded.
    """
    report, refused = Report(), []

    def backend(gm, example_inputs):
        try:
            parallelize(gm, example_inputs, group, report=report, drop_caches=True)
        except CannotShard as error:
            refused.append(str(error))
        return gm.forward

    torch._dynamo.reset()  # else compiled code wouldn't be compiled again
    torch.compile(model, backend=backend)(*args, **kwargs)
    torch._dynamo.reset()
    return Explanation(report.decisions, report.collectives, "\n".join(refused) or None)
