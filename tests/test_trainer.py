"""transformers' Trainer over sharded sequences: each logged number is that of one process."""

import multiprocessing
import subprocess
import sys
import tempfile
from pathlib import Path

import indexed
import numpy as np
import pytest
import torch
from harness import on_ranks
from trained import (
    LENGTH,
    Rows,
    arguments,
    compare_logs,
    launched,
    lists,
    logs,
    one_process,
    run_launched,
    tiny,
    tokenizer,
    trainer_class,
    under_fsdp,
    wide_loss,
)

import deepsp

f64 = torch.float64
_NIGHTLY = pytest.param(2, 2, marks=pytest.mark.nightly)  # four ranks are two of these groups


def _metrics(prediction):
    logits, labels = prediction.predictions, prediction.label_ids
    right = logits.argmax(-1)[:, :-1] == labels[:, 1:]
    size = np.abs(logits[labels != -100]).sum()
    return {"right": float(right.sum()), "rows": len(labels), "size": float(size)}


def _plain(
    size,
    batch,
    name="llama",
    config=(),
    dtype=torch.float32,
    rows=11,
    masked=None,
    options=(),
    evaluates_first=False,
    tiled=False,
    keeps_attention=False,
    metrics=_metrics,
    initialized=False,
    **given,
):
    if keeps_attention:
        policy = deepsp.checkpoint_policy()
        given["activation_checkpointing_kwargs"] = {"use_reentrant": False, "context_fn": policy}
    model = tiny(name, dtype, **dict(config))
    if tiled and size > 1:
        deepsp.tile_(model, tokens=3)
    if size == 1 and dtype == f64 and "label_smoothing_factor" not in given:
        model.loss_function = wide_loss
    cls, more = trainer_class(size)
    if size > 1:
        more |= dict(options)
    args = arguments(per_device_train_batch_size=batch, per_device_eval_batch_size=batch, **given)
    train, evaluation = Rows(40, keep=masked), Rows(rows, 1)
    if initialized:  # when the trainer is made, and again when it trains
        more["model_init"], model = lambda: tiny(name, dtype, **dict(config)), None
    trainer = cls(
        model, args, train_dataset=train, eval_dataset=evaluation, compute_metrics=metrics, **more
    )
    if evaluates_first:  # which prepares the model for no training
        trainer.evaluate()
        trainer.model_preparation_time = 0.0  # a metric
    trainer.train()
    if dict(options).get("own_batches"):
        rows = batch * args.world_size * args.gradient_accumulation_steps
        assert trainer.get_total_train_batch_size(args) == rows
    return logs(trainer)


@pytest.mark.parametrize(
    ("name", "more"), [("qwen3_next", {}), ("nemotron_h", {"activation_checkpointing": True})]
)
def test_recurrent_layers(name, more):
    compare_logs(_plain, 2, 2, name=name, digits=1e-4, **more)


@pytest.mark.parametrize(
    ("world", "size"), [(2, 2), (3, 3), pytest.param(4, 2, marks=pytest.mark.nightly)]
)
def test_float64(world, size):
    compare_logs(_plain, world, size, dtype=f64, digits=1e-10)


@pytest.mark.nightly  # the random cases of the doors have some
@pytest.mark.parametrize(("world", "size"), [(2, 2), (4, 2)])
def test_accumulation(world, size):
    compare_logs(_plain, world, size, batch=2, name="qwen3", gradient_accumulation_steps=3)


@pytest.mark.parametrize(
    "given",
    [
        {"masked": 6},  # no label in the second half of any row
        {"label_smoothing_factor": 0.1},
        {"activation_checkpointing": True, "keeps_attention": True},
        {"average_tokens_across_devices": False, "max_grad_norm": 0.5},
        pytest.param({"bf16": True, "digits": 2e-2}, marks=pytest.mark.nightly),
        {
            "torch_compile": True,
            "torch_compile_backend": "aot_eager",
            "bf16": True,
            "digits": 2e-2,
            "prediction_loss_only": True,
        },
        {"prediction_loss_only": True},
        {"evaluates_first": True, "initialized": True},
        {"tiled": True, "activation_checkpointing": True, "options": (("query_parts", 2),)},
        {
            "options": (("without_logits", True),),
            "name": "gemma2",
            "prediction_loss_only": True,
            "config": (("attn_logit_softcapping", None), ("final_logit_softcapping", 2.0)),
        },
    ],
    ids=lambda given: next(iter(given)),
)
def test_arguments(given):
    compare_logs(_plain, 2, 2, **given)


