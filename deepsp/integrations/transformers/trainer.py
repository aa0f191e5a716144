"""``Trainer`` over sharded sequences: transformers' own, TRL's, or any other subclass.

Consecutive ranks form a group that shares each batch. To the trainer a group is one process: its
accelerator counts groups, loaders give the ranks of a group the same batches, and the model takes
full rows and returns the results of all tokens (:mod:`.rows`). So the class's own code computes
losses, counts and metrics. The accelerator's own context parallelism, which would replace
attention, isn't used.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import seed_worker

from deepsp.integrations.door import subclass
from deepsp.integrations.grouped import group_processes
from deepsp.integrations.transformers import rollouts, trl
from deepsp.integrations.transformers.async_rollouts import AsyncStep
from deepsp.integrations.transformers.classifiers import ClassifierStep
from deepsp.integrations.transformers.dealt_experts import (
    TrainerAccelerator,
    check_checkpoints,
    prepare_experts,
)
from deepsp.integrations.transformers.distillation import DistilledStep, GKDStep
from deepsp.integrations.transformers.evaluation import numbered, real_rows
from deepsp.integrations.transformers.experts import dealt_in, refuse_dealt
from deepsp.integrations.transformers.proof import Proof
from deepsp.integrations.transformers.refusals import check_parallelism, check_run
from deepsp.integrations.transformers.registration import is_classifier
from deepsp.integrations.transformers.steps import CompiledStep, FullStep, LocalStep, Run, Turns
from deepsp.ranks.groups import Member, member_of
from deepsp.ranks.randomness import align
from deepsp.weights.state import full_state_dict


@dataclass
class Options:
    """The arguments that :func:`sequence_parallel` adds to a class."""

    sequence_parallel_size: int | None = None
    without_logits: bool = False
    query_parts: int | str = "auto"
    mix_lengths: bool = False
    fold_prefixes: bool = False
    compiled: bool | Mapping[str, Any] | None = None
    own_batches: bool = False
    deal_images: bool = False
    local_loss: bool = False
    roles: Mapping[str, str] | None = None
    prove: bool | str = True
    teacher: nn.Module | None = None

    def __post_init__(self):
        if self.compiled is True:
            self.compiled = {}
        elif not isinstance(self.compiled, Mapping):
            self.compiled = None


def sequence_parallel(trainer_class: type[Trainer]) -> type[Trainer]:
    """A subclass of ``trainer_class`` that trains on sharded sequences.

    The class takes more arguments, by name. With ``per_device_train_batch_size=b`` on N processes,
    a step trains on b * N / size samples.

    - ``sequence_parallel_size``: the number of ranks over which a batch is sharded, a divisor of
      the number of processes. None: ``cp_size`` (or ``sp_size``) of
      ``TrainingArguments.parallelism_config``. If the model is tensor-parallel, loaded with
      ``DistributedConfig(tp_size=T, fsdp_size=N / T)``, T times as many ranks share each batch.
    - ``without_logits``: computes the loss by :func:`deepsp.causal_lm_loss`, so that logits exist
      only for a few tokens at a time; not in an evaluation that needs logits. For a class with a
      ``compute_loss`` of its own, the model returns its loss and no logits. TRL's trainers never
      have logits.
    - ``query_parts``: as in :func:`deepsp.distributed_attention`.
    - ``mix_lengths``: trains on documents that are dealt out over the ranks, as by
      :func:`deepsp.deal_batch`, so that ranks share only those that are long. Evaluation shards
      batches as without it.
    - ``fold_prefixes``: for DPO, KTO, GRPO, RLOO and reward models: what rows of a batch begin with
      alike, such as a prompt, goes through the models once (:func:`deepsp.fold`). With
      ``mix_lengths``, ranks share only the trees of rows that are long.
    - ``own_batches``: each rank loads b rows of its own, as without groups, so that a step trains
      on b * N samples. The group trains on its ranks' batches in turns, or, with ``mix_lengths``,
      on all at once. Steps equal those of the same training on N processes. Evaluation shares
      batches as without it.
    - ``deal_images``: as in :func:`deepsp.integrations.transformers.register`, for a
      vision-language model.
    - ``compiled``: runs the model by the compile pass, ``torch.compile(model, backend="deepsp",
      fullgraph=True)``, with full batches. For models other than causal language models: masked
      ones, classifiers, encoders with decoders. True, or a dict of the pass's options
      (``inner``, ``memory_budget``, ``chunks``) and ``seq_dim``, the dimension of the sequence in a
      batch's tensors.
    - ``local_loss``: ``compute_loss`` of the class gets this rank's tokens, and so do its logits:
      in place of ``labels``, ``shift_labels``, the next token of each token. It must return a sum
      over tokens divided by ``num_items_in_batch``; every step checks that. Without it, the class
      gets full rows, and ``outputs.logits`` of all tokens take [B, S, V] of memory on every rank.
    - ``roles``: as in :func:`deepsp.shard_batch`, with ``local_loss``.
    - ``teacher``: a frozen model that the class's ``compute_loss`` calls, too. It takes full rows,
      or with ``local_loss`` this rank's tokens, as the trained model does.

    Losses, gradient norms and metrics are those of the same trainer on N / size processes, and
    those of an evaluation are those of one process with batches as large as those of all groups;
    repeated rows don't count (unless the model is a classifier). Of TRL's trainers it takes
    ``SFTTrainer``, ``DPOTrainer``, ``KTOTrainer``, ``RewardTrainer``, ``GRPOTrainer``,
    ``RLOOTrainer``, ``AsyncGRPOTrainer``, ``DistillationTrainer``, ``ServerDistillationTrainer``
    and ``GKDTrainer``. A group generates completions once.

    Args:
        trainer_class: transformers' ``Trainer`` or a subclass of it.

    Returns:
        The class. ``compute_metrics``, ``compute_loss_func`` and ``predict`` get full logits; they
        take [B, S, V] of memory on every rank.

    Raises:
        ValueError: when a trainer is made: the model isn't a causal language model of transformers
            or a classifier of its decoder, or mixes tokens other than by attention through deepsp
            (:func:`deepsp.integrations.transformers.check`); the size doesn't divide the number of
            processes; arguments that can't be combined, by name; sharded experts over other ranks,
            or with adapters, FSDP, DeepSpeed or checkpoints that have an optimizer's state. On a
            step: the loss of ``local_loss`` isn't a sum divided by ``num_items_in_batch``; the
            compile pass can't shard the model; a packed batch doesn't show where its documents
            begin; ranks of a group have different batches.
    """
    if not (isinstance(trainer_class, type) and issubclass(trainer_class, Trainer)):
        raise ValueError(
            "expected trainer_class to be transformers' Trainer or a subclass, got "
            f"{trainer_class}; pass the class, sequence_parallel(SFTTrainer)(model, ...)"
        )
    if issubclass(trainer_class, SequenceParallel):
        return trainer_class
    trl.check_class(trainer_class)
    attributes = {"__doc__": _DOC.format(trainer_class.__name__), "__module__": __name__}
    attributes |= trl.hooks(trainer_class)
    return subclass(SequenceParallel, trainer_class, **attributes)


_DOC = """``{}`` on sharded sequences, as :func:`sequence_parallel` makes it.

