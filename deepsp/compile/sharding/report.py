"""What was decided for each op of a graph."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from deepsp.compile.sharding.messages import line_of, where
from deepsp.compile.sharding.nodes import is_tensor
from deepsp.compile.sharding.tokens import Tokens


@dataclass
class Decision:
    """What was decided for an op, for :func:`deepsp.compile.explain`."""

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
        shape = ", ".join(str(n) for n in value.shape) if is_tensor(value) else ""
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
