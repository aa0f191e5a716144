"""Gathered in float8: one scale a tensor, from its largest magnitude on any rank."""

import math

import pytest
import torch
import torch.distributed as dist
from harness import on_ranks
from hypothesis import given
from hypothesis import strategies as st
from reference import draw, flat, names, sent
from shards import DTYPES, check_float8_gather

import deepsp  # noqa: F401  (it registers the ops)

op = torch.ops.deepsp
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]
f32, bf16 = torch.float32, torch.bfloat16


def _here():
    return dist.get_rank(), dist.get_world_size(), dist.group.WORLD.group_name


@st.composite
def _specs(draw_):
    return [
        (
            tuple(draw_(st.integers(0, 6)) for _ in range(4)),
            tuple(draw_(st.lists(st.integers(1, 5), max_size=3))),
            draw_(st.sampled_from(DTYPES)),
            draw_(st.sampled_from([0.0, 1e-45, 1e-38, 1e-4, 1.0, 3e4, 1e37])),
        )
        for _ in range(draw_(st.integers(1, 3)))
    ]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@given(specs=_specs(), dtype=st.sampled_from(FLOAT8))
def test_values(ranks, specs, dtype):
    specs = [
        (lens, shape, source, min(scale, 3e3) if source == torch.float16 else scale)
        for lens, shape, source, scale in specs
    ]
    on_ranks(ranks, check_float8_gather, specs, dtype)


def _large():
    for dtype in FLOAT8:
        large = [((700, 1, 900), (1024,), f32, 1.0), ((0, 513, 2), (1024,), bf16, 30.0)]
        check_float8_gather([*large, ((5, 0, 3), (7,), bf16, 1e-3)], dtype)


def test_large_ones():
    on_ranks(3, _large)


def _edges(bad):
    """Zeros stay zeros; NaN or infinity on one rank is seen on every one, in every element of that
    tensor and in no other."""
    rank, size, group = _here()
    sizes = [3] * size
    x = torch.arange(6.0).view(3, 2) + rank
    worst = x.clone()
    if rank == size - 1:
        worst[1, 1] = bad
    for dtype in FLOAT8:
        data, inv = op.gather_cast_float8(torch.zeros(3, 2), sizes, dtype, rank, group)
        assert inv == 1 and not data.float().any()
        data, inv = op.gather_cast_float8(torch.zeros(0, 2), [0] * size, dtype, rank, group)
        assert inv == 1 and data.shape == (0, 2)
        args = (dtype, f32, rank, group)
        (alone,) = op.gather_through_float8([x], sizes, *args)
        assert alone.isfinite().all()
        first, second = op.gather_through_float8([worst, x], sizes * 2, *args)
        assert torch.equal(second, alone)
        assert first.isnan().all(), first


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_zeros_nan_and_infinity(ranks, bad):
    on_ranks(ranks, _edges, bad)


def _costs():
    rank, _, group = _here()
    x = [draw(64, 256).float(), draw(32, 256, seed=1).float()]
    # A quarter of the bytes, one message and one all-reduce for all.
    sizes = [64, 64, 32, 32]
    call = (x, sizes, torch.float8_e4m3fn, rank, group)
    assert sent(lambda: op._gather_cast_float8_coalesced(*call)) == [96 * 256]
    seen = names(lambda: op._gather_cast_float8_coalesced(*call))
    assert seen["gloo:all_reduce"] == 1 and seen["deepsp::exchange"] == 1


def test_costs():
    on_ranks(2, _costs, apart="messages")


def _gradients(reduce_dtype, source):
    """As if nothing had been rounded: reduce_scatter_cast of the output's gradient."""
    rank, size, group = _here()
    rows = [[3, 0, 2][:size], [1, 1, 1][:size]]
    sizes = flat(rows)
    x = [draw(lens[rank], 5, seed=rank).to(source).requires_grad_() for lens in rows]
    within = {"reduce_dtype": reduce_dtype}
    y = op.gather_through_float8(x, sizes, torch.float8_e5m2, bf16, rank, group, **within)
    grads = [draw(*t.shape, seed=rank + 3).to(bf16) for t in y]
    ours = torch.autograd.grad(y, x, grads, retain_graph=True)
    expected = op._reduce_scatter_cast_coalesced(
        grads, sizes, [source, source], rank, group, **within
    )
    for a, b in zip(ours, expected, strict=True):
        assert torch.equal(a, b) and a.dtype == source
    # One output's gradient alone: the other's is sent as zeros.
    a, b = torch.autograd.grad(y[1], x, grads[1])
    assert torch.equal(b, expected[1]) and not a.any()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_gradients(ranks):
    on_ranks(ranks, _gradients, None, f32)
    on_ranks(ranks, _gradients, bf16, torch.float64)


def _not_differentiable():
    rank, size, group = _here()
    x = torch.ones(2, 3, requires_grad=True)
    args = ([2] * size, torch.float8_e4m3fn, rank, group)
    data, inv_scale = op.gather_cast_float8(x, *args)
    with pytest.raises(RuntimeError, match="derivative for deepsp::_gather_cast_float8"):
        (data.float() * inv_scale).sum().backward()
    with torch.no_grad():
        assert not op.gather_cast_float8(x, *args)[0].requires_grad


@pytest.mark.parametrize("ranks", [1, 2])
def test_float8_itself_has_no_derivative(ranks):
    on_ranks(ranks, _not_differentiable)
