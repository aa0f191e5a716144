"""Prints a schedule."""

from __future__ import annotations

from dataclasses import dataclass, field

from deepsp.schedule.plan import Plan, Steps, is_inside
from deepsp.schedule.sync import Sync
from deepsp.weights.rows import ParameterShard


@dataclass
class _Node:
    title: str
    lines: list[str] = field(default_factory=list)
    children: dict[str, _Node] = field(default_factory=dict)

    def key(self) -> tuple:
        """Equal for nodes that print alike."""
        return self.title, tuple(self.lines), tuple((n, c.key()) for n, c in self.children.items())


def text(plan: Plan, names: list[str]) -> str:
    """The modules with steps, as a tree with their steps; of the whole plan, or of ``names``."""
    touched = [n for n, steps in plan.steps.items() if steps] + list(plan.replaced)
    shown = [n for n in touched if any(is_inside(n, name) for name in names)]
    modules = dict(plan.walk())
    root = _Node(f"{type(modules['']).__name__} over {plan.member[1]} ranks")
    for name in modules:  # in the model's order
        if name not in shown:
            continue
        node, path = root, ""
        for part in name.split(".") if name else []:
            path = f"{path}.{part}" if path else part
            title = type(modules[path]).__name__
            node = node.children.setdefault(part, _Node(title))
        node.lines = _lines(plan, name)
    lines = [root.title, *(f"    {line}" for line in root.lines)]
    _draw(root, "", lines)
    return "\n".join(lines)


def _lines(plan: Plan, name: str) -> list[str]:
    steps = plan.steps.get(name, Steps())
    lines = ["replaced"] if name in plan.replaced else []
    lines += [_shard(shard) for shard in steps.shards.values()]
    lines += [f"{attribute} = {value}" for attribute, value in steps.attributes.items()]
    lines += [_sync(sync) for sync in steps.syncs]
    if steps.checkpoint is not None:
        lines.append("checkpoint")
    return lines


def placement_of(shard: ParameterShard) -> str:
    parts = ", ".join(map(str, shard.parts))
    return f"Shard({shard.axis})" + (f" in parts of {parts}" if len(shard.parts) > 1 else "")


def _shard(shard: ParameterShard) -> str:
    name = shard.name.rpartition(".")[2]
    return f"{name}: {placement_of(shard)}, {list(shard.shape)} -> {list(shard.local_shape)}"


def _sync(sync: Sync) -> str:
    what = sync.op or getattr(sync.function, "__name__", type(sync.function).__name__)
    shown = {"axis": sync.axis, "grad": sync.grad, "tensor": sync.tensor}
    if sync.reduce_dtype is not None:
        shown["reduce_dtype"] = str(sync.reduce_dtype).removeprefix("torch.")
    options = "".join(f" {key}={value}" for key, value in shown.items() if value is not None)
    return f"sync {sync.mode} {what}{options}{' overlap' if sync.overlap else ''}"


def _draw(node: _Node, indent: str, lines: list[str]) -> None:
    groups: list[list[tuple[str, _Node]]] = []
    for name, child in node.children.items():
        last = groups[-1][-1] if groups else None
        if (
            last is not None
            and name.isdigit()
            and last[0].isdigit()
            and int(name) == int(last[0]) + 1
            and last[1].key() == child.key()
        ):
            groups[-1].append((name, child))
        else:
            groups.append([(name, child)])
    for n, group in enumerate(groups):
        final = n == len(groups) - 1
        name, child = group[0]
        label = name if len(group) == 1 else f"{name} to {group[-1][0]}, each"
        lines.append(f"{indent}{'└─ ' if final else '├─ '}{label}: {child.title}")
        below = indent + ("   " if final else "│  ")
        bar = "│  " if child.children else "   "
        lines += [f"{below}{bar}{line}" for line in child.lines]
        _draw(child, below, lines)
