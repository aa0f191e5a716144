"""What ranks exchange, against one process that has everything."""

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from reference import draw, heads_of, lens_of, transposed
from torch.autograd import forward_ad

import deepsp
from deepsp.ranks.lengths import seq_lens


def with_layout(x, layout):
    """Returns the same values with other strides."""
    if layout == "bhsd":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "sbhd":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "dfirst":
        return x.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)
    if layout == "slices":
        wide = x.new_zeros(*x.shape[:3], 2 * x.size(3))
        wide[..., ::2] = x
        return wide[..., ::2]
    return x


def check_exchange(batch, total, heads, kv_heads, dims, dtype, layout, kind):
    """Compares both directions with indexing on the whole tensors, in any dtype: bit for bit."""
    rank, size = dist.get_rank(), dist.get_world_size()
    lens = lens_of(kind, total, size)
    counts = [heads, kv_heads, kv_heads]
    whole = []
    for i, (h, d) in enumerate(zip(counts, dims, strict=True)):
        numbers = draw(batch, total, h, d, seed=i) * 10
        whole.append(numbers.to(dtype) if dtype != torch.bool else numbers > 0)
    mine = [with_layout(x.split(lens, 1)[rank], layout) for x in whole]
    there = deepsp.seq_to_heads(mine, seq_lens=lens)
    q_heads, my_kv_heads = heads_of(rank, size, heads, kv_heads)
    for x, y, hs in zip(whole, there, [q_heads, my_kv_heads, my_kv_heads], strict=True):
        assert torch.equal(y, x[:, :, hs]), (layout, kind)
        assert y.stride(3) == 1 or y.size(3) <= 1
    # Back: q alone, whose heads have one owner each, is what it was.
    (back,) = deepsp.heads_to_seq([with_layout(there[0], layout)], [heads], seq_lens=lens)
    assert torch.equal(back, mine[0]) and back.is_contiguous()
    if not dtype.is_floating_point:
        return
    # All three: shared kv heads come back as often as they are read.
    backs = deepsp.heads_to_seq([with_layout(x, layout) for x in there], counts, seq_lens=lens)
    read = torch.zeros(kv_heads)
    for p in range(size):
        for j in heads_of(p, size, heads, kv_heads)[1]:
            read[j] += 1
    times = read.to(dtype)[:, None]
    expected = [mine[0], *((x.double() * times.double()).to(dtype) for x in mine[1:])]
    for x, y in zip(expected, backs, strict=True):
        assert torch.equal(x, y) and y.is_contiguous()


def check_pairs():
    rank, size = dist.get_rank(), dist.get_world_size()
    lens = lens_of("split", 7, size)
    x = [draw(2, 7, h, 3, seed=h).split(lens, 1)[rank] for h in (6, 2)]
    first = deepsp.seq_to_heads_start(x, seq_lens=lens)
    second = deepsp.seq_to_heads_start(x[::-1][1:], seq_lens=lens)  # two at once
    got, other = first.wait(), second.wait()
    for a, b in zip(deepsp.seq_to_heads(x, seq_lens=lens), got, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(other[0], got[0])
    with pytest.raises(RuntimeError, match="waited for already"):
        first.wait()
    back = deepsp.heads_to_seq_start(got, [6, 2], seq_lens=lens).wait()
    for a, b in zip(deepsp.heads_to_seq(got, [6, 2], seq_lens=lens), back, strict=True):
        assert torch.equal(a, b)


def check_fresh_outputs():
    x = draw(2, 4, 4, 3)
    y = deepsp.seq_to_heads([x, x])
    z = deepsp.heads_to_seq(y, [4, 4])
    storages = {t.untyped_storage().data_ptr() for t in (x, y[0], *z)}
    assert len(storages) == 4
    y[0].zero_()
    assert y[1].any()
    assert torch.equal(z[0], x) and torch.equal(z[1], x)


def check_modes():
    x = draw(1, 2, 4, 3).requires_grad_()
    with torch.no_grad():
        (y,) = deepsp.seq_to_heads([x])
        assert not y.requires_grad
    with torch.inference_mode():
        (z,) = deepsp.seq_to_heads([x])
        (back,) = deepsp.heads_to_seq([z], [4])
    assert z.is_inference() and torch.equal(y, z) and torch.equal(back, x)
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match=r"forward|jvp"):
        deepsp.seq_to_heads([forward_ad.make_dual(x, torch.ones_like(x))])
    batch = torch.stack([x.detach(), x.detach()])
    try:
        out = torch.vmap(lambda t: deepsp.seq_to_heads([t])[0])(batch)
    except RuntimeError:
        pass
    else:
        assert torch.equal(out, torch.stack([y, y]))


