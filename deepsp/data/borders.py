"""Where documents begin and end in rows of tokens."""

from __future__ import annotations

import torch
from torch import Tensor


def ranges_of(documents: Tensor, batch: int, length: int) -> Tensor:
    """Begin and end [N, 2] of each document among ``batch * length`` tokens, from [N, 2] or
    ``cu_seqlens`` [N + 1].

    Raises:
        ValueError: ``documents`` is neither.
    """
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
    if documents.dim() != 2 or documents.size(1) != 2:
        raise ValueError(
            "expected documents to be cu_seqlens [N + 1], or to have shape [N, 2], got "
            f"{tuple(documents.shape)}"
        )
    if torch.compiler.is_compiling() or documents.is_meta:
        return documents
    begin, end = documents.cpu().long().unbind(1)
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
    return documents


def _shown(documents: Tensor) -> str:
    return (
        f"{documents.tolist()}"
        if documents.numel() <= 8
        else (f"{documents[0].item()} to {documents[-1].item()}")
    )
