"""``torch.distributed.checkpoint``: what two ranks saved goes on training on one and on three."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from attentions import STACK_DIM, Stack
from harness import on_ranks
from reference import draw, lens_of
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import deepsp

TOTAL, STEPS, SAVED = 9, 5, 3


def _train(model, optimizer, steps):
    lens = None if model.kind == "plain" else lens_of("skewed", TOTAL, dist.get_world_size())
    for step in steps:
        x, wanted = draw(2, TOTAL, STACK_DIM, seed=step), draw(2, TOTAL, STACK_DIM, seed=100 + step)
        if lens is not None:
            x, wanted = (t.split(lens, 1)[dist.get_rank()] for t in (x, wanted))
        optimizer.zero_grad()
        (model(x, lens) - wanted).square().sum().backward()
        if lens is not None:
            deepsp.sync_gradients(model)
        optimizer.step()


def _made(kind):
    model = Stack(kind)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def _state(model, optimizer):
    weights, state = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": state}


def _save(path, kind):
    model, optimizer = _made(kind)
    _train(model, optimizer, range(SAVED))
    dcp.save(_state(model, optimizer), checkpoint_id=path)


def _load(path, kind):
    reference, its = _made("plain")
    _train(reference, its, range(STEPS))
    model, optimizer = _made(kind)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()  # what isn't loaded stays so
    state = _state(model, optimizer)
    dcp.load(state, checkpoint_id=path)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    _train(model, optimizer, range(SAVED, STEPS))
    assert list(model.state_dict()) == list(reference.state_dict())
    # A key's bias has a gradient of zero, and Adam divides what rounding makes of it by 1e-8.
    torch.testing.assert_close(model.state_dict(), reference.state_dict(), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("kind", ["module", "layer"])
def test_other_numbers_of_ranks(kind, tmp_path):
    path = str(tmp_path / "checkpoint")
    on_ranks(2, _save, path, kind)
    for ranks in (1, 3):
        on_ranks(ranks, _load, path, kind)
    on_ranks(1, _load, path, "plain")
