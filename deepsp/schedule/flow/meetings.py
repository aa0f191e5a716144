"""Keeps the ranks of a dry run together: an error on one rank is an error on all of them.

A rank whose forward raises would leave the others waiting in the next collective. So before each
collective of the dry run, and at its end, the ranks exchange one number: where they are, or that
they have failed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from deepsp.ranks.agreement import number_of
from deepsp.ranks.groups import Member, device_of, objects_on_all_ranks, on_all_ranks

_FAILED = -1
_ADVICE = (
    "The code depends on the rank, or on its local sizes, such as an uneven number of heads: pass "
    "a unit= to shard and divide that leaves each rank sizes that the code can use (with grouped "
    "kv heads, the unit of q is all query heads of a kv head)"
)


class Meetings:
    """The meetings of one dry run."""

    def __init__(self, member: Member):
        self.member = member
        self._over: ValueError | None = None  # what this rank raised since another one failed

    def join(self, where: str) -> None:
        """Waits for the other ranks. ``where``: the collective that follows.

        Raises:
            ValueError: a rank has failed, or is somewhere else.
        """
        if self._over is not None:  # the model has caught the error
            raise self._over
        numbers = self._exchange(number_of([("at", where)]))
        if len(set(numbers)) > 1:
            self._over = self._error(where, numbers)
            raise self._over

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """The dry run. If it raises on this rank, the other ranks raise, too."""
        try:
            yield
        except Exception as error:
            if self._over is None:
                self._tell(error)
            raise
        self.join("the end of the model")

    def _exchange(self, number: int) -> list[int]:
        if self.member[1] == 1:
            return [number]
        return [n for (n,) in on_all_ranks([number], self.member, device_of(self.member))]

    def _texts(self, text: str) -> list[str]:
        return objects_on_all_ranks(text, self.member, device_of(self.member))

    def _tell(self, error: Exception) -> None:
        """Tells the ranks that wait why this one doesn't come."""
        try:
            numbers = self._exchange(_FAILED)
            if any(n != _FAILED for n in numbers):
                notes = getattr(error, "__notes__", [])[:1]  # where it was raised
                self._texts("\n".join([f"{type(error).__name__}: {error}", *notes]))
                error.add_note(f"It isn't raised on every rank of the group. {_ADVICE}")
        except Exception as lost:  # the error may be the group's own
            error.add_note(f"The other ranks of the group could not be told: {lost}")

    def _error(self, where: str, numbers: list[int]) -> ValueError:
        texts = self._texts(where)
        if _FAILED in numbers:
            failed = [r for r, n in enumerate(numbers) if n == _FAILED]
            return _failed(failed, texts[failed[0]])
        other = next(r for r, n in enumerate(numbers) if n != numbers[0])
        return ValueError(
            f"expected all ranks to call the same collectives, got {texts[0]} on rank 0 and "
            f"{texts[other]} on rank {other}; the model's code, or a hook, depends on the rank or "
            "on the sizes of its local tensors: let every rank call the same modules"
        )


def _failed(ranks: list[int], text: str) -> ValueError:
    who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
    return ValueError(
        f"expected the model to run on every rank, got an error on {who} of the group only: "
        f"{text}\n{_ADVICE}"
    )
