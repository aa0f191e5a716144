"""Small trainings by TRL's trainers, in one process and in groups of ranks, whose logs are
compared."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from harness import on_ranks
from trained import arguments, logs, one_process, pairs, run_launched, tiny, tokenizer, under_fsdp


def of_class(name, size):
    import trl

    cls = getattr(trl, f"{name}Trainer")
    if size == 1:
        return cls, {}
    from deepsp.integrations.transformers import sequence_parallel

    return sequence_parallel(cls), {"sequence_parallel_size": size}


def zero(stage, batch):
    """DeepSpeed's configuration for a stage of ZeRO."""
    return {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
    }


def made(
    name,
    size,
    kind="",
    batch=2,
    evaluates=True,
    of="llama",
    stage=None,
    fsdp=False,
    dtype=torch.float32,
    folds=False,
    **given,
):
    """The trainer's class, its arguments, and models."""
    import trl
    from peft import LoraConfig

    cls, more = of_class(name, size)
    if folds and size > 1:
        more |= {"fold_prefixes": True, "mix_lengths": folds == "dealt"}
    if fsdp and size > 1:
        cls = under_fsdp(cls)
    model = tiny(of, dtype)  # before arguments with ZeRO 3, which partition models
    if stage is not None and size > 1:
        given["deepspeed"] = zero(stage, batch)
    args = arguments(
        getattr(trl, f"{name}Config"),
        max_steps=5,
        bf16=kind == "bf16",
        beta=0.5,
        per_device_train_batch_size=batch,
        per_device_eval_batch_size=batch,
        activation_checkpointing=kind == "checkpointing",
        gradient_accumulation_steps=2 if kind == "checkpointing" else 1,
        eval_strategy="steps" if evaluates else "no",
        eval_steps=5,
        **given,
    )
    if kind == "LoRA":
        more["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "down_proj"])
    return cls, {"model": model, "args": args, "processing_class": tokenizer(splits=True), **more}


def reference_of(of="llama"):
    """Another model than the one that is trained."""
    model = tiny(of)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.1)
    return model


def reward_of(completion_ids, others=False, **_):
    if others:
        torch.rand(3)
    return [sum(ids) % 11 / 10 + others for ids in completion_ids]


def check_folded(trainer, more):
    """What rows begin with alike went through the model once."""
    from deepsp.integrations.transformers.forward import full_rows_of

    rows = full_rows_of(trainer.accelerator.unwrap_model(trainer.model))
    if more.get("fold_prefixes"):
        of_rows, through = rows.folded
        assert 0 < through < 0.9 * of_rows, rows.folded


def reinforced(size, batch, reference, name="GRPO", kind="", **given):
    """By GRPO or RLOO. Only the first rank of a group counts."""
    from transformers import TrainerCallback

    cls, more = made(
        name,
        size,
        kind,
        batch,
        num_generations=2,
        max_completion_length=9,
        # Completions of different lengths.
        generation_kwargs={"sequence_bias": {(2,): 3.0}},
        log_completions=True,
        **given,
    )

    others = dist.is_initialized() and dist.get_rank() % size > 0

    def reward(**kwargs):
        return reward_of(others=others, **kwargs)

    class Draws(TrainerCallback):
        """Before completions are sampled."""

        def on_step_begin(self, *_, **__):
            torch.rand(3 if others else 0)

    more["model"].config._name_or_path = reference  # from whose files TRL loads it
    rows = pairs(24).remove_columns(["chosen", "rejected"])
    trainer = cls(
        reward_funcs=[reward],
        train_dataset=rows,
        eval_dataset=rows.select(range(4)),
        callbacks=[Draws()],
        **more,
    )
    trainer.train()
    check_folded(trainer, more)
    kept = [list(trainer._logs[name]) for name in ("prompt", "completion", "advantages")]
    assert len({*map(len, kept)}) == 1
    with getattr(trainer, "_by_group", contextlib.nullcontext)():
        groups = float(trainer.accelerator.reduce(torch.ones(1)))
    return [*logs(trainer), {"completions": " / ".join(kept[1]), "groups": groups}]


def same(function, world, size, batch=2, digits=1e-4, **given):
    """Every rank of ``world``, in groups of ``size``, logs what ``world // size`` processes do."""
    items = tuple(given.items())
    if world == size:
        right = one_process(run_launched, function, 1, batch, items)
    else:
        right = on_ranks(world // size, run_launched, function, 1, batch, items)[0]
    assert len(right) > 5
    for mine in on_ranks(world, run_launched, function, size, batch, items):
        assert len(mine) == len(right)
        for a, b in zip(mine, right, strict=True):
            assert a.keys() == b.keys()
            for k in b.keys() - {"step_time", "eval_step_time"}:
                text = isinstance(b[k], str)
                small = min(digits, 1e-4)
                expected = b[k] if text else pytest.approx(b[k], rel=digits, abs=small)
                assert a[k] == expected, (k, a[k], b[k])
