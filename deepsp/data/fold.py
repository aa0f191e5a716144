"""Batches whose sequences begin alike: what they share goes through a model once."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from deepsp.data import last_batch
from deepsp.data.borders import Segments
from deepsp.data.deal_batch import Documents, dealt_batch, documents_of, padded
from deepsp.data.documents import Deal, deal_documents
from deepsp.data.roles import leaves_of, name_of, named_values
from deepsp.data.same_batch import ADVICE, compare_batches
from deepsp.data.sharding import unshard
from deepsp.ranks.agreement import number_of
from deepsp.ranks.groups import Group, member_of


class Fold:
    """The tokens of a batch's sequences as a tree in one row: what :func:`fold` returns.

    Args:
        segments: the tree (:class:`deepsp.Segments`).
        sources: int64 [T], for each token of the row, which of the sequences' tokens it is (the
            first of those that share it).
        places: int64 [N], for each of the sequences' tokens, its token in the row.
        valid: bool [B, S], which tokens of the batch the sequences have; the others are padding.
        lengths: the number of tokens of each sequence.
        ranks: the number of ranks.
        deal: whether the row's trees are dealt out.

    Attributes:
        seq_lens: the number of tokens of the row that each rank holds.
        deal: how the trees were dealt out (:class:`deepsp.Deal`); None: the ranks hold the row one
            after another.
    """

    makes_positions = False

    def __init__(
        self,
        segments: Segments,
        sources: Tensor,
        places: Tensor,
        valid: Tensor,
        lengths: Sequence[int],
        ranks: int,
        deal: bool = False,
    ):
        self.segments, self.sources, self.places = segments, sources, places
        self.valid, self.lengths = valid, list(lengths)
        self.deal = deal_documents(segments, ranks) if deal else None
        self.seq_lens = list(torch.ops.deepsp.token_split(len(sources), ranks))
        if self.deal is not None:
            self.seq_lens = self.deal.seq_lens

    def __str__(self) -> str:
        return (
            f"{len(self.lengths)} sequences of {len(self.places)} tokens, {len(self.sources)} in "
            f"the row, in {len(self.segments.lengths)} segments"
        )

    @cached_property
    def digest(self) -> int:
        """A number that is the same on all ranks with the same fold, and hardly on others."""
        return number_of([("fold", (self.segments, self.seq_lens, self.deal and self.deal.places))])

    def counts(self, real_rows: Tensor | None = None) -> Tensor:
        """How many sequences have each token of the row.

        Args:
            real_rows: [B], the rows of the batch whose sequences count; None: all.

        Returns:
            int64 [T].
        """
        places = self.places
        if real_rows is not None:
            places = places[real_rows.cpu().bool()[:, None].expand_as(self.valid)[self.valid.cpu()]]
        return torch.bincount(places, minlength=len(self.sources))

    def index(self, rank: int) -> Tensor:
        """Which of the row's tokens a rank holds.

        Args:
            rank: the rank.

        Returns:
            int64 [S_r].
        """
        if self.deal is not None:
            return self.deal.tokens(rank)
        return torch.arange(len(self.sources)).split(self.seq_lens)[rank]

    def unfold(self, tensor: Tensor, group: Group = None) -> Tensor:
        """All sequences' tokens, padding included, on every rank. Differentiable: a token that
        sequences share gets the sum of their gradients. All ranks must use the result alike, as
        that of :func:`deepsp.unshard`.

        Args:
            tensor: [1, S_r, ...], this rank's tokens.
            group: the sequence group.

        Returns:
            [B, S, ...], 0 in padding.

        Raises:
            ValueError: the tensor doesn't have this rank's tokens.
        """
        rank = member_of(group)[0]
        if tensor.dim() < 2 or tensor.shape[:2] != (1, self.seq_lens[rank]):
            raise ValueError(
                f"expected tensor of shape [1, {self.seq_lens[rank]}, ...], this rank's tokens, "
                f"got {list(tensor.shape)}"
            )
        if self.deal is None:
            (row,) = unshard(tensor, 1, group, self.seq_lens)
        else:
            (row,) = self.deal.unshard(tensor, group)
        return padded(row[self.places.to(row.device)], self.valid)


def fold(
    batch: Mapping[str, Any],
    group: Group = None,
    *,
    ignore_index: int = -100,
    roles: Mapping[str, str] | None = None,
    deal: bool = False,
) -> tuple[dict[str, Any], Fold]:
    """Folds the sequences of a batch, which every rank has in full, into one row in which what they
    begin with alike stands once, and shards it: in the place of :func:`deepsp.shard_batch` where
    rows share prompts, such as several completions of one. ::

        local, fold = deepsp.fold({"input_ids": ids, "attention_mask": mask, "labels": labels})
        hidden = model.model(**{n: local[n] for n in ("input_ids", "position_ids", "deal")})[0]
        log_probs = deepsp.token_log_probs(hidden, weight, local["shift_labels"])
        log_probs = fold.unfold(log_probs)  # [B, S], on every rank

    Sequences share a token where all that the batch says of it and of those before it is equal: its
    id, position and label among them. So the last token of a prompt, whose labels differ, stands
    once for each completion. Every rank finds the same tree, in time linear in tokens. Losses of
    what is unfolded, and their gradients, are those of the rows, without dropout; one of the row's
    tokens would count shared ones once.

    Args:
        batch: as for :func:`deepsp.deal_batch`.
        group: the sequence group.
        ignore_index: the label of tokens that don't count.
        roles: as in ``shard_batch``.
        deal: deals the trees out (:func:`deepsp.deal_documents`), so that ranks share only those
            that are long: for batches with many prompts. Of those, a tree with a short root is cut
            at it, each part with a copy, where fewer tokens are shared then.

    Returns:
        The local batch, and the fold. In the batch each tensor is [1, S_r, ...], this rank's tokens
        of the row; ``shift_labels`` replaces ``labels``; ``position_ids`` are those of the batch,
        or count from 0 in each sequence; ``deal`` is the fold, which a model of transformers with
        deepsp's attention takes as an argument. In a model of your own, pass ``fold.segments`` as
        ``documents`` to :func:`deepsp.distributed_attention`, or ``fold.deal`` as ``deal`` if there
        is one, with ``is_causal=True``.

    Raises:
        ValueError: as ``deal_batch``; there are no tokens, or a tensor with an entry for each is a
            leaf that requires a gradient.
    """
    values = named_values(batch, 1)
    tensors = [(name_of(path), x) for path, x in leaves_of(values)]
    for name, x in tensors:
        if x.requires_grad and x.is_leaf:
            raise ValueError(
                f"expected no {name} that is trained itself, since rows that share a token would "
                "not each get their gradient, got one; detach it, or use shard_batch"
            )
    compare_batches(tensors, group, ADVICE)
    documents = documents_of(batch, ignore_index, roles=roles)
    member = member_of(group)
    folded = fold_documents(documents, member[1], deal)
    return folded_batch(documents, folded, member[0]), folded


def folded_batch(documents: Documents, folded: Fold, rank: int) -> dict[str, Any]:
    """The batch of a rank's tokens, and the fold."""
    tokens = documents.at(folded.sources[folded.index(rank)])
    local = dealt_batch(tokens, documents, folded)
    if len(folded.segments.lengths) > 1:
        last_batch.remember_fold(local, documents.roles.tokens)
    return local


