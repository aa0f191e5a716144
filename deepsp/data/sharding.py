"""Sharding of tensors and batches over the sequence group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deepsp.data import last_batch
from deepsp.data.borders import ranges_of
from deepsp.data.roles import (
    DOCUMENTS,
    Path,
    Roles,
    check_shard_at,
    describe,
    leaves_of,
    map_leaves,
    name_of,
    named_values,
)
from deepsp.data.same_batch import ADVICE, compare_batches
from deepsp.ranks.groups import Group, member_of, on_all_ranks
from deepsp.ranks.lengths import lens_or_equal
from deepsp.ranks.lengths import seq_lens as lens_of


def shard(tensor: Tensor, dim: int, group: Group = None) -> Tensor:
    """This rank's local part of a tensor along ``dim``, split like ``torch.tensor_split``.

    Args:
        tensor: the full tensor, any dtype.
        dim: the dimension; may be negative.
        group: the sequence group.

    Returns:
        A view of ``tensor``.

    Raises:
        ValueError: this process isn't in the group.
        IndexError: ``tensor`` has no dimension ``dim``.
    """
    rank, _, _ = member_of(group)
    return tensor.split(lens_of(tensor.size(dim), group), dim)[rank]


def unshard(
    tensor: Tensor, dim: int, group: Group = None, seq_lens: Sequence[int] | None = None
) -> Tensor:
    """Gathers a sharded tensor along ``dim``, on every rank: the inverse of :func:`shard`.

    Differentiable. Every rank must use the full tensor in the same way, so the gradient of the
    local tensor is its slice of the full gradient.

    Args:
        tensor: the local tensor, any dtype.
        dim: the dimension; may be negative.
        group: the sequence group.
        seq_lens: the size along ``dim`` on each rank; None: the ranks exchange their sizes (one
            small collective).

    Returns:
        A new tensor, the same on every rank.

    Raises:
        ValueError: ``seq_lens`` doesn't fit the tensor or the group.
        IndexError: ``tensor`` has no dimension ``dim``.
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
    roles: Mapping[str, str] | None = None,
    shard_at: str = "inputs",
) -> tuple[dict[str, Any], list[int]]:
    """Shards a batch that every rank has in full, ready for a next-token loss.

    Args:
        batch: tensors by name, ``input_ids`` or ``inputs_embeds`` among them, whose size along
            ``dim`` is the sequence length S; [B] is a value for each row. Mappings, lists and
            tuples may contain further tensors; the local batch has dicts, lists and tuples in their
            places. Other values are passed on. None counts as absent for the names below.
        group: the sequence group.
        dim: the sequence dimension, counted from the front (of ``position_ids``: the last).
        pad_to: pads the full sequence at its end to this many tokens: labels with ``ignore_index``,
            ``attention_mask`` (made if absent) and everything else with 0. None: no padding; the
            ranks may then differ by one token.
        ignore_index: the label of tokens that don't count.
        roles: by name, what a tensor is, if its name doesn't say so: "label_weights", an entry for
            each label (weights, masks of a loss), which is shifted like labels, with 0 at the last
            position; "tokens", which is sharded where it is; "row" or "other", which stays full
            (:data:`deepsp.data.roles.ROLES`). Needed beside ``labels`` for a tensor with an entry
            for each token that isn't a known input of a model.
        shard_at: "inputs", or "decoder" for a vision-language model of transformers, which shards
            the sequence itself, after its images have become tokens: then everything stays full but
            ``shift_labels`` and what is shifted with it.

    Returns:
        The local batch, and ``seq_lens``, the number of tokens of each rank. In the batch:

        - ``shift_labels`` replaces ``labels``: the next token of each token. Labels are shifted
          before they are sharded, so the last token of a rank learns the first of the next rank.
          The last position, and the last of a document where ``position_ids`` restart, get
          ``ignore_index``; a step from or to padding (zeros of an ``attention_mask`` with an entry
          for each token) ends no document. A given ``shift_labels`` is sharded without a shift.
        - ``position_ids`` are the global positions of this rank's tokens; if absent, they are made,
          [1, S_r].
        - ``cu_seq_lens_q``, ``seq_idx`` and other keys that collators of packed samples add for
          kernels become ``position_ids`` that restart with each document, if these are absent.
        - ``attention_mask`` stays full, since attention needs it in full; so do values for rows.
        - every other tensor is local.

    Raises:
        ValueError: there is no sequence, there are both ``labels`` and ``shift_labels``, a tensor
            doesn't have S elements along ``dim``, ``labels`` are in a mapping of the batch,
            ``pad_to`` is less than S or given with ``shard_at="decoder"``, a tensor has no role, or
            the ranks of the group have different batches. Batches are compared on every call, or in
            the next model if it exchanges numbers anyway (attention of transformers' models); not
            in a data loader's worker or another thread.
    """
    return split_batch(
        batch,
        group,
        ADVICE,
        dim=dim,
        pad_to=pad_to,
        ignore_index=ignore_index,
        roles=roles,
        shard_at=shard_at,
    )


