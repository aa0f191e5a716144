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
        ValueError: shapes or dtypes that don't fit, or a reduction that isn't there.
    """
    _check_reduction(reduction)
    shifted_labels = _classes(shifted_labels)
    if logits.shape[:-1] != shifted_labels.shape:
        raise ValueError(
            f"shifted_labels has shape {tuple(shifted_labels.shape)}, but logits have "
            f"{tuple(logits.shape)}; {tuple(logits.shape[:-1])} is right"
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
    are there for a chunk of tokens at a time only, in the forward pass and in the backward.

    Gradients are found in the forward pass (where grad mode is on) and scaled in the backward
    pass: until then they are held, that of weight, [C, E], in float32. There is no second
    derivative: it raises.

    Args:
        hidden: [..., E]: this rank's tokens, as the linear layer takes them; float64, float32,
            bfloat16 or float16.
        weight: [C, E] in hidden's dtype: the linear layer's, a tied embedding's too. Autocast casts
            hidden, weight and bias.
        shifted_labels: [...], integer, 0 to C - 1 or ``ignore_index``: as for
            :func:`cross_entropy`.
        bias: [C] in hidden's dtype.
        chunk_tokens: tokens whose logits are there at a time; None: as many as take 32 MiB, in
            float32 (float64 for float64), at least one. 16-bit products are copied to float32, so
            that both are there. At most 512 in float16, whose sums end at 65504.

    The other arguments are those of :func:`cross_entropy`.

    Returns:
        A scalar, as :func:`cross_entropy` returns it: float32, or float64 for float64.

    Raises:
        ValueError: shapes, dtypes or devices that don't fit, a reduction that isn't there.
        IndexError: a label outside 0 to C - 1 (on a GPU, a device-side assertion).
    """
    _check_reduction(reduction)
    if not isinstance(weight, Tensor):
        raise ValueError(
            f"weight is a {type(weight).__name__}; a tensor [C, E] is right, such as linear.weight"
        )
    if bias is not None and not isinstance(bias, Tensor):
        raise ValueError(
            f"bias is a {type(bias).__name__}; a tensor [C] or None is right (a group is passed as "
            "group=...)"
        )
    shifted_labels = _classes(shifted_labels)
    if hidden.shape[:-1] != shifted_labels.shape:
        raise ValueError(
            f"shifted_labels has shape {tuple(shifted_labels.shape)}, but hidden has "
            f"{tuple(hidden.shape)}; {tuple(hidden.shape[:-1])} is right"
        )
    local_sum = torch.ops.deepsp.linear_cross_entropy(
        hidden, weight, bias, shifted_labels, ignore_index, label_smoothing, chunk_tokens
    )
    valid = (shifted_labels != ignore_index).sum()
    loss = _of_group(local_sum, valid, group, reduction, average_gradients)
    return loss if hidden.dtype == torch.float64 else loss.float()


def _check_reduction(reduction: str) -> None:
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction is {reduction!r}; 'mean' or 'sum' is right")


def _classes(labels: Tensor) -> Tensor:
    """Labels of any integer dtype as those that losses take, int64."""
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dtype == torch.bool:
        said = labels.dtype if isinstance(labels, Tensor) else type(labels).__name__
        raise ValueError(f"shifted_labels is {said}; an integer tensor of classes is right")
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
