"""Where documents begin and end in rows of tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_BORDERS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""Keys that collators of packed batches add for kernels (DataCollatorWithFlattening)."""


def as_positions(batch: dict[str, Any], shape: tuple[int, int], device) -> dict[str, Any]:
    """A batch whose documents are marked by ``position_ids`` [B, S] alone, which restart in each:
    computed from ``cu_seq_lens_q`` or ``seq_idx`` if the batch has none.

    Raises:
        ValueError: the batch has other keys for packed documents, but neither borders nor
            ``position_ids``; or it has both, and they differ.
    """
    borders = {name: batch[name] for name in _BORDERS if batch.get(name) is not None}
    if not borders:
        return batch
    rest = {name: x for name, x in batch.items() if name not in _BORDERS}
    rows, length = shape
    begins = torch.zeros(rows * length, dtype=torch.bool, device=device)
    begins[::length] = True
    if "cu_seq_lens_q" in borders:
        ranges = ranges_of(borders["cu_seq_lens_q"], rows, length)
        begins[ranges[:, 0][ranges[:, 0] < ranges[:, 1]].to(begins.device).long()] = True
    elif "seq_idx" in borders:
        numbers = borders["seq_idx"].reshape(rows, length).to(begins.device)
        begins.view(rows, length)[:, 1:] |= numbers.diff(dim=1) != 0
    elif rest.get("position_ids") is None:
        raise ValueError(
            f"expected position_ids, cu_seq_lens_q or seq_idx in a batch with {sorted(borders)}, "
            "got none, so where its documents begin isn't known; have the collator return them "
            "(return_position_ids=True)"
        )
    else:
        return rest
    index = torch.arange(rows * length, device=device)
    positions = (index - torch.where(begins, index, 0).cummax(0).values).view(rows, length)
    given = rest.get("position_ids")
    if given is not None:
        restarts = given.reshape(-1, length).diff(dim=1) != 1
        if not bool((restarts == (positions.diff(dim=1) != 1)).all()):
            raise ValueError(
                f"expected position_ids to start anew where {next(iter(borders))} has its borders, "
                "got others; leave one of them out"
            )
        return rest
    return {**rest, "position_ids": positions}


def ranges_of(documents: Tensor, batch: int, length: int) -> Tensor:
    """Begin and end [N, 2] of each document among ``batch * length`` tokens, from [N, 2] or
    ``cu_seqlens`` [N + 1].

    Raises:
        ValueError: ``documents`` is neither.
    """
    if not isinstance(documents, Tensor) or documents.is_floating_point():
        found = documents.dtype if isinstance(documents, Tensor) else type(documents).__name__
        raise ValueError(f"expected documents to be a tensor of integers, got {found}")
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
    return f"{documents.tolist()}" if documents.numel() <= 8 else (
        f"{documents[0].item()} to {documents[-1].item()}"
    )  # fmt: skip
