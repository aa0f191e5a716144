import os
import tempfile
from pathlib import Path

import harness
import pytest
from hypothesis import settings

# A graph that was compiled before would hide what the code does now: Inductor keeps none. What g++
# makes of a kernel's text is kept for this run, in a folder of its own that all processes find.
_built = None
if "DEEPSP_TESTS_BUILT" not in os.environ:
    _built = tempfile.TemporaryDirectory(prefix="deepsp_tests_")
    os.environ["DEEPSP_TESTS_BUILT"] = _built.name
os.environ.update(
    TORCHINDUCTOR_CACHE_DIR=os.environ["DEEPSP_TESTS_BUILT"],
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

_SLOW = Path(__file__).with_name("slow.txt")
_HEADER = """\
# Tests that `make test` leaves to `make test-all`, and the seconds that each took on two cores.
# Written by `pytest -m "not nightly" --write-slow MINUTES`: the longest ones, so many of them that
# the others take MINUTES.
"""
_seconds: dict[str, float] = {}
_left_out: dict[str, int] = {}


def pytest_addoption(parser):
    parser.addoption(
        "--write-slow",
        type=float,
        metavar="MINUTES",
        help="writes slow.txt: the longest tests of this run, but for MINUTES of others",
    )


def pytest_collection_modifyitems(items):
    """Marks the tests of slow.txt, and those that run nightly."""
    lines = [line for line in _SLOW.read_text().splitlines() if not line.startswith("#")]
    slow = {line.partition(" ")[2] for line in lines}
    together = {_family(item): set() for item in items}
    for item in items:
        together[_family(item)].add(_ranks(item))
    for item in items:
        if _name(item.nodeid) in slow:
            item.add_marker(pytest.mark.slow)
        if _runs_on_three(item, together):
            item.add_marker(pytest.mark.nightly)


def _ranks(item) -> int | None:
    ranks = item.callspec.params.get("ranks") if hasattr(item, "callspec") else None
    return ranks if isinstance(ranks, int) else None


def _family(item) -> tuple:
    """The same for tests that differ in their number of ranks alone."""
    if _ranks(item) is None:
        return (item.nodeid,)
    others = {name: value for name, value in item.callspec.params.items() if name != "ranks"}
    return item.nodeid.partition("[")[0], repr(others)


def _runs_on_three(item, together) -> bool:
    """On three ranks no part is as large as another, and one has both borders; what runs there and
    in a group of one runs on two and four nightly."""
    if item.path.stem in _EVERY_SIZE:
        return False
    return _ranks(item) in (2, 4) and 3 in together[_family(item)]


# How heads and rows are dealt depends on the number of ranks: some mistakes show on two only.
_EVERY_SIZE = {"test_exchange", "test_attention", "test_shares", "test_along_dim"}


def _name(nodeid: str) -> str:
    return nodeid.removeprefix("tests/")


def pytest_runtest_logreport(report):
    name = _name(report.nodeid)
    _seconds[name] = _seconds.get(name, 0) + report.duration


def pytest_deselected(items):
    for item in items:
        if item.get_closest_marker("slow"):
            name = item.path.name
            _left_out[name] = _left_out.get(name, 0) + 1


def pytest_terminal_summary(terminalreporter, config):
    """Says what this tier left out: nobody should take `make test` for everything."""
    if _left_out:
        terminalreporter.section("left out")
        files = ", ".join(f"{name} {count}" for name, count in sorted(_left_out.items()))
        count = sum(_left_out.values())
        terminalreporter.write_line(f"{count} tests, which `make test-all` runs: {files}")


def pytest_sessionfinish(session):
    harness.stop_all()
    if _built is not None:
        _built.cleanup()
    minutes = session.config.getoption("--write-slow")
    if minutes is not None and not hasattr(session.config, "workerinput"):
        left, slow = sum(_seconds.values()) - 60 * minutes, []
        for name, seconds in sorted(_seconds.items(), key=lambda item: -item[1]):
            if left <= 0:
                break
            left -= seconds
            slow.append((name, seconds))
        rows = sorted(f"{name} {seconds:.1f}" for name, seconds in slow)
        rows = [" ".join(reversed(row.rsplit(" ", 1))) for row in rows]
        _SLOW.write_text(_HEADER + "\n".join(rows) + "\n")


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
