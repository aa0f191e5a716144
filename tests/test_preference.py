"""TRL's preference and RL trainers over sharded sequences: each logged number is that of one
process."""

import contextlib
import itertools

import pytest
import torch
import torch.distributed as dist
from harness import on_ranks
from trained import (
    arguments,
    launched,
    logs,
    one_process,
    pairs,
    run_launched,
    tiny,
    tokenizer,
    under_fsdp,
)


def _judged(count, seed=0):
    """Prompts with a completion and whether it is good."""
    rows = pairs(count, seed)
    columns = ["rejected", "chosen"]
    labels = [i % 3 > 0 for i in range(count)]
    completions = [row[columns[good]] for row, good in zip(rows, labels, strict=True)]
    rows = rows.remove_columns(columns)
    return rows.add_column("completion", completions).add_column("label", labels)


_ROWS = {"DPO": pairs, "KTO": _judged}


def _class(name, size):
    import trl

    cls = getattr(trl, f"{name}Trainer")
    if size == 1:
        return cls, {}
    from deepsp.integrations.transformers import sequence_parallel

    return sequence_parallel(cls), {"sequence_parallel_size": size}


def _made(name, size, kind="", batch=2, evaluates=True, of="llama", zero=None, fsdp=False, **given):
    """The trainer's class, its arguments, and models."""
    import trl
    from peft import LoraConfig

    cls, more = _class(name, size)
    if fsdp and size > 1:
        cls = under_fsdp(cls)
    model = tiny(of)  # before arguments with ZeRO 3, which partition models
    if zero is not None and size > 1:
        given["deepspeed"] = {
            "train_micro_batch_size_per_gpu": batch,
            "gradient_accumulation_steps": 1,
            "zero_optimization": {"stage": zero, "stage3_param_persistence_threshold": 0},
            "gradient_clipping": 1.0,
            "zero_allow_untested_optimizer": True,
        }
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


def _reference(of="llama"):
    """Another model than the one that is trained."""
    found = tiny(of)
    with torch.no_grad():
        for p in found.parameters():
            p.mul_(1.1)
    return found


def _preferences(size, batch, name="DPO", kind="", folder=None, of="llama", zero=None, **more):
    """By DPO or KTO."""
    from datasets import load_from_disk

    given = {"DPO": {"use_weighting": kind == "weighting"}, "KTO": {"undesirable_weight": 0.7}}
    reference = None if kind == "LoRA" else _reference(of)
    cls, more = _made(
        name,
        size,
        kind,
        batch,
        evaluates=folder is None,
        dataset_num_proc=None,
        of=of,
        zero=zero,
        precompute_ref_log_probs=folder is not None,
        **given[name],
        **more,
    )
    if reference is not None:
        more["ref_model"] = reference
    rows = _ROWS[name]
    train = rows(24) if folder is None else load_from_disk(f"{folder}/{size}")
    trainer = cls(train_dataset=train, eval_dataset=None if folder else rows(5, 1), **more)
    if reference is not None and size > 1:
        assert reference.config._attn_implementation == "deepsp"
    trainer.train()
    torch._dynamo.reset()  # else Dynamo skips functions that have broken a graph, for good
    if kind or zero is not None:
        return logs(trainer)
    # Afterwards, with its own attention, the model works on whole rows again.
    more["model"].set_attn_implementation("sdpa")
    ids = torch.arange(5, 18)[None]
    found = more["model"](input_ids=ids, labels=ids, fused_lm_head=True).log_probs
    return [*logs(trainer), {"afterwards": float(found.detach().sum())}]


def _reward(completion_ids, others=False, **_):
    if others:
        torch.rand(3)
    return [sum(ids) % 11 / 10 + others for ids in completion_ids]


def _reinforced(size, batch, reference, name="GRPO", kind="", **given):
    """By GRPO or RLOO. Only the first rank of a group counts."""
    from transformers import TrainerCallback

    cls, more = _made(
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
        return _reward(others=others, **kwargs)

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
    kept = [list(trainer._logs[name]) for name in ("prompt", "completion", "advantages")]
    assert len({*map(len, kept)}) == 1
    with getattr(trainer, "_by_group", contextlib.nullcontext)():
        groups = float(trainer.accelerator.reduce(torch.ones(1)))
    return [*logs(trainer), {"completions": " / ".join(kept[1]), "groups": groups}]


def _same(function, world, size, batch=2, digits=1e-4, **given):
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
                expected = b[k] if text else pytest.approx(b[k], rel=digits, abs=1e-4)
                assert a[k] == expected, (k, a, b)


@pytest.mark.parametrize("name", ["DPO", "KTO"])
def test_preferences(name):
    _same(_preferences, 2, 2, name=name)


@pytest.mark.nightly  # compiles for half a minute
def test_preferences_compiled():
    _same(_preferences, 2, 2, torch_compile=True, torch_compile_backend="eager")


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["DPO", "KTO"])
def test_preferences_of_groups(name):
    _same(_preferences, 4, 2, name=name)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *itertools.product(["DPO", "KTO"], ["LoRA", "checkpointing", "precomputed"]),
        ("DPO", "weighting"),
    ],
)
def test_kinds_of_preferences(name, kind, tmp_path):
    given = {"name": name, "kind": kind}
    if kind == "precomputed":
        for size in (1, 2):
            _ROWS[name](24).save_to_disk(tmp_path / str(size))  # TRL puts the result there
        given["folder"] = str(tmp_path)
    _same(_preferences, 2, 2, **given)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference")
    _reference().save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("name", ["GRPO", "RLOO"])
