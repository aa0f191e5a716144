"""Dropout: each rank drops other weights of its heads, all from one seed."""

import contextlib
import functools

import pytest
import torch
import torch.distributed as dist
from harness import on_ranks
from reference import attention, draw
from torch import nn
from torch.utils.checkpoint import checkpoint

import deepsp
from deepsp.ranks.randomness import sharded_randomness


def _masks(kind, chunks, backend=None):
    """Which weights each head drops, on all ranks: with q = 0 and v the identity, the output of a
    token is its weights."""
    rank, size = dist.get_rank(), dist.get_world_size()
    tokens, heads = 24, 6
    x = torch.zeros(1, tokens // size, heads, tokens)
    eye = torch.eye(tokens).view(1, tokens, 1, tokens).expand(-1, -1, heads, -1)
    v = eye.split([tokens // size] * size, 1)[rank]  # the output is the weights themselves
    if kind == "function":
        call = functools.partial(deepsp.distributed_attention, dropout_p=0.5, chunks=chunks)
    elif kind == "sdpa":
        call = functools.partial(deepsp.DistributedAttention(chunks=chunks), dropout_p=0.5)
    elif kind == "local":
        local = functools.partial(attention, dropout_p=0.5)
        call = deepsp.DistributedAttention(local, chunks=chunks)
    else:
        # Projections that leave scores 0 and make v, and let the output pass.
        wide = tokens * heads
        q_proj, k_proj, v_proj, o_proj = (
            nn.Linear(n, wide, bias=False).requires_grad_(False) for n in [tokens] * 3 + [wide]
        )
        q_proj.weight.zero_(), k_proj.weight.zero_()
        v_proj.weight.copy_(torch.eye(tokens).repeat(heads, 1))
        o_proj.weight.copy_(torch.eye(wide))
        layer = deepsp.SequenceParallelAttention.from_projections(
            q_proj, k_proj, v_proj, o_proj, heads, rope_theta=None, chunks=chunks
        )

        def call(q, k, v):
            return layer(v[:, :, 0], dropout_p=0.5).unflatten(-1, (heads, -1))

    if backend is not None:
        torch._dynamo.reset()
        compiled = torch.compile(call, backend=backend, fullgraph=True)

        def call(*args):
            with sharded_randomness() if kind == "local" else contextlib.nullcontext():
                return compiled(*args)

    def run():
        out = call(x, x, v)
        whole = deepsp.collectives.all_gather(out, 1, grad="replicated")
        return whole[0].permute(1, 0, 2) > 0  # [heads, tokens, tokens]

    torch.manual_seed(7)
    first, after = run(), torch.rand(1)
    second = run()
    torch.manual_seed(7)
    again = run()
    assert torch.equal(first, again)  # reproducible
    every = torch.cat([first, second])
    for i in range(len(every)):
        assert 0.3 < every[i].float().mean() < 0.7
        for j in range(i):
            assert (every[i] != every[j]).float().mean() > 0.3, (i, j)
    # What is drawn elsewhere stays the same on all ranks.
    assert len(set(deepsp.collectives.all_gather(after, 0, grad="replicated").tolist())) == 1


@pytest.mark.parametrize("kind", ["function", "sdpa", "local", "layer"])
@pytest.mark.parametrize("chunks", [1, 2])
def test_masks_differ_from_head_to_head(kind, chunks):
    on_ranks(3 if chunks == 1 else 2, _masks, kind, chunks)


@pytest.mark.parametrize(
    ("kind", "chunks", "backend"),
    [
        ("function", 1, "inductor"),
        ("sdpa", 2, "aot_eager"),
        ("layer", 1, "aot_eager"),
        ("local", 1, "aot_eager"),
    ],
)
def test_compiled_masks_differ_from_head_to_head(kind, chunks, backend):
    on_ranks(3 if chunks == 1 else 2, _masks, kind, chunks, backend)


def _gradients_of_the_op(rank):
    """With the seed given, dropout is a function like any other."""
    draws = functools.partial(draw, dtype=torch.float64)
    q, k, v, mask = draws(2, 4, 4, 3), draws(2, 4, 2, 3), draws(2, 4, 2, 5), draws(4, 4, 4)
    op = torch.ops.deepsp

    def seeded(q, k, v, mask):
        torch.manual_seed(5)
        seed, _ = op._dropout_seed(q, rank)
        return op._attention_with_dropout(q, k, v, mask, 0.4, False, 0.7, seed)

    inputs = [x.requires_grad_() for x in (q, k, v, mask)]
    assert torch.autograd.gradcheck(seeded, inputs)
    assert torch.autograd.gradcheck(lambda k: seeded(q.detach(), k, v, None), inputs[1:2])
    (first,) = torch.autograd.grad(seeded(*inputs).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="attention_with_dropout_backward is not implemented"):
        first.sum().backward()
    return seeded(*inputs).detach(), torch.rand(1)


def test_gradients_of_the_op():
    (first, after), (second, same) = _gradients_of_the_op(0), _gradients_of_the_op(1)
    assert not torch.allclose(first, second)
    assert after == same  # the default generator goes on alike


def _compiled_under_a_checkpoint(backend):
    torch._dynamo.reset()
    rank, size = dist.get_rank(), dist.get_world_size()
    q, k, v = (draw(1, 6, 4, 8, seed=i + 3 * rank).requires_grad_() for i in range(3))
    call = functools.partial(deepsp.distributed_attention, dropout_p=0.5)
    again = functools.partial(checkpoint, lambda *x: call(*x).sin(), use_reentrant=False)
    compiled = torch.compile(again, backend=backend, fullgraph=True)
    # v's columns beyond the eighth are the identity: they say what was dropped.
    tokens = 6 * size
    eye = torch.eye(tokens).view(1, tokens, 1, tokens).expand(-1, -1, 4, -1)
    v = torch.cat([v, eye.split(6, 1)[rank].to(v.dtype)], -1).detach().requires_grad_()
    out = compiled(q, k, v)
    found = torch.autograd.grad(out.square().sum(), (q, k, v))

    whole = [
        deepsp.collectives.all_gather(x.detach(), 1, grad="replicated") for x in (q, k, v, out)
    ]
    q, k, v = (x.requires_grad_() for x in whole[:3])
    kept = (whole[3][..., 8:] != 0).permute(0, 2, 1, 3) * 2.0
    scores = torch.einsum("bshd,bthd->bhst", q, k) * 8**-0.5
    expected = torch.einsum("bhst,bthd->bshd", scores.softmax(-1) * kept, v).sin()
    torch.testing.assert_close(whole[3], expected.detach())
    for a, b in zip(found, torch.autograd.grad(expected.square().sum(), (q, k, v)), strict=True):
        torch.testing.assert_close(a, b.split(6, 1)[rank])


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_under_a_checkpoint(backend):
    on_ranks(2, _compiled_under_a_checkpoint, backend)


def test_the_generator_of_the_tensors_device(monkeypatch):
    """Not that of the current device, which may be another one's."""
    generators = [torch.Generator().manual_seed(n) for n in range(2)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "default_generators", generators)
    before = states_of(generators)
    for device, drawn in (("cuda:1", 1), ("cuda", 0), ("cpu", 0)):
        with sharded_randomness((1, 2, ""), torch.device(device)):
            changed = [not torch.equal(*x) for x in zip(before, states_of(generators), strict=True)]
            assert changed == [drawn == 0, drawn == 1]
            torch.rand(3, generator=generators[drawn])
        assert all(torch.equal(*x) for x in zip(before, states_of(generators), strict=True))


def states_of(generators):
    return [g.get_state() for g in generators]


def _under_a_checkpoint():
    """What is computed again drops the same weights."""
    torch.manual_seed(3)
    x = [draw(1, 6, 4, 8, seed=i).requires_grad_() for i in range(3)]
    module = deepsp.DistributedAttention(functools.partial(attention, dropout_p=0.5))
    for call in (module, functools.partial(deepsp.distributed_attention, dropout_p=0.5)):
        grads = []
        again = functools.partial(checkpoint, call, use_reentrant=False)
        for wrap in (again, call):
            torch.manual_seed(3)
            out = wrap(*x)
            grads.append((out, *torch.autograd.grad(out.square().sum(), x)))
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b)


def test_under_a_checkpoint():
    on_ranks(2, _under_a_checkpoint)
