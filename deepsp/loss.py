"""The loss of the full sequence from each rank's tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from deepsp.groups import Group, member_of


def cross_entropy(
    logits: Tensor,
    shifted_labels: Tensor,
    group: Group = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    average_gradients: bool = False,
) -> Tensor:
    """Cross entropy over all tokens of a sharded sequence, the same number on every rank.

    Args:
        logits: [..., C], of this rank's tokens, floating point; 16-bit logits are cast to float32.
        shifted_labels: [...], integer: the class that each token is to predict, that is, labels
            that were shifted before the sequence was sharded, as :func:`deepsp.shard_batch` returns
            them.
        group: the sequence group.
        ignore_index: the label of tokens that don't count.
        reduction: "mean" over the valid tokens of all ranks, or their "sum".
        label_smoothing: 0 to 1, as in ``torch.nn.functional.cross_entropy``.
        average_gradients: multiplies gradients (not the loss) by the group's size, for wrappers
            that average over ranks which include the sequence group: DDP, FSDP, DeepSpeed.

    Returns:
        A scalar. A rank without a valid token adds zero; without any in the group, the loss and the
        gradients are 0. A rank's gradients are partial, those of its tokens: their sum over the
        group is the full gradient (:func:`deepsp.sync_gradients`).

    Raises:
        ValueError: shapes or dtypes that don't fit, or an unknown ``reduction``.
    """
    _check_reduction(reduction)
    shifted_labels = _classes(shifted_labels)
    if logits.shape[:-1] != shifted_labels.shape:
        raise ValueError(
            f"expected shifted_labels to have shape {tuple(logits.shape[:-1])}, one for each token "
            f"of logits {tuple(logits.shape)}, got {tuple(shifted_labels.shape)}"
        )
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    local_sum = F.cross_entropy(
        logits.flatten(0, -2),
        shifted_labels.flatten(),
        ignore_index=ignore_index,
        reduction="sum",
        label_smoothing=label_smoothing,
    )
    valid = (shifted_labels != ignore_index).sum()
    return _of_group(local_sum, valid, group, reduction, average_gradients).to(logits.dtype)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    shifted_labels: Tensor,
    bias: Tensor | None = None,
    *,
    group: Group = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    average_gradients: bool = False,
    chunk_tokens: int | None = None,
) -> Tensor:
    """:func:`cross_entropy` of ``torch.nn.functional.linear(hidden, weight, bias)``, whose logits
    exist for a chunk of tokens at a time only, in forward and backward.

    Gradients are computed in forward (if grad mode is on), kept until backward (that of ``weight``,
    [C, E], in float32) and scaled there. A second derivative raises.

    Args:
        hidden: [..., E], of this rank's tokens: float64, float32, bfloat16 or float16.
        weight: [C, E], in the dtype of ``hidden``: the linear layer's, which may be tied to an
            embedding. Autocast casts ``hidden``, ``weight`` and ``bias``.
        shifted_labels: [...], integer, 0 to C - 1 or ``ignore_index``, as in :func:`cross_entropy`.
        bias: [C], in the dtype of ``hidden``, or None.
        group: the sequence group.
        ignore_index: the label of tokens that don't count.
        reduction: "mean" or "sum", as in :func:`cross_entropy`.
        label_smoothing: 0 to 1.
        average_gradients: as in :func:`cross_entropy`.
        chunk_tokens: the number of tokens whose logits exist at a time; None: as many as take 32
            MiB in float32 (float64 for float64), at least one. 16-bit logits are copied to float32,
            so both exist. At most 512 in float16, whose sums end at 65504.

    Returns:
        A scalar, as :func:`cross_entropy` returns it: float32, or float64 for float64.

    Raises:
        ValueError: shapes, dtypes or devices that don't fit, or an unknown ``reduction``.
        IndexError: a label outside 0 to C - 1 (on a GPU, a device-side assertion).
    """
    _check_reduction(reduction)
    if not isinstance(weight, Tensor):
        raise ValueError(
            "expected weight to be a tensor [C, E], such as linear.weight, got "
            f"{type(weight).__name__}"
        )
    if bias is not None and not isinstance(bias, Tensor):
        raise ValueError(
            f"expected bias to be a tensor [C] or None, got {type(bias).__name__}; pass a group as "
            "group=..."
        )
    shifted_labels = _classes(shifted_labels)
    if hidden.shape[:-1] != shifted_labels.shape:
        raise ValueError(
            f"expected shifted_labels to have shape {tuple(hidden.shape[:-1])}, one for each token "
            f"of hidden {tuple(hidden.shape)}, got {tuple(shifted_labels.shape)}"
        )
    local_sum = torch.ops.deepsp.linear_cross_entropy(
        hidden, weight, bias, shifted_labels, ignore_index, label_smoothing, chunk_tokens
    )
    valid = (shifted_labels != ignore_index).sum()
    loss = _of_group(local_sum, valid, group, reduction, average_gradients)
    return loss if hidden.dtype == torch.float64 else loss.float()


def _check_reduction(reduction: str) -> None:
    if reduction not in ("mean", "sum"):
        raise ValueError(f"expected reduction to be 'mean' or 'sum', got {reduction!r}")


def _classes(labels: Tensor) -> Tensor:
    """Labels of any integer dtype as those that losses take, int64."""
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dtype == torch.bool:
        said = labels.dtype if isinstance(labels, Tensor) else type(labels).__name__
        raise ValueError(f"expected shifted_labels to be an integer tensor of classes, got {said}")
    return labels.long()


def _of_group(
    local_sum: Tensor, valid: Tensor, group: Group, reduction: str, average_gradients: bool
) -> Tensor:
    """The loss over all ranks, in float64, from this rank's sum and its number of valid tokens."""
    rank, size, name = member_of(group)
    # In float64, sums of losses and counts of tokens are as good as exact.
    mine = torch.stack([local_sum.double(), valid.double()])
    if average_gradients:
        mine = torch.ops.deepsp.scale_gradient(mine, float(size))
    loss, count = torch.ops.deepsp.all_reduce(mine, "replicated", rank, size, name).unbind()
    return loss / count.clamp(min=1) if reduction == "mean" else loss
