"""Reward models and classifiers of decoders over sharded sequences: what they log is what one
process logs."""

import copy

import pytest
import torch
import torch.distributed as dist
from by_trl import check_folded, same, zero
from harness import on_ranks
from trained import Rows, arguments, logs, pairs, tiny, tokenizer, trainer_class, under_fsdp
from transformers import LlamaForSequenceClassification
from transformers.modeling_outputs import SequenceClassifierOutput


def _model(kind, of="llama", dtype=torch.float64):
    """A classifier whose decoder is that of :func:`tiny`."""
    import transformers

    causal = tiny(of, dtype)
    causal.config.classifier_dropout = 0.0
    causal.config.num_labels = 1 if kind == "reward" else 3
    cls = "TokenClassification" if kind == "tokens" else "SequenceClassification"
    transformers.set_seed(1)
    model = getattr(transformers, f"AutoModelFor{cls}").from_config(causal.config).to(dtype)
    setattr(model, model.base_model_prefix, causal.base_model)
    return model


def _reward(size, batch, of="llama", kind="", **given):
    """By TRL's RewardTrainer."""
    import trl
    from peft import LoraConfig

    from deepsp.integrations.transformers import sequence_parallel

    cls, more = trl.RewardTrainer, {}
    if size > 1:
        cls = sequence_parallel(cls)
        more = {"sequence_parallel_size": size, "fold_prefixes": kind in ("folded", "dealt")}
        more["mix_lengths"] = kind == "dealt"
    if kind == "LoRA":
        more["peft_config"] = LoraConfig(
            r=4, task_type="SEQ_CLS", target_modules=["q_proj"], modules_to_save=["score"]
        )
    if kind == "FSDP" and size > 1:
        cls = under_fsdp(cls)
    model = _model("reward", of)  # before arguments with ZeRO 3, which draw other weights
    if kind == "ZeRO 3" and size > 1:
        given["deepspeed"] = zero(3, batch)
    trainer = cls(
        model=model,
        args=arguments(
            trl.RewardConfig,
            bf16=False,
            per_device_train_batch_size=batch,
            per_device_eval_batch_size=batch,
            center_rewards_coefficient=0.1,
            gradient_accumulation_steps=2 if kind == "accumulation" else 1,
            gradient_checkpointing=kind == "checkpointing",
            **given,
        ),
        processing_class=tokenizer(splits=True),
        train_dataset=pairs(24).add_column("margin", [i / 10 for i in range(24)]),
        eval_dataset=pairs(8, 1),
        **more,
    )
    trainer.train()
    check_folded(trainer, more)
    return [*logs(trainer), {}]


# transformers adds up the losses of steps in float32.
_CLOSE = {"digits": 1e-6}


@pytest.mark.parametrize(("ranks", "kind"), [(2, ""), (2, "dealt"), (3, "")])
def test_rewards(ranks, kind):
    same(_reward, ranks, ranks, batch=3, kind=kind, **_CLOSE)


_KINDS = [{"kind": k} for k in ("folded", "LoRA", "accumulation", "checkpointing")]
_KINDS += [{"kind": k, "digits": 1e-4} for k in ("FSDP", "ZeRO 3")]
_KINDS += [{"world": 4}, {"of": "qwen3"}, {"of": "mistral"}]


@pytest.mark.nightly
@pytest.mark.parametrize("given", _KINDS, ids=str)
def test_kinds_of_rewards(given):
    same(_reward, **{"world": 2, "size": 2, "batch": 3, **_CLOSE, **given})


class _Classified(torch.utils.data.Dataset):
    """Rows of different lengths, and a class of each, or of each token."""

    def __init__(self, count, by_token, seed=0):
        self.rows, self.by_token = Rows(count, seed), by_token

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        length = 6 + 5 * i % 15
        ids = torch.zeros(21, dtype=torch.int64)
        ids[:length] = self.rows.ids[i, :length]
        labels = torch.tensor(int(ids.sum()) % 3)
        if self.by_token:
            labels = (ids % 3).masked_fill(ids % 5 == 0, -100)
            labels[length:] = -100
        return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": labels}


