"""The loss of a whole sequence from each rank's tokens."""

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
        logits: [..., C]: this rank's tokens, floating point; 16-bit ones are taken to float32.
        shifted_labels: [...], integer: the class that each token is to predict, that is, labels
            shifted *before* the sequence was sharded, as :func:`deepsp.shard_batch` returns them.
        group: the sequence group.
        ignore_index: label of tokens that don't count.
        reduction: "mean" over the valid tokens of all ranks, or their "sum".
        label_smoothing: as in ``torch.nn.functional.cross_entropy``, 0 to 1.
        average_gradients: multiplies gradients (not the loss) by the group's size, for wrappers
            that average over a world which includes the sequence group: DDP, FSDP, DeepSpeed.

    Returns:
        A scalar. A rank without a valid token adds zero; without any in the group the loss is 0 and
        so are the gradients. A rank's gradients are its tokens' share: their sum over the group is
        the full gradient (:func:`deepsp.sync_gradients`).

    Raises:
        ValueError: shapes that don't fit, or a reduction that isn't there.
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction is {reduction!r}; 'mean' or 'sum' is right")
    if logits.shape[:-1] != shifted_labels.shape:
        raise ValueError(
            f"shifted_labels has shape {tuple(shifted_labels.shape)}, but logits have "
            f"{tuple(logits.shape)}; {tuple(logits.shape[:-1])} is right"
        )
    rank, size, name = member_of(group)
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
    # In float64, sums of losses and counts of tokens are as good as exact.
    mine = torch.stack([local_sum.double(), valid.double()])
    if average_gradients:
        mine = torch.ops.deepsp.scale_gradient(mine, float(size))
    loss, count = torch.ops.deepsp.all_reduce(mine, "replicated", rank, size, name).unbind()
    if reduction == "mean":
        loss = loss / count.clamp(min=1)
    return loss.to(logits.dtype)
