"""The steps that a schedule has recorded, by module."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor, nn

from deepsp.ranks.groups import Member
from deepsp.schedule.registry import Effect
from deepsp.schedule.sync import Sync
from deepsp.weights.rows import ParameterShard


@dataclass
class Steps:
    """The steps for one module."""

    shards: dict[str, ParameterShard] = field(default_factory=dict)
    followers: set[str] = field(default_factory=set)  # shards that follow from another parameter's
    effect: Effect | None = None
    syncs: list[Sync] = field(default_factory=list)
    attributes: dict[str, int] = field(default_factory=dict)  # this rank's numbers
    checkpoint: dict | None = None  # arguments of torch.utils.checkpoint

    def __bool__(self) -> bool:
        return bool(self.shards or self.syncs or self.attributes or self.checkpoint is not None)

    def of_mode(self, mode: str) -> list[Sync]:
        return [sync for sync in self.syncs if sync.mode == mode]


class Plan:
    """Steps by module name. The model isn't changed before it is built."""

    def __init__(self, model: nn.Module, member: Member):
        self.model, self.member = model, member
        self.steps: dict[str, Steps] = {}
        self.replaced: dict[str, nn.Module] = {}
        self.running = None  # once it is built

    # ---- the model with its replacements

    def walk(self) -> Iterator[tuple[str, nn.Module]]:
        """(name, module), as from ``named_modules(remove_duplicate=False)``, replacements
        included."""
        yield from self._walk("", self.model)

    def _walk(self, name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        module = self.replaced.get(name, module)
        yield name, module
        for child, submodule in module._modules.items():
            if submodule is not None:
                yield from self._walk(f"{name}.{child}" if name else child, submodule)

    def module(self, name: str) -> nn.Module:
        module, path = self.replaced.get("", self.model), ""
        for part in name.split(".") if name else []:
            path = f"{path}.{part}" if path else part
            module = self.replaced.get(path, module._modules.get(part))
        return module

    def find(self, pattern: str) -> list[str]:
        """The names that match; for a module with several names, the first.

        Raises:
            ValueError: none does.
        """
        wanted = pattern.split(".") if pattern else []
        first: dict[int, str] = {}
        matches, names = [], []
        for name, module in self.walk():
            first.setdefault(id(module), name)
            names.append(name)
            parts = name.split(".") if name else []
            if len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted)):
                matches.append(first[id(module)])
        if not matches:
            near = difflib.get_close_matches(pattern, names, 3)
            raise ValueError(
                f"expected the name of a module, or a pattern that matches one, got {pattern!r}"
                + (f"; did you mean {', '.join(near)}?" if near else "")
            )
        return list(dict.fromkeys(matches))

    def of(self, name: str) -> Steps:
        return self.steps.setdefault(name, Steps())

    def below(self, name: str) -> list[str]:
        """Modules with steps, at or inside ``name``."""
        return [n for n, steps in self.steps.items() if steps and is_inside(n, name)]

    def owners(self, tensor: Tensor) -> list[tuple[str, str]]:
        """(module, name) of every parameter or buffer that is this tensor."""
        seen, owners = set(), []
        for name, module in self.walk():
            if id(module) in seen:
                continue
            seen.add(id(module))
            for tensors in (module._parameters, module._buffers):
                owners += [(name, key) for key, value in tensors.items() if value is tensor]
        return owners


def is_inside(name: str, container: str) -> bool:
    return container == "" or name == container or name.startswith(f"{container}.")


def tensor_of(module: nn.Module, name: str) -> Tensor | None:
    """A parameter or buffer of the module itself."""
    tensors = module._parameters if name in module._parameters else module._buffers
    return tensors.get(name)
