"""The soak, for a few seconds: that it runs, and that it sees what is wrong."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import soak

pytestmark = pytest.mark.nightly


def _soak(*args):
    return subprocess.run(
        [sys.executable, soak.__file__, "--minutes", "0.05", *args], capture_output=True, text=True
    )


def test_soak():
    done = _soak("--pool-mib", "4")
    assert done.returncode == 0 and ": all right" in done.stdout, done.stderr[-3000:]
    assert re.search(r"\d killed: the others noticed within .* and went on", done.stdout)


def test_growth_is_an_error():
    done = _soak("--ranks", "1", "--memory-mib", "-1000", "--kills", "0")
    assert done.returncode == 1 and "keeps growing: heap, MiB, resident, MiB" in done.stderr, (
        done.stderr[-3000:]
    )


@pytest.mark.parametrize("number", [7, 1, 0], ids=["auto", "messages", "machines"])
def test_a_kill(number):
    assert soak.kill(number) < soak.TIMEOUT + soak.BUSY
