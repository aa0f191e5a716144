"""``chunks="auto"``: how many head chunks are fastest, measured once for each shape."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from deepsp.ranks.groups import Member

_picked: dict[Hashable, int] = {}

REPEATS = 3


def check(chunks: int | str) -> None:
    """Raises ValueError unless ``chunks`` is a number of chunks or "auto"."""
    if chunks != "auto" and (not isinstance(chunks, int) or chunks < 1):
        raise ValueError(f'expected chunks >= 1 or "auto", got {chunks!r}')


def picked_before(picked: int | None) -> int:
    """The module's last measured choice, for compiled code."""
    if picked is None:
        raise ValueError(
            'chunks is "auto", but nothing has been measured yet; call the module once before you '
            "compile it, or pass a number"
        )
    return picked


def forget() -> None:
    """Discards all measurements."""
    _picked.clear()


def pick(
    key: Hashable,
    run: Callable[[int, list[Tensor]], Tensor],
    inputs: Sequence[Tensor],
    parameters: Sequence[Tensor],
    member: Member,
    *,
    num_heads: int,
    query_parts: int,
    trains: bool,
) -> int:
    """The power of two with which ``run`` is fastest on the mean over the group's ranks; the same
    on every rank. Every rank makes the same call.

    Args:
        key: what the count depends on; a key is measured once.
        run: attention, called with a count and tensors like ``inputs``.
        inputs: the tensors of the call that needs a count.
        parameters: the parameters whose gradients backward computes, too.
        member: the group.
        num_heads: the number of query heads.
        query_parts: as ops take it.
        trains: whether to measure backward, too.
    """
    if key in _picked:
        return _picked[key]
    rank, size, name = member
    device = inputs[0].device
    most = torch.ops.deepsp._chunks_in_force(num_heads, size, num_heads, query_parts)

    def step(count: int) -> None:
        copies = [x.detach().requires_grad_(trains) for x in inputs]
        # Own hooks: a checkpoint around the caller would count the tensors saved here.
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            y = run(count, copies)
        if trains:
            torch.autograd.grad(y, [*copies, *parameters], torch.ones_like(y), allow_unused=True)

    counts = [1]
    while counts[-1] * 2 <= most:
        counts.append(counts[-1] * 2)
    best = [float("inf")] * len(counts)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):  # keep the training's random numbers
        for repeat in range(REPEATS + 1):
            for i, count in enumerate(counts):
                _synchronize(device)
                begin = time.perf_counter()
                step(count)
                _synchronize(device)
                if repeat > 0:  # the first is a warm-up
                    best[i] = min(best[i], time.perf_counter() - begin)
    seconds = torch.tensor(best, dtype=torch.float64, device=device)
    means = torch.ops.deepsp.all_reduce(seconds, "replicated", rank, size, name).tolist()
    _picked[key] = counts[means.index(min(means))]
    return _picked[key]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
