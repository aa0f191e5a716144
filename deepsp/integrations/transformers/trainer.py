"""``Trainer`` over sharded sequences: transformers' own, TRL's, or any other subclass.

Consecutive ranks form a group that shares each batch. Differences from a ``Trainer`` with data
ranks alone:

- the loader gives all ranks of a group the same batches (accelerate's loaders can do so);
- ``compute_loss`` shards the batch first, in every step of training and evaluation;
- the loss is the full batch's on every rank, and its gradients are scaled for wrappers that average
  over all ranks (DDP, FSDP, DeepSpeed);
- counts over all processes count each token once.

The accelerator's own context parallelism, which would replace attention, isn't used.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import seed_worker

from deepsp.data.sharding import unshard
from deepsp.integrations.accelerate import share_batches
from deepsp.integrations.transformers.causal_lm import causal_lm_loss
from deepsp.integrations.transformers.class_loss import OneProcess, class_loss
from deepsp.integrations.transformers.compiled import Compiled
from deepsp.integrations.transformers.dealt_experts import DDP, DealtExperts
from deepsp.integrations.transformers.experts import refuse_dealt
from deepsp.integrations.transformers.local_inputs import LocalInputs
from deepsp.integrations.transformers.own_batches import OwnBatches
from deepsp.integrations.transformers.preference import TRAINERS, Preference, trl_class
from deepsp.integrations.transformers.refusals import Refusals
from deepsp.integrations.transformers.registration import base_of, use_in
from deepsp.loss import cross_entropy
from deepsp.ranks.groups import Member, member_of, on_all_ranks
from deepsp.ranks.randomness import align, randomness_of_a_model

_OF_TRL = ("SFTTrainer", "_BaseTrainer", "BaseTrainer")


def sequence_parallel(trainer_class: type[Trainer]) -> type[Trainer]:
    """A subclass of ``trainer_class`` that trains on sharded sequences.

    The class takes four more arguments, by name. With ``per_device_train_batch_size=b`` on N
    processes, a step trains on b * N / size samples.

    - ``sequence_parallel_size``: the number of ranks over which a batch is sharded, a divisor of
      the number of processes. None: ``cp_size`` (or ``sp_size``) of
      ``TrainingArguments.parallelism_config``. If the model is tensor-parallel, loaded with
      ``DistributedConfig(tp_size=T, fsdp_size=N / T)``, T times as many ranks share each batch.
    - ``without_logits``: computes the loss by :func:`deepsp.causal_lm_loss`, so that logits exist
      only for a few tokens at a time; not in an evaluation that needs logits. TRL's trainers do so
      anyway.
    - ``query_parts``: as in :func:`deepsp.distributed_attention`.
    - ``mix_lengths``: trains on documents that are dealt out over the ranks, as by
      :func:`deepsp.deal_batch`, so that ranks share only those that are long. Evaluation shards
      batches as without it.
    - ``own_batches``: each rank loads b rows of its own, as without groups, so that a step trains
      on b * N samples. The group trains on its ranks' batches in turns, as
      :class:`deepsp.SequenceLoader` gives them, or, with ``mix_lengths``, on all at once. Steps
      equal those of the same training on N processes. Evaluation shares batches as without it.
    - ``deal_images``: as in :func:`deepsp.integrations.transformers.register`, for a
      vision-language model.
    - ``compiled``: runs the model by the compile pass, ``torch.compile(model, backend="deepsp",
      fullgraph=True)``, with full batches. For models other than causal language models: masked
      ones, classifiers, encoders with decoders. True, or a dict of the pass's options
      (``inner``, ``memory_budget``, ``chunks``) and ``seq_dim``, the dimension of the sequence in a
      batch's tensors. Losses and metrics are those of the same trainer on N / size processes.

    Losses and gradient norms are those of the same training without sequence parallelism on
    N / size processes. Evaluation losses and metrics are those of one process with batches as large
    as those of all groups, and repeated rows don't count. A causal language model trains on the
    loss of its full sequences, as its own ``labels`` loss in one process. ``compute_loss_func``
    gets the full logits and labels. A class's own ``compute_loss`` gets the local batch: in place
    of ``labels``, ``shift_labels``, the next token of each token. It must divide a sum over tokens
    by ``num_items_in_batch``, as TRL's ``SFTTrainer`` does; every step checks that. TRL's
    ``DPOTrainer``, ``KTOTrainer``, ``GRPOTrainer`` and ``RLOOTrainer`` get full batches: their
    models shard the rows, and return the log-probabilities of all tokens on every rank. A group
    generates completions once, and its metrics count once.

    Args:
        trainer_class: transformers' ``Trainer`` or a subclass of it.

    Returns:
        The class. ``compute_metrics`` and ``predict`` get full logits; they take [B, S, V] of
        memory on every rank.

    Raises:
        ValueError: when a trainer is made: ``without_logits`` with a class or function that
            computes the loss itself; the model isn't a causal language model of transformers, or
            mixes tokens other than by attention through deepsp
            (:func:`deepsp.integrations.transformers.check`); the size doesn't divide the number of
            processes; label smoothing with a class that computes its loss itself;
            ``predict_with_generate``; ``compiled`` with FSDP, DeepSpeed, a class of TRL,
            ``without_logits`` or ``mix_lengths``; ``mix_lengths`` with a vision-language model, or
            ``deal_images`` without one; ``own_batches`` with ``compiled``,
            ``compute_loss_func``, ``average_tokens_across_devices=False``, ``even_batches=False``
            or a model that has ``accepts_loss_kwargs=False``; vLLM, tools and other things that a
            preference or RL trainer can't do; experts that
            :func:`deepsp.integrations.transformers.shard_experts` has sharded over other ranks, or
            with adapters, FSDP, DeepSpeed or checkpoints that have an optimizer's state. On a step:
            the class's loss isn't a sum divided by ``num_items_in_batch``; the compile pass can't
            shard the model; a packed batch doesn't show where its documents begin; ranks of a group
            have different batches.
    """
    if not (isinstance(trainer_class, type) and issubclass(trainer_class, Trainer)):
        raise ValueError(
            "expected trainer_class to be transformers' Trainer or a subclass, got "
            f"{trainer_class}; pass the class, sequence_parallel(SFTTrainer)(model, ...)"
        )
    if issubclass(trainer_class, _SequenceParallel):
        return trainer_class
    for cls in trainer_class.__mro__:
        if cls.__module__.split(".")[0] == "trl" and cls.__name__ not in (*_OF_TRL, *TRAINERS):
            raise ValueError(
                "expected trainer_class to be transformers' Trainer, TRL's SFTTrainer, "
                f"{', '.join(TRAINERS)} or a subclass of these, got {trainer_class.__name__}: "
                f"{cls.__name__} of TRL calls its model in ways that aren't supported over sharded "
                "sequences; write its loss in a loop of your own, with deepsp.token_log_probs"
            )
    name = f"SequenceParallel{trainer_class.__name__}"
    bases = (_SequenceParallel, trainer_class)
    if trl_class(trainer_class) is not None:
        bases = (Preference, *bases)
    return type(name, bases, {"__doc__": sequence_parallel.__doc__})


class _SequenceParallel(Refusals, DealtExperts, Compiled, LocalInputs, OwnBatches):
    """:func:`sequence_parallel` puts this class before a class of trainers."""

    _is_made = False

    def __init__(
        self,
        *args,
        sequence_parallel_size: int | None = None,
        without_logits: bool = False,
        query_parts: int | str = "auto",
        mix_lengths: bool = False,
        compiled: bool | Mapping[str, Any] = False,
        own_batches: bool = False,
        deal_images: bool = False,
        **kwargs,
    ):
        self._asked_size, self._without_logits = sequence_parallel_size, without_logits
        self._query_parts, self._mix_lengths = query_parts, mix_lengths
        if compiled or isinstance(compiled, Mapping):
            self._compiled = dict(compiled) if isinstance(compiled, Mapping) else {}
        self._asked_own_batches, self._deal_images = own_batches, deal_images
        super().__init__(*args, **kwargs)
        self._is_made = True
        if self._size == 1:
            advice = "pass sequence_parallel_size, the number of ranks that share them"
            refuse_dealt(self.model, "with sequence_parallel_size=1", advice)
        if self._size > 1:
            self._prepare_model()
            self.add_callback(_AlikeGenerators(self._alike()))

    # ---- ranks

    def _build_accelerator_args(self, **kwargs) -> dict[str, Any]:
        given = super()._build_accelerator_args(**kwargs)
        config = given.pop("parallelism_config", None)
        self._tensor_size = getattr(self.model, "tp_size", None) or 1
        if config is None:
            return given
        self._check_parallelism(config)
        if self._asked_size is None:
            self._asked_size = max(config.cp_size, config.sp_size)
        return given

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self._group = share_batches(self.accelerator, self._asked_size, self._tensor_size)
        self._size = 1 if self._group is None else self._asked_size
        self._shared = self._size * self._tensor_size
        if self._size > 1:
            self._member = member_of(self._group)
            self._groups = self.accelerator.num_processes // self._shared
            self._own_batches = self._asked_own_batches

    def _alike(self) -> Member:
        """The ranks whose default generators are alike."""
        return member_of(None)

    def get_cp_size(self) -> int:
        # transformers counts tokens and batches by the number of ranks with the same batch.
        return 1 if self._compiled is not None else self._size

    # ---- the model

    def _prepare_model(self) -> None:
        self._check_arguments()
        self._use(self.model)
        self._prepare_experts()

    def _use(self, model: nn.Module) -> None:
        """Lets a model attend to full sequences, before the first step and any wrapper."""
        if self._compiled is not None:
            self._compile(model, self._group, self._query_parts)
        else:
            options = {"query_parts": self._query_parts, "deal_images": self._deal_images}
            use_in(base_of(model), self._group, **options)

    def call_model_init(self, trial=None) -> nn.Module:
        model = super().call_model_init(trial)
        if self._is_made and self._size > 1:  # train() makes a new model
            self._use(model)
        return model

    def _wrap_model(self, model, training=True, dataloader=None):
        ddp = nn.parallel.DistributedDataParallel
        if (
            self._size > 1
            and training
            and self.accelerator.distributed_type in DDP
            and not any(isinstance(module, ddp) for module in model.modules())
        ):
            # An evaluation may have prepared the model without DDP. accelerate prepares no model
            # twice, so no gradient would be reduced.
            for prepared in (model, self.model):
                vars(prepared).pop("_is_accelerate_prepared", None)
            self.model_wrapped = model = self.model
        return super()._wrap_model(model, training, dataloader)

    def _base_model(self) -> nn.Module:
        return base_of(self.accelerator.unwrap_model(self.model))

    def _loss_class(self) -> type[Trainer]:
        """The class whose ``compute_loss`` comes after this one's."""
        classes = type(self).__mro__
        after = classes[classes.index(_SequenceParallel) + 1 :]
        return next(c for c in after if "compute_loss" in vars(c))

    def _has_own_loss(self) -> bool:
        return self._loss_class() is not Trainer

    # ---- data

    def _get_dataloader(self, *args, **kwargs):
        loader = super()._get_dataloader(*args, **kwargs)
        seed = getattr(loader, "worker_init_fn", None)
        alike = self._size > 1 and not (self._own_batches and kwargs.get("is_training"))
        if alike and isinstance(seed, functools.partial) and seed.func is seed_worker:
            # Seed workers by group: by process, those of a group would read different rows.
            rank = seed.keywords["rank"] // self._shared
            seed = functools.partial(seed_worker, **{**seed.keywords, "rank": rank})
            loader.base_dataloader.worker_init_fn = seed
        return loader

    # ---- the loss

    def _prepare_context_parallel_inputs(self, model, inputs):
        if self._size > 1:
            return contextlib.nullcontext, inputs  # compute_loss does it
        return super()._prepare_context_parallel_inputs(model, inputs)

    def _get_num_items_in_batch(self, batch_samples, device):
        count = super()._get_num_items_in_batch(batch_samples, device)
        if isinstance(count, Tensor) and not self.args.average_tokens_across_devices:
            count = count * self._size  # the caller expects each token as often as ranks have it
        return count

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if self._size == 1 or self._compiled is not None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        with randomness_of_a_model(self._member, self.args.device):
            return self._sharded_loss(model, inputs, return_outputs, num_items_in_batch)

    def _sharded_loss(self, model, inputs, return_outputs, num_items_in_batch):
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
                num_items_in_batch *= self._groups
        if own:
            loss, outputs = self._theirs(model, local, num_items_in_batch, return_outputs)
        else:
            loss, outputs = self._ours(model, inputs, local, seq_lens, num_items_in_batch)
        if not model.training:
            loss = self._over_all(loss, own)
        if self._returns_outputs and self.compute_loss_func is None:
            outputs = self._gathered(outputs, seq_lens)
        return (loss, outputs) if return_outputs else loss

    def _count(self, labels: Tensor, group) -> Tensor:
        """The number of valid tokens over a group; None: over all processes, each with its own
        tokens."""
        everyone = on_all_ranks([int((labels != -100).sum())], group, labels.device)
        copies = self._tensor_size if group is None else 1
        return labels.new_tensor(sum(n for (n,) in everyone) // copies)

    def _over_all(self, loss: Tensor, own: bool) -> Tensor:
        """In evaluation, the loss of one process on the batches of all data ranks. ``own``: the
        loss is that of a rank's tokens."""
        rank, size, name = member_of(None)
        loss = torch.ops.deepsp.all_reduce(loss.detach(), "replicated", rank, size, name)
        return loss / (self._tensor_size if own else size)

    def _ours(self, model, inputs, local, seq_lens, num_items_in_batch):
        """The loss of a model with logits, or without."""
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
                loss = torch.ops.deepsp._scale_gradient(loss, float(self._size))
        if counted and self.compute_loss_func is None:
            loss = loss / num_items_in_batch
        balance = getattr(outputs, "aux_loss", None)
        if isinstance(balance, Tensor) and self.compute_loss_func is None:
            config = self._base_model().config.get_text_config()
            loss = loss + config.router_aux_loss_coef * balance
        if counted and (self.args.average_tokens_across_devices or not model.training):
            loss = loss * self._groups
        return loss, outputs

    def _theirs(self, model, local, num_items_in_batch, return_outputs):
        """The loss of a class with its own ``compute_loss``."""
        if hasattr(self, "_tp_size"):
            # SFTTrainer divides its counts over all processes, of full masks only, by this.
            self._tp_size = self._size if "attention_mask" in local else 1

        def compute(count):
            accelerator, self.accelerator = self.accelerator, OneProcess(self.accelerator)
            try:
                return super(_SequenceParallel, self).compute_loss(
                    model, local, return_outputs, count
                )
            finally:
                self.accelerator = accelerator

        name, device = self._loss_class().__name__, self.args.device
        loss, outputs = class_loss(
            *(compute, num_items_in_batch, model, self._base_model(), self._group, name, device)
        )
        if not model.training:
            return loss, outputs
        rank, size, name = self._member
        if self.args.average_tokens_across_devices:
            loss = loss * self._groups  # DDP averages over the groups
        loss = torch.ops.deepsp._scale_gradient(loss, float(size))
        return torch.ops.deepsp.all_reduce(loss, "replicated", rank, size, name), outputs

    def _gathered(self, outputs, seq_lens: list[int]):
        """The outputs with full tensors in place of local ones."""
        length = seq_lens[dist.get_rank(self._group)]

        def gather(x: Tensor) -> Tensor:
            ours = x.dim() >= 2 and x.size(1) == length
            return unshard(x, 1, self._group, seq_lens) if ours else x

        if self._shard_at == "decoder":  # features of images have no tokens
            outputs = {n: x for n, x in outputs.items() if not n.endswith("_outputs")}
        return tree_map_only(Tensor, gather, outputs)

    # ---- counts

    def _track_num_input_tokens(self, inputs) -> None:
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)
        more = self.state.num_input_tokens_seen - before
        shared = 1 if self._own_batches else self._size
        self.state.num_input_tokens_seen = before + more // shared

    def floating_point_ops(self, inputs):
        shared = 1 if self._own_batches else self._size
        return super().floating_point_ops(inputs) / shared


class _AlikeGenerators(TrainerCallback):
    """Aligns the ranks' generators, so that an epoch's samplers draw the same on all ranks."""

    def __init__(self, member: Member):
        self._member = member

    def on_epoch_begin(self, args, state, control, **kwargs):
        align(self._member)


class SequenceParallelTrainer(_SequenceParallel, Trainer):
    """transformers' ``Trainer`` on sharded sequences: :func:`sequence_parallel` of it, which
    describes its losses and metrics.

    Args:
        args: those of ``Trainer``, positional.
        kwargs: those of ``Trainer``, by name.
        sequence_parallel_size: the number of ranks that share each batch, a divisor of the number
            of processes. None: ``cp_size`` of ``TrainingArguments.parallelism_config``.
        without_logits: computes the loss by :func:`deepsp.causal_lm_loss`.
        query_parts: as in :func:`deepsp.distributed_attention`.
        mix_lengths: deals documents out over the ranks.
        compiled: runs the model by the compile pass, or the options of the pass.
        own_batches: each rank loads rows of its own, and the group trains on them in turns.
        deal_images: each rank encodes its share of the images.

    Raises:
        ValueError: as :func:`sequence_parallel`.
    """
