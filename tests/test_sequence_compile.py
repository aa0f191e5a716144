"""The compile pass: models written for one device, sharded; against one process in float64."""

import copy
import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import on_ranks
from zoo import MODELS, REFUSED, VOCAB, Changed

import deepsp

BACKEND = {"backend": "deepsp", "fullgraph": True}


def batch(length, name="", seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(n):
        return torch.randint(0, VOCAB, (2, n), generator=generator)

    ids, labels = draw(length), draw(length)
    labels[0, : length // 2] = -100  # a rank without a valid token in a row
    if name in ("mean", "masked mean", "first", "last"):
        labels = labels.abs()
        labels[labels == 100] = 3
    inputs = {"ids": ids, "labels": labels}
    if name == "encoder-decoder":
        inputs["source"] = draw(length + 4)
    return inputs


def total(out, labels):
    """A loss of what a model returns."""
    if out.dim() == 0:
        return out
    return F.cross_entropy(out[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def gradients_of(model, kind):
    """Full gradients, whatever each rank was asked to have."""
    result = {}
    for name, p in model.named_parameters():
        if p.grad is None:
            continue
        gradient = p.grad.clone()
        if kind != "sum":
            dist.all_reduce(gradient)
            gradient /= dist.get_world_size() if kind == "mean" else 1
        result[name] = gradient
    return result


def compare(make, lengths, name="", inner="aot_eager", kind="sum", tolerance=1e-9):
    torch._dynamo.reset()
    torch.manual_seed(0)
    reference = make().double()
    model = copy.deepcopy(reference)
    compiled = torch.compile(model, options={"inner": inner, "gradients": kind}, **BACKEND)
    for length in lengths:
        inputs = batch(length, name)
        expected = reference(**inputs)
        total(expected, inputs["labels"]).backward()
        out = compiled(**deepsp.prepare_inputs(inputs))
        total(out, inputs["labels"]).backward()
        torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
        mine = gradients_of(model, kind)
        for n, p in reference.named_parameters():
            assert (p.grad is None) == (n not in mine), n
            if p.grad is not None:
                scale = p.grad.abs().max().clamp(min=1e-6).item()
                torch.testing.assert_close(
                    mine[n], p.grad, rtol=0, atol=tolerance * scale, msg=lambda m, n=n: f"{n}: {m}"
                )
        model.zero_grad()
        reference.zero_grad()
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def _model(name, *args):
    return compare(MODELS[name], (13,), name, *args)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_models(name, ranks):
    on_ranks(ranks, _model, name)


def _refused(change):
    torch._dynamo.reset()
    model = Changed(change).double()
    compiled = torch.compile(model, **BACKEND)
    with pytest.raises(Exception) as caught:
        compiled(**deepsp.prepare_inputs(batch(12)))
    text = str(caught.value)
    assert re.search(REFUSED[change], text, re.DOTALL), text
    assert "zoo.py" in text and change in text, text


@pytest.mark.parametrize("change", REFUSED)
def test_refused(change):
    on_ranks(2, _refused, change)
