"""TRL's preference and RL trainers over sharded sequences: DPO, KTO, GRPO, RLOO.

They call their models with full rows and ``fused_lm_head=True``, and read the log-probability of
each token. So each rank of a group prepares the same full batch, and the model shards it inside of
that call: layers and head work on this rank's tokens, and their results for each token are
gathered. From there on every rank of a group computes what one process computes: its loss, and the
same gradient of the gathered results, of which its own tokens get their slice.

Around those calls, a group counts as one process: in ``gather`` and ``reduce``, in random numbers,
and in batch sizes. Completions and rewards are those of the group's first rank.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from transformers import Trainer, TrainingArguments

from deepsp.data.sharding import unshard
from deepsp.integrations.accelerate import once_per_group
from deepsp.integrations.local_batch import local_batch
from deepsp.integrations.transformers import calls, mixers, multimodal
from deepsp.integrations.transformers.check import implementations
from deepsp.integrations.transformers.evaluation import Evaluation
from deepsp.integrations.transformers.experts import refuse_dealt
from deepsp.integrations.transformers.forward import calling
from deepsp.integrations.transformers.masks import ours
from deepsp.integrations.transformers.own_loss import OwnLoss
from deepsp.integrations.transformers.registration import base_of, use_in
from deepsp.ranks.groups import Group, member_of, objects_on_all_ranks
from deepsp.ranks.randomness import align, randomness_of_a_model

TRAINERS = ("DPOTrainer", "KTOTrainer", "GRPOTrainer", "RLOOTrainer")

_FIELDS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
"""What TRL's fused head computes for each token."""

_GATHERS = ("gather", "gather_object")

_REFUSED = {
    "mix_lengths": "the rows of a batch belong together",
    "own_batches": "a group generates once, and pairs belong together",
    "compiled": "TRL computes log-probabilities without logits",
    "compute_metrics": "no rank has logits",
    "use_vllm": "vLLM would generate for each rank of a group",
    "use_transformers_continuous_batching": "it needs attention of its own",
    "rollout_func": "it would run on every rank of a group",
    "tools": "they would run on every rank of a group",
    "environment_factory": "environments would run on every rank of a group",
}
"""Arguments of a trainer, or attributes of its ``args``, that must be empty, and why."""


def trl_class(trainer_class: type[Trainer]) -> type[Trainer] | None:
    """The trainer of TRL among :data:`TRAINERS` that ``trainer_class`` is or extends."""
    of_trl = (c for c in trainer_class.__mro__ if c.__module__.startswith("trl.trainer."))
    return next((c for c in of_trl if c.__name__ in TRAINERS), None)


# ---- the model


def shard_fused_head(model: nn.Module, group: Group) -> None:
    """Makes a model with TRL's fused head and deepsp's attention shard the full rows of a call with
    ``labels`` and ``fused_lm_head=True``, and return the results of all tokens on every rank.

    Gradients are scaled for wrappers that average them over all ranks.
    """
    fused = model.forward

    @functools.wraps(fused)
    def forward(*args, **kwargs):
        if calls.shards_inside(model, kwargs) and implementations(model):
            return _whole(fused, model, group, calls.named_arguments(model, args, kwargs))
        return fused(*args, **kwargs)

    # Not a call of the module, since PEFT calls the forward alone.
    model.forward = forward
    setattr(model, calls.SHARDS_INSIDE, True)


