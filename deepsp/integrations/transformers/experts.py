"""Experts of transformers' mixtures on the ranks that share the sequence, through transformers' own
registry of implementations."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from deepsp.integrations.transformers.forward import running
from deepsp.ranks.groups import Group, member_of, ranks_of
from deepsp.sequence.experts.module import DEALT, DistributedExperts
from deepsp.weights.rows import SHARDS, shard_rows
from deepsp.weights.shard_gradient import mark, shard_member

NAME = "deepsp"
"""The name of the implementation."""


@dataclass
class Dealt:
    """What :func:`shard_experts` adds to a module of experts."""

    experts: DistributedExperts
    compute: Callable
    """The module's implementation before."""
    averages: bool = False
    """Whether a trainer averages the gradients as DDP does those of other parameters."""
    ddp: nn.Module | None = None
    """The DistributedDataParallel that has been found to leave the experts alone."""


def shard_experts(model: nn.Module, group: Group = None) -> None:
    """Deals the experts of a model of transformers out over a sequence group: each rank keeps the
    weights of some experts, and computes these for the tokens of all ranks.

    Their gradients are full, and :func:`deepsp.sync_gradients` leaves them alone. Save and load by
    :func:`deepsp.full_state_dict` and :func:`deepsp.load_full_state_dict`, whose tensors are those
    of the model before; ``model.save_pretrained`` takes the former as ``state_dict``.

    :func:`deepsp.integrations.transformers.sequence_parallel` trains such a model under DDP. In a
    loop of your own, wrappers over ranks of the group must leave experts alone: pass
    ``ignored_params`` to ``fully_shard``, and give DDP the group of the data ranks.

    Args:
        model: with the same weights on every rank; its experts' modules are changed. They compute
            as they did (``"eager"``, ``"grouped_mm"``, ...).
        group: the sequence group.

    Raises:
        ValueError: the model has no experts that transformers can give another implementation, has
            fewer than ranks, or its experts are sharded already. The model's forward raises for
            wrappers that would average different experts.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    modules = list(_experts_in(model))
    if not modules:
        raise ValueError(
            f"expected a model with experts whose implementation transformers can choose, got "
            f"{type(model).__name__}, which has none; leave shard_experts out"
        )
    ALL_EXPERTS_FUNCTIONS.register(NAME, _forward)
    member = member_of(group)
    for name, module in modules:
        if vars(module).get(SHARDS):
            raise ValueError(f"expected {name} not to be sharded yet; call shard_experts once")
        experts = DistributedExperts(lambda x, expert: x, module.num_experts, member)
        shards = {
            n: shard_rows(n, p.shape, member)
            for n, p in module.named_parameters(recurse=False)
            if p.dim() > 0 and p.size(0) == module.num_experts
        }
        for n, shard in shards.items():
            full = getattr(module, n)
            part = nn.Parameter(shard.take(full.detach()), requires_grad=full.requires_grad)
            mark(part, member)
            setattr(module, n, part)
        vars(module)[SHARDS] = shards
        function = ALL_EXPERTS_FUNCTIONS.get_interface(
            module.config._experts_implementation, inspect.unwrap(type(module).forward)
        )
        object.__setattr__(module, DEALT, Dealt(experts, function))
        module.num_experts = len(experts.experts)
    if hasattr(model, "save_pretrained"):
        model.save_pretrained = functools.partial(_save_pretrained, model)
    for config in {id(module.config): module.config for _, module in modules}.values():
        config._experts_implementation = NAME


def _experts_in(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that transformers' ``use_experts_implementation`` has made."""
    for name, module in model.named_modules():
        if hasattr(module, "_is_expert_parallel") and hasattr(module, "num_experts"):
            yield name, module


def dealt_in(model: nn.Module) -> list[tuple[str, nn.Module, Dealt]]:
    """Names and modules whose experts are sharded."""
    every = ((n, m, getattr(m, DEALT, None)) for n, m in model.named_modules())
    return [(n, m, dealt) for n, m, dealt in every if dealt is not None]


