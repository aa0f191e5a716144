"""Losses: the mean over all tokens of the full sequence, the same number on every rank."""

from __future__ import annotations

import torch

from deepsp.compile.sharding.rules import Call, combined, overloads
from deepsp.compile.sharding.tokens import Size, Tokens, product

aten = torch.ops.aten
_NONE, _MEAN, _SUM = 0, 1, 2


def _summed(call: Call):
    """The sum of this rank's losses, of 16-bit ones in float32 to avoid an overflow."""
    if call.node.meta["val"].dtype not in (torch.float16, torch.bfloat16):
        return call.replaced(reduction=_SUM)
    each = call.replaced(reduction=_NONE)
    return call.graph.call(aten.sum.default, each, dtype=torch.float32)


def _reduced(call: Call, count: Size) -> None:
    """The sum or mean of all ranks' losses; ``count``: how many there are."""
    graph = call.graph

    def lower():
        result = graph.all_reduce(_summed(call))
        if call["reduction"] == _MEAN:
            result = graph.call(aten.div.Scalar, result, graph.int_(count))
        return graph.call(aten.to.dtype, result, call.node.meta["val"].dtype)

    call.lower, call.decision = lower, "the loss of all ranks' tokens"


@combined(aten.cross_entropy_loss.default, aten.nll_loss.default, aten.nll_loss_nd.default)
def cross_entropy(call: Call, tokens: Tokens) -> None:
    logits, target = call.node.args[:2]
    shape = call.shape(logits)
    soft = target.meta["val"].is_floating_point()
    graph = call.graph

    def lower():
        dtype = call.node.meta["val"].dtype
        total = graph.all_reduce(_summed(call))
        if call["reduction"] == _SUM:
            return graph.call(aten.to.dtype, total, dtype)
        if soft:
            count = graph.int_(product(n for d, n in enumerate(shape) if d != 1))
            return graph.call(aten.to.dtype, graph.call(aten.div.Scalar, total, count), dtype)
        local = call.operand(target)
        counts = graph.call(aten.ne.Scalar, local, call["ignore_index"])
        if call["weight"] is not None:
            classes = graph.call(aten.mul.Tensor, local, counts)  # ignored ones: any number
            weights = graph.call(aten.index.Tensor, call.operand(call["weight"]), [classes])
            counts = graph.call(aten.mul.Tensor, weights, counts)
        # Counts of tokens are exact in float64.
        counts = graph.call(aten.sum.default, counts, dtype=torch.float64)
        count = graph.call(aten.to.dtype, graph.all_reduce(counts), graph.env[total].dtype)
        return graph.call(aten.to.dtype, graph.call(aten.div.Tensor, total, count), dtype)

    call.lower, call.decision = lower, "the loss of all ranks' tokens"


@combined(
    *overloads(
        "multi_margin_loss multilabel_margin_loss mse_loss l1_loss smooth_l1_loss huber_loss "
        "binary_cross_entropy kl_div soft_margin_loss binary_cross_entropy_with_logits "
        "poisson_nll_loss"
    )
)
def other(call: Call, tokens: Tokens) -> None:
    """Margin losses with classes are means over rows, the others over elements."""
    x, target = call.node.args[:2]
    margin = "margin" in call.target._opname and call.target is not aten.soft_margin_loss.default
    if not margin and call.shape(x) != call.shape(target):
        call.refuse(
            f"expected tensors of the same shape, got {call.shape(x)} and {call.shape(target)}; "
            "expand them"
        )
    _reduced(call, call.shape(x)[0] if margin else product(call.shape(x)))
