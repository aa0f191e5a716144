"""Gathers in the order in which weights are used: each launched before it is needed.

A step's uses of sharded parameters are recorded as they happen, forward and backward apart. When
the next step begins, uses that follow each other are combined into buckets, one coalesced gather
each, and while one bucket is used the next ones travel. A step that does something else goes on
without looking ahead, and is what the next one is compared with. The order depends on the program
alone, so all ranks launch the same gathers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor


def bucket_bytes(device: torch.device) -> int:
    """Gathers are combined up to this size: large enough that latency doesn't count, small enough
    that the first bucket, which nothing hides, is short. Between GPUs 64 MiB take 0.2 ms at
    300 GB/s, of which a launch is a tenth; 4 MiB would be mostly launches."""
    return (64 if device.type == "cuda" else 4) << 20


class Use(NamedTuple):
    """One use of a sharded parameter."""

    index: int
    grad: bool  # whether autograd is to see the gather


Wait = Callable[[], list[Callable[[], Tensor]]]
"""Waits for a gather; gives, for each of its uses, what gives the parameter when it is used."""


@dataclass
class _Bucket:
    uses: list[Use]  # each once, in order of first use
    bytes: int
    left: int = 0  # uses still to come in this step
    pending: Wait | None = None
    arrived: dict[Use, Callable[[], Tensor]] = field(default_factory=dict)


class Order:
    """The uses of one phase of a step, and what is on its way for them.

    Args:
        start: launches the gather of several parameters, all of which autograd sees or none.
        size: bytes of a gathered parameter.
        bucket: bytes up to which gathers are combined, asked when a step begins.
        prefetch_bytes: at most so many gathered bytes, or one bucket, travel or lie ready before
            their first use; 0: none.
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
        self.uses: list[Use] = []  # of the last complete step, or of this one where it differs
        self._seen: list[Use] = []
        self._buckets: list[_Bucket] = []
        self._bucket_of: list[int] = []  # for each use
        self._launched = 0  # buckets
        self._following = False

    def __getstate__(self):
        # A copy has nothing on its way, and records anew.
        return Order(self._start, self._size, self._bucket, self._prefetch_bytes).__dict__

    def begin(self) -> None:
        """A step begins: what the last one did is what is expected."""
        if self._seen and self._seen != self.uses:
            self.uses = self._seen
            self._plan()
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
            # A parameter may be larger: the next one is under way nevertheless.
            if ahead > self._prefetch_bytes and (n > current + 1 or self._prefetch_bytes == 0):
                return
            self._launch_until(n + 1)

    def _plan(self) -> None:
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
