"""transformers' architectures through the compile pass: equal to one process, or refused.

test_transformers.py has some of them in more ways, test_transformers_check.py ``register()``."""

import re

import pytest
from architectures import ARCHITECTURES, through_compile_pass
from harness import on_ranks
from lockstep import static_lengths

_RECURRENCE = r"a part of {}, a recurrence, .*register\(\), .*attn_implementation='deepsp'"
REFUSED = {
    "Llama, dynamic RoPE": "Data-dependent branching",  # also without deepsp, by Dynamo
    **dict.fromkeys(
        ("Qwen3-Next", "Qwen3.5", "OLMo Hybrid"), _RECURRENCE.format("torch_chunk_gated_delta_rule")
    ),
    "Kimi Linear": _RECURRENCE.format("chunk_kimi_delta_attention"),
    **dict.fromkeys(
        ("Bamba", "Falcon-H1", "Nemotron-H", "Granite 4", "Zamba2", "Mamba 2"),
        _RECURRENCE.format("mamba2_chunk_scan"),
    ),
    "Jamba": _RECURRENCE.format("mamba_selective_scan"),
}
# Attention by hand, two sequences, sorted tokens, patches, short convolutions, a recurrence.
_AT_EVERY_COMMIT = ["Gemma 2", "T5", "Mixtral", "ViT", "LFM2", "Mamba 2"]


def _check(name, refused):
    expected = REFUSED.get(name)
    assert (refused is None) == (expected is None), f"{name}: {refused}"
    assert expected is None or re.search(expected, refused), refused


@pytest.mark.parametrize("name", _AT_EVERY_COMMIT)
def test_three_ranks(name):
    with static_lengths():
        _check(name, through_compile_pass(name, 14, 3))


@pytest.mark.nightly
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_two_ranks(name):
    """All of them, of any length: in `make nightly`."""
    _check(name, through_compile_pass(name, 13, 2))


def _by_inductor():
    return through_compile_pass("GPT-J", 13, inner="inductor", n_layer=1)


@pytest.mark.nightly
def test_inductor():
    for refused in on_ranks(2, _by_inductor):
        _check("GPT-J", refused)
