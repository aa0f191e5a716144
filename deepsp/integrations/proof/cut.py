"""A cut of a batch: some tokens of a few rows, which one rank can run in full."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from deepsp.data.roles import DOCUMENTS, Path, Roles, map_leaves, table_of
from deepsp.data.roles import TOKENS as IDS
from deepsp.data.sharding import as_positions

ROWS, TOKENS = 4, 127
"""The most rows and tokens of a row. The number of tokens divides by no number of ranks."""
_DOCUMENTS = 3
"""The most documents of a packed row."""
_LEAST = 64
"""Tokens of a packed row, if it has as many: each rank gets some."""
_BEGINNING = 32
"""The most tokens of each document, if all are taken."""
_WHOLE = 2048
"""The most tokens of a batch with images that isn't cut."""


def cut(
    batch: Mapping[str, Any], roles: Roles, text: Tensor | None = None, every_token: bool = False
) -> tuple[dict[str, Any], list[int]]:
    """A part of a full batch, with its labels as they were.

    A packed row gives parts of a few documents, other rows a part of each of a few, where most
    labels count.

    Args:
        batch: the batch, of which ``roles`` are described, with the sequence in dimension 1.
        text: for a vision-language model: [B, S], the tokens that aren't those of images. None:
            the model is another.
        every_token: of all rows and documents, so that a sample has the same part in whatever batch
            it is. A batch with images isn't cut then.

    Returns:
        The cut, and the number of tokens of each document of a packed row (else none).
    """
    if roles.shard_at == "decoder" and text is not None:
        if roles.rows * roles.length <= _WHOLE or every_token:
            return dict(batch), []
        index = text[0].nonzero().flatten()[:TOKENS]
        drop = {path[0] for path, (role, _) in roles.of.items() if role == "other"}
        left = {n: x for n, x in batch.items() if n not in drop}
        return _selected(left, roles, torch.tensor([0]), index[None]), []
    counts = _counted(batch, roles)
    begins = _begins(batch, roles, every_token) if roles.rows == 1 or not every_token else None
    if begins is None:
        rows = torch.arange(roles.rows)
        if not every_token and roles.rows > ROWS:
            rows = counts.sum(1).argsort(descending=True, stable=True)[:ROWS].sort().values
        length = min(TOKENS, roles.length)
        first = torch.tensor([densest(counts[row], length) for row in rows.tolist()])
        return _selected(batch, roles, rows, first[:, None] + torch.arange(length)), []
    index, lens = _documents(counts[0], begins, roles.length, every_token)
    part = _selected(batch, roles, torch.tensor([0]), index[None])
    if part.get("labels") is not None:  # no document predicts the first token of the next
        part["labels"][:, torch.tensor([0, *lens]).cumsum(0)[:-1]] = -100
    return part | _borders(batch, lens), lens


