"""Pipeline stages whose ranks share sequences, 2 x 2, against one process."""

import functools

import pytest
import torch
import torch.nn.functional as F
from harness import on_ranks
from reference import attention
from test_model import VOCABULARY, Model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import deepsp

TOTAL, ROWS, MICROBATCHES = 13, 6, 3


class First(nn.Module):
    """The embedding and a layer."""

    def __init__(self, model, seq_lens):
        super().__init__()
        self.embed, self.position = model.embed, model.position
        self.layers = model.layers[:1]
        self.seq_lens = seq_lens

    def forward(self, ids, positions):
        return self.layers[0](self.embed(ids) + self.position(positions), self.seq_lens)


class Last(nn.Module):
    """The other layer and the head."""

    def __init__(self, model, seq_lens):
        super().__init__()
        self.layers, self.head = nn.ModuleList([nn.Identity(), model.layers[1]]), model.head
        self.seq_lens = seq_lens

    def forward(self, x):
        return self.head(self.layers[1](x, self.seq_lens))


def batch_of(step, masked=False):
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, VOCABULARY, (ROWS, TOTAL), generator=generator)
    labels = ids.clone()
    if masked:  # other numbers of tokens that count in each microbatch, and on each rank
        labels[0, 3:] = labels[3, 8:] = labels[4] = -100
    return {"input_ids": ids, "labels": labels}


def _model(attend):
    torch.manual_seed(0)
    return Model(attend).double()


def make_stage(number, group, seq_lens, chunks=1):
    attend = deepsp.DistributedAttention(group=group, chunks=chunks)
    model = _model(
        lambda q, k, v, lens: attend(q, k, v, is_causal=True, enable_gqa=True, seq_lens=lens)
    )
    return (First, Last)[number](model, seq_lens)


def one_process(batches):
    """The loss of each step, and all gradients."""
    model = _model(lambda q, k, v, _: attention(q, k, v, is_causal=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    found = []
    for batch in batches:
        optimizer.zero_grad()
        logits = model(batch["input_ids"], torch.arange(TOTAL)[None])[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        found.append((loss.item(), gradients))
        optimizer.step()
    return found


def _pipelined(masked, chunks):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "sp"))
    group, number = mesh["sp"], mesh["pp"].get_local_rank()
    module = make_stage(number, group, [7, 6], chunks)
    batches = [batch_of(step, masked) for step in range(3)]
    loss_of = functools.partial(deepsp.cross_entropy, group=group)
    if masked:  # the mean over all microbatches, not a mean of their means
        count = (batches[0]["labels"][:, 1:] != -100).sum()

        def loss_of(logits, labels):
            return deepsp.cross_entropy(logits, labels, group, reduction="sum") / count

    schedule = Schedule1F1B(
        PipelineStage(module, number, 2, torch.device("cpu"), group=mesh["pp"].get_group()),
        MICROBATCHES,
        loss_of,
        scale_grads=not masked,
    )
    optimizer = torch.optim.SGD(module.parameters(), lr=0.3)
    for full, (loss, gradients) in zip(batches, one_process(batches), strict=True):
        batch, seq_lens = deepsp.shard_batch(full, group)
        assert seq_lens == module.seq_lens
        losses = []
        optimizer.zero_grad()
        if number == 0:
            positions = batch["position_ids"].expand(ROWS, -1)  # split by rows
            schedule.step(batch["input_ids"], positions)
        else:
            schedule.step(target=batch["shift_labels"], losses=losses)
        deepsp.sync_gradients(module, group)
        for name, p in module.named_parameters():
            torch.testing.assert_close(p.grad, gradients[name], rtol=1e-9, atol=1e-13, msg=name)
        optimizer.step()
        if number == 1:
            total = sum(x.item() for x in losses)
            assert total / (1 if masked else MICROBATCHES) == pytest.approx(loss, rel=1e-12)
    return [name for name, _ in module.named_parameters()]


@pytest.mark.parametrize(("masked", "chunks"), [(False, 1), (True, 2)])
def test_gradients_equal_one_process(masked, chunks):
    names = on_ranks(4, _pipelined, masked, chunks)
    everything = {name for name, _ in _model(None).named_parameters()}
    for sequence in (0, 1):  # every parameter is in a stage
        assert {*names[sequence], *names[2 + sequence]} == everything
