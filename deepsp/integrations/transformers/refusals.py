"""What a Trainer over sharded sequences refuses before its first step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from accelerate import ParallelismConfig

from deepsp.integrations.transformers.experts import refuse_dealt
from deepsp.integrations.transformers.mixers import mixers_in
from deepsp.integrations.transformers.multimodal import shard_at
from deepsp.integrations.transformers.registration import is_classifier
from deepsp.integrations.transformers.steps import Run

_OF_THE_TRAINER = ("group", "gradients", "outputs", "query_parts")
"""Options of the compile pass that the trainer sets itself."""


def check_run(run: Run) -> None:
    """Raises for arguments that can't be combined."""
    for name, value, why in _refused(run):
        if value:
            got = "" if value is True else f", got {value!r}"
            raise ValueError(
                f"expected no {name} in {type(run.trainer).__name__}, since {why}{got}; leave it "
                "out"
            )
    if run.options.compiled is not None:
        refuse_dealt(run.trainer.model, "with compiled", "leave one of them out")
    if run.tensor_size > 1:
        _check_tensor_parallel(run)


def _refused(run: Run) -> Iterator[tuple[str, Any, str]]:
    """Names, values that must be empty, and why."""
    trainer, args, options = run.trainer, run.trainer.args, run.options
    model = type(run.base).__name__
    strategy = getattr(args, "train_sampling_strategy", "")
    yield (
        "train_sampling_strategy='batch_rebalance'",
        strategy == "batch_rebalance",
        "it deals batches to processes instead of groups that share a sequence; "
        "'group_by_length' doesn't",
    )
    yield (
        "predict_with_generate",
        getattr(args, "predict_with_generate", False),
        "a cache would hold one rank's tokens only; generate after training, on a model with "
        "attn_implementation='sdpa'",
    )
    by_group = "only tensors are gathered once for each group"
    yield "eval_use_gather_object", args.eval_use_gather_object, by_group
    yield (
        "neftune_noise_alpha",
        args.neftune_noise_alpha,
        "the noise would be that of a rank's length, which is too much",
    )
    at_decoder = options.compiled is None and shard_at(run.base) == "decoder"
    if options.deal_images and not at_decoder:
        yield "deal_images", True, f"{model} is no vision-language model, or is compiled"
    if at_decoder:
        yield (
            "label_smoothing_factor",
            args.label_smoothing_factor,
            f"Trainer doesn't shift the labels of {model} then; deepsp.causal_lm_loss in a loop of "
            "your own does",
        )
        for name in ("mix_lengths", "fold_prefixes"):
            why = f"{model} is sharded where its decoder begins"
            yield name, getattr(options, name), why
    if is_classifier(run.base) and options.compiled is None:
        for name in ("own_batches", "mix_lengths", "without_logits", "local_loss"):
            folds = name == "mix_lengths" and options.fold_prefixes
            value = getattr(options, name) and not folds
            yield name, value, f"{model} computes a loss of full rows itself"
    if options.own_batches:
        of_all = "the loss is divided by the number of labels of all ranks' rows"
        yield (
            "average_tokens_across_devices=False with own_batches",
            not args.average_tokens_across_devices,
            of_all,
        )
        yield (
            "accepts_loss_kwargs=False of the model with own_batches",
            not trainer.model_accepts_loss_kwargs,
            of_all,
        )
        yield (
            "even_batches=False with own_batches",
            not trainer.accelerator.even_batches,
            "ranks with fewer batches would leave the others waiting",
        )
    if options.compiled is not None:
        yield from _refused_compiled(run)
        return
    for name in ("mix_lengths", "fold_prefixes"):
        if getattr(options, name) and any(mixers_in(run.base)):
            yield name, True, f"recurrent layers of {model} need the tokens in order"
    names = {cls.__name__ for cls in type(trainer).__mro__}
    folds = names & {"DPOTrainer", "KTOTrainer", "GRPOTrainer", "RLOOTrainer", "RewardTrainer"}
    if not folds or names & {"AsyncGRPOTrainer"}:
        why = "only DPO, KTO, GRPO, RLOO and reward models have rows that begin alike"
        yield "fold_prefixes", options.fold_prefixes, why
    if options.local_loss:
        yield "mix_lengths with local_loss", options.mix_lengths, "tokens would be in another order"
        yield "compute_loss_func with local_loss", trainer.compute_loss_func, "it gets full rows"
        yield "label_smoothing_factor", args.label_smoothing_factor, "the class has its own loss"
    if hasattr(trainer, "teacher_model") or trainer.sequence_has_loader:
        for name in ("own_batches", "mix_lengths", "local_loss"):
            yield name, getattr(options, name), "TRL makes its batches and losses of full rows"
    if options.teacher is not None:
        yield "mix_lengths with teacher", options.mix_lengths, "the teacher gets full rows"
    config = run.base.config.get_text_config()
    if options.without_logits:
        yield "compute_loss_func with without_logits", trainer.compute_loss_func, "it gets logits"
        yield (
            "output_router_logits of the model's config with without_logits",
            getattr(config, "output_router_logits", False) and not run.is_of_trl,
            "the loss that balances experts would be left out",
        )


