"""The corpus of models through the compile pass: equal to one process, or refused.

test_transformers.py has some of them in more ways, test_transformers_check.py ``register()``."""

import re
from pathlib import Path

import corpus
import pytest
from architectures import ARCHITECTURES, through_compile_pass
from harness import on_ranks
from lockstep import static_lengths

REFUSED = {"Llama, dynamic RoPE": "Data-dependent branching"}  # also without deepsp, by Dynamo
# Attention by hand, two sequences, sorted tokens, patches, short convolutions; a recurrence by
# state (by heads: test_hybrid.py).
_AT_EVERY_COMMIT = [(n, 3) for n in ("Gemma 2", "T5", "Mixtral", "ViT", "LFM2")] + [("Mamba 2", 5)]
_NIGHTLY = [("Qwen3-Next", 5), ("Jamba", 3)]


def _check(name, refused):
    expected = REFUSED.get(name)
    assert (refused is None) == (expected is None), f"{name}: {refused}"
    assert expected is None or re.search(expected, refused), refused


@pytest.mark.parametrize(
    ("name", "ranks"),
    _AT_EVERY_COMMIT + [pytest.param(*x, marks=pytest.mark.nightly) for x in _NIGHTLY],
)
def test_more_ranks(name, ranks):
    with static_lengths():
        _check(name, through_compile_pass(name, 14, ranks))


@pytest.mark.nightly
def test_states_are_refused():
    refused = through_compile_pass("Qwen3.5", 14, 2, use_cache=True)
    assert re.search("torch_chunk_gated_delta_rule .*returns a state.* use_cache = False", refused)


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


@pytest.mark.nightly
@pytest.mark.timeout(7200)
def test_corpus():
    """The others that are installed, on three ranks: as the table says."""
    table = (Path(__file__).parent.parent / "docs" / "architectures.md").read_text()
    expected = dict(re.findall(r"^\| (.+?) \| (?:equal / )?(equal|refused)", table, re.MULTILINE))
    wrong = {}
    for name in corpus.entries().keys() - ARCHITECTURES.keys():
        try:
            refused = corpus.through_compile_pass(name, 14, static=True, ranks=3)
        except Exception as error:
            wrong[name] = str(error)
        else:
            if ("refused" if refused else "equal") != expected.get(name):
                wrong[name] = refused or "equal"
    assert not wrong
