"""Detects weights that drift apart because their gradients aren't summed over the group: on the
steps after the first, second, fourth, ... update.

The loss finds the weight that makes the logits through autograd's graph. Every rank applies the
full weight to its tokens, so it must be the same on all ranks; other weights may differ (experts,
say). A projection of a few of its elements is sent with the loss's all-reduce, so no rank sends or
waits more. A rank that doesn't know the weight (compiled, frozen, sharded, tied to something else)
sends zeros, and then nothing is compared."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from deepsp.ranks.groups import is_dtensor
from deepsp.weights.partitioned import is_partitioned
from deepsp.weights.shard_gradient import is_built, shard_member

SIZE = 4
"""How many float64 numbers are sent."""

_SAMPLE = 64  # elements
# Relative to their norm. Different machines may round updates differently.
_TOLERANCE = 1e-4
_UPDATES = "_deepsp_updates"  # attribute of the weight: its version, and its number of updates
_AVERAGED = "_deepsp_averaged"  # likewise: the group whose loss averages its gradients, or None

_PRODUCTS = ("AddmmBackward0", "MmBackward0", "LinearBackward0", "BmmBackward0")
# Nodes that may lie between a product and the logits, or a weight and its product.
_AROUND = ("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "ToCopyBackward0",
           "TBackward0", "TransposeBackward0", "PermuteBackward0", "ExpandBackward0",
           "SliceBackward0", "MulBackward0", "DivBackward0", "TanhBackward0",
           "ScaleGradientBackward0")  # fmt: skip


def weight_of(logits: Tensor) -> nn.Parameter | None:
    """The weight that the hidden states are multiplied with to make the logits."""
    node = logits.grad_fn
    for _ in range(12):
        if node is None or node.name() in _PRODUCTS:
            break
        if node.name() not in _AROUND:
            return None
        node = next((n for n, _ in node.next_functions if n is not None), None)
    if node is None:
        return None
    for factor, _ in node.next_functions:
        while factor is not None and factor.name() in _AROUND:
            factor = factor.next_functions[0][0]
        leaf = getattr(factor, "variable", None)
        if leaf is not None and leaf.dim() == 2:
            return leaf
    return None


def summand_of(weight: Tensor | None, average_gradients: bool, group: str) -> list[float]:
    """This rank's numbers for the all-reduce: zeros unless the weight has changed for the first,
    second, fourth, ... time."""
    nothing = [0.0] * SIZE
    if weight is None or not isinstance(weight, nn.Parameter) or not _is_whole(weight):
        return nothing
    setattr(weight, _AVERAGED, group if average_gradients else None)
    version, updates = getattr(weight, _UPDATES, (weight._version, 0))
    changed = version != weight._version
    setattr(weight, _UPDATES, (weight._version, updates + changed))
    if not changed or (updates + 1) & updates != 0:
        return nothing
    flat = weight.detach().flatten()
    sample = flat[:: max(1, len(flat) // _SAMPLE)][:_SAMPLE].double()
    signs = torch.arange(1, len(sample) + 1, device=flat.device, dtype=torch.float64).cos()
    value = sample.dot(signs).item()
    return [1.0, value, value * value, sample.dot(sample).item()]


def check(weight: Tensor | None, summand: list[float], totals: Tensor, size: int) -> None:
    """
    Raises:
        ValueError: on every rank, if all ranks know the weight and it differs.
    """
    if summand[0] == 0:
        return
    known, value, square, norm = totals.tolist()
    if known == size and size * square - value**2 > _TOLERANCE**2 * norm * size:
        raise ValueError(
            f"expected the weight of shape {list(weight.shape)} that makes the logits to be the "
            "same on every rank, but the ranks' updates differ: their gradients are partial; call "
            "deepsp.sync_gradients(model) between backward and the optimizer's step, or wrap the "
            "model in DDP and pass average_gradients=True. (Or the ranks began with different "
            "weights: seed them alike, or load the same state_dict.)"
        )


def is_averaged(parameter: Tensor, group: str) -> bool:
    return getattr(parameter, _AVERAGED, None) == group


def is_partial(parameter: Tensor) -> bool:
    """Whether a loss saw this weight, over more than one rank, and didn't average its gradients."""
    return getattr(parameter, _AVERAGED, "") is None


def _is_whole(weight: Tensor) -> bool:
    sharded = is_dtensor(weight) or getattr(weight, "_is_flat_param", False)  # FSDP2's and FSDP1's
    if (
        sharded
        or is_partitioned(weight)
        or is_built(weight)
        or shard_member(weight) is not None
        or weight.is_meta
    ):
        return False
    return weight.untyped_storage().size() > 0  # FSDP frees gathered weights