def _collated(size, batch, collator, length=None, **given):
    from transformers import DataCollatorForLanguageModeling, DataCollatorWithFlattening

    collate = {
        "padding": lambda: DataCollatorForLanguageModeling(tokenizer(), mlm=False),
        "packing": lambda: DataCollatorWithFlattening(
            return_position_ids=size == 1, return_flash_attn_kwargs=size > 1
        ),
        "positions": DataCollatorWithFlattening,
    }[collator]()
    cls, more = trainer_class(size)
    args = arguments(per_device_train_batch_size=batch, per_device_eval_batch_size=batch, **given)
    trainer = cls(
        tiny(),
        args,
        train_dataset=lists(40, length=length),
        eval_dataset=lists(8, 1, length=length),
        data_collator=collate,
        **more,
    )
    trainer.train()
    return logs(trainer)


@pytest.mark.parametrize(("world", "size"), [_NIGHTLY, (4, 2)])
def test_padded_rows(world, size):
    compare_logs(_collated, world, size, collator="padding", prediction_loss_only=True)


def test_packed_rows():
    compare_logs(_collated, 2, 2, collator="packing", prediction_loss_only=True)


def test_packed_rows_of_one_document():
    """Longer than the part that is proven."""
    settings = {"collator": "packing", "length": 141, "prediction_loss_only": True}
    compare_logs(_collated, 2, 2, batch=1, **settings)


def test_packed_rows_of_groups():
    """A group has a document in an evaluation's batch; one process has that of two groups."""
    settings = {"collator": "positions", "length": 41, "prediction_loss_only": True}
    compare_logs(_collated, 4, 2, batch=2, **settings)


def test_documents_that_end_where_the_tokens_of_ranks_do():
    compare_logs(_collated, 2, 2, batch=2, collator="packing", length=10, prediction_loss_only=True)


def _sft(size, batch, packing=False, metrics=None, rows=40, name="qwen3", options=(), **given):
    from trl import SFTConfig, SFTTrainer

    cls, more = SFTTrainer, {}
    if size > 1:
        from deepsp.integrations.transformers import sequence_parallel

        cls = sequence_parallel(SFTTrainer)
        more = {"sequence_parallel_size": size, **dict(options)}
    args = arguments(
        SFTConfig,
        per_device_train_batch_size=batch,
        per_device_eval_batch_size=batch,
        bf16=False,
        max_length=32,
        packing=packing,
        padding_free=False,
        dataset_num_proc=None,
        **given,
    )
    trainer = cls(
        tiny(name),
        args,
        train_dataset=lists(rows),
        eval_dataset=lists(8 + rows % 8, 1),
        processing_class=tokenizer(),
        compute_metrics=metrics,
        **more,
    )
    if "without_logits" in dict(options):
        trainer.model.lm_head.register_forward_pre_hook(lambda *_: pytest.fail("logits"))
    trainer.train()
    return logs(trainer)


@pytest.mark.parametrize(("world", "size"), [_NIGHTLY, (4, 2)])
def test_sft(world, size):
    compare_logs(_sft, world, size, digits=1e-4, gradient_accumulation_steps=3)


def test_sft_metrics_of_a_last_batch_with_one_row():
    compare_logs(_sft, 2, 2, digits=1e-4, rows=9, name="nemotron_h")


def test_sft_packing():
    compare_logs(_sft, 2, 2, digits=1e-4, packing=True, options=(("without_logits", True),))


def test_balanced_experts():
    config = ("num_local_experts", 4), ("output_router_logits", True), ("router_aux_loss_coef", 0.5)
    compare_logs(_plain, 2, 2, name="mixtral", config=config, digits=1e-4, metrics=None)


_MIXED = (("mix_lengths", True),)


def test_mixed_lengths():
    compare_logs(_plain, 3, 3, dtype=f64, digits=1e-10, options=_MIXED)


@pytest.mark.nightly
def test_mixed_lengths_by_trl():
    compare_logs(_sft, 4, 2, digits=1e-4, gradient_accumulation_steps=3, options=_MIXED)
    compare_logs(_sft, 2, 2, digits=1e-4, packing=True, options=_MIXED)


