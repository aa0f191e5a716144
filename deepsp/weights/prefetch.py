"""Gathers weights ahead of time, in the order of their uses.

Each step records the uses of sharded parameters, forward and backward apart. At the next step,
consecutive uses are combined into buckets, one coalesced gather each, and the next buckets are in
flight while one is used. A step with another order stops looking ahead, and its order is expected
next. The order depends on the program alone, so all ranks launch the same gathers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor


def bucket_bytes(device: torch.device) -> int:
    """The size up to which gathers are combined: large enough for latency not to count, small
    enough for the first bucket, which nothing hides, to be short. Between GPUs 64 MiB take 0.2 ms
    at 300 GB/s, and a launch takes a tenth of that; 4 MiB would be mostly launches."""
    return (64 if device.type == "cuda" else 4) << 20


class Use(NamedTuple):
    """One use of a sharded parameter."""

    index: int
    grad: bool  # whether autograd must see the gather


Wait = Callable[[], list[Callable[[], Tensor]]]
"""Waits for a gather; returns, for each use, a function that returns the parameter."""


@dataclass
class _Bucket:
    uses: list[Use]  # each once, in order of first use
    bytes: int
    left: int = 0  # uses still to come in this step
    pending: Wait | None = None
    arrived: dict[Use, Callable[[], Tensor]] = field(default_factory=dict)


class GatherOrder:
    """The uses of one phase of a step, and the gathers in flight for them.

    Args:
        start: launches the gather of several parameters; autograd sees all of them or none.
        size: bytes of a gathered parameter.
        bucket: returns the bytes up to which gathers are combined; called when a step begins.
        prefetch_bytes: at most this many gathered bytes, or one bucket, are in flight or ready
            before their first use; 0: none.
    """

    def __init__(
        self,
        start: Callable[[Sequence[Use]], Wait],
        size: Callable[[int], int],
        bucket: Callable[[], int],
        prefetch_bytes: int,
    ):
        self._start, self._size, self._bucket = start, size, bucket
        self._prefetch_bytes = prefetch_bytes
        self.uses: list[Use] = []  # of the last complete step, or of this one if it differs
        self._seen: list[Use] = []
        self._buckets: list[_Bucket] = []
        self._bucket_of: list[int] = []  # for each use
        self._launched = 0  # buckets
        self._following = False

    def __getstate__(self):
        # A copy has nothing in flight, and records again.
        return GatherOrder(self._start, self._size, self._bucket, self._prefetch_bytes).__dict__

    def begin(self) -> None:
        """Begins a step; the last one's order is expected."""
        if self._seen and self._seen != self.uses:
            self.uses = self._seen
            self._combine()
        self._seen = []
        self._launched = 0
        self._following = bool(self.uses)
        for bucket in self._buckets:
            bucket.pending, bucket.left = None, 0
            bucket.arrived.clear()
        for n in self._bucket_of:
            self._buckets[n].left += 1

    def look_ahead(self) -> None:
        """Launches the first gathers of the step that has begun."""
        if self._following and not self._seen:
            self._launch_after(-1)

    def take(self, use: Use) -> Tensor:
        """The gathered parameter, held until the last use of its bucket."""
        position = len(self._seen)
        self._seen.append(use)
        if self._following and (position >= len(self.uses) or self.uses[position] != use):
            self._following = False
            for bucket in self._buckets:
                bucket.pending = None
                bucket.arrived.clear()
        if not self._following:
            return self._start([use])()[0]()
        n = self._bucket_of[position]
        bucket = self._buckets[n]
        if not bucket.arrived:
            self._launch_until(n + 1)
            bucket.arrived = dict(zip(bucket.uses, bucket.pending(), strict=True))
            bucket.pending = None
        self._launch_after(n)
        tensor = bucket.arrived[use]()
        bucket.left -= 1
        if bucket.left == 0:
            bucket.arrived.clear()
        return tensor

    def _launch_until(self, end: int) -> None:
        for bucket in self._buckets[self._launched : end]:
            bucket.pending = self._start(bucket.uses)
        self._launched = max(self._launched, end)

    def _launch_after(self, current: int) -> None:
        ahead = 0
        for n in range(current + 1, len(self._buckets)):
            ahead += self._buckets[n].bytes
            # Launch at least the next bucket, even if one parameter is larger than the limit.
            if ahead > self._prefetch_bytes and (n > current + 1 or self._prefetch_bytes == 0):
                return
            self._launch_until(n + 1)

    def _combine(self) -> None:
        self._buckets, self._bucket_of = [], []
        limit = min(self._bucket(), self._prefetch_bytes)
        for use in self.uses:
            last = self._buckets[-1] if self._buckets else None
            if last is None or use not in last.uses:
                size = self._size(use.index)
                fits = (
                    last is not None
                    and last.uses[0].grad == use.grad
                    and last.bytes + size <= limit
                )
                if fits:
                    last.uses.append(use)
                    last.bytes += size
                else:
                    self._buckets.append(_Bucket([use], size))
            self._bucket_of.append(len(self._buckets) - 1)
