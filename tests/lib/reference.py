"""One process, the whole sequence, plain PyTorch: what everything is compared with."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import deepsp


def attention(q: Tensor, k: Tensor, v: Tensor, **kwargs) -> Tensor:
    """[B, S, H, D] in and out; kv heads are repeated."""
    readers = q.size(2) // k.size(2)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(readers, 1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, **kwargs).transpose(1, 2)


def everything(
    q, k, v, documents=None, is_causal=False, window=None, softcap=None, sinks=None, scale=None,
    return_lse=False,
):  # fmt: skip
    """Attention by its definition: all scores, and a mask of all pairs of tokens. ``return_lse``:
    with their log-sum-exp [B, S, H]."""
    batch, length, heads, dim = q.shape
    k, v = (x.repeat_interleave(heads // k.size(2), 2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * (scale or 1 / math.sqrt(dim))
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    i, j = torch.arange(length)[:, None], torch.arange(length)
    seen = torch.ones(batch, length, length, dtype=torch.bool)
    if is_causal:
        seen &= j <= i
    left, right = window or (-1, -1)
    if left >= 0:
        seen &= j >= i - left
    if right >= 0:
        seen &= j <= i + right
    if documents is not None:
        number = torch.full((batch * length,), -1)
        for n, (begin, end) in enumerate(documents.tolist()):
            number[begin:end] = n
        number = number.view(batch, length)
        seen &= (number[:, :, None] == number[:, None]) & (number >= 0)[:, None]
    scores = scores.masked_fill(~seen[:, None], -math.inf)
    if sinks is not None:
        more = sinks.view(1, heads, 1, 1).expand(batch, heads, length, 1)
        scores = torch.cat([scores, more], -1)
    nothing = scores.isneginf().all(-1, keepdim=True)
    scores = scores.masked_fill(nothing, 0)
    weights = scores.softmax(-1).masked_fill(nothing, 0)
    out = torch.einsum("bhij,bjhd->bihd", weights[..., :length], v)
    if not return_lse:
        return out
    lse = scores.logsumexp(-1).masked_fill(nothing.squeeze(-1), -math.inf)
    return out, lse.transpose(1, 2)


def heads_of(rank: int, size: int, num_heads: int, num_kv_heads: int) -> tuple[list, list]:
    """The query heads of a rank and the kv heads that they read, from the definition."""
    mine = torch.arange(num_heads).tensor_split(size)[rank].tolist()
    readers = num_heads // num_kv_heads
    return mine, sorted({j // readers for j in mine})


def lens_of(kind: str, total: int, size: int) -> list[int]:
    """Tokens of each rank: "split" like tensor_split, "skewed", or "empty": one has none."""
    lens = [len(x) for x in torch.arange(total).tensor_split(size)]
    if kind == "skewed" and size > 1:
        moved = lens[0] // 2
        lens[0] -= moved
        lens[-1] += moved
    if kind == "empty" and size > 1:
        lens[-1] += lens[size // 2 - 1]
        lens[size // 2 - 1] = 0
    return lens


def flat(lists) -> list:
    """One list of several."""
    return [x for inner in lists for x in inner]


def draw(*shape: int, dtype=torch.float64, seed: int = 0) -> Tensor:
    """The same numbers on every rank."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype)


def transposed(x: Tensor) -> Tensor:
    """Returns the same values, with the strides of the first and last dimension swapped."""
    return x.transpose(0, -1).contiguous().transpose(0, -1)


# Test-only helpers that make a sharded function global: every rank holds the whole input and
# sees the whole output. Each is the other's adjoint.


class Take(torch.autograd.Function):
    """This rank's part of a tensor that every rank holds whole."""

    @staticmethod
    def forward(ctx, whole, lens, dim):
        ctx.lens, ctx.dim = lens, dim
        return whole.split(lens, dim)[dist.get_rank()].clone()

    @staticmethod
    def backward(ctx, grad):
        return Whole.apply(grad, ctx.lens, ctx.dim), None, None


class Whole(torch.autograd.Function):
    """All ranks' parts, one after another, on every rank."""

    @staticmethod
    def forward(ctx, part, lens, dim):
        ctx.lens, ctx.dim = lens, dim
        parts = []
        for rank, length in enumerate(lens):
            shape = list(part.shape)
            shape[dim] = length
            mine = rank == dist.get_rank()
            parts.append(part.detach().clone().contiguous() if mine else part.new_empty(shape))
            dist.broadcast(parts[-1], rank)
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx, grad):
        return Take.apply(grad, ctx.lens, ctx.dim), None, None


def events(call: Callable[[], object]) -> list:
    """What the profiler sees of a call, in order of its start."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return sorted(profile.events(), key=lambda event: event.time_range.start)


def names(call: Callable[[], object]) -> Counter:
    return Counter(event.name for event in events(call))


def warm_up() -> None:
    """A group's first exchange sends more than later ones."""
    deepsp.collectives.all_gather(torch.ones(1), 0, grad="partial")


def sent(call: Callable[[], object]) -> list[int]:
    """The bytes of each message that a call sends over gloo, in order. Every rank calls it."""
    warm_up()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
    ) as profile:
        call()
    found = sorted(profile.events(), key=lambda event: event.time_range.start)
    return [event.input_shapes[0][0] for event in found if event.name == "gloo:send"]
