"""TRL's distillation trainers, and one of a user's own, over sharded sequences: what they log is
what one process logs."""

import random

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from by_trl import made, same
from harness import on_ranks
from trained import (
    Rows,
    arguments,
    everywhere,
    launched,
    logs,
    pairs,
    run_launched,
    tiny,
    tokenizer,
    trainer_class,
)
from transformers import TrainerCallback
from vllm_stub import Client, installed


def _teacher(of="llama", dtype=torch.float64, hidden_size=48):
    """A wider model than the student, of the same vocabulary."""
    return tiny(of, dtype, hidden_size=hidden_size, num_hidden_layers=3)


def _distilled(size, batch, kind="", beta=1.0, mode=None, of="llama", **given):
    """By TRL's DistillationTrainer."""
    rollouts = {} if mode is None else {"use_vllm": True, "vllm_mode": mode}
    dtype = given.pop("dtype", torch.float64)
    teacher = _teacher(of, dtype)  # before arguments with ZeRO 3, which draw other weights
    with installed():
        cls, more = made(
            "Distillation",
            size,
            kind,
            batch,
            dtype=dtype,
            of=of,
            max_completion_length=9,
            generation_kwargs={"sequence_bias": {(2,): 3.0}} if mode is None else None,
            temperature=0.7,
            log_completions=True,
            **rollouts,
            **given,
        )
        more["args"].beta = beta
        rows = pairs(24).remove_columns(["chosen", "rejected"])
        trainer = cls(
            teacher_model=teacher, train_dataset=rows, eval_dataset=rows.select(range(4)), **more
        )
        trainer.train()
        return [*logs(trainer), {"completions": " / ".join(trainer._logs["completion"])}]


# TRL computes its divergence in float32.
_CLOSE = {"digits": 1e-5}


_NIGHTLY = pytest.mark.nightly


@pytest.mark.parametrize(
    "beta", [pytest.param(0.0, marks=_NIGHTLY), 0.5, pytest.param(1.0, marks=_NIGHTLY)]
)
def test_distilled(beta):
    same(_distilled, 2, 2, batch=4, beta=beta, **_CLOSE)


_KINDS = [
    {"mode": "server"},
    {"world": 3, "batch": 3, "mode": "colocate"},
    {"world": 4, "batch": 2, "mode": "server"},
    {"kind": "LoRA"},
    {"kind": "checkpointing", "batch": 2},
    {"stage": 3, "dtype": torch.float32, "digits": 1e-3},
    {"fsdp": True, "dtype": torch.float32, "digits": 1e-3},
    {"of": "gemma2", "dtype": torch.float32, "digits": 1e-4},
]


@_NIGHTLY
@pytest.mark.parametrize("given", _KINDS, ids=str)
def test_kinds_of_distillation(given):
    given = {"world": 2, "batch": 4, **_CLOSE, **given}
    given["size"] = given["world"] if given["world"] < 4 else 2
    same(_distilled, **given)


def _chats(count):
    from datasets import Dataset

    rows = [
        [{"role": "user", "content": r["prompt"]}, {"role": "assistant", "content": r["chosen"]}]
        for r in pairs(count)
    ]
    return Dataset.from_dict({"messages": rows})


def _gkd(size, batch, lmbda=0.5, metrics=False, **given):
    """By TRL's GKDTrainer."""
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    from deepsp.integrations.transformers import sequence_parallel

    cls, more = GKDTrainer, {}
    if size > 1:
        cls, more = sequence_parallel(cls), {"sequence_parallel_size": size}
    words = tokenizer(splits=True)
    words.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    trainer = cls(
        model=tiny(dtype=torch.float64),
        teacher_model=_teacher(),
        args=arguments(
            GKDConfig,
            bf16=False,
            max_steps=5,
            per_device_train_batch_size=batch,
            per_device_eval_batch_size=batch,
            lmbda=lmbda,
            beta=0.3,
            max_new_tokens=7,
            max_length=24,
            gradient_checkpointing=False,
            **given,
        ),
        processing_class=words,
        train_dataset=_chats(24),
        eval_dataset=_chats(8),
        compute_metrics=_classes if metrics else None,
        **more,
    )
    trainer.add_callback(_Draws())
    trainer.train()
    return logs(trainer)


def _classes(prediction):
    return {"classes": float(prediction.predictions.argmax(-1)[:, :3].mean())}


class _Draws(TrainerCallback):
    """Draws on some ranks only."""

    def on_step_begin(self, *_, **__):
        for _ in range(dist.get_rank() if dist.is_initialized() else 0):
            random.random()


@pytest.mark.parametrize("lmbda", [pytest.param(0.0, marks=_NIGHTLY), 0.5])
def test_gkd(lmbda):
    same(_gkd, 2, 2, batch=4, lmbda=lmbda, digits=1e-5)


_KINDS_OF_GKD = [{"seq_kd": True}, {"world": 3}, {"gradient_accumulation_steps": 2}]


@_NIGHTLY
@pytest.mark.parametrize("given", _KINDS_OF_GKD, ids=str)
def test_kinds_of_gkd(given):
    given = {"world": 2, "batch": 3, "digits": 1e-5, **given}
    same(_gkd, size=given["world"], **given)


