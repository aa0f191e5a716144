"""Detects weights that drift apart because their gradients aren't summed over the group: on the
steps after the first, second, fourth, ... update.

The loss finds the weight that makes the logits through autograd's graph. Every rank applies the
full weight to its tokens, so it must be the same on all ranks. Where it is frozen, the trained
weight nearest to the loss takes its place, if it was the same at first (experts differ). A
projection of a few of its elements is sent with the loss's all-reduce, so no rank sends or waits
more. A rank that doesn't know the weight (compiled, sharded, tied to something else) sends zeros,
and then nothing is compared."""

from __future__ import annotations

import collections

import torch
from torch import Tensor, nn

from deepsp.ranks.groups import is_dtensor
from deepsp.weights.partitioned import is_partitioned
from deepsp.weights.shard_gradient import is_built, shard_member

SIZE = 6
"""How many float64 numbers are sent."""

_SAMPLE = 64  # elements
# Relative to their norm. Different machines may round updates differently.
_TOLERANCE = 1e-4
_NODES = 4000
"""The most nodes of autograd's graph between a loss and a trained weight."""
_UPDATES = "_deepsp_updates"  # attribute of the weight: its version, and its number of updates
_DIFFERS = "_deepsp_differs"  # likewise: that it differed by rank when it was met first
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


def trained_weight(x: Tensor) -> tuple[nn.Parameter | None, int]:
    """The trained weight that is nearest in autograd's graph, of those that aren't known to differ
    by rank, and how many nodes lie before it. Where the head is frozen (LoRA, say), it is compared
    in its place."""
    seen, queue = set(), collections.deque([x.grad_fn])
    while queue and len(seen) < _NODES:
        node = queue.popleft()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, nn.Parameter) and not hasattr(leaf, _DIFFERS) and _is_whole(leaf):
            return leaf, len(seen)
        queue.extend(n for n, _ in node.next_functions)
    return None, 0


class Guard:
    """A comparison of a weight, whose numbers are sent with a loss's.

    Args:
        head: the weight that makes the logits; None: unknown, or frozen.
        x: what the loss is computed from.
        average_gradients: whether the loss has gradients for wrappers that average them.
        group: the name of the group.
    """

    def __init__(self, head: Tensor | None, x: Tensor, average_gradients: bool, group: str):
        self.numbers, self.is_first, place = [0.0] * SIZE, False, 0
        if head is None:
            head, place = trained_weight(x)
        if not isinstance(head, nn.Parameter) or not _is_whole(head):
            return
        self.weight, self.is_head = head, place == 0
        setattr(head, _AVERAGED, group if average_gradients else None)
        # A weight that isn't the head may differ from the start (experts).
        self.is_first = not self.is_head and not hasattr(head, _UPDATES)
        version, updates = getattr(head, _UPDATES, (head._version, 0))
        changed = version != head._version
        setattr(head, _UPDATES, (head._version, updates + changed))
        if not self.is_first and (not changed or (updates + 1) & updates != 0):
            return
        flat = head.detach().flatten()
        sample = flat[:: max(1, len(flat) // _SAMPLE)][:_SAMPLE].double()
        signs = torch.arange(1, len(sample) + 1, device=flat.device, dtype=torch.float64).cos()
        value, norm, key = sample.dot(signs).item(), sample.dot(sample).item(), place + len(flat)
        self.numbers = [1.0, float(key), float(key * key), value, value * value, norm]

    def check(self, totals: Tensor, size: int) -> None:
        """
        Args:
            totals: the sums of the ranks' numbers.
            size: the number of ranks.

        Raises:
            ValueError: on every rank, if all ranks have sent the same weight, and it differs.
        """
        if self.numbers[0] == 0:
            return
        ranks, key, keys, value, square, norm = totals.tolist()
        if ranks != size or size * keys != key**2:  # the ranks have found different ones
            return
        if size * square - value**2 <= _TOLERANCE**2 * norm * size:
            return
        if self.is_first:
            setattr(self.weight, _DIFFERS, True)
            return
        role = "that makes the logits" if self.is_head else "(the trained one nearest to the loss)"
        raise ValueError(
            f"expected the weight of shape {list(self.weight.shape)} {role} to be the "
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
