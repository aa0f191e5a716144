"""TRL's trainers of rows that belong together, over sharded sequences: DPO, KTO, GRPO, RLOO,
distillation.

Each rank of a group prepares the same full batch. The policy and the reference model take full rows
(:mod:`.rows`), so from there on every rank of a group computes what one process computes.
Completions and rewards are those of the group's first rank."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from accelerate.utils import set_seed
from transformers import Trainer, TrainingArguments

from deepsp.integrations.proof.cut import cut_rows
from deepsp.integrations.transformers import async_rollouts, mixers, rollouts
from deepsp.integrations.transformers.experts import refuse_dealt
from deepsp.integrations.transformers.forward import full_rows_of
from deepsp.integrations.transformers.registration import base_of
from deepsp.integrations.transformers.steps import Compute, FullStep
from deepsp.ranks.groups import objects_on_all_ranks
from deepsp.ranks.randomness import align

TRAINERS = ("DPOTrainer", "KTOTrainer", "GRPOTrainer", "RLOOTrainer", "DistillationTrainer")
OTHERS = (
    "SFTTrainer",
    "RewardTrainer",
    "GKDTrainer",
    "ServerDistillationTrainer",
    "AsyncGRPOTrainer",
    "_BaseTrainer",
    "BaseTrainer",
)
"""The other classes of TRL whose subclasses are taken."""

_GATHERS = ("gather", "gather_object")

_REFUSED = {
    "mix_lengths": "the rows of a batch belong together",
    "own_batches": "a group generates once, and pairs belong together",
    "local_loss": "TRL computes its losses from full rows",
    "compiled": "TRL computes log-probabilities without logits",
    "compute_metrics": "no rank has logits",
    "use_transformers_continuous_batching": "it needs attention of its own",
    "rollout_func": "it would run on every rank of a group",
    "environment_factory": "environments would run on every rank of a group",
}
"""Arguments of a trainer, or attributes of its ``args``, that must be empty, and why."""


def trl_class(trainer_class: type[Trainer]) -> type[Trainer] | None:
    """The trainer of TRL among :data:`TRAINERS` that ``trainer_class`` is or extends."""
    of_trl = (c for c in trainer_class.__mro__ if c.__module__.startswith("trl.trainer."))
    return next((c for c in of_trl if c.__name__ in TRAINERS), None)


def check_class(trainer_class: type[Trainer]) -> None:
    """Raises for TRL's other trainers."""
    for cls in trainer_class.__mro__:
        if cls.__module__.split(".")[0] == "trl" and cls.__name__ not in (*OTHERS, *TRAINERS):
            names = ", ".join((*OTHERS[:-2], *TRAINERS))
            raise ValueError(
                "expected trainer_class to be transformers' Trainer, one of TRL's "
                f"{names} or a subclass of these, got {trainer_class.__name__}: {cls.__name__} of "
                "TRL calls its model in ways that aren't supported over sharded sequences; write "
                "its loss in a loop of your own, with deepsp.token_log_probs"
            )


def check_arguments(name: str, args: tuple, kwargs: dict[str, Any]) -> None:
    """Raises for arguments of a preference or RL trainer that can't work over sharded sequences."""
    every = [*args, *kwargs.values()]
    config = next((x for x in every if isinstance(x, TrainingArguments)), None)
    for argument, why in _REFUSED.items():
        if argument == "mix_lengths" and kwargs.get("fold_prefixes"):
            continue  # trees of rows are dealt out
        if value := kwargs.get(argument) or getattr(config, argument, None):
            raise ValueError(
                f"expected no {argument} in a sequence-parallel {name}Trainer, since {why}, got "
                f"{value!r}; leave it out"
            )
    rollouts.check_tools(kwargs.get("tools") or ())


def generates(trainer: Trainer) -> bool:
    return hasattr(trainer.args, "max_completion_length")


def set_generation_batch(trainer: Trainer, groups: int) -> None:
    """Counts the rows of a generation by groups. The arguments counted them by processes."""
    args = trainer.args
    if not hasattr(args, "num_generations"):
        return
    rows = args.per_device_train_batch_size * groups * args.steps_per_generation
    counts = [("generation batch", rows, args.num_generations)]
    if args.eval_strategy != "no":
        evaluated = args.per_device_eval_batch_size * groups
        counts.append(
            ("evaluation batch", evaluated, args.num_generations_eval or args.num_generations)
        )
    for name, size, per_prompt in counts:
        if size % per_prompt:
            raise ValueError(
                f"expected num_generations to divide {size}, the rows of the {name} of {groups} "
                f"group(s) whose ranks share them, got {per_prompt}; make the batch size per "
                "device larger"
            )
    args.generation_batch_size = rows


class RowsStep(FullStep):
    """A step of these trainers, whose policy and reference model take full rows."""

    def loss(self, compute: Compute, model, inputs, return_outputs: bool, count) -> Any:
        if return_outputs:
            raise ValueError(
                "expected prediction_loss_only=True, since no rank has logits, got False; call "
                "evaluate() in place of predict()"
            )
        with functions_by_group(self.run.trainer):
            return super().loss(compute, model, inputs, False, count)

    def reference(self, compute: Compute, model, inputs, return_outputs: bool, count) -> Any:
        with functions_by_group(self.run.trainer):
            return super().reference(compute, model, inputs, return_outputs, count)

    def cuts(self, inputs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], str]:
        return cut_rows(inputs)