Args:
    args: those of the class, positional.
    kwargs: those of the class and of :func:`sequence_parallel`, by name.

Raises:
    ValueError: as :func:`sequence_parallel`.
"""


class SequenceParallel:
    """:func:`sequence_parallel` puts this class before a class of trainers."""

    sequence_run: Run | None = None
    """None: ranks don't share sequences."""
    sequence_step: FullStep | Turns
    sequence_proof: Proof
    sequence_has_loader = False
    """Whether batches come from a loader of deepsp's that deals them to groups."""

    def __init__(self, *args, **kwargs):
        names = {field.name for field in fields(Options)}
        self.sequence_options = Options(**{n: x for n, x in kwargs.items() if n in names})
        kind = trl.trl_class(type(self))
        if kind is not None and self.sequence_options.sequence_parallel_size != 1:
            trl.check_arguments(kind.__name__.removesuffix("Trainer"), args, kwargs)
        with contextlib.nullcontext() if kind is None else rollouts.by_group(kind):
            super().__init__(*args, **{n: x for n, x in kwargs.items() if n not in names})
        run = self.sequence_run
        if run is None:
            advice = "pass sequence_parallel_size, the number of ranks that share them"
            refuse_dealt(self.model, "with sequence_parallel_size=1", advice)
            return
        self.sequence_prepare()
        self.add_callback(_AlikeGenerators(self))
        if run.compares_rows and trl.generates(self):
            trl.seed_by_group(self)
            if getattr(self, "use_vllm", False):
                self.vllm_generation.sequence_timeout = self.args.ddp_timeout

    def sequence_prepare(self) -> None:
        """Makes the models attend to full sequences, once."""
        if hasattr(self, "sequence_step"):
            return
        run = self.sequence_run
        check_run(run)
        options = run.options
        kind = step_class(self)
        kind = CompiledStep if options.compiled is not None else kind
        step = (LocalStep if options.local_loss else kind)(run)
        models = [self.model]
        if run.compares_rows or kind is GKDStep:
            models = trl.check_models(self, self._name)
        if options.teacher is not None:
            models.append(options.teacher)
        check_apart(models)
        for model in models:
            step.prepare(model)
        prepare_experts(run)
        self.sequence_step = Turns(step) if options.own_batches else step
        self.sequence_proof = Proof(step, options.prove)

    def call_model_init(self, trial=None) -> nn.Module:
        model = super().call_model_init(trial)
        if hasattr(self, "sequence_step"):  # train() makes a new model
            self.sequence_step.prepare(model)
        return model

    # ---- a group is one process

    def _build_accelerator_args(self, **kwargs) -> dict[str, Any]:
        arguments = super()._build_accelerator_args(**kwargs)
        config = arguments.pop("parallelism_config", None)
        if config is not None:
            check_parallelism(config, getattr(self.model, "tp_size", None) or 1)
            if self.sequence_options.sequence_parallel_size is None:
                self.sequence_options.sequence_parallel_size = max(config.cp_size, config.sp_size)
        return arguments

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        options, tensor_size = self.sequence_options, getattr(self.model, "tp_size", None) or 1
        size = options.sequence_parallel_size
        if self.sequence_has_loader and size != 1:
            self.accelerator.dataloader_config.dispatch_batches = False
        groups = group_processes(self.accelerator, size, tensor_size, TrainerAccelerator)
        if groups is not None:
            compares = trl.trl_class(type(self)) is not None
            self.sequence_run = Run(self, options, groups, tensor_size, compares)
            if self.sequence_run.compares_rows and trl.generates(self):
                trl.set_generation_batch(self, groups.number)

    def get_tp_size(self) -> int:
        # The ranks over which tensors are sharded are in the group.
        return super().get_tp_size() if self.sequence_run is None else 1

    def get_total_train_batch_size(self, args) -> int:
        total, run = super().get_total_train_batch_size(args), self.sequence_run
        return total if run is None or run.options.own_batches else total // run.groups.shared

    def floating_point_ops(self, inputs):
        run = self.sequence_run
        shared = 1 if run is None or run.options.own_batches else run.groups.shared
        return super().floating_point_ops(inputs) / shared

    # ---- data

    def _get_dataloader(self, dataset, description, *args, is_training: bool = False, **kwargs):
        run, make = self.sequence_run, super()._get_dataloader
        if run is None or run.is_alone:
            return make(dataset, description, *args, is_training=is_training, **kwargs)
        if not is_training:
            with numbered(run, dataset, description) as dataset:
                return make(dataset, description, *args, **kwargs)
        self.accelerator.sequence_loads = "processes" if run.options.own_batches else "groups"
        try:
            loader = make(dataset, description, *args, is_training=True, **kwargs)
        finally:
            self.accelerator.sequence_loads = "groups"
        seed = getattr(loader, "worker_init_fn", None)
        by_group = isinstance(seed, functools.partial) and seed.func is seed_worker
        if by_group and not run.options.own_batches:
            # Seed workers by group: by process, those of a group would read different rows.
            rank = self.accelerator.process_index
            seed = functools.partial(seed_worker, **{**seed.keywords, "rank": rank})
            loader.base_dataloader.worker_init_fn = seed
        return loader

    def get_batch_samples(self, *args, **kwargs):
        if self.sequence_run is None or not self.sequence_run.options.own_batches:
            return super().get_batch_samples(*args, **kwargs)
        with self.accelerator.sequence_counting("processes"):
            return super().get_batch_samples(*args, **kwargs)

    def _track_num_input_tokens(self, inputs) -> None:
        run = self.sequence_run
        context = contextlib.nullcontext()
        if run is not None and run.options.own_batches:
            context = self.accelerator.sequence_counting("processes")
        with context:
            super()._track_num_input_tokens(inputs)

    # ---- steps

    def training_step(self, model, inputs, num_items_in_batch=None) -> Tensor:
        step = super().training_step
        if self.sequence_run is None:
            return step(model, inputs, num_items_in_batch)
        return self.sequence_step.step(step, model, inputs, num_items_in_batch)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        compute, run = super().compute_loss, self.sequence_run
        if run is None:
            return compute(model, inputs, return_outputs, num_items_in_batch)
        if run.is_alone:
            how = (return_outputs, num_items_in_batch)
            return self.sequence_step.reference(compute, model, inputs, *how)
        if torch.is_grad_enabled() or run.compares_rows:
            self.sequence_proof.of_step(compute, model, inputs, num_items_in_batch)
        return self.sequence_step.loss(compute, model, inputs, return_outputs, num_items_in_batch)

    # ---- evaluation

    def evaluation_loop(self, dataloader, description, prediction_loss_only=None, *args, **kwargs):
        evaluate = super().evaluation_loop
        if self.sequence_run is not None:
            align(self.sequence_alike_ranks())  # loader workers are seeded from the generators
            self.sequence_proof.of_evaluation(evaluate, dataloader, prediction_loss_only)
        return evaluate(dataloader, description, prediction_loss_only, *args, **kwargs)

    def sequence_loader_of(self, dataset) -> DataLoader:
        """A loader for an evaluation of a data set."""
        rows = self.args.eval_batch_size
        return self._get_dataloader(dataset, "Evaluation", rows, self._get_eval_sampler)

    def sequence_alike_ranks(self) -> Member:
        """The ranks whose default generators are alike."""
        run = self.sequence_run
        return run.groups.member if run.compares_rows and trl.generates(self) else member_of(None)

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        run, predict = self.sequence_run, super().prediction_step
        if run is None or run.compares_rows:
            return predict(model, inputs, prediction_loss_only, ignore_keys)
        labelled = any(inputs.get(name) is not None for name in self.label_names)
        inputs, real = real_rows(run, inputs)
        if run.is_alone:
            return predict(model, inputs, prediction_loss_only, ignore_keys)
        if self.sequence_step.evaluates_all_groups:
            inputs = self.sequence_step.without_repeats(inputs, real)
        if not labelled:
            inputs = self.sequence_step.unlabelled(self._prepare_inputs(inputs))
        run.returns_outputs = not prediction_loss_only
        try:
            return predict(model, inputs, prediction_loss_only, ignore_keys)
        finally:
            run.returns_outputs = False

    # ---- checkpoints

    def train(self, resume_from_checkpoint=None, *args, **kwargs):
        if dealt_in(self.model):
            check_checkpoints(self.args, resume_from_checkpoint)
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _save(self, output_dir=None, state_dict=None):
        if state_dict is None and dealt_in(self.model):
            state_dict = full_state_dict(self.sequence_run.base)  # every rank calls it
        super()._save(output_dir, state_dict)


