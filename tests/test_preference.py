"""TRL's preference and RL trainers over sharded sequences: each logged number is that of one
process."""

import functools
import itertools
from unittest import mock

import by_trl
import pytest
import torch
import trl
from by_trl import check_folded, made, reference_of, reinforced, reward_of, same
from harness import on_ranks
from trained import arguments, launched, logs, pairs, run_launched, tiny, tokenizer

from deepsp.integrations.proof.outcome import Measure


def _judged(count, seed=0):
    """Prompts with a completion and whether it is good."""
    rows = pairs(count, seed)
    columns = ["rejected", "chosen"]
    labels = [i % 3 > 0 for i in range(count)]
    completions = [row[columns[good]] for row, good in zip(rows, labels, strict=True)]
    rows = rows.remove_columns(columns)
    return rows.add_column("completion", completions).add_column("label", labels)


_ROWS = {"DPO": pairs, "KTO": _judged}


def _preferences(size, batch, name="DPO", kind="", folder=None, of="llama", stage=None, **more):
    """By DPO or KTO."""
    from datasets import load_from_disk

    given = {"DPO": {"use_weighting": kind == "weighting"}, "KTO": {"undesirable_weight": 0.7}}
    reference = None if kind == "LoRA" else reference_of(of)
    cls, more = made(
        name,
        size,
        kind,
        batch,
        evaluates=folder is None,
        dataset_num_proc=None,
        of=of,
        stage=stage,
        precompute_ref_log_probs=folder is not None,
        **given[name],
        **more,
    )
    if reference is not None:
        more["ref_model"] = reference
    rows = _ROWS[name]
    train = rows(24) if folder is None else load_from_disk(f"{folder}/{size}")
    if kind == "one prompt":
        train = train.map(lambda _: {"prompt": train[4]["prompt"]})
    trainer = cls(train_dataset=train, eval_dataset=None if folder else rows(5, 1), **more)
    if reference is not None and size > 1:
        assert reference.config._attn_implementation == "deepsp"
    trainer.train()
    check_folded(trainer, more)
    torch._dynamo.reset()  # else Dynamo skips functions that have broken a graph, for good
    if kind or stage is not None:
        return logs(trainer)
    # Afterwards, with its own attention, the model works on whole rows again.
    more["model"].set_attn_implementation("sdpa")
    ids = torch.arange(5, 18)[None]
    found = more["model"](input_ids=ids, labels=ids, fused_lm_head=True).log_probs
    return [*logs(trainer), {"afterwards": float(found.detach().sum())}]


@pytest.mark.parametrize("name", ["DPO", "KTO"])
def test_preferences(name):
    same(_preferences, 2, 2, name=name)


@pytest.mark.parametrize("name", ["DPO", pytest.param("KTO", marks=pytest.mark.nightly)])
def test_folded_preferences(name):
    kind = {"DPO": "", "KTO": "one prompt"}[name]  # its batches have other prompts else
    same(_preferences, 2, 2, name=name, folds=True, kind=kind)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "given",
    [
        {"kind": "LoRA", "folds": "dealt"},
        {"kind": "checkpointing", "folds": True},
        {"kind": "sharded", "fsdp": True, "folds": True},
        {"stage": 3, "folds": True},
        {"world": 4, "folds": True},
    ],
    ids=str,
)
def test_kinds_of_folded_preferences(given):
    same(_preferences, **{"world": 2, "size": 2, "batch": 2, **given})


@pytest.mark.nightly  # compiles for half a minute
def test_preferences_compiled():
    same(_preferences, 2, 2, torch_compile=True, torch_compile_backend="eager")


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["DPO", "KTO"])
def test_preferences_of_groups(name):
    same(_preferences, 4, 2, name=name)


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
    same(_preferences, 2, 2, **given)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference")
    reference_of().save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("name", ["GRPO", pytest.param("RLOO", marks=pytest.mark.nightly)])
def test_reinforced(name, reference):
    same(reinforced, 2, 2, batch=4, reference=reference, name=name, steps_per_generation=2)


def _dtypes(function, batch, name):
    """Returns the dtypes of linear layers' outputs: in the proof, and in all."""
    proving, proven, every = [], set(), set()
    measure = Measure.__call__

    def watched(*args, **kwargs):
        proving.append(True)
        try:
            return measure(*args, **kwargs)
        finally:
            proving.pop()

    def seen(module, args, out):
        if isinstance(module, torch.nn.Linear):
            every.add(out.dtype)
            proven.update({out.dtype} if proving else ())

    hook = torch.nn.modules.module.register_module_forward_hook(seen)
    try:
        with mock.patch.object(Measure, "__call__", watched):
            run_launched(function, 2, batch, (("name", name), ("kind", "bf16")))
    finally:
        hook.remove()
    return proven, every


@pytest.mark.parametrize("name", ["DPO", "GRPO"])
def test_proven_in_float32(name, reference):
    """In training with autocast, which TRL enters by itself."""
    of = {"DPO": (_preferences, 2), "GRPO": (functools.partial(reinforced, reference=reference), 4)}
    function, batch = of[name]
    for proven, every in on_ranks(2, _dtypes, function, batch, name):
        assert proven == {torch.float32} and torch.bfloat16 in every