def _refused_compiled(run: Run) -> Iterator[tuple[str, Any, str]]:
    trainer, options = run.trainer, run.options
    for name in ("without_logits", "mix_lengths", "fold_prefixes", "local_loss"):
        why = "the model computes the loss itself, from full batches"
        yield f"{name} with compiled", getattr(options, name), why
    set_here = sorted(set(_OF_THE_TRAINER) & set(options.compiled))
    yield "options of the compile pass that the trainer sets", set_here, "it knows them"
    why = "its models compute their loss in ways that can't be captured in one graph"
    of_trl = (c.__name__ for c in type(trainer).__mro__ if c.__module__.split(".")[0] == "trl")
    yield "trainer of TRL with compiled", next(of_trl, None), why
    kind = trainer.accelerator.distributed_type
    yield (
        "wrapper other than DDP with compiled",
        None if kind.name.startswith("MULTI_") else kind.name,
        "its hooks break the graph; shard weights with deepsp.shard_parameters in a loop of your "
        "own",
    )


def _check_tensor_parallel(run: Run) -> None:
    options, groups = run.options, run.groups
    refuse_dealt(run.trainer.model, "in a tensor-parallel model", "leave one of them out")
    config, ranks = run.base.config.distributed_config, groups.number * groups.size
    if config.dp_size != ranks:
        raise ValueError(
            f"expected fsdp_size={ranks} in the model's DistributedConfig, the ranks over which "
            f"gradients are averaged ({groups.number} group(s) of {groups.size} sequence ranks), "
            f"got {config.dp_size}; load the model with that"
        )
    refused = {
        f"{run.loss_class.__name__}, which computes its loss itself": run.has_own_loss,
        "compiled": options.compiled is not None,
        "own_batches": options.own_batches,
        "mix_lengths": options.mix_lengths,
        "without_logits": options.without_logits,
        "average_tokens_across_devices=False": not run.trainer.args.average_tokens_across_devices,
    }
    for name in (n for n, is_set in refused.items() if is_set):
        raise ValueError(
            f"expected a tensor-parallel model without {name}, which hasn't been made to work "
            f"with one, got tp_size={run.tensor_size}; leave one of them out"
        )


def check_parallelism(config: ParallelismConfig, tensor_size: int) -> None:
    """Raises for a ``parallelism_config`` that has more than the size."""
    if config.tp_size != tensor_size:
        raise ValueError(
            "expected tp_size of parallelism_config to be that of the model, "
            f"{tensor_size}, got {config.tp_size}; load the model with from_pretrained("
            "name, distributed_config=DistributedConfig(tp_size=..., fsdp_size=...))"
        )
    if config.dp_replicate_size > 1:
        raise ValueError(
            "expected parallelism_config without dp_replicate_size, got "
            f"{config.dp_replicate_size}; leave it out"
        )
