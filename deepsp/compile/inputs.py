"""Which inputs hold tokens, and in which dimension: a mark that Dynamo passes on to backends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

# Of a tensor's attributes, Dynamo passes on to backends none but ``tag``.
_PREFIX = "deepsp"


def _mark(tensor: Tensor | None, role: str, dim: int) -> Tensor | None:
    if tensor is None:
        return None
    if not -tensor.dim() <= dim < tensor.dim():
        raise ValueError(
            f"{role} has shape {tuple(tensor.shape)}, which has no dimension {dim}; pass seq_dim, "
            "the dimension of the sequence"
        )
    dim %= tensor.dim()
    tensor.tag = f"{_PREFIX}:{role}:{dim}"
    if tensor.size(dim) > 1:
        torch._dynamo.mark_dynamic(tensor, dim)
    return tensor


def prepare_inputs(
    input_ids: Tensor | Mapping[str, Any],
    labels: Tensor | None = None,
    position_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    seq_dim: int = 1,
):
    """Marks a batch's tensors, in place, for the compile pass: where the sequence is.

    Every rank of the sequence group passes the whole batch; what is compiled takes its part.

    Args:
        input_ids: [B, S], or embeddings [B, S, C]; or a dict of tensors by name, whose values are
            marked by their names: ``position_ids`` in the last dimension, all others that have one
            in ``seq_dim``. What isn't a tensor is passed on.
        labels: [B, S], not shifted.
        position_ids: [S], [B, S] or [..., B, S].
        attention_mask: [B, S], or [B, 1, S, S], which isn't marked: attention needs all of it.
        seq_dim: dimension of the sequence.

    Returns:
        ``(input_ids, labels, position_ids, attention_mask)``, the tensors given, or the dict.

    Raises:
        ValueError: a tensor without that dimension, or of another length.
    """
    if isinstance(input_ids, Mapping):
        for name, value in input_ids.items():
            if isinstance(value, Tensor) and value.dim() > 0:
                if name == "attention_mask" and value.dim() > 2:
                    continue
                _mark(value, name, -1 if name == "position_ids" else seq_dim)
        return input_ids
    tensors = {"labels": labels, "attention_mask": attention_mask}
    _mark(input_ids, "input_ids", seq_dim)
    for name, tensor in tensors.items():
        if tensor is None or (name == "attention_mask" and tensor.dim() > 2):
            continue
        _mark(tensor, name, seq_dim)
        if tensor.size(seq_dim) != input_ids.size(seq_dim):
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, but input_ids has "
                f"{input_ids.size(seq_dim)} tokens in dimension {seq_dim}; the same number is right"
            )
    _mark(position_ids, "position_ids", -1)
    return input_ids, labels, position_ids, attention_mask


def role_of(node: fx.Node) -> tuple[str, int] | None:
    """The role and the sequence's dimension of a placeholder, if it was marked."""
    tag = node.meta.get("tensor_dict", {}).get("tag")
    if not isinstance(tag, str) or not tag.startswith(f"{_PREFIX}:"):
        return None
    _, role, dim = tag.split(":")
    return role, int(dim)
