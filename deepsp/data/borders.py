"""Where documents begin and end in rows of tokens."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Segments:
    """A row of tokens that is a tree of segments: what several sequences begin with alike stands in
    it once. A segment goes on where its parent ends: its tokens see those of its ancestors, and
    their own segment up to themselves, and nothing of other branches. ::

        prompt, completions = 900, [200, 70, 120]  # three sequences, 1,290 tokens instead of 3,090
        tree = deepsp.Segments([prompt, *completions], [-1, 0, 0, 0])
        out = deepsp.distributed_attention(q, k, v, is_causal=True, documents=tree, seq_lens=lens)

    Several trees in one row are documents that see nothing of each other.

    Args:
        lengths: the number of tokens of each segment, in the order of the row; 0 is one of its
            parent's ends.
        parents: for each segment, the index of an earlier one; -1: it begins a tree.

    Attributes:
        documents: int64 [N, 3], where each segment begins and ends, and its parent: what ops take.
        positions: int64 [1, S], the position of each token in its sequences: those before it in its
            segment, and those of its ancestors. Models take it as ``position_ids``, shared out over
            ranks like the tokens.

    Raises:
        ValueError: the lists differ in length, a length is negative, or a parent doesn't come
            before its child.
    """

    lengths: Sequence[int]
    parents: Sequence[int]
    documents: Tensor = field(init=False, repr=False, compare=False)
    positions: Tensor = field(init=False, repr=False, compare=False)

    def __post_init__(self):
        try:
            lengths, parents = (tuple(map(operator.index, x)) for x in (self.lengths, self.parents))
        except TypeError:
            raise ValueError(
                "expected lengths and parents to be sequences of ints, -1 where there is no "
                f"parent, got {self.lengths!r} and {self.parents!r}"
            ) from None
        if len(lengths) != len(parents) or any(n < 0 for n in lengths):
            raise ValueError(
                "expected a length of at least 0, and a parent, for each segment, got lengths "
                f"{list(lengths)} and parents {list(parents)}"
            )
        for n, parent in enumerate(parents):
            if not -1 <= parent < n:
                raise ValueError(
                    f"expected the parent of segment {n} to be -1 or an earlier one, got {parent}; "
                    "put a parent before its children"
                )
        depths = _depths(lengths, parents)
        each = torch.tensor(lengths, dtype=torch.int64)
        ends = each.cumsum(0)
        columns = ends - each, ends, torch.tensor(parents, dtype=torch.int64)
        shift = torch.tensor(depths, dtype=torch.int64) - (ends - each)
        row = torch.arange(int(each.sum())) + shift.repeat_interleave(each)
        values = {"lengths": lengths, "parents": parents, "positions": row[None]}
        for name, value in (values | {"documents": torch.stack(columns, 1)}).items():
            object.__setattr__(self, name, value)

    def trees(self) -> list[list[tuple[int, int, int]]]:
        """For each tree, where its segments begin and end among its tokens, and their parents.

        Raises:
            ValueError: a segment stands behind another tree than its parent's.
        """
        trees: list[list[tuple[int, int, int]]] = []
        root = 0
        for n, parent in enumerate(self.parents):
            if parent < 0:
                root = n
                trees.append([])
            elif parent < root:
                raise ValueError(
                    f"expected the segments of each tree one after another, got {n}, whose parent "
                    f"is {parent}, behind {root}, which begins another; put each next to its tree"
                )
            begin = trees[-1][-1][1] if trees[-1] else 0
            trees[-1].append((begin, begin + self.lengths[n], max(-1, parent - root)))
        return trees

    def pairs(self) -> list[int]:
        """For each tree, twice as many pairs of tokens as see each other: n * n of a tree of one
        segment, about."""
        pairs = []
        depths = _depths(self.lengths, self.parents)
        for length, parent, depth in zip(self.lengths, self.parents, depths, strict=True):
            if parent < 0:
                pairs.append(0)
            pairs[-1] += length * (2 * depth + length)
        return pairs


def _depths(lengths: Sequence[int], parents: Sequence[int]) -> list[int]:
    """Return how many tokens each segment's ancestors have."""
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + lengths[parent])
    return depths


def ranges_of(
    documents: Tensor | Segments, batch: int, length: int, *, tree: bool = False
) -> Tensor:
    """Begin and end [N, 2] of each document among ``batch * length`` tokens, from [N, 2] or
    ``cu_seqlens`` [N + 1]. ``tree``: whether documents may have parents; [N, 3] then where they do.

    Raises:
        ValueError: ``documents`` is neither.
    """
    if isinstance(documents, Segments) and tree:
        tokens = sum(documents.lengths)
        if batch != 1 or tokens > length:
            raise ValueError(
                f"expected one row of at least {tokens} tokens, those of the segments, got {batch} "
                f"x {length}; put all segments into one row"
            )
        return documents.documents
    if not isinstance(documents, Tensor) or documents.is_floating_point():
        got = documents.dtype if isinstance(documents, Tensor) else type(documents).__name__
        raise ValueError(f"expected documents to be a tensor of integers, got {got}")
    tokens = batch * length
    if documents.dim() == 1:
        if not torch.compiler.is_compiling() and (
            documents.numel() < 2 or documents[0] != 0 or documents[-1] != tokens
        ):
            raise ValueError(
                f"expected documents as cu_seqlens to go from 0 to {tokens}, the tokens of the "
                f"full sequence in all rows, got {_shown(documents)}; pass [begin, end] of each "
                "document, shape [N, 2], where some tokens are in none"
            )
        documents = torch.stack([documents[:-1], documents[1:]], 1)
    if documents.dim() != 2 or documents.size(1) not in (2, 2 + tree):
        raise ValueError(
            "expected documents to be cu_seqlens [N + 1], or to have shape [N, 2]"
            + (", or [N, 3] with parents" if tree else "")
            + f", got {tuple(documents.shape)}"
        )
    if torch.compiler.is_compiling() or documents.is_meta:
        return documents
    begin, end, *parent = documents.cpu().long().unbind(1)
    crosses = (begin // max(length, 1)) != ((end - 1) // max(length, 1))
    wrong = (begin < 0) | (end > tokens) | (begin > end) | (crosses & (begin < end))
    wrong[1:] |= begin[1:] < end[:-1]
    if bool(wrong.any()):
        first = int(wrong.nonzero()[0])
        raise ValueError(
            f"expected documents to be ranges of the {batch} x {length} tokens of the full "
            f"sequence, each in one row, in order and without overlaps, got "
            f"{documents[first].tolist()} as number {first}"
        )
    if parent:
        row = begin // max(length, 1)
        (parent,) = parent
        late = (parent < -1) | (parent >= torch.arange(len(parent)))
        late |= (parent >= 0) & (row[parent.clamp(0, len(parent) - 1)] != row)
        if bool(late.any()):
            first = int(late.nonzero()[0])
            raise ValueError(
                "expected the parent of each document to be an earlier one of its row, or -1, got "
                f"{int(parent[first])} for number {first}"
            )
    return documents


def _shown(documents: Tensor) -> str:
    return (
        f"{documents.tolist()}"
        if documents.numel() <= 8
        else (f"{documents[0].item()} to {documents[-1].item()}")
    )
