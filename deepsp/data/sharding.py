"""Sharding of tensors and batches over the sequence group."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deepsp.attention.documents import as_positions
from deepsp.data.same_batch import ADVICE, compare_batches
from deepsp.ranks.groups import Group, member_of, on_all_ranks
from deepsp.ranks.lengths import lens_or_equal
from deepsp.ranks.lengths import seq_lens as lens_of

_handed_out: list[weakref.ref | Tensor] = []
"""The tokens that :func:`shard_batch` returned last: ids, or a weak reference to embeddings, which
are large. With them, :func:`is_handed_out` detects a local batch in a model that expects full
ones."""

_positions: list[Tensor] = []
"""The positions of those tokens (:func:`are_handed_out`)."""

_TOKENS = ("input_ids", "inputs_embeds")
_KNOWN = (*_TOKENS, "labels", "shift_labels", "position_ids", "attention_mask")
_INPUTS = ("token_type_ids", "mm_token_type_ids", "segment_ids", "decoder_input_ids")
"""Further token-wise inputs of models."""
_IMAGES = ("pixel_values", "pixel_values_videos", "image_grid_thw", "video_grid_thw", "image_sizes")
"""Inputs of vision-language models that have no entry for each token."""


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
    shift: Sequence[str] | None = None,
    shard_at: str = "inputs",
) -> tuple[dict[str, Any], list[int]]:
    """Shards a batch that every rank has in full, ready for a next-token loss.

    Args:
        batch: tensors by name, ``input_ids`` or ``inputs_embeds`` among them, whose size along
            ``dim`` is the sequence length S. Mappings, lists and tuples may contain further
            tensors; the local batch has dicts, lists and tuples in their places. Other values are
            passed on. None counts as absent for the names below.
        group: the sequence group.
        dim: the sequence dimension, counted from the front (of ``position_ids``: the last).
        pad_to: pads the full sequence at its end to this many tokens: labels with ``ignore_index``,
            ``attention_mask`` (made if absent) and everything else with 0. None: no padding; the
            ranks may then differ by one token.
        ignore_index: the label of tokens that don't count.
        shift: names of tensors with an entry for each label (weights, masks of a loss), which are
            shifted like labels, with 0 at the last position. Needed if the batch has ``labels`` and
            a tensor of their shape that isn't a known input of a model; () if all of these belong
            to the inputs.
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
        - ``attention_mask`` stays full, since attention needs it in full.
        - every other tensor is local.

    Raises:
        ValueError: there is no sequence, there are both ``labels`` and ``shift_labels``, a tensor
            doesn't have S elements along ``dim``, ``labels`` are in a mapping of the batch,
            ``pad_to`` is less than S or given with ``shard_at="decoder"``, ``shift`` is needed, or
            the ranks of the group have different batches. Batches are compared on every call, or in
            the next model if it exchanges numbers anyway (attention of transformers' models); not
            in a data loader's worker or another thread.
    """
    return split_batch(batch, group, ADVICE, dim, pad_to, ignore_index, shift, shard_at)


def split_batch(
    batch: Mapping[str, Any],
    group: Group,
    advice: str,
    dim: int = 1,
    pad_to: int | None = None,
    ignore_index: int = -100,
    shift: Sequence[str] | None = None,
    shard_at: str = "inputs",
) -> tuple[dict[str, Any], list[int]]:
    """:func:`shard_batch`, with its own ``advice`` for different batches."""
    batch = named_values(batch, dim)
    compare_batches([(name_of(path), x) for path, x in leaves_of(batch)], group, advice)
    batch, named, length = full_batch(batch, dim, pad_to, ignore_index, shift, shard_at)

    def local(path: Path, x: Tensor) -> Tensor:
        place = dim_of(path, dim, shard_at, shift)
        return x if place is None else shard(x, place, group)

    batch = map_leaves(local, batch)
    hand_out(batch, named, dim, length)
    return batch, lens_of(length, group)


def named_values(batch: Mapping[str, Any], dim: int) -> dict[str, Any]:
    """A batch's values by name, without those that count as absent."""
    if not isinstance(batch, Mapping):
        shape = f" of shape {tuple(batch.shape)}" if isinstance(batch, Tensor) else ""
        raise ValueError(
            "expected batch to map names to tensors, such as {'input_ids': ids, ...}, got "
            f"{type(batch).__name__}{shape}"
        )
    check_dim(dim)
    return {name: x for name, x in batch.items() if x is not None or name not in _KNOWN}


def check_dim(dim: int) -> None:
    if dim < 0:
        raise ValueError(
            f"expected dim >= 0, got {dim}; count it from the front, since the tensors of a batch "
            "may have different numbers of dimensions"
        )


def full_batch(
    batch: dict[str, Any],
    dim: int,
    pad_to: int | None,
    ignore_index: int,
    shift: Sequence[str] | None,
    shard_at: str = "inputs",
) -> tuple[dict[str, Any], str, int]:
    """A batch before :func:`shard_batch` splits its tensors along :func:`dim_of`, the name of its
    tokens, and their number. Raises what shard_batch does, except for different batches."""
    batch, at_decoder = dict(batch), shard_at == "decoder"
    check_shard_at(shard_at)
    if at_decoder and (dim != 1 or pad_to is not None):
        raise ValueError(
            f"expected dim=1 and no pad_to with shard_at='decoder', got dim={dim} and "
            f"pad_to={pad_to}; let the model's processor pad"
        )
    for name in _KNOWN:
        if not isinstance(batch.get(name, torch.empty(0)), Tensor) and name not in _TOKENS:
            raise ValueError(
                f"expected batch[{name!r}] to be a tensor or None, got {type(batch[name]).__name__}"
            )
    named = next((name for name in _TOKENS if name in batch), None)
    if named is None:
        raise ValueError(
            "expected batch to have input_ids or inputs_embeds, whose length is that of the "
            f"sequence, got {sorted(batch)}"
        )
    if "labels" in batch and "shift_labels" in batch:
        raise ValueError("expected batch to have labels or shift_labels, got both")
    if not isinstance(batch[named], Tensor) or batch[named].dim() <= dim:
        found = batch[named]
        shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise ValueError(
            f"expected batch[{named!r}] to be a tensor [B, S] or [B, S, E] with the sequence in "
            f"dimension {dim}, got {shape}"
        )
    length = batch[named].size(dim)
    if dim == 1 and not at_decoder:
        batch = as_positions(batch, tuple(batch[named].shape[:2]), batch[named].device)
    _check_lengths(batch, named, dim, length, shard_at, shift)

    if at_decoder:
        positions = batch.get("position_ids")
        if positions is not None and positions.dim() == 3:  # of 4 rows, the first is the text's
            positions = positions[0] if positions.size(0) == 4 else None
        given = "labels" in batch and positions is not None
        restarts = _restarts(positions, batch, dim) if given else None
    elif "position_ids" not in batch:
        batch["position_ids"] = torch.arange(length, device=batch[named].device).unsqueeze(0)
        restarts = None
    else:
        positions = batch["position_ids"]
        if positions.dim() > 2 and "labels" in batch:
            raise ValueError(
                "expected batch['position_ids'] of shape [S] or [B, S], from which the ends of "
                f"documents are read, got {tuple(positions.shape)}; pass shift_labels instead of "
                "labels"
            )
        restarts = _restarts(positions, batch, dim) if "labels" in batch else None
    if "labels" in batch:
        for name in _with_labels(batch, shift):
            batch[name] = _shift(batch[name], restarts, dim, 0)
        batch["shift_labels"] = _shift(batch.pop("labels"), restarts, dim, ignore_index)
    if pad_to is not None:
        batch = _pad(batch, named, dim, length, pad_to, ignore_index)
        length = pad_to
    return batch, named, length


Path = tuple[str | int, ...]
"""The names and indices that lead to a value in a batch."""


def map_leaves(
    function: Callable[[Path, Any], Any], value: Any, kind: type = Tensor, path: Path = ()
) -> Any:
    """``value`` with each ``x`` of a kind replaced by ``function(path, x)``, at any depth of
    mappings, lists and tuples."""
    if isinstance(value, kind):
        return function(path, value)
    if isinstance(value, Mapping):
        return {k: map_leaves(function, x, kind, (*path, k)) for k, x in value.items()}
    if isinstance(value, (list, tuple)):
        items = [map_leaves(function, x, kind, (*path, i)) for i, x in enumerate(value)]
        if isinstance(value, list):
            return items
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value


def leaves_of(batch: Mapping[str, Any], kind: type = Tensor) -> list[tuple[Path, Any]]:
    """The values that :func:`map_leaves` replaces, in the same order."""
    found: list[tuple[Path, Any]] = []
    map_leaves(lambda path, x: found.append((path, x)), batch, kind)
    return found


def dim_of(
    path: Path, dim: int, shard_at: str = "inputs", shift: Sequence[str] | None = None
) -> int | None:
    """The dimension along which a tensor of a batch is sharded; None: it stays full."""
    if shard_at == "decoder":
        return dim if path[-1] in ("shift_labels", *(shift or ())) else None
    return {"position_ids": -1, "attention_mask": None}.get(path[-1], dim)


def check_shard_at(shard_at: str) -> None:
    if shard_at not in ("inputs", "decoder"):
        raise ValueError(f"expected shard_at to be 'inputs' or 'decoder', got {shard_at!r}")


def hand_out(local: Mapping[str, Any], named: str, dim: int, length: int) -> None:
    """Remembers the local tokens for :func:`is_handed_out`."""
    part = local[named]
    _handed_out.clear()
    if part.size(dim) < length:
        _handed_out[:] = [part if named == "input_ids" else weakref.ref(part)]
        _positions[:] = [local["position_ids"]]


def are_handed_out(positions: Tensor) -> bool:
    """Whether these are the positions that :func:`shard_batch` returned last."""
    last = _positions[0].to(positions.device) if _positions else positions.new_empty(0)
    return last.shape[-1:] == positions.shape[-1:] and bool((last == positions).all())


def name_of(path: Path) -> str:
    """The name of a value in a batch, for messages."""
    return "batch" + "".join(f"[{key!r}]" for key in path)


def is_handed_out(tokens: Tensor | None) -> bool:
    """Whether these are the local tokens that :func:`shard_batch` returned last: the same tensor,
    or the same ids."""
    for last in _handed_out if tokens is not None else ():
        if isinstance(last, weakref.ref):
            return last() is tokens
        if last is tokens:
            return True
        if last.shape != tokens.shape or last.dtype != tokens.dtype:
            return False
        with torch._C.DisableTorchFunction():  # a schedule's dry run doesn't compare these tokens
            return bool((last.to(tokens.device) == tokens).all())
    return False


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


def _check_lengths(
    batch: Mapping[str, Any],
    named: str,
    dim: int,
    length: int,
    shard_at: str,
    shift: Sequence[str] | None,
) -> None:
    for path, value in leaves_of(batch):
        place = dim_of(path, dim, shard_at, ("labels", *(shift or ())))
        if place is None:
            continue
        if not -value.dim() <= place < value.dim() or value.size(place) != length:
            advice = ""
            if path[-1] in _IMAGES:
                advice = (
                    "; for a vision-language model, whose images become tokens inside of it, pass "
                    "shard_at='decoder'"
                )
            raise ValueError(
                f"expected {name_of(path)} to have size {length} in dimension {place}, the "
                f"sequence length of {named}, got shape {tuple(value.shape)}{advice}"
            )
        if path[-1] == "labels" and len(path) > 1:
            raise ValueError(
                f"expected labels as batch['labels'], which is shifted, got {name_of(path)}; shift "
                "it yourself, and call it shift_labels"
            )


def _with_labels(batch: Mapping[str, Any], shift: Sequence[str] | None) -> Sequence[str]:
    """The names of tensors that are shifted like labels."""
    shape = batch["labels"].shape
    beside = [
        name
        for name, x in batch.items()
        if isinstance(x, Tensor) and x.shape == shape and name not in (*_KNOWN, *_INPUTS)
    ]
    if shift is None and beside:
        raise ValueError(
            f"expected shift to say whether {', '.join(f'batch[{n!r}]' for n in beside)} of shape "
            f"{tuple(shape)} belongs to labels, which are shifted by one token, got None; pass "
            f"shift={tuple(beside)} if it does, shift=() if it belongs to the inputs"
        )
    if wrong := [name for name in shift or () if name not in beside]:
        raise ValueError(
            f"expected shift to name tensors of the shape of labels {tuple(shape)} that aren't "
            f"known inputs ({', '.join(beside) or 'there are none'}), got {wrong[0]!r}"
        )
    return tuple(shift or ())


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
) -> dict[str, Any]:
    if pad_to < length:
        raise ValueError(f"expected pad_to >= {length}, the length of the sequence, got {pad_to}")
    if "attention_mask" not in batch and pad_to > length:
        shape = batch[named].shape if named == "input_ids" else batch[named].shape[:-1]
        batch["attention_mask"] = torch.ones(shape, dtype=torch.int64, device=batch[named].device)

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
        padding = [0] * (2 * (value.dim() - dim))
        padding[-1] = pad_to - length
        return F.pad(value, padding, value=ignore_index if name == "shift_labels" else 0)

    return map_leaves(padded, batch)