def _same_steps(function, world, size, digits, own=(), **given):
    """Every rank has rows of its own: each step is that of one process with all of them."""
    expected = one_process(run_launched, function, 1, 2 * world, tuple(given.items()))
    items = tuple({**given, "options": (*own, ("own_batches", True))}.items())
    for mine in on_ranks(world, run_launched, function, size, 2, items):
        for a, b in zip(mine, expected, strict=True):
            for name in (n for n in b if "eval" not in n):  # evaluation shares its batches
                rough = max(digits, 1e-6) if name in ("loss", "train_loss") else digits
                assert a[name] == pytest.approx(b[name], rel=rough), (name, a, b)


def test_own_batches():
    _same_steps(_plain, 4, 2, 1e-10, dtype=f64, gradient_accumulation_steps=2, eval_steps=1)
    _same_steps(_sft, 2, 2, 1e-4, own=_MIXED)


def test_sft_metrics():
    compare_logs(_sft, 2, 2, digits=1e-4, metrics=_metrics)


class _Masked(Rows):
    """No row has labels."""

    def __getitem__(self, i):
        row = super().__getitem__(i)
        return {**row, "labels": torch.full_like(row["labels"], -100)}


def _no_labels(size, batch):
    cls, more = trainer_class(size)
    args = arguments(per_device_eval_batch_size=batch, eval_strategy="no")
    trainer = cls(tiny(), args, **more)
    return trainer.evaluate(_Masked(4))["eval_loss"]


def test_evaluation_without_labels_is_nan():
    assert np.isnan(on_ranks(2, run_launched, _no_labels, 2, 2, ())).all()
    assert np.isnan(run_launched(_no_labels, 1, 2, ()))


def _lora(size, batch):
    from peft import LoraConfig, get_peft_model
    from transformers import set_seed

    cls, more = trainer_class(size)
    set_seed(1)
    lora = LoraConfig(
        r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False
    )
    model = get_peft_model(tiny(), lora)
    args = arguments(per_device_train_batch_size=batch, per_device_eval_batch_size=batch)
    trainer = cls(model, args, train_dataset=Rows(40), eval_dataset=Rows(6, 1), **more)
    trainer.train()
    return logs(trainer)


def test_lora():
    compare_logs(_lora, 2, 2, batch=2)


def _predicts(size, batch):
    cls, more = trainer_class(size)
    args = arguments(per_device_eval_batch_size=batch, eval_strategy="no")
    trainer = cls(tiny(dtype=f64), args, **more)
    unlabelled = [{"input_ids": row["input_ids"]} for row in Rows(7)]
    found = trainer.predict(Rows(7)), trainer.predict(unlabelled)
    return [(p.predictions, p.label_ids) for p in found]


