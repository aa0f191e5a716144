"""Every name of another library that deepsp imports or reaches for exists in the versions that it
is tested with. A renamed private one would otherwise fail late, or in silence."""

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "deepsp"
LIBRARIES = ("torch", "transformers", "trl", "accelerate", "diffusers", "peft", "deepspeed")
OF_LIGHTNING = ("pytorch_lightning", "lightning_fabric")

# What only other versions have, and what a class makes for its instances.
_ABSENT = {
    "torch.ops.deepsp_mapped",
}


def _files() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def _is_foreign(module: str) -> bool:
    return module.split(".")[0] in (*LIBRARIES, *OF_LIGHTNING)


def _imported(tree: ast.AST) -> Iterator[tuple[str, str, str | None]]:
    """A local name, the module, and the name in it (None: the module itself)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and _is_foreign(node.module):
            for alias in node.names:
                yield alias.asname or alias.name, node.module, alias.name
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if _is_foreign(alias.name):
                    local = alias.asname or alias.name.split(".")[0]
                    yield local, alias.name if alias.asname else local, None


def _resolved(module: str, name: str | None):
    found = importlib.import_module(module)
    if name is None:
        return found
    if not hasattr(found, name):
        return importlib.import_module(f"{module}.{name}")
    return getattr(found, name)


def _chains(tree: ast.AST, names: set[str]) -> Iterator[tuple[int, list[str]]]:
    """Attributes of attributes of imported names: torch._C._dispatch_keys -> its parts."""
    inside = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or id(node) in inside:
            continue
        parts, line = [], node.lineno
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if isinstance(node, ast.Name) and node.id in names:
            yield line, [node.id, *reversed(parts)]


@pytest.mark.parametrize("path", _files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imported_names_exist(path):
    tree = ast.parse(path.read_text())
    imported = {}
    for local, module, name in _imported(tree):
        imported[local] = _resolved(module, name)
    missing = []
    for line, chain in _chains(tree, set(imported)):
        value, text = imported[chain[0]], chain[0]
        for part in chain[1:]:
            text += f".{part}"
            if text.startswith("torch.ops.") or not hasattr(value, "__dict__"):
                break
            if not hasattr(value, part):
                missing.append(f"{path.name}:{line}: {text}")
                break
            value = getattr(value, part)
    assert not missing
