"""Full values that meet parts, what ops write, and ops that are plain, through the compile pass:
gradients equal one process's, or the pass refuses the graph."""

import pytest
import torch
from harness import on_ranks
from meetings import FULL, MEETS, OPS, WRITES, Op, Writing, make
from test_sequence_compile import compare

from deepsp.compile import CannotShard

# Tokens that a full value's part would have to take from other ranks.
REFUSED = {"index", "flipped", "slice", "pad", "cumsum"}
REFUSED_WRITES = {"foreach of tokens"}


def _all(models, lengths, kind, refused):
    for name, model in models:
        if refused(name):
            with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as error:
                compare(model, lengths, kind=kind)
            assert isinstance(error.value.inner_exception, CannotShard), name
        else:
            try:
                compare(model, lengths, kind=kind)
            except BaseException as error:
                error.add_note(str(name))
                raise


def _meetings(pairs, lengths, kind="sum"):
    models = [(pair, lambda pair=pair: make(*pair)) for pair in pairs]
    _all(models, lengths, kind, lambda pair: pair[1] in REFUSED and pair[0] != "weight")


def test_full_values_meet_parts():
    on_ranks(2, _meetings, [("mean", how) for how in MEETS], (13,))


@pytest.mark.parametrize("kind", ["local", "mean"])
def test_on_three_ranks(kind):
    hows = ("expand, cat", "repeat", "where", "written", "work on it", "heads")
    pairs = [(list(FULL)[i % len(FULL)], how) for i, how in enumerate(hows)]
    on_ranks(3, _meetings, pairs, (13, 14), kind)


def _writes():
    models = [(name, lambda name=name: Writing(name)) for name in WRITES]
    known = torch.ops.aten.mean.dim  # tables of torch and deepsp are by these objects
    _all(models, (13,), "sum", REFUSED_WRITES.__contains__)
    assert torch.ops.aten.mean.dim is known


def test_what_ops_write():
    on_ranks(2, _writes)


def _ops(names, lengths):
    models = [(name, lambda name=name: Op(name)) for name in names]
    _all(models, lengths, "sum", lambda name: False)


def test_plain_ops():
    on_ranks(2, _ops, list(OPS), (13,))
    on_ranks(3, _ops, ["max", "ties", "pooled by index", "cdist"], (14,))
    on_ranks(4, _ops, ["max", "ties", "pooled by index"], (3,))  # one rank has no token
