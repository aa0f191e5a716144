"""The attention layer against plain PyTorch in one process, float64: output, every gradient."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import on_ranks
from hypothesis import given
from hypothesis import strategies as st
from reference import Take, Whole, attention, draw, events, heads_of, lens_of, names, sent
from torch import nn
from torch.autograd import gradcheck

import deepsp

op = torch.ops.deepsp


def _turn(x, positions, theta, interleaved):
    """RoPE as multiplication of complex numbers, for the reference."""
    half = x.size(-1) // 2
    frequency = theta ** -(torch.arange(half, dtype=torch.float64) / half)
    turn = torch.exp(1j * positions.double()[..., None, None] * frequency)
    pairs = x.unflatten(-1, (half, 2)) if interleaved else x.unflatten(-1, (2, half)).mT
    turned = torch.view_as_real(torch.view_as_complex(pairs.double().contiguous()) * turn)
    return (turned.flatten(-2) if interleaved else turned.mT.flatten(-2)).to(x.dtype)


def plain(layer, x, position_ids=None, **kwargs):
    """The layer in one process, with its parameters and nothing else of it."""
    q = layer.q_proj(x).unflatten(-1, (layer.num_heads, -1))
    k = layer.k_proj(x).unflatten(-1, (layer.num_kv_heads, -1))
    v = layer.v_proj(x).unflatten(-1, (layer.num_kv_heads, -1))
    q = q if layer.q_norm is None else layer.q_norm(q)
    k = k if layer.k_norm is None else layer.k_norm(k)
    if layer.rope_theta is not None:
        positions = torch.arange(x.size(1)) if position_ids is None else position_ids
        q, k = (_turn(t, positions, layer.rope_theta, layer.rope_interleaved) for t in (q, k))
    return layer.o_proj(attention(q, k, v, **kwargs).flatten(2))


def make_layer(*args, seed=0, dtype=torch.float64, **kwargs):
    """The same parameters on every rank."""
    torch.manual_seed(seed)
    layer = deepsp.SequenceParallelAttention(*args, dtype=dtype, **kwargs)
    for norm in (layer.q_norm, layer.k_norm):
        if norm is not None:
            nn.init.uniform_(norm.weight, 0.5, 2.0)
            norm.to(dtype)
    return layer


def compare(layer, x, lens, arguments=None):
    """Output and all gradients of this rank's part against those of the plain layer."""
    rank = dist.get_rank()
    arguments = arguments or {}
    full = x.clone().requires_grad_()
    mine = x.split(lens, 1)[rank].clone().requires_grad_()
    parameters = {n: p for n, p in layer.named_parameters() if p.requires_grad}
    expected = plain(layer, full, **arguments)
    grad = draw(*expected.shape, seed=99).to(expected.dtype)
    g_expected = torch.autograd.grad(expected, [full, *parameters.values()], grad)
    out = layer(mine, seq_lens=lens, **arguments)
    g_out = torch.autograd.grad(out, [mine, *parameters.values()], grad.split(lens, 1)[rank])
    close = {"rtol": 1e-10, "atol": 1e-10}
    torch.testing.assert_close(out, expected.split(lens, 1)[rank], **close)
    torch.testing.assert_close(g_out[0], g_expected[0].split(lens, 1)[rank], **close)
    for name, a, b in zip(parameters, g_out[1:], g_expected[1:], strict=True):
        a = a.clone()
        dist.all_reduce(a)
        torch.testing.assert_close(a, b, **close, msg=lambda m, n=name: f"gradient of {n}: {m}")


def _equals(case):
    (
        batch,
        total,
        heads,
        kv_heads,
        dim,
        hidden,
        bias,
        norms,
        rope,
        ids,
        chunks,
        overlap,
        kind,
        causal,
    ) = case
    lens = lens_of(kind, total, dist.get_world_size())
    layer = make_layer(
        hidden,
        heads,
        kv_heads,
        head_dim=dim,
        bias=bias[0],
        out_bias=bias[1],
        q_norm=nn.RMSNorm(dim) if norms else None,
        k_norm=nn.RMSNorm(dim) if norms else None,
        rope_theta=100.0 if rope else None,
        rope_interleaved=rope == "interleaved",
        chunks=chunks,
        overlap=overlap,
    )
    arguments = {"is_causal": causal}
    if rope and ids:
        positions = torch.arange(total) % 5 + 3
        arguments["position_ids"] = positions if ids == 1 else torch.stack([positions] * batch)
        if ids == 2 and batch > 1:
            arguments["position_ids"][1] += 2
    compare(layer, draw(batch, total, hidden), lens, arguments)