@pytest.mark.parametrize(("world", "size"), [_NIGHTLY, (4, 2), (3, 3)])
def test_predict(world, size):
    """The full logits of each row once, also without labels."""
    expected = one_process(run_launched, _predicts, 1, 2, ())
    for mine in on_ranks(world, run_launched, _predicts, size, 2 // (world // size), ()):
        for (logits, labels), (full, theirs) in zip(mine, expected, strict=True):
            np.testing.assert_allclose(logits, full, atol=1e-6)
            np.testing.assert_array_equal(labels, theirs)


def _resumes(size, batch, folder, name):
    """Four steps; two steps and, from what they saved, two more."""
    from transformers import set_seed

    cls, more = trainer_class(size)
    found = []
    for steps, again in ((4, False), (2, False), (4, True)):
        set_seed(0)
        args = arguments(
            per_device_train_batch_size=batch,
            max_steps=steps,
            eval_strategy="no",
            save_strategy="steps" if steps == 2 else "no",
            save_steps=2,
            output_dir=folder,
            ddp_find_unused_parameters=name in indexed.TEXT,  # indexers have no gradients
        )
        trainer = cls(tiny(name), args, train_dataset=Rows(40), **more)
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2" if again else None)
        found.append(logs(trainer))
    return found


def _resumes_elsewhere(size, batch, folder, name):
    cls, more = trainer_class(size)
    args = arguments(
        per_device_train_batch_size=batch,
        max_steps=4,
        eval_strategy="no",
        output_dir=folder,
        ddp_find_unused_parameters=name in indexed.TEXT,
    )
    trainer = cls(tiny(name), args, train_dataset=Rows(40), **more)
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    return logs(trainer)


def test_resumed_training_is_unbroken_training(tmp_path):
    """Also on another number of ranks."""
    items = (("folder", str(tmp_path)), ("name", "qwen3_next"))
    unbroken, _, resumed = on_ranks(2, run_launched, _resumes, 2, 2, items)[0]
    assert resumed[:-1] == unbroken[:-1] and len(resumed) == 5
    for world in (1, 3):
        call = (run_launched, _resumes_elsewhere, world, 2, items)
        found = on_ranks(world, *call)[0] if world > 1 else call[0](*call[1:])
        for a, b in zip(found[:-1], unbroken[:-1], strict=True):
            assert a == pytest.approx(b, rel=1e-5)


@pytest.mark.nightly
def test_resumed_training_with_an_indexer(tmp_path):
    """As in one process, where what is resumed differs from unbroken training, too."""
    folders = [(("folder", str(tmp_path / n)), ("name", "deepseek_v32")) for n in ("a", "b")]
    expected = run_launched(_resumes, 1, 2, folders[0])
    for mine in on_ranks(2, run_launched, _resumes, 2, 2, folders[1]):
        for part, whole in zip(mine, expected, strict=True):
            for a, b in zip(part[:-1], whole[:-1], strict=True):
                assert a == pytest.approx(b, rel=1e-4)


def _fsdp(size, batch, without_logits=False):
    cls, more = trainer_class(size)
    if size > 1:
        cls = under_fsdp(cls)
        more["without_logits"] = without_logits
    args = arguments(
        per_device_train_batch_size=batch,
        per_device_eval_batch_size=batch,
        prediction_loss_only=True,
    )
    trainer = cls(tiny(), args, train_dataset=Rows(40), eval_dataset=Rows(6, 1), **more)
    trainer.train()
    return logs(trainer)


@pytest.mark.parametrize(
    ("world", "size", "options"), [(2, 2, {}), (4, 2, {}), (3, 3, {"without_logits": True})]
)
def test_fsdp(world, size, options):
    compare_logs(_fsdp, world, size, **options)


def _tensor_parallel(size, batch, folder, **given):
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    cls, more = trainer_class(size)
    config = DistributedConfig(tp_size=2, fsdp_size=2) if size > 1 else None
    args = arguments(
        per_device_train_batch_size=batch,
        per_device_eval_batch_size=batch,
        prediction_loss_only=True,
        learning_rate=1e-3,
    )
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=config)
    more |= given
    trainer = cls(model, args, train_dataset=Rows(40), eval_dataset=Rows(11, 1), **more)
    trainer.train()
    return logs(trainer)


def _refuses_tensor_parallel(size, batch, folder):
    pattern = "expected a tensor-parallel model without mix_lengths, which hasn't been made to work"
    with pytest.raises(ValueError, match=pattern):
        _tensor_parallel(size, batch, folder, mix_lengths=True)


def test_tensor_and_sequence_parallel(tmp_path):
    """One mesh: two sequence ranks x two tensor ranks."""
    tiny().save_pretrained(tmp_path)
    items = (("folder", str(tmp_path)),)
    expected = one_process(run_launched, _tensor_parallel, 1, 4, items)
    for mine in on_ranks(4, run_launched, _tensor_parallel, 2, 4, items):
        for a, b in zip(mine, expected, strict=True):
            assert a == pytest.approx(b, rel=2e-6)
    on_ranks(4, run_launched, _refuses_tensor_parallel, 2, 4, items)


def _deepspeed(size, batch, stage, saved=None, options=()):
    cls, more = trainer_class(size)
    given = {}
    if size > 1:
        given["deepspeed"] = {
            "train_micro_batch_size_per_gpu": batch,
            "gradient_accumulation_steps": 1,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "gradient_clipping": 1.0,
            "zero_allow_untested_optimizer": True,
        }
        more |= {"without_logits": saved is not None, **dict(options)}
    model = tiny()
    args = arguments(per_device_train_batch_size=batch, per_device_eval_batch_size=batch, **given)
    if saved is not None and size > 1:
        # Now that there are arguments, transformers makes models of partitioned parameters.
        model = type(model).from_pretrained(saved)
        assert all(p.numel() == 0 for p in model.parameters())
    trainer = cls(model, args, train_dataset=Rows(40), eval_dataset=Rows(6, 1), **more)
    trainer.train()
    return logs(trainer)


