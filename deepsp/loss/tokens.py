"""Numbers for each token: log-probabilities, and means and sums of one's own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deepsp.data.sharding import unshard
from deepsp.loss.sums import (
    as_classes,
    check_linear,
    check_weights,
    over_group,
    result_dtype,
    token_counts,
)
from deepsp.ranks.groups import Group


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
    ids = as_classes(ids, "ids")
    check_linear(hidden, weight, bias, ids, "ids")
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
    return over_group(*sums, group, "mean", average_gradients, None).to(result_dtype(x))


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
    return over_group(*sums, group, "sum", average_gradients, None).to(result_dtype(x))


def _of_tokens(
    x: Tensor, labels: Tensor, ignore_index: int, token_weights: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Check the numbers of this rank's tokens; return their sum, and how often each counts."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        got = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"expected x to be a floating-point tensor, got {got}")
    labels = as_classes(labels, "shift_labels")
    if x.shape != labels.shape:
        raise ValueError(
            f"expected x to have the shape of shift_labels {tuple(labels.shape)}, a number for "
            f"each token, got {tuple(x.shape)}"
        )
    check_weights(token_weights, labels)
    counts = token_counts(labels != ignore_index, token_weights)
    return (x.double().where(counts != 0, 0) * counts).sum(), counts
