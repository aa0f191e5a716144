"""Shards are cast and gathered, gradients summed and scattered, exactly as one process does it."""

import math

import pytest
import torch
import torch.distributed as dist
from harness import on_ranks
from hypothesis import given
from hypothesis import strategies as st
from reference import Take, Whole, draw, events, flat, names, sent, warm_up
from shards import DTYPES, Shards, check_gather, same_bits, sum_in_order
from torch.autograd import forward_ad, gradcheck, gradgradcheck

op = torch.ops.deepsp
RANKS = [1, 2, 3, 4]
IN_PLACE = 512 << 10  # bytes of a rank's piece from which on it travels on its own


def _here():
    return dist.get_rank(), dist.group.WORLD.group_name


@st.composite
def _specs(draw_):
    rows = st.sampled_from(["any", "one rank", "few"])

    def spec():
        kind = draw_(rows)
        counts = [draw_(st.integers(0, 1 if kind == "few" else 7)) for _ in range(4)]
        if kind == "one rank":
            kept = draw_(st.integers(0, 3))
            counts = [n if p == kept else 0 for p, n in enumerate(counts)]
        return (
            tuple(counts),
            tuple(draw_(st.lists(st.sampled_from([1, 2, 3, 5, 0]), max_size=4))),
            draw_(st.sampled_from(DTYPES)),
            draw_(st.sampled_from(DTYPES)),
            draw_(st.sampled_from(["plain", "transposed", "strided", "expanded"])),
        )

    return (
        [spec() for _ in range(draw_(st.integers(1, 4)))],
        draw_(st.sampled_from([None, *DTYPES])),
        draw_(st.booleans()),
    )


@pytest.mark.parametrize("ranks", RANKS)
@given(case=_specs())
def test_values_and_gradients(ranks, case):
    on_ranks(ranks, check_gather, *case)


# Ties and neighbours of every limit, as float64.
_NUMBERS = [
    math.nan,
    math.inf,
    -math.inf,
    0.0,
    -0.0,
    5e-324,
    -5e-324,
    1e-310,
    2.0**-126,
    2.0**-149,
    2.0**-150,
    1.5 * 2.0**-149,
    2.0**-133,
    -(2.0**-134),
    2.0**-14,
    2.0**-24,
    2.0**-25,
    3 * 2.0**-25,
    65504.0,
    65519.0,
    65520.0,
    -65536.0,
    3.3895313892515355e38,
    3.395e38,
    3.4028234663852886e38,
    3.4028235677973366e38,
    1e39,
    -1e300,
    1 + 2.0**-8,
    1 + 3 * 2.0**-8,
    1 + 2.0**-11,
    1 + 3 * 2.0**-11,
    1 + 2.0**-24,
    1 + 3 * 2.0**-24,
    1 + 2.0**-8 + 2.0**-40,
    math.pi,
]


def _special():
    rank, group = _here()
    size = dist.get_world_size()
    sizes = [5, 0, 3, 9][:size]
    numbers = torch.tensor(_NUMBERS, dtype=torch.float64)
    for source in DTYPES:
        pieces = [numbers.roll(p).repeat(n, 1).to(source) for p, n in enumerate(sizes)]
        full = {dtype: torch.cat([x.to(dtype) for x in pieces]) for dtype in DTYPES}
        for dtype in DTYPES:
            assert same_bits(op.gather_cast(pieces[rank], sizes, dtype, rank, group), full[dtype])
            # Sums follow the same rules: infinity, NaN, overflow, subnormals.
            parts = [full[dtype].roll(p, 1) for p in range(size)]
            summed_here = op.reduce_scatter_cast(parts[rank], sizes, source, rank, group)
            expected = sum_in_order(parts, source).split(sizes)[rank]
            assert same_bits(summed_here + 0, expected + 0), (dtype, source)
        ours = op.gather_cast_coalesced([pieces[rank]] * 4, sizes * 4, DTYPES, rank, group)
        for dtype, y in zip(DTYPES, ours, strict=True):
            assert same_bits(y, full[dtype])


@pytest.mark.parametrize("ranks", [1, 3])
def test_special_numbers(ranks):
    on_ranks(ranks, _special)