COPIES = 0.03
"""The largest part of a tree's cost that copies of its root may add: as much as a deal lets the
cost of ranks differ."""


def fold_documents(documents: Documents, ranks: int, deal: bool = False) -> Fold:
    """The tree of a batch's documents. Trees to be dealt out that several ranks would share are cut
    at the root into as many, each with a copy of the root, where copies cost little and fewer
    tokens are shared then."""
    count = sum(documents.lengths)
    if count == 0:
        raise ValueError("expected a batch with tokens, got only padding, or no rows; leave it out")
    content = torch.cat([_bytes(x, count) for x in documents.tokens.values()], 1).numpy()
    firsts = torch.tensor([0, *documents.lengths]).cumsum(0).tolist()
    rows = [content[begin:end] for begin, end in itertools.pairwise(firsts)]
    blobs = [row.tobytes() for row in rows]
    order = sorted(range(len(rows)), key=blobs.__getitem__)  # sequences that begin alike adjoin
    alike = [0] + [_alike(rows[a], rows[b]) for a, b in itertools.pairwise(order)]

    def folded(alike: list[int]) -> Fold:
        tree = _Tree()
        places, sources = torch.empty(count, dtype=torch.int64), []
        for shared, n in zip(alike, order, strict=True):
            places[firsts[n] : firsts[n + 1]] = tree.add(shared, len(rows[n]))
            sources.append(torch.arange(firsts[n] + shared, firsts[n + 1]))
        tokens, segments = torch.cat(sources), Segments(*tree.segments())
        return Fold(segments, tokens, places, documents.valid, documents.lengths, ranks, deal)

    whole = folded(alike)
    if whole.deal is not None and whole.deal.shared > 0:
        cut = folded(_cut_roots(whole.deal, alike, [len(rows[n]) for n in order]))
        if _sent(cut.deal) < _sent(whole.deal):
            return cut
    return whole


