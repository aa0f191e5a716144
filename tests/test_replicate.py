"""What every rank holds whole and uses for its own tokens: gradients become sums."""

import pytest
import torch
import torch.distributed as dist
from harness import on_ranks
from reference import draw

import deepsp  # noqa: F401  (the ops)

op = torch.ops.deepsp


def _where():
    return dist.get_rank(), dist.get_world_size(), dist.group.WORLD.group_name


def _sums(dtype):
    rank, size, _ = where = _where()
    x = draw(3, 4, seed=1).to(dtype).requires_grad_()
    y = draw(5, seed=2).to(dtype).requires_grad_()
    passed, token = op.replicate_start([x, y], *where)
    a, b = op.replicate_wait(passed, token, *where)
    assert a.data_ptr() == x.data_ptr() and torch.equal(b, y)  # nothing is copied forward
    mine = [draw(3, 4, seed=10 + rank).to(dtype), draw(5, seed=20 + rank).to(dtype)]
    ((a * mine[0]).sum() + (b * mine[1]).sum()).backward()
    for x_, seed, shape in ((x, 10, (3, 4)), (y, 20, (5,))):
        expected = sum(draw(*shape, seed=seed + r).to(dtype) for r in range(size))
        torch.testing.assert_close(x_.grad, expected)
    # A tensor that only some ranks use, and one that nobody does.
    x.grad = y.grad = None
    passed, token = op.replicate_start([x, y], *where)
    a, b = op.replicate_wait(passed, token, *where)
    (a * (rank == 0)).sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x)) and torch.equal(y.grad, torch.zeros_like(y))
    x.grad = None
    op._scale_gradient(x, 3.0).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 3))


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_gradients_become_sums(ranks, dtype):
    on_ranks(ranks, _sums, dtype)


def _order():
    """The later bucket's sum is launched before the earlier one's gradients are computed."""
    where = _where()
    first, second = (draw(6, 6, seed=s).requires_grad_() for s in (1, 2))
    starts = [op.replicate_start([w], *where) for w in (first, second)]
    x = draw(4, 6, seed=3)
    for passed, token in starts:
        (w,) = op.replicate_wait(passed, token, *where)
        x = (x @ w).tanh()
    with torch.profiler.profile() as profile:
        x.sum().backward()
    found = [e.name for e in sorted(profile.events(), key=lambda e: e.time_range.start)]
    marks = [
        n for n in found if n in ("deepsp::all_reduce_start", "deepsp::all_reduce_wait", "aten::mm")
    ]
    names = {"deepsp::all_reduce_start": "s", "deepsp::all_reduce_wait": "w", "aten::mm": "m"}
    order = "".join(names[m] for m in marks)
    assert order.replace("mm", "m") in ("msmsww", "msmsww"), order


def test_sums_travel_while_gradients_are_computed():
    on_ranks(2, _order)


def _wrong():
    rank, size, name = _where()
    with pytest.raises(
        ValueError, match=r"inputs\[1\] to have the dtype of inputs\[0\] .*, got float64"
    ):
        op.all_reduce_start([torch.ones(2), torch.ones(2).double()], "partial", rank, size, name)
    with pytest.raises(ValueError, match=r"0 <= rank < .*, got 5"):
        op.all_reduce_start([torch.ones(2)], "partial", 5, size, name)
    with pytest.raises(ValueError, match="the 6 elements in shapes"):
        op.all_reduce_wait(torch.ones(5), [2, 3], [2], "partial", rank, size, name)
    with pytest.raises(ValueError, match=r"grad to be .*, got ''"):
        op.all_reduce_start([torch.ones(2)], "", rank, size, name)


def test_wrong_input():
    on_ranks(1, _wrong)
