"""Deals documents of different lengths out over ranks."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from deepsp.data.borders import Segments
from deepsp.data.sharding import unshard
from deepsp.ranks.agreement import number_of
from deepsp.ranks.groups import Group


@dataclass(eq=False)
class Deal:
    """Which ranks share which document, and how many tokens each rank holds: what
    :func:`deal_documents` returns.

    A document belongs to a block of consecutive ranks. In a block of one rank, nothing of it is
    exchanged. In a wider block, its tokens are split over the ranks of the block, and so are its
    attention heads. Blocks of the same width are a level. The documents of a block, in ascending
    order of their index, form the sequence of the block: each of its ranks, in ascending order,
    holds consecutive tokens of it, so a document may begin and end anywhere within a rank's tokens.

    Attributes:
        lengths: the number of tokens of each document.
        ranks: the number of ranks, P.
        widths: the number of ranks of a block, by level: 1, 2, 3, 4, 6, 8, 12, ... below P, then P
            itself. Blocks begin at multiples of the next power of two: those of 3 ranks at 0, 4,
            8, ...; that of P ranks has all.
        places: for each document, its level (an index of ``widths``) and the first rank of its
            block.
        lens: by level and rank, the number of tokens that the rank holds of documents of that
            level.
        cost: the cost of a token, and of a document of n tokens as a multiple of n * n.
        segments: where documents are trees, the row of all of them.
        seq_lens: the number of tokens of each rank.
    """

    lengths: list[int]
    ranks: int
    widths: list[int]
    places: list[tuple[int, int]]
    lens: list[list[int]]
    cost: tuple[float, float]
    segments: Segments | None = None
    seq_lens: list[int] = field(init=False)
    makes_positions = False
    """Whether :func:`deepsp.deal_batch` made the batch's positions, which count from 0 in each
    row."""

    def __post_init__(self):
        self.seq_lens = [sum(tokens) for tokens in zip(*self.lens, strict=True)]
        # By level and rank. Made now: compiled code reads them.
        borders: dict[tuple[int, int], list] = {}
        trees = [[(0, n)] * (n > 0) for n in self.lengths]
        columns = 2
        if self.segments is not None:
            trees, columns = self.segments.trees(), 3
        for tree, place in zip(trees, self.places, strict=True):
            of_block = borders.setdefault(place, [])
            begin, count = of_block[-1][1] if of_block else 0, len(of_block)
            for a, b, *parent in tree:
                parent = [n + count if n >= 0 else -1 for n in parent]
                of_block.append((begin + a, begin + b, *parent))
        tables = {
            place: torch.tensor(x, dtype=torch.int64).view(-1, columns)
            for place, x in borders.items()
        }
        empty = torch.empty((0, columns), dtype=torch.int64)
        self._ranges = [
            [
                tables.get((level, self._first(level, rank)), empty)
                for level in range(len(self.widths))
            ]
            for rank in range(self.ranks)
        ]

    def __str__(self) -> str:
        """A line for each rank: a digit for a part of its tokens, the width of their blocks."""
        longest = max(self.lengths, default=0)
        lines = [
            f"{len(self.lengths)} documents, {sum(self.lengths)} tokens, the longest {longest}, on "
            f"{self.ranks} ranks: {100 * self.shared:.1f} % of the tokens are shared, the largest "
            f"cost is {100 * self.imbalance:.1f} % above the mean"
        ]
        most = max(1, *self.seq_lens)
        for rank, total in enumerate(self.seq_lens):
            bar = ""
            for width, lens in zip(self.widths, self.lens, strict=True):
                bar += f"{width} " * round(30 * lens[rank] / most)
            lines.append(f"rank {rank}: {total:>8} tokens  {bar.rstrip()}")
        return "\n".join(lines)

    def tokens(self, rank: int) -> Tensor:
        """The tokens of a rank, in its order: level by level, each level's part of its block's
        sequence.

        Args:
            rank: the rank.

        Returns:
            int64 [S_r], indices into all documents, one after another.

        Raises:
            ValueError: there is no such rank.
        """
        return self._of_rank(rank)[0]

    def positions(self, rank: int) -> Tensor:
        """The position of each of a rank's tokens within its document.

        Args:
            rank: the rank.

        Returns:
            int64 [S_r], in the order of :meth:`tokens`.

        Raises:
            ValueError: there is no such rank.
        """
        tokens, positions = self._of_rank(rank)
        return positions if self.segments is None else self.segments.positions[0][tokens]

    def documents(self, rank: int) -> list[Tensor]:
        """Where documents begin and end in the sequences of a rank's blocks.

        Args:
            rank: the rank.

        Returns:
            For each level, int64 [n, 2]: begin and end of each document that has tokens, in the
            sequence of the rank's block; [0, 2] where the rank has no block, or the block no
            documents. Of trees, [n, 3]: their segments, with their parents.

        Raises:
            ValueError: there is no such rank.
        """
        self._check(rank)
        return self._ranges[rank]

    @cached_property
    def digest(self) -> int:
        """A number that is the same on all ranks with the same deal, and hardly on others."""
        return number_of([("deal", (self.lengths, self.places, self.lens, self.segments))])

    @cached_property
    def pairs(self) -> list[int]:
        """For each document, its length squared; for a tree, :meth:`Segments.pairs`."""
        return [n * n for n in self.lengths] if self.segments is None else self.segments.pairs()

    @property
    def costs(self) -> list[float]:
        """The cost of each rank: of its tokens, and of its part of the attention."""
        linear, quadratic = self.cost
        costs = [linear * n for n in self.seq_lens]
        for n, (level, first) in zip(self.pairs, self.places, strict=True):
            width = self.widths[level]
            for rank in range(first, first + width):
                costs[rank] += quadratic * n / width
        return costs

    @property
    def imbalance(self) -> float:
        """How far the largest cost of a rank is above the mean: 0.01 is one percent."""
        costs = self.costs
        total = sum(costs)
        return max(costs) * self.ranks / total - 1 if total > 0 else 0.0

    @property
    def shared(self) -> float:
        """The fraction of all tokens whose document several ranks share."""
        total = sum(self.lengths)
        return 1 - sum(self.lens[0]) / total if self.ranks > 1 and total > 0 else 0.0

    def unshard(self, tensor: Tensor, group: Group = None) -> Tensor:
        """All ranks' tokens, in the order of the documents, on every rank. Differentiable, as
        :func:`deepsp.unshard`.

        Args:
            tensor: [1, S_r, ...], this rank's tokens in the order of :meth:`tokens`.
            group: the sequence group.

        Returns:
            [1, S, ...].

        Raises:
            ValueError: the tensor, or the group, doesn't fit.
        """
        everyone = unshard(tensor, 1, group, self.seq_lens)
        order = torch.cat([self.tokens(rank) for rank in range(self.ranks)]).argsort()
        return everyone[:, order.to(tensor.device)]

    @cached_property
    def _table(self) -> Tensor:
        """For each document its level, the first rank of its block, its length, and the index of
        its first token."""
        lengths = torch.tensor(self.lengths, dtype=torch.int64)
        places = torch.tensor(self.places, dtype=torch.int64).view(-1, 2)
        return torch.cat([places, torch.stack([lengths, lengths.cumsum(0) - lengths], 1)], 1)

    def _sequence(self, level: int, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        """The sequence of a rank's block: the end of each document in it, its length, and the index
        of its first token."""
        self._check(rank)
        levels, blocks, lengths, firsts = self._table.unbind(1)
        here = (levels == level) & (blocks == self._first(level, rank)) & (lengths > 0)
        return lengths[here].cumsum(0), lengths[here], firsts[here]

    def _check(self, rank: int) -> None:
        if not 0 <= rank < self.ranks:
            raise ValueError(f"expected 0 <= rank < {self.ranks}, got {rank}")

    def _first(self, level: int, rank: int) -> int:
        """The first rank of a rank's block; -1 if it has none of that level."""
        width = self.widths[level]
        stride = 1 << (width - 1).bit_length()
        first = rank // stride * stride
        return first if rank < first + width <= self.ranks else -1

    def _of_rank(self, rank: int) -> tuple[Tensor, Tensor]:
        """:meth:`tokens` and :meth:`positions` of a rank."""
        tokens, positions = [], []
        for level, lens in enumerate(self.lens):
            ends, lengths, firsts = self._sequence(level, rank)
            begin = sum(lens[self._first(level, rank) : rank]) if lens[rank] else 0
            index = torch.arange(begin, begin + lens[rank])
            document = torch.searchsorted(ends, index, right=True)
            positions.append(index - (ends - lengths)[document])
            tokens.append(positions[-1] + firsts[document])
        return torch.cat(tokens), torch.cat(positions)


