"""What the proof must leave alone: trainings and evaluations that are right, and log the same with
it as without."""

import contextlib
import dataclasses
import functools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import on_ranks
from torch import nn
from trained import VOCABULARY, arguments, launched, tiny

import deepsp


def _rows(count, length=21, prompt=0, **more):
    ids = torch.randint(5, VOCABULARY, (count, length), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[:, :prompt] = -100
    return [
        {"input_ids": x, "labels": y, **{n: f(i) for n, f in more.items()}}
        for i, (x, y) in enumerate(zip(ids, labels, strict=True))
    ]


def _train(prove, data, compute_loss=None, model=None, evaluates=False, size=None, **settings):
    """What a trainer logs. ``settings``: its arguments, theirs, and methods of its class."""
    from transformers import Trainer

    from deepsp.integrations.transformers import sequence_parallel

    methods = {} if compute_loss is None else {"compute_loss": compute_loss}
    methods |= {n: settings.pop(n) for n in list(settings) if n in dir(Trainer)}
    own = ("data_collator", "compute_metrics", "eval_dataset")
    more = {n: settings.pop(n) for n in own if n in settings}
    with launched():
        args = arguments(
            **{
                "max_steps": 1,
                "eval_strategy": "no",
                "per_device_train_batch_size": 4,
                "per_device_eval_batch_size": 2,
                "remove_unused_columns": False,
                **settings,
            }
        )
        trainer = sequence_parallel(type("Own", (Trainer,), methods))(
            tiny() if model is None else model,
            args,
            train_dataset=data,
            prove=prove,
            sequence_parallel_size=size or dist.get_world_size(),
            **more,
        )
        if evaluates:
            return {"loss": trainer.evaluate()["eval_loss"], "state": _state()}
        trainer.train()
        assert trainer.train_dataset is data
        kept = ("loss", "grad_norm", "mine", "step")
        return [{n: x for n, x in log.items() if n in kept} for log in trainer.state.log_history]


def _state():
    return torch.get_rng_state().sum().item()


def _wide(**config):
    """A model with activations large enough for rounding to show."""
    from transformers import LlamaConfig, LlamaForCausalLM, set_seed

    set_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=8,
            initializer_range=0.1,
            max_position_embeddings=256,
            **config,
        )
    )


# ---- losses of one's own


def _pair_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
    a, b = (model(input_ids=inputs[name]).logits[:, -1] for name in ("ids_a", "ids_b"))
    return -F.logsigmoid((a - b).mean(-1)).mean()


def pairs(prove):
    rows = [{"ids_a": x["input_ids"], "ids_b": x["input_ids"].flip(0)} for x in _rows(8)]
    return _train(prove, rows, _pair_loss)


def _score_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
    logits = model(input_ids=inputs["input_ids"]).logits[:, -1]
    targets = inputs["targets"] if "targets" in inputs else inputs["labels"][:, None]
    return (logits[:, : targets.size(1)] - targets).square().mean()


def scores(prove):
    rows = [{**x, "labels": torch.tensor(float(i))} for i, x in enumerate(_rows(8))]
    return _train(prove, rows, _score_loss)


def targets(prove):
    rows = [{"input_ids": x["input_ids"], "targets": torch.full((7,), 2.0)} for x in _rows(12)]
    return _train(prove, rows, _score_loss, per_device_train_batch_size=6)


def _masking_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
    """Masks labels, draws from a generator of its own, and logs."""
    if not hasattr(self, "generator"):
        self.generator = torch.Generator().manual_seed(3)
    inputs["labels"][:, :5] = -100
    loss = model(**inputs).loss * (1 + torch.rand((), generator=self.generator))
    self.log({"mine": loss.item()})
    return loss


def masking(prove):
    return _train(prove, _rows(8), _masking_loss)


# ---- batches and models


