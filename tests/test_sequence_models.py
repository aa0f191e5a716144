"""The compile pass on every rank, in lock step, in this process: models written for one device
against one process in float64, loss and every gradient; and what it refuses."""

import itertools
import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from constructs import CONSTRUCTS, FIXED, Construct, Together
from lockstep import BACKEND, alone, compare, on_two_and_three
from ordinary import ORDINARY, Encoder, Lost, Ordinary, Sorted, SortedRows
from zoo import (
    EQUAL_CASES,
    MODELS,
    REFUSED,
    REFUSED_CASES,
    VOCAB,
    Case,
    Changed,
    DrawnLate,
    Dropped,
    OwnDropout,
    batch,
    drawn_in_a_branch,
)

import deepsp
from deepsp.compile.sharding.tokens import Sequence


def _shallow(make, name):
    """One block proves what two do, but for one model."""
    model = make()
    if name != "pre-norm" and hasattr(model, "blocks"):
        del model.blocks[1:]
    return model


@pytest.mark.parametrize("name", MODELS)
def test_models(name):
    on_two_and_three(lambda: _shallow(MODELS[name], name), name=name)


@pytest.mark.parametrize("case", EQUAL_CASES)
def test_cases(case):
    on_two_and_three(lambda: Case(case), 14)
    if case == "first_used_without_gradients":
        compare(lambda: Case(case), (14,), ranks=2, kind="mean")


@pytest.mark.parametrize(
    "make, change, message",
    [
        *((Changed, *item) for item in REFUSED.items()),
        *((Case, *item) for item in REFUSED_CASES.items()),
    ],
)
def test_refused(make, change, message):
    torch._dynamo.reset()
    model = make(change).double()
    compiled = torch.compile(model, **BACKEND)
    with alone(2), pytest.raises(Exception) as caught:
        compiled(**deepsp.prepare_inputs(batch(12)))
    text = str(caught.value)
    assert re.search(message, text, re.DOTALL), text
    assert "zoo.py" in text and change in text, text


@pytest.mark.parametrize("case", ORDINARY)
def test_equal(case):
    def make():
        model = Ordinary(case)
        del model.blocks[1:]
        return model

    on_two_and_three(make)


@pytest.mark.parametrize("case", CONSTRUCTS)
def test_constructs(case):
    compare(lambda: Construct(case), (13,), ranks=3, static=True)


@pytest.mark.parametrize("cases", [CONSTRUCTS[n::4] for n in range(4)])
def test_constructs_of_any_length(cases):
    """Lengths are symbols: a second one that doesn't divide by the ranks shares the graph."""
    cases = [case for case in cases if case not in FIXED]
    assert compare(lambda: Together(*cases), (13, 17), ranks=2) == [1, 1]


@pytest.mark.parametrize("case, length, ranks", [("convolutions", 5, 6), ("cumulative", 2, 3)])
def test_short_sequences(case, length, ranks):
    """Fewer tokens than a convolution looks back over, and ranks without any."""

    def make():
        model = Ordinary(case)
        del model.blocks[:]
        return model

    assert compare(make, (length,), ranks=ranks) == [1]


def test_transformer_encoder():
    compare(Encoder, (12,), ranks=2)


@pytest.mark.parametrize(
    "model, message",
    [
        (Lost, "nothing in this graph would be sharded"),
        (Sorted, "sorted its own tokens"),
        (SortedRows, "sorted its own tokens"),
    ],
)
def test_refused_ordinary(model, message):
    torch._dynamo.reset()
    compiled = torch.compile(model().double(), **BACKEND)
    with alone(2), pytest.raises(Exception, match=message):
        compiled(**deepsp.prepare_inputs(batch(13)))


@pytest.mark.parametrize("kind", ["sum", "local", "mean"])
def test_gradients(kind):
    def check(name, ranks, static=True):
        make = MODELS[name]
        compare(lambda: _shallow(make, name), (13,), name, ranks, kind=kind, static=static)

    check("grouped", 4)
    if kind == "sum":  # test_models has the others
        return
    check("mean", 2, static=False)  # some weights see no tokens
    check("relative bias", 3)


def test_windows_of_tokens():
    """Settled by guards or by minima and maxima: each rank's tokens of every window."""
    for lens in itertools.product(range(4), repeat=3):
        ranks = torch.arange(3).repeat_interleave(torch.tensor(lens))
        for begin, end in itertools.combinations_with_replacement(range(sum(lens) + 1), 2):
            expected = tuple(ranks[begin:end].bincount(minlength=3).tolist())
            skipped = ranks[:begin].bincount(minlength=3).tolist()
            for holds in (bool, None):
                window, before = Sequence(lens).window(begin, end, holds)
                assert window.lens == expected, (lens, begin, end)
                for n, skip, many in zip(before, skipped, expected, strict=True):
                    assert many == 0 or n == skip, (lens, begin, end)


def test_lengths_share_a_graph():
    make = MODELS["pre-norm"]
    graphs = compare(lambda: _shallow(make, "one block"), (13, 17, 23, 12, 16, 24, 15), ranks=2)
    assert graphs == [1, 1, 1, 2, 2, 2, 2]  # those that divide, the others


@pytest.mark.parametrize(
    "drop, then, message",
    [
        (F.dropout, OwnDropout.apply, "a function inside of it draws random numbers"),
        (drawn_in_a_branch, None, "a function inside of it draws random numbers"),
        (DrawnLate.apply, None, "its backward draws random numbers"),
    ],
)
def test_refused_random_numbers(drop, then, message):
    torch._dynamo.reset()
    compiled = torch.compile(Dropped(drop, then).double(), options={"inner": "eager"}, **BACKEND)
    with alone(2), pytest.raises(Exception, match=message):
        compiled(**deepsp.prepare_inputs(batch(13)))


def test_wrong_gathers():
    """Whose gradients would be wrong."""
    with alone(2):
        _wrong_gathers()


def _wrong_gathers():
    from torch.distributed import _functional_collectives as collectives

    size, world = dist.get_world_size(), dist.group.WORLD

    def gather(x):
        return collectives.all_gather_tensor_autograd(x, 0, world)

    def also_alone(model, x):
        return gather(model.weight).sum() + model.weight.square().sum()

    def of_two(model, x):
        return gather(model.weight * model.scale).sum()

    def of_random(model, x):
        return gather(F.dropout(model.weight, 0.5)).sum()

    def summed(model, x):
        return collectives.all_reduce(model.scale, "sum", world).sum()

    def exchanged(model, x):
        rank, name = dist.get_rank(), world.group_name
        return torch.ops.deepsp.all_gather(
            model.weight, 0, [2] * size, "replicated", rank, name
        ).sum()

    model = torch.nn.Embedding(VOCAB, 4)
    model.weight_of_all = model.weight
    model.weight, model.scale = (torch.nn.Parameter(torch.ones(2, 4)) for _ in range(2))
    for wrong, why in (
        (also_alone, "gathered elsewhere; use the gathered tensor"),
        (of_two, "to gather a parameter's shard, cast or viewed, got"),
        (of_random, "to gather a parameter's shard, cast or viewed, got"),
        (summed, "communicates with other ranks of the sequence group"),
        (exchanged, "communicates with other ranks of the sequence group"),
    ):

        def loss(ids, wrong=wrong):
            x = F.embedding(ids, model.weight_of_all)
            return x.square().mean() + wrong(model, x)

        torch._dynamo.reset()
        ids = deepsp.prepare_inputs(batch(12))["ids"]
        with pytest.raises(Exception, match=why):
            torch.compile(loss, options={"inner": "aot_eager"}, **BACKEND)(ids)
