"""Reads the pattern of a mask from a mask function of transformers.

transformers describes masks by functions of a query's and a key's index. Their code and closures
are the only way to recognize them. An unknown function has no pattern; its mask is then made in
full."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Pattern:
    """``left`` and ``right``: how many tokens before and after its own each token attends to; -1:
    all. ``chunk``: tokens attend only within chunks of that many tokens, counted from
    ``left_padding`` [B]."""

    left: int = -1
    right: int = -1
    chunk: int | None = None
    left_padding: Tensor | None = None

    def window_size(self, length: int) -> tuple[int, int] | None:
        """None if the window covers a full sequence, apart from causality."""
        left = self.left if 0 <= self.left < length - 1 else -1
        right = self.right if 0 < self.right < length - 1 else -1
        return None if (left, right) == (-1, -1) else (left, right)


def pattern_of(function: Callable) -> Pattern | None:
    """The pattern of a mask function; None: unknown."""
    from transformers import masking_utils as known

    if function is known.causal_mask_function:
        return Pattern(right=0)
    if function is known.bidirectional_mask_function:
        return Pattern()
    if (inside := _arguments_of(function, known.and_masks(lambda: None))) is not None:
        parts = [pattern_of(part) for part in inside["mask_functions"]]
        return None if None in parts else _both(parts)
    if (inside := _arguments_of(function, known.sliding_window_overlay(1))) is not None:
        return Pattern(left=inside["sliding_window"] - 1)
    if (
        inside := _arguments_of(function, known.sliding_window_bidirectional_overlay(1))
    ) is not None:
        return Pattern(inside["sliding_window"], inside["sliding_window"])
    if (inside := _arguments_of(function, known.chunked_overlay(1, None))) is not None:
        return Pattern(chunk=inside["chunk_size"], left_padding=inside["left_padding"])
    return None


def without_documents(function: Callable) -> Callable | None:
    """The function inside one that transformers made for packed documents; None if it isn't such a
    function, or if its pattern isn't known."""
    from transformers import masking_utils as known

    inside = _arguments_of(function, known.and_masks(lambda: None))
    if inside is None or len(inside["mask_functions"]) != 2:
        return None
    documents = known.packed_sequence_mask_function(None)
    # The order of the two differs between versions.
    others = [f for f in inside["mask_functions"] if _arguments_of(f, documents) is None]
    if len(others) != 1:
        return None
    (pattern,) = others
    remap = getattr(known, "remap_positions_for_packed_sequence", None)  # since 5.23
    if (
        remap is not None
        and (inside := _arguments_of(pattern, remap(lambda: None, None))) is not None
    ):
        pattern = inside["mask_function"]
    return None if pattern_of(pattern) is None else pattern


def with_documents(function: Callable, positions: Tensor, documents: Tensor) -> Callable:
    """``function`` within each document, with positions inside the documents.

    Args:
        function: a mask function of transformers.
        positions: [B, S].
        documents: [B, S], the number of each token's document.
    """
    from transformers import masking_utils as known

    def within(batch, head, query, key):
        return function(batch, head, positions[batch, query], positions[batch, key])

    return known.and_masks(known.packed_sequence_mask_function(documents), within)


def document_ranges(
    pattern: Pattern, positions: Tensor, padding: Tensor | None, batch: int, *, counts: bool = False
) -> Tensor | None:
    """Begin and end [N, 2] of each document among the tokens of ``batch`` rows, on the CPU; None:
    each row is one document.

    Args:
        pattern: the mask within a document.
        positions: [1 or B, S], of the full sequence. Where they don't increase by one, a document
            begins, unless there is padding.
        padding: [B, S], bool, True for padding; or None.
        batch: the number of rows.
        counts: whether the positions are known to count each row's tokens from 0.

    Raises:
        LookupError: a row has padding between its tokens, so they aren't a range.
    """
    length = positions.size(1)
    counted = torch.arange(length, device=positions.device).expand_as(positions)
    begins = torch.zeros_like(positions, dtype=torch.bool)
    begins[:, :1] = True
    several = False  # each check makes the host wait for the GPU
    if padding is None and not counts:
        begins[:, 1:] |= positions.diff(dim=1) != 1
        several = bool(begins[:, 1:].any())
        if several:
            counted = positions  # chunks restart with each document
    if pattern.chunk is not None and pattern.chunk < length:
        first = 0 if pattern.left_padding is None else pattern.left_padding[:, None]
        chunks = (counted - first) // pattern.chunk
        begins = begins.expand(chunks.size(0), -1).clone()
        begins[:, 1:] |= chunks.diff(dim=1) != 0
        several = several or bool(begins[:, 1:].any())
    if padding is None and not several:
        return None
    begins = begins.expand(batch, -1)
    begin = begins.flatten().nonzero().flatten()
    end = torch.cat([begin[1:], begin.new_tensor([batch * length])])
    if padding is not None:
        borders = padding.diff(dim=1)
        inner = borders & ~padding[:, 1:]  # the first token after padding
        if bool((inner.sum(1) + ~padding[:, 0] > 1).any()):
            raise LookupError
        first = padding.int().argmin(1) + torch.arange(batch, device=padding.device) * length
        last = first + (~padding).sum(1)
        row = begin // length
        begin, end = torch.maximum(begin, first[row]), torch.minimum(end, last[row])
    ranges = torch.stack([begin, end], 1)
    return ranges[begin < end].cpu()


def _arguments_of(function: Callable, like: Callable) -> dict | None:
    """A function's closure, if it has the code of ``like``."""
    if getattr(function, "__code__", None) is not like.__code__:
        return None
    return dict(inspect.getclosurevars(function).nonlocals)


def _both(parts: list[Pattern]) -> Pattern | None:
    chunked = [part for part in parts if part.chunk is not None]
    if len(chunked) > 1:
        return None

    def least(sides: list[int]) -> int:
        return min((n for n in sides if n >= 0), default=-1)

    return Pattern(
        least([p.left for p in parts]),
        least([p.right for p in parts]),
        *((chunked[0].chunk, chunked[0].left_padding) if chunked else ()),
    )