@pytest.mark.parametrize(
    "stage", [*(pytest.param(n, marks=pytest.mark.nightly) for n in (1, 2)), 3]
)
def test_deepspeed(stage):
    compare_logs(_deepspeed, 2, 2, stage=stage)


@pytest.mark.nightly
@pytest.mark.parametrize("stage", [1, 3])
def test_deepspeed_with_own_batches(stage):
    _same_steps(_deepspeed, 2, 2, 1e-4, stage=stage)


def test_zero3_from_files(tmp_path):
    tiny().save_pretrained(tmp_path)
    compare_logs(_deepspeed, 2, 2, stage=3, saved=str(tmp_path))


def _func(outputs, labels, num_items_in_batch=None):
    wide = outputs.logits[:, :-1].flatten(0, 1)
    losses = torch.nn.functional.cross_entropy(wide, labels[:, 1:].flatten(), reduction="sum")
    return losses.pow(1.5) / num_items_in_batch  # a loss of the full batch only


def _loss_of_ones_own(size, batch):
    cls, more = trainer_class(size)
    args = arguments(per_device_train_batch_size=batch, per_device_eval_batch_size=batch)
    trainer = cls(
        tiny(),
        args,
        train_dataset=Rows(40),
        eval_dataset=Rows(8, 1),
        compute_loss_func=_func,
        **more,
    )
    trainer.train()
    return logs(trainer)


def test_a_loss_function_gets_the_full_logits_and_labels():
    compare_logs(_loss_of_ones_own, 3, 3)


def _autocast_of_ones_own(size, batch):
    from transformers import Trainer

    from deepsp.integrations.transformers import sequence_parallel

    class Own(Trainer):
        def compute_loss(self, *args, **kwargs):
            with torch.autocast("cpu", torch.bfloat16):
                return super().compute_loss(*args, **kwargs)

    cls, more = Own, {}
    if size > 1:
        cls, more = sequence_parallel(Own), {"sequence_parallel_size": size}
    args = arguments(per_device_train_batch_size=batch, prediction_loss_only=True)
    trainer = cls(tiny(), args, train_dataset=Rows(40), eval_dataset=Rows(8, 1), **more)
    trainer.train()
    return logs(trainer)


def test_a_loss_enters_autocast():
    compare_logs(_autocast_of_ones_own, 2, 2, digits=2e-2)


class _Stream(torch.utils.data.IterableDataset):
    def __init__(self, count=40):
        self.count = count

    def __iter__(self):
        return iter(Rows(self.count))


def _stream(size, batch):
    """The last batch of an evaluation is smaller."""
    cls, more = trainer_class(size)
    args = arguments(per_device_train_batch_size=batch, per_device_eval_batch_size=batch)
    trainer = cls(
        tiny(),
        args,
        train_dataset=_Stream(),
        eval_dataset=_Stream(9),
        compute_metrics=_metrics,
        **more,
    )
    trainer.train()
    found = trainer.predict(_Stream(3))
    return [*logs(trainer), {"predicted": float(np.abs(found.predictions).sum())}]


@pytest.mark.parametrize(("world", "size"), [_NIGHTLY, (4, 2)])
def test_a_data_set_without_length(world, size):
    compare_logs(_stream, world, size)


