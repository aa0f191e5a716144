"""The table of functions: what it says of a function's output is what each rank's is.

Ranks are simulated, one after another: no function in the table communicates.
"""

import math
import random

import pytest
import torch
import torch.nn.functional as F
from placed import HeldPart
from torch import nn

from deepsp.schedule.flow import Flow, current
from deepsp.schedule.flow.reshapes import reshaped
from deepsp.schedule.flow.values import Split
from deepsp.schedule.placement import PARTIAL, REPLICATE, Partial, Shard

f64 = torch.float64


class Call(nn.Module):
    """A function of tensors, which are buffers here."""

    def __init__(self, function, tensors):
        super().__init__()
        self.function = function
        self.count = len(tensors)
        for n, t in enumerate(tensors):
            self.register_buffer(f"t{n}", t)

    def forward(self):
        out = self.function(*(getattr(self, f"t{n}") for n in range(self.count)))
        outs = out if isinstance(out, (tuple, list)) else [out]
        self.out = [(t, current().value(t).place) for t in outs]


def _part(whole, how, rank, size):
    """This rank's tensor: how: None (whole), an axis, a HeldPart, or "partial"."""
    if how is None:
        return whole.clone(), REPLICATE
    if how == "partial":
        generator = torch.Generator().manual_seed(9)
        parts = [torch.randn(whole.shape, dtype=f64, generator=generator) for _ in range(size - 1)]
        parts.append(whole - sum(parts))
        return parts[rank], PARTIAL
    shard = how if isinstance(how, HeldPart) else HeldPart(how, (whole.size(how),))
    sizes = Fixed(shard, size)
    return shard.take(whole, rank, size).clone(), Shard(shard.axis, sizes)


class Fixed:
    def __init__(self, shard, size):
        self.shard, self.size, self.unit = shard, size, shard.unit

    def part_sizes(self, rank):
        return [n for _, n in self.shard.pieces(rank, self.size)]


def _ranks(function, tensors, hows, size):
    """By rank, the outputs and what is known of them."""
    for rank in range(size):
        parts = [_part(t, how, rank, size) for t, how in zip(tensors, hows, strict=True)]
        module = Call(function, [t for t, _ in parts])
        places = {id(getattr(module, f"t{n}")): p for n, (_, p) in enumerate(parts)}
        Flow(module, places, (rank, size, "simulated")).run((), {})
        yield module.out


def _together(outs, axis):
    """The whole tensor of parts along ``axis``, part by part."""
    count = len(outs[0][1].parts)
    pieces = [t.split(list(place.parts), axis) for t, place in outs]
    return torch.cat([piece[n] for n in range(count) for piece in pieces], axis)


def _check(function, tensors, hows, size=2):
    expected = function(*(t.clone() for t in tensors))
    expected = expected if isinstance(expected, (tuple, list)) else [expected]
    ranks = list(_ranks(function, tensors, hows, size))
    places = []
    for n, whole in enumerate(expected):
        outs = [out[n] for out in ranks]
        place = outs[0][1]
        if isinstance(place, Split):
            assert place.axis is not None
            assert all(p.axis == place.axis for _, p in outs)
            got = [_together(outs, place.axis)]
        elif isinstance(place, Partial):
            got = [sum(t for t, _ in outs)]
        else:
            got = [t for t, _ in outs]
        for t in got:
            torch.testing.assert_close(t, whole)
        places.append(place)
    return places


def _x(*shape, seed=0):
    return torch.randn(shape, dtype=f64, generator=torch.Generator().manual_seed(seed + 100))


X = _x(3, 8, 6)
W = _x(6, 6, seed=1)
HEADS = _x(3, 8, 18)
Q = _x(2, 4, 5, 6, seed=2)
IDS = torch.tensor([[0, 3, 1, 2], [5, 4, 3, 3]])

