"""What ordinary models do, through the compile pass: equal to one process, or refused."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from constructs import Together
from harness import on_ranks
from lockstep import BACKEND, compare
from ordinary import Ordinary
from torch import nn
from zoo import DIM, LM, batch

import deepsp
from deepsp.ranks import randomness

_BY_INDUCTOR = [pytest.param("by_hand", marks=pytest.mark.nightly), "mixture", "function"]


def _inductor(case):
    compare(lambda: Ordinary(case), (13,), inner="inductor")


@pytest.mark.parametrize("case", _BY_INDUCTOR)
def test_by_inductor(case):
    on_ranks(2, _inductor, case)


def _moves():
    cases = "smear", "ends", "every_second", "scan", "two_tokens", "number_checked", "batch_norm"
    again = "smear", "rolled", "flipped", "whisper", "best"
    compare(lambda: Together(*cases, checkpoints=again), (13,), inner="inductor")


def test_tokens_move_under_inductor():
    """No rank's compiler drops an exchange of which the rank receives nothing, or takes two for
    one, of zeros on this rank."""
    on_ranks(3, _moves)


def _traced(case, lengths):
    def make():
        model = Ordinary(case)
        del model.blocks[:]
        return model

    assert compare(make, lengths, inner="aot_eager") == [1, 2]


@pytest.mark.parametrize(("case", "lengths"), [("convolutions", (25, 22)), ("extremes", (9, 6))])
def test_fewer_tokens_on_real_ranks(case, lengths):
    """The second length leaves some ranks fewer tokens than a convolution looks back over, or none
    for a maximum: all of them compile once more."""
    on_ranks(4, _traced, case, lengths)


# ------------------------------------------------------------------ random numbers, in place


class Random(LM):
    """timm's drop path, noise and a straight-through choice, on what every rank has whole."""

    def forward(self, ids, labels):
        x = self.embed(ids)
        keep = x.new_empty((x.size(0), 1, 1)).bernoulli_(0.5)
        keep.div_(0.5)
        noise = torch.zeros(DIM, dtype=x.dtype).normal_()
        choice = F.gumbel_softmax(self.norm.weight, hard=True)
        x = self.norm(x * keep + noise + x * choice)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def _random():
    """Ranks that are seeded differently compute with the first one's numbers."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    reference = Random().double()
    model = copy.deepcopy(reference)
    inputs = batch(13)
    torch.manual_seed(7)
    with randomness._Fork(0):
        expected = reference(**inputs)
    expected.backward()
    torch.manual_seed(7 + dist.get_rank())
    out = torch.compile(model, options={"inner": "eager"}, **BACKEND)(
        **deepsp.prepare_inputs(inputs)
    )
    out.backward()
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=0)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        if q.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=1e-12)


def test_random_numbers_in_place():
    on_ranks(2, _random)


# ------------------------------------------------------------------------------- refused


class Returning(LM):
    """Keys and values among the outputs, as a cache has them."""

    def forward(self, ids, labels):
        x = self.embed(ids)
        k = x.unflatten(-1, (4, -1)).transpose(1, 2)
        y = F.scaled_dot_product_attention(k, k, k, is_causal=True)
        logits = self.head(y.transpose(1, 2).flatten(2))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), k[:, :, -4:]


class Printing(LM):
    """A graph break."""

    def forward(self, ids, labels):
        x = self.embed(ids)
        print(end="")
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def _broken():
    torch._dynamo.reset()
    torch.manual_seed(0)
    compiled = torch.compile(Printing().double(), backend="deepsp", options={"inner": "eager"})
    with pytest.raises(Exception, match=r"A graph break cut the model before this.*a print"):
        compiled(**deepsp.prepare_inputs(batch(13)))


def test_a_graph_break_is_named():
    on_ranks(2, _broken)


def _cache():
    """A model returns keys that nobody reads in training; who does is told."""
    for inner in ("eager", "aot_eager"):
        compare(lambda: First(Returning), (13,), inner=inner)
        compiled = torch.compile(Returning().double(), options={"inner": inner}, **BACKEND)
        _, keys = compiled(**deepsp.prepare_inputs(batch(13)))
        assert "aren't gathered" in repr(keys) and not keys.requires_grad
        for use in (lambda x: x + 1, lambda x: x.shape, torch.relu, lambda x: x[0]):
            with pytest.raises(ValueError, match="use_cache = False in the config that the model"):
                use(keys)


class First(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.model = make()

    def forward(self, **inputs):
        return self.model(**inputs)[0]


def test_a_cache():
    on_ranks(2, _cache)


# -------------------------------------------------------------- compilation succeeds together


def _of_one_rank():
    """One rank's compiler is slow, or fails, forward or backward: none runs what was compiled."""
    import datetime
    import time

    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.registry import lookup_backend

    rank = dist.get_rank()
    group = dist.new_group(timeout=datetime.timedelta(seconds=2))

    def slow(gm, inputs):
        time.sleep(5 * rank)
        return lookup_backend("aot_eager")(gm, inputs)

    def broken(gm, inputs):
        if rank == 0:
            raise IndexError("pop from empty list")
        return gm.forward

    def broken_backward(gm, inputs):
        def compile_(graph, inputs):
            return graph.forward

        def fail(graph, inputs):
            if rank == 1:
                raise IndexError("pop from empty list")
            return graph.forward

        return aot_autograd(fw_compiler=compile_, bw_compiler=fail)(gm, inputs)

    def run(inner):
        torch._dynamo.reset()
        torch.manual_seed(0)
        options = {"inner": inner, "group": group}
        model = torch.compile(LM().double(), options=options, **BACKEND)
        return model(**deepsp.prepare_inputs(batch(13)))

    run(slow).backward()
    for inner, failing in ((broken, 0), (broken_backward, 1)):
        mine = "pop from empty list"
        others = f"rank {failing} of the group couldn't compile this graph.*IndexError: {mine}"
        with pytest.raises(Exception, match=mine if rank == failing else others):
            run(inner)


def test_compilation_succeeds_together():
    on_ranks(2, _of_one_rank)


def _different(what):
    torch._dynamo.reset()
    torch.manual_seed(dist.get_rank() == 1 and what == "weight")
    model = LM().double()
    inputs = batch(13, seed=int(dist.get_rank() == 1 and what == "labels"))
    inputs["ids"] = batch(13)["ids"]
    compiled = torch.compile(model, options={"inner": "eager"}, **BACKEND)
    with pytest.raises(
        Exception,
        match=rf"expected .*{what}.* to be the same on every rank of the group.* ranks . and .;",
    ):
        compiled(**deepsp.prepare_inputs(inputs))


def _later():
    torch._dynamo.reset()
    torch.manual_seed(0)
    compiled = torch.compile(LM().double(), options={"inner": "eager"}, **BACKEND)
    for _ in range(2):
        compiled(**deepsp.prepare_inputs(batch(13)))
    inputs = {**batch(13), "labels": batch(13, seed=dist.get_rank())["labels"]}
    with pytest.raises(ValueError, match="expected labels, a full tensor, to be the same"):
        compiled(**deepsp.prepare_inputs(inputs))
    compiled(**deepsp.prepare_inputs(batch(13)))


def test_every_batch_is_compared():
    on_ranks(2, _later)


@pytest.mark.parametrize("what", ["weight", "labels"])
def test_ranks_that_compile_different_values(what):
    on_ranks(3, _different, what)