@st.composite
def _cases(draw_):
    kv_heads = draw_(st.integers(1, 4))
    return (
        draw_(st.integers(1, 3)),
        draw_(st.integers(1, 11)),
        kv_heads * draw_(st.integers(-(-4 // kv_heads), 5)),
        kv_heads,
        draw_(st.sampled_from([2, 8, 34])),
        draw_(st.sampled_from([5, 16])),
        draw_(st.tuples(st.booleans(), st.booleans())),
        draw_(st.booleans()),
        draw_(st.sampled_from([None, "half", "interleaved"])),
        draw_(st.integers(0, 2)),
        draw_(st.sampled_from([1, 2, 3, 4, "auto"])),
        draw_(st.sampled_from([True, True, True, False])),
        draw_(st.sampled_from(["split", "skewed", "empty"])),
        draw_(st.booleans()),
    )


@pytest.mark.messages
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@given(case=_cases())
def test_equals_one_process(ranks, case):
    on_ranks(ranks, _equals, case)


@pytest.mark.messages
def test_wide_heads():
    """Past the width from which weights are no longer put together, uneven, with shared kv heads;
    and unpacked gradients (more than 16 MiB)."""
    on_ranks(
        3, _equals, (2, 40, 8, 2, 64, 24, (True, True), False, "half", 0, 2, True, "skewed", True)
    )
    on_ranks(
        2, _equals, (1, 2048, 8, 4, 64, 16, (True, False), False, None, 0, 1, True, "split", True)
    )


def _global_gradcheck():
    size = dist.get_world_size()
    lens = lens_of("skewed", 4, size)
    layer = make_layer(3, 4, 2, head_dim=2, bias=True, rope_theta=10.0, chunks=2)
    names_, parameters = zip(*layer.named_parameters(), strict=True)

    def function(x, *values):
        y = torch.func.functional_call(
            layer,
            dict(zip(names_, values, strict=True)),
            (Take.apply(x, lens, 1),),
            {"seq_lens": lens, "is_causal": True},
        )
        return Whole.apply(y, lens, 1)

    # Parameters are whole on every rank, but each rank's gradient is its tokens' share.
    x = draw(1, 4, 3).requires_grad_()
    gradcheck(lambda x: function(x, *(p.detach() for p in parameters)), [x], fast_mode=False)


@pytest.mark.messages
@pytest.mark.parametrize("ranks", [2, 3])
def test_gradcheck(ranks):
    on_ranks(ranks, _global_gradcheck)


# ------------------------------------------------------------------------- the ops themselves


def _fused():
    """One fused weight gives what three give; heads_to_output is its mirror."""
    rank, size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD.group_name
    lens = lens_of("skewed", 9, size)
    heads, dim, hidden = (8, 4, 4), 6, 10
    x, weight, bias = draw(2, 9, hidden), draw(16 * dim, hidden), draw(16 * dim)
    output, out_bias = draw(hidden, 8 * dim, seed=3), draw(hidden, seed=4)
    leaves = [t.clone().requires_grad_() for t in (weight, bias, output, out_bias)]
    mine = x.split(lens, 1)[rank].clone().requires_grad_()
    q, k, v = op.project_to_heads(mine, leaves[:1], leaves[1:2], heads, lens, rank, group)
    whole = [t.clone().requires_grad_() for t in (x, weight, bias, output, out_bias)]
    expected = F.linear(*whole[:3]).unflatten(-1, (16, dim)).split(heads, 2)
    for t, e, own in zip(
        (q, k, v),
        expected,
        [*heads_of(rank, size, 8, 4), heads_of(rank, size, 8, 4)[1]],
        strict=True,
    ):
        torch.testing.assert_close(t, e[:, :, own], rtol=1e-12, atol=1e-12)
    k, v = (op._kv_of_cell([t], 8, 4, size, rank) for t in (k, v))
    out = op._attention_of_cell(q, k, v, None, 0.0, True, None, 8, size, rank)
    y = op.heads_to_output(out, leaves[2], leaves[3], 8, lens, rank, group)
    e = F.linear(attention(*expected, is_causal=True).flatten(2), *whole[3:])
    torch.testing.assert_close(y, e.split(lens, 1)[rank], rtol=1e-10, atol=1e-10)
    grad = draw(*e.shape, seed=8)
    ours = torch.autograd.grad(y, [mine, *leaves], grad.split(lens, 1)[rank])
    theirs = torch.autograd.grad(e, whole, grad)
    torch.testing.assert_close(ours[0], theirs[0].split(lens, 1)[rank], rtol=1e-10, atol=1e-10)
    for a, b in zip(ours[1:], theirs[1:], strict=True):
        dist.all_reduce(a)
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.messages
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_fused_weight(ranks):
    on_ranks(ranks, _fused)


def _second_derivative():
    layer = make_layer(8, 4)
    x = draw(1, 3, 8).requires_grad_()
    (g,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="not implemented"):
        torch.autograd.grad(g.sum(), x)


def test_a_second_derivative_raises():
    on_ranks(1, _second_derivative)


def _copies(chunks):
    """Products are written into what is sent and taken from what arrives. What is left: this
    rank's own block of what attention returns, and dq, dk, dv packed for sending."""
    layer = make_layer(64, 8, 8, chunks=chunks, dtype=torch.float32, bias=True)
    x = draw(1, 32, 64, dtype=torch.float32).requires_grad_()
    kept = []

    def forward():
        kept.append(layer(x, is_causal=True))

    forward()
    copying = {"aten::copy_", "deepsp::pack", "deepsp::merge", "deepsp::own", "deepsp::sum"}

    def copies(call):
        return {n: c for n, c in names(call).items() if n in copying}

    # Attention's output is rows by token and needs no packing; cat of two biases' rows none.
    assert copies(forward) == {"deepsp::own": chunks}, copies(forward)
    grad = torch.ones_like(kept[-1])
    seen = copies(
        lambda: torch.autograd.grad(kept[-1], [x, *layer.parameters()], grad, retain_graph=False)
    )
    assert seen == {"deepsp::pack": chunks, "deepsp::own": chunks}, seen


@pytest.mark.messages
@pytest.mark.parametrize("chunks", [1, 2])
def test_copies(chunks):
    on_ranks(2, _copies, chunks, apart="messages")


MARKS = {
    "deepsp::exchange": "x",
    "deepsp::seq_to_heads_wait": "w",
    "aten::scaled_dot_product_attention": "A",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": "A",
    "deepsp::_heads_to_output_wait": "O",
    "deepsp::_heads_to_output_weight_grad": "W",
    "deepsp::_project_to_heads_backward": "P",
    "aten::mm": "m",
    "aten::addmm": "m",
    "aten::addmm_": "m",
}


def _order():
    layer = make_layer(128, 8, 8, chunks=2, dtype=torch.float32)
    x = draw(1, 32, 128, dtype=torch.float32).requires_grad_()
    kept = []

    def marks(call):
        seen, until = [], {}
        for event in events(call):
            mark = MARKS.get(event.name)
            if mark and event.time_range.start >= until.get(mark, 0):
                seen.append(mark)
                until[mark] = event.time_range.end
        return "".join(seen)

    def forward():
        kept.append(layer(x, is_causal=True))

    forward()
    forwards = marks(forward)
    grad = torch.ones(1, 32, 128)
    backwards = marks(lambda: torch.autograd.grad(kept[-1], [x, *layer.parameters()], grad))
    # Receives are posted, q, k and v for the other rank computed (narrow: in one product) and sent,
    # chunk by chunk; this rank's own are computed while they travel; then the output projection,
    # part by part.
    assert forwards == "xmxm" + "mm" + "wAxwAx" + "Ommmm", forwards
    # dO is computed and sent, the last chunk first; its own part and dW while it travels; dq, dk
    # and dv leave as each chunk's attention is through; dX and dW part by part.
    assert backwards == "xmxm" + "mm" + "Wmmmm" + "wAxwAx" + "P" + "m" * 16, backwards


@pytest.mark.messages
def test_order():
    on_ranks(2, _order, apart="messages")


def _leaving():
    """Chunks leave in the order in which they are needed: backward, the last one first."""
    layer = make_layer(16, 8, 2, head_dim=16, chunks=3, dtype=torch.float32)
    x = draw(1, 16, 16, dtype=torch.float32).requires_grad_()
    kept = []

    def forward():
        kept.append(layer(x))

    forward()  # the first call compares
    kept.clear()
    head = 16 * 16 * 4  # bytes; each rank has 4 query heads, cut 2, 1, 1, and one kv head
    assert sent(forward) == [4 * head, head, head, 2 * head, head, head]
    assert sent(lambda: kept[-1].sum().backward()) == [head, head, 2 * head, head, head, 4 * head]


def test_the_order_in_which_chunks_leave():
    on_ranks(2, _leaving, apart="messages")


def _on_meta():
    layer = deepsp.SequenceParallelAttention(12, 6, 3, rope_theta=1e4, device="meta")
    x = torch.empty(2, 4, 12, device="meta", requires_grad=True)
    y = layer(x, is_causal=True)
    assert y.shape == x.shape and y.is_meta
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert grad.shape == x.shape


def test_on_meta():
    """Shapes alone, as for counting memory or work: nothing is sent."""
    on_ranks(2, _on_meta)