def _evaluated(size, batch, items):
    return [e["eval_loss"] for e in run_launched(_gkd, size, batch, items) if "eval_loss" in e]


@_NIGHTLY
def test_gkd_evaluates_alike():
    """With the logits that metrics need, an evaluation of two groups has the same loss."""
    plain, metrics = (
        on_ranks(4, _evaluated, 2, 2, (("lmbda", 0.0), ("metrics", metrics)))
        for metrics in (False, True)
    )
    assert metrics[0] == pytest.approx(plain[0], rel=1e-6) and plain[0]
    assert metrics == [metrics[0]] * 4


def _own(size, batch, local_loss=False, **given):
    """By a Trainer of a user's own, with a frozen teacher."""
    base, more = trainer_class(1)
    if size > 1:
        from deepsp.integrations.transformers import sequence_parallel

        more = {"sequence_parallel_size": size, "local_loss": local_loss}
    teacher = _teacher().requires_grad_(False).eval()

    class Distills(base):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            labels = inputs.get("shift_labels")
            if labels is None:
                labels = F.pad(inputs["labels"], (0, 1), value=-100)[:, 1:]
            inputs = {n: x for n, x in inputs.items() if "labels" not in n}
            logits = model(**inputs).logits
            with torch.no_grad():
                expected = teacher(**inputs).logits.softmax(-1)
            each = F.kl_div(logits.log_softmax(-1), expected, reduction="none").sum(-1)
            count = (labels != -100).sum() if num_items_in_batch is None else num_items_in_batch
            loss = (each * (labels != -100)).sum() / count
            return (loss, {}) if return_outputs else loss

    cls = sequence_parallel(Distills) if size > 1 else Distills
    trainer = cls(
        model=tiny(dtype=torch.float64),
        args=arguments(max_steps=5, per_device_train_batch_size=batch, eval_strategy="no", **given),
        train_dataset=Rows(24),
        **more,
        **({"teacher": teacher} if size > 1 else {}),
    )
    trainer.train()
    if size > 1:
        assert teacher.config._attn_implementation == "deepsp"
    return logs(trainer)


@pytest.mark.parametrize("local_loss", [pytest.param(False, marks=_NIGHTLY), True])
def test_own_teacher(local_loss):
    same(_own, 2, 2, batch=4, digits=1e-6, local_loss=local_loss)


def _by_server(size, batch, beta=0.0, top_k=3, **given):
    """By TRL's ServerDistillationTrainer, whose teacher is asked for log-probabilities."""
    from trl.experimental.server_distillation import (
        ServerDistillationConfig,
        ServerDistillationTrainer,
    )

    from deepsp.integrations.transformers import sequence_parallel

    cls, more = ServerDistillationTrainer, {}
    if size > 1:
        cls, more = sequence_parallel(cls), {"sequence_parallel_size": size}
    with installed():
        trainer = cls(
            model=tiny(dtype=torch.float64),
            args=arguments(
                ServerDistillationConfig,
                bf16=False,
                max_steps=5,
                per_device_train_batch_size=batch,
                eval_strategy="no",
                use_vllm=True,
                vllm_mode="server",
                teacher_model_server_url="http://teacher",
                max_completion_length=9,
                beta=beta,
                loss_top_k=top_k,
                **given,
            ),
            processing_class=tokenizer(splits=True),
            train_dataset=pairs(24).remove_columns(["chosen", "rejected"]),
            **more,
        )
        trainer.train()
        # One process asks for 20. The proof of a group asks for its batch of 4 three times.
        assert len(everywhere(Client.scored)) == 20 + 12 * (size > 1)
        return [*logs(trainer), {}]


@pytest.mark.parametrize(("beta", "top_k"), [pytest.param(0.0, 3, marks=_NIGHTLY), (0.5, 1)])
def test_by_server(beta, top_k):
    same(_by_server, 2, 2, batch=4, digits=1e-5, beta=beta, top_k=top_k)


def _shared():
    from peft import LoraConfig, get_peft_model
    from transformers import Trainer

    from deepsp.integrations.transformers import sequence_parallel

    base = tiny()
    student = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj"]))
    with (
        launched(),
        pytest.raises(ValueError, match="teacher or reference model that shares no mo"),
    ):
        sequence_parallel(Trainer)(
            student,
            arguments(eval_strategy="no"),
            train_dataset=Rows(4),
            teacher=base,
            sequence_parallel_size=2,
        )


def _refused():
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    from deepsp.integrations.transformers import sequence_parallel

    args = {"eval_strategy": "no", "bf16": False}
    for name in ("own_batches", "mix_lengths", "local_loss"):
        with (
            launched(),
            pytest.raises(ValueError, match=f"no {name} in .*GKDTrainer, since TRL ma"),
        ):
            sequence_parallel(GKDTrainer)(
                model=tiny(),
                teacher_model=_teacher(dtype=torch.float32),
                args=arguments(GKDConfig, **args),
                processing_class=tokenizer(),
                train_dataset=_chats(4),
                sequence_parallel_size=2,
                **{name: True},
            )


def test_refusals():
    on_ranks(2, _shared)
    on_ranks(2, _refused)
