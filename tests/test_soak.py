"""The soak, for a few seconds: that it runs, and that it sees what is wrong."""

import subprocess
import sys
from pathlib import Path

SOAK = Path(__file__).parents[1] / "benchmarks" / "soak.py"


def _soak(*args):
    return subprocess.run(
        [sys.executable, str(SOAK), "--minutes", "0.05", *args], capture_output=True, text=True
    )


def test_soak():
    done = _soak("--pool-mib", "4")
    assert done.returncode == 0 and ": all right" in done.stdout, done.stderr[-3000:]


def test_growth_is_an_error():
    done = _soak("--ranks", "1", "--memory-mib", "-1000")
    assert done.returncode == 1 and "keeps growing: heap, MiB, resident, MiB" in done.stderr, (
        done.stderr[-3000:]
    )
