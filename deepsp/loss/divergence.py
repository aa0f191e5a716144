"""The divergence of a student from a teacher, without logits."""

from __future__ import annotations

import torch
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


def linear_kl(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    shift_labels: Tensor,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    *,
    beta: float = 0.0,
    temperature: float = 1.0,
    top_k: int | None = None,
    group: Group = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    average_gradients: bool = False,
    chunk_tokens: int | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
    teacher_softcap: float | None = None,
    teacher_scale: float = 1.0,
    token_weights: Tensor | None = None,
    entropy: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return the divergence of a student's distributions p from a teacher's q over all tokens of a
    sharded sequence, for distillation: the same number on every rank. Both models' logits exist for
    a chunk of tokens at a time only, in forward and backward.

    Gradients are computed in forward, as by :func:`linear_cross_entropy`, for ``hidden``,
    ``weight`` and ``bias``. The teacher's tensors are constants, even if they require a gradient. A
    second derivative raises.

    Args:
        hidden: [..., E], the student's, of this rank's tokens: float64, float32, bfloat16 or
            float16.
        weight: [C, E], in the dtype of ``hidden``. Autocast casts both models' tensors.
        teacher_hidden: [..., E'], of the same tokens, in a dtype of its own.
        teacher_weight: [C, E'], in the dtype of ``teacher_hidden``.
        shift_labels: [...], integer: tokens whose label is ``ignore_index`` don't count. Other
            values make no difference.
        bias: [C], in the dtype of ``hidden``, or None.
        teacher_bias: [C], in the dtype of ``teacher_hidden``, or None.
        beta: 0: KL(q || p). 1: KL(p || q). Between: the generalized Jensen-Shannon divergence
            beta KL(q || m) + (1 - beta) KL(p || m), where m = (1 - beta) p + beta q (GKD,
            https://arxiv.org/abs/2306.13649).
        temperature: divides both models' logits, after ``softcap``. The loss isn't multiplied by
            its square.
        top_k: if given, the classes other than the teacher's ``top_k`` most likely count as one.
        group: the sequence group.
        ignore_index: the label of tokens that don't count.
        reduction: "mean" or "sum", as in :func:`cross_entropy`.
        average_gradients: as in :func:`cross_entropy`.
        chunk_tokens: the number of tokens whose logits exist at a time; None: as many as take 32
            MiB for both models in float32 (float64 for float64), at least one, on a GPU 1024.
        softcap: the student's, as in :func:`linear_cross_entropy`.
        scale: the student's, as in :func:`linear_cross_entropy`.
        teacher_softcap: the teacher's.
        teacher_scale: the teacher's.
        token_weights: as in :func:`cross_entropy`. Autocast leaves them alone.
        entropy: whether to return the entropy of p, too.

    Returns:
        A scalar, as :func:`cross_entropy` returns it: float32, or float64 for float64. With
        ``entropy``, (divergence, entropy): the entropies of p over all classes, reduced alike,
        without a gradient. Logits of -infinity rule classes out. The divergence is infinite if only
        p rules out a class and ``beta`` is 0, or only q and ``beta`` is 1.

    Raises:
        ValueError: shapes, dtypes, devices or numbers that don't fit, an unknown ``reduction``, or
            ``token_weights`` that require a gradient.
    """
    check_reduction(reduction)
    shift_labels = as_classes(shift_labels, "shift_labels")
    check_linear(hidden, weight, bias, shift_labels, "shift_labels")
    check_linear(
        teacher_hidden, teacher_weight, teacher_bias, shift_labels, "shift_labels", "teacher_"
    )
    check_weights(token_weights, shift_labels)
    local_sum, local_entropy = torch.ops.deepsp.linear_kl(
        hidden,
        weight,
        bias,
        teacher_hidden,
        teacher_weight,
        teacher_bias,
        shift_labels,
        ignore_index,
        beta,
        temperature,
        top_k,
        chunk_tokens,
        softcap=softcap,
        scale=scale,
        teacher_softcap=teacher_softcap,
        teacher_scale=teacher_scale,
        entropy=entropy,
        token_weights=token_weights,
    )
    counts = token_counts(shift_labels != ignore_index, token_weights)
    trained = weight if weight.requires_grad and torch.is_grad_enabled() else None
    dtype = result_dtype(hidden)
    loss = over_group(local_sum, counts, group, reduction, average_gradients, trained).to(dtype)
    if not entropy:
        return loss
    mean = over_group(local_entropy, counts, group, reduction, average_gradients, None)
    return loss, mean.to(dtype)
