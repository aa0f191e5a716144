"""What a user meets before the first op."""

import ast
import importlib.util
import os
import re
import runpy
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest
import setuptools
import torch
from setuptools import Distribution
from torch.utils import cpp_extension

import deepsp
from deepsp import _C
from deepsp._load import check_torch

ROOT = Path(__file__).parents[1]
PACKAGE = Path(importlib.util.find_spec("deepsp").origin).parent


# Without the finder of an editable install, which would find the real package's parts.
_IMPORT = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in repr(f).lower()]
import deepsp
"""


def _import_with(note: str | None, tmp_path: Path) -> str:
    copy = tmp_path / "deepsp"
    copy.mkdir()
    for name in ("__init__.py", "_load.py"):
        (copy / name).write_text((PACKAGE / name).read_text())
    if note is not None:
        (copy / "_built_for.py").write_text(f'TORCH = "{note}"\nCUDA = None\n')
    done = subprocess.run(
        [sys.executable, "-c", _IMPORT], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode != 0
    return done.stderr


def test_another_torch_is_named(tmp_path):
    error = _import_with("1.2.3", tmp_path)
    assert "ImportError" in error and "built for torch 1.2 without CUDA" in error
    assert torch.__version__ in error and "pip install --no-build-isolation" in error


def test_which_torch_an_extension_runs_under():
    """Any release of its minor version, with the same CUDA or none."""
    fits = [("2.13.0+cpu", None, "2.13.1+cpu", None), ("2.13.0", "13.0", "2.13.2+cu130", "13.0")]
    fits += [("2.9.1", None, "2.9.1.post1", None), ("2.14.0a0+git1", None, "2.14.0a0+git1", None)]
    for case in fits:
        check_torch(*case)
    others = [("2.13.0+cpu", None, version, None) for version in ("2.12.0", "2.1.3", "2.130.0")]
    others += [("2.13.0+cpu", None, "2.13.0", "13.0"), ("2.13.0", "13.0", "2.13.0+cpu", None)]
    others += [("2.13.0", "12.6", "2.13.0", "13.0")]
    # The ABI changes between pre-releases.
    others += [("2.14.0a0+git1", None, "2.14.0a0+git2", None), ("2.14.0", None, "2.14.0a0", None)]
    others += [("2.14.0.dev20261101", None, "2.14.0", None)]
    for case in others:
        with pytest.raises(ImportError, match="--no-build-isolation") as error:
            check_torch(*case)
        assert case[2] in str(error.value)
    with pytest.raises(
        ImportError, match=r"2\.13 with CUDA 13\.0, but .* 2\.12\.1\+cpu without CUDA"
    ):
        check_torch("2.13.0", "13.0", "2.12.1+cpu", None)


def test_the_version_is_that_of_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert deepsp.__version__ == project["version"]
    assert f"## {project['version']}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_extension_needs_no_certain_python():
    """One wheel serves all Pythons: the extension uses one function of Python's limited API."""
    extension = Path(_C.__file__)
    assert extension.name == "_C.abi3.so"
    assert list(PACKAGE.glob("_C*.so")) in ([extension], [])  # none: another folder has it
    command = ["nm", "-D", "--undefined-only", extension]
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert [name for name in names if name.startswith(("Py", "_Py"))] == ["PyModule_Create2"]
    command = ["objdump", "-p", extension]
    needed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "libtorch_cpu.so" in needed
    assert "libpython" not in needed and "libtorch_python" not in needed


def test_a_build_notes_its_torch_and_removes_older_extensions(tmp_path, monkeypatch):
    """Python would load an extension named for one Python rather than that for all."""
    monkeypatch.chdir(ROOT)
    given = {}
    monkeypatch.setattr(setuptools, "setup", given.update)
    runpy.run_path("setup.py")
    assert given["install_requires"] == [f"torch=={'.'.join(torch.__version__.split('.')[:2])}.*"]
    assert given["options"]["bdist_wheel"]["py_limited_api"] == "cp311"
    assert given["ext_modules"][0].py_limited_api
    assert cpp_extension.min_supported_cpython == "0x030B0000"
    build = given["cmdclass"]["build_ext"](Distribution({"version": "1.2.3"}))
    package = tmp_path / "deepsp"
    package.mkdir()
    for name in ("_C.abi3.so", "_C.cpython-311-x86_64-linux-gnu.so", "_C.so", "other.so"):
        (package / name).write_text("")
    build.finish(package)
    assert sorted(p.name for p in package.glob("*.so")) == ["_C.abi3.so", "other.so"]
    note = runpy.run_path(package / "_built_for.py")
    assert (note["VERSION"], note["TORCH"]) == ("1.2.3", torch.__version__)
    assert note["CUDA"] == torch.version.cuda


