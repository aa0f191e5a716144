"""Sharding of tensors and batches over the sequence group."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from deepsp.digest import first_difference
from deepsp.groups import Group, member_of, on_all_ranks
from deepsp.layout import lens_or_equal
from deepsp.layout import seq_lens as lens_of

_COMPARED = 3
_batches_compared: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
"""How many batches each group's ranks have compared: a loader that deals out other samples to each
rank does so from the first batch on. It goes with the group."""

_handed_out: list[weakref.ref | Tensor] = []
"""The tokens that :func:`shard_batch` returned last, so that a model that isn't made for one rank's
part can be told from one that was given a whole sequence (:func:`is_handed_out`): ids, or a
reference to embeddings, which are large."""

_TOKENS = ("input_ids", "inputs_embeds")
_KNOWN = (*_TOKENS, "labels", "shift_labels", "position_ids", "attention_mask")


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
            ``dim`` is the sequence length S. What isn't a tensor is passed on; of the names that
            are spoken of here, None counts as absent.
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
          ``ignore_index``; a step from or to padding (zeros of an ``attention_mask`` with an entry
          for each token) ends no document. A given ``shift_labels`` is sharded as it is.
        - ``position_ids``: the global positions of this rank's tokens; made, [1, S_r], if absent.
        - ``attention_mask`` is whole: attention needs all of it.
        - every other tensor is this rank's part.

    Raises:
        ValueError: no sequence, both ``labels`` and ``shift_labels``, a tensor without S elements
            along ``dim``, ``pad_to`` shorter than S; ranks of the group that hold other batches
            (compared on a group's first calls, and on every call with ``DEEPSP_DEBUG=1``; not in
            a data loader's worker or another thread, whose messages would meet the training's).
    """
    if not isinstance(batch, Mapping):
        shape = f" of shape {tuple(batch.shape)}" if isinstance(batch, Tensor) else ""
        raise ValueError(
            f"batch is a {type(batch).__name__}{shape}; tensors by name are right: "
            "{'input_ids': ids, ...}"
        )
    if dim < 0:
        raise ValueError(
            f"dim is {dim}; counted from the front is right: tensors may differ in rank"
        )
    batch = {name: x for name, x in batch.items() if x is not None or name not in _KNOWN}
    compare_batches(batch, group)
    for name in _KNOWN:
        if not isinstance(batch.get(name, torch.empty(0)), Tensor) and name not in _TOKENS:
            raise ValueError(
                f"batch[{name!r}] is {type(batch[name]).__name__}; a tensor (or None) is right"
            )
    named = next((name for name in _TOKENS if name in batch), None)
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
        restarts = _restarts(positions, batch, dim) if "labels" in batch else None
    if "labels" in batch:
        batch["shift_labels"] = _shift(batch.pop("labels"), restarts, dim, ignore_index)
    if pad_to is not None:
        _pad(batch, named, dim, length, pad_to, ignore_index)
        length = pad_to

    for name, value in batch.items():
        if isinstance(value, Tensor) and name != "attention_mask":
            batch[name] = shard(value, _dim_of(name, dim), group)
    if batch[named].size(dim) < length:
        part = batch[named]
        _handed_out[:] = [part if named == "input_ids" else weakref.ref(part)]
    return batch, lens_of(length, group)


def is_handed_out(tokens: Tensor | None) -> bool:
    """Whether these are the tokens of one rank that :func:`shard_batch` returned last: the same
    tensor, or the same ids."""
    for last in _handed_out if tokens is not None else ():
        if isinstance(last, weakref.ref):
            return last() is tokens
        return last is tokens or (
            last.shape == tokens.shape
            and last.dtype == tokens.dtype
            and bool((last.to(tokens.device) == tokens).all())
        )
    return False


def compare_batches(batch: Mapping[str, Any], group: Group) -> None:
    """Raises, on every rank, where a rank of the group holds another batch than the others. Every
    rank calls it; compares on a group's first calls only, unless ``DEEPSP_DEBUG=1``, and in the
    main thread."""
    member = member_of(group)
    elsewhere = threading.current_thread() is not threading.main_thread()
    if member[1] == 1 or elsewhere or torch.utils.data.get_worker_info() is not None:
        return
    of = dist.distributed_c10d._resolve_process_group(member[2])
    compared = _batches_compared.get(of, 0)
    if compared >= _COMPARED and os.environ.get("DEEPSP_DEBUG") != "1":
        return
    tensors = [(name, batch[name]) for name in sorted(batch) if isinstance(batch[name], Tensor)]
    difference = first_difference(tensors, member)
    if difference is not None:
        name, one, other = difference
        raise ValueError(
            f"batch[{name!r}] of rank {other} of the group is not that of rank {one}; ranks that "
            "share a sequence must pass the same, whole batch. A DistributedSampler, "
            "accelerate.prepare(loader) and Trainer give each process other samples: take "
            "DistributedSampler(data, num_replicas=<groups>, rank=<number of this rank's group>), "
            "or none where all processes are one group"
        )
    _batches_compared[of] = compared + 1


def _restarts(positions: Tensor, batch: Mapping[str, Any], dim: int) -> Tensor:
    """Whether a document ends with a token, for all but the last: [S - 1] or [B, S - 1]."""
    restarts = positions[..., 1:] <= positions[..., :-1]
    labels, mask = batch["labels"], batch.get("attention_mask")
    if (
        mask is not None
        and mask.shape == labels.shape
        and (not mask.is_floating_point() or _is_binary(mask))
    ):
        # Padding has positions, too, but is no document: transformers gives it 0 or 1.
        real = mask.movedim(dim, -1) != 0
        return restarts & real[..., 1:] & real[..., :-1]
    # Without a mask: rows that begin with several ones, which no document does.
    ones = (positions == 1).cumprod(-1)[..., :-1].bool()
    alone = ones[..., :1] & restarts[..., :1] & (positions[..., 1:2] == 0)
    if bool(alone.any()):
        raise ValueError(
            "batch['position_ids'] begins with 1, 0 in a row: the end of a document, or padding? "
            "Pass attention_mask, in which padding is 0, or shift_labels instead of labels"
        )
    return restarts & ~ones


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
