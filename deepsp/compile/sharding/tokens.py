"""Where the tokens of a sequence are in a tensor, and which of them a rank has.

A tensor with a sequence in dimension ``dim`` has ``outer * S * inner`` elements there: other
dimensions may be merged with it, as by ``view(-1, C)``. A rank's part has ``outer * S_r * inner``
elements there, and all other dimensions in full. Sizes are ints or sympy expressions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as List
from dataclasses import dataclass, field, replace

import sympy
import torch
from torch.utils._sympy.functions import FloorDiv, Max, Min

Size = int | sympy.Expr
JOINED = "joined"


def size_of(value) -> Size:
    """A size as an int or an expression."""
    if isinstance(value, torch.SymInt):
        expr = value.node.expr
        return int(expr) if expr.is_number else expr
    if isinstance(value, sympy.Expr):
        return int(value) if value.is_number else value
    return int(value)


def product(sizes) -> Size:
    result: Size = 1
    for size in sizes:
        result = result * size
    return size_of(result)


def symbols_of(sizes: Iterable[Size]) -> set[sympy.Symbol]:
    """The symbols that sizes depend on."""
    return set().union(*(sympy.sympify(size).free_symbols for size in sizes))


def same(a: Size, b: Size) -> bool:
    """Whether two sizes are known to be equal."""
    return a == b or sympy.expand(sympy.sympify(a) - sympy.sympify(b)) == 0


def difference(a: Size, b: Size) -> int | None:
    """``a - b`` if it is known."""
    result = sympy.expand(sympy.sympify(a) - sympy.sympify(b))
    return int(result) if result.is_number else None


def quotient(a: Size, b: Size) -> Size | None:
    """``a / b`` if it is known to be an integer."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b and a % b == 0 else None
    if same(a, b):
        return 1
    ratio = sympy.cancel(sympy.sympify(a) / sympy.sympify(b))
    numerator, denominator = sympy.fraction(ratio)
    if denominator != 1 or not all(c.is_integer for c in numerator.as_coefficients_dict().values()):
        return None
    return size_of(ratio)


