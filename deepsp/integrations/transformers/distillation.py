"""TRL's DistillationTrainer and GKDTrainer over sharded sequences: student and teacher run on this
rank's tokens, and the student's head computes the divergence, so that no rank has logits."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from deepsp.integrations.door import replaced
from deepsp.integrations.transformers.forward import full_rows_of
from deepsp.integrations.transformers.rows import FullRows
from deepsp.integrations.transformers.steps import Compute, FullStep
from deepsp.integrations.transformers.trl import RowsStep
from deepsp.loss.divergence import linear_kl
from deepsp.ranks.randomness import align
from deepsp.weights.partitioned import is_away


class _Divergence:
    """The divergence of a student from its teacher, computed in the student's head.

    Args:
        accelerator: the trainer's.
        teacher: prepared by the trainer.
        how: ``beta`` and ``temperature`` of :func:`deepsp.linear_kl`.
    """

    def __init__(self, accelerator: Any, teacher: nn.Module, **how: Any):
        self.accelerator, self.teacher, self.how = accelerator, teacher, how
        inner = accelerator.unwrap_model(teacher)
        self.frees_weights = any(isinstance(m, FSDPModule) for m in inner.modules())
        self.frees_weights |= any(map(is_away, inner.parameters()))

    def __call__(
        self, student: nn.Module, batch: Mapping[str, Any], items: Any
    ) -> tuple[Tensor, Tensor]:
        """The loss of full rows, and the sum of the student's entropy.

        Args:
            student: in its wrapper.
            batch: arguments of both models, with labels where tokens count.
            items: the divisor of the loss; None: the number of these tokens.
        """
        if items is None:
            items = (batch["labels"][:, 1:] != -100).sum().clamp(min=1)
        self.teacher.eval()
        with torch.no_grad(), self._in_head(self.teacher, self._keep):
            self.teacher(**batch)
        with self._in_head(student, self._compare):
            loss = student(**batch, num_items_in_batch=items).loss
        return loss, self.entropy

    @contextlib.contextmanager
    def _in_head(self, model: nn.Module, function: Any):
        rows: FullRows = full_rows_of(self.accelerator.unwrap_model(model))
        changes = {"in_head": function, "without_logits": True, "outputs": "loss"}
        with contextlib.ExitStack() as stack:
            for name, value in changes.items():
                stack.enter_context(replaced(rows, name, value))
            yield

    def _keep(self, hidden: Tensor, weight: Tensor, labels, bias, *, softcap, scale, **_) -> Tensor:
        kept = [x if x is None else x.detach() for x in (hidden, weight, bias)]
        if self.frees_weights:
            kept[1:] = [x if x is None else x.clone() for x in kept[1:]]
        self.teacher_head = (*kept, softcap, scale)
        return hidden.new_zeros(())

    def _compare(self, hidden, weight, labels, bias, *, label_smoothing, **how) -> Tensor:
        teacher_hidden, teacher_weight, teacher_bias, softcap, scale = self.teacher_head
        how |= {**self.how, "teacher_softcap": softcap, "teacher_scale": scale, "entropy": True}
        teacher = (teacher_hidden, teacher_weight)
        kl, self.entropy = linear_kl(hidden, weight, *teacher, labels, bias, teacher_bias, **how)
        return kl


class DistilledStep(RowsStep):
    """A step of TRL's DistillationTrainer."""

    def loss(self, compute: Compute, model, inputs, return_outputs: bool, count) -> Any:
        trainer = self.run.trainer
        if trainer.teacher_model is None:  # a server's
            return super().loss(compute, model, inputs, return_outputs, count)
        with replaced(trainer, "_forward_redirection", self._computed):
            return super().loss(compute, model, inputs, return_outputs, count)

    def _computed(self, student, inner, method, _, inputs, items) -> tuple[Tensor, Tensor, Tensor]:
        """The loss, the sum of the student's entropy, and the number of tokens, as ``method`` of
        TRL's returns them."""
        trainer = self.run.trainer
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        counted = inputs["completion_mask"] * inputs.get("tool_mask", 1) != 0
        labels = torch.full_like(ids, -100)
        size = counted.size(1)
        labels[:, -size:] = ids[:, -size:].masked_fill(~counted, -100)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        taken = full_rows_of(inner).inputs  # images, say
        batch = {n: x for n, x in inputs.items() if n in taken}
        batch |= {"input_ids": ids, "attention_mask": mask, "labels": labels}
        divergence = _Divergence(
            trainer.accelerator,
            trainer.teacher_model,
            beta=trainer.beta,
            temperature=trainer.temperature,
        )
        return *divergence(student, batch, items), counted.sum()


class GKDStep(FullStep):
    """A step of TRL's GKDTrainer."""

    def step(self, step: Any, model, inputs, count) -> Tensor:
        align(self.run.groups.member)  # it draws whether to generate
        return super().step(step, model, inputs, count)

    def loss(self, compute: Compute, model, inputs, return_outputs: bool, count) -> Any:
        own = partial(self._with_logits, compute) if self.run.returns_outputs else self._computed
        return super().loss(own, model, inputs, return_outputs, count)

    def _with_logits(self, compute: Compute, model, inputs, return_outputs: bool, items) -> Any:
        """TRL's, in an evaluation: a sum over the group's tokens, which is averaged over groups."""
        loss, outputs = compute(model, inputs, True, items)
        loss = loss * self.run.groups.number
        return (loss, outputs) if return_outputs else loss

    def _computed(self, model, inputs, return_outputs: bool, items) -> Any:
        trainer = self.run.trainer
        batch = {n: inputs[n] for n in ("input_ids", "attention_mask", "labels")}
        # Its temperature is that of sampling only.
        divergence = _Divergence(trainer.accelerator, trainer.teacher_model, beta=trainer.beta)
        loss, _ = divergence(model, batch, items)
        return (loss, {}) if return_outputs else loss