# function, whole tensors, how each is held, what the first output is: an axis, "partial", None.
RIGHT = [
    (lambda x: x + 1, [X], [1], 1),
    (lambda x: 1 - x.exp(), [X], [2], 2),
    (lambda x, y: x * y, [X, X], [1, 1], 1),
    (lambda x, y: x * y, [X, _x(6)], [1, None], 1),
    (lambda x, y: y + x, [X, _x(3, 1, 6)], [1, None], 1),
    (lambda x, y: x + y, [X, _x(6)], [2, 0], 2),
    (lambda x, y: x + y, [X, X], ["partial", "partial"], "partial"),
    (lambda x, y: x * y, [X, X], ["partial", None], "partial"),
    (lambda x: -(x * 3 / 2).to(f64).clone(), [X], ["partial"], "partial"),
    (lambda x, m: x.masked_fill(m > 0, 0), [X, X], ["partial", None], "partial"),
    (lambda x, m: torch.where(m > 0, x, 0), [X, X], ["partial", None], "partial"),
    (lambda x: x + torch.zeros(x.shape, dtype=f64), [X], [1], 1),
    (lambda x: x * torch.ones_like(x) * 2, [X], [1], 1),
    (lambda x: x.sum(1), [X], [1], "partial"),
    (lambda x: x.sum(), [X], [1], "partial"),
    (lambda x: x.sum((0, 2)), [X], [1], 0),
    (lambda x: x.mean(-1, keepdim=True), [X], [1], 1),
    (lambda x: x.mean(), [X], ["partial"], "partial"),
    (lambda x: x.max(0), [X], [1], 0),
    (lambda x: x.amax(-1), [X], [1], 1),
    (lambda x: x.argmax(0), [X], [2], 1),
    (lambda x: x.var(-1, keepdim=True), [X], [1], 1),
    (lambda x: x.norm(dim=-1), [X], [1], 1),
    (lambda x: F.softmax(x, -1), [X], [1], 1),
    (lambda x: x.cumsum(2), [X], [1], 1),
    (lambda x: x.cumsum(1), [X], ["partial"], "partial"),
    (lambda x: x.topk(2, 2), [X], [1], 1),
    (lambda x: F.layer_norm(x, (6,)), [X], [1], 1),
    (lambda x, w: F.layer_norm(x, (6,), w), [X, _x(6)], [0, None], 0),
    (lambda x, w: F.linear(x, w), [X, W], [1, None], 1),
    (lambda x, w: F.linear(x, w), [X, W], [None, 0], 2),
    (lambda x, w, b: F.linear(x, w, b), [X, W, _x(6)], [None, 0, 0], 2),
    (lambda x, w, b: F.linear(x, w, b), [X, W, _x(6)], [1, None, None], 1),
    (lambda x, w: F.linear(x, w), [X, W], [2, 1], "partial"),
    (lambda x, w: F.linear(x, w), [X, W], ["partial", None], "partial"),
    (lambda x, w: x @ w, [X, W], [None, 1], 2),
    (lambda x, w: x @ w, [X, W], [2, 0], "partial"),
    (lambda x, w, b: torch.addmm(b, x, w), [X[0], W, _x(6)], [None, 1, 0], 1),
    (lambda x, w, b: torch.addmm(b, x, w), [X[0], W, _x(6)], [0, None, None], 0),
    (lambda q, k: q @ k.transpose(-1, -2), [Q, Q], [1, 1], 1),
    (lambda q, k: q @ k.transpose(-1, -2), [Q, Q], [2, None], 2),
    (lambda q, k: torch.bmm(q, k), [_x(4, 3, 2), _x(4, 2, 5)], [0, 0], 0),
    (lambda q, k: torch.einsum("bhid,bhjd->bhij", q, k), [Q, Q], [1, 1], 1),
    (lambda q, k: torch.einsum("bhid,bhjd->bhij", q, k), [Q, Q], [3, 3], "partial"),
    (lambda q, k: torch.einsum("...id,...jd->...ij", q, k), [Q, Q], [1, 1], 1),
    (lambda x, w: F.conv1d(x.transpose(1, 2), w), [X, _x(4, 6, 3)], [0, None], 0),
    (lambda x, w, b: F.conv1d(x, w, b), [X, _x(4, 8, 3), _x(4)], [None, 0, 0], 1),
    (lambda x, w: F.conv1d(x, w), [X, _x(4, 8, 3)], [1, 1], "partial"),
    (lambda i, w: F.embedding(i, w), [IDS, W], [1, None], 1),
    (lambda i, w: F.embedding(i, w), [IDS, W], [None, 1], 2),
    (lambda w, i: w[i], [W, IDS], [None, 1], 1),
    (lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True), [Q], [1], 1),
    (lambda q, m: F.scaled_dot_product_attention(q, q, q, m), [Q, _x(1, 1, 5, 5)], [1, None], 1),
    (
        lambda q, k: F.scaled_dot_product_attention(q, k, k, enable_gqa=True),
        [_x(2, 12, 5, 6), _x(2, 6, 5, 6)],
        [HeldPart(1, (12,), 2), 1],
        1,
    ),
    (lambda x: x.transpose(1, 2), [X], [1], 2),
    (lambda x: x.permute(2, 0, 1), [X], [1], 2),
    (lambda x: x.movedim(0, 2), [X], [1], 0),
    (lambda x: x.mT, [X], [2], 1),
    (lambda x: x[:, :, 1:4], [X], [1], 1),
    (lambda x: x[..., None, :], [X], [2], 3),
    (lambda x: x[:, :, 0], [X], [1], 1),
    (lambda x: x[0], [X], [1], 0),
    (lambda x: x[None, :, :, ::2], [X], [1], 2),
    (lambda x, i: x[i], [X, torch.tensor([[0, 1], [2, 2]])], [1, None], 2),
    (lambda x: x.unsqueeze(0), [X], [1], 2),
    (lambda x: x.unsqueeze(-1), [X], [1], 1),
    (lambda x: torch.view_as_complex(x.view(3, -1, 3, 2)) * 1j, [X], [1], 1),
    (
        lambda x: torch.view_as_real(torch.view_as_complex(x.view(2, 4, -1, 2)) * 1j),
        [_x(2, 4, 24)],
        [2],
        2,
    ),
    (lambda x: torch.view_as_complex(x.view(3, 8, 3, 2)), [X], ["partial"], "partial"),
    (lambda x: x[:1].squeeze(), [X], [1], 0),
    (lambda x: x.select(2, 1), [X], [1], 1),
    (lambda x: x.narrow(2, 1, 2), [X], [1], 1),
    (lambda x: x.split(2, 2), [X], [1], 1),
    (lambda x: x[:, :12] + x[:, : x.size(1)] + x.narrow(1, 0, x.size(1)), [X], [1], 1),
    (lambda x: x.unbind(0), [X], [1], 0),
    (lambda x: x.expand(2, -1, -1, -1), [X], [1], 2),
    (lambda x: x.unsqueeze(2).expand(-1, -1, 5, -1), [X], [1], 1),
    (lambda x: x.repeat_interleave(2, dim=1), [X], [1], 1),
    (lambda x: x.repeat_interleave(2, dim=1), [X], [2], 2),
    (lambda x: torch.cat([x, x * 2], -1), [X], [1], 1),
    (lambda x: torch.cat([x, x * 2], 1), [X], [1], 1),
    (lambda x: torch.cat([x, x * 2], 1).chunk(2, 1), [X], [1], 1),
    (lambda x: torch.stack([x, x * 2], 1), [X], [1], 2),
    (lambda x: torch.stack([x, x]), [X], ["partial"], "partial"),
    (lambda x: x.flatten(0, 1).view(3, -1, 6), [X], [1], 1),
    (lambda x: x.view(3, -1, 2, 3), [X], [1], 1),
    (lambda x: x.view(3, 8, -1, 3), [HEADS], [2], 2),
    (lambda x: x.unflatten(-1, (-1, 3)), [HEADS], [2], 2),
    (lambda x: x.reshape(3, 8, -1, 3).mT.mT.reshape(3, 8, -1), [HEADS], [2], 2),
    (lambda x: x.split(x.size(-1) // 3, -1), [_x(2, 5, 12)], [HeldPart(2, (4, 4, 4))], 2),
    (
        lambda x: x.unflatten(-1, (3, -1, 2)).unbind(-3),
        [_x(2, 5, 24)],
        [HeldPart(2, (8, 8, 8), 2)],
        2,
    ),
    (
        lambda x: x.split([x.size(-1) // 2, x.size(-1) // 4, x.size(-1) // 4], -1),
        [_x(2, 5, 48)],
        [HeldPart(2, (24, 12, 12), 2)],
        2,
    ),
    (
        lambda x, m: F.cross_entropy(x.view(-1, 6), m.view(-1), reduction="sum"),
        [X, torch.arange(24).view(3, 8) % 6],
        [1, 1],
        "partial",
    ),
    (lambda x, m: F.cross_entropy(x, m, reduction="none"), [X[0], torch.arange(8) % 6], [0, 0], 0),
    (lambda x, y: F.mse_loss(x, y, reduction="sum"), [X, 2 * X], [1, 1], "partial"),
    (lambda x, i: x.gather(2, i), [X, torch.zeros(3, 8, 2).long()], [1, 1], 1),
    (lambda x, i: x.index_select(2, i), [X, torch.tensor([1, 0])], [1, None], 1),
    (lambda x: F.pad(x, (1, 2)), [X], [1], 1),
    (lambda x: x.tril(), [Q], [1], 1),
    (lambda x: x.clone().mul_(2).add_(x), [X], [1], 1),
    (lambda x: torch.empty_like(x).copy_(x), [X], [1], 1),
    (lambda x: x.clone().copy_(torch.zeros(x.shape, dtype=f64)), [X], [1], 1),
    (lambda x: torch.zeros_like(x).copy_(x[:, :, :1]), [X], [1], 1),
    (lambda x: torch.mul(x, 2, out=torch.empty(0, dtype=f64)), [X], [1], 1),
    (lambda x: torch._foreach_mul([x, x + 1], [x, x]), [X], [1], 1),
    (lambda x: (torch._foreach_add_([y := x.clone()], 1), y)[1], [X], [1], 1),
    (lambda x: x.flatten(1).unflatten(1, (-1, 6)), [X], [1], 1),
    (lambda x: F.one_hot(x, 7), [IDS], [1], 1),
    (lambda x: torch.zeros(2, dtype=f64).sum() + x.sum(-1), [X], [1], 1),
]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("number", range(len(RIGHT)))
def test_right(number, size):
    function, tensors, hows, expected = RIGHT[number]
    place = _check(function, tensors, hows, size)[0]
    if isinstance(place, Split):
        assert place.axis == expected
    else:
        assert ("partial" if isinstance(place, Partial) else None) == expected


def _repeated(x, dim):
    """As transformers repeats kv heads."""
    sizes = list(x.shape)
    more = x.unsqueeze(dim + 1).expand(*sizes[: dim + 1], 2, *sizes[dim + 1 :])
    return more.reshape(*sizes[:dim], sizes[dim] * 2, *sizes[dim + 1 :])


def _turned(x):
    """Rotary embedding of interleaved pairs, as in Llama's reference code."""
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    turn = torch.polar(torch.ones(2, dtype=f64), torch.tensor([0.3, 1.0], dtype=f64))
    return torch.view_as_real(pairs * turn).flatten(3)


# Of [batch, tokens, heads, 4], by heads: function, and the axis of its result.
OF_HEADS = [
    (_turned, 2),
    (lambda x: x.reshape(*x.shape[:-1], -1, 2), 2),
    (lambda x: x.reshape(x.size(0), x.size(1), x.size(2), -1, 2), 2),
    (lambda x: x.unflatten(-1, (-1, 2)), 2),
    (lambda x: x.unflatten(-1, (2, 2)).flatten(3), 2),
    (lambda x: x.flatten(2), 2),
    (lambda x: x.flatten(2).unflatten(-1, (-1, 4)), 2),
    (lambda x: x.flatten(0, 1), 1),
    (lambda x: x.flatten(-2)[..., None].flatten(2), 2),
    (lambda x: x.reshape(x.size(0), x.size(1), x.size(2) * x.size(3)), 2),
    (lambda x: x.reshape(x.size(0) * x.size(1), x.size(2), x.size(3)), 1),
    (lambda x: _repeated(x, 2), 2),
    (lambda x: _repeated(x.transpose(1, 2), 1), 1),
    (lambda x: _repeated(x, 2)[:, :, ::2] + x, 2),
    (lambda x: _repeated(x, 2)[:, :, 1::2] * x, 2),
    (lambda x: x.repeat_interleave(4, 2)[:, :, 3::4], 2),
    (lambda x: x.transpose(1, 2).reshape(x.size(0) * x.size(2), x.size(1), 4), 0),
]


@pytest.mark.parametrize("batch, tokens", [(1, 1), (1, 5), (3, 5)])
@pytest.mark.parametrize("heads", [[1, 1], [1, 1, 1], [2, 1], [2, 2]])
@pytest.mark.parametrize("number", range(len(OF_HEADS)))
def test_of_heads(number, heads, batch, tokens):
    """Also where a rank has one head, or the batch or the tokens are one."""
    function, axis = OF_HEADS[number]
    x = _x(batch, tokens, sum(heads), 4)
    assert _check(function, [x], [2], len(heads))[0].axis == axis


def test_a_quotient_of_local_numbers():
    """It is the same in one process, as query heads for each kv head are."""

    def function(x):
        return x.flatten(2).reshape(*x.shape[:2], -1, x.flatten(2).size(2) // x.size(2))

    assert _check(function, [_x(3, 5, 2, 4)], [2], 2)[0].axis == 2


def _by_sizes(rng, local):
    """A function that views a tensor, with sizes that it reads. ``local``: a rank's sizes."""
    count = len(local)
    at, steps = 0, []
    while at < count:
        how = rng.choice(["keep", "merge", "split", "rest"])
        if how == "merge" and at + 1 < count:
            steps.append(("merge", at))
            at += 2
        else:
            steps.append((how if how != "merge" else "keep", at))
            at += 1
    if sum(how == "rest" for how, _ in steps) > 1:
        steps = [("split" if how == "rest" else how, d) for how, d in steps]

    def function(x):
        sizes = []
        for how, d in steps:
            inner = 2 if local[d] % 2 == 0 else 1
            if how == "keep":
                sizes.append(x.size(d))
            elif how == "merge":
                sizes.append(x.shape[d] * x.shape[d + 1])
            else:
                sizes += [-1 if how == "rest" else x.shape[d] // inner, inner]
        return x.reshape(sizes)

    return function


def test_views_by_sizes():
    """Views whose sizes Python computes from the tensor's: what is said of the result is so."""
    told = 0
    for seed in range(400):
        rng = random.Random(seed)
        count, size = rng.randint(1, 4), rng.choice([2, 3])
        local, at = rng.choice([1, 1, 2, 4]), rng.randrange(count)
        whole = [rng.choice([1, 1, 2, 4]) for _ in range(count)]
        whole[at] = local * size
        function = _by_sizes(rng, [*whole[:at], local, *whole[at + 1 :]])
        x = _x(*whole, seed=seed)
        ranks = list(_ranks(function, [x], [at], size))
        places = [out[0][1] for out in ranks]
        if any(place.axis is None for place in places):
            continue
        told += 1
        got = _together([out[0] for out in ranks], places[0].axis)
        assert torch.equal(got, function(x)), seed
    assert told > 300, told


def _attend(q, k, v):
    return F.softmax(q @ k.mT, -1) @ v


def _one_by_one(function):
    return lambda x: torch.cat([function(h) for h in x.split(4, -1)], -1)


# Of [batch, tokens, heads * 4], head by head: function, and the axis of its result.
BY_HEAD = [
    (lambda x: torch.stack(x.split(4, -1), 1), 1),
    (lambda x: torch.stack(x.chunk(x.size(-1) // 4, -1), 1), 1),
    (lambda x: torch.cat(x.split(4, -1), 0).exp(), 0),
    (lambda x: torch.cat(torch.cat(x.split(4, -1), 0).cumsum(1).split(x.size(0), 0), -1), 2),
    (_one_by_one(lambda h: _attend(h, h * 2, h)), 2),
    (_one_by_one(lambda h: torch.cat([-h.chunk(2, -1)[1], h.chunk(2, -1)[0]], -1)), 2),
    (_one_by_one(lambda h: h + torch.ones(5, 4, dtype=f64).tril()), 2),
    (lambda x: torch.stack([h.sum(1) for h in x.unflatten(-1, (-1, 4)).unbind(2)], 1), 1),
    (
        lambda x: torch.cat(
            list(map(_attend, x.split(4, -1), list(x.split(4, -1)), (x * 2).split(4, dim=2))), -1
        ),
        2,
    ),
]


@pytest.mark.parametrize("heads", [[1, 1], [2, 1], [2, 2], [1, 1, 1]])
@pytest.mark.parametrize("number", range(len(BY_HEAD)))
def test_by_head(number, heads):
    function, axis = BY_HEAD[number]
    x = _x(2, 5, 4 * sum(heads))
    assert _check(function, [x], [HeldPart(2, (x.size(2),), 4)], len(heads))[0].axis == axis


# Of the same, what depends on which head it is, or on how many.
NOT_BY_HEAD = [
    (lambda x: torch.cat([h * n for n, h in enumerate(x.split(4, -1))], -1), "in the same way"),
    (
        lambda x: torch.cat([h if n else h * 2 for n, h in enumerate(x.split(4, -1))], -1),
        "in the same way",
    ),
    (
        lambda x: torch.cat(
            [h if n < 3 else h.exp().log() for n, h in enumerate(x.split(4, -1))], -1
        ),
        "in the same way",
    ),
    (
        lambda x: torch.cat([h + _x(4)[n] for n, h in enumerate(x.split(4, -1))], -1),
        "in the same way",
    ),
    (lambda x: torch.cat(x.split(4, -1)[:2], -1), "not all of them are joined"),
    (lambda x: torch.cat([x.split(4, -1)[n] for n in range(2)], -1), "not all of them are joined"),
    (lambda x: torch.cat(list(x.split(4, -1))[::-1], -1), "in order"),
    (lambda x: torch.cat([*x.split(4, -1), x], -1), "a tensor that isn't one"),
    (lambda x: sum(x.split(4, -1)), "combined with .*item 1"),
    (lambda x: x.split(4, -1)[0] + x, r"combined with t0, which is Shard\(2\)"),
    (lambda x: _one_by_one(lambda h: h / len(x.split(4, -1)))(x), "no len()"),
    (_one_by_one(lambda h: h.mul_(2)), "writes into one"),
    (lambda x: x.split(4, -1)[1].tolist(), "its values are read"),
    (
        lambda x: torch.ops.deepsp.all_reduce(x.split(4, -1)[0], "partial", 0, 2, "simulated"),
        "communicates",
    ),
    (lambda x: torch.stack(x.chunk(2, -1)), "is taken along axis 2"),
    (lambda x: torch.stack(x.split(2, -1)), r"pieces of 2 along axis 2, .*\(unit=2"),
    (lambda x: torch.stack(x.split(x.size(-1) // 2, -1)), "is taken along axis 2"),
    (lambda x: x.split(8, -1), "8 elements are taken along axis 2"),
]


@pytest.mark.parametrize("number", range(len(NOT_BY_HEAD)))
def test_not_by_head(number):
    function, text = NOT_BY_HEAD[number]
    with pytest.raises(ValueError, match=text):
        list(_ranks(function, [_x(2, 5, 16)], [HeldPart(2, (16,), 4)], 2))


# Steps of code on [batch, tokens, features] or what these became, with a dimension n.
STEPS = [
    lambda x, n: x.unflatten(-1, (-1, 4)),
    lambda x, n: x.reshape(*x.shape[:-1], -1, 2),
    lambda x, n: x.reshape(*x.shape[:-1], x.size(-1) // 4, 4),
    lambda x, n: x.reshape(x.size(0), -1, x.size(-1)),
    lambda x, n: x.reshape(x.size(0), -1),
    lambda x, n: x.reshape(x.size(0) * x.size(1), *x.shape[2:]),
    lambda x, n: x.flatten(-2),
    lambda x, n: x.flatten(0, 1),
    lambda x, n: x.transpose(0, 1),
    lambda x, n: x.transpose(1, 2),
    lambda x, n: x.unsqueeze(n),
    lambda x, n: x.squeeze(),
    lambda x, n: torch.cat([-x.chunk(2, -1)[1], x.chunk(2, -1)[0]], -1),
    lambda x, n: x.softmax(-1),
    lambda x, n: x.mean(n),
    lambda x, n: x[..., :2],
    lambda x, n: x[:, -2:],
    lambda x, n: x[:, :, ::2],
    lambda x, n: x.narrow(n, 0, 2),
    lambda x, n: x.repeat_interleave(2, n),
    lambda x, n: _repeated(x, n),
    lambda x, n: x.unsqueeze(n).expand(*x.shape[:n], 2, *x.shape[n:]).flatten(n, n + 1),
    lambda x, n: torch.stack(x.split(4, -1), n),
    lambda x, n: torch.cat(x.split(4, -1), 0),
    lambda x, n: torch.cat(x.split(2, 0), -1),
    lambda x, n: torch.stack([h.softmax(-1) for h in x.unbind(n)], 0),
    lambda x, n: torch.stack([h * 2 if i > 2 else h for i, h in enumerate(x.unbind(n))], n),
    lambda x, n: (x @ x.mT).softmax(-1) @ x,
    lambda x, n: x + torch.arange(x.size(n)).view(-1, *[1] * (x.dim() - n - 1)),
    lambda x, n: x.chunk(2, n)[0],
    lambda x, n: x.split(x.size(-1) // 2, -1)[0],
]


def _runs(function, *args):
    try:
        return function(*args)
    except (ValueError, RuntimeError, IndexError):
        return None


def test_code_on_heads():
    """Random code: what the dry run says of its result is so, or it says nothing."""
    told = 0
    for seed in range(700):
        rng = random.Random(seed)
        size, at = rng.choice([2, 3]), rng.choice([2, 2, 2, 0, 1])
        heads = [rng.choice([1, 1, 2]) for _ in range(size)]
        unit = 4 if at == 2 and (rng.random() < 0.5 or len(set(heads)) > 1) else 1
        shape = [rng.choice([1, 2]), rng.choice([1, 2, 4]), 4]
        shape[at] = sum(heads) * (4 if at == 2 else 1)
        steps = [(rng.choice(STEPS), rng.randint(0, 3)) for _ in range(rng.randint(1, 5))]

        def function(x, steps=steps):
            for step, n in steps:
                x = step(x, n)
            return x

        x = _x(*shape, seed=seed)
        expected = _runs(function, x)
        if expected is None or expected.numel() > 4000:
            continue
        how = HeldPart(at, (shape[at],), unit)
        ranks = _runs(lambda f=function, x=x, h=how, s=size: list(_ranks(f, [x], [h], s)))
        outs = [rank[0] for rank in ranks or []]
        if not outs or any(getattr(place, "axis", 0) is None for _, place in outs):
            continue
        if not isinstance(outs[0][1], Split):
            continue
        rest = {tuple(n for d, n in enumerate(t.shape) if d != place.axis) for t, place in outs}
        if len(rest) > 1:  # the ranks' comparison refuses this
            continue
        told += 1
        torch.testing.assert_close(_together(outs, outs[0][1].axis), expected, msg=f"seed {seed}")
    assert told > 100, told


WRONG = [
    (lambda x, y: x + y, [X, X], ["partial", None]),
    (lambda x: x + 1, [X], ["partial"]),
    (lambda x: x.relu(), [X], ["partial"]),
    (lambda x: F.gelu(x), [X], ["partial"]),
    (lambda x: x * x, [X], ["partial"]),
    (lambda x: 1 / x, [X], ["partial"]),
    (lambda x: x.masked_fill(x > 0, 1.0), [X], ["partial"]),
    (lambda x: F.layer_norm(x, (6,)), [X], ["partial"]),
    (lambda x: F.softmax(x, -1), [X], ["partial"]),
    (lambda x: x.max(), [X], ["partial"]),
    (lambda x, y: x + y, [X, X], ["partial", 1]),
    (lambda x, y: x + y, [X, X], [1, None]),
    (lambda x: x + torch.arange(x.size(1)).view(-1, 1), [X], [1]),
    (lambda x: x + torch.rand(x.shape), [X], [1]),
    (lambda x: x + x.mT, [_x(3, 8, 8)], [1]),
    (lambda x: x.mean(), [X], [1]),
    (lambda x: x.max(1), [X], [1]),
    (lambda x: F.softmax(x, -1), [X], [2]),
    (lambda x: x.cumsum(1), [X], [1]),
    (lambda x: x.topk(1, 1), [X], [1]),
    (lambda x: F.layer_norm(x, (x.size(-1),)), [X], [2]),
    (lambda x, w: x @ w[: x.size(-1)], [X, W], [2, None]),
    (lambda x, w: F.linear(x, w), [X, W], [1, 0]),
    (lambda x, w: F.linear(x, w), [X, W], [1, 1]),
    (lambda x, w, b: F.linear(x, w, b), [X, W, _x(6)], [None, 0, None]),
    (lambda x, w, b: F.linear(x, w, b), [X, W, _x(6)], [2, 1, None]),
    (lambda i, w: F.embedding(i.clamp(max=1), w), [IDS, W], [None, 0]),
    (lambda q: F.scaled_dot_product_attention(q, q, q), [Q], [2]),
    (lambda q: F.scaled_dot_product_attention(q, q, q), [Q], [3]),
    (lambda q, k: F.scaled_dot_product_attention(q, k, k), [Q, Q], [1, None]),
    (lambda x: x.chunk(2, -1), [_x(2, 5, 12)], [2]),
    (lambda x: x[:, -1], [X], [1]),
    (lambda x: x + torch.arange(x.size(1)).view(-1, 1), [_x(3, 2, 6)], [1]),
    (lambda x: x.chunk(2, 1)[0], [_x(3, 2, 6)], [1]),
    (lambda x: x[:, :, ::2].flatten(1).reshape(2, -1, 4).sum(1), [_x(2, 2, 8)], [2]),
    (
        lambda x: x.reshape(1, -1)[..., ::2].reshape(1, -1, 2).sum(1),
        [_x(1, 4, 8)],
        [HeldPart(2, (8,), 4)],
    ),
    (lambda x: x.flatten(0, 1)[:4], [X], [1]),
    (lambda x: x.softmax(-1), [_x(4)[1]], ["partial"]),
    (lambda x: x[:, ::2], [_x(3, 6, 6)], [1]),
    (lambda x: x[:, :3:2], [X], [1]),
    (lambda x: x[:, 2::2], [X], [1]),
    (lambda x: x[:, :6], [X], [1]),
    (lambda x: x.narrow(1, 0, 4), [X], [1]),
    (lambda x: x[:, :-1], [X], [1]),
    (lambda x: x.select(1, 0), [X], [1]),
    (lambda x, y: torch.cat([x, y], -1), [X, X], [1, None]),
    (lambda x: x[:, :, :, None].repeat_interleave(2), [X], [1]),
    (lambda x: x.view(3, 8, 3, -1), [X], [2]),
    (lambda x: torch.view_as_complex(x.unflatten(-1, (2, 1)).mT), [_x(2, 4)], [1]),
    (lambda x, y: F.mse_loss(x, y), [X, X], [1, 1]),
    (lambda x: F.cross_entropy(x, torch.zeros(8).long()), [X[0]], [1]),
    (lambda x: x[0].amax(1).tolist(), [X], [1]),
    (lambda x: torch.fft.fft(x), [X], [1]),
    (lambda x: torch.linalg.inv(x), [_x(2, 2, 2)], [0]),
]


def test_refusals(golden):
    """What the dry run says of each: tests/refusals/schedule.txt, to be read as a whole."""
    told = []
    for function, tensors, hows in WRONG:
        with pytest.raises(ValueError) as raised:
            list(_ranks(function, tensors, hows, 2))
        told.append(str(raised.value).removeprefix("the model (Call): "))
    golden("schedule", told)


def _grouped(atoms, rng):
    """Products of neighbours."""
    groups, at = [], 0
    while at < len(atoms):
        n = rng.randint(1, 3)
        groups.append(atoms[at : at + n])
        at += n
    return groups


def test_reshapes():
    """Any two ways to merge the same axes, one of which is sharded: what is said of the second view
    is so, or nothing is said."""
    told = 0
    for seed in range(3000):
        rng = random.Random(seed)
        size = rng.choice([2, 3])
        count = rng.randint(1, 5)
        atoms = [rng.choice([1, 2, 3]) for _ in range(count)]
        at = rng.randrange(count)
        local = rng.choice([1, 2, 3])
        whole_atoms = [*atoms[:at], local * size, *atoms[at + 1 :]]
        here = [*atoms[:at], local, *atoms[at + 1 :]]
        numbers = list(range(count))
        first, second = _grouped(numbers, rng), _grouped(numbers, rng)

        def sizes(groups, of):
            return tuple(math.prod(of[n] for n in group) for group in groups)

        whole = torch.arange(math.prod(whole_atoms)).view(whole_atoms)
        parts = [t.reshape(here) for t in whole.chunk(size, at)]
        axis = next(n for n, group in enumerate(first) if at in group)
        outer = math.prod(atoms[n] for n in first[axis] if n < at)
        length = sizes(first, here)[axis]
        split = Split(axis, (length // outer,) * outer)
        free = next(n for n, group in enumerate(second) if at in group)
        # Without it a length of one could be anywhere: what keeps its sizes is taken as it was.
        hint = free if local == 1 else rng.choice([None, free])
        result = reshaped(split, sizes(first, here), sizes(second, here), hint)
        if result.axis is None:
            continue
        told += 1
        outs = [(t.reshape(sizes(second, here)), result) for t in parts]
        expected = whole.reshape(sizes(second, whole_atoms))
        assert torch.equal(_together(outs, result.axis), expected), (seed, split, result)
    assert told > 2000
