"""Calls a recurrence, which sees each document of a packed batch alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepsp.sequence.attention.function import declared_by


class Piece(NamedTuple):
    """Consecutive tokens of one document, of a row or of all rows."""

    rows: slice
    begin: int
    end: int
    continues: bool
    """Whether the document has tokens before ``begin``."""


def pieces_of(
    documents: Tensor | None, batch: int, total: int, first: int, last: int
) -> list[list[Piece]]:
    """Tokens ``[first, last)`` of ``total`` by rows, cut into documents, counted from ``first``.
    ``documents``: [N, 2], as in :func:`ranges_of`; tokens in none of them are a piece for each gap.
    None: all rows together are one piece."""
    if documents is None:
        return [[Piece(slice(0, batch), 0, last - first, first > 0)]]
    ends: list[list[int]] = [[] for _ in range(batch)]
    for begin, end in documents.tolist():
        if begin < end:
            row = begin // total
            ends[row] += [begin - row * total, end - row * total]
    pieces = []
    for row, of_row in enumerate(ends):
        borders = sorted({0, total, *of_row})
        pieces.append(
            [
                Piece(slice(row, row + 1), max(a, first) - first, min(b, last) - first, a < first)
                for a, b in itertools.pairwise(borders)
                if max(a, first) < min(b, last)
            ]
        )
    return pieces


def name_of(function: Callable) -> str:
    return getattr(function, "__name__", type(function).__name__)


class Recurrence:
    """A function with the arguments that all its calls share, of a rank's heads.

    Args:
        function: as in :class:`DistributedRecurrence`.
        tokens: its arguments [B, S, h, ...], by name.
        fixed: its other arguments.
        value: the name of the argument whose heads are all heads.
    """

    def __init__(
        self, function: Callable, tokens: dict[str, Tensor], fixed: dict[str, Any], value: str
    ):
        self.function = function
        self.tokens = tokens
        self.fixed = fixed
        self.value = value

    def of(self, piece: Piece) -> dict[str, Tensor]:
        """The arguments for some tokens."""
        return {n: x[piece.rows, piece.begin : piece.end] for n, x in self.tokens.items()}

    def __call__(self, tokens: dict[str, Tensor], **more: Any) -> tuple:
        """Calls it for these tokens.

        Raises:
            ValueError: the output, or the final state, has another shape than it should have.
        """
        result = self.function(**tokens, **self.fixed, **more)
        out = result[0] if isinstance(result, (tuple, list)) else result
        expected = tokens[self.value].shape[:3]
        if not isinstance(out, Tensor) or out.dim() != 4 or out.shape[:3] != expected:
            got = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise ValueError(
                f"expected {name_of(self.function)} to return [{', '.join(map(str, expected))}, "
                f"V], the output of the tokens and heads that it got, got {got}"
            )
        if "output_final_state" not in more:
            return (out,)
        state = result[1] if isinstance(result, (tuple, list)) and len(result) > 1 else None
        if not isinstance(state, Tensor) or state.dim() != 4 or state.shape[:2] != expected[::2]:
            got = tuple(state.shape) if isinstance(state, Tensor) else type(state).__name__
            raise ValueError(
                f"expected {name_of(self.function)} to return (output, final state "
                f"[{expected[0]}, {expected[2]}, K, V]) with output_final_state=True, got {got} "
                "for the state; use state='heads', or wrap it"
            )
        return out, state

    def documents(self, pieces: list[list[Piece]]) -> Tensor:
        """Its output for all tokens, each document alone."""
        if len(pieces) == 1 and len(pieces[0]) == 1:
            return self(self.tokens)[0]
        if "cu_seqlens" in declared_by(self.function):
            batch, length = self.tokens[self.value].shape[:2]
            ends = [p.rows.start * length + p.end for row in pieces for p in row]
            device = self.tokens[self.value].device
            borders = torch.tensor([0, *ends], device=device, dtype=torch.int32)
            flat = {n: x.reshape(1, -1, *x.shape[2:]) for n, x in self.tokens.items()}
            (out,) = self(flat, cu_seqlens=borders)
            return out.view(batch, length, *out.shape[2:])
        return torch.cat(
            [torch.cat([self(self.of(p))[0] for p in row], 1) for row in pieces if row]
        )
