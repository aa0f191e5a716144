"""Full values that meet parts, what ops write, and ops that are plain, through the compile pass:
gradients equal one process's, or the pass refuses the graph."""

import pytest
import torch
from lockstep import compare
from meetings import FULL, MEETS, OPS, WRITES, Op, Writing, make

from deepsp.compile import CannotShard

# Tokens that a full value's part would have to take from other ranks.
REFUSED = {"slice"}


def _all(models, lengths, refused=lambda name: False, **ranks):
    for name, model in models:
        if refused(name):
            with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as error:
                compare(model, lengths, **ranks)
            assert isinstance(error.value.inner_exception, CannotShard), name
        else:
            try:
                compare(model, lengths, **ranks)
            except BaseException as error:
                error.add_note(str(name))
                raise


def _meetings(pairs, lengths, **ranks):
    models = [(pair, lambda pair=pair: make(*pair)) for pair in pairs]
    _all(models, lengths, lambda pair: pair[1] in REFUSED and pair[0] != "weight", **ranks)


def test_full_values_meet_parts():
    _meetings([("mean", how) for how in MEETS], (13,), ranks=2)


@pytest.mark.parametrize("kind", ["local", pytest.param("mean", marks=pytest.mark.nightly)])
def test_on_three_ranks(kind):
    hows = ("expand, cat", "repeat", "where", "written", "work on it", "heads")
    pairs = [(list(FULL)[i % len(FULL)], how) for i, how in enumerate(hows)]
    _meetings(pairs, (13, 14), kind=kind, ranks=3, static=True)


def test_what_ops_write():
    models = [(name, lambda name=name: Writing(name)) for name in WRITES]
    known = torch.ops.aten.mean.dim  # tables of torch and deepsp are by these objects
    _all(models, (13,), ranks=2, static=True)
    assert torch.ops.aten.mean.dim is known


def test_plain_ops():
    def check(names, length, ranks):
        models = [(name, lambda name=name: Op(name)) for name in names]
        _all(models, (length,), ranks=ranks, static=True)

    check(OPS, 13, 2)
    check(["max", "ties", "pooled by index", "cdist"], 14, 3)
    check(["max", "ties", "pooled by index"], 3, 4)  # one rank has no token
