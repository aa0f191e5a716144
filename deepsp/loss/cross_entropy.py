"""Cross entropy of the full sequence, from logits or without them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from deepsp.loss.sums import (
    as_classes,
    check_linear,
    check_reduction,
    check_weights,
    over_group,
    result_dtype,
    token_counts,
)
from deepsp.ranks.groups import Group
from deepsp.weights import drift


def cross_entropy(
    logits: Tensor,
    shift_labels: Tensor,
    group: Group = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    average_gradients: bool = False,
    *,
    z_loss: float = 0.0,
    token_weights: Tensor | None = None,
) -> Tensor:
    """Cross entropy over all tokens of a sharded sequence, the same number on every rank.

    Args:
        logits: [..., C], of this rank's tokens, floating point; 16-bit logits are cast to float32.
        shift_labels: [...], integer: the next class of each token, that is, labels that were
            shifted before the sequence was sharded, as :func:`deepsp.shard_batch` returns them.
        group: the sequence group.
        ignore_index: the label of tokens that don't count.
        reduction: "mean" over the valid tokens of all ranks, or their "sum".
        label_smoothing: 0 to 1, as in ``torch.nn.functional.cross_entropy``.
        average_gradients: multiplies gradients (not the loss) by the group's size, for wrappers
            that average over ranks which include the sequence group: DDP, FSDP, DeepSpeed.
        z_loss: adds ``z_loss * logsumexp(logits) ** 2`` to the loss of each valid token, which
            keeps logits from drifting (PaLM, https://arxiv.org/abs/2204.02311, section 5: 1e-4).
        token_weights: [...], floating point, without a gradient: how often each token counts. The
            mean divides by their sum over the valid tokens of all ranks. None: 1 each.

    Returns:
        A scalar. A rank without a valid token adds zero; without any in the group (or if the
        weights' sum is 0), the mean and its gradients are 0. A rank's gradients are partial: their
        sum over the group is the full gradient (:func:`deepsp.sync_gradients`).

    Raises:
        ValueError: shapes or dtypes that don't fit, an unknown ``reduction``, a negative ``z_loss``
            or ``token_weights`` that require a gradient.
    """
    check_reduction(reduction)
    if not 0 <= z_loss < float("inf"):
        raise ValueError(f"expected z_loss to be a finite number >= 0, got {z_loss}")
    shift_labels = as_classes(shift_labels, "shift_labels")
    check_weights(token_weights, shift_labels)
    if logits.shape[:-1] != shift_labels.shape:
        raise ValueError(
            f"expected shift_labels to have shape {tuple(logits.shape[:-1])}, one for each token "
            f"of logits {tuple(logits.shape)}, got {tuple(shift_labels.shape)}"
        )
    weight = None if torch.compiler.is_compiling() else drift.weight_of(logits)
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    each = F.cross_entropy(
        logits.flatten(0, -2),
        shift_labels.flatten(),
        ignore_index=ignore_index,
        reduction="none",
        label_smoothing=label_smoothing,
    ).double()
    valid = shift_labels != ignore_index
    counts = token_counts(valid, token_weights)
    if z_loss > 0:
        squares = logits.logsumexp(-1).double().square().flatten()
        each = each + z_loss * squares.where(valid.flatten(), 0)
    local_sum = (each * counts.flatten()).sum()
    loss = over_group(local_sum, counts, group, reduction, average_gradients, weight)
    return loss.to(logits.dtype)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    shift_labels: Tensor,
    bias: Tensor | None = None,
    *,
    group: Group = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    average_gradients: bool = False,
    chunk_tokens: int | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
    z_loss: float = 0.0,
    token_weights: Tensor | None = None,
) -> Tensor:
    """:func:`cross_entropy` of ``torch.nn.functional.linear(hidden, weight, bias)``, whose logits
    exist for a chunk of tokens at a time only, in forward and backward.

    Gradients are computed in forward (if grad mode is on), kept until backward (that of ``weight``,
    [C, E], in float32) and scaled there. A second derivative raises.

    Args:
        hidden: [..., E], of this rank's tokens: float64, float32, bfloat16 or float16.
        weight: [C, E], in the dtype of ``hidden``: the linear layer's, which may be tied to an
            embedding. Autocast casts ``hidden``, ``weight`` and ``bias``.
        shift_labels: [...], integer, 0 to C - 1 or ``ignore_index``, as in :func:`cross_entropy`.
        bias: [C], in the dtype of ``hidden``, or None.
        group: the sequence group.
        ignore_index: the label of tokens that don't count.
        reduction: "mean" or "sum", as in :func:`cross_entropy`.
        label_smoothing: 0 to 1.
        average_gradients: as in :func:`cross_entropy`.
        chunk_tokens: the number of tokens whose logits exist at a time; None: as many as take 32
            MiB in float32 (float64 for float64), at least one, on a GPU 1024. 16-bit logits are
            copied to float32, so both exist. At most 512 in float16, whose sums end at 65504.
        softcap: if given, ``softcap * tanh(logits / softcap)`` takes the logits' place (Gemma 2,
            https://arxiv.org/abs/2408.00118, section 2). Its slopes take as much memory as a
            chunk's logits.
        scale: a factor of the logits, before ``softcap`` (Cohere; Granite divides).
        z_loss: as in :func:`cross_entropy`.
        token_weights: as in :func:`cross_entropy`. Autocast leaves them alone.

    Returns:
        A scalar, as :func:`cross_entropy` returns it: float32, or float64 for float64.

    Raises:
        ValueError: shapes, dtypes, devices or numbers that don't fit, an unknown ``reduction``, or
            ``token_weights`` that require a gradient.
        IndexError: a label outside 0 to C - 1 (on a GPU, a device-side assertion).
    """
    check_reduction(reduction)
    shift_labels = as_classes(shift_labels, "shift_labels")
    check_linear(hidden, weight, bias, shift_labels, "shift_labels")
    check_weights(token_weights, shift_labels)
    local_sum = torch.ops.deepsp.linear_cross_entropy(
        hidden,
        weight,
        bias,
        shift_labels,
        ignore_index,
        label_smoothing,
        chunk_tokens,
        softcap=softcap,
        scale=scale,
        z_loss=z_loss,
        token_weights=token_weights,
    )
    counts = token_counts(shift_labels != ignore_index, token_weights)
    trained = weight if weight.requires_grad and torch.is_grad_enabled() else None
    loss = over_group(local_sum, counts, group, reduction, average_gradients, trained)
    return loss.to(result_dtype(hidden))
