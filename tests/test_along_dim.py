"""Collectives along any dimension, against one process that has everything."""

import pytest
import torch
import torch.distributed as dist
from exchanges import check_along_dim
from harness import on_ranks
from reference import draw

import deepsp
from deepsp.ranks.lengths import seq_lens

op = torch.ops.deepsp


def _where():
    return dist.get_rank(), dist.get_world_size(), dist.group.WORLD.group_name


@pytest.mark.messages
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_against_one_process(ranks, dtype):
    on_ranks(ranks, check_along_dim, dtype, [0, 1, 2, -1], ["even", "split", "one"])


@pytest.mark.messages
def test_four_ranks():
    on_ranks(4, check_along_dim, torch.float64, [0, 1, -1], ["split"])


def _rows():
    """Long rows, which travel one by one, to their places."""
    rank, size, _ = _where()
    for lens in (seq_lens(2 * size + 1), [3] * size):
        shape = [2, sum(lens), 20000]
        x = torch.arange(2 * sum(lens), dtype=torch.float32).view(2, -1, 1).expand(shape)
        part = x.narrow(1, sum(lens[:rank]), lens[rank])
        assert torch.equal(deepsp.collectives.all_gather(part, 1, sizes=lens, grad="partial"), x)
        y = deepsp.collectives.reduce_scatter(x * (rank + 1), 1, sizes=lens)
        assert torch.equal(y, part * sum(range(1, size + 1)))


@pytest.mark.messages
@pytest.mark.parametrize("ranks", [2, 3])
def test_long_rows(ranks):
    on_ranks(ranks, _rows)


