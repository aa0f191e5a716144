import os
import tempfile
from fnmatch import fnmatchcase
from pathlib import Path

import harness
import pytest
from hypothesis import settings

# A graph that was compiled before would hide what the code does now: Inductor keeps none. What g++
# makes of a kernel's text is kept for this run, in a folder of its own, where all ranks find it.
_built = tempfile.TemporaryDirectory(prefix="deepsp_tests_")
os.environ.update(
    TORCHINDUCTOR_CACHE_DIR=_built.name,
    TORCHINDUCTOR_FX_GRAPH_CACHE="0",
    TORCHINDUCTOR_AUTOGRAD_CACHE="0",
    TORCH_DYNAMO_AUTOMATIC_DYNAMIC_LOCAL_PGO="0",
)
# Kernels without vector instructions, which compile in less time; who needs them turns them on.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")

settings.register_profile("deepsp", deadline=None, max_examples=40, derandomize=True)
# pytest --hypothesis-profile=long tests/test_fuzz.py
settings.register_profile("long", deadline=None, max_examples=4000)
settings.load_profile("deepsp")


def pytest_sessionfinish():
    harness.stop_all()
    _built.cleanup()


_SLOW = Path(__file__).with_name("slow.txt")
_left_out: dict[str, int] = {}


def pytest_collection_modifyitems(items):
    """Marks the tests of slow.txt, in one place, so that it can be written from recorded times."""
    lines = [line for line in _SLOW.read_text().splitlines() if not line.startswith("#")]
    patterns = [line.replace("[", "[[]") for line in lines]
    for item in items:
        name = item.nodeid.removeprefix("tests/")
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            item.add_marker(pytest.mark.slow)


def pytest_deselected(items):
    for item in items:
        name = item.path.name
        _left_out[name] = _left_out.get(name, 0) + 1


def pytest_terminal_summary(terminalreporter, config):
    """Says what this tier left out: nobody should take `make test` for everything."""
    if config.option.markexpr != "not slow":
        return
    terminalreporter.section("left out")
    files = ", ".join(f"{name} {count}" for name, count in sorted(_left_out.items()))
    count = sum(_left_out.values())
    terminalreporter.write_line(f"{count} tests, which `make test-all` runs: {files}")


@pytest.fixture
def golden():
    """``golden(name, texts)`` compares texts with tests/refusals/name.txt, a paragraph each. With
    DEEPSP_WRITE_GOLDEN=1 it writes them there: read the difference before you commit it."""

    def compare(name: str, texts: list[str]) -> None:
        path = Path(__file__).parent / "refusals" / f"{name}.txt"
        now = "\n\n".join(texts) + "\n"
        if os.environ.get("DEEPSP_WRITE_GOLDEN"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(now)
        assert now == path.read_text()

    return compare
