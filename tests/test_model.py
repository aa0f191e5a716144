"""A transformer trained on a sharded sequence, compared with the same training in one process."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import on_ranks, stop
from models import TOTAL, VOCABULARY, Model
from reference import attention

import deepsp

STEPS = 20


def _data(step):
    ids = torch.randint(0, VOCABULARY, (2, TOTAL), generator=torch.Generator().manual_seed(step))
    # Two documents in each row: they don't learn from each other.
    positions = torch.cat([torch.arange(20), torch.arange(TOTAL - 20)]).expand(2, -1)
    return {"input_ids": ids, "labels": ids.clone(), "position_ids": positions}


def _train(model, step_loss, sync):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = step_loss(model, _data(step))
        loss.backward()
        sync(model)
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: p.detach().clone() for name, p in model.named_parameters()}


def _reference_loss(model, batch):
    logits = model(batch["input_ids"], batch["position_ids"])
    labels = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    labels[:, 19] = -100
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _sharded_loss(model, batch):
    batch, lens = deepsp.shard_batch(batch)
    logits = model(batch["input_ids"], batch["position_ids"], lens)
    return deepsp.cross_entropy(logits, batch["shift_labels"])


def _same(chunks, compiled):
    torch.manual_seed(0)
    reference = Model(lambda q, k, v, _: attention(q, k, v, is_causal=True)).double()
    expected_losses, expected = _train(reference, _reference_loss, lambda model: None)
    module = deepsp.DistributedAttention(chunks=chunks)
    torch.manual_seed(0)
    model = Model(
        lambda q, k, v, lens: module(q, k, v, is_causal=True, enable_gqa=True, seq_lens=lens)
    ).double()
    if compiled:
        torch._dynamo.reset()
        # As Inductor has it by default, which conftest.py changes: with vector instructions.
        torch._inductor.config.cpp.vec_isa_ok = None
        model.compile(fullgraph=True)
    losses, parameters = _train(model, _sharded_loss, deepsp.sync_gradients)
    torch.testing.assert_close(losses, expected_losses, rtol=1e-10, atol=0)
    assert losses[-1] < losses[0]
    for name, value in expected.items():
        torch.testing.assert_close(parameters[name], value, rtol=1e-7, atol=1e-9)
        everyone = value.clone()
        dist.broadcast(everyone.copy_(parameters[name]), 0)
        torch.testing.assert_close(parameters[name], everyone, rtol=0, atol=0)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("chunks", [1, 2])
def test_training_equals_one_process(ranks, chunks):
    on_ranks(ranks, _same, chunks, False)


def test_training_compiled_equals_one_process():
    on_ranks(2, _same, 1, True, apart="vectorized")
    stop("vectorized")