def _classified(size, batch, kind, **given):
    """By transformers' Trainer."""
    import numpy as np

    def metrics(prediction):
        logits, labels = prediction
        return {"right": float((np.argmax(logits, -1) == labels).mean())}

    cls, more = trainer_class(size)
    trainer = cls(
        model=_model(kind),
        args=arguments(
            per_device_train_batch_size=batch, per_device_eval_batch_size=batch, **given
        ),
        train_dataset=_Classified(24, kind == "tokens"),
        eval_dataset=_Classified(8, kind == "tokens", 1),
        compute_metrics=metrics,
        **more,
    )
    trainer.train()
    return [*logs(trainer), {}]


_NIGHTLY = pytest.mark.nightly
_WORLDS = [(2, 2), pytest.param(3, 3, marks=_NIGHTLY), pytest.param(4, 2, marks=_NIGHTLY)]


@pytest.mark.parametrize("kind", ["sequences", "tokens"])
@pytest.mark.parametrize(("world", "size"), _WORLDS)
def test_classified(kind, world, size):
    # transformers computes losses of tokens in float32.
    digits = 1e-6 if kind == "sequences" else 1e-5
    same(_classified, world, size, batch=4, digits=digits, kind=kind)


# ------------------------------------------------------------------------------ without a trainer


def _rows(pad="right"):
    """Ids [3, 11] and their mask: two rows are padded."""
    ids = Rows(3).ids[:, :11].clone()
    mask = torch.ones_like(ids)
    for row, count in ((1, 3), (2, 6)):
        ends = slice(0, count) if pad == "left" else slice(11 - count, 11)
        ids[row, ends] = mask[row, ends] = 0
    return ids, mask


class _TwoHeads(LlamaForSequenceClassification):
    def forward(self, input_ids=None, attention_mask=None, position_ids=None, **kwargs):
        hidden = self.model(input_ids, attention_mask, position_ids, **kwargs).last_hidden_state
        return SequenceClassifierOutput(logits=self.score(hidden)[:, -1] + hidden.mean())


def _direct():
    """Outputs and gradients of calls, and what is refused."""
    from deepsp.integrations.transformers.rows import FullRows

    ids, mask = _rows("left")
    model = _model("sequences")
    alone = copy.deepcopy(model)
    FullRows(model, None)
    for inputs in (
        {"input_ids": ids, "attention_mask": mask},
        {"input_ids": ids[:1], "output_hidden_states": True},
        {"inputs_embeds": model.model.embed_tokens(ids).detach()},
    ):
        results = []
        for each in (alone, model):
            each.zero_grad()
            labels = torch.tensor([0, 2, 1])[: len(next(iter(inputs.values())))]
            output = each(**inputs, labels=labels)
            hidden = sum(x.square().mean() for x in output.hidden_states or ())
            (output.loss + hidden).backward()
            results.append((output.logits, output.loss, *(output.hidden_states or ())))
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
        for a, b in zip(model.parameters(), alone.parameters(), strict=True):
            if b.grad is not None:
                gradient = a.grad.clone()
                dist.all_reduce(gradient)  # averaged, as by DDP
                torch.testing.assert_close(gradient / 2, b.grad, rtol=1e-9, atol=1e-12)
    # Another trainer of its decoder takes the hooks away.
    causal = tiny(dtype=torch.float64)
    causal.model = model.model
    FullRows(causal, None)
    assert not model.model._forward_pre_hooks and causal._forward_pre_hooks
    with pytest.raises(ValueError, match="logits of _TwoHeads to have shape"):
        FullRows(_TwoHeads(causal.config), None)


def _dropped():
    """The masks of dropout before a head of tokens, on each rank."""
    from deepsp.integrations.transformers.rows import FullRows

    model = _model("tokens").train()
    model.dropout.p, masks = 0.5, []
    model.dropout.register_forward_hook(lambda m, args, out: masks.append(out[:1, :5] == 0))
    FullRows(model, None)
    torch.manual_seed(5)
    model(input_ids=_rows()[0])
    return masks[0].flatten().tolist()


def test_calls():
    on_ranks(2, _direct)
    first, second = on_ranks(2, _dropped)
    assert first != second