def _whole(fused, model: nn.Module, group: Group, batch: Mapping[str, Any]) -> Any:
    """The outputs of TRL's fused head for the full rows of ``batch``."""
    _, size, _ = member_of(group)
    batch = {name: x for name, x in batch.items() if x is not None}
    labels, items = batch.pop("labels"), batch.pop("num_items_in_batch", None)
    batch["shift_labels"] = F.pad(labels, (0, 1), value=-100)[..., 1:]
    local, lens = local_batch(batch, group, shard_at=multimodal.shard_at(model))
    calls.check_arguments(model, (), local)
    if local.get("output_router_logits"):
        mixers.balance_of_mixtral()  # TRL computes it for all mixtures by Mixtral's function
    with calling(loss=OwnLoss(group, average_gradients=True)):
        found = fused(**local)
    names = [name for name in _FIELDS if getattr(found, name) is not None]
    dtype = found.log_probs.dtype
    # One message for all, stacked in a last dimension.
    stacked = torch.stack([getattr(found, name).to(dtype) for name in names], -1)
    stacked = torch.ops.deepsp._scale_gradient(stacked, float(size))
    # Without shift_labels, the head returns nothing for the last token.
    whole = dict(zip(names, unshard(stacked, 1, group, lens)[:, :-1].unbind(-1), strict=True))
    if "is_top1" in whole:
        whole["is_top1"] = whole["is_top1"].bool()
    mask = labels[:, 1:] != -100
    count = mask.sum().clamp(min=1) if items is None else items
    loss = -whole["log_probs"].sum() / count
    return type(found)(loss=loss, label_mask=mask, aux_loss=found.aux_loss, **whole)


# ---- one process per group


class _ByGroup:
    """An accelerator whose processes are groups."""

    def __init__(self, accelerator: Accelerator, size: int):
        self._accelerator, self._size = accelerator, size
        self.num_processes = accelerator.num_processes // size
        self.process_index = accelerator.process_index // size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)

    def gather(self, tensor):
        every = self._accelerator.gather(tensor)
        return once_per_group(every, self._size, self._accelerator.num_processes)

    def gather_for_metrics(self, input_data, use_gather_object: bool = False):
        accelerator, every = self._accelerator, self._accelerator.gather
        processes = accelerator.num_processes
        accelerator.gather = lambda x: once_per_group(every(x), self._size, processes)
        try:
            return accelerator.gather_for_metrics(input_data, use_gather_object)
        finally:
            del accelerator.gather

    def reduce(self, tensor, reduction: str = "sum", scale: float = 1.0):
        reduced = self._accelerator.reduce(tensor, reduction, scale)
        return reduced / self._size if reduction == "sum" else reduced


@contextlib.contextmanager
def _functions_by_group(module, size: int, processes: int) -> Iterator[None]:
    """Here, ``gather`` and ``gather_object``, if a module of TRL has imported them, take the values
    of one rank in each group."""
    before = {name: getattr(module, name) for name in _GATHERS if hasattr(module, name)}
    replacements = {
        "gather": lambda x: once_per_group(before["gather"](x), size, processes),
        "gather_object": lambda items: [
            x for one in before["gather_object"]([items])[::size] for x in one
        ],
    }
    for name in before:
        setattr(module, name, replacements[name])
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(module, name, function)


