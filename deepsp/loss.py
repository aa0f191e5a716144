"""Losses of the full sequence from each rank's tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from deepsp.data.sharding import unshard
from deepsp.ranks.groups import Group, member_of
from deepsp.weights import drift
from deepsp.weights.partitioned import check_here


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
    _check_reduction(reduction)
    if not 0 <= z_loss < float("inf"):
        raise ValueError(f"expected z_loss to be a finite number >= 0, got {z_loss}")
    shift_labels = _classes(shift_labels, "shift_labels")
    _check_weights(token_weights, shift_labels)
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
    counts = _counts(valid, token_weights)
    if z_loss > 0:
        squares = logits.logsumexp(-1).double().square().flatten()
        each = each + z_loss * squares.where(valid.flatten(), 0)
    local_sum = (each * counts.flatten()).sum()
    loss = _of_group(local_sum, counts, group, reduction, average_gradients, weight)
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
    _check_reduction(reduction)
    shift_labels = _classes(shift_labels, "shift_labels")
    _check_linear(hidden, weight, bias, shift_labels, "shift_labels")
    _check_weights(token_weights, shift_labels)
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
    counts = _counts(shift_labels != ignore_index, token_weights)
    trained = weight if weight.requires_grad and torch.is_grad_enabled() else None
    loss = _of_group(local_sum, counts, group, reduction, average_gradients, trained)
    return loss if hidden.dtype == torch.float64 else loss.float()


def token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    bias: Tensor | None = None,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    scale: float = 1.0,
    group: Group = None,
    ignore_index: int = -100,
    outputs: str = "local",
    seq_dim: int = 1,
    seq_lens: Sequence[int] | None = None,
    entropy: bool = False,
    chunk_tokens: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """The log-probability of each token's id under ``softmax(logits / temperature)``, for policy
    gradients and preference losses. The logits, those of :func:`linear_cross_entropy`, exist for a
    chunk of tokens at a time only; backward computes them again. A second derivative raises.

    With ``outputs="full"`` every rank gets the log-probabilities of the full sequence and must
    compute the same loss from them. So every rank has the full gradient, and takes this rank's
    slice of it (``all_gather(..., grad="replicated")``): gradients of parameters are partial, as
    those of :func:`cross_entropy`, and no factor is needed. (With ``"partial"`` the ranks' equal
    gradients would be summed, and be P times too large.)

    Args:
        hidden: [..., E], of this rank's tokens: float64, float32, bfloat16 or float16.
        weight: [C, E], in the dtype of ``hidden``: the linear layer's. Autocast casts ``hidden``,
            ``weight`` and ``bias``.
        ids: [...], integer: the id that follows each token, 0 to C - 1, or ``ignore_index``:
            ``shift_labels`` of :func:`deepsp.shard_batch`.
        bias: [C], in the dtype of ``hidden``, or None.
        temperature: divides logits after ``softcap``, as in sampling.
        softcap: as in :func:`linear_cross_entropy`.
        scale: as in :func:`linear_cross_entropy`.
        group: the sequence group; used with ``outputs="full"`` only.
        ignore_index: the id of tokens that don't count.
        outputs: "local": for this rank's tokens; nothing is sent. "full": for all tokens.
        seq_dim: the sequence dimension of ``ids``, for ``outputs="full"``.
        seq_lens: the number of tokens on each rank, for ``outputs="full"``; None: the ranks
            exchange their numbers (one small collective, which ends a full graph of torch.compile).
        entropy: whether to return the entropy of each token's distribution, too. In backward that
            takes the memory of a chunk's logits once more.
        chunk_tokens: as in :func:`linear_cross_entropy`.

    Returns:
        The log-probabilities, [...], float32 (float64 for float64), 0 where ``ids`` is
        ``ignore_index``. With ``entropy``, (log_probs, entropy), alike; both are differentiable.

    Raises:
        ValueError: shapes, dtypes, devices or numbers that don't fit, or unknown ``outputs``.
        IndexError: an id outside 0 to C - 1 (on a GPU, a device-side assertion).
    """
    if outputs not in ("local", "full"):
        raise ValueError(f"expected outputs to be 'local' or 'full', got {outputs!r}")
    ids = _classes(ids, "ids")
    _check_linear(hidden, weight, bias, ids, "ids")
    if outputs == "full" and not -ids.dim() <= seq_dim < ids.dim():
        raise ValueError(
            f"expected seq_dim to be a dimension of ids {tuple(ids.shape)}, got {seq_dim}"
        )
    log_probs, _, *rest = torch.ops.deepsp.token_log_probs(
        hidden,
        weight,
        bias,
        ids,
        ignore_index,
        chunk_tokens,
        softcap=softcap,
        scale=scale,
        temperature=temperature,
        entropy=entropy,
    )
    columns = torch.stack([log_probs, *rest], -1)
    if outputs == "full":
        # One message for both, stacked in a last dimension.
        columns = unshard(columns, seq_dim % ids.dim(), group, seq_lens)
    return tuple(columns.unbind(-1)) if entropy else columns.squeeze(-1)


def _check_linear(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, name: str
) -> None:
    if not isinstance(weight, Tensor):
        raise ValueError(
            "expected weight to be a tensor [C, E], such as linear.weight, got "
            f"{type(weight).__name__}"
        )
    check_here("weight", weight)
    if bias is not None and not isinstance(bias, Tensor):
        raise ValueError(
            f"expected bias to be a tensor [C] or None, got {type(bias).__name__}; pass a group as "
            "group=..."
        )
    if hidden.shape[:-1] != labels.shape:
        raise ValueError(
            f"expected {name} to have shape {tuple(hidden.shape[:-1])}, one for each token of "
            f"hidden {tuple(hidden.shape)}, got {tuple(labels.shape)}"
        )


def _check_reduction(reduction: str) -> None:
    if reduction not in ("mean", "sum"):
        raise ValueError(f"expected reduction to be 'mean' or 'sum', got {reduction!r}")


def _classes(labels: Tensor, name: str) -> Tensor:
    """Checks labels, and casts any integer dtype to int64."""
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dtype == torch.bool:
        got = labels.dtype if isinstance(labels, Tensor) else type(labels).__name__
        raise ValueError(f"expected {name} to be an integer tensor of classes, got {got}")
    return labels.long()


def _check_weights(token_weights: Tensor | None, labels: Tensor) -> None:
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


def _counts(valid: Tensor, token_weights: Tensor | None) -> Tensor:
    """How often each token counts, in float64. Weights of ignored tokens may be NaN."""
    if token_weights is None:
        return valid.double()
    return token_weights.double().where(valid, 0)


def _of_group(
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