def split_batch(
    batch: Mapping[str, Any],
    group: Group,
    advice: str,
    *,
    dim: int = 1,
    pad_to: int | None = None,
    ignore_index: int = -100,
    **how: Any,
) -> tuple[dict[str, Any], list[int]]:
    """:func:`shard_batch`, with its own ``advice`` for different batches. ``how``: further
    arguments of :func:`describe`."""
    batch = named_values(batch, dim)
    counts = pad_to is None and all(batch.get(n) is None for n in ("position_ids", *DOCUMENTS))
    compare_batches([(name_of(path), x) for path, x in leaves_of(batch)], group, advice)
    full, roles = full_batch(batch, pad_to, ignore_index, dim=dim, **how)

    def local(path: Path, x: Tensor) -> Tensor:
        place = roles.dim_of(path)
        return x if place is None else shard(x, place, group)

    local_batch, lens = map_leaves(local, full), lens_of(roles.length, group)
    first = sum(lens[: member_of(group)[0]]) if counts else -1
    last_batch.remember(local_batch, roles, lens, first=first)
    return local_batch, lens


def full_batch(
    batch: dict[str, Any], pad_to: int | None, ignore_index: int, **how: Any
) -> tuple[dict[str, Any], Roles]:
    """A batch before :func:`shard_batch` splits it, with shifted labels, and its roles. ``how``:
    arguments of :func:`describe`. Raises what shard_batch does, except for different batches."""
    dim, at_decoder = how.get("dim", 1), how.get("shard_at") == "decoder"
    check_shard_at(how.get("shard_at", "inputs"))
    if at_decoder and (dim != 1 or pad_to is not None):
        raise ValueError(
            f"expected dim=1 and no pad_to with shard_at='decoder', got dim={dim} and "
            f"pad_to={pad_to}; let the model's processor pad"
        )
    if "labels" in batch and "shift_labels" in batch:
        raise ValueError("expected batch to have labels or shift_labels, got both")
    roles = describe(batch, **how)
    tokens = batch[roles.tokens]
    if dim == 1 and not at_decoder:
        batch = as_positions(dict(batch), tuple(tokens.shape[:2]), tokens.device)
    batch = dict(batch)
    restarts = _document_ends(batch, dim, at_decoder)
    if not at_decoder and "position_ids" not in batch:
        batch["position_ids"] = torch.arange(roles.length, device=tokens.device).unsqueeze(0)
    if "labels" in batch:
        for name in roles.names("label_weights"):
            batch[name] = _shift(batch[name], restarts, dim, 0)
        batch["shift_labels"] = _shift(batch.pop("labels"), restarts, dim, ignore_index)
    if pad_to is not None:
        batch = _pad(batch, roles, pad_to, ignore_index)
    return batch, roles.after_shift(batch)


def as_positions(
    batch: dict[str, Any], shape: tuple[int, int], device: torch.device
) -> dict[str, Any]:
    """A batch whose documents are marked by ``position_ids`` [B, S] alone, which restart in each:
    computed from ``cu_seq_lens_q`` or ``seq_idx`` if the batch has none.

    Raises:
        ValueError: the batch has other keys for packed documents, but neither borders nor
            ``position_ids``; or it has both, and they differ.
    """
    borders = {name: batch[name] for name in DOCUMENTS if batch.get(name) is not None}
    if not borders:
        return batch
    rest = {name: x for name, x in batch.items() if name not in DOCUMENTS}
    rows, length = shape
    begins = torch.zeros(rows * length, dtype=torch.bool, device=device)
    begins[::length] = True
    if "cu_seq_lens_q" in borders:
        ranges = ranges_of(borders["cu_seq_lens_q"], rows, length)
        begins[ranges[:, 0][ranges[:, 0] < ranges[:, 1]].to(begins.device).long()] = True
    elif "seq_idx" in borders:
        numbers = borders["seq_idx"]
        if not isinstance(numbers, Tensor) or numbers.numel() != rows * length:
            got = tuple(numbers.shape) if isinstance(numbers, Tensor) else type(numbers).__name__
            raise ValueError(
                f"expected batch['seq_idx'] to be a tensor [{rows}, {length}] with the number of "
                f"each token's document, got {got}"
            )
        numbers = numbers.reshape(rows, length).to(begins.device)
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
    position_ids = rest.get("position_ids")
    if position_ids is not None:
        restarts = position_ids.reshape(-1, length).diff(dim=1) != 1
        if not bool((restarts == (positions.diff(dim=1) != 1)).all()):
            raise ValueError(
                f"expected position_ids to start anew where {next(iter(borders))} has its borders, "
                "got others; leave one of them out"
            )
        return rest
    return {**rest, "position_ids": positions}


