"""The tokens before a rank's own, and their gradients, against one process that has everything."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from exchanges import HALO_LENGTHS, check_halo, halos_of
from harness import on_ranks
from reference import draw, events, sent
from torch._dynamo.testing import CompileCounterWithBackend

import deepsp

ops = torch.ops.deepsp


@pytest.mark.messages
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_against_one_process(ranks):
    on_ranks(ranks, check_halo, torch.float64, [0, 1, 2, -2])


def _dtypes():
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        check_halo(dtype, [1], {3: [[2, 1, 5], [4, 0, 3]]}, [3])


def _sums():
    """Gradients are added in float32, rounded once, and in rank order. In bfloat16, 1 + 2^-8 is 1;
    in float32, 1 + 2^24 is 2^24."""
    rank = dist.get_rank()
    for dtype, parts, total in (
        (torch.bfloat16, [1.0, 2.0**-8, 2.0**-8], 1 + 2.0**-7),
        (torch.float32, [1.0, 2.0**24, -(2.0**24)], 0.0),
    ):
        x = torch.zeros(1, 1 if rank == 0 else 0, 3, dtype=dtype, requires_grad=True)
        y = deepsp.previous_tokens(x, 2, seq_lens=[1, 0, 0, 0])
        (grad,) = torch.autograd.grad(y, x, torch.full_like(y, [0.0, *parts][rank]))
        assert torch.equal(grad, torch.full_like(x, total))


def test_dtypes_and_sums():
    on_ranks(3, _dtypes)
    on_ranks(4, _sums)


def test_two_machines():
    on_ranks(4, check_halo, torch.float64, [1], HALO_LENGTHS, [3, 20], apart="machines")


def _bytes():
    """The bytes of the messages, there and back, and the tokens that should have travelled."""
    rank = dist.get_rank()
    found = []
    for lens, n in (([4, 4, 4], 3), ([7, 1, 2], 3), ([2, 0, 2], 3), ([9, 1, 1], 20)):
        x = torch.ones(2, lens[rank], 4, requires_grad=True)
        y = deepsp.previous_tokens(x, n, seq_lens=lens)
        there = sent(lambda x=x, n=n, lens=lens: deepsp.previous_tokens(x, n, seq_lens=lens))
        back = sent(lambda y=y: y.sum().backward())
        wanted = sum(min(n, sum(lens[:p])) for p in range(3))
        found.append((sum(there), sum(back), wanted * 2 * 4 * 4, min(n, sum(lens[:rank])) * 32))
    return found


def test_exactly_these_tokens_travel():
    ranks = on_ranks(3, _bytes, apart="messages")
    for case in zip(*ranks, strict=True):
        assert sum(there for there, *_ in case) == case[0][2]
        assert [back for _, back, *_ in case] == [mine for *_, mine in case]


def _order_in_backward():
    """The gradient leaves before what stood between is differentiated, and is waited for behind."""
    x, b = draw(6, 4, seed=1).requires_grad_(), draw(6, 6, seed=2).requires_grad_()
    pending = deepsp.previous_tokens_start(x, 2, dim=0)
    between = b @ b
    loss = pending.wait().sum() + between.sum()
    marks = {"deepsp::_rows_start": "s", "deepsp::_rows_wait": "w", "aten::mm": "m"}
    found = [e.name for e in events(loss.backward)]
    assert "".join(marks[n] for n in found if n in marks) == "smmw"
    with pytest.raises(RuntimeError, match="already"):
        pending.wait()


def _second_derivative():
    rank, lens, n = dist.get_rank(), [3, 1, 2], 2
    x, v = draw(2, 6, 3).requires_grad_(), draw(2, 6, 3, seed=1)
    ws = [draw(2, n, 3, seed=2 + p).requires_grad_() for p in range(3)]
    part = x.detach().split(lens, 1)[rank].clone().requires_grad_()
    w = ws[rank].detach().clone().requires_grad_()
    y = deepsp.previous_tokens(part**3, n, seq_lens=lens)
    (grad,) = torch.autograd.grad((y**2 * w).sum(), part, create_graph=True)
    found = torch.autograd.grad((grad * v.split(lens, 1)[rank]).sum(), (part, w))
    loss = sum((h**2 * w).sum() for h, w in zip(halos_of(x**3, lens, n, 1), ws, strict=True))
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    by_x, *by_w = torch.autograd.grad((grad * v).sum(), (x, *ws))
    torch.testing.assert_close(found[0], by_x.split(lens, 1)[rank])
    torch.testing.assert_close(found[1], by_w[rank])


def _fresh_and_watched():
    """Memory of its own, also where nothing is sent; what anomaly mode sees; waited for once."""
    rank, size, name = dist.get_rank(), dist.get_world_size(), dist.group.WORLD.group_name
    x = torch.ones(1, 3, 2, requires_grad=True)
    for n in (0, 3):
        y = deepsp.previous_tokens(x, n)
        assert y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
    kept = y.clone()
    deepsp.previous_tokens(x * 2, 3)
    assert torch.equal(y, kept)
    lens = [3] * size
    with torch.autograd.set_detect_anomaly(True):  # a start waits, for what looks for NaN
        time.sleep(0.03 * (size - rank))
        buffer = ops.previous_tokens_start(x, 2, 1, lens, rank, name)
        assert buffer.sum() == 4 * min(rank, 1)
    ops.previous_tokens_wait(buffer, 2, 1, lens, x.shape, rank, name).sum().backward()
    with pytest.raises(ValueError, match="waited for already"):
        ops.previous_tokens_wait(buffer, 2, 1, lens, x.shape, rank, name)


def _eager():
    _order_in_backward()
    _second_derivative()
    _fresh_and_watched()


@pytest.mark.messages
def test_backward_and_memory():
    on_ranks(3, _eager)


def _two_in_flight(x, lens):
    """On the last rank, whose tokens nobody wants, the two send the same: nothing."""
    halos = [deepsp.previous_tokens_start(y, 9, seq_lens=lens) for y in (x.sin(), x * 2)]
    return x * sum(halo.wait().square() for halo in halos).mean(1, keepdim=True)


def _compiled(backend, all_lens):
    torch._dynamo.reset()
    rank = dist.get_rank()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(_two_in_flight, fullgraph=True, dynamic=True, backend=counter)
    for lens in all_lens:
        x = draw(2, sum(lens), 3).requires_grad_()
        far = [halos_of(y, lens, 9, 1) for y in (x.sin(), x * 2)]
        far = [(a**2 + b**2).mean(1, keepdim=True) for a, b in zip(*far, strict=True)]
        expected = torch.cat([y * f for y, f in zip(x.split(lens, 1), far, strict=True)], 1)
        grad = draw(*expected.shape, seed=2)
        (of_x,) = torch.autograd.grad(expected, x, grad)
        part = x.detach().split(lens, 1)[rank].clone().requires_grad_()
        y = compiled(part, lens)
        torch.testing.assert_close(y, expected.split(lens, 1)[rank], rtol=1e-9, atol=1e-9)
        (found,) = torch.autograd.grad(y, part, grad.split(lens, 1)[rank])
        torch.testing.assert_close(found, of_x.split(lens, 1)[rank], rtol=1e-9, atol=1e-9)
    assert counter.frame_count <= 2


# "..decomp_partition" runs what Inductor compiles by aten. Inductor's own passes and scheduler
# mustn't drop an exchange that one rank doesn't need.
@pytest.mark.parametrize(
    ("backend", "lens"),
    [
        ("aot_eager", [[12, 10, 11], [15, 13, 10], [3, 0, 4]]),
        ("aot_eager_decomp_partition", [[12, 2, 4]]),
        ("inductor", [[3, 4]]),
    ],
)
def test_compiled(backend, lens):
    on_ranks(len(lens[0]), _compiled, backend, lens)


def _errors():
    rank, name = dist.get_rank(), dist.group.WORLD.group_name
    group, x = dist.new_group(), torch.ones(2, 4, 3)
    call = deepsp.previous_tokens
    disagree = [
        (lambda: call(x, 3 + rank, group), "rank 0 passes n 3, rank 1 passes n 4"),
        (lambda: call(x, -3 * rank, group), "rank 0 passes n 0, rank 1 passes n -3"),
        (lambda: call(x[:, : 4 - rank], 3, group), r"seq_lens \[4, 4\], rank 1 .* \[3, 3"),
        (lambda: call(x, 3, group, dim=rank), "rank 0 passes dim 0, rank 1 passes dim 1"),
        (lambda: call(x[: 2 - rank], 3, group), r"shape \[2, 'S_r', 3\], rank 1 passes shape \[1"),
        (lambda: call(x.double() if rank else x, 3, group), "float32, rank 1 .* torch.float64"),
        (
            lambda: call(x.clone().requires_grad_(rank == 1), 3, group),
            "gradients False, rank 1 passes",
        ),
    ]
    wrong = [
        (lambda: call(x, -1), "n >= 0, got -1"),
        (lambda: call(x, 2**50), "n to describe at most .*, got"),
        (lambda: call(x, 2, dim=3), r"dim to be in \[-3, 2\] .* 3 dimensions, got 3"),
        (lambda: call(x.sum(), 2, dim=0), "dim to be in .* 0 dimensions, got 0"),
        (lambda: call(x, 2, seq_lens=[4]), "seq_lens to have one entry .* 2 ranks .*, got 1"),
        (lambda: call(x, 2, seq_lens=[5, 5]), r"size 5 in dimension 1, .* seq_lens\[\d\], .*4"),
        (lambda: call(x, 2, seq_lens=[4, -4] if rank == 0 else [-4, 4]), ">= 0, got -4"),
        (lambda: call(x.to_sparse(), 2), "input to be a dense tensor, got layout"),
        (
            lambda: ops.previous_tokens(x, 2, 1, [4, 4], 1 - rank, name),
            "expected rank to be .*, the rank of this process",
        ),
        (
            lambda: ops.previous_tokens_wait(x[0], 2, 1, [4, 4], x.shape, rank, name),
            r"buffer to have shape \[2, 6\], got \[4, 3\]; pass what the start",
        ),
    ]
    for function, message in [*disagree, *wrong]:
        with pytest.raises(ValueError, match=message):
            function()
    assert call(x, 3, group).sum() == 18 * rank  # nothing was sent
    os.environ["DEEPSP_DEBUG"] = "1"
    try:
        with pytest.raises(ValueError, match=r"previous_tokens: .* n 3, rank 1 passes n 4"):
            call(x, 3 + rank, group)
        with pytest.raises(ValueError, match="rank 0 passes tokens of 6 elements, rank 1 passes"):
            call(x[: 2 - rank], 3, group)
    finally:
        del os.environ["DEEPSP_DEBUG"]


def test_wrong_uses():
    on_ranks(2, _errors)