@pytest.mark.parametrize("name", ["GRPO", pytest.param("RLOO", marks=pytest.mark.nightly)])
def test_folded_rollouts(name, reference):
    given = {"name": name, "folds": "dealt", "steps_per_generation": 2}
    same(reinforced, 3, 3, batch=4, reference=reference, **given)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["GRPO", "RLOO"])
def test_reinforced_in_groups(name, reference):
    same(reinforced, 4, 2, batch=3, reference=reference, name=name, steps_per_generation=2)


_REINFORCED = [
    {"name": "GRPO", "kind": "LoRA", "mask_truncated_completions": True, "scale_rewards": "batch"},
    {"name": "GRPO", "kind": "checkpointing", "top_entropy_quantile": 0.5, "loss_type": "grpo"},
    {"name": "RLOO", "kind": "LoRA", "num_iterations": 2},
    {"name": "RLOO", "kind": "checkpointing"},
]


@pytest.mark.nightly
@pytest.mark.parametrize("given", _REINFORCED, ids=str)
def test_kinds_of_reinforcement(given, reference):
    same(reinforced, 2, 2, batch=4, reference=reference, **given)


@pytest.mark.nightly
@pytest.mark.parametrize("of", ["qwen3_next", "nemotron_h", "deepseek_v32"])
def test_recurrent_layers_and_indexers(of, tmp_path):
    """They generate with a cache, and train on sharded sequences."""
    given = {"of": of, "digits": 1e-3}
    if of == "deepseek_v32":  # whose indexers have no gradients
        given["ddp_find_unused_parameters"] = True
    if of == "qwen3_next":
        given["router_aux_loss_coef"] = 0.0  # the tiny one has no experts
    reference_of(of).save_pretrained(tmp_path)
    same(_preferences, 2, 2, **given)
    same(reinforced, 2, 2, batch=4, reference=str(tmp_path), **given)


@pytest.mark.nightly
def test_zero3(reference):
    same(_preferences, 2, 2, stage=3)
    same(reinforced, 2, 2, batch=4, reference=reference, stage=3)


@pytest.mark.nightly  # test_rollouts.py has it with rollouts by vLLM
@pytest.mark.parametrize(("name", "world"), [("GRPO", 2), ("RLOO", 2), ("GRPO", 4)])
def test_reinforced_under_fsdp(name, world, reference):
    same(
        reinforced,
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
    same(_preferences, 2, 2, name=name, kind="sharded", fsdp=True)


@pytest.mark.nightly
def test_mixtures():
    """The loss that balances experts is that of the full sequence."""
    same(_preferences, 2, 2, of="mixtral", router_aux_loss_coef=1.0)
    same(_preferences, 2, 2, of="mixtral", router_aux_loss_coef=1.0, folds="dealt")
    same(_preferences, 4, 2, name="KTO", of="qwen3_moe", router_aux_loss_coef=1.0)


def _refusals():
    def trainer(name, arguments=(), **more):
        arguments = dict(arguments)
        if name in ("GRPO", "RLOO"):
            arguments = {"num_generations": 2, **arguments}
            more["reward_funcs"] = [reward_of]
        cls, given = made(name, 2, evaluates=False, **arguments)
        return cls(train_dataset=_ROWS.get(name, pairs)(8), **{**given, **more})

    def sft():
        cls, more = by_trl.of_class("SFT", 2)
        return cls(
            model=tiny(),
            args=arguments(trl.SFTConfig, eval_strategy="no"),
            processing_class=tokenizer(splits=True),
            train_dataset=pairs(4).rename_column("chosen", "completion"),
            fold_prefixes=True,
            **more,
        )

    of = "qwen3_next"
    recurrent = {"of": of, "router_aux_loss_coef": 0.0}

    async def later():
        pass

    batching = {"use_transformers_continuous_batching": True}
    cases = [
        (
            lambda: trainer("DPO", mix_lengths=True),
            r"no mix_lengths in a sequence-parallel DPOTrainer, since the rows of a batch belong",
        ),
        (
            lambda: trainer("DPO", recurrent, ref_model=reference_of(of), fold_prefixes=True),
            r"no fold_prefixes in .*DPOTrainer, since recurrent layers of Qwen3Next.* need the",
        ),
        (
            sft,
            r"no fold_prefixes in .*SFTTrainer, since only DPO, KTO, GRPO, RLOO and reward models",
        ),
        (lambda: trainer("KTO", compute_metrics=print), r"no compute_metrics in .*KTOTrainer"),
        (lambda: trainer("RLOO", batching), r"no use_transformers_continuous_batching in a seq"),
        (lambda: trainer("GRPO", tools=[later]), r"plain functions, .* coroutine .* \['later'\]"),
        (lambda: trainer("GRPO", rollout_func=print), r"no rollout_func in .*, since it would run"),
        (
            lambda: trainer("GRPO", {"num_generations": 4}),
            r"num_generations to divide 2, the rows of the generation batch of 1 .*, got 4",
        ),
        (
            lambda: (dpo := trainer("DPO", ref_model=reference_of())).predict(dpo.train_dataset),
            r"prediction_loss_only=True, since no rank has logits, got False; call evaluate",
        ),
    ]
    for call, pattern in cases:
        with launched(), pytest.raises(ValueError, match=pattern):
            call()


def test_refusals():
    on_ranks(2, _refusals)