def _halves():
    """Starts and waits give what the whole op does, backward too, in any order."""
    rank = dist.get_rank()
    lens = seq_lens(7)
    x = draw(2, lens[rank], 5, seed=rank).requires_grad_()
    whole = draw(2, 7, 5, seed=9 + rank).requires_grad_()
    w = draw(2, 7, 5, seed=20 + rank)
    mine = w.narrow(1, 0, lens[rank])
    for grad in ("replicated", "partial"):
        pending = [
            deepsp.collectives.all_gather_start(x, 1, sizes=lens, grad=grad),
            deepsp.collectives.reduce_scatter_start(whole, 1, sizes=lens),
            deepsp.collectives.all_reduce_start(whole, grad=grad),
            deepsp.collectives.scatter_start(whole, 1, sizes=lens),
        ]
        got = [p.wait() for p in pending]
        want = [
            deepsp.collectives.all_gather(x, 1, sizes=lens, grad=grad),
            deepsp.collectives.reduce_scatter(whole, 1, sizes=lens),
            deepsp.collectives.all_reduce(whole, grad=grad),
            deepsp.collectives.scatter(whole, 1, sizes=lens),
        ]
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b)

        def grads(ys):
            a, b, c, d = ys
            loss = (a * w).sum() + (b * mine).sum() + (c * w).sum() + (d * mine).sum()
            return torch.autograd.grad(loss, (x, whole))

        for a, b in zip(grads(got), grads(want), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        with pytest.raises(RuntimeError, match="already"):
            pending[0].wait()


@pytest.mark.messages
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_halves(ranks):
    on_ranks(ranks, _halves)


def _overlap():
    """In backward, the gradient's collective is launched before what stood between is
    differentiated, and waited for behind it."""
    a, b = (draw(6, 6, seed=s).requires_grad_() for s in (1, 2))
    pending = deepsp.collectives.reduce_scatter_start(a @ a, 0)
    between = b @ b
    loss = pending.wait().sum() + between.sum()
    with torch.profiler.profile() as profile:
        loss.backward()
    names = [e.name for e in sorted(profile.events(), key=lambda e: e.time_range.start)]
    marks = {"deepsp::all_gather_start": "s", "deepsp::all_gather_wait": "w", "aten::mm": "m"}
    assert "".join(marks[n] for n in names if n in marks) == "smmwmm"


def test_the_order_in_backward():
    on_ranks(2, _overlap)


def _gradcheck(dim):
    """On the global function: every rank holds all inputs, and what it gets is made whole by sums
    of zero-padded parts."""
    rank, size, _ = _where()
    lens = seq_lens(5)

    shape = [2, 3, 2]
    shape[dim] = 5
    inputs = torch.stack([draw(*shape, seed=r) for r in range(size)]).requires_grad_()

    def gather(x):
        part = x[0].narrow(dim, sum(lens[:rank]), lens[rank])
        y = deepsp.collectives.all_gather(part, dim, sizes=lens, grad="partial")
        return deepsp.collectives.all_reduce(y * (rank + 1), grad="replicated")

    def scatter(x):
        y = deepsp.collectives.reduce_scatter(x[rank], dim, sizes=lens)
        parts = [torch.zeros(_with(shape, dim, n), dtype=y.dtype) for n in lens]
        parts[rank] = y
        return deepsp.collectives.all_reduce(torch.cat(parts, dim), grad="replicated")

    for f in (gather, scatter):
        # A rank's gradient of the inputs is its share of it.
        def summed(x, f=f):
            return f(deepsp.collectives.replicate(x))

        assert torch.autograd.gradcheck(summed, [inputs])


def _with(shape, dim, n):
    return [n if d == dim else length for d, length in enumerate(shape)]


@pytest.mark.messages
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_gradcheck(dim):
    on_ranks(2, _gradcheck, dim)


def _second_derivative():
    rank, size = dist.get_rank(), dist.get_world_size()
    lens = seq_lens(5)
    mine = slice(sum(lens[:rank]), sum(lens[: rank + 1]))
    x, v = draw(2, 5, seed=1), draw(2, 5, seed=2)
    ws = [draw(2, 5, seed=3 + r) for r in range(size)]
    part, w = x[:, mine].clone().requires_grad_(), ws[rank].clone().requires_grad_()
    loss = (deepsp.collectives.all_gather(part**3, 1, sizes=lens, grad="partial") * w).sum()
    (g,) = torch.autograd.grad(loss, part, create_graph=True)
    torch.testing.assert_close(g, (3 * x**2 * sum(ws))[:, mine])
    by_part, by_w = torch.autograd.grad((g * v[:, mine]).sum(), (part, w))
    torch.testing.assert_close(by_part, (6 * x * v * sum(ws))[:, mine])
    torch.testing.assert_close(by_w, 3 * x**2 * v)


@pytest.mark.parametrize("ranks", [2, 3])
def test_second_derivative(ranks):
    on_ranks(ranks, _second_derivative)


def _dtypes():
    rank, size, _ = _where()
    for dtype in (torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64, torch.half):
        x = (torch.arange(2 * 3).view(2, 3) + 10 * rank).to(dtype)
        y = deepsp.collectives.all_gather(x, 1, grad="partial")
        each = [(torch.arange(6).view(2, 3) + 10 * r).to(dtype) for r in range(size)]
        assert torch.equal(y, torch.cat(each, 1))
        assert torch.equal(deepsp.collectives.scatter(y, 1), x)
    # In float32, one bit beyond bfloat16 survives; in bfloat16 it doesn't.
    x = torch.tensor([1.0 if rank == 0 else 2**-8]).bfloat16().repeat(size)
    y = deepsp.collectives.reduce_scatter(x, 0)
    exact = torch.tensor([1 + (size - 1) * 2**-8]).bfloat16()
    assert torch.equal(y, exact)
    assert torch.equal(deepsp.collectives.all_reduce(x, grad="partial"), exact.expand(size))
    rounded = deepsp.collectives.reduce_scatter(x, 0, reduce_dtype=torch.bfloat16)
    assert torch.equal(rounded, torch.tensor([1.0]).bfloat16())


def _sixteen_bits():
    """Of any length: shares begin at multiples of 16 bytes, and the last ones may be short."""
    rank, size, _ = _where()
    dynamic = torch.compile(
        lambda x: deepsp.collectives.all_reduce(x * 1, grad="partial"),
        dynamic=True,
        backend="aot_eager",
    )
    lengths = (0, 1, 7, 8, 9, 16, 17, 64, 65, 8 * size + 1, 1000)
    cases = [(n, torch.bfloat16) for n in lengths] + [(9, torch.half), (65, torch.half)]
    for n, dtype in cases:
        each = [draw(n, seed=n + r, dtype=torch.float32).to(dtype) for r in range(size)]
        x = each[rank].clone().requires_grad_()
        expected = sum(e.float() for e in each).to(dtype)
        eager = lambda x: deepsp.collectives.all_reduce(x, grad="partial")  # noqa: E731
        for call in (eager, dynamic) if dtype is torch.bfloat16 else (eager,):
            y = call(x)
            assert torch.equal(y, expected), n
            (g,) = torch.autograd.grad(y.float().square().sum() / 2, x)
            assert torch.equal(g, (size * expected.float()).to(dtype)), n
        shape = torch.ops.deepsp.all_reduce_start([x.detach()], "partial", *_where()).shape
        meta = torch.ops.deepsp.all_reduce_start([x.detach().to("meta")], "partial", *_where())
        assert shape == meta.shape and (shape[1] % 8 == 0 or shape[1] == n)


@pytest.mark.messages
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_sums_of_sixteen_bits(ranks):
    on_ranks(ranks, _sixteen_bits)


@pytest.mark.parametrize("ranks", [2, 3])
def test_dtypes_and_sums(ranks):
    on_ranks(ranks, _dtypes)


def _errors():
    rank, size, name = _where()
    x = torch.ones(2, 4)
    cases = [
        (
            lambda: deepsp.collectives.all_gather(x, 2, grad="partial"),
            r"dim to be in \[-2, 1\] .*, got 2",
        ),
        (
            lambda: deepsp.collectives.all_gather(x, 1, grad="whole"),
            "grad to be 'replicated' or .*, got 'whole'",
        ),
        (
            lambda: deepsp.collectives.all_gather(x, 1, sizes=[4], grad="partial"),
            "sizes to have one entry .*, got 1",
        ),
        (
            lambda: deepsp.collectives.all_gather(x, 1, sizes=[3, 3], grad="partial"),
            "input to have size 3 .*, got 4",
        ),
        (
            lambda: deepsp.collectives.reduce_scatter(x, 1, sizes=[3, 3]),
            "input to have size 6 .*, the sum of sizes, got 4",
        ),
        (
            lambda: deepsp.collectives.reduce_scatter(x, 1, sizes=[5, -1]),
            r"sizes\[1\] >= 0, got -1",
        ),
        (
            lambda: deepsp.collectives.reduce_scatter(x.long(), 1),
            "input to be float64.*, got int64",
        ),
        (
            lambda: deepsp.collectives.reduce_scatter(x, 1, reduce_dtype=torch.int32),
            "reduce_dtype to be .*, got int32",
        ),
        (lambda: deepsp.collectives.all_reduce(x, grad="x"), "grad to be .*, got 'x'"),
        (lambda: deepsp.collectives.scatter(x, -3), "dim to be in .*, got -3"),
        (lambda: deepsp.collectives.scatter(x.sum(), 0), "dim to be in .* 0 dimensions, got 0"),
        (
            lambda: op.all_gather(x, 1, [4, 4], "partial", 1 - rank, name),
            "rank to be .*, the rank of this process",
        ),
        (
            lambda: op.all_gather(x, 1, [4, 4, 4], "partial", rank, name),
            "sizes to have one entry .*, got 3",
        ),
        (
            lambda: op.all_gather(x, 1, [4, 4], "partial", rank, "nobody"),
            "group_name to be the name of a process group",
        ),
        (
            lambda: op.all_gather_wait(torch.ones(3), 1, [4, 4], [2, 8], "partial", rank, name),
            r"the buffer .* to have shape \[2, 8\], got \[3\]",
        ),
        (
            lambda: op.reduce_scatter_wait(torch.ones(2, 8), 1, [4, 4], [2, 9], rank, name),
            "shape, of the full tensor, to have size 8 .*, got 9",
        ),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()
    # Nothing was sent: the group still works.
    assert deepsp.collectives.all_reduce(x, grad="partial").sum() == 8 * size


def test_errors():
    on_ranks(2, _errors)
