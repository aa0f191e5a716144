"""Checkpoints of whole layers that don't compute attention again."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

# By name: some are ops of one device, or are loaded later.
_ATTENTION = frozenset(
    (
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_scaled_dot_product_fused_attention_overrideable",
        "aten::_flash_attention_forward",
        "aten::_efficient_attention_forward",
        "deepsp::_blockwise_attention",
        "deepsp::_streamed_attention",
        "deepsp::_attention_with_dropout",
        "flex_attention",
    )
)


def _policy(more: frozenset, context, op, *args, **kwargs) -> CheckpointPolicy:
    kept = op.name() in _ATTENTION or op in more
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def checkpoint_policy(*ops: torch._ops.OpOverload) -> Callable[[], tuple]:
    """A ``context_fn`` for ``torch.utils.checkpoint`` with which backward computes everything
    again, but not attention. ::

        checkpoint(layer, x, use_reentrant=False, context_fn=deepsp.checkpoint_policy())
        model.activation_checkpointing_enable(  # of transformers
            {"use_reentrant": False, "context_fn": deepsp.checkpoint_policy()}
        )

    Of each layer, attention's output and the log-sum-exp of its scores are kept beside the layer's
    input: B * S / P * Hq * D elements on each rank. q, k and v are computed and exchanged again.
    With long sequences, attention is most of the forward pass. Whatever attends by PyTorch's fused
    kernels or by deepsp's is known, FlexAttention too; SDPA's math, which is many small ops, is
    computed again.

    Args:
        ops: more ops whose results are kept: those of a ``local_attention`` of your own.

    Returns:
        The ``context_fn``. It can be pickled.

    Raises:
        ValueError: an argument that isn't an op.

    Selective checkpoints are PyTorch's; keeping attention's output is "rematerialization-aware
    checkpointing" in Li et al., arXiv:2310.03294.
    """
    for op in ops:
        if not isinstance(op, (torch._ops.OpOverload, torch._ops.HigherOrderOperator)):
            raise ValueError(
                f"expected ops such as torch.ops.aten.mm.default, got {op!r}; name the overload"
            )
    return functools.partial(
        create_selective_checkpoint_contexts, functools.partial(_policy, frozenset(ops))
    )


def keeps_attention_only(context_fn: object) -> bool:
    """Whether a ``context_fn`` is that of :func:`checkpoint_policy` without more ops."""
    inner = context_fn.args[0] if isinstance(context_fn, functools.partial) else None
    return isinstance(inner, functools.partial) and inner.func is _policy and not inner.args[0]
