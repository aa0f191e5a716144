"""Pipeline stages whose ranks share sequences, 2 x 2, against one process."""

import functools

import pytest
import torch
from harness import on_ranks
from pipelined import MICROBATCHES, ROWS, draw_batch, make_model, make_stage, train_in_one_process
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import deepsp


def _pipelined(masked, chunks):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "sp"))
    group, number = mesh["sp"], mesh["pp"].get_local_rank()
    module = make_stage(number, group, [7, 6], chunks)
    batches = [draw_batch(step, masked) for step in range(3)]
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
    for full, (loss, gradients) in zip(batches, train_in_one_process(batches), strict=True):
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
    everything = {name for name, _ in make_model(None).named_parameters()}
    for sequence in (0, 1):  # every parameter is in a stage
        assert {*names[sequence], *names[2 + sequence]} == everything