def test_an_extension_that_was_never_built(tmp_path):
    error = _import_with(None, tmp_path)
    assert "ImportError" in error and "isn't built" in error


def _toolkit_of(tmp_path, monkeypatch, top: Path):
    """The extension that setup.py builds where torch has CUDA, and nvcc is a script elsewhere."""
    nvcc = tmp_path / "scripts" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True, exist_ok=True)
    nvcc.write_text(f"#!/bin/sh\necho '#$ _SPACE_= ' >&2\necho '#$ TOP={top}/bin/..' >&2\n")
    nvcc.chmod(0o755)
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PATH", str(nvcc.parent), prepend=os.pathsep)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", str(nvcc.parent.parent))
    built = []
    monkeypatch.setattr(setuptools, "setup", lambda **given: built.extend(given["ext_modules"]))
    runpy.run_path("setup.py")
    return built[0]


def test_nvcc_that_is_a_script(tmp_path, monkeypatch):
    """Its own folder has no headers of CUDA: those are where the real nvcc looks for them."""
    top = tmp_path / "toolkit"
    with pytest.raises(RuntimeError, match=r"no cuda_runtime\.h there; set CUDA_HOME"):
        _toolkit_of(tmp_path, monkeypatch, top)
    (top / "bin").mkdir(parents=True)
    (top / "include").mkdir()
    (top / "include" / "cuda_runtime.h").write_text("")
    (top / "include" / "cuda_runtime_api.h").write_text("")
    extension = _toolkit_of(tmp_path, monkeypatch, top)
    assert str(top / "include") in extension.include_dirs
    assert any(source.endswith(".cu") for source in extension.sources)
    assert extension.py_limited_api
    assert str(top) == cpp_extension.CUDA_HOME


def test_public_names():
    for name in deepsp.__all__:
        assert getattr(deepsp, name).__doc__, name


def _imports(path, modules):
    """The modules of deepsp that one imports, within functions, too."""
    tree = ast.parse(path.read_text())
    typed = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in (n for n in ast.walk(tree) if id(n) not in typed):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module in modules:
            names = {f"{node.module}.{a.name}" for a in node.names} - {"deepsp._C"}
            yield from names & modules.keys()
            if names - modules.keys():
                yield node.module


def test_no_module_imports_itself_by_others():
    paths = {
        path: path.relative_to(PACKAGE.parent).with_suffix("") for path in PACKAGE.rglob("*.py")
    }
    modules = {".".join(p.parts).removesuffix(".__init__"): path for path, p in paths.items()}
    imports = {m: set(_imports(path, modules)) & modules.keys() for m, path in modules.items()}
    while free := [m for m, theirs in imports.items() if not theirs & imports.keys()]:
        for m in free:
            del imports[m]
    assert not imports, f"these import each other, or what does: {sorted(imports)}"
    assert len(list(PACKAGE.glob("*.py"))) <= 8
    long = [path.name for path in paths if path.read_text().count("\n") > 450]
    assert not long, long


ROOMS = [
    "ranks",
    "placement",
    "data",
    "weights",
    "loss",
    "sequence",
    "memory",
    "compile",
    "schedule",
    "integrations",
]


def test_rooms_import_one_way():
    """A room imports rooms that stand before it in the list; each is a folder of the package."""
    folders = sorted(p.name for p in PACKAGE.iterdir() if (p / "__init__.py").exists())
    assert folders == sorted(ROOMS)
    modules = {
        ".".join(p.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): p
        for p in PACKAGE.rglob("*.py")
    }
    for path in modules.values():
        room = path.relative_to(PACKAGE).parts[0]
        if room not in ROOMS:
            continue
        for name in _imports(path, modules):
            other = name.split(".")[1] if "." in name else ""
            if other in ROOMS:
                assert ROOMS.index(other) <= ROOMS.index(room), f"{path} imports {name}"


def test_every_type_has_one_definition():
    """Two of one name would share their vectors' code in the linked library, of whatever size."""
    definition = re.compile(r"(?:struct|class) ((?:\w+::)*\w+)[^;]*\{$")
    found = Counter()
    for path in sorted((ROOT / "csrc").rglob("*")):
        if path.suffix not in (".h", ".cpp", ".cu"):
            continue
        spaces = []
        for line in path.read_text().splitlines():
            if opened := re.match(r"namespace ?([\w:]*) ?\{$", line):
                spaces.append(opened[1])
            elif line.startswith("}  // namespace"):
                spaces.pop()
            elif (type_ := definition.match(line)) and "" not in spaces:
                found["::".join([*spaces, type_[1]])] += 1
    assert len(found) > 30
    assert [name for name, times in found.items() if times > 1] == []