# Calls that every way of sending must pass.
EXCHANGES = [
    (check_exchange, 2, 13, 6, 3, (8, 8, 4), torch.float64, "bshd", "skewed"),
    (check_exchange, 1, 9, 9, 3, (5, 5, 5), torch.bfloat16, "bhsd", "empty"),
    (check_exchange, 2, 7, 4, 4, (8, 8, 8), torch.float32, "slices", "split"),
    (check_pairs,),
    (check_fresh_outputs,),
]


HALO_LENGTHS = {
    1: [[4], [0]],
    2: [[5, 3], [0, 6], [6, 0], [1, 1]],
    3: [[4, 4, 4], [2, 1, 5], [4, 0, 3], [0, 0, 2], [0, 0, 0]],
    4: [[3, 3, 3, 3], [7, 1, 0, 2], [1, 1, 1, 1]],
}
HALO_TOKENS = [0, 1, 3, 5, 20]


def halos_of(whole, lens, n, dim):
    """Returns each rank's halo, cut from the whole sequence."""
    shape = [n if d == dim % whole.dim() else size for d, size in enumerate(whole.shape)]
    padded = torch.cat([whole.new_zeros(shape), whole], dim)
    return [padded.narrow(dim, sum(lens[:p]), n) for p in range(len(lens))]


def check_halo(dtype, dims, which=HALO_LENGTHS, numbers=HALO_TOKENS):
    rank, size = dist.get_rank(), dist.get_world_size()
    for lens, n, dim in itertools.product(which[size], numbers, dims):
        shape = [2, 3, 4]
        shape[dim] = sum(lens)
        whole = (10 * draw(*shape)).to(dtype)
        mine = whole.split(lens, dim)[rank]
        for x in (mine.clone(), transposed(mine)):
            x.requires_grad_(dtype.is_floating_point)
            y = deepsp.previous_tokens(x, n, seq_lens=lens, dim=dim)
            assert torch.equal(y, halos_of(whole, lens, n, dim)[rank]), (lens, n, dim)
            assert y.is_contiguous() and y.dtype == dtype
            if not dtype.is_floating_point:
                continue
            full = whole.double().requires_grad_()
            halos = halos_of(full, lens, n, dim)
            weights = [draw(*h.shape, seed=p).to(dtype) for p, h in enumerate(halos)]
            expected = torch.autograd.grad(halos, full, [w.double() for w in weights])[0]
            (grad,) = torch.autograd.grad(y, x, weights[rank])
            close = {"rtol": 1e-12 if dtype is torch.float64 else 1e-2, "atol": 1e-6}
            expected = expected.split(lens, dim)[rank].to(dtype)
            torch.testing.assert_close(grad, expected, **close, msg=str((lens, n, dim)))


def check_along_dim(dtype, dims, kinds):
    rank, size = dist.get_rank(), dist.get_world_size()
    tolerance = 1e-12 if dtype == torch.float64 else 2e-2  # a ring sums in an order of its own
    for dim, kind in itertools.product(dims, kinds):
        shape = [3, 7, 2, 5]
        if kind == "even":
            shape[dim] = 2 * size
        lens = [0] * (size - 1) + [shape[dim]] if kind == "one" else seq_lens(shape[dim])
        begin = sum(lens[:rank])
        each = [draw(*shape, seed=r).to(dtype) for r in range(size)]
        weights = [draw(*shape, seed=50 + r).to(dtype) for r in range(size)]

        def mine(whole, dim=dim, begin=begin, lens=lens):
            return whole.narrow(dim, begin, lens[rank])

        def same(a, b, tolerance=tolerance):
            assert a.shape == b.shape and a.dtype == b.dtype
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)

        total = sum(x.double() for x in each).to(dtype)
        for laid in (torch.clone, transposed):
            # all_gather
            x = laid(mine(each[0])).requires_grad_()
            for grad in ("replicated", "partial"):
                y = deepsp.collectives.all_gather(x, dim, sizes=lens, grad=grad)
                same(y, each[0])
                assert y.is_contiguous()
                w = weights[0 if grad == "replicated" else rank]
                (g,) = torch.autograd.grad((y * w).sum(), x)
                summed = sum(w.double() for w in weights).to(dtype)
                same(g, mine(weights[0] if grad == "replicated" else summed))
            # reduce_scatter
            x = laid(each[rank]).requires_grad_()
            y = deepsp.collectives.reduce_scatter(x, dim, sizes=lens)
            same(y, mine(total))
            (g,) = torch.autograd.grad((y * mine(weights[0])).sum(), x)
            same(g, weights[0])
            # scatter
            x = each[0].clone().requires_grad_()
            for grad in ("replicated", "partial"):
                y = deepsp.collectives.scatter(x, dim, sizes=lens, grad=grad)
                same(y, mine(each[0]))
                (g,) = torch.autograd.grad((y * mine(weights[0])).sum(), x)
                padded = torch.zeros_like(weights[0])
                mine(padded).copy_(mine(weights[0]))
                same(g, weights[0] if grad == "replicated" else padded)
        # all_reduce
        x = each[rank].clone().requires_grad_()
        for grad in ("replicated", "partial"):
            y = deepsp.collectives.all_reduce(x, grad=grad)
            same(y, total)
            w = weights[0 if grad == "replicated" else rank]
            (g,) = torch.autograd.grad((y * w).sum(), x)
            same(g, w if grad == "replicated" else sum(w.double() for w in weights).to(dtype))
        y = deepsp.collectives.replicate(x)
        same(y, x)
        (g,) = torch.autograd.grad((y * weights[rank]).sum(), x)
        same(g, sum(w.double() for w in weights).to(dtype))


