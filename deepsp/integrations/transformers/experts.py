"""Experts of transformers' mixtures on the ranks that share the sequence, through transformers' own
registry of implementations."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from torch import Tensor, nn

from deepsp.experts.module import DistributedExperts
from deepsp.integrations.transformers import mixers
from deepsp.integrations.transformers.masks import current
from deepsp.ranks.groups import Group, member_of
from deepsp.weights.rows import SHARDS, shard_rows

NAME = "deepsp"
"""The name of the implementation."""


def shard_experts(model: nn.Module, group: Group = None) -> None:
    """Deals the experts of a model of transformers out over a sequence group: each rank keeps the
    weights of some experts, and computes these for the tokens of all ranks.

    Their gradients are full, and :func:`deepsp.sync_gradients` leaves them alone. Save and load by
    :func:`deepsp.full_state_dict` and :func:`deepsp.load_full_state_dict`, whose tensors are those
    of the model before.

    Args:
        model: with the same weights on every rank; its experts' modules are changed. They compute
            as they did (``"eager"``, ``"grouped_mm"``, ...).
        group: the sequence group.

    Raises:
        ValueError: the model has no experts that transformers can give another implementation, has
            fewer than ranks, or its experts are sharded already.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    found = list(_experts_in(model))
    if not found:
        raise ValueError(
            f"expected a model with experts whose implementation transformers can choose, got "
            f"{type(model).__name__}, which has none; leave shard_experts out"
        )
    ALL_EXPERTS_FUNCTIONS.register(NAME, _forward)
    member = member_of(group)
    for name, module in found:
        if vars(module).get(SHARDS):
            raise ValueError(f"expected {name} not to be sharded yet; call shard_experts once")
        experts = DistributedExperts(lambda x, expert: x, module.num_experts, member)
        shards = {
            n: shard_rows(n, p.shape, member)
            for n, p in module.named_parameters(recurse=False)
            if p.dim() > 0 and p.size(0) == module.num_experts
        }
        for n, shard in shards.items():
            given = getattr(module, n)
            own = nn.Parameter(shard.take(given.detach()), requires_grad=given.requires_grad)
            setattr(module, n, own)
        vars(module)[SHARDS] = shards
        own = ALL_EXPERTS_FUNCTIONS.get_interface(
            module.config._experts_implementation, inspect.unwrap(type(module).forward)
        )
        object.__setattr__(module, "_deepsp_experts", (experts, own))
        module.num_experts = len(experts.experts)
    for config in {id(module.config): module.config for _, module in found}.values():
        config._experts_implementation = NAME


def _experts_in(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that transformers' ``use_experts_implementation`` has made."""
    for name, module in model.named_modules():
        if hasattr(module, "_is_expert_parallel") and hasattr(module, "num_experts"):
            yield name, module


def _forward(module: nn.Module, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Called by transformers for [T, E] tokens and [T, K] choices."""
    if not hasattr(module, "_deepsp_experts"):
        raise ValueError(
            f"expected the experts of {type(module).__name__} to be sharded, as experts_"
            f"implementation={NAME!r} needs; call deepsp.integrations.transformers.shard_experts"
        )
    if mixers.checks_now():  # each token alone
        return hidden * weights.sum(1, keepdim=True)
    if current.loss is not None and current.loss.average_gradients:
        raise ValueError(
            "expected register(average_gradients=False) with shard_experts, since a wrapper that "
            "averages gradients over the ranks doesn't know that those of experts are full; train "
            "in a loop with deepsp.sync_gradients"
        )
    experts, own = module._deepsp_experts

    def compute(x: Tensor, expert: Tensor) -> Tensor:
        if x.size(0) == 0:  # not every implementation takes none; ranks must all take part
            return x + sum(p.sum() * 0 for p in module.parameters())
        return own(module, x, expert[:, None], weights.new_ones(x.size(0), 1))

    experts.function = compute
    return experts(hidden, chosen, weights).to(hidden.dtype)
