"""Trainer through the compile pass: models that deepsp's attention can't shard, with full batches,
next to the same Trainer in one process, in float64."""

import pytest
import torch
from harness import on_ranks
from torch import nn
from trained import (
    LENGTH,
    VOCABULARY,
    arguments,
    compare_logs,
    launched,
    lists,
    logs,
    tiny,
    tokenizer,
    trainer_class,
)

nightly = pytest.mark.nightly
f64 = torch.float64


def _model(kind, dropout=0.0):
    import transformers as t

    t.set_seed(0)
    small = {"vocab_size": VOCABULARY, "num_labels": 5}
    if kind == "encoder-decoder":
        config = t.T5Config(
            **small,
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_layers=1,
            num_heads=4,
            dropout_rate=0.0,
            decoder_start_token_id=0,
            pad_token_id=0,
            eos_token_id=1,
        )
        return t.T5ForConditionalGeneration(config)
    config = t.BertConfig(
        **small,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=32,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=0.0,
    )
    kinds = {
        "masked": t.BertForMaskedLM,
        "tokens": t.BertForTokenClassification,
        "pooled": t.BertForSequenceClassification,
    }
    return kinds[kind](config)


class _Rows(torch.utils.data.Dataset):
    """Rows with padding behind. Each has five labels, or one, or a sequence of its own length."""

    def __init__(self, count, kind, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.kind = kind
        self.ids = torch.randint(5, VOCABULARY, (count, LENGTH), generator=generator)
        self.classes = torch.randint(5, (count, LENGTH), generator=generator)
        self.kept = torch.rand((count, LENGTH - 3), generator=generator).argsort(1) < 5
        self.kept = nn.functional.pad(self.kept, (0, 3))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        ids, kept = self.ids[i], self.kept[i]
        labels = {
            "masked": ids.masked_fill(~kept, -100),
            "tokens": self.classes[i].masked_fill(~kept, -100),
            "pooled": self.classes[i, 0],
            "encoder-decoder": ids.flip(0)[4:],
        }[self.kind]
        if self.kind == "masked":
            ids = ids.masked_fill(kept, 4)
        mask = (torch.arange(LENGTH) < LENGTH - i % 4).long()
        return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def _size(prediction):
    logits = prediction.predictions
    logits = logits[0] if isinstance(logits, tuple) else logits
    return {"size": float(abs(logits).sum()), "rows": len(prediction.label_ids)}


def _with_compile_pass(
    size, batch, kind, dtype=f64, loss_func=None, averaged=None, inner="aot_eager", **given
):
    torch._dynamo.reset()
    model = _model(kind).to(dtype)
    if averaged is not None:
        model.accepts_loss_kwargs = not averaged
    cls, more = trainer_class(size)
    if size > 1:
        more["compiled"] = {"inner": inner}
    args = arguments(per_device_train_batch_size=batch, per_device_eval_batch_size=batch, **given)
    trainer = cls(
        model,
        args,
        train_dataset=_Rows(40, kind),
        eval_dataset=_Rows(8, kind, 1),
        compute_metrics=_size,
        compute_loss_func=loss_func,
        **more,
    )
    trainer.train()
    return logs(trainer)


@pytest.mark.parametrize(
    ("ranks", "kind"),
    [
        (2, "pooled"),
        pytest.param(3, "pooled", marks=nightly),
        pytest.param(2, "encoder-decoder", marks=nightly),
        pytest.param(3, "masked", marks=nightly),
        pytest.param(2, "tokens", marks=nightly),
    ],
)
def test_models(ranks, kind):
    compare_logs(_with_compile_pass, ranks, ranks, kind=kind, digits=1e-7)


def _twice(size, batch):
    """One model in two trainers, of which the first one needs no outputs."""
    torch._dynamo.reset()
    cls, more = trainer_class(size)
    if size > 1:
        more["compiled"] = {"inner": "aot_eager"}
    model, found = _model("pooled").to(f64), []
    args = arguments(per_device_train_batch_size=batch, per_device_eval_batch_size=batch)
    for metrics in (None, _size):
        trainer = cls(
            model,
            args,
            train_dataset=_Rows(40, "pooled"),
            eval_dataset=_Rows(8, "pooled", 1),
            compute_metrics=metrics,
            **more,
        )
        trainer.train()
        found += logs(trainer)
    return found


@nightly
def test_one_model_in_two_trainers():
    compare_logs(_twice, 2, 2, digits=1e-7)


def _their_loss(outputs, labels, num_items_in_batch=None):
    logits = outputs["logits"].flatten(0, 1)
    total = nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum")
    return total / num_items_in_batch


@nightly
@pytest.mark.parametrize(
    "given",
    [
        {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5},
        {"label_smoothing_factor": 0.1},
        {"loss_func": _their_loss},
        {"dtype": torch.float32, "bf16": True, "digits": 2e-2},
        {"activation_checkpointing": True},
        {"inner": "inductor", "kind": "pooled"},  # no rank but the first has the first token
    ],
    ids=lambda given: next(iter(given)),
)
def test_arguments(given):
    compare_logs(_with_compile_pass, 2, 2, **{"kind": "masked", "digits": 1e-7, **given})


@nightly
@pytest.mark.parametrize("kind", ["masked", "pooled"])
def test_groups(kind):
    # Every row has as many labels, so a mean of the groups' means is that of one process.
    compare_logs(_with_compile_pass, 4, 2, kind=kind, averaged=True, digits=1e-7)


class _OtherLabels(_Rows):
    """Labels that each rank draws for itself."""

    def __getitem__(self, i):
        return {**super().__getitem__(i), "labels": torch.tensor(torch.distributed.get_rank())}


def _refused(kind):
    cls, more = trainer_class(2)
    with pytest.raises(ValueError, match=r"batch\['labels'\], a full .* leave DistributedSampler"):
        cls(
            _model(kind),
            arguments(eval_strategy="no"),
            train_dataset=_OtherLabels(8, kind),
            compiled=True,
            **more,
        ).train()
    with pytest.raises(ValueError, match="in a trainer, pass compiled=True"):
        cls(_model(kind), arguments(eval_strategy="no"), **more)
    with pytest.raises(ValueError, match="expected no mix_lengths with compiled"):
        cls(_model(kind), arguments(eval_strategy="no"), mix_lengths=True, compiled=True, **more)
    with pytest.raises(ValueError, match=r"options of the compile pass .* got .'grad"):
        cls(_model(kind), arguments(eval_strategy="no"), compiled={"gradients": "sum"}, **more)
    from trl import SFTConfig, SFTTrainer

    from deepsp.integrations.transformers import sequence_parallel

    with pytest.raises(ValueError, match=r"no trainer of TRL with compiled .* got 'SFT"):
        sequence_parallel(SFTTrainer)(
            tiny(),
            arguments(SFTConfig, bf16=False, eval_strategy="no"),
            train_dataset=lists(4),
            processing_class=tokenizer(),
            compiled=True,
            **more,
        )


def _refusals():
    with launched():
        _refused("pooled")


def test_refusals():
    on_ranks(2, _refusals)
