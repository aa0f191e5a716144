"""transformers' architectures through the compile pass: equal to one process, or refused.

test_transformers.py has some of them in more ways, test_transformers_check.py ``register()``."""

import re

import pytest
from architectures import ARCHITECTURES, through_compile_pass
from harness import on_ranks

REFUSED = {
    "Llama, dynamic RoPE": "Data-dependent branching",  # also without deepsp, by Dynamo
}
_ELSEWHERE = ["Llama", "Qwen3", "Mistral", "GPT-2", "Gemma"]  # in test_transformers.py
# Attention by hand, two sequences, sorted tokens, patches.
_ON_THREE = ["Gemma 2", "T5", "Mixtral", "ViT"]
_BY_INDUCTOR = {"GPT-J": {"n_layer": 1}}


def _compared(name, length, inner, more):
    return through_compile_pass(name, length, inner, **more)


def _check(ranks, name, length, inner="eager", more=None):
    for refused in on_ranks(ranks, _compared, name, length, inner, more or {}):
        expected = REFUSED.get(name)
        assert (refused is None) == (expected is None), f"{name}: {refused}"
        assert expected is None or re.search(expected, refused), refused


@pytest.mark.parametrize("name", [n for n in ARCHITECTURES if n not in _ELSEWHERE])
def test_two_ranks(name):
    _check(2, name, 13)


@pytest.mark.parametrize("name", _ON_THREE)
def test_three_ranks(name):
    _check(3, name, 14)


@pytest.mark.parametrize("name", _BY_INDUCTOR)
def test_inductor(name):
    _check(2, name, 13, "inductor", _BY_INDUCTOR[name])
