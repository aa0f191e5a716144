"""Trainers of models whose experts :func:`shard_experts` has dealt out over the sequence's ranks.

DDP averages parameters over all ranks, and the ranks of a group hold different experts. So DDP
leaves experts alone, and the trainer averages their gradients over the data ranks, which hold the
same ones. A gradient of an expert is that of all tokens of a group, times the group's size, as the
loss scales it for DDP: its sum over the data ranks, divided by the number of processes, is what DDP
makes of a parameter that is replicated."""

from __future__ import annotations

import torch
from accelerate import DistributedType
from torch import Tensor, nn

from deepsp.gradients import clip_grad_norm_
from deepsp.integrations.transformers.experts import dealt_in
from deepsp.ranks.groups import Member, member_of, ranks_of
from deepsp.weights.replicated import compare
from deepsp.weights.shard_gradient import plain
from deepsp.weights.state import full_state_dict

DDP = [x for x in DistributedType if x.name.startswith("MULTI_")]
"""The types of accelerators that wrap models in DDP."""


class DealtExperts:
    """The part of :func:`deepsp.integrations.transformers.sequence_parallel` that trains and saves
    sharded experts."""

    _experts: tuple[Tensor, ...] = ()

    def _prepare_experts(self) -> None:
        """Finds sharded experts, before any wrapper."""
        found = dealt_in(self.model)
        if not found:
            return
        base, name = self._base_model(), found[0][0]
        if base is not self.model:
            raise ValueError(
                f"expected a model without adapters, since experts of {name} are sharded and "
                "adapters would be saved without them, got "
                f"{type(self.model).__name__}; leave shard_experts out"
            )
        if self.model_init is not None:
            raise ValueError(
                f"expected a model in place of model_init, since experts of {name} are sharded, "
                "and train() would make another one, got model_init; pass model=model_init()"
            )
        kind = self.accelerator.distributed_type
        if kind not in DDP:
            raise ValueError(
                f"expected DDP around a model whose experts are sharded ({name}), got {kind.name}, "
                "which would shard or average the ranks' different experts; leave its config out, "
                "or train in a loop with deepsp.sync_gradients"
            )
        ranks = ranks_of(member_of(self._group)[2])
        for n, _, dealt in found:
            if (own := ranks_of(dealt.experts.member[2])) != ranks:
                raise ValueError(
                    f"expected the experts of {n} to be sharded over the ranks of the sequence, "
                    f"{ranks}, got {own}; call shard_experts with their group, such as "
                    f"init_device_mesh('cpu', ({self._groups}, {self._size}), "
                    "mesh_dim_names=('data', 'sequence'))['sequence']"
                )
            dealt.averages = True
        self._check_checkpoints()
        trained = {n: p for n, p in _parameters(found).items() if p.requires_grad}
        self._experts = tuple(trained.values())
        self._data_ranks: Member = member_of(self.accelerator._prepare_device_mesh()["dp_shard"])
        compare(_parameters(found).items(), self._data_ranks)  # DDP doesn't broadcast them
        nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
            self.model, list(_parameters(found))
        )

    def _check_checkpoints(self) -> None:
        args = self.args
        if args.save_strategy != "no" and not args.save_only_model:
            raise ValueError(
                "expected save_only_model=True or save_strategy='no' with sharded experts, since "
                "a checkpoint has the optimizer's state of one rank's experts only, got "
                f"save_strategy={str(args.save_strategy)!r}; save_model() saves all experts"
            )
        if args.load_best_model_at_end:
            raise ValueError(
                "expected load_best_model_at_end=False with sharded experts, got True; load the "
                "checkpoint after training, by from_pretrained"
            )

    def train(self, resume_from_checkpoint=None, *args, **kwargs):
        if resume_from_checkpoint and dealt_in(self.model):
            raise ValueError(
                "expected no resume_from_checkpoint with sharded experts, whose optimizer states "
                f"no checkpoint has, got {resume_from_checkpoint!r}; load the model from it by "
                "from_pretrained, call shard_experts, and train anew"
            )
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        if self._experts and self.accelerator.sync_gradients:
            rank, size, name = self._data_ranks
            gradients = [plain(p.grad) for p in self._experts if p.grad is not None]
            with torch.no_grad():
                if size > 1:
                    torch.ops.deepsp._sum_gradients_(gradients, rank, size, name)
                torch._foreach_div_(gradients, self.accelerator.num_processes)
        return loss

    def _clip_grad_norm(self, model):
        if not self._experts:
            return super()._clip_grad_norm(model)
        return self._norm(self.args.max_grad_norm)

    def _get_grad_norm(self, model, grad_norm=None):
        if self._experts and grad_norm is None:
            grad_norm = self._norm(float("inf"))
        return super()._get_grad_norm(model, grad_norm=grad_norm)

    def _norm(self, largest: float) -> Tensor:
        """The norm of the full gradient, which is clipped."""
        self.accelerator.unscale_gradients()
        return clip_grad_norm_(self._base_model(), largest)

    def _save(self, output_dir=None, state_dict=None):
        if state_dict is None and dealt_in(self.model):
            state_dict = full_state_dict(self._base_model())  # every rank calls it
        super()._save(output_dir, state_dict)

    def _save_optimizer_and_scheduler(self, output_dir):
        if dealt_in(self.model):
            self._check_checkpoints()
        super()._save_optimizer_and_scheduler(output_dir)


def _parameters(found) -> dict[str, Tensor]:
    """The parameters of modules, by their names in the model."""
    return {
        f"{prefix}.{name}": p
        for prefix, module, _ in found
        for name, p in module.named_parameters()
    }
