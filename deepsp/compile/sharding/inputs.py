"""Marks the inputs that hold tokens, and the dimension. Dynamo passes the mark on to backends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deepsp.data.sharding import unshard
from deepsp.ranks.agreement import first_difference
from deepsp.ranks.groups import Group, on_all_ranks

# Dynamo passes no other attribute of a tensor to backends than ``tag``.
MARK = "deepsp"


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
    """Marks the sequence dimension of a batch's tensors for the compile pass.

    Every rank of the sequence group passes the full batch; the compiled model takes its part.

    Args:
        input_ids: [B, S], or embeddings [B, S, C]; or a dict of tensors by name: ``position_ids``
            is marked in the last dimension, all others that have a dimension ``seq_dim`` in that.
            Other values are passed on.
        labels: [B, S], not shifted.
        position_ids: [S], [B, S] or [..., B, S].
        attention_mask: [B, S], or [B, 1, S, S], which isn't marked: attention needs it in full.
        seq_dim: the sequence dimension.
        sharded_inputs: every rank passes its own tokens only: consecutive ones, in rank order, any
            number of them, with positions of the full sequence. They are gathered (one small
            collective for each tensor), so that labels and masks are right across the ranks'
            borders. Ids cost little; embeddings are as large as a layer's output.
        group: the sequence group; used with ``sharded_inputs`` only.

    Returns:
        A tuple of the given tensors, in the order of the arguments, or the dict: marked, unless
        they were gathered.

    Raises:
        ValueError: a tensor lacks the dimension or has another length; with ``sharded_inputs``, the
            ranks pass tensors that differ in more than their number of tokens.
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
                f"expected {name} to have a dimension {dim}, got shape {tuple(tensor.shape)}; pass "
                "seq_dim, the dimension of the sequence"
            )
        dims[name] = dim % tensor.dim()
    if batch is not input_ids:
        _check_lengths(batch, dims)
    if not dims:
        raise ValueError(
            f"expected input_ids to hold a tensor with a dimension {seq_dim}, got "
            f"{type(input_ids).__name__}; pass seq_dim, the dimension of the sequence"
        )
    if sharded_inputs:
        batch = dict(batch) | _gathered(batch, dims, group)
    for name, dim in dims.items():
        _mark(batch[name], name, dim)
    if isinstance(input_ids, Mapping):
        return batch
    return tuple(x for x in batch.values() if x is not None)


def replicated(x: Tensor) -> Tensor:
    """In a model for the compile pass: every rank gets all tokens of ``x``, and computes what
    follows of it in full, until it is combined with sharded tensors again.

    For code that the pass can't shard. It costs the memory and the work of one process, for this
    part of the model. In other code, it copies ``x``.

    Args:
        x: any tensor, of any dtype.

    Returns:
        A copy of ``x``, with the same shape and dtype.
    """
    return torch.ops.deepsp.replicated(x)


def _check_lengths(batch: Mapping[str, Any], dims: dict[str, int]) -> None:
    if "input_ids" not in dims:
        raise ValueError("expected input_ids to be a tensor [B, S] with tokens, got no tokens")
    length = batch["input_ids"].size(dims["input_ids"])
    for name in ("labels", "attention_mask"):
        if name in dims and batch[name].size(dims[name]) != length:
            raise ValueError(
                f"expected {name} to have {length} tokens in dimension {dims[name]}, as input_ids "
                f"has, got shape {tuple(batch[name].shape)}"
            )


def _gathered(batch: Mapping[str, Any], dims: dict[str, int], group: Group) -> dict[str, Tensor]:
    """Gathers all ranks' tokens, of every tensor that has some."""
    alike = [
        (name, dim, str(x.dtype), x.requires_grad, *x.shape[:dim], "S", *x.shape[dim + 1 :])
        for name, dim in dims.items()
        for x in [batch[name]]
    ]
    device = batch[next(iter(dims))].device
    difference = first_difference([(name, rest) for name, *rest in alike], group)
    if difference is not None:
        raise difference.error(
            f"{difference.name} of sharded_inputs, but for its number of tokens S,",
            "pass the same sequence dimension, dtype, requires_grad and shape on all ranks",
        )
    lens = on_all_ranks([batch[name].size(dim) for name, dim in dims.items()], group, device)
    return {
        name: unshard(batch[name], dim, group, [row[i] for row in lens])
        for i, (name, dim) in enumerate(dims.items())
    }


def _mark(tensor: Tensor, role: str, dim: int) -> None:
    tensor.tag = f"{MARK}:{role}:{dim}"
    if tensor.size(dim) > 1:
        # "maybe": a FlexAttention block mask fixes the length for which it was made.
        torch._dynamo.maybe_mark_dynamic(tensor, dim)