def _large():
    """A list of large and small ones, and of both sides of the border. Large ones are views of
    the buffer where they arrived; the others are copied out of it."""
    border = IN_PLACE // 2
    f32, bf16 = torch.float32, torch.bfloat16
    specs = [
        ((3, 2, 4, 1), (5, 7), f32, bf16, "plain"),
        ((1, 0, 1, 1), (border,), f32, bf16, "plain"),
        ((1, 1, 0, 1), (border - 1,), f32, bf16, "plain"),
        ((300, 700, 0, 513), (513,), f32, f32, "transposed"),
        ((2, 0, 1, 0), (3,), torch.float64, torch.float64, "strided"),
        ((90000, 1, 70000, 5), (2,), bf16, torch.float64, "plain"),
    ]
    large = [False, True, False, True, False, True]
    size = dist.get_world_size()
    for some in (slice(None), slice(3, 4), slice(1, 2), slice(0, 3), slice(3, None)):
        check_gather(specs[some], None, False)
    case = Shards(specs)
    outputs = case.gather(case.shards())
    places = [y.untyped_storage().data_ptr() for y in outputs]
    assert [place == places[1] for place in places] == large
    assert len(set(places)) == 4

    # And what goes on the wire: one message of what is small, one of each that is large.
    def pieces(p):
        return [
            rows[p] * math.prod(spec[1]) * spec[3].itemsize
            for rows, spec in zip(case.rows, specs, strict=True)
        ]

    mine = pieces(case.rank)
    small = sum(-(-n // 16) * 16 for n, is_large in zip(mine, large, strict=True) if not is_large)
    messages = [small, *(n for n, is_large in zip(mine, large, strict=True) if is_large)]
    expected = [n for n in messages for _ in range(size - 1) if n]
    forward, grads = [], case.gradients(case.rank)
    assert sent(lambda: forward.append(case.gather(case.shards()))) == expected
    # Back, a rank sends each of the others its rows: what that one has sent.
    others = [pieces((case.rank + step) % size) for step in range(1, size)]
    back = [
        sum(-(-n // 16) * 16 for n, is_large in zip(other, large, strict=True) if not is_large)
        for other in others
    ]
    back += [other[i] for i in range(len(specs)) if large[i] for other in others]
    assert sent(lambda: torch.autograd.backward(forward[0], grads)) == [n for n in back if n]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_large_ones_arrive_in_place(ranks):
    on_ranks(ranks, _large, apart="messages")


# -------------------------------------------------------------------------------- gradients


_OF_BACKEND = {
    "even": [((4, 4, 4), (6,), torch.float32, torch.bfloat16, "plain")],
    "none": [((2, 2, 2), (0,), torch.float32, torch.bfloat16, "plain")],
    "several": [
        ((3, 0, 4), (5,), torch.float32, torch.bfloat16, "transposed"),
        ((2, 2, 2), (), torch.float64, torch.float64, "plain"),
        ((0, 0, 1), (7,), torch.bfloat16, torch.float32, "strided"),
        ((3, 3, 1), (1, 3), torch.float32, torch.float16, "expanded"),
    ],
}


def _summed_by_the_backend(name, dtype):
    """One reduce-scatter of the backend, of whatever rows and dtypes, and no sum of deepsp's."""
    case = Shards(_OF_BACKEND[name])
    rest = (case.rank, case.group)
    shards, grads = case.shards(), case.gradients(case.rank)
    dtypes = [x.dtype for x in shards]
    full = op.gather_cast_coalesced(shards, case.sizes, case.dtypes, *rest, backend_sums=dtype)
    found = []

    def backward():
        found.append(torch.autograd.grad(full, shards, grads))

    def adjoint():
        rows = (grads, case.sizes, dtypes)
        found.append(op._reduce_scatter_cast_coalesced(*rows, *rest, backend_sums=dtype))

    for call in (backward, adjoint):
        seen = names(call)
        launched = int(case.size > 1 and name != "none")
        assert seen["deepsp::exchange"] == launched and seen["deepsp::sum"] == 0
        assert sum(event.startswith("gloo:") for event in seen.elements()) == launched
        # Even parts of whole 16 bytes are sent as they are cast.
        assert seen["deepsp::pack"] == int(name == "several")
    everyone = [case.gradients(p) for p in range(case.size)]
    for i, (a, b) in enumerate(zip(*found, strict=True)):
        terms = torch.stack([g[i].double() for g in everyone]).split(case.rows[i], 1)[case.rank]
        assert a.dtype == b.dtype == dtypes[i] and torch.equal(a, b)
        eps = max(torch.finfo(t).eps for t in (dtype, dtypes[i]))
        assert bool(((a - terms.sum(0)).abs() <= 4 * eps * terms.abs().sum(0)).all()), i


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_backend_sums(ranks):
    for name in _OF_BACKEND:
        for dtype in DTYPES[:3]:
            on_ranks(ranks, _summed_by_the_backend, name, dtype)


def _undefined():
    """A gradient that nobody asked for travels as zeros."""
    rank, group = _here()
    size = dist.get_world_size()
    x = [draw(2, 3, seed=i).float().requires_grad_() for i in range(3)]
    y = op.gather_cast_coalesced(x, [2] * size * 3, [torch.bfloat16] * 3, rank, group)
    # Another one on every rank: all send the same bytes.
    a, b, c = torch.autograd.grad(y[rank].sum(), x)
    for i, g in enumerate((a, b, c)):
        assert g.dtype == torch.float32
        assert torch.equal(g, torch.full((2, 3), 1.0 if i < size else 0.0))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_undefined_gradients(ranks):
    on_ranks(ranks, _undefined)


def _derivatives(by_backend):
    """On the global function: every rank uses the gathered tensors in its own way."""
    rank, group = _here()
    size = dist.get_world_size()
    sizes = [[2, 0, 1][:size], [1, 3, 0][:size]]
    totals = [sum(rows) for rows in sizes]
    f64 = torch.float64
    sums = {"backend_sums": f64} if by_backend else {}

    def gather(*whole):
        mine = [Take.apply(x, rows, 0) for x, rows in zip(whole, sizes, strict=True)]
        a, b = op.gather_cast_coalesced(mine, flat(sizes), [f64, f64], rank, group, **sums)
        a = a * op.gather_cast(mine[0], sizes[0], f64, rank, group, **sums)
        used = [a * (rank + 1) + a.sin(), b * b * (2 - rank) + a.sum()]
        return tuple(Whole.apply(x, [n] * size, 0) for x, n in zip(used, totals, strict=True))

    def scatter(*whole):
        mine = [Take.apply(x, [n] * size, 0) for x, n in zip(whole, totals, strict=True)]
        a, b = op._reduce_scatter_cast_coalesced(mine, flat(sizes), [f64, f64], rank, group, **sums)
        a = a * op.reduce_scatter_cast(mine[0], sizes[0], f64, rank, group, **sums)
        return tuple(Whole.apply(x * x, rows, 0) for x, rows in zip((a, b), sizes, strict=True))

    x = [draw(n, 2, seed=i).requires_grad_() for i, n in enumerate(totals)]
    y = [draw(n * size, 2, seed=5 + i).requires_grad_() for i, n in enumerate(totals)]
    for function, inputs in ((gather, x), (scatter, y)):
        gradcheck(function, inputs, fast_mode=True)
        gradgradcheck(function, inputs, fast_mode=True)


@pytest.mark.parametrize(
    ("ranks", "by_backend"), [(1, False), (2, False), (3, False), (2, True), (3, True)]
)
def test_gradcheck(ranks, by_backend):
    on_ranks(ranks, _derivatives, by_backend)


def _scatters_gradient():
    """The gradient of reduce_scatter_cast is the gather of what each rank asks for, cast to the
    dtype that travelled."""
    rank, group = _here()
    size = dist.get_world_size()
    sizes = [[3, 1, 0, 2][:size], [0, 2, 2, 1][:size]]
    x = [
        draw(sum(rows), 3).to(dtype).requires_grad_()
        for rows, dtype in zip(sizes, (torch.bfloat16, torch.float64), strict=True)
    ]
    out = op._reduce_scatter_cast_coalesced(
        x, flat(sizes), [torch.float32, torch.float16], rank, group
    )
    asked = [
        [draw(n, 3, seed=9 + p).to(y.dtype) for p, n in enumerate(rows)]
        for rows, y in zip(sizes, out, strict=True)
    ]
    ours = torch.autograd.grad(out, x, [grads[rank] for grads in asked])
    for g, t, grads in zip(ours, x, asked, strict=True):
        assert same_bits(g, torch.cat([a.to(t.dtype) for a in grads]))


@pytest.mark.parametrize("ranks", RANKS)
def test_the_gradient_of_a_sum_is_a_gather(ranks):
    on_ranks(ranks, _scatters_gradient)


def _modes():
    rank, group = _here()
    size = dist.get_world_size()
    x = draw(2, 3).float().requires_grad_()
    args = ([2] * size, torch.bfloat16, rank, group)
    full = op.gather_cast(x, *args)
    assert full.requires_grad and not full.is_leaf
    with torch.no_grad():
        assert not op.gather_cast(x, *args).requires_grad
    with torch.inference_mode():
        y = op.gather_cast(x, *args)
        z = op.reduce_scatter_cast(y, [2] * size, torch.float32, rank, group)
    assert y.is_inference() and same_bits(y, full.detach())
    assert torch.equal(z, x.detach().bfloat16().float() * size)
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match=r"forward|jvp"):
        op.gather_cast(forward_ad.make_dual(x, torch.ones_like(x)), *args)
    # A view that is to be negated when it is read.
    lazy = torch.view_as_complex(draw(2, 3, 2)).conj().imag
    assert lazy.is_neg()
    got = op.gather_cast(lazy, [2] * size, torch.float64, rank, group)
    assert torch.equal(got[2 * rank : 2 * rank + 2], lazy.clone())
    full.mul_(2)  # the output may be written to: it is nobody's view
    full.sum().backward()
    assert torch.equal(x.grad, torch.full((2, 3), 2.0 * size))


@pytest.mark.parametrize("ranks", [1, 2])
def test_modes(ranks):
    on_ranks(ranks, _modes)


def _other_buffers():
    """A buffer that is part of a larger tensor, or whose elements don't lie together."""
    rank, group = _here()
    size = dist.get_world_size()
    larger = torch.arange(3.0 + size * 4)
    (first, second) = (
        op.gather_cast_wait(b, [2] * size, [2], torch.float32, rank, group)
        for b in (larger[3:], larger[3:].clone())
    )
    assert torch.equal(first, second) and torch.equal(first.flatten(), larger[3:])
    with pytest.raises(
        ValueError, match="the contiguous buffer that the start returned, got strides"
    ):
        op.gather_cast_wait(
            torch.ones(2 * size * 4)[::2], [2] * size, [2], torch.float32, rank, group
        )


def test_other_buffers():
    on_ranks(2, _other_buffers)


# ------------------------------------------------------------------------------ what it costs


def _order(sums):
    """Compute between start and wait has its backward between the reverse start and wait."""
    rank, group = _here()
    w = draw(64, 128).float().requires_grad_()
    a, x = draw(32, 128).float().requires_grad_(), draw(16, 32).float().requires_grad_()
    kept = []

    def forward():
        buffer = op.gather_cast_start(w, [64, 64], torch.float32, rank, group, **sums)
        h = x @ a
        full = op.gather_cast_wait(buffer, [64, 64], [128], torch.float32, rank, group, **sums)
        kept.append((h @ full).sum())

    def seen(call):
        marks = {"deepsp::exchange": "x", "deepsp::sum": "w", "aten::mm": "m"}
        marks["deepsp::_gather_cast_coalesced_wait"] = marks["deepsp::land"] = "w"
        return "".join(marks.get(event.name, "") for event in events(call))

    warm_up()
    assert seen(forward) == "xmwm"
    assert seen(lambda: kept[0].backward()) == "mmxmmw"


def test_order():
    on_ranks(2, _order, {})
    on_ranks(2, _order, {"backend_sums": torch.float64})


def _costs():
    rank, group = _here()
    w = draw(64, 512).float().requires_grad_()
    many = [draw(4 + i, 512).float().requires_grad_() for i in range(6)]
    sizes = flat([len(x)] * 2 for x in many)

    def costs(gather):
        kept = []
        forward = names(lambda: kept.append(gather()))
        outputs = kept[0] if isinstance(kept[0], list) else [kept[0]]
        grads = [torch.ones_like(y) for y in outputs]
        backward = names(lambda: torch.autograd.backward(outputs, grads))
        # Nothing is copied but by the cast, which small shards make without aten, and packed at
        # most once.
        assert backward["aten::copy_"] == backward["aten::clone"] == forward["aten::clone"] == 0
        keys = ("deepsp::exchange", "deepsp::pack", "aten::copy_")
        return [forward[key] for key in keys] + [backward[key] for key in keys[:2]]

    def one():
        return op.gather_cast(w, [64, 64], torch.bfloat16, rank, group)

    def all_of_them(dtype=torch.bfloat16):
        return op.gather_cast_coalesced(many, sizes, [dtype] * 6, rank, group)

    warm_up()
    assert costs(one) == [1, 0, 1, 1, 0]
    assert costs(all_of_them) == [1, 0, 0, 1, 1]
    half = sent(all_of_them)
    assert half == [sum(x.numel() for x in many) * 2]
    assert sent(lambda: all_of_them(torch.float32)) == [2 * half[0]]
    assert sent(one) == [w.numel() * 2]


def test_messages_and_copies():
    on_ranks(2, _costs, apart="messages")