def _own(size, batch, factor, evaluates, local=False):
    """A class whose loss is a sum over tokens / num_items_in_batch, with its labels' weights, and
    maybe the factor by which Trainer undoes the average over processes."""
    from transformers import Trainer

    from deepsp.integrations.transformers import sequence_parallel

    class Weighted(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            inputs = dict(inputs)
            weights = inputs.pop("weights")
            sharded = "shift_labels" in inputs
            labels = inputs.pop("shift_labels" if sharded else "labels")
            if not sharded:
                labels = torch.nn.functional.pad(labels, (0, 1), value=-100)[..., 1:]
                weights = torch.nn.functional.pad(weights, (0, 1))[..., 1:]
            outputs = model(**inputs, use_cache=False)
            each = torch.nn.functional.cross_entropy(
                outputs.logits.flatten(0, 1), labels.flatten(), reduction="none"
            )
            count = num_items_in_batch
            if count is None:
                count = (labels != -100).sum()
            loss = (each * weights.flatten()).sum() / count
            if factor and num_items_in_batch is not None:
                loss = loss * self.accelerator.num_processes
            return (loss, outputs) if return_outputs else loss

    cls, more = sequence_parallel(Weighted) if size > 1 else Weighted, trainer_class(size)[1]
    if size > 1 and local:
        more |= {"local_loss": True, "roles": {"weights": "label_weights"}}
    rows = [
        {**row, "weights": torch.linspace(0.1, 2, LENGTH, dtype=f64) * (1 + i % 3)}
        for i, row in enumerate(Rows(40))
    ]
    args = arguments(
        per_device_train_batch_size=batch,
        per_device_eval_batch_size=batch,
        remove_unused_columns=False,
        eval_strategy="steps" if evaluates else "no",
    )
    trainer = cls(tiny(dtype=f64), args, train_dataset=rows, eval_dataset=rows[:8], **more)
    trainer.train()
    return logs(trainer)


@pytest.mark.parametrize(
    ("world", "size", "factor", "local"),
    [(2, 2, False, False), (4, 2, True, False), (3, 3, True, True), (4, 2, False, True)],
)
def test_a_class_with_a_loss_of_its_own(world, size, factor, local):
    """As it stands, with full rows and logits; or with this rank's, where its weights move as
    labels do, whether it multiplies by the number of processes or not."""
    given = {"digits": 1e-6, "factor": factor, "evaluates": True, "local": local}
    compare_logs(_own, world, size, **given)


class _Changed(Rows):
    """Rows that are changed at random where they are read."""

    def __getitem__(self, i):
        row = dict(super().__getitem__(i))
        row["input_ids"] = torch.where(torch.rand(LENGTH) < 0.3, 4, row["input_ids"])
        return row


def _alike(kind):
    """The rows of each step, while something draws on one rank otherwise than on another."""
    from peft import LoraConfig, get_peft_model
    from transformers import TrainerCallback

    seen = []

    class Trainer(trainer_class(2)[0]):
        def training_step(self, model, inputs, *args, **kwargs):
            seen.append(inputs["input_ids"])
            return super().training_step(model, inputs, *args, **kwargs)

    class Draws(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            torch.rand(3 * args.process_index)
            np.random.rand(args.process_index)

    given = {"train_sampling_strategy": "group_by_length", "max_steps": 8}
    if kind == "workers":
        given = {"dataloader_num_workers": 1, "max_steps": 3}
        multiprocessing.current_process()._config["daemon"] = False  # it may have children
    with launched():
        model = tiny("gpt2" if kind == "dropout" else "llama")
        if kind == "LoRA":
            lora = LoraConfig(r=4, target_modules=["q_proj"], lora_dropout=0.1)
            model = get_peft_model(model, lora)
        args = arguments(eval_strategy="no", per_device_train_batch_size=4, **given)
        data = _Changed(16) if kind == "workers" else Rows(16)
        trainer = Trainer(
            model,
            args,
            train_dataset=data,
            sequence_parallel_size=2,
            callbacks=[Draws()] if kind == "callback" else [],
        )
        trainer.train()
    return torch.stack(seen)


@pytest.mark.parametrize("kind", ["LoRA", "dropout", "callback", "workers"])
def test_ranks_of_a_group_have_the_same_rows(kind):
    rows = on_ranks(2 if kind == "workers" else 4, _alike, kind)
    assert torch.equal(rows[0], rows[1]) and len(rows[0]) >= 3
    if kind != "workers":
        assert torch.equal(rows[2], rows[3]) and not torch.equal(rows[0], rows[2])


def _refusals():
    from accelerate import ParallelismConfig
    from transformers import (
        AutoModelForSequenceClassification,
        AutoModelForTokenClassification,
        BertConfig,
        BloomConfig,
        BloomForCausalLM,
        Trainer,
    )
    from trl import SFTConfig

    from deepsp.integrations.transformers import SequenceParallelTrainer, sequence_parallel

    class Mean(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            logits = model(**inputs, num_items_in_batch=num_items_in_batch).logits
            loss = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), inputs["shift_labels"].flatten()
            )
            return (loss, None) if return_outputs else loss

    class Adds(Trainer):
        """A little, which isn't divided."""

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss = super().compute_loss(model, inputs, False, num_items_in_batch)
            return loss + 1e-6 * sum(p.pow(2).sum() for p in model.parameters())

    class Evaluates(Trainer):
        """Another loss in evaluation."""

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            outputs = model(**inputs, num_items_in_batch=num_items_in_batch)
            loss = outputs.loss
            if not model.training:
                labels = inputs["shift_labels"].flatten()
                loss = torch.nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels)
            return (loss, outputs) if return_outputs else loss

    class Few(Rows):
        def __getitem__(self, i):
            return {name: x[:1] for name, x in super().__getitem__(i).items()}

    class Shifts(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return inputs["labels"].sum() / num_items_in_batch

    def trainer(
        cls=SequenceParallelTrainer,
        model=None,
        size=2,
        config=None,
        without_logits=False,
        data=None,
        collator=None,
        own=False,
        local=False,
        **given,
    ):
        args = arguments(config, **{"eval_strategy": "no", **given})
        model = tiny() if model is None else model
        data, more = Rows(40) if data is None else data, {"data_collator": collator}
        evaluated = Rows(4)
        if config is SFTConfig:
            data, more = lists(8), {"processing_class": tokenizer()}
            evaluated = None
        more |= {"sequence_parallel_size": size, "without_logits": without_logits}
        more |= {"own_batches": own, "local_loss": local}
        return cls(model, args, train_dataset=data, eval_dataset=evaluated, **more)

    class Others(Rows):
        """Rows of each process's own, from the second epoch on."""

        read = 0

        def __getitem__(self, i):
            self.read += 1
            return super().__getitem__((i + (self.read > 16) * torch.distributed.get_rank()) % 16)

    from peft import PromptTuningConfig, get_peft_model
    from trl.experimental.cpo import CPOTrainer
    from trl.experimental.gold import GOLDTrainer

    tuning = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    averaging, skipping = tiny(), tiny()
    averaging.accepts_loss_kwargs = False
    skipping.model.layerdrop = 0.1

    small = BertConfig(
        vocab_size=97,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=32,
    )
    bloom = BloomForCausalLM(BloomConfig(vocab_size=97, hidden_size=32, n_layer=1, n_head=4))
    cases = [
        (lambda: trainer(size=3), r"a divisor of 2, the number of processes, got 3"),
        (
            lambda: trainer(own=True, average_tokens_across_devices=False),
            r"expected no average_tokens_across_devices=False with own_batches in SequenceParallel",
        ),
        (
            lambda: trainer(model=averaging, own=True),
            r"expected no accepts_loss_kwargs=False of the model with own_batches in .*, since the",
        ),
        (
            lambda: trainer(own=True, accelerator_config={"even_batches": False}),
            r"expected no even_batches=False with own_batches in .*, since ranks with fewer",
        ),
        (
            lambda: trainer(
                own=True,
                data=[{"input_ids": x, "shift_labels": x} for x in Rows(8).ids],
                remove_unused_columns=False,
            ).train(),
            r"expected batches with labels for own_batches, since .*, got \['input_ids', 'shift",
        ),
        (lambda: trainer(size=None), r"a divisor of 2, the number of processes, got None"),
        (
            lambda: trainer(model=AutoModelForSequenceClassification.from_config(small)),
            r"a causal .*, got BertForSequenceClassification. .*in a trainer, pass compiled=True",
        ),
        (
            lambda: trainer(model=AutoModelForTokenClassification.from_config(small)),
            r"a causal language model of transformers, got BertForTokenClassification",
        ),
        (lambda: trainer(model=bloom), r"BloomForCausalLM"),
        (
            lambda: trainer(sequence_parallel(Mean), local=True).train(),
            r"another loss: .* compute_loss returns a sum over its tokens",
        ),
        (
            lambda: trainer(sequence_parallel(Shifts), local=True).train(),
            r"a local batch has 'shift_labels'",
        ),
        (
            lambda: trainer(
                sequence_parallel(Evaluates), local=True, eval_strategy="steps", eval_steps=1
            ).train(),
            r"another loss: .* rows of your data were evaluated",
        ),
        (
            lambda: trainer(data=Others(16), max_steps=9).train(),
            r"batch\['input_ids'\], a full tensor, .* on ranks 0 and 1; leave DistributedSampler",
        ),
        (
            lambda: trainer(train_sampling_strategy="batch_rebalance"),
            r"no train_sampling_strategy='batch_rebalance' in .*, since it deals batches",
        ),
        (lambda: trainer(accelerator_config={"dispatch_batches": True}), r"dispatch_batches=False"),
        (
            lambda: trainer(model=get_peft_model(tiny(), tuning)),
            r"adapters within the model's layers, .*, got PromptTuningConfig: .*; use LoRA",
        ),
        (lambda: trainer(model=skipping), r"layerdrop of LlamaForCausalLM to be 0, .*, got 0.1"),
        (lambda: sequence_parallel(CPOTrainer), r"got CPOTrainer: CPOTrainer of"),
        (lambda: sequence_parallel(type("Mine", (GOLDTrainer,), {})), r"got Mine: GOLDTrainer of"),
        (
            lambda: trainer(sequence_parallel(Adds), local=True).train(),
            r"another gradient .* compute_loss returns a sum over its tokens",
        ),
        (lambda: trainer(data=Few(40)).train(), r"batches of at least 2 tokens, .*, got 1; pad"),
        (lambda: trainer(own=True, data=Few(40)).train(), r"batches of at least 2 tok.*, got 1"),
        (lambda: trainer(neftune_noise_alpha=5.0), r"no neftune_noise_alpha in .*, got 5.0"),
        (
            lambda: trainer(sequence_parallel(Mean), local=True, label_smoothing_factor=0.1),
            r"no label_smoothing_factor in .*Mean, since the class has its own loss, got 0.1",
        ),
        (lambda: trainer(eval_use_gather_object=True), r"no eval_use_gather_object in .* only ten"),
        (
            lambda: trainer(parallelism_config=ParallelismConfig(cp_size=1, tp_size=2)),
            r"expected tp_size of parallelism_config to be that of the model, 1, got 2; load the",
        ),
        (lambda: sequence_parallel(dict), r"trainer_class to be transformers' Trainer or a subcl"),
    ]
    for call, pattern in cases:
        with launched(), pytest.raises((ValueError, KeyError), match=pattern):
            call()


def test_refusals():
    on_ranks(2, _refusals)


def _from_config():
    from accelerate import ParallelismConfig

    from deepsp.integrations.transformers import SequenceParallelTrainer

    with launched():
        args = arguments(
            eval_strategy="no", parallelism_config=ParallelismConfig(cp_size=2, dp_shard_size=2)
        )
        trainer = SequenceParallelTrainer(tiny(), args, train_dataset=Rows(40))
        assert trainer.get_total_train_batch_size(args) == 16
        trainer.train()
        return logs(trainer)


def test_the_size_of_a_parallelism_config():
    found = on_ranks(4, _from_config)
    assert all(x == found[0] for x in found)


@pytest.mark.nightly  # test_million.py and test_guide.py launch trainers as users do
def test_the_example():
    root = Path(__file__).parents[1]
    with tempfile.TemporaryDirectory() as folder:
        picture = Path(folder) / "curves.png"
        command = [sys.executable, root / "examples/finetune.py", "--ranks", "2", "--steps", "2"]
        command += ["--seq-len", "101", "--picture", picture]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        assert done.stdout.count("the same to") == 2 and "(rewards/margins)" in done.stdout
        assert picture.stat().st_size > 5000


# ------------------------------------------------------------------------------ the end


ENDS = """
import atexit, os, sys, time

atexit.register(sum, range(20_000_000))  # the last thing of all, with the interpreter's lock held
import torch, torch.distributed as dist
from deepsp.integrations.door import make_groups

store, rank = sys.argv[1], int(os.fork() == 0)
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
make_groups(2)
if rank:
    time.sleep(0.1)
dist.all_gather([torch.empty(1), torch.empty(1)], torch.ones(1), async_op=True)
if rank:
    time.sleep(0.5)
    os._exit(0)
"""


def test_gloo_frees_tensors_before_the_end(tmp_path):
    """A rank ends well whose last collective ends when Python is about to shut down."""
    command = [sys.executable, "-c", ENDS, str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