def refuse_dealt(model: nn.Module, where: str, advice: str) -> None:
    """
    Raises:
        ValueError: experts of the model are sharded.
    """
    if dealt := [x for x in dealt_in(model) if x[2].experts.member[1] > 1]:
        raise ValueError(
            f"expected a model whose experts aren't sharded {where}, got {dealt[0][0]}, which "
            f"shard_experts has sharded; {advice}"
        )


def _save_pretrained(model: nn.Module, *args, state_dict=None, **kwargs):
    if state_dict is None:
        raise ValueError(
            f"expected a state_dict in save_pretrained of {type(model).__name__}, since this rank "
            "holds a part of its experts only, got None; pass state_dict=deepsp.full_state_dict("
            "model), which every rank calls"
        )
    return type(model).save_pretrained(model, *args, state_dict=state_dict, **kwargs)


@_disable_dynamo
def _check_wrappers(module: nn.Module, dealt: Dealt) -> None:
    """Raises if a wrapper would average the gradients of different experts."""
    _, size, group = dealt.experts.member
    if size == 1:
        return
    if nn.utils.parametrize.is_parametrized(module):
        raise ValueError(
            f"expected no adapters on the experts of {type(module).__name__}, which shard_experts "
            "has dealt out, got some: each rank would have those of other experts, and "
            "deepsp.sync_gradients would add them up; adapt other modules (target_modules=["
            "'q_proj', ...] without target_parameters), or leave shard_experts out"
        )
    trained = [(n, p) for n, p in module.named_parameters(recurse=False) if p.requires_grad]
    for n, p in trained:
        if vars(module)[SHARDS].get(n) is not None and shard_member(p) is None:
            raise ValueError(
                f"expected {n} of {type(module).__name__} to be the parameter that shard_experts "
                "made, got another: FSDP would shard each rank's different experts as if they were "
                "the same. Pass ignored_params={the parameters of experts} to fully_shard (and "
                "call shard_experts after copy.deepcopy, not before)"
            )
    ddp = nn.parallel.DistributedDataParallel._active_ddp_module
    if ddp is None or ddp is dealt.ddp:
        return
    common = set(ranks_of(group)) & set(dist.get_process_group_ranks(ddp.process_group))
    reduced = set(map(id, ddp._module_parameters))
    if len(common) > 1 and any(id(p) in reduced for _, p in trained):
        raise ValueError(
            f"expected DistributedDataParallel to leave experts of {type(module).__name__} alone, "
            "whose ranks hold different ones, got one that averages their gradients; give it the "
            "group of the data ranks and call deepsp.sync_gradients, or use "
            "SequenceParallelTrainer"
        )
    dealt.ddp = ddp


def _forward(module: nn.Module, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Called by transformers for [T, E] tokens and [T, K] choices."""
    dealt: Dealt | None = getattr(module, DEALT, None)
    if dealt is None:
        raise ValueError(
            f"expected the experts of {type(module).__name__} to be sharded, as experts_"
            f"implementation={NAME!r} needs; call deepsp.integrations.transformers.shard_experts"
        )
    call = running.forward
    if call.is_check:  # each token alone
        return hidden * weights.sum(1, keepdim=True)
    if call.loss is not None and call.loss.average_gradients and not dealt.averages:
        raise ValueError(
            "expected register(average_gradients=False) with shard_experts, since a wrapper that "
            "averages gradients over the ranks doesn't know that those of experts are full; train "
            "by SequenceParallelTrainer, or in a loop with deepsp.sync_gradients"
        )
    _check_wrappers(module, dealt)

    def compute(x: Tensor, expert: Tensor) -> Tensor:
        if x.size(0) == 0:  # not every implementation takes none; ranks must all take part
            return x + sum(p.sum() * 0 for p in module.parameters())
        return dealt.compute(module, x, expert[:, None], weights.new_ones(x.size(0), 1))

    dealt.experts.function = compute
    return dealt.experts(hidden, chosen, weights).to(hidden.dtype)
