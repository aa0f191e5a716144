"""Trainers of models whose experts :func:`shard_experts` has dealt out over the sequence's ranks.

DDP averages parameters over all ranks, and the ranks of a group hold different experts. So DDP
leaves experts alone, and the accelerator averages their gradients over the data ranks, which hold
the same ones. A gradient of an expert is that of all tokens of a group, times the group's size, as
the loss scales it for DDP: its sum over the data ranks, divided by the number of processes, is what
DDP makes of a parameter that is replicated."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import DistributedType
from torch import Tensor, nn

from deepsp.gradients import clip_grad_norm_
from deepsp.integrations.grouped import GroupedAccelerator
from deepsp.integrations.transformers.experts import dealt_in
from deepsp.integrations.transformers.steps import Run
from deepsp.ranks.groups import Member, ranks_of
from deepsp.weights.replicated import compare
from deepsp.weights.shard_gradient import plain

DDP = [x for x in DistributedType if x.name.startswith("MULTI_")]
"""The types of accelerators that wrap models in DDP."""


class TrainerAccelerator(GroupedAccelerator):
    """That of a trainer."""

    sequence_experts: tuple[Tensor, ...] = ()
    """Trained parameters of sharded experts."""
    sequence_data_ranks: Member
    """The ranks that hold the same experts as this one."""

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        super().backward(loss, **kwargs)
        if self.sequence_experts and self.sync_gradients:
            rank, size, name = self.sequence_data_ranks
            gradients = [plain(p.grad) for p in self.sequence_experts if p.grad is not None]
            with torch.no_grad():
                if size > 1:
                    torch.ops.deepsp._sum_gradients_(gradients, rank, size, name)
                torch._foreach_div_(gradients, self.state.num_processes)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        if not self.sequence_experts:
            return super().clip_grad_norm_(parameters, max_norm, norm_type)
        self.unscale_gradients()
        return clip_grad_norm_(parameters, max_norm, norm_type)  # that of the full gradient


def prepare_experts(run: Run) -> None:
    """Finds sharded experts of a trainer's model, before any wrapper."""
    trainer, groups = run.trainer, run.groups
    modules = dealt_in(trainer.model)
    if not modules:
        return
    name, kind = modules[0][0], trainer.accelerator.distributed_type
    if run.base is not trainer.model:
        raise ValueError(
            f"expected a model without adapters, since experts of {name} are sharded and adapters "
            f"would be saved without them, got {type(trainer.model).__name__}; leave "
            "shard_experts out"
        )
    if trainer.model_init is not None:
        raise ValueError(
            f"expected a model in place of model_init, since experts of {name} are sharded, and "
            "train() would make another one, got model_init; pass model=model_init()"
        )
    if kind not in DDP:
        raise ValueError(
            f"expected DDP around a model whose experts are sharded ({name}), got {kind.name}, "
            "which would shard or average the ranks' different experts; leave its config out, or "
            "train in a loop with deepsp.sync_gradients"
        )
    ranks = ranks_of(groups.member[2])
    for n, _, dealt in modules:
        if (group_ranks := ranks_of(dealt.experts.member[2])) != ranks:
            raise ValueError(
                f"expected the experts of {n} to be sharded over the ranks of the sequence, "
                f"{ranks}, got {group_ranks}; call shard_experts with their group, such as "
                f"init_device_mesh('cpu', ({groups.number}, {groups.size}), "
                "mesh_dim_names=('data', 'sequence'))['sequence']"
            )
        dealt.averages = True
    check_checkpoints(trainer.args)
    parameters = {
        f"{prefix}.{name}": p
        for prefix, module, _ in modules
        for name, p in module.named_parameters()
    }
    accelerator = trainer.accelerator
    accelerator.sequence_experts = tuple(p for p in parameters.values() if p.requires_grad)
    accelerator.sequence_data_ranks = groups.make_data_group()
    compare(parameters.items(), accelerator.sequence_data_ranks)  # DDP doesn't broadcast them
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        trainer.model, list(parameters)
    )


def check_checkpoints(args, resumed: Any = None) -> None:
    """Raises for checkpoints of sharded experts that have an optimizer's state."""
    if args.save_strategy != "no" and not args.save_only_model:
        raise ValueError(
            "expected save_only_model=True or save_strategy='no' with sharded experts, since a "
            "checkpoint has the optimizer's state of one rank's experts only, got save_strategy="
            f"{str(args.save_strategy)!r}; save_model() saves all experts"
        )
    if args.load_best_model_at_end:
        raise ValueError(
            "expected load_best_model_at_end=False with sharded experts, got True; load the "
            "checkpoint after training, by from_pretrained"
        )
    if resumed:
        raise ValueError(
            "expected no resume_from_checkpoint with sharded experts, whose optimizer states no "
            f"checkpoint has, got {resumed!r}; load the model from it by from_pretrained, call "
            "shard_experts, and train anew"
        )