def check_matmuls(dtype, function=lambda f: f):
    rank, size = dist.get_rank(), dist.get_world_size()
    close = dict(rtol=1e-9, atol=1e-9) if dtype == torch.float64 else dict(rtol=0.03, atol=0.5)
    k, m = 4, 5
    for lens in ([3] * size, seq_lens(3 * size + 1), [0] * (size - 1) + [4]):
        for dim, batch in ((0, 2), (1, 1), (1, 3), (-2, 2)):
            shape = [batch, batch, k]
            shape[dim] = sum(lens)
            mine = slice(sum(lens[:rank]), sum(lens[: rank + 1]))

            def part(x, dim=dim, mine=mine):
                return x.narrow(dim, mine.start, mine.stop - mine.start)

            # gather, then this rank's columns
            whole = draw(*shape, seed=1).to(dtype).requires_grad_()
            weights = [draw(m, k, seed=2 + r).to(dtype).requires_grad_() for r in range(size)]
            biases = [draw(m, seed=20 + r).to(dtype).requires_grad_() for r in range(size)]
            x = part(whole).detach().clone().requires_grad_()
            weight, bias = (t[rank].detach().clone().requires_grad_() for t in (weights, biases))
            gather = function(
                lambda x, w, b, lens, dim=dim: deepsp.collectives.all_gather_matmul(
                    x, w, b, dim, sizes=lens
                )
            )
            y = gather(x, weight, bias, lens)
            wants = [F.linear(whole, w, b) for w, b in zip(weights, biases, strict=True)]
            torch.testing.assert_close(y, wants[rank], **close)
            outs = [draw(*y.shape, seed=40 + r).to(dtype) for r in range(size)]
            (y * outs[rank]).sum().backward()
            sum(
                (want.double() * out).sum() for want, out in zip(wants, outs, strict=True)
            ).backward()
            torch.testing.assert_close(x.grad, part(whole.grad), **close)
            torch.testing.assert_close(weight.grad, weights[rank].grad, **close)
            torch.testing.assert_close(bias.grad, biases[rank].grad, **close)

            # this rank's share of a sum, and its part of it
            wholes = [draw(*shape, seed=60 + r).to(dtype).requires_grad_() for r in range(size)]
            bias = draw(m, seed=9).to(dtype).requires_grad_()
            x, weight = (t[rank].detach().clone().requires_grad_() for t in (wholes, weights))
            share = bias.detach().clone().requires_grad_()
            scatter = function(
                lambda x, w, b, lens, dim=dim: deepsp.collectives.matmul_reduce_scatter(
                    x, w, b, dim, sizes=lens
                )
            )
            y = scatter(x, weight, share, lens)
            for w in weights:
                w.grad = None
            want = sum(F.linear(a, w) for a, w in zip(wholes, weights, strict=True)) + bias
            torch.testing.assert_close(y, part(want), **close)
            out = draw(*want.shape, seed=70).to(dtype)
            (y * part(out)).sum().backward()
            (want * out).sum().backward()
            torch.testing.assert_close(x.grad, wholes[rank].grad, **close)
            torch.testing.assert_close(weight.grad, weights[rank].grad, **close)
            total = deepsp.collectives.all_reduce(share.grad, grad="partial")  # its tokens' share
            torch.testing.assert_close(total, bias.grad, **close)