def test_reinforced(name, reference):
    _same(_reinforced, 2, 2, batch=4, reference=reference, name=name, steps_per_generation=2)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["GRPO", "RLOO"])
def test_reinforced_in_groups(name, reference):
    _same(_reinforced, 4, 2, batch=3, reference=reference, name=name, steps_per_generation=2)


_REINFORCED = [
    {"name": "GRPO", "kind": "LoRA", "mask_truncated_completions": True, "scale_rewards": "batch"},
    {"name": "GRPO", "kind": "checkpointing", "top_entropy_quantile": 0.5, "loss_type": "grpo"},
    {"name": "RLOO", "kind": "LoRA", "num_iterations": 2},
    {"name": "RLOO", "kind": "checkpointing"},
]


@pytest.mark.nightly
@pytest.mark.parametrize("given", _REINFORCED, ids=str)
def test_kinds_of_reinforcement(given, reference):
    _same(_reinforced, 2, 2, batch=4, reference=reference, **given)


@pytest.mark.nightly
@pytest.mark.parametrize("of", ["qwen3_next", "nemotron_h", "deepseek_v32"])
def test_recurrent_layers_and_indexers(of, tmp_path):
    """They generate with a cache, and train on sharded sequences."""
    given = {"of": of, "digits": 1e-3}
    if of == "deepseek_v32":  # whose indexers have no gradients
        given["ddp_find_unused_parameters"] = True
    if of == "qwen3_next":
        given["router_aux_loss_coef"] = 0.0  # the tiny one has no experts
    _reference(of).save_pretrained(tmp_path)
    _same(_preferences, 2, 2, **given)
    _same(_reinforced, 2, 2, batch=4, reference=str(tmp_path), **given)


@pytest.mark.nightly
def test_zero3(reference):
    _same(_preferences, 2, 2, zero=3)
    _same(_reinforced, 2, 2, batch=4, reference=reference, zero=3)


_UNDER_FSDP = [
    ("GRPO", 2),
    *(pytest.param(*x, marks=pytest.mark.nightly) for x in [("RLOO", 2), ("GRPO", 4)]),
]


@pytest.mark.parametrize(("name", "world"), _UNDER_FSDP)
def test_reinforced_under_fsdp(name, world, reference):
    _same(
        _reinforced,
        world,
        2,
        batch=4,
        reference=reference,
        name=name,
        fsdp=True,
        steps_per_generation=2,
    )


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["DPO", "KTO"])
def test_preferences_under_fsdp(name):
    _same(_preferences, 2, 2, name=name, kind="sharded", fsdp=True)


@pytest.mark.nightly
def test_mixtures():
    """The loss that balances experts is that of the full sequence."""
    _same(_preferences, 2, 2, of="mixtral", router_aux_loss_coef=1.0)
    _same(_preferences, 4, 2, name="KTO", of="qwen3_moe", router_aux_loss_coef=1.0)


def _refusals():
    def trainer(name, arguments=(), **more):
        arguments = dict(arguments)
        if name in ("GRPO", "RLOO"):
            arguments = {"num_generations": 2, **arguments}
            more["reward_funcs"] = [_reward]
        cls, given = _made(name, 2, evaluates=False, **arguments)
        return cls(train_dataset=_ROWS.get(name, pairs)(8), **{**given, **more})

    batching = {"use_transformers_continuous_batching": True}
    cases = [
        (
            lambda: trainer("DPO", mix_lengths=True),
            r"no mix_lengths in a sequence-parallel DPOTrainer, since the rows of a batch belong",
        ),
        (lambda: trainer("KTO", compute_metrics=print), r"no compute_metrics in .*KTOTrainer"),
        (lambda: trainer("GRPO", {"use_vllm": True}), r"no use_vllm in .*GRPOTrainer, .* True"),
        (lambda: trainer("RLOO", batching), r"no use_transformers_continuous_batching in a seq"),
        (lambda: trainer("GRPO", tools=[print]), r"no tools in .*, since they would run on eve"),
        (lambda: trainer("GRPO", rollout_func=print), r"no rollout_func in .*, since it would run"),
        (
            lambda: trainer("GRPO", {"num_generations": 4}),
            r"num_generations to divide 2, the rows of the generation batch of 1 .*, got 4",
        ),
        (
            lambda: (dpo := trainer("DPO", ref_model=_reference())).predict(dpo.train_dataset),
            r"prediction_loss_only=True, since no rank has logits, got False; call evaluate",
        ),
    ]
    for call, pattern in cases:
        with launched(), pytest.raises(ValueError, match=pattern):
            call()


def test_refusals():
    on_ranks(2, _refusals)
