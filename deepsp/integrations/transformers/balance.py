"""The loss that balances the experts of a mixture (Switch Transformer, arXiv:2101.03961), over the
full sequence: the routers' choices and probabilities are summed over all ranks' tokens before they
are multiplied."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch import Tensor

from deepsp.data.fold import Fold
from deepsp.ranks.groups import Member, on_all_ranks

NAME = "load_balancing_loss_func"
"""The function of a modeling file."""

_ARGUMENTS = ["gate_logits", "num_experts", "top_k", "attention_mask"]


def is_known(function: Callable) -> bool:
    """Whether a function of this name computes what :func:`balancing_loss` does."""
    return list(inspect.signature(function).parameters) == _ARGUMENTS


def balancing_loss(
    gate_logits: tuple[Tensor, ...] | None,
    num_experts: int,
    top_k: int = 2,
    attention_mask: Tensor | None = None,
    *,
    member: Member,
    over: Member,
    average_gradients: bool,
    real_rows: Tensor | None = None,
    fold: Fold | None = None,
) -> Tensor | int:
    """The loss of all ranks' tokens, the same on every rank.

    Args:
        gate_logits: of each layer, [B * S_r, experts].
        num_experts: the number of experts.
        top_k: how many experts a token is sent to.
        attention_mask: [B, S], of the full sequence; zeros are tokens that don't count.
        member: rank, size and name of the sequence group.
        over: those of the ranks whose tokens the loss is of.
        average_gradients: as in :func:`deepsp.cross_entropy`.
        real_rows: [B]: the rows whose tokens count; None: all.
        fold: how the rows were folded: a token counts as often as rows have it.
    """
    if not isinstance(gate_logits, tuple):
        return 0
    rank, size, name = over
    valid = gate_logits[0].new_ones(gate_logits[0].size(0), dtype=torch.float32)
    if attention_mask is not None:
        mine = valid.numel() // attention_mask.size(0)
        lens = [n for (n,) in on_all_ranks([mine], member, valid.device)]
        first = sum(lens[: member[0]])
        valid = attention_mask[:, first : first + mine].reshape(-1).to(valid)
    if fold is not None:
        valid = fold.counts(real_rows)[fold.index(member[0])].to(valid)
    elif real_rows is not None:
        of_rows = valid.view(len(real_rows), -1) * real_rows.to(valid)[:, None]
        valid = of_rows.flatten()
    chosen, probabilities = valid.new_zeros(num_experts), valid.new_zeros(num_experts)
    for logits in gate_logits:
        weights = logits.to(valid.device).softmax(1)
        of_token = valid[:, None].expand(-1, top_k).flatten()
        chosen = chosen.index_add(0, weights.topk(top_k, 1).indices.flatten(), of_token)
        probabilities = probabilities + valid @ weights.to(valid.dtype)
    count = valid.sum().view(1) * len(gate_logits)
    sums = torch.cat([chosen, probabilities, count])
    sums = torch.ops.deepsp.all_reduce(sums, "replicated", rank, size, name)
    chosen, probabilities, count = sums.split([num_experts, num_experts, 1])
    loss = (chosen / count * (probabilities / count)).sum() * num_experts
    scale = float(size) if average_gradients else 1.0
    return torch.ops.deepsp._scale_gradient(loss, scale)