def deal_documents(
    lengths: Sequence[int] | Segments,
    ranks: int,
    max_tokens: int | None = None,
    *,
    cost: tuple[float, float] = (1.0, 2e-5),
) -> Deal:
    """Deals documents out over ranks, so that all ranks have as much to compute and few tokens are
    exchanged.

    Most documents stay on one rank. One is shared by 2, 3, 4, 6, ... or all ranks if it has more
    tokens or more to compute than fewer ranks may have. No rank holds more than ``max_tokens``, and
    none costs more than 3 % above the mean (or one token, if that is more). Within these limits,
    documents are shared as narrowly as a search finds. The search takes microseconds a document,
    and its result depends on nothing but the arguments: every rank may call it, and all get the
    same.

    Args:
        lengths: the number of tokens of each document. Or :class:`deepsp.Segments`: each tree is a
            document, which costs the pairs of tokens that see each other.
        ranks: the number of ranks.
        max_tokens: the largest number of tokens of a rank; None: no limit.
        cost: what a rank has to compute, in any unit: of a token, and of a document of n tokens as
            a multiple of n * n. A rank of a block of w ranks computes 1 / w of a document's second
            part. The default is causal attention against everything else of a layer at hidden size
            h = 4096: 2 h n operations a token against 24 h^2, which is n / (12 h). For another
            model pass ``(1.0, 1 / (12 * h))``, or what you measured.

    Returns:
        A :class:`Deal`.

    Raises:
        ValueError: ``max_tokens`` is too small for the documents, a length is negative, there are
            no ranks, a cost is negative or not finite, or the segments of two trees are mixed.
    """
    segments, pairs = None, []
    if isinstance(lengths, Segments):
        segments, pairs = lengths, [float(n) for n in lengths.pairs()]
        lengths = [tree[-1][1] for tree in segments.trees()]
    try:
        lengths = [operator.index(n) for n in lengths]
        ranks = operator.index(ranks)
        limit = sum(lengths) if max_tokens is None else operator.index(max_tokens)
    except TypeError:
        raise ValueError(
            "expected lengths to be a sequence of ints, ranks an int, and max_tokens an int or "
            f"None, got {lengths!r}, {ranks!r} and {max_tokens!r}"
        ) from None
    try:
        linear, quadratic = map(float, cost)
    except (TypeError, ValueError):
        raise ValueError(f"expected cost to be two numbers, got {cost!r}") from None
    if sum(lengths) >= 1 << 62:
        raise ValueError(f"expected documents of fewer than 2^62 tokens, got {sum(lengths)}")
    numbers = torch.ops.deepsp.deal_documents(lengths, ranks, limit, linear, quadratic, pairs)
    places, numbers = numbers[: 2 * len(lengths)], numbers[2 * len(lengths) :]
    levels = len(numbers) // (ranks + 1)
    widths, lens = numbers[:levels], numbers[levels:]
    return Deal(
        lengths,
        ranks,
        widths,
        list(zip(places[::2], places[1::2], strict=True)),
        [lens[at : at + ranks] for at in range(0, len(lens), ranks)],
        (linear, quadratic),
        segments,
    )
