"""Random cases of the doors, against one process. DEEPSP_DOORS_SEED=n runs others, from n on."""

import os
import time

import pytest
from cases import difference, draw, run
from harness import on_ranks

_FIRST = int(os.environ.get("DEEPSP_DOORS_SEED", "0"))
_TODAY = _FIRST or 1000 * int(time.time() // 86400)  # the first seed of a night


def _check(case):
    (one,) = on_ranks(1, run, case, 1, apart="doors")
    for rank, mine in enumerate(on_ranks(case.world, run, case, case.size, apart="doors")):
        assert not (wrong := difference(case, mine, one)), f"rank {rank} of {case}: {wrong}"


@pytest.mark.parametrize("number", range(12))
def test_doors(number):
    _check(draw(_FIRST + number))


@pytest.mark.nightly
@pytest.mark.parametrize("number", range(200))
def test_doors_of_a_night(number):
    _check(draw(_TODAY + number))


_FOUND = {
    "weights of labels": 559,
    "positions of deals": 118,
    "router logits with smoothing": 215,
    "balance of groups": 375,
    "rows of streams": 23,
}
"""Faults, and the seed of a case that finds each."""


@pytest.mark.parametrize("fault", _FOUND)
def test_finds_faults(fault):
    case = draw(_FOUND[fault])
    (one,) = on_ranks(1, run, case, 1, apart="doors")
    mine = on_ranks(case.world, run, case, case.size, fault, apart="doors")
    assert all(difference(case, x, one) for x in mine)