class _Drops(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.share = inner, 0.1

    def forward(self, x):
        return F.dropout(self.inner(x), self.share, self.training)


def reentrant(prove):
    model = tiny()
    model.model.layers[0].mlp = _Drops(model.model.layers[0].mlp)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    model.enable_input_require_grads()
    torch.manual_seed(0)
    return _train(prove, _rows(8), model=model)


def short_documents(prove):
    """Fewer tokens in the first documents than ranks."""
    positions = torch.cat([torch.arange(n) for n in (1, 1, 1, 30)])

    def pack(rows):
        ids = rows[0]["input_ids"][None]
        labels = ids.masked_fill(positions == 0, -100)
        return {"input_ids": ids, "labels": labels, "position_ids": positions[None]}

    settings = {"data_collator": pack, "per_device_train_batch_size": 1}
    return _train(prove, _rows(4, 33), **settings)


def _with_mask(rows):
    batch = {n: torch.stack([x[n] for x in rows]) for n in ("input_ids", "labels")}
    if any(x["pads"] for x in rows):
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    return batch


def masks_of_some(prove):
    """One of two groups has an entry that the other doesn't."""
    return _train(
        prove,
        _rows(4, pads=lambda i: i != 3),
        size=2,
        data_collator=_with_mask,
        _get_train_sampler=lambda self, *_: torch.utils.data.SequentialSampler(self.train_dataset),
        per_device_train_batch_size=1,
        max_steps=2,
    )


# ---- evaluation


def _padded(rows):
    pad = functools.partial(nn.utils.rnn.pad_sequence, batch_first=True)
    ids, labels = ([x[n] for x in rows] for n in ("input_ids", "labels"))
    mask = pad([torch.ones_like(x) for x in ids])
    return {
        "input_ids": pad(ids),
        "labels": pad(labels, padding_value=-100),
        "attention_mask": mask,
    }


def long_and_short(prove):
    rows = [*_rows(2, 300, 200), *_rows(1, 20)]
    return _train(prove, rows, evaluates=True, eval_dataset=rows, data_collator=_padded)


def another_collator(prove):
    rows = [x["input_ids"].tolist() for x in _rows(4)]

    def loader(self, eval_dataset=None):
        def collate(rows):
            return {"input_ids": torch.tensor(rows), "labels": torch.tensor(rows)}

        made = torch.utils.data.DataLoader(self.eval_dataset, batch_size=2, collate_fn=collate)
        return self.accelerator.prepare(made)

    return _train(prove, _rows(4), evaluates=True, eval_dataset=rows, get_eval_dataloader=loader)


def _cropped(rows):
    first = [int(torch.randint(0, 5, ())) for _ in rows]
    ids = torch.stack([x["input_ids"][i : i + 16] for x, i in zip(rows, first, strict=True)])
    return {"input_ids": ids, "labels": ids}


def random_crops(prove):
    torch.manual_seed(0)
    rows = _rows(8)
    return _train(prove, rows, size=2, evaluates=True, eval_dataset=rows, data_collator=_cropped)


def _number(prediction):
    return {"rows": float(len(prediction.label_ids))}


def in_bfloat16(prove):
    rows = _rows(8, 120)
    settings = {"compute_metrics": _number, "bf16": True, "model": _wide()}
    return _train(prove, rows, evaluates=True, eval_dataset=rows, **settings)


def routers_of_padding(prove):
    rows = [{n: x[n][:k] for n in x} for x, k in zip(_rows(4), (21, 9, 17, 6), strict=True)]
    model = tiny("mixtral", num_local_experts=4, output_router_logits=True)
    settings = {"compute_metrics": _number, "data_collator": _padded, "model": model}
    return _train(prove, rows, evaluates=True, eval_dataset=rows, **settings)


# ---- accelerate


def _packed(rows):
    batch = {n: torch.cat([x[n] for x in rows])[None] for n in ("input_ids", "labels")}
    positions = torch.cat([torch.arange(len(x["input_ids"])) for x in rows])
    return {**batch, "position_ids": positions[None]}


def _accelerated(prove, rows, collate=None, model=None, batch=2, ignored=-100):
    from accelerate import Accelerator

    from deepsp.integrations.accelerate import prepare

    with launched():
        accelerator, losses = Accelerator(cpu=True), []
        loader = torch.utils.data.DataLoader(rows, batch_size=batch, collate_fn=collate)
        model, loader = prepare(
            accelerator,
            tiny() if model is None else model,
            loader,
            sequence_parallel_size=2,
            prove=prove,
        )
        for local in loader:
            labels = local.pop("shift_labels")
            labels = labels.masked_fill(labels == -100, ignored)
            loss = deepsp.cross_entropy(
                model(**local).logits, labels, accelerator.sequence_group, ignore_index=ignored
            )
            accelerator.backward(loss)
            losses.append(loss.item())
        return losses


def labels_at_borders(prove):
    return _accelerated(prove, _rows(4), _packed)


def documents_of_ranks(prove):
    """Each rank has one, but not of the cut."""
    rows = _rows(4, 100, 70)
    return _accelerated(prove, rows, _packed, _wide(use_cache=False))


def other_ignored_labels(prove):
    rows = _rows(4)
    for x in rows:
        x["labels"][:9] = -1
    return _accelerated(prove, rows, ignored=-1)


def rows_without_labels(prove):
    rows = _rows(5)
    for x in rows[:4]:
        x["labels"][:] = -100
    return _accelerated(prove, rows, batch=5)


_TRAININGS = {
    2: (
        pairs,
        scores,
        targets,
        masking,
        reentrant,
        long_and_short,
        another_collator,
        in_bfloat16,
        routers_of_padding,
        labels_at_borders,
        documents_of_ranks,
        other_ignored_labels,
        rows_without_labels,
    ),
    4: (short_documents, masks_of_some, random_crops),
}


def _both(name):
    return globals()[name](False), globals()[name](True)


@pytest.mark.parametrize(
    ("ranks", "name"), [(n, f.__name__) for n, functions in _TRAININGS.items() for f in functions]
)
def test_no_false_alarm(ranks, name):
    for without, proven in on_ranks(ranks, _both, name):
        assert without == proven


# ---- faults that were overlooked


def _halved(logits, *args, average_gradients=False, **kwargs):
    return deepsp.cross_entropy(logits, *args, **kwargs)


def _in_bfloat16():
    from deepsp.integrations.transformers import own_loss

    with (
        mock.patch.object(own_loss, "cross_entropy", _halved),
        pytest.raises(ValueError, match=r"another gradient of .*scale: it is divided by the numb"),
    ):
        _train(True, _rows(8), model=tiny(dtype=torch.bfloat16))


def test_gradients_of_narrow_weights():
    on_ranks(2, _in_bfloat16)


def _second_evaluation():
    """A second evaluation has other entries, which don't arrive; and gradients after one."""
    from deepsp.integrations.transformers import own_loss
    from deepsp.integrations.transformers.rows import FullRows

    def without(self, base, batch):
        return right(self, base, {n: x for n, x in batch.items() if n != "position_ids"})

    right, rows = FullRows._sharded, _rows(4)
    later = _rows(4, position_ids=lambda i: torch.arange(7, 28))
    model = tiny("gpt2", initializer_range=0.3)
    with (
        mock.patch.object(FullRows, "_sharded", without),
        pytest.raises(ValueError, match=r"another loss"),
    ):
        _train(True, rows, model=model, evaluates=True, eval_dataset={"a": rows, "b": later})

    from accelerate import Accelerator

    from deepsp.integrations.accelerate import prepare

    with launched(), mock.patch.object(own_loss, "cross_entropy", _halved):
        loader = torch.utils.data.DataLoader(rows, batch_size=2)
        model, loader = prepare(Accelerator(cpu=True), tiny(), loader, sequence_parallel_size=2)
        with torch.no_grad():
            for batch in loader:
                model(**batch)
        with pytest.raises(ValueError, match=r"another gradient of "):
            next(iter(loader))


def test_later_batches():
    on_ranks(2, _second_evaluation)


# ---- deepsp.prove


@dataclasses.dataclass(frozen=True)
class _Config:
    dropout: float = 0.1


class _Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.config, self.embed = _Config(), nn.Embedding(VOCABULARY, 8)
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(8, VOCABULARY)

    def forward(self, ids):
        return self.head(self.drop(self.embed(ids)))


def _own_steps():
    from deepsp.integrations.transformers import register

    register()
    model = tiny()
    model.set_attn_implementation("deepsp")
    ids = torch.arange(3, 37).view(2, 17)
    batch = {"input_ids": ids, "labels": ids}

    def of_parts(batch):
        """Draws before the model runs, and reads a weight of a module that isn't called."""
        hidden = torch.rand(batch["input_ids"].shape) < 0.5
        labels = batch["labels"].masked_fill(~hidden, -100)
        local, _ = deepsp.shard_batch({**batch, "labels": labels})
        inputs = {n: local[n] for n in ("input_ids", "position_ids")}
        hidden = model.model(**inputs).last_hidden_state
        loss = deepsp.linear_cross_entropy(hidden, model.lm_head.weight, local["shift_labels"])
        loss.backward()
        deepsp.sync_gradients(model)
        return loss

    deepsp.prove(of_parts, batch)
    assert all(p.grad is None for p in model.parameters())

    torch.manual_seed(0)
    two = [_Small(), _Small()]

    def step(batch, synced):
        local, _ = deepsp.shard_batch(batch)
        each = (deepsp.cross_entropy(m(local["input_ids"]), local["shift_labels"]) for m in two)
        loss = sum(each)
        loss.backward()
        for m in two[synced:]:
            deepsp.sync_gradients(m)
        return loss

    deepsp.prove(lambda batch: step(batch, 0), batch)
    with pytest.raises(ValueError, match=r"another gradient of _Small 0: .*sync_gradients is miss"):
        deepsp.prove(lambda batch: step(batch, 1), batch)
    images = {**batch, "pixel_values": torch.zeros(960, 12)}
    seen = []
    with contextlib.suppress(ZeroDivisionError):
        deepsp.prove(lambda batch: seen.append(batch) or 1 / 0, images)
    assert seen[0]["input_ids"].shape == ids.shape


def test_own_steps():
    on_ranks(2, _own_steps)