class Preference:
    """:func:`deepsp.integrations.transformers.sequence_parallel` puts this class before its own,
    for the classes in :data:`TRAINERS`."""

    _numbers_rows = False  # evaluation counts rows as TRL does
    _is_prepared = False
    _whole_attention = "sdpa"
    """The attention with which the model generates."""

    def __init__(self, *args, **kwargs):
        if kwargs.get("sequence_parallel_size") != 1:
            every = [*args, *kwargs.values()]
            config = next((x for x in every if isinstance(x, TrainingArguments)), None)
            for name, why in _REFUSED.items():
                if given := kwargs.get(name) or getattr(config, name, None):
                    raise ValueError(
                        f"expected no {name} in a sequence-parallel {self._name}Trainer, since "
                        f"{why}, got {given!r}; leave it out"
                    )
        super().__init__(*args, **kwargs)
        if self._size > 1 and self._generates:
            # TRL gives each process a seed, so that processes sample different completions.
            set_seed(self.args.seed + self.accelerator.process_index // self._size)

    @property
    def _generates(self) -> bool:
        return hasattr(self.args, "num_generations")

    def _alike(self):
        return self._member if self._generates else super()._alike()

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if self._size > 1 and self._generates:
            self._set_generation_batch()

    def _set_generation_batch(self) -> None:
        """Counts the rows of a generation by groups. The arguments counted them by processes."""
        args = self.args
        rows = args.per_device_train_batch_size * self._groups * args.steps_per_generation
        counts = [("generation batch", rows, args.num_generations)]
        if args.eval_strategy != "no":
            evaluated = args.per_device_eval_batch_size * self._groups
            per_prompt = args.num_generations_eval or args.num_generations
            counts.append(("evaluation batch", evaluated, per_prompt))
        for name, size, per_prompt in counts:
            if size % per_prompt:
                raise ValueError(
                    f"expected num_generations to divide {size}, the rows of the {name} of "
                    f"{self._groups} group(s) whose ranks share them, got {per_prompt}; make the "
                    "batch size per device larger"
                )
        args.generation_batch_size = rows

    def _prepare_model(self) -> None:
        if self._is_prepared:
            return
        if getattr(self, "aux_loss_enabled", False) and not mixers.is_balanced(self._base_model()):
            raise ValueError(
                f"expected router_aux_loss_coef=0 in a sequence-parallel {self._name}Trainer of "
                f"{type(self._base_model()).__name__}, since the auxiliary loss would be that of "
                f"this rank's tokens only, got {self.router_aux_loss_coef}; pass "
                "router_aux_loss_coef=0.0"
            )
        for model in filter(None, (self.model, self.ref_model)):
            advice = "leave shard_experts out"
            refuse_dealt(model, f"in a sequence-parallel {self._name}Trainer", advice)
        given = self._base_model().config._attn_implementation
        if given not in ours():
            self._whole_attention = given
        super()._prepare_model()
        models = [self._base_model()]
        if self.ref_model is not None:
            models.append(base_of(self.accelerator.unwrap_model(self.ref_model)))
            use_in(models[1], self._group, query_parts=self._query_parts)
        for model in models:
            shard_fused_head(model, self._group)
        self._is_prepared = True

    # ---- a group is one process

    @contextlib.contextmanager
    def _by_group(self) -> Iterator[None]:
        accelerator = self.accelerator
        if self._size == 1 or isinstance(accelerator, _ByGroup):
            yield
            return
        module = sys.modules[trl_class(type(self)).__module__]
        self.accelerator = _ByGroup(accelerator, self._size)
        try:
            with _functions_by_group(module, self._size, accelerator.num_processes):
                yield
        finally:
            self.accelerator = accelerator

    def _precompute_ref_logps(self, *args, **kwargs):
        if self._size > 1:
            self._prepare_model()  # called while the trainer is made
        with self._by_group():
            return super()._precompute_ref_logps(*args, **kwargs)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        compute = super(Evaluation, self).compute_loss
        if self._size == 1:
            return compute(model, inputs, return_outputs, num_items_in_batch)
        if return_outputs:
            raise ValueError(
                "expected prediction_loss_only=True, since no rank has logits, got False; call "
                "evaluate() in place of predict()"
            )
        with randomness_of_a_model(self._member, self.args.device), self._by_group():
            return compute(model, inputs, False, num_items_in_batch)

    def prediction_step(self, *args, **kwargs):
        return super(Evaluation, self).prediction_step(*args, **kwargs)

    # ---- generation

    def _generate_and_score_completions(self, inputs):
        with self._by_group():
            found = super()._generate_and_score_completions(inputs)
        if self._size > 1:
            align(self._member)  # a reward function may have drawn numbers
        return found

    def _generate_single_turn(self, *args, **kwargs):
        """Generates on whole sequences: deepsp's attention has no cache."""
        generate = super()._generate_single_turn
        if self._size == 1:
            return generate(*args, **kwargs)
        model = self._base_model()
        sharded = model.config._attn_implementation
        model.set_attn_implementation(self._whole_attention)
        try:
            found = generate(*args, **kwargs)
        finally:
            model.set_attn_implementation(sharded)
        # Kernels that add up in another order may lead to another token.
        return objects_on_all_ranks(found, self._member, self.args.device)[0]
