"""What users do with the layer: conversion, freezing, checkpoints, autocast, training, mistakes."""

import argparse
import copy
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from attentions import compare_layer, make_layer, run_plain
from harness import on_ranks
from reference import attention, draw, heads_of, lens_of, names
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import deepsp
from deepsp.sequence.attention import chunks as auto_chunks

op = torch.ops.deepsp


class _Attention(nn.Module):
    """A user's own layer."""

    def __init__(self, dim, heads, kv_heads):
        super().__init__()
        size = dim // heads * kv_heads
        self.q_proj, self.k_proj = nn.Linear(dim, dim), nn.Linear(dim, size, bias=False)
        self.v_proj, self.o_proj = nn.Linear(dim, size), nn.Linear(dim, dim, bias=False)
        self.double()


def _converted():
    torch.manual_seed(0)
    theirs = _Attention(12, 6, 3)
    keys = list(theirs.state_dict())
    lens = lens_of("split", 7, dist.get_world_size())
    ours = deepsp.SequenceParallelAttention.from_projections(
        theirs.q_proj, theirs.k_proj, theirs.v_proj, theirs.o_proj, 6, rope_theta=None, chunks=2
    )
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in theirs.named_parameters()]
    assert all(a is b for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    assert list(ours.state_dict()) == keys
    compare_layer(ours, draw(2, 7, 12), lens, {"is_causal": True})

    # The same, owned by the user's layer alone.
    theirs.attend = deepsp.SequenceParallelAttention.from_projections(
        theirs.q_proj,
        theirs.k_proj,
        theirs.v_proj,
        theirs.o_proj,
        6,
        rope_theta=None,
        register=False,
    )
    assert list(theirs.state_dict()) == keys
    twin = copy.deepcopy(theirs)
    x = draw(2, lens[dist.get_rank()], 12)
    y = theirs.attend(x, seq_lens=lens)
    torch.testing.assert_close(y, ours(x, seq_lens=lens), rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        twin.q_proj.weight.zero_()  # the copy's layer uses the copy's weights
    assert torch.equal(theirs.attend(x, seq_lens=lens), y)
    assert not torch.equal(twin.attend(x, seq_lens=lens), y)


def test_conversion_of_a_users_layer():
    on_ranks(2, _converted)


def _frozen(which):
    lens = lens_of("split", 6, dist.get_world_size())
    layer = make_layer(8, 4, bias=True, chunks=2)
    for name in which:
        layer.get_parameter(name).requires_grad_(False)
    compare_layer(layer, draw(1, 6, 8), lens, {"is_causal": True})
    # No product is computed for what needs no gradient; what isn't needed isn't kept.
    layer.requires_grad_(False)
    x = draw(1, lens[dist.get_rank()], 8)
    assert not layer(x, seq_lens=lens).requires_grad
    y = layer(x.requires_grad_(), seq_lens=lens)
    frozen = names(lambda: y.sum().backward())
    assert frozen["deepsp::_heads_to_output_weight_grad"] == 0 and x.grad is not None
    layer.requires_grad_(True)
    y = layer(x, seq_lens=lens)
    trained = names(lambda: y.sum().backward())
    products = ("aten::mm", "aten::addmm_")
    assert sum(frozen[n] for n in products) < sum(trained[n] for n in products)


@pytest.mark.parametrize(
    "which",
    [
        ["q_proj.weight"],
        ["k_proj.weight", "v_proj.bias"],
        ["o_proj.weight", "o_proj.bias"],
        ["q_proj.weight", "k_proj.weight", "v_proj.weight"],
    ],
)
def test_frozen_parameters(which):
    on_ranks(2, _frozen, which)


def _checkpointed(reentrant):
    lens = lens_of("skewed", 9, dist.get_world_size())
    layer = make_layer(8, 4, 2, rope_theta=10.0, chunks=2, bias=True)
    inner = layer.forward

    def forward(x, **kwargs):
        return checkpoint(lambda x: inner(x, **kwargs), x, use_reentrant=reentrant)

    mine = draw(2, 9, 8).split(lens, 1)[dist.get_rank()].clone().requires_grad_()
    y = layer(mine, seq_lens=lens)
    expected = torch.autograd.grad(y.square().sum(), [mine, *layer.parameters()])
    again = mine.detach().requires_grad_()
    layer.zero_grad()
    for _ in range(2):  # both layers of a stack recompute
        again.grad = None
        layer.zero_grad()
        forward(again, seq_lens=lens).square().sum().backward()
    for a, b in zip((again, *layer.parameters()), expected, strict=True):
        assert torch.equal(a.grad, b)


def _compiled_checkpoint(backend):
    """A graph that computes the forward again drops what it doesn't use of it."""
    torch._dynamo.reset()
    lens = lens_of("skewed", 9, dist.get_world_size())
    layers = nn.ModuleList([make_layer(8, 4, 2, chunks=2, bias=True, seed=n) for n in (1, 2)])
    mine = draw(1, 9, 8).split(lens, 1)[dist.get_rank()].clone().requires_grad_()

    def model(x, again):
        for layer in layers:
            if again:
                x = checkpoint(
                    lambda x, layer=layer: layer(x, seq_lens=lens, is_causal=True),
                    x,
                    use_reentrant=False,
                )
            else:
                x = layer(x, seq_lens=lens, is_causal=True)
        return x

    leaves = [mine, *layers.parameters()]
    expected = torch.autograd.grad(model(mine, False).square().sum(), leaves)
    y = torch.compile(model, fullgraph=True, backend=backend)(mine, True)
    # Memory that holds what was right in forward must not do for backward.
    deepsp.ranks.buffers.clear()
    poison = [torch.full((1, 64, 4, 64), float("nan")) for _ in range(4)]
    for x in poison:
        deepsp.seq_to_heads([x])
    ours = torch.autograd.grad(y.square().sum(), leaves)
    torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)


def test_checkpointing_compiled():
    on_ranks(2, _compiled_checkpoint, "aot_eager")


def _again():
    """The same graph backward twice; a chunk that needs no gradient; anomaly mode."""
    lens = lens_of("split", 6, dist.get_world_size())
    layer = make_layer(8, 4, chunks=2)
    mine = draw(1, 6, 8).split(lens, 1)[dist.get_rank()].clone().requires_grad_()
    leaves = [mine, *layer.parameters()]
    loss = layer(mine, seq_lens=lens).square().sum()
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    for a, b in zip(torch.autograd.grad(loss, leaves), first, strict=True):
        assert torch.equal(a, b)
    with torch.autograd.set_detect_anomaly(True):
        watched = torch.autograd.grad(layer(mine, seq_lens=lens).square().sum(), leaves)
    torch.testing.assert_close(watched, first, rtol=1e-12, atol=1e-12)
    for chunk in (0, 1):
        calls = []

        def half(q, k, v, chunk=chunk, calls=calls):
            calls.append(1)
            out = attention(q, k, v)
            return out.detach() if len(calls) - 1 == chunk else out

        layer.local_attention = half
        (grad,) = torch.autograd.grad(layer(mine, seq_lens=lens).square().sum(), mine)
        assert grad.any(), chunk


def test_backward_again():
    on_ranks(2, _again)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(reentrant):
    on_ranks(2, _checkpointed, reentrant)


def _autocast():
    """bfloat16 compute and bytes, float32 parameters and gradients."""
    lens = lens_of("split", 24, dist.get_world_size())
    layer = make_layer(32, 8, 4, dtype=torch.float32, chunks=2, rope_theta=100.0, bias=True)
    x = draw(1, 24, 32, dtype=torch.float32)
    mine = x.split(lens, 1)[dist.get_rank()].clone().requires_grad_()
    sent = []

    class Spy(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func in (op._project_to_heads_start.default, op.heads_to_seq_start.default):
                sent.extend(b.dtype for b in (out if isinstance(out, list) else [out]))
            return out

    with torch.autocast("cpu", torch.bfloat16), Spy():
        y = layer(mine, seq_lens=lens, is_causal=True, attn_mask=None)
    assert y.dtype == torch.bfloat16 and set(sent) == {torch.bfloat16} and len(sent) == 4
    grad = draw(1, 24, 32, seed=5, dtype=torch.float32)
    y.backward(grad.split(lens, 1)[dist.get_rank()].bfloat16())
    assert mine.grad.dtype == torch.float32
    wide = copy.deepcopy(layer).double()
    full = x.double().requires_grad_()
    expected = run_plain(wide, full, is_causal=True)
    wide.zero_grad()
    expected.backward(grad.double())
    close = {"rtol": 5e-2, "atol": 5e-2}
    torch.testing.assert_close(
        y.double(), expected.detach().split(lens, 1)[dist.get_rank()], **close
    )
    for (name, p), q in zip(layer.named_parameters(), wide.parameters(), strict=True):
        assert p.grad.dtype == torch.float32
        dist.all_reduce(p.grad)
        error = (p.grad.double() - q.grad).norm() / q.grad.norm()
        assert error < 2e-2, (name, error)


def test_autocast():
    on_ranks(2, _autocast)


def _autocast_elsewhere():
    """Backward inside autocast of a forward outside; a local attention that returns float32."""
    lens = lens_of("split", 24, dist.get_world_size())
    layer = make_layer(32, 8, 4, dtype=torch.float32, chunks=2)
    mine = draw(1, 24, 32, dtype=torch.float32).split(lens, 1)[dist.get_rank()].clone()
    leaves = [mine.requires_grad_(), *layer.parameters()]
    expected = torch.autograd.grad(layer(mine, seq_lens=lens).square().sum(), leaves)
    deepsp.ranks.buffers.clear()  # lest memory still holds what is right
    loss = layer(mine, seq_lens=lens).square().sum()
    with torch.autocast("cpu", torch.bfloat16):
        ours = torch.autograd.grad(loss, leaves)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    layer.local_attention = lambda q, k, v: attention(q.float(), k.float(), v.float())
    deepsp.ranks.buffers.clear()
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(mine, seq_lens=lens)
        assert y.dtype == torch.bfloat16
        wide = torch.autograd.grad(y.float().square().sum(), leaves)
        group = dist.group.WORLD.group_name
        held = torch.randn(1, 24, 8 // len(lens), 4)
        y = op.heads_to_output(held, layer.o_proj.weight, None, 8, lens, dist.get_rank(), group)
        assert y.dtype == torch.bfloat16
    for a, b in zip(wide, expected, strict=True):
        assert (a - b).norm() < 5e-2 * b.norm()


def test_autocast_on_one_side():
    on_ranks(2, _autocast_elsewhere)


def _sixteen_bit_sums():
    """Parts are summed in float32: many parts are as exact as one product."""
    size, rank, group = dist.get_world_size(), dist.get_rank(), dist.group.WORLD.group_name
    torch.manual_seed(0)
    heads, dim = 16, 32
    whole = torch.randn(1, 8 * size, heads, dim).bfloat16()
    weight = torch.randn(24, heads * dim).bfloat16()
    mine = heads_of(rank, size, heads, heads)[0]
    lens = [8] * size
    held = whole[:, :, mine]
    chunks = 16 // size
    leaving = []
    for chunk in range(chunks):
        q0, q1, _, _ = op.head_split(heads, heads, size, rank, chunk, chunks)
        out = held[:, :, q0 - mine[0] : q1 - mine[0]]
        leaving.append(op.heads_to_seq_start([out], [heads], lens, chunk, chunks, rank, group))
    y = op._heads_to_output_wait(leaving, weight, None, heads, 1, lens, rank, group)
    tokens = whole[:, 8 * rank : 8 * rank + 8].flatten(2)
    exact = F.linear(tokens.double(), weight.double())
    one = (F.linear(tokens, weight).double() - exact).abs().mean()
    ours = (y.double() - exact).abs().mean()
    assert ours < 2 * one, (ours, one)  # 1.7; summed in bfloat16: 3.2


def test_sixteen_bit_sums():
    on_ranks(2, _sixteen_bit_sums)


def _saved(layer, x, lens, call):
    """Bytes that autograd keeps, each storage once, parameters not counted."""
    own = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    kept = {}

    def pack(t):
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = call(x, lens)
    return sum(kept.values()), y


def _memory(chunks):
    """Not more than the layer of plain linears and distributed_attention keeps."""
    layer = make_layer(64, 8, 4, dtype=torch.float32, chunks=chunks, bias=True)
    lens = [128] * dist.get_world_size()
    x = draw(1, 128, 64, dtype=torch.float32).requires_grad_()

    def plain_linears(x, lens):
        q, k, v = (p(x).unflatten(-1, (-1, 8)) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
        out = deepsp.distributed_attention(
            q, k, v, is_causal=True, enable_gqa=True, seq_lens=lens, chunks=chunks
        )
        return layer.o_proj(out.flatten(2))

    theirs, y = _saved(layer, x, lens, plain_linears)
    ours, z = _saved(layer, x, lens, lambda x, lens: layer(x, seq_lens=lens, is_causal=True))
    torch.testing.assert_close(y, z, rtol=1e-4, atol=1e-5)
    assert ours <= theirs, (ours, theirs)
    return ours, theirs


@pytest.mark.parametrize("chunks", [1, 2])
def test_memory(chunks):
    on_ranks(2, _memory, chunks)


def _auto():
    auto_chunks.forget()
    layer = make_layer(8, 4, chunks="auto", local_attention=_counting)
    x = draw(1, 4, 8).requires_grad_()
    state = torch.get_rng_state()
    make_layer(8, 4, local_attention=_counting)(x)
    after_one_call = torch.get_rng_state()
    torch.set_rng_state(state)
    _calls.clear()
    y = layer(x)
    # However often it was called for measuring, and in whatever chunks.
    assert _calls["attention"] > 4 and torch.equal(torch.get_rng_state(), after_one_call)
    assert all(p.grad is None for p in layer.parameters())
    (picked,) = auto_chunks._picked.values()
    _calls.clear()
    assert torch.equal(layer(x), y) and _calls["attention"] == picked  # remembered
    with torch.no_grad():
        layer(x)
    assert len(auto_chunks._picked) == 2  # without gradients, another question
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), y)
    longer = draw(1, 6, 8)  # in compiled code, the last pick serves all
    assert compiled(longer).shape == longer.shape
    auto_chunks.forget()
    y = checkpoint(layer, x, use_reentrant=False)  # measures inside a checkpoint
    torch.autograd.grad(y.sum(), x)
    fresh = make_layer(8, 4, chunks="auto")
    with pytest.raises(Exception, match="nothing has been measured yet"):
        torch.compile(fresh, backend="eager", fullgraph=True)(x)
    return picked


_calls = Counter()


def _counting(q, k, v):
    _calls["attention"] += 1
    return attention(q, k, v)


def test_auto_picks_alike():
    picked = on_ranks(2, _auto)
    assert picked[0] == picked[1]


def _training(heads, chunk_counts):
    """The example's model trains as in one process, with and without overlap, whatever the
    chunks."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    import train

    curves = []
    for overlap, chunks in [(False, 0), (False, 1), *((True, n) for n in chunk_counts)]:
        args = argparse.Namespace(
            steps=4,
            seq_len=65,
            dtype="float64",
            lr=1e-3,
            seed=1,
            data=Path(train.__file__),
            device="cpu",
            overlap=overlap,
            chunks=chunks,
            heads=heads,
        )
        if chunks:
            result = train.train_sharded(args, torch.device("cpu"))
        else:
            result = train.train_one_process(args)
        curves.append([*result["losses"], *result["gradient_norms"]])
    for other in curves[1:]:
        torch.testing.assert_close(other, curves[0], rtol=1e-11, atol=0)


@pytest.mark.parametrize(("ranks", "heads"), [(2, 8), (3, 8), (4, 2)])
def test_training_is_the_same(ranks, heads):
    on_ranks(ranks, _training, heads, (1, 2, 4))


def _wrong(kind):
    make = deepsp.SequenceParallelAttention
    if kind == "sizes":
        for arguments, options, message in [
            ((10, 4), {}, "hidden_size to be .*, got 10"),
            ((8, 0), {}, "num_heads >= 1, got 0"),
            ((8, 4, 3), {}, "output features of k_proj .*, got 6"),
            ((8, 1), {"query_parts": 1}, r"query heads as ranks \(2\) with query_parts 1, got 1"),
            ((8, 4), {"query_parts": 0}, 'query_parts to be "auto" or an int >= 1, got 0'),
            ((9, 3), {"rope_theta": 1e4}, "head_dim to be even .*, got 3"),
            ((8, 4), {"chunks": 0}, "chunks >= 1 .*, got 0"),
            ((8, 4), {"chunks": "many"}, "chunks >= 1 .*, got 'many'"),
        ]:
            with pytest.raises(ValueError, match=message):
                make(*arguments, **options)
    elif kind == "projections":
        p = [nn.Linear(8, 8) for _ in range(4)]
        for changed, message in [
            ((0, nn.Linear(8, 9)), "divide the 9 output features of q_proj, got 4"),
            ((1, nn.Linear(8, 3)), "output features of k_proj .*, got 3"),
            ((1, nn.Linear(7, 8)), r"k_proj to have the input features of q_proj \(8\), got 7"),
            ((2, nn.Linear(8, 9)), "output features of v_proj .*, got 9"),
            ((3, nn.Linear(9, 8)), "o_proj to have 8 input features, .*, got 9"),
            ((3, nn.Bilinear(8, 8, 8)), "o_proj to be a plain nn.Linear, .*, got Bilinear"),
        ]:
            with pytest.raises(ValueError, match=message):
                make.from_projections(
                    *p[: changed[0]], changed[1], *p[changed[0] + 1 :], 4, rope_theta=None
                )
        layer = make.from_projections(*p, 4, rope_theta=None)
        handle = p[2].register_forward_hook(lambda *_: None)
        for call in (
            lambda: make.from_projections(*p, 4, rope_theta=None),
            lambda: layer(torch.zeros(1, 3, 8)),
        ):
            with pytest.raises(ValueError, match="v_proj has hooks"):
                call()
        handle.remove()
        p[1].forward = lambda x: x
        with pytest.raises(ValueError, match="k_proj has a forward of its own"):
            layer(torch.zeros(1, 3, 8))
        del p[1].forward
        layer.q_proj = nn.Sequential(p[0])  # an adapter around it, say
        with pytest.raises(ValueError, match=r"q_proj to be a plain nn.Linear, .*, got Sequential"):
            layer(torch.zeros(1, 3, 8))
    else:
        layer = make(8, 4, rope_theta=10.0, dtype=torch.float64)
        x = draw(1, 3, 8)
        layer(x)  # the first call compares
        for call, message in [
            (lambda: layer(x[0]), "x to have 3 dimensions .*, got 2"),
            (lambda: layer(x, seq_lens=[3]), "seq_lens to have one entry .*, got 1"),
            (lambda: layer(x, seq_lens=[4, 4]), "x to have sequence length 4, .*, got 3"),
            (lambda: layer(x, position_ids=torch.arange(3)), "position_ids of the full sequence"),
            (lambda: layer(x.float()), "weights.0. to have the dtype of x .*, got float64"),
            (lambda: layer(draw(1, 3, 7)), "weights.0. to have 7 columns, .*, got 8"),
            (lambda: make(8, 4)(x, position_ids=torch.arange(6)), "rope_theta is None"),
            (lambda: layer(x, is_causal=True, attn_mask=torch.ones(6, 6).bool()), "attn_mask"),
            (
                lambda: layer(x, attn_mask=torch.ones(5, 6).bool()),
                "attn_mask to have size 6 or 1 .*, got 5",
            ),
            (
                lambda: layer(x, attn_mask=torch.ones(6, 6)),
                "attn_mask to be bool or .*, got float32",
            ),
            (lambda: layer(x, dropout_p=2.0), "dropout_p <= 1, got 2"),
            (lambda: layer(x, position_ids=torch.zeros(2, 6)), "position_ids of the full sequence"),
            (lambda: op._kv_of_cell([x[None]], 4, 4, 0, 0), "parts >= 1, got 0"),
        ]:

            def raises(call=call, message=message):
                with pytest.raises(ValueError, match=message):
                    call()

            assert names(raises)["deepsp::exchange"] == 0, message  # nothing was sent
    layer = make_layer(8, 4)  # and the group is in order
    compare_layer(layer, draw(1, 6, 8), [3, 3])


@pytest.mark.parametrize("kind", ["sizes", "projections", "calls"])
def test_errors(kind):
    on_ranks(2, _wrong, kind)
