"""The three forms of attention under what training does around them: checkpoints, accumulation,
autocast, saved tensors elsewhere. Against one process: the loss and every gradient."""

import pytest
import torch
import torch.distributed as dist
from attentions import STACK_DIM, Stack
from harness import on_ranks
from reference import draw, lens_of
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import deepsp

KINDS = ["function", "module", "layer"]
CLOSE = {"rtol": 1e-10, "atol": 1e-10}


def _loss(y, seed, lens=None):
    total = y.size(1) if lens is None else sum(lens)
    grad = draw(y.size(0), total, STACK_DIM, seed=seed).to(y.dtype)
    return (y * (grad if lens is None else grad.split(lens, 1)[dist.get_rank()])).sum()


def _lens(total):
    return lens_of("skewed", total, dist.get_world_size())


def _mine(x, lens):
    return x.split(lens, 1)[dist.get_rank()].clone().requires_grad_()


def _expected(totals, dtype=torch.float64):
    """Of one process: losses, the gradients of each x, and those of the parameters."""
    model = Stack("plain", dtype).double()
    xs = [draw(2, total, STACK_DIM, dtype=dtype).double().requires_grad_() for total in totals]
    losses = [_loss(model(x), seed) for seed, x in enumerate(xs)]
    sum(losses).backward()
    return [x.detach() for x in losses], [x.grad for x in xs], [p.grad for p in model.parameters()]


def _compare(model, losses, xs, expected):
    for loss, of in zip(losses, expected[0], strict=True):
        loss = loss.detach().clone()
        dist.all_reduce(loss)
        torch.testing.assert_close(loss, of, **CLOSE)
    for x, grad in zip(xs, expected[1], strict=True):
        torch.testing.assert_close(x.grad, _mine(grad, _lens(grad.size(1))).detach(), **CLOSE)
    deepsp.sync_gradients(model)
    for (name, p), grad in zip(model.named_parameters(), expected[2], strict=True):
        torch.testing.assert_close(p.grad, grad, **CLOSE, msg=lambda m, n=name: f"{n}: {m}")


def _checkpointed(kind, reentrant):
    model, lens = Stack(kind), _lens(9)
    x = _mine(draw(2, 9, STACK_DIM), lens)
    loss = _loss(model(x, lens, reentrant), 0, lens)
    loss.backward()
    _compare(model, [loss], [x], _expected([9]))


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_checkpointing(kind, reentrant, ranks):
    on_ranks(ranks, _checkpointed, kind, reentrant)


def _accumulated(kind):
    """Two batches, of other lengths, before one sum over the ranks; the second one's forward is
    before the first one's backward."""
    model = Stack(kind)
    totals = [7, 9]
    xs = [_mine(draw(2, total, STACK_DIM), _lens(total)) for total in totals]
    losses = [
        _loss(model(x, _lens(total)), seed, _lens(total))
        for seed, (x, total) in enumerate(zip(xs, totals, strict=True))
    ]
    for loss in losses:
        loss.backward()
    _compare(model, losses, xs, _expected(totals))


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_accumulation(kind, ranks):
    on_ranks(ranks, _accumulated, kind)


def _elsewhere(kind, reentrant):
    """What backward needs lies elsewhere, and the memory that held it holds something else."""
    model, lens = Stack(kind), _lens(9)
    expected = _expected([9])
    moved = []

    def pack(x):
        moved.append(x.shape)
        return x.clone()  # on the CPU, save_on_cpu itself copies nothing

    for hooks in (save_on_cpu(), saved_tensors_hooks(pack, torch.clone)):
        x = _mine(draw(2, 9, STACK_DIM), lens)
        model.zero_grad()
        with hooks:
            loss = _loss(model(x, lens, reentrant), 0, lens)
        nan = torch.full((2, lens[dist.get_rank()], 6, 4), float("nan"), dtype=torch.float64)
        for _ in range(4):
            deepsp.heads_to_seq(deepsp.seq_to_heads([nan], seq_lens=lens), [6], seq_lens=lens)
        loss.backward()
        _compare(model, [loss], [x], expected)
    assert len(moved) > (4 if reentrant is None else 0)


@pytest.mark.parametrize("reentrant", [None, False])
@pytest.mark.parametrize("kind", KINDS)
def test_saved_tensors_elsewhere(kind, reentrant):
    on_ranks(2, _elsewhere, kind, reentrant)


def _autocast(kind):
    """bfloat16 compute; float32 parameters and gradients; a checkpoint's second forward is under
    autocast again."""
    expected = _expected([24], torch.float32)
    model, lens = Stack(kind, torch.float32), _lens(24)
    found = []
    for reentrant in (None, True, False):
        x = _mine(draw(2, 24, STACK_DIM, dtype=torch.float32), lens)
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x, lens, reentrant)
            assert model.attend(model.layers[0], x, lens).dtype == torch.bfloat16
        _loss(y, 0, lens).backward()
        deepsp.sync_gradients(model)
        found.append([x.grad, *(p.grad.clone() for p in model.parameters())])
    # A reentrant checkpoint's x is a leaf, which autocast casts once for all three projections.
    assert all(torch.equal(a, b) for a, b in zip(found[2], found[0], strict=True))
    of = [_mine(expected[1][0], lens).detach(), *expected[2]]
    # A key's bias moves all of a query's scores alike: its gradient is zero, and noise here.
    least = 0.1 * max(x.norm() for x in of)
    for gradients in found:
        for ours, exact in zip(gradients, of, strict=True):
            assert ours.dtype == torch.float32
            assert (ours - exact).norm() < 3e-2 * max(exact.norm(), least), (ours, exact)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_autocast(kind, ranks):
    on_ranks(ranks, _autocast, kind)
