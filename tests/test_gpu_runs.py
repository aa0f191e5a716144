"""How the tests that need a GPU are run (tests/gpu): a failure hides no other test."""

import os
import sys
import time
from pathlib import Path

import torch.distributed as dist

sys.path.append(str(Path(__file__).parent / "gpu"))

from processes import Ranks, Run, environment_of


def fine():
    return [f"of {dist.get_world_size()}"]


def raises():
    raise ValueError("on all ranks")


def raises_on_one():
    if dist.get_rank() == 1:
        raise ValueError("on rank 1")
    dist.barrier()  # where rank 0 waits for it


def dies():
    os._exit(3)


def hangs():
    time.sleep(600)


def _results(size, *tests, **options):
    lines = []
    deadline = time.monotonic() + options.pop("seconds", 60)
    ranks = Ranks(Run("gloo", size, False, "auto"), lines.append, deadline, **options)
    ranks.all(tests)
    return ranks.passed, ranks.failed, "\n".join(lines)


def test_ranks_that_share_a_gpu():
    """NCCL takes ranks on one GPU for ranks of several hosts, and only those."""
    shared = [environment_of(rank, Run("nccl", 2, False, "mapped"), 1) for rank in (0, 1)]
    assert [x.pop("NCCL_HOSTID") for x in shared] == ["host0", "host1"] and shared[0] == shared[1]
    assert shared[0]["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] == "1"
    for backend, devices in (("nccl", 2), ("gloo", 1)):
        alone = environment_of(1, Run(backend, 2, False, "auto"), devices)
        assert set(alone) == {"DEEPSP_TEST_COLLECTIVES", "DEEPSP_TRANSPORT"}


def test_failures_hide_nothing():
    passed, failed, said = _results(1, raises, fine, dies, fine, grace=2)
    assert (passed, failed) == (2, 2), said
    assert "ValueError: on all ranks" in said and "    of 1" in said
    assert "FAILED gloo x 1, dies: no answer from ranks [0]" in said

    passed, failed, said = _results(2, fine, raises_on_one, fine, grace=2)
    assert (passed, failed) == (4, 2), said
    assert "FAILED gloo x 2, rank 1: raises_on_one" in said and "barrier" in said

    passed, failed, said = _results(1, hangs, fine, seconds=4)
    assert (passed, failed) == (0, 2), said
    assert "hangs: no answer from ranks [0]" in said and "fine: no time was left" in said
