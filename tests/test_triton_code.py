"""Inductor's code for GPUs, generated where there is none: the compile pass, on every rank."""

import json

import pytest
from triton_code import build_device, generate
from zoo import MODELS


@pytest.fixture(scope="module")
def device(tmp_path_factory):
    return build_device(tmp_path_factory.mktemp("device"))


def _check(device, ranks, cases):
    """Every rank has kernels of a forward and a backward graph for each length."""
    for case, kernels in generate(device, ranks, cases).items():
        lengths = json.loads(case.partition(": ")[2])[1]
        assert isinstance(kernels, list), f"{case}: {kernels}"
        assert len(kernels) == 2 * len(lengths) and all(kernels), f"{case}: {kernels}"


def test_two_ranks(device):
    """The loss cuts tokens at the ranks' borders; lengths are symbols."""
    _check(device, 2, [("pre-norm", [13], "bfloat16")])


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_models(device, name, ranks):
    _check(device, ranks, [(name, [13], "bfloat16")])
