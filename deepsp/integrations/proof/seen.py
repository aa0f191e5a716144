"""What has been proven, alike on all ranks."""

from __future__ import annotations

from collections.abc import Hashable

from deepsp.ranks.groups import device_of, member_of, on_all_ranks

_WATCHED = 1000
"""Calls in which groups tell each other whether they have something new."""


class Seen:
    """What has been proven.

    Args:
        prove: False: nothing is. "always": everything, each time.
        groups: the number of groups of ranks, whose batches may have different entries.
    """

    def __init__(self, prove: bool | str, groups: int):
        self.prove, self.groups = prove, groups
        self.keys: set[Hashable] = set()
        self.calls = 0

    def is_new(self, key: Hashable) -> bool:
        """Whether this is to be proven now: on all ranks, if it is new for one. All ranks make this
        call."""
        if not self.prove:
            return False
        new = key not in self.keys or self.prove == "always"
        if self.groups > 1 and self.calls < _WATCHED:
            everyone = member_of(None)
            new = any(n for (n,) in on_all_ranks([int(new)], everyone, device_of(everyone)))
        elif self.groups > 1:
            new = self.prove == "always"
        self.calls += 1
        self.keys.add(key)
        return new