def _documents(
    counts: Tensor, begins: Tensor, length: int, every_token: bool
) -> tuple[Tensor, list[int]]:
    """Which tokens of a packed row are taken, and how many of each document."""
    ends = torch.cat([begins[1:], begins.new_tensor([length])])
    lens = (ends - begins).tolist()
    parts = counts.split(lens)
    order = range(len(lens))
    if not every_token:
        order = sorted(order, key=lambda n: -int(parts[n].sum()))
        sums = [sum(lens[i] for i in order[:n]) for n in range(len(lens))]
        enough = next((n for n, tokens in enumerate(sums) if tokens >= _LEAST), len(lens))
        order = sorted(order[: max(_DOCUMENTS, enough)])
    taken, left, position = [], TOKENS, -1
    for n, document in enumerate(order):
        most = _BEGINNING if every_token else max(left // (len(order) - n), 1)
        size = min(lens[document], most)
        first = densest(parts[document], size)
        if first == position and first > 0:  # positions would go on from the last document's
            first -= 1
        taken.append(torch.arange(size) + first + begins[document])
        left, position = left - size, first + size
    return torch.cat(taken), [len(x) for x in taken]


def _counted(batch: Mapping[str, Any], roles: Roles) -> Tensor:
    """[B, S]: the tokens whose labels count; without labels, those that aren't padding."""
    shape = (roles.rows, roles.length)
    for name, ignored in (("labels", -100), ("shift_labels", -100), ("attention_mask", 0)):
        x = batch.get(name)
        if isinstance(x, Tensor) and tuple(x.shape) == shape:
            return x.cpu() != ignored
    return torch.ones(shape, dtype=torch.bool)


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


def _begins(batch: Mapping[str, Any], roles: Roles, every_token: bool) -> Tensor | None:
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
    # With every_token, a document alone in its row has the part that it has beside others.
    packed = documents or every_token or int(begins.sum()) > 1
    return begins.nonzero().flatten() if packed else None


def densest(counts: Tensor, length: int) -> int:
    """Where ``length`` tokens begin of which most count, of those in ``counts``, bool."""
    sums = torch.zeros(len(counts) + 1, dtype=torch.int64)
    sums[1:] = counts.cumsum(0)
    return int((sums[length:] - sums[: -length or None]).argmax()) if length else 0


def cut_rows(inputs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], str]:
    """A cut of a batch of full rows that belong together, the same for one process, and what its
    entries are: the last tokens of prompts, and the first ones of completions."""
    batch = dict(inputs)
    for prefix in ("KL_", "prompt_", "completion_", ""):
        ids = next((inputs[n] for n in (f"{prefix}input_ids", f"{prefix}ids") if n in inputs), None)
        if ids is None or "pixel_values" in inputs:
            continue
        first = 0
        if prefix == "prompt_":
            first = max(0, ids.size(1) - TOKENS)
        elif (mask := inputs.get(f"{prefix}completion_mask")) is not None:
            first = densest((mask != 0).sum(0).cpu(), min(TOKENS, ids.size(1)))
        for name, x in inputs.items():
            of_tokens = isinstance(x, Tensor) and x.dim() >= 2 and x.size(1) == ids.size(1)
            if of_tokens and (name.startswith(prefix) or prefix == "completion_"):
                batch[name] = x[:, first : first + TOKENS]
    return batch, batch, table_of(batch)


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


def _selected(batch: Mapping[str, Any], roles: Roles, rows: Tensor, index: Tensor) -> dict:
    """Some rows, and some tokens of each: ``index``, [rows, tokens]."""

    def of_rows(x: Tensor) -> Tensor:
        """[B, S, ...]"""
        picked, places = x[rows.to(x.device)], index.to(x.device)
        return picked[torch.arange(len(places), device=x.device)[:, None], places]

    def part(path: Path, x: Tensor) -> Tensor:
        role, chosen = _role(path, x, roles), rows.to(x.device)
        if role == "row":
            return x[chosen]
        if role == "positions":
            if x.dim() < 3:
                x = x.expand(roles.rows, -1) if x.dim() == 1 or len(x) == 1 else x
                return of_rows(x)
            return torch.stack([of_rows(y) for y in x.expand(-1, roles.rows, -1)])
        if role == "mask" and x.dim() == 2 and len(x) == roles.rows:
            return of_rows(x)
        if role == "mask" and x.dim() > 2:
            x = x[chosen] if len(x) == roles.rows else x.expand(len(chosen), *x.shape[1:])
            for dim in range(1, x.dim()):
                if x.size(dim) == roles.length:
                    pairs = zip(x, index.to(x.device), strict=True)
                    x = torch.stack([y.index_select(dim - 1, i) for y, i in pairs])
            return x
        if role in ("tokens", "labels", "label_weights") and x.size(1) == roles.length:
            return of_rows(x)
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
    borders: dict[str, Any] = {}
    for name in DOCUMENTS:
        x = batch.get(name)
        if x is None:
            continue
        if name == "seq_idx":
            borders[name] = numbers.view(1, -1).to(x)
        elif name.startswith("cu_seq_lens"):
            borders[name] = ends.to(x)
        else:
            borders[name] = x.new_tensor(max(lens)) if isinstance(x, Tensor) else max(lens)
    return borders
