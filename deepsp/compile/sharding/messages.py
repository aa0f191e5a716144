"""What people read when a graph can't be sharded: the op, the reason, and their own line."""

from __future__ import annotations

import re

import torch
from torch import fx


class CannotShard(ValueError):
    """Raised when something in a graph can't be sharded over the sequence.

    Args:
        reason: why.
        node: the op.
    """

    def __init__(self, reason: str, node: fx.Node | None = None):
        self.reason, self.node = reason, node
        super().__init__(self._text())

    def at(self, node: fx.Node) -> CannotShard:
        """The same error for another op.

        Args:
            node: the op.
        """
        return CannotShard(self.reason, node)

    def _text(self) -> str:
        if self.node is None:
            return f"deepsp can't shard this model: {self.reason}"
        line = line_of(self.node)
        text = f"deepsp can't shard {where(self.node)} over the sequence: {self.reason}"
        if "torch_dynamo_resume_in_" in (self.node.meta.get("stack_trace") or ""):
            text += (
                ". A graph break cut the model before this: what it computed there isn't known to "
                "hold tokens. Remove the break (a print, .item(), a branch on a tensor's value); "
                "torch.compile(..., fullgraph=True) names it"
            )
        return text + (f"\n  {line}" if line else "")


def where(node: fx.Node) -> str:
    """The op's name as people write it."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return f"{target.namespace}.{target._opname}"
    return getattr(target, "__name__", str(target))


def line_of(node: fx.Node) -> str:
    """The line of the user's code that a node comes from: the last frame outside of torch."""
    trace = node.meta.get("stack_trace") or ""
    frames = re.findall(r'File "([^"]+)", line (\d+), in ([^\n]+)\n\s*([^\n]*)', trace)
    for file, line, function, code in reversed(frames):
        if "/torch/" not in file:
            return f"{file}:{line}, in {function}: {code.strip()}"
    return ""