@dataclass(frozen=True)
class Sequence:
    """A sequence and how many tokens of it each rank has: consecutive ones, in rank order, or, of
    sequences that were joined, some of each, in their order."""

    lens: tuple[Size, ...]
    inside: tuple[Size, Size, Sequence] | None = field(default=None, compare=False)
    """If tokens were put before or after another sequence: its begin and end in this one, and it.
    Sizes that are expressions don't tell that a cut there gives each rank its tokens back."""
    joined: tuple[tuple[Size, Sequence], ...] = ()
    """The sequences that were joined, with their lengths."""

    @staticmethod
    def split(length: Size, ranks: int, even: bool) -> Sequence:
        """Splits like ``torch.tensor_split``: the first ``length % ranks`` ranks get one more.
        ``even``: the remainder is 0."""
        if isinstance(length, int):
            return Sequence(tuple((length + ranks - 1 - r) // ranks for r in range(ranks)))
        if even:
            return Sequence((FloorDiv(length, ranks),) * ranks)
        return Sequence(tuple(FloorDiv(length + ranks - 1 - r, ranks) for r in range(ranks)))

    @staticmethod
    def join(parts: List[tuple[Size, Sequence]]) -> Sequence:
        """One sequence of several, of which each rank keeps its tokens."""
        lens = zip(*(part.lens for _, part in parts), strict=True)
        return Sequence(tuple(size_of(sum(ns)) for ns in lens), joined=tuple(parts))

    def longer(self, more: Size) -> Sequence:
        """With more tokens on the last rank; fewer, if ``more`` is negative."""
        *lens, last = self.lens
        return Sequence((*lens, size_of(last + more)))

    def begin(self, rank: int) -> Size:
        return size_of(sympy.Add(*self.lens[:rank])) if rank else 0

    def borders(self) -> list[Size]:
        """Where joined sequences begin, and where the last one ends."""
        ends: list[Size] = [0]
        for length, _ in self.joined:
            ends.append(size_of(ends[-1] + length))
        return ends

    def pieces(self, rank: int) -> list[tuple[Size, Size]]:
        """Where a rank's tokens are in the full sequence: begin and length of each run."""
        if not self.joined:
            return [(self.begin(rank), self.lens[rank])]
        return [
            (size_of(first + part.begin(rank)), part.lens[rank])
            for first, (_, part) in zip(self.borders(), self.joined, strict=False)
        ]

    def window(
        self, begin: Size, end: Size, holds: Callable[[bool | sympy.Basic], bool] | None
    ) -> tuple[Sequence, list[Size]]:
        """Selects the tokens from ``begin`` to ``end``, on the ranks that have them now.

        Args:
            begin: the first token.
            end: the token after the last one.
            holds: says whether a relation of sizes holds. None: it isn't known, and the sizes are
                minima and maxima, for which Triton's code generation of torch 2.11 to 2.13 may
                fail.

        Returns:
            The selected tokens, and how many tokens before them each rank has.
        """
        ranks = range(len(self.lens))
        borders = [self.begin(rank) for rank in range(len(ranks) + 1)]
        if holds is None:
            starts = [Max(border, begin) for border in borders[:-1]]
            stops = [Min(border, end) for border in borders[1:]]
            lens = [Max(stop - start, 0) for start, stop in zip(starts, stops, strict=True)]
            before = [Min(starts[r] - borders[r], self.lens[r]) for r in ranks]
        else:  # the ranks between those of the first and of the last token have all of theirs
            first = next((r for r in ranks if not holds(borders[r + 1] <= begin)), len(ranks))
            last = next((r for r in reversed(ranks) if not holds(end <= borders[r])), -1)
            before = [begin - borders[r] if r == first else 0 for r in ranks]
            lens = [
                (end if r == last else borders[r + 1]) - borders[r] - before[r]
                if first <= r <= last
                else 0
                for r in ranks
            ]
        lens, before = ([size_of(sympy.sympify(n)) for n in sizes] for sizes in (lens, before))
        if self.inside and same(begin, self.inside[0]) and same(end, self.inside[1]):
            return self.inside[2], before
        return Sequence(tuple(lens)), before


@dataclass(frozen=True)
class Tokens:
    """A sequence of ``length`` tokens in dimension ``dim``, which has ``outer * length * inner``
    elements. ``order``: the name of the sort, if each rank has sorted its part; "joined", if each
    rank has some tokens of several sequences."""

    dim: int
    length: Size
    sequence: Sequence
    outer: Size = 1
    inner: Size = 1
    order: str | None = None

    def at(self, dim: int) -> Tokens:
        return replace(self, dim=dim)

    def local(self, rank: int) -> Size:
        """The size of the dimension in a rank's part."""
        return size_of(self.outer * self.sequence.lens[rank] * self.inner)

    @property
    def full(self) -> Size:
        return size_of(self.outer * self.length * self.inner)

    @property
    def alone(self) -> bool:
        """Whether the sequence is the whole dimension, in its order."""
        return self.is_whole and self.order is None

    @property
    def is_sorted(self) -> bool:
        """Whether each rank has sorted its part."""
        return self.order not in (None, JOINED)

    @property
    def is_whole(self) -> bool:
        """Whether the sequence, or several that were joined, is the whole dimension."""
        return same(self.outer, 1) and same(self.inner, 1) and not self.is_sorted

    @property
    def plain(self) -> Tokens:
        """The same elements as one longer sequence, if possible: rows of patches, say."""
        if same(self.inner, 1) or not same(self.outer, 1) or self.order is not None:
            return self
        lens = tuple(size_of(n * self.inner) for n in self.sequence.lens)
        return Tokens(self.dim, self.full, Sequence(lens))

    def extended(self, before: Size, after: Size) -> Tokens:
        """With more tokens before the sequence, on the first rank, and after it, on the last."""
        tokens = self.plain
        lens, end = list(tokens.sequence.lens), size_of(before + tokens.length)
        lens[0], lens[-1] = size_of(lens[0] + before), size_of(lens[-1] + after)
        inside = (before, end, tokens.sequence)
        return Tokens(tokens.dim, size_of(end + after), Sequence(tuple(lens), inside))

    def part(self, shape: List[Size], rank: int) -> list[Size]:
        """The shape of a rank's part of a tensor of ``shape``."""
        return [self.local(rank) if d == self.dim else n for d, n in enumerate(shape)]

    def reshaped(self, old: List[Size], new: List[Size]) -> Tokens | None:
        """Where the tokens are when a tensor of shape ``old`` is viewed as ``new``, row-major;
        None if a part of the view isn't a view of the part."""
        stride = product([self.inner, *old[self.dim + 1 :]])  # elements from token to token
        behind: Size = 1  # elements from one index of a dimension to the next
        for dim in reversed(range(len(new))):
            inner = quotient(stride, behind)
            if inner is not None:
                outer = quotient(new[dim], size_of(self.length * inner))
                if outer is not None:
                    tokens = replace(self, dim=dim, outer=outer, inner=inner)
                    # A sorted part can't be cut further.
                    return tokens if self.order is None or same(tokens.full, self.full) else None
            behind = size_of(behind * new[dim])
        return None