def _cut_roots(deal: Deal, alike: list[int], lengths: list[int]) -> list[int]:
    """Cut trees that several ranks share at their roots.

    Args:
        deal: of the whole trees.
        alike: for each sequence, how many tokens it shares with the one before.
        lengths: the number of tokens of each sequence.

    Returns:
        ``alike``, with 0 where a tree is cut.
    """
    result = list(alike)
    firsts = [n for n, shared in enumerate(alike) if shared == 0]
    linear, quadratic = deal.cost
    for first, end, (level, _), length, pairs in zip(
        firsts, [*firsts[1:], len(alike)], deal.places, deal.lengths, deal.pairs, strict=True
    ):
        root = min(alike[first + 1 : end], default=0)
        branches = [n for n in range(first + 1, end) if alike[n] == root]
        parts = min(deal.widths[level], len(branches) + 1)
        copies = (parts - 1) * (linear * root + quadratic * root * root)
        if copies <= COPIES * (linear * length + quadratic * pairs):
            own = [lengths[first] - root, *(lengths[n] - alike[n] for n in range(first + 1, end))]
            before = dict(enumerate(itertools.accumulate(own), first + 1))
            for part in range(1, parts):
                share = before[end] * part / parts
                result[min(branches, key=lambda n: abs(before[n] - share))] = 0
    return result


def _sent(deal: Deal) -> float:
    """How many tokens leave their rank, in one exchange."""
    return sum(sum(n) * (1 - 1 / w) for w, n in zip(deal.widths, deal.lens, strict=True))


def _bytes(x: Tensor, count: int) -> Tensor:
    """Return a tensor [N, ...] as bytes of each token, uint8 [N, bytes]."""
    return x.detach().cpu().contiguous().view(count, -1).view(torch.uint8)


def _alike(a, b) -> int:
    """How many tokens two sequences begin with alike."""
    n = min(len(a), len(b))
    differs = (a[:n] != b[:n]).any(1)
    return int(differs.argmax()) if differs.any() else n


class _Tree:
    """Sequences, in an order in which those that begin alike adjoin. Each adds a run of its own
    tokens, which later ones may leave at any token."""

    def __init__(self):
        self.runs: list[tuple[int, int, int]] = []
        """The parent's number, and how many tokens of a sequence come before and until its end."""
        self.shifts: list[int] = []
        """From a token's place in its sequences to that in the row."""
        self.count = 0
        self.cuts: list[set[int]] = []
        """Where others leave it."""
        self.path: list[int] = []
        """The runs of the last sequence."""

    def add(self, alike: int, length: int) -> Tensor:
        """The tokens in the row of a sequence that is as the one before for so many tokens."""
        while self.path and self.runs[self.path[-1]][1] >= alike:
            self.path.pop()
        parent = self.path[-1] if self.path else -1
        if parent >= 0:
            self.cuts[parent].add(alike)
        self.path.append(len(self.runs))
        self.runs.append((parent, alike, length))
        self.shifts.append(self.count - alike)
        self.count += length - alike
        self.cuts.append(set())
        ends = [self.runs[n][1] for n in self.path[1:]] + [length]
        return torch.cat(
            [
                torch.arange(self.runs[n][1], end) + self.shifts[n]
                for n, end in zip(self.path, ends, strict=True)
            ]
        )

    def segments(self) -> tuple[list[int], list[int]]:
        """Lengths and parents of the segments into which the runs are cut."""
        lengths, parents, numbers = [], [], {(-1, 0): -1}
        for run, (parent, begin, end) in enumerate(self.runs):
            above = numbers[parent, begin]
            for cut in sorted((self.cuts[run] | {end}) - {begin}):
                lengths.append(cut - begin)
                parents.append(above)
                above = numbers[run, cut] = len(lengths) - 1
                begin = cut
        return lengths, parents
