"""transformers' models that choose keys by an indexer, over a sharded sequence, against one process:
unmodified models in float64, loss and every gradient."""

import copy
import functools
import itertools

import indexed
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from float64 import in_float64
from harness import on_ranks
from torch.utils._python_dispatch import TorchDispatchMode

import deepsp
from deepsp.integrations.transformers import indexers, register

KINDS = ["plain", "left", "right", "packed"]
HYBRIDS = ["glm5_next", "qwen4_exp_text"]
ONE_DOCUMENT = [*indexed.BLOCKS, "glm5_next"]
"""Models whose rows have one document each."""


def _set(model, name, attention):
    model.set_attn_implementation(attention if name in indexed.TEXT else {"text_config": attention})


def _shards(name, batch):
    at = "decoder" if name in indexed.AROUND else "inputs"
    return deepsp.shard_batch(batch, shard_at=at)[0]


def _alone(model, name, batch):
    """The loss in one process; documents are apart in the row, or, where its recurrences or blocks
    don't know them, alone."""
    labels = indexed.shifted(batch)
    inputs = {n: x for n, x in batch.items() if n != "labels"}
    if "position_ids" in batch and name in HYBRIDS:
        rows = [
            torch.cat([model(ids[None, a:b]).logits for a, b in itertools.pairwise([0, *ends])], 1)
            for ids, ends in zip(batch["input_ids"], indexed.ENDS, strict=True)
        ]
        logits = torch.cat(rows)
    else:
        logits = model(**inputs).logits
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _gradients(model):
    found = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return found


def _compare(kind, loss, model, expected):
    wanted, gradients = expected
    assert abs(loss.item() - wanted) < 1e-12 * wanted, (kind, loss.item(), wanted)
    for n, found in _gradients(model).items():
        g = gradients[n]
        assert (found is None) == (g is None), (kind, n)
        if g is not None:
            atol = 1e-10 * max(g.abs().max().item(), 1e-12)
            torch.testing.assert_close(
                found, g, rtol=0, atol=atol, msg=lambda m, n=n: f"{kind}, {n}: {m}"
            )


def _sharded(model, name, batch):
    loss = model(**_shards(name, batch)).loss
    loss.backward()
    deepsp.sync_gradients(model)
    return loss


def _equals(name):
    in_float64()
    register()
    model = indexed.make(name)
    before = model.get_decoder().config._attn_implementation
    expected = {}
    for kind in KINDS:
        if kind == "packed" and name in ONE_DOCUMENT:
            continue
        loss = _alone(model, name, indexed.batch(kind))
        loss.backward()
        expected[kind] = loss.item(), _gradients(model)
    _set(model, name, "deepsp")
    for kind in expected:
        _compare(kind, _sharded(model, name, indexed.batch(kind)), model, expected[kind])
    if name in ONE_DOCUMENT:
        with pytest.raises(ValueError, match="expected one document in each row"):
            model(**_shards(name, indexed.batch("packed")))

    # Some queries at a time, and checkpoints of both kinds.
    most = indexers.ENTRIES
    indexers.ENTRIES = 5 * indexed.ROWS * 2 * indexed.LENGTH
    _compare("some", _sharded(model, name, indexed.batch("left")), model, expected["left"])
    # MistralLarge4 itself fails with the reentrant kind.
    for reentrant in (False,) if name == "mistral_large4" else (False, True):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        loss = _sharded(model, name, indexed.batch("plain"))
        _compare(f"checkpoints, {reentrant}", loss, model, expected["plain"])
    model.gradient_checkpointing_disable()
    indexers.ENTRIES = most

    # A copy has weights of its own, and the model works as before with its own attention.
    assert not any("forward" in vars(m) for m in model.modules())
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(1e-3)
    _set(other, name, before)
    wanted = _alone(other, name, indexed.batch("plain")).item()
    _set(other, name, "deepsp")
    loss = _sharded(other, name, indexed.batch("plain")).item()
    assert abs(loss - wanted) < 1e-12 * wanted
    _set(model, name, before)
    model.eval()
    with torch.no_grad():
        loss = _alone(model, name, indexed.batch("plain")).item()
        assert abs(loss - expected["plain"][0]) < 1e-12 * loss
        ids = indexed.batch("plain")["input_ids"][:1, :9]
        grown = model.generate(ids, max_new_tokens=2, do_sample=False, use_cache=True)
        again = model.generate(ids, max_new_tokens=2, do_sample=False, use_cache=False)
    assert torch.equal(grown, again)


@pytest.mark.parametrize("name", indexed.NAMES)
def test_equals_one_process(name):
    on_ranks(2, _equals, name, apart="hybrid")


_AT_EVERY_COMMIT = ["deepseek_v32", "deepseek_v4", "minimax_m3_vl_text", "glm5_next"]


@pytest.mark.parametrize(
    "name",
    [
        n if n in _AT_EVERY_COMMIT else pytest.param(n, marks=pytest.mark.nightly)
        for n in indexed.NAMES
    ],
)
def test_three_ranks(name):
    on_ranks(3, _equals, name, apart="hybrid")


@pytest.mark.nightly
@pytest.mark.parametrize("name", indexed.NAMES)
def test_five_ranks(name):
    on_ranks(5, _equals, name, apart="hybrid")
