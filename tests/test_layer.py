"""The attention layer against plain PyTorch in one process, float64: output, every gradient."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from attentions import check_layer, make_layer
from harness import on_ranks
from hypothesis import given
from hypothesis import strategies as st
from reference import Take, Whole, attention, draw, events, heads_of, lens_of, names, sent
from torch.autograd import gradcheck

import deepsp

op = torch.ops.deepsp


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
    on_ranks(ranks, check_layer, case)


@pytest.mark.messages
def test_wide_heads():
    """Past the width from which weights are no longer put together, uneven, with shared kv heads;
    and unpacked gradients (more than 16 MiB)."""
    for ranks, case in (
        (3, (2, 40, 8, 2, 64, 24, (True, True), False, "half", 0, 2, True, "skewed", True)),
        (2, (1, 2048, 8, 4, 64, 16, (True, False), False, None, 0, 1, True, "split", True)),
    ):
        on_ranks(ranks, check_layer, case)


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