def check_apart(models: list[nn.Module]) -> None:
    """Raises if models share modules, each of which would shard the same rows."""
    first = set(models[0].modules())
    if any(not first.isdisjoint(model.modules()) for model in models[1:]):
        raise ValueError(
            "expected a teacher or reference model that shares no module with the trained one, got "
            "the base of its adapters; load it a second time, or leave it out and call the model "
            "within its disable_adapter()"
        )


def step_class(trainer: Trainer) -> type[FullStep]:
    """How a trainer's steps run, if its loss is of full rows that nothing compiles."""
    names = {c.__name__ for c in type(trainer).__mro__ if c.__module__.startswith("trl.")}
    if is_classifier(trainer.sequence_run.base):
        return ClassifierStep
    if "DistillationTrainer" in names:
        return DistilledStep
    if "GKDTrainer" in names:
        return GKDStep
    if "AsyncGRPOTrainer" in names:
        return AsyncStep
    return trl.RowsStep if trainer.sequence_run.compares_rows else FullStep


class _AlikeGenerators(TrainerCallback):
    """Aligns the ranks' generators, so that an epoch's samplers draw the same on all ranks."""

    def __init__(self, trainer: SequenceParallel):
        self._ranks = trainer.sequence_alike_ranks()

    def on_epoch_begin(self, args, state, control, **kwargs):
        align(self._ranks)


SequenceParallelTrainer = sequence_parallel(Trainer)
"""transformers' ``Trainer`` on sharded sequences."""