def _document_ends(batch: Mapping[str, Any], dim: int, at_decoder: bool) -> Tensor | None:
    """Whether a document ends with a token, for all but the last: [S - 1] or [B, S - 1]; None: no
    labels, or one document."""
    positions = batch.get("position_ids")
    if "labels" not in batch or positions is None:
        return None
    if at_decoder and positions.dim() == 3:  # of 4 rows, the first is the text's
        return _restarts(positions[0], batch, dim) if positions.size(0) == 4 else None
    if positions.dim() > 2:
        raise ValueError(
            "expected batch['position_ids'] of shape [S] or [B, S], from which the ends of "
            f"documents are read, got {tuple(positions.shape)}; pass shift_labels instead of "
            "labels"
        )
    return _restarts(positions, batch, dim)


def _restarts(positions: Tensor, batch: Mapping[str, Any], dim: int) -> Tensor:
    """Whether a document ends with a token, for all but the last: [S - 1] or [B, S - 1]."""
    restarts = positions[..., 1:] <= positions[..., :-1]
    labels, mask = batch["labels"], batch.get("attention_mask")
    if (
        mask is not None
        and mask.shape == labels.shape
        and (not mask.is_floating_point() or _is_binary(mask))
    ):
        # Padding has positions, too (transformers gives it 0 or 1), but is no document.
        real = mask.movedim(dim, -1) != 0
        return restarts & real[..., 1:] & real[..., :-1]
    # Without a mask, several ones at the beginning of a row are padding.
    ones = (positions == 1).cumprod(-1)[..., :-1].bool()
    alone = ones[..., :1] & restarts[..., :1] & (positions[..., 1:2] == 0)
    if bool(alone.any()):
        raise ValueError(
            "batch['position_ids'] begins with 1, 0 in a row, which may be the end of a document "
            "or padding; pass attention_mask, with 0 for padding, or shift_labels instead of labels"
        )
    return restarts & ~ones


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


def _pad(batch: dict[str, Any], roles: Roles, pad_to: int, ignore_index: int) -> dict[str, Any]:
    dim, length, tokens = roles.dim, roles.length, batch[roles.tokens]
    if pad_to < length:
        raise ValueError(f"expected pad_to >= {length}, the length of the sequence, got {pad_to}")
    if "attention_mask" not in batch and pad_to > length:
        shape = tokens.shape if roles.tokens == "input_ids" else tokens.shape[:-1]
        batch["attention_mask"] = torch.ones(shape, dtype=torch.int64, device=tokens.device)

    def padded(path: Path, value: Tensor) -> Tensor:
        name = path[-1]
        if name == "position_ids":
            more = torch.arange(pad_to - length, device=value.device, dtype=value.dtype)
            more = more.expand(*value.shape[:-1], -1)
            return torch.cat([value, more], dim=-1)
        if name == "attention_mask" and (
            value.dim() <= dim
            or value.size(dim) != length
            or value.dim() > 2
            or (value.is_floating_point() and not _is_binary(value))
        ):
            raise ValueError(
                f"expected {name_of(path)} to have a 0 or 1 for each token, to pad it, got "
                f"{value.dtype} of shape {tuple(value.shape)}; pad any other mask yourself"
            )
        if name != "attention_mask" and roles.is_full(path):
            return value
        padding = [0] * (2 * (value.dim() - dim))
        padding[-1] = pad_to - length
        return F.pad(value, padding, value=ignore_index if name == "shift_labels" else 0)

    return map_leaves(padded, batch)
