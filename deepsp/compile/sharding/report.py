"""The pass's messages: what it can't shard, and its decisions."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import torch
from torch import fx

from deepsp.compile.sharding.tokens import Tokens

# Functions of transformers' models that run a recurrence over the sequence.
RECURRENCES = (
    "chunk_kimi_delta_attention",
    "mamba2_chunk_scan",
    "mamba_selective_scan",
    "torch_chunk_gated_delta_rule",
)


_WAY_OUT = "; or let every rank compute this part of all tokens: x = deepsp.replicated(x) before it"


class CannotShard(ValueError):
    """Raised when something in a graph can't be sharded over the sequence.

    Args:
        reason: why.
        node: the op.
    """

    def __init__(self, reason: str, node: fx.Node | None = None):
        self.reason, self.node = reason, node
        super().__init__(self._text())

    def with_way_out(self, node: fx.Node) -> CannotShard:
        """The same error, of an op whose operands are sharded.

        Args:
            node: the op, unless the error has one.
        """
        return CannotShard(self.reason + _WAY_OUT, self.node or node)

    def _text(self) -> str:
        if self.node is None:
            return f"deepsp can't shard this model: {self.reason}"
        line = line_of(self.node)
        text = f"deepsp can't shard {where(self.node)} over the sequence: {self._why(self.node)}"
        if "torch_dynamo_resume_in_" in (self.node.meta.get("stack_trace") or ""):
            text += (
                ". A graph break cut the model before this: what it computed there isn't known to "
                "hold tokens. Remove the break (a print, .item(), a branch on a tensor's value); "
                "torch.compile(..., fullgraph=True) names it"
            )
        return text + (f"\n  {line}" if line else "")

    def _why(self, node: fx.Node) -> str:
        recurrence = next((f for _, _, f, _ in frames_of(node) if f in RECURRENCES), None)
        if recurrence is None:
            return self.reason
        return (
            f"it is a part of {recurrence}, a recurrence, which can be sharded as a whole only; "
            "capture the model by torch.compile(..., backend='deepsp'), or call "
            "deepsp.integrations.transformers.register(), load it with "
            "attn_implementation='deepsp', and train it without a backend"
        )


def where(node: fx.Node) -> str:
    """The op's name for users."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return f"{target.namespace}.{target._opname}"
    return getattr(target, "__name__", str(target))


def frames_of(node: fx.Node) -> list[tuple[str, str, str, str]]:
    """The file, line, function and code of each call that a node comes from, outermost first."""
    trace = node.meta.get("stack_trace") or ""
    return re.findall(r'File "([^"]+)", line (\d+), in ([^\n]+)\n\s*([^\n]*)', trace)


def line_of(node: fx.Node) -> str:
    """The line of the user's code that a node comes from: the last frame outside of torch."""
    for file, line, function, code in reversed(frames_of(node)):
        if "/torch/" not in file:
            return f"{file}:{line}, in {function}: {code.strip()}"
    return ""


@dataclass
class Decision:
    """The decision for an op, for :func:`deepsp.compile.explain`."""

    name: str
    op: str
    shape: str
    what: str
    line: str


@dataclass
class Report:
    """What :func:`parallelize` did."""

    decisions: list[Decision] = field(default_factory=list)
    collectives: dict[str, int] = field(default_factory=dict)

    def note(self, node: fx.Node, what: str) -> None:
        value = node.meta.get("val")
        value = value[0] if isinstance(value, tuple) else value
        shape = ", ".join(str(n) for n in value.shape) if isinstance(value, torch.Tensor) else ""
        self.decisions.append(Decision(node.name, where(node), f"[{shape}]", what, line_of(node)))

    def count(self, graph: fx.Graph) -> None:
        for node in graph.nodes:
            if node.op == "call_function" and str(node.target).startswith("deepsp."):
                name = str(node.target).removeprefix("deepsp.").removesuffix(".default")
                self.collectives[name] = self.collectives.get(name, 0) + 1


def places(tokens) -> str:
    def one(t: Tokens | None) -> str:
        if t is None:
            return "Replicate"
        inside = "" if t.alone else f" of {t.outer} x tokens ({t.length}) x {t.inner}"
        return f"Shard({t.dim}){inside}"

    return "; ".join(one(t) for t in tokens) if isinstance(tokens, list) else one(tokens)
