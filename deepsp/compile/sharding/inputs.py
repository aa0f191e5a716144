"""Which inputs hold tokens, and in which dimension: a mark that Dynamo passes on to backends."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from deepsp.data import unshard
from deepsp.groups import Group, on_all_ranks

# Of a tensor's attributes, Dynamo passes on to backends none but ``tag``.
_PREFIX = "deepsp"


def prepare_inputs(
    input_ids: Tensor | Mapping[str, Any],
    labels: Tensor | None = None,
    position_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    seq_dim: int = 1,
    *,
    sharded_inputs: bool = False,
    group: Group = None,
):
    """Marks a batch's tensors for the compile pass: where the sequence is.

    Every rank of the sequence group passes the whole batch; what is compiled takes its part.

    Args:
        input_ids: [B, S], or embeddings [B, S, C]; or a dict of tensors by name, whose values are
            marked by their names: ``position_ids`` in the last dimension, all others that have one
            in ``seq_dim``. What isn't a tensor is passed on.
        labels: [B, S], not shifted.
        position_ids: [S], [B, S] or [..., B, S].
        attention_mask: [B, S], or [B, 1, S, S], which isn't marked: attention needs all of it.
        seq_dim: dimension of the sequence.
        sharded_inputs: every rank passes its own tokens only: consecutive ones, in rank order, as
            many as it likes, positions counted from the whole sequence's begin. What is returned is
            whole: one small collective for each tensor, so that labels and masks are right across
            shards' borders. (Ids cost nothing there; embeddings are as large as a layer's output.)
        group: the sequence group; only asked for ``sharded_inputs``.

    Returns:
        ``(input_ids, labels, position_ids, attention_mask)``, or the dict; the tensors given, with
        a mark, unless they were gathered.

    Raises:
        ValueError: a tensor without that dimension, or of another length; with ``sharded_inputs``,
            ranks that pass other tensors than this one.
    """
    if isinstance(input_ids, Mapping):
        batch: Mapping[str, Any] = input_ids
    else:
        batch = {"input_ids": input_ids, "labels": labels}
        batch |= {"position_ids": position_ids, "attention_mask": attention_mask}
    dims = {}
    for name, tensor in batch.items():
        dim = -1 if name == "position_ids" else seq_dim
        if not isinstance(tensor, Tensor) or tensor.dim() == 0:
            continue
        if name == "attention_mask" and tensor.dim() > 2:
            continue
        if not -tensor.dim() <= dim < tensor.dim():
            if batch is input_ids and name != "input_ids":
                continue  # a number for each row, say
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, which has no dimension {dim}; pass "
                "seq_dim, the dimension of the sequence"
            )
        dims[name] = dim % tensor.dim()
    if batch is not input_ids:
        _check_lengths(batch, dims)
    if not dims:
        raise ValueError(
            f"input_ids is {type(input_ids).__name__}, without a tensor that has a dimension "
            f"{seq_dim}; pass seq_dim, the dimension of the sequence"
        )
    if sharded_inputs:
        batch = dict(batch) | _gathered(batch, dims, group)
    for name, dim in dims.items():
        _mark(batch[name], name, dim)
    return batch if isinstance(input_ids, Mapping) else tuple(batch.values())


def _check_lengths(batch: Mapping[str, Any], dims: dict[str, int]) -> None:
    if "input_ids" not in dims:
        raise ValueError("input_ids has no tokens; a tensor [B, S] is right")
    length = batch["input_ids"].size(dims["input_ids"])
    for name in ("labels", "attention_mask"):
        if name in dims and batch[name].size(dims[name]) != length:
            raise ValueError(
                f"{name} has shape {tuple(batch[name].shape)}, but input_ids has {length} tokens "
                f"in dimension {dims[name]}; the same number is right"
            )


def _gathered(batch: Mapping[str, Any], dims: dict[str, int], group: Group) -> dict[str, Tensor]:
    """All ranks' tokens, of every tensor that has some."""
    alike = [
        (name, dim, str(x.dtype), x.requires_grad, *x.shape[:dim], "S", *x.shape[dim + 1 :])
        for name, dim in dims.items()
        for x in [batch[name]]
    ]
    device = batch[next(iter(dims))].device
    # Any hash would do, but Python's own is another on each rank.
    digest = int.from_bytes(hashlib.sha256(repr(alike).encode()).digest()[:7])
    digests = [row[0] for row in on_all_ranks([digest], group, device)]
    others = [rank for rank, d in enumerate(digests) if d != digest]
    if others:
        raise ValueError(
            f"sharded_inputs: ranks {others} of the group pass other tensors than this one's "
            f"{alike} (name, dimension of the sequence, dtype, requires_grad, shape); on all ranks "
            "the same, but for the number of tokens S, is right"
        )
    lens = on_all_ranks([batch[name].size(dim) for name, dim in dims.items()], group, device)
    return {
        name: unshard(batch[name], dim, group, [row[i] for row in lens])
        for i, (name, dim) in enumerate(dims.items())
    }


def _mark(tensor: Tensor, role: str, dim: int) -> None:
    tensor.tag = f"{_PREFIX}:{role}:{dim}"
    if tensor.size(dim) > 1:
        # Maybe: a block mask that FlexAttention is given holds the length that it was made for.
        torch._dynamo.maybe_mark_dynamic(tensor, dim)


def role_of(node: fx.Node) -> tuple[str, int] | None:
    """The role and the sequence's dimension of a placeholder, if it was marked."""
    tag = node.meta.get("tensor_dict", {}).get("tag")
    if not isinstance(tag, str) or not tag.startswith(f"{_PREFIX}:"):
        return None
    _, role, dim = tag.split(":")
    return role, int(dim)
