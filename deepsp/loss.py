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
    return loss.to(_result_dtype(hidden))


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
    _check_reduction(reduction)
    shift_labels = _classes(shift_labels, "shift_labels")
    _check_linear(hidden, weight, bias, shift_labels, "shift_labels")
    _check_linear(
        teacher_hidden, teacher_weight, teacher_bias, shift_labels, "shift_labels", "teacher_"
    )
    _check_weights(token_weights, shift_labels)
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
    counts = _counts(shift_labels != ignore_index, token_weights)
    trained = weight if weight.requires_grad and torch.is_grad_enabled() else None
    dtype = _result_dtype(hidden)
    loss = _of_group(local_sum, counts, group, reduction, average_gradients, trained).to(dtype)
    if not entropy:
        return loss
    mean = _of_group(local_entropy, counts, group, reduction, average_gradients, None)
    return loss, mean.to(dtype)


def token_mean(
    x: Tensor,
    shift_labels: Tensor,
    group: Group = None,
    ignore_index: int = -100,
    average_gradients: bool = False,
    *,
    token_weights: Tensor | None = None,
) -> Tensor:
    """Return the mean of a number for each token, over all tokens of a sharded sequence: the same
    number on every rank. It makes a loss of your own, or a term of one, right: an entropy bonus, a
    KL penalty, the loss of a value head.

    Args:
        x: [...], floating point, one number for each of this rank's tokens. Those of ignored tokens
            may be infinite or NaN.
        shift_labels: [...], integer: tokens whose label is ``ignore_index`` don't count.
        group: the sequence group.
        ignore_index: the label of tokens that don't count.
        average_gradients: as in :func:`cross_entropy`.
        token_weights: as in :func:`cross_entropy`.

    Returns:
        A scalar, differentiable in ``x``, as :func:`cross_entropy` returns it: summed in float64,
        in float32, or float64 for float64.

    Raises:
        ValueError: shapes or dtypes that don't fit, or ``token_weights`` that require a gradient.
    """
    sums = _of_tokens(x, shift_labels, ignore_index, token_weights)
    return _of_group(*sums, group, "mean", average_gradients, None).to(_result_dtype(x))


def token_sum(
    x: Tensor,
    shift_labels: Tensor,
    group: Group = None,
    ignore_index: int = -100,
    average_gradients: bool = False,
    *,
    token_weights: Tensor | None = None,
) -> Tensor:
    """Return the sum of a number for each token, over all tokens of a sharded sequence: as
    :func:`token_mean`, but not divided.

    Args:
        x: as in :func:`token_mean`.
        shift_labels: as in :func:`token_mean`.
        group: the sequence group.
        ignore_index: the label of tokens that don't count.
        average_gradients: as in :func:`cross_entropy`.
        token_weights: as in :func:`cross_entropy`.

    Returns:
        A scalar, as :func:`token_mean` returns it.

    Raises:
        ValueError: as by :func:`token_mean`.
    """
    sums = _of_tokens(x, shift_labels, ignore_index, token_weights)
    return _of_group(*sums, group, "sum", average_gradients, None).to(_result_dtype(x))


def _of_tokens(
    x: Tensor, labels: Tensor, ignore_index: int, token_weights: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Check the numbers of this rank's tokens; return their sum, and how often each counts."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        got = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"expected x to be a floating-point tensor, got {got}")
    labels = _classes(labels, "shift_labels")
    if x.shape != labels.shape:
        raise ValueError(
            f"expected x to have the shape of shift_labels {tuple(labels.shape)}, a number for "
            f"each token, got {tuple(x.shape)}"
        )
    _check_weights(token_weights, labels)
    counts = _counts(labels != ignore_index, token_weights)
    return (x.double().where(counts != 0, 0) * counts).sum(), counts


def _result_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


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
