"""A transformer trained on a sharded sequence, compared with the same training in one process."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import on_ranks, stop
from reference import attention
from torch import nn

import deepsp

VOCABULARY, HIDDEN, HEADS, KV_HEADS, DIM, TOTAL, STEPS = 31, 48, 6, 2, 8, 37, 20


class Layer(nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.attend = attend
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv = nn.Linear(HIDDEN, (HEADS + 2 * KV_HEADS) * DIM)
        self.out = nn.Linear(HEADS * DIM, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x, seq_lens):
        qkv = self.qkv(self.norm1(x)).unflatten(2, (-1, DIM))
        q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], 2)
        x = x + self.out(self.attend(q, k, v, seq_lens).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.position = nn.Embedding(TOTAL, HIDDEN)
        self.layers = nn.ModuleList([Layer(attend) for _ in range(2)])
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, ids, positions, seq_lens=None):
        x = self.embed(ids) + self.position(positions)
        for layer in self.layers:
            x = layer(x, seq_lens)
        return self.head(x)


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