def check_models(trainer: Trainer, name: str) -> list:
    """The trained model, and the frozen one beside it if there is one."""
    others = (getattr(trainer, name, None) for name in ("ref_model", "teacher_model"))
    models = [trainer.model, *(m for m in others if m is not None)]
    base = base_of(trainer.accelerator.unwrap_model(trainer.model))
    if getattr(trainer, "aux_loss_enabled", False) and not mixers.is_balanced(base):
        raise ValueError(
            f"expected router_aux_loss_coef=0 in a sequence-parallel {name}Trainer of "
            f"{type(base).__name__}, since the auxiliary loss would be that of this rank's tokens "
            f"only, got {trainer.router_aux_loss_coef}; pass router_aux_loss_coef=0.0"
        )
    for model in models:
        where = f"in a sequence-parallel {name}Trainer"
        refuse_dealt(model, where, "leave shard_experts out")
    return models


@contextlib.contextmanager
def functions_by_group(trainer: Trainer) -> Iterator[None]:
    """Here, ``gather`` and ``gather_object``, if the module of TRL's trainer has imported them,
    take the values of one rank in each group."""
    module = sys.modules[trl_class(type(trainer)).__module__]
    shared, accelerator = trainer.sequence_run.groups.shared, trainer.accelerator
    before = {name: getattr(module, name) for name in _GATHERS if hasattr(module, name)}
    replacements = {
        "gather": lambda x: accelerator.sequence_once(before["gather"](x)),
        "gather_object": lambda items: [
            x for one in before["gather_object"]([items])[::shared] for x in one
        ],
    }
    for name in before:
        setattr(module, name, replacements[name])
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(module, name, function)


# ---- hooks of these trainers


def hooks(cls: type[Trainer]) -> dict[str, Callable]:
    """Methods of a sequence-parallel subclass of ``cls`` that are those of ``cls`` for groups."""

    def precompute(self, *args, **kwargs):
        if self.sequence_run is not None:
            self.sequence_prepare()  # called while the trainer is made
        with _by_group(self):
            return cls._precompute_ref_logps(self, *args, **kwargs)

    def generate_and_score(self, inputs):
        with _by_group(self):
            scored = cls._generate_and_score_completions(self, inputs)
        if self.sequence_run is not None:
            align(self.sequence_run.groups.member)  # a reward function may have drawn numbers
        return scored

    def generate(self, *args, **kwargs):
        """Generates on whole sequences: deepsp's attention has no cache."""
        run = self.sequence_run
        if run is None or self.use_vllm:
            return cls._generate_single_turn(self, *args, **kwargs)
        policy = self.accelerator.unwrap_model(self.model)
        with full_rows_of(policy).stock():
            completions = cls._generate_single_turn(self, *args, **kwargs)
        # Kernels that add up in another order may lead to another token.
        return objects_on_all_ranks(completions, run.groups.member, self.args.device)[0]

    def tool_call_loop(self, *args, **kwargs):
        if self.sequence_run is None:
            return cls._tool_call_loop(self, *args, **kwargs)
        with rollouts.tools_once(self, self.sequence_run.groups.member):
            return cls._tool_call_loop(self, *args, **kwargs)

    def generate_on_policy(self, model, inputs, generation_config):
        rows = full_rows_of(model)
        if rows is None:
            return cls.generate_on_policy_outputs(model, inputs, generation_config)
        with rows.stock():
            generated = cls.generate_on_policy_outputs(model, inputs, generation_config)
        return objects_on_all_ranks(generated, self.sequence_run.groups.member, self.args.device)[0]

    def teacher_log_probs(self, *args, **kwargs):
        ask = functools.partial(cls._get_teacher_token_logprobs_from_server, self, *args, **kwargs)
        if self.sequence_run is None:
            return ask()
        return rollouts.once(ask, "log-probabilities from the teacher", self.sequence_run.groups)

    if "AsyncGRPOTrainer" in {c.__name__ for c in cls.__mro__}:
        return async_rollouts.hooks(cls)
    every = {
        "generate_on_policy_outputs": generate_on_policy,
        "_get_teacher_token_logprobs_from_server": teacher_log_probs,
        "_precompute_ref_logps": precompute,
        "_tool_call_loop": tool_call_loop,
        "_generate_and_score_completions": generate_and_score,
        "_generate_single_turn": generate,
    }
    return {name: hook for name, hook in every.items() if hasattr(cls, name)}


def _by_group(trainer: Trainer) -> contextlib.AbstractContextManager:
    return contextlib.nullcontext() if trainer.sequence_run is None else functions_by_group(trainer)


def seed_by_group(trainer: Trainer) -> None:
    """TRL gives each process a seed, so that processes sample different completions."""
    set_seed(trainer.args.seed + trainer.accelerator.process_index)
