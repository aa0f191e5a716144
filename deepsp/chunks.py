"""``chunks="auto"``: how many head chunks are fastest, measured once for each shape."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable

import torch

from deepsp.groups import Member

_picked: dict[Hashable, int] = {}

REPEATS = 3


def check(chunks: int | str) -> None:
    """Raises ValueError unless it is a number of chunks, or "auto"."""
    if chunks != "auto" and (not isinstance(chunks, int) or chunks < 1):
        raise ValueError(f'expected chunks >= 1 or "auto", got {chunks!r}')


def picked_before(picked: int | None) -> int:
    """What compiled code takes: what was measured last, by the module itself."""
    if picked is None:
        raise ValueError(
            'chunks is "auto", but nothing has been measured yet; call the module once before you '
            "compile it, or pass a number"
        )
    return picked


def forget() -> None:
    """Makes every shape be measured again."""
    _picked.clear()


def pick(
    key: Hashable, most: int, run: Callable[[int], None], member: Member, device: torch.device
) -> int:
    """The chunk count, a power of two up to ``most``, with which ``run(chunks)`` is fastest on the
    mean of the group's ranks: the same on every rank. Every rank must call it alike."""
    if key in _picked:
        return _picked[key]
    counts = [1]
    while counts[-1] * 2 <= most:
        counts.append(counts[-1] * 2)
    best = [float("inf")] * len(counts)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):  # a measurement draws no numbers of the training's
        for repeat in range(REPEATS + 1):
            for i, count in enumerate(counts):
                _synchronize(device)
                begin = time.perf_counter()
                run(count)
                _synchronize(device)
                if repeat > 0:  # the first is a warm-up
                    best[i] = min(best[i], time.perf_counter() - begin)
    rank, size, name = member
    seconds = torch.tensor(best, dtype=torch.float64, device=device)
    means = torch.ops.deepsp.all_reduce(seconds, "replicated", rank, size, name).tolist()
    _picked[key] = counts[means.index(min(means))]
    return _picked[key]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
