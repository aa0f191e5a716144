"""The recipe for a million tokens: its small run against one process, and its plan."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[1] / "examples/million.py"
sys.path.append(str(EXAMPLE.parent))

from side_by_side import run  # noqa: E402

UNDER_FSDP = Path(__file__).parent / "lib/million_under_fsdp.py"


def _printed(*arguments):
    command = [sys.executable, EXAMPLE, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_small():
    said = _printed("--small", "--seq-len", "1001", "--steps", "2", "--keep-attention")
    assert "the same to rounding" in said
    losses = re.findall(r"([\d.]+) / ([\d.]+)", said)
    assert len(losses) == 4 and all(float(a) > 1 for a, _ in losses)


@pytest.mark.nightly
def test_small_under_fsdp2():
    """All levers and FSDP2, against plain TRL in one process."""
    small = ["--small", "--seq-len", "1001", "--steps", "2"]
    logs = [run(EXAMPLE, 1, small), run(UNDER_FSDP, 2, [*small, "--keep-attention"])]
    assert len(logs[0]) == 2
    for one, sharded in zip(*logs, strict=True):
        for key in ("loss", "grad_norm", "num_tokens"):
            assert sharded[key] == pytest.approx(one[key], rel=1e-4)


def test_plan():
    """Each lever that is left out costs memory."""
    said = _printed("--plan", "--seq-len", str(2**15), "--ranks", "4")
    totals = dict(re.findall(r"^  (\S.*?) +([\d.]+) GiB(?:: too much)?, in ", said, re.MULTILINE))
    assert len(totals) == 6
    all_on = float(totals["all levers"])
    assert all(float(total) >= 0.98 * all_on for total in totals.values())
    assert float(totals["--without chunked-loss"]) > all_on + 1
    assert float(totals["--without checkpoints offload"]) > all_on + 10
    parts = re.findall(r"^  (?!all|--)(\S.*?) +([\d.]+) GiB$", said, re.MULTILINE)
    assert abs(sum(float(x) for _, x in parts) - float(totals["all levers"])) < 0.5
    assert re.search(r"^  step +[\d.]+ +[\d.]+$", said, re.MULTILINE)
