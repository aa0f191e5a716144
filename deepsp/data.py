"""Sharding of tensors and batches over the sequence group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deepsp.groups import Group, member_of, on_all_ranks
from deepsp.layout import lens_or_equal
from deepsp.layout import seq_lens as lens_of


def shard(tensor: Tensor, dim: int, group: Group = None) -> Tensor:
    """This rank's part of ``tensor`` along ``dim``: a view, split like ``torch.tensor_split``."""
    rank, _, _ = member_of(group)
    return tensor.split(lens_of(tensor.size(dim), group), dim)[rank]


def unshard(
    tensor: Tensor, dim: int, group: Group = None, seq_lens: Sequence[int] | None = None
) -> Tensor:
    """The whole of which every rank holds a part along ``dim``: a fresh tensor, on every rank.

    Differentiable: every rank is taken to go on with the whole alike, so the gradient of a part is
    the slice of the whole's. ``seq_lens``: size along ``dim`` on each rank; None: that of
    ``tensor_split`` is asked of the group (one small collective).

    Raises:
        ValueError: ``dim`` isn't there, or ``seq_lens`` contradicts the tensor.
    """
    rank, size, name = member_of(group)
    if seq_lens is None:
        seq_lens = [n for (n,) in on_all_ranks([tensor.size(dim)], group, tensor.device)]
    lens = lens_or_equal(seq_lens, tensor.size(dim), size)
    return torch.ops.deepsp.all_gather(tensor, dim, lens, "replicated", rank, name)


def shard_batch(
    batch: Mapping[str, Any],
    group: Group = None,
    dim: int = 1,
    pad_to: int | None = None,
    ignore_index: int = -100,
) -> tuple[dict[str, Any], list[int]]:
    """This rank's part of a batch that every rank holds whole, ready for a next-token loss.

    Args:
        batch: tensors by name, ``input_ids`` or ``inputs_embeds`` among them; their size along
            ``dim`` is the sequence length S. What isn't a tensor is passed on.
        group: the sequence group.
        dim: the sequence dimension (of ``position_ids``: the last).
        pad_to: pads the whole sequence at its end to this length: labels with ``ignore_index``,
            ``attention_mask`` (made if absent) and all else with 0. None: no padding; ranks may
            differ by one token.
        ignore_index: label of tokens that don't count.

    Returns:
        The batch, and ``seq_lens``, the tokens of each rank. In the batch:

        - ``labels`` are gone; ``shift_labels`` has what each token is to predict: labels shifted
          by one before sharding, so that a shard's last token learns the next shard's first. The
          last position, and a document's last where ``position_ids`` restart, get
          ``ignore_index``. A given ``shift_labels`` is sharded as it is.
        - ``position_ids``: the global positions of this rank's tokens; made, [1, S_r], if absent.
        - ``attention_mask`` is whole: attention needs all of it.
        - every other tensor is this rank's part.

    Raises:
        ValueError: no sequence, both ``labels`` and ``shift_labels``, a tensor without S elements
            along ``dim``, ``pad_to`` shorter than S.
    """
    if dim < 0:
        raise ValueError(
            f"dim is {dim}; counted from the front is right: tensors may differ in rank"
        )
    batch = dict(batch)
    named = next((name for name in ("input_ids", "inputs_embeds") if name in batch), None)
    if named is None:
        raise ValueError(
            f"batch has {sorted(batch)}; input_ids or inputs_embeds is needed: it says how long "
            "the sequence is"
        )
    if "labels" in batch and "shift_labels" in batch:
        raise ValueError("batch has both labels and shift_labels; only one of them can be given")
    if not isinstance(batch[named], Tensor) or batch[named].dim() <= dim:
        found = batch[named]
        said = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise ValueError(
            f"batch[{named!r}] is {said}; a tensor [B, S] or [B, S, E] is right, its tokens along "
            f"dim {dim}"
        )
    length = batch[named].size(dim)
    _check_lengths(batch, named, dim, length)

    if "position_ids" not in batch:
        batch["position_ids"] = torch.arange(length, device=batch[named].device).unsqueeze(0)
        restarts = None
    else:
        positions = batch["position_ids"]
        if positions.dim() > 2 and "labels" in batch:
            raise ValueError(
                f"batch['position_ids'] has shape {tuple(positions.shape)}; where documents end "
                "shows only in [S] or [B, S] positions: pass shift_labels instead of labels"
            )
        restarts = positions[..., 1:] <= positions[..., :-1]
    if "labels" in batch:
        batch["shift_labels"] = _shift(batch.pop("labels"), restarts, dim, ignore_index)
    if pad_to is not None:
        _pad(batch, named, dim, length, pad_to, ignore_index)
        length = pad_to

    for name, value in batch.items():
        if isinstance(value, Tensor) and name != "attention_mask":
            batch[name] = shard(value, _dim_of(name, dim), group)
    return batch, lens_of(length, group)


def _dim_of(name: str, dim: int) -> int:
    return -1 if name == "position_ids" else dim


def _check_lengths(batch: Mapping[str, Any], named: str, dim: int, length: int) -> None:
    for name, value in batch.items():
        if not isinstance(value, Tensor) or name == "attention_mask":
            continue
        at = _dim_of(name, dim)
        if not -value.dim() <= at < value.dim() or value.size(at) != length:
            raise ValueError(
                f"batch[{name!r}] has shape {tuple(value.shape)}, but {named} says that the "
                f"sequence has {length} tokens; {length} in dimension {at} is right"
            )


def _shift(labels: Tensor, restarts: Tensor | None, dim: int, ignore_index: int) -> Tensor:
    shifted = torch.full_like(labels, ignore_index)
    last = labels.size(dim) - 1
    if last < 1:
        return shifted
    shifted.narrow(dim, 0, last).copy_(labels.narrow(dim, 1, last))
    if restarts is not None:
        rows = restarts.reshape(-1, last).movedim(-1, dim) if labels.dim() > 1 else restarts
        shifted.narrow(dim, 0, last).masked_fill_(rows, ignore_index)
    return shifted


def _is_binary(mask: Tensor) -> bool:
    return bool(((mask == 0) | (mask == 1)).all())


def _pad(
    batch: dict[str, Any], named: str, dim: int, length: int, pad_to: int, ignore_index: int
) -> None:
    if pad_to < length:
        raise ValueError(f"pad_to is {pad_to}, but the sequence has {length} tokens already")
    if "attention_mask" not in batch and pad_to > length:
        shape = batch[named].shape if named == "input_ids" else batch[named].shape[:-1]
        batch["attention_mask"] = torch.ones(shape, dtype=torch.int64, device=batch[named].device)
    for name, value in batch.items():
        if not isinstance(value, Tensor):
            continue
        if name == "position_ids":
            more = torch.arange(pad_to - length, device=value.device, dtype=value.dtype)
            more = more.expand(*value.shape[:-1], -1)
            batch[name] = torch.cat([value, more], dim=-1)
            continue
        fill = ignore_index if name == "shift_labels" else 0
        if name == "attention_mask" and (
            value.dim() <= dim
            or value.size(dim) != length
            or value.dim() > 2
            or (value.is_floating_point() and not _is_binary(value))
        ):
            raise ValueError(
                f"batch['attention_mask'] has shape {tuple(value.shape)} and dtype {value.dtype}; "
                "only one of 0 and 1 for each token can be padded: pad any other yourself"
            )
        padding = [0] * (2 * (value.dim() - dim))
        padding[-1] = pad_to - length
        batch[name] = F.pad(value, padding, value=fill)
