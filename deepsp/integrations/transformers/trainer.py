"""``Trainer`` over sharded sequences: transformers' own, TRL's, or any other subclass.

Ranks that follow each other in number form a group that shares each batch. What differs from a
``Trainer`` of data ranks alone:

- the loader gives all ranks of a group the same batches (accelerate's loaders can do so);
- ``compute_loss`` shards the batch first, so no step of training or evaluation misses it;
- the loss is the full batch's on every rank, and its gradients are scaled for wrappers that average
  over all ranks (DDP, FSDP, DeepSpeed);
- what is counted over all processes counts each token once.

Nothing here touches the accelerator's own context parallelism, which would replace attention.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import DistributedType
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers import Trainer

from deepsp.data import shard_batch, unshard
from deepsp.groups import member_of, on_all_ranks
from deepsp.integrations.accelerate import share_batches
from deepsp.integrations.transformers import use_in
from deepsp.integrations.transformers.causal_lm import causal_lm_loss
from deepsp.integrations.transformers.own_loss import LocalLoss, computing
from deepsp.loss import cross_entropy

_DDP = [x for x in DistributedType if x.name.startswith("MULTI_")]


def sequence_parallel(trainer_class: type[Trainer]) -> type[Trainer]:
    """A subclass of ``trainer_class`` that trains on sharded sequences.

    The class takes two more arguments, by name. Everything else is as the class has it: with
    ``per_device_train_batch_size=b`` on N processes, a step trains on b * N / size samples.

    - ``sequence_parallel_size``: the number of ranks that share each batch, a divisor of the number
      of processes. None: ``cp_size`` (or ``sp_size``) of
      ``TrainingArguments.parallelism_config``.
    - ``without_logits``: computes the loss by :func:`deepsp.causal_lm_loss`, so that logits exist
      for a few tokens at a time only; not in an evaluation that asks for logits.

    Losses and gradient norms are those of the same training without sequence parallelism on
    N / size processes; evaluation losses and metrics those of one process with batches as large as
    those of all groups, in which repeated rows don't count. A causal language model trains on the
    loss of its full sequences, as its own ``labels`` loss in one process. ``compute_loss_func``
    gets the full logits and labels. A ``compute_loss`` of the class's own gets the local batch:
    ``shift_labels``, the token that each token is to predict, in place of ``labels``. It has to
    divide a sum over tokens by ``num_items_in_batch``, as TRL's ``SFTTrainer`` does, which is
    checked on every step.

    Args:
        trainer_class: transformers' ``Trainer`` or a subclass of it.

    Returns:
        The class. In ``compute_metrics`` and ``predict`` there are full logits; they take
        [B, S, V] of memory on every rank, so ask for them in evaluation only.

    Raises:
        ValueError: on making a trainer: ``without_logits`` with a class or function that computes
            the loss itself; the model isn't a causal language model of transformers, or
            computes something over tokens that isn't attention through deepsp
            (:func:`deepsp.integrations.transformers.check`); the size doesn't divide the number of
            processes; label smoothing with a class that computes its loss itself;
            ``predict_with_generate``. On a step: the class's loss isn't a sum that is divided by
            ``num_items_in_batch``; nothing says where the documents of a packed batch begin; ranks
            of a group have different batches.
    """
    if not (isinstance(trainer_class, type) and issubclass(trainer_class, Trainer)):
        raise ValueError(
            "expected trainer_class to be transformers' Trainer or a subclass, got "
            f"{trainer_class}; pass the class, sequence_parallel(SFTTrainer)(model, ...)"
        )
    if issubclass(trainer_class, _SequenceParallel):
        return trainer_class
    name = f"SequenceParallel{trainer_class.__name__}"
    return type(name, (_SequenceParallel, trainer_class), {"__doc__": sequence_parallel.__doc__})


class _SequenceParallel:
    """What :func:`sequence_parallel` puts before a class of trainers."""

    def __init__(
        self,
        *args,
        sequence_parallel_size: int | None = None,
        without_logits: bool = False,
        **kwargs,
    ):
        self._asked_size, self._without_logits = sequence_parallel_size, without_logits
        super().__init__(*args, **kwargs)
        if self._size > 1:
            self._prepare_model()

    # ---- ranks

    def _build_accelerator_args(self, **kwargs) -> dict[str, Any]:
        given = super()._build_accelerator_args(**kwargs)
        config = given.pop("parallelism_config", None)
        if config is not None and (config.tp_size > 1 or config.dp_replicate_size > 1):
            raise ValueError(
                "expected parallelism_config with cp_size and dp_shard_size only, got tp_size="
                f"{config.tp_size} and dp_replicate_size={config.dp_replicate_size}; leave them out"
            )
        if self._asked_size is None and config is not None:
            self._asked_size = max(config.cp_size, config.sp_size)
        return given

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self._group = share_batches(self.accelerator, self._asked_size)
        self._size = 1 if self._group is None else self._asked_size

    def get_cp_size(self) -> int:
        # As many ranks have the same batch. transformers counts tokens and batches by it.
        return self._size

    # ---- the model

    def _prepare_model(self) -> None:
        if getattr(self.args, "predict_with_generate", False):
            raise ValueError(
                "expected predict_with_generate=False: a cache would hold one rank's tokens only; "
                "generate after training, on a model with attn_implementation='sdpa'"
            )
        if self.args.eval_use_gather_object:
            raise ValueError(
                "expected eval_use_gather_object=False, got True; only tensors are gathered once "
                "for each group; leave it out"
            )
        if self.args.neftune_noise_alpha:
            raise ValueError(
                "expected neftune_noise_alpha=None, since the noise would be that of a rank's "
                f"length, which is too much, got {self.args.neftune_noise_alpha}; leave it out"
            )
        for name, given in (
            ("label_smoothing_factor", self.args.label_smoothing_factor),
            ("compute_loss_func", self.compute_loss_func),
        ):
            if given and self._has_own_loss():
                raise ValueError(
                    f"expected no {name}, since {self._loss_class().__name__} computes its loss "
                    f"itself, from the local batch, got {given}; leave it out"
                )
        if self._without_logits and (self._has_own_loss() or self.compute_loss_func is not None):
            raise ValueError(
                "expected without_logits=False where a class or compute_loss_func computes the "
                "loss itself, got True; leave it out"
            )
        use_in(self._base_model(), self._group)  # before the first step, and any wrapper

    def _wrap_model(self, model, training=True, dataloader=None):
        ddp = nn.parallel.DistributedDataParallel
        if (
            self._size > 1
            and training
            and self.accelerator.distributed_type in _DDP
            and not any(isinstance(module, ddp) for module in model.modules())
        ):
            # An evaluation may have come first and prepared the model without DDP. accelerate
            # prepares none twice, so no gradient would be reduced.
            for prepared in (model, self.model):
                vars(prepared).pop("_is_accelerate_prepared", None)
            self.model_wrapped = model = self.model
        return super()._wrap_model(model, training, dataloader)

    def _base_model(self) -> nn.Module:
        model = self.accelerator.unwrap_model(self.model)
        return model.get_base_model() if hasattr(model, "get_base_model") else model

    def _loss_class(self) -> type[Trainer]:
        """The class whose ``compute_loss`` comes after ours."""
        classes = type(self).__mro__
        after = classes[classes.index(_SequenceParallel) + 1 :]
        return next(c for c in after if "compute_loss" in vars(c))

    def _has_own_loss(self) -> bool:
        return self._loss_class() is not Trainer

    # ---- the loss

    def _prepare_context_parallel_inputs(self, model, inputs):
        if self._size > 1:
            return contextlib.nullcontext, inputs  # compute_loss does it
        return super()._prepare_context_parallel_inputs(model, inputs)

    def _get_num_items_in_batch(self, batch_samples, device):
        count = super()._get_num_items_in_batch(batch_samples, device)
        if isinstance(count, Tensor) and not self.args.average_tokens_across_devices:
            count = count * self._size  # nothing was gathered that had each token so often
        return count

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if self._size == 1:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        local, seq_lens = self._shard(inputs)
        labels = local.get("shift_labels")
        if labels is None:
            raise ValueError(
                f"expected a batch with labels, got {sorted(inputs)}; a collator adds them, such "
                "as DataCollatorForLanguageModeling(tokenizer, mlm=False)"
            )
        own = self._has_own_loss()
        averaged = self.args.average_tokens_across_devices
        if not model.training and (num_items_in_batch is None or not averaged):
            num_items_in_batch = self._count(labels, None)
        elif num_items_in_batch is None and own:
            num_items_in_batch = self._count(labels, self._group)
            if averaged:
                num_items_in_batch *= self.accelerator.num_processes // self._size
        if own:
            loss, outputs = self._theirs(model, local, num_items_in_batch, return_outputs)
        else:
            loss, outputs = self._ours(model, inputs, local, seq_lens, num_items_in_batch)
        if not model.training:
            loss = self._over_all(loss)
        if self._returns_outputs and self.compute_loss_func is None:
            outputs = self._gathered(outputs, seq_lens)
        return (loss, outputs) if return_outputs else loss

    def _count(self, labels: Tensor, group) -> Tensor:
        """The number of valid tokens over a group; None: over all processes, each of which has
        tokens of its own."""
        everyone = on_all_ranks([int((labels != -100).sum())], group, labels.device)
        return labels.new_tensor(sum(n for (n,) in everyone))

    def _over_all(self, loss: Tensor) -> Tensor:
        """In evaluation, what one process has for the batches of all data ranks."""
        rank, size, name = member_of(None)
        loss = torch.ops.deepsp.all_reduce(loss.detach(), "replicated", rank, size, name)
        averaged = self.args.average_tokens_across_devices or not self._has_own_loss()
        return loss / self.accelerator.num_processes if averaged else loss

    def _shard(self, inputs: Mapping[str, Any]) -> tuple[dict[str, Any], list[int]]:
        batch = dict(inputs)
        labels = batch.pop("labels", None)
        if labels is not None and batch.get("shift_labels") is None:
            # As transformers shifts them: documents of a row end where its collators say so.
            batch["shift_labels"] = F.pad(labels, (0, 1), value=-100)[..., 1:]
        local, seq_lens = shard_batch(batch, self._group)
        if 0 in seq_lens:
            raise ValueError(
                f"expected batches of at least {self._size} tokens, one for each rank of a group, "
                f"got {sum(seq_lens)}; pad them, or drop such samples"
            )
        return local, seq_lens

    def _ours(self, model, inputs, local, seq_lens, num_items_in_batch):
        """The loss of a model that returns logits."""
        counted = num_items_in_batch is not None
        arguments = {
            "reduction": "sum" if counted else "mean",
            "label_smoothing": self.args.label_smoothing_factor,
            "average_gradients": True,
        }
        if self._without_logits and not self._returns_outputs:
            loss, outputs = causal_lm_loss(model, local, self._group, **arguments), {}
        else:
            labels = local.pop("shift_labels")
            outputs = model(**local, use_cache=False)
            if self.compute_loss_func is None:
                loss = cross_entropy(outputs["logits"], labels, self._group, **arguments)
            else:
                outputs = self._gathered(outputs, seq_lens)
                loss = self.compute_loss_func(
                    outputs, inputs.get("labels"), num_items_in_batch=num_items_in_batch
                )
                loss = torch.ops.deepsp.scale_gradient(loss, float(self._size))
        if counted and self.compute_loss_func is None:
            loss = loss / num_items_in_batch
        if counted and (self.args.average_tokens_across_devices or not model.training):
            loss = loss * (self.accelerator.num_processes // self._size)
        return loss, outputs

    def _theirs(self, model, local, num_items_in_batch, return_outputs):
        """The loss of a class that computes it itself: a sum over the local tokens, divided by the
        number of all."""
        count = torch.as_tensor(num_items_in_batch, dtype=torch.float32, device=self.args.device)
        if model.training:
            count = count.detach().requires_grad_()  # so that its part in the loss can be seen
        if hasattr(self, "_tp_size"):
            # SFTTrainer divides by it what it counts over all processes, of full masks only.
            self._tp_size = self._size if "attention_mask" in local else 1
        # In evaluation, a class may call its model for the logits only, and drop that loss.
        with computing(self._base_model(), LocalLoss(None if model.training else count)):
            found = super().compute_loss(model, local, return_outputs, count)
        loss, outputs = found if return_outputs else (found, None)
        if not model.training:
            return loss, outputs
        if count > 0:
            self._check_loss(loss, count)
        rank, size, name = member_of(self._group)
        # A class that averages tokens has a share of the loss here, times all processes.
        averaged = self.args.average_tokens_across_devices
        loss = torch.ops.deepsp.scale_gradient(loss / size if averaged else loss, float(size))
        loss = torch.ops.deepsp.all_reduce(loss, "replicated", rank, size, name)
        return loss, outputs

    def _check_loss(self, loss: Tensor, count: Tensor) -> None:
        """Raises unless ``loss`` is a sum / ``count``: the mean of a rank's own tokens isn't."""
        (slope,) = torch.autograd.grad(loss, count, retain_graph=True, allow_unused=True)
        wrong = slope is None or not torch.allclose(-slope * count, loss.float(), rtol=1e-5)
        if any(n for (n,) in on_all_ranks([int(wrong)], self._group, self.args.device)):
            raise ValueError(
                f"expected compute_loss of {self._loss_class().__name__} to return a sum over "
                "tokens divided by num_items_in_batch, got a loss that isn't proportional to "
                "1 / num_items_in_batch; each rank has other tokens, so a mean of means, or a term "
                "that isn't divided, would be wrong"
            )

    def _gathered(self, outputs, seq_lens: list[int]):
        """Outputs of the full sequence."""
        length = seq_lens[dist.get_rank(self._group)]

        def gather(x: Tensor) -> Tensor:
            ours = x.dim() >= 2 and x.size(1) == length
            return unshard(x, 1, self._group, seq_lens) if ours else x

        return tree_map_only(Tensor, gather, outputs)

    # ---- evaluation

    _returns_outputs = False

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        if self._size == 1:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        if any(inputs.get(name) is not None for name in self.label_names):
            inputs = self._without_repeats(inputs)
            self._returns_outputs = not prediction_loss_only
            try:
                return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
            finally:
                self._returns_outputs = False
        with torch.no_grad(), self.compute_loss_context_manager():
            local, seq_lens = self._shard(self._prepare_inputs(inputs))
            outputs = model(**local, use_cache=False)
            if prediction_loss_only:
                return None, None, None
            return None, self._gathered(outputs, seq_lens)["logits"].detach(), None

    def _without_repeats(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Loaders fill the last batches of an epoch with samples from its begin, which evaluation
        drops from metrics: their labels don't count in the loss, either."""
        state = self.accelerator.gradient_state
        if not state.end_of_dataloader or state.remainder <= 0:
            return inputs
        inputs = dict(inputs)
        for name in ("labels", "shift_labels"):
            if isinstance(inputs.get(name), Tensor):
                labels = inputs[name].clone()
                first = self.accelerator.process_index // self._size * len(labels)
                labels[max(0, state.remainder - first) :] = -100
                inputs[name] = labels
        return inputs

    @property
    def gather_function(self):
        """What evaluation gathers losses, logits and labels with: the ranks of a group have the
        same, which count once."""
        if getattr(self, "_size", 1) == 1:
            return self._gather_function
        return self._gather_once

    @gather_function.setter
    def gather_function(self, function) -> None:
        self._gather_function = function

    def _gather_once(self, tensors):
        accelerator = self.accelerator
        everyone, processes = accelerator.gather, accelerator.num_processes

        def once(x: Tensor) -> Tensor:
            return x.unflatten(0, (processes, -1))[:: self._size].flatten(0, 1)

        accelerator.gather = lambda x: tree_map_only(Tensor, once, everyone(x))
        try:
            return self._gather_function(tensors)
        finally:
            del accelerator.gather

    # ---- counts

    def _track_num_input_tokens(self, inputs) -> None:
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)
        more = self.state.num_input_tokens_seen - before
        self.state.num_input_tokens_seen = before + more // self._size

    def floating_point_ops(self, inputs):
        return super().floating_point_ops(inputs) / self._size


class SequenceParallelTrainer(_SequenceParallel, Trainer):
    """transformers' ``Trainer`` on sharded sequences: :func:`sequence_parallel` of it, which says
    what its numbers are.

    Args:
        args: those of ``Trainer``, by place.
        kwargs: those of ``Trainer``, by name.
        sequence_parallel_size: the number of ranks that share each batch, a divisor of the number
            of processes. None: ``cp_size`` of ``TrainingArguments.parallelism_config``.
        without_logits: computes the loss by :func:`deepsp.causal_lm_loss`.

    Raises:
        ValueError: as :func:`sequence_parallel`.
    """
