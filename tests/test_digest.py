"""Digests of tensors: every bit counts, where it lies in memory doesn't."""

import pytest
import torch
import torch.distributed as dist
from harness import on_ranks

from deepsp.ranks.agreement import digests, first_difference

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]


def digest_of(x, name="x"):
    return digests([(name, x)])[name]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_bit_counts_and_strides_do_not(dtype):
    x = torch.randn(3, 5, dtype=torch.float64).mul(9).to(dtype)
    same = digest_of(x)
    assert digest_of(x.t().contiguous().t()) == same
    # Bytes that don't begin at a word's border.
    beside = torch.cat([torch.zeros(1, dtype=dtype), x.flatten()])[1:].view(3, 5)
    assert digest_of(beside) == same
    for count in (1, 5):
        expanded = x[0, :1].expand(count)
        assert digest_of(expanded) == digest_of(expanded.contiguous().clone())
        assert digest_of(x[:1, :1].expand(count, 3)) == digest_of(x[:1, :1].repeat(count, 3))
    assert digest_of(x[:, ::2]) == digest_of(x[:, ::2].clone())
    assert digest_of(x, "y") != same
    assert digest_of(x.view(5, 3)) != same
    assert digest_of(x.view(torch.uint8)) != same
    seen = {same}
    for byte in range(x.nbytes):
        for bit in (0, 7):
            other = x.clone()
            other.view(torch.uint8).flatten()[byte] ^= 1 << bit
            seen.add(digest_of(other))
    assert len(seen) == 1 + 2 * x.nbytes


def test_signs_and_orders_do_not_cancel():
    x = torch.randn(1 << 19, dtype=torch.float64)
    changes = [([2, 5], [-1, -1]), ([2, 400_000], [-1, -1]), ([131_072, 262_144], [-1, -1])]
    seen = {digest_of(x)}
    for where, factors in changes:
        other = x.clone()
        other[where] *= torch.tensor(factors)
        seen.add(digest_of(other))
    seen.add(digest_of(x.flip(0)))
    seen.add(digest_of(x.roll(1 << 17)))
    seen.add(digest_of(-x))
    assert len(seen) == 7


def test_what_has_no_contents():
    assert digest_of(torch.empty(0, 3)) != digest_of(torch.empty(3, 0))
    assert digest_of(torch.empty(2, device="meta")) == digest_of(torch.ones(2, device="meta"))
    x = torch.randn(4, 4).relu()
    assert digest_of(x.to_sparse()) == digest_of(x)
    assert digest_of(torch.tensor(1.0)) != digest_of(torch.tensor(2.0))


def _differences():
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    same = torch.arange(5.0)
    assert first_difference([("a", same), ("b", same)]) is None
    other = same + (rank == last)
    assert first_difference([("a", same), ("b", other)])[:3] == ("b", 0, last)
    more = [("a", same)] + [("b", same)] * (rank == last)
    assert first_difference(more)[:3] == ("b", 0, last)
    assert first_difference([] if rank == 0 else more)[:3] == ("a", 0, 1)
    assert first_difference([("a", same[: 4 + (rank != 1)])])[:3] == ("a", 0, 1)
    assert first_difference([("a", same.to(torch.float64 if rank else torch.float32))]) is not None


@pytest.mark.parametrize("size", [2, 3])
def test_the_first_difference_is_known_to_all(size):
    on_ranks(size, _differences)
