"""Sums over the tokens of all ranks, and the checks that losses share."""

from __future__ import annotations

import torch
from torch import Tensor

from deepsp.ranks.groups import Group, member_of
from deepsp.weights import drift
from deepsp.weights.partitioned import check_here


def check_linear(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, name: str, model: str = ""
) -> None:
    """``model`` begins the names of one model's arguments."""
    if not isinstance(weight, Tensor):
        raise ValueError(
            f"expected {model}weight to be a tensor [C, E], such as linear.weight, got "
            f"{type(weight).__name__}"
        )
    check_here(f"{model}weight", weight)
    if bias is not None and not isinstance(bias, Tensor):
        raise ValueError(
            f"expected {model}bias to be a tensor [C] or None, got {type(bias).__name__}; pass a "
            "group as group=..."
        )
    if hidden.shape[:-1] != labels.shape:
        raise ValueError(
            f"expected {name} to have shape {tuple(hidden.shape[:-1])}, one for each token of "
            f"{model}hidden {tuple(hidden.shape)}, got {tuple(labels.shape)}"
        )


def check_reduction(reduction: str) -> None:
    if reduction not in ("mean", "sum"):
        raise ValueError(f"expected reduction to be 'mean' or 'sum', got {reduction!r}")


def as_classes(labels: Tensor, name: str) -> Tensor:
    """Checks labels, and casts any integer dtype to int64."""
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dtype == torch.bool:
        got = labels.dtype if isinstance(labels, Tensor) else type(labels).__name__
        raise ValueError(f"expected {name} to be an integer tensor of classes, got {got}")
    return labels.long()


def check_weights(token_weights: Tensor | None, labels: Tensor) -> None:
    if token_weights is None:
        return
    if not isinstance(token_weights, Tensor) or not token_weights.is_floating_point():
        is_tensor = isinstance(token_weights, Tensor)
        got = token_weights.dtype if is_tensor else type(token_weights).__name__
        raise ValueError(f"expected token_weights to be a floating-point tensor, got {got}")
    if token_weights.shape != labels.shape:
        raise ValueError(
            f"expected token_weights to have the shape of shift_labels {tuple(labels.shape)}, "
            f"got {tuple(token_weights.shape)}"
        )
    if token_weights.requires_grad:
        raise ValueError(
            "expected token_weights not to require a gradient, which isn't computed; detach them, "
            "or weight deepsp.token_log_probs"
        )


def token_counts(valid: Tensor, token_weights: Tensor | None) -> Tensor:
    """How often each token counts, in float64. Weights of ignored tokens may be NaN."""
    if token_weights is None:
        return valid.double()
    return token_weights.double().where(valid, 0)


def result_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def over_group(
    local_sum: Tensor,
    counts: Tensor,
    group: Group,
    reduction: str,
    average_gradients: bool,
    weight: Tensor | None,
) -> Tensor:
    """The loss over all ranks, in float64, from this rank's sum and its tokens' counts. ``weight``:
    the weight that makes the logits, to compare it across ranks; None: unknown, or frozen."""
    rank, size, name = member_of(group)
    summand, guard = [0.0] * drift.SIZE, None
    if size > 1 and not torch.compiler.is_compiling():
        guard = drift.Guard(weight, local_sum, average_gradients, name)
        summand = guard.numbers
    # In float64, sums of losses and counts are practically exact.
    count = counts.sum()
    zero = count * 0  # like the other terms, for stack
    local = torch.stack(
        [local_sum.double(), count, *(zero + x if x != 0 else zero for x in summand)]
    )
    if average_gradients:
        local = torch.ops.deepsp._scale_gradient(local, float(size))
    totals = torch.ops.deepsp.all_reduce(local, "replicated", rank, size, name)
    loss, count = totals[:2].unbind()
    if guard is not None:
        guard.check(totals.detach()[2:], size)
    if reduction == "sum":
        return loss
    empty = count == 0
    return (loss / count.masked_fill(empty, 1)).masked_fill(empty, 0)
