"""A cut of a batch: some tokens of a few rows, which one rank can run in full."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from deepsp.data.roles import DOCUMENTS, Path, Roles, map_leaves
from deepsp.data.roles import TOKENS as IDS
from deepsp.data.sharding import as_positions

ROWS, TOKENS = 4, 127
"""The most rows and tokens of a row. The number of tokens divides by no number of ranks."""
_DOCUMENTS = 3
"""The most documents of a packed row."""
_BEGINNING = 32
"""The most tokens of each document, if all are taken."""
_WHOLE = 2048
"""The most tokens of a batch with images that isn't cut."""


def cut(
    batch: Mapping[str, Any],
    roles: Roles,
    text: Tensor | None = None,
    first: int | None = None,
) -> tuple[dict[str, Any], list[int]]:
    """A part of a full batch, with its labels as they were.

    A packed row gives the beginnings of a few documents, other rows the same tokens of each, where
    most labels count.

    Args:
        batch: the batch, of which ``roles`` are described, with the sequence in dimension 1.
        text: for a vision-language model: [B, S], the tokens that aren't those of images. None:
            the model is another.
        first: all rows are kept, the same part of each sample in whatever batch it is: of rows, the
            tokens from this one on (< 0: counted from the end); of a packed row, the beginnings of
            all documents; of a batch with images, all. None: as described.

    Returns:
        The cut, and the number of tokens of each document of a packed row (else none).
    """
    if roles.shard_at == "decoder" and text is not None:
        if roles.rows * roles.length <= _WHOLE or first is not None:
            return dict(batch), []
        index = text[0].nonzero().flatten()[:TOKENS]
        drop = {path[0] for path, (role, _) in roles.of.items() if role == "other"}
        left = {n: x for n, x in batch.items() if n not in drop}
        return _selected(left, roles, 1, index), []
    begins = _begins(batch, roles) if roles.rows == 1 or first is None else None
    if begins is None:
        rows = roles.rows if first is not None else min(ROWS, roles.rows)
        return _selected(batch, roles, rows, _window(batch, roles, first)), []
    ends = torch.cat([begins[1:], begins.new_tensor([roles.length])])
    lens, taken, left = (ends - begins).tolist(), [], TOKENS
    number = min(_DOCUMENTS, len(lens)) if first is None else len(lens)
    for n, (begin, length) in enumerate(zip(begins.tolist()[:number], lens, strict=False)):
        most = left // (number - n) if first is None else _BEGINNING
        taken.append(torch.arange(begin, begin + min(length, most)))
        left -= len(taken[-1])
    index = torch.cat(taken)
    documents = [len(x) for x in taken]
    return _selected(batch, roles, 1, index) | _borders(batch, documents), documents


def unpacked(batch: Mapping[str, Any], roles: Roles, lens: list[int]) -> dict[str, Any]:
    """The documents of a packed row in rows of their own, padded. For models whose own layers don't
    know where documents begin."""
    rows: dict[str, Any] = {}
    for name, x in batch.items():
        role = _role((name,), x, roles) if isinstance(x, Tensor) else "other"
        if role == "positions" or name in DOCUMENTS:
            continue
        if role in ("tokens", "labels", "label_weights"):
            value = -100 if role == "labels" else 0
            x = nn.utils.rnn.pad_sequence(x[0].split(lens), True, value)
        rows[name] = x
    ones = [torch.ones(n, dtype=torch.int64) for n in lens]
    mask = nn.utils.rnn.pad_sequence(ones, True)
    return {**rows, "attention_mask": mask.to(batch[roles.tokens].device)}


def _begins(batch: Mapping[str, Any], roles: Roles) -> Tensor | None:
    """Where documents begin in the first row, if it is packed."""
    tokens, mask = batch[roles.tokens], batch.get("attention_mask")
    named = {n: x for n, x in batch.items() if n in (*DOCUMENTS, "position_ids")}
    documents = any(named.get(n) is not None for n in DOCUMENTS)
    if mask is not None and not documents:
        return None
    positions = as_positions(named, tuple(tokens.shape[:2]), tokens.device).get("position_ids")
    if positions is None or positions.dim() != 2:
        return None
    begins = torch.ones(roles.length, dtype=torch.bool)
    begins[1:] = positions[0].cpu().diff() != 1
    return begins.nonzero().flatten() if int(begins.sum()) > 1 else None


def _window(batch: Mapping[str, Any], roles: Roles, first: int | None) -> Tensor:
    """The tokens of rows that aren't packed: as many as fit, where most labels count."""
    labels = next((batch[n] for n in ("labels", "shift_labels") if batch.get(n) is not None), None)
    if first is None:
        by_token = labels is not None and tuple(labels.shape) == (roles.rows, roles.length)
        first = densest(labels[:ROWS] != -100) if by_token else 0
    first = max(0, first + roles.length) if first < 0 else min(first, roles.length - 1)
    return torch.arange(first, min(roles.length, first + TOKENS))


def densest(counts: Tensor) -> int:
    """Where :data:`TOKENS` tokens begin of which most count. ``counts``: [B, S], bool."""
    sums = torch.zeros(max(counts.size(1), TOKENS) + 1, dtype=torch.int64)
    sums[1 : counts.size(1) + 1] = counts.sum(0).cpu()
    sums = sums.cumsum(0)
    return int((sums[TOKENS:] - sums[:-TOKENS]).argmax())


def cut_along(batch: Mapping[str, Any], dim: int) -> dict[str, Any]:
    """The first tokens of a batch, of all rows, if it is large: of all tensors that have as many
    along ``dim`` as the ids."""
    ids = next((batch[n] for n in IDS if batch.get(n) is not None), None)
    if ids is None or ids.dim() <= dim or ids.numel() <= _WHOLE:
        return dict(batch)
    length = ids.size(dim)

    def part(path: Path, x: Tensor) -> Tensor:
        return x.narrow(dim, 0, TOKENS) if x.dim() > dim and x.size(dim) == length else x

    return map_leaves(part, batch)


def _selected(batch: Mapping[str, Any], roles: Roles, rows: int, index: Tensor) -> dict[str, Any]:
    """Some rows, and some tokens of them."""

    def part(path: Path, x: Tensor) -> Tensor:
        role, own = _role(path, x, roles), index.to(x.device)
        if role == "row":
            return x[:rows]
        if role == "positions":
            x = x.index_select(-1, own)
            return x[:rows] if x.dim() == 2 else x[:, :rows] if x.dim() == 3 else x
        if role == "mask":
            x = x[:rows] if x.dim() > 1 and x.size(0) == roles.rows else x
            for dim in range(1, x.dim()):
                x = x.index_select(dim, own) if x.size(dim) == roles.length else x
            return x
        if role in ("tokens", "labels", "label_weights") and x.size(1) == roles.length:
            return x[:rows].index_select(1, own)
        return x

    return map_leaves(part, batch)


def _role(path: Path, x: Tensor, roles: Roles) -> str:
    """What a tensor is: by its shape, if the model doesn't get it."""
    if path in roles.of:
        return roles.of[path][0]
    if x.dim() > 1 and tuple(x.shape[:2]) == (roles.rows, roles.length):
        return "tokens"
    return "row" if tuple(x.shape) == (roles.rows,) else "other"


def _borders(batch: Mapping[str, Any], lens: list[int]) -> dict[str, Any]:
    """A packed batch's own entries that say where documents begin, for such documents."""
    ends = torch.tensor([0, *lens]).cumsum(0)
    numbers = torch.repeat_interleave(torch.arange(len(lens)), torch.tensor(lens))
    made: dict[str, Any] = {}
    for name in DOCUMENTS:
        x = batch.get(name)
        if x is None:
            continue
        if name == "seq_idx":
            made[name] = numbers.view(1, -1).to(x)
        elif name.startswith("cu_seq_lens"):
            made[name] = ends.to(x)
        else:
            made[name] = x.new_tensor(max(lens)) if isinstance(x, Tensor) else max(lens)
    return made
