"""Random cases of the doors: a model, batches as a collator makes them, a door, its options, and
ranks. Each runs on one process by the door's own library, and on ranks by deepsp."""

from __future__ import annotations

import dataclasses
import itertools
import random

import torch
import torch.nn.functional as F
from faults import put_back
from float64 import in_float64
from trained import RECURRENT, VOCABULARY, arguments, launched, logs, tokenizer, wide_loss

import deepsp

_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
FAMILIES = {
    "llama": _HEADS,
    "qwen3": _HEADS,
    "gpt2": {  # learned positions
        "num_attention_heads": 4,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
    "roberta": {  # positions from 2 on, of tokens that aren't padding
        "num_attention_heads": 4,
        "hidden_dropout_prob": 0.0,
        "is_decoder": True,
        "attention_probs_dropout_prob": 0.0,
    },
    "biogpt": {  # positions by attention_mask
        "num_attention_heads": 4,
        "hidden_dropout_prob": 0.0,
        "layerdrop": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "activation_dropout": 0.0,
    },
    "mixtral": {**_HEADS, "num_local_experts": 4, "router_aux_loss_coef": 0.5},
    "mamba2": {  # takes no position_ids
        "num_heads": 4,
        "head_dim": 16,
        "state_size": 8,
        "n_groups": 2,
        "chunk_size": 8,
    },
    **{
        name: {**_HEADS, **more, "layer_types": ["linear_attention", "full_attention"]}
        for name, more in RECURRENT.items()
    },
}
HAVE_STATE = ("mamba2", *RECURRENT)

BATCHES = {
    "rows": "of one length",
    "masked": "of one length, without labels for some tokens",
    "right": "padded on the right",
    "left": "padded on the left",
    "late": "of one length, whose positions begin at 7",
    "packed": "documents in a row, with position_ids",
    "numbered": "documents in a row, with position_ids and seq_idx",
    "starts": "documents in a row, with cu_seq_lens",
}
PACKED = ("packed", "numbered", "starts")


@dataclasses.dataclass(frozen=True)
class Case:
    """One case. ``options`` are those of the door, as pairs; ``seed`` makes the rows."""

    seed: int
    door: str
    family: str
    batches: str
    world: int
    size: int
    options: tuple[tuple[str, object], ...] = ()

    @property
    def groups(self) -> int:
        return self.world // self.size

    @property
    def only_evaluates(self) -> bool:
        """Whether training isn't that of one process: transformers adds the balancing loss once for
        each process (here, each group)."""
        return self.groups > 1 and bool(self.has("output_router_logits"))

    def has(self, name: str) -> object:
        return dict(self.options).get(name)


def draw(seed: int) -> Case:
    """The case of a seed."""
    chance = random.Random(seed)
    door = chance.choice(["Trainer", "Trainer", "SFT", "accelerate", "shard_batch", "deal_batch"])
    family, batches = chance.choice(list(FAMILIES)), chance.choice(list(BATCHES))
    world, size = chance.choice([(2, 2), (2, 2), (3, 3), (4, 2)])
    if family == "biogpt" and batches == "left":
        world = size  # attends to padding, so that the loss depends on how much there is
    if family in ("roberta", "biogpt") and batches in PACKED:
        batches = "right"  # counts tokens itself, over documents
    if door == "deal_batch" and family in HAVE_STATE:
        door = "shard_batch"  # these need the tokens in order
    if door in ("shard_batch", "deal_batch") or (door, family) == ("accelerate", "mixtral"):
        world = size
    options: dict[str, object] = {}

    def maybe(name: str, value: object = True, one_in: int = 3) -> None:
        if chance.randrange(one_in) == 0:
            options[name] = value

    if family == "mixtral":
        maybe("output_router_logits", one_in=2)
    if door == "Trainer":
        maybe("label_smoothing_factor", 0.2)
        maybe("gradient_accumulation_steps", 2)
        maybe("mix_lengths")
        if family in HAVE_STATE:
            options.pop("mix_lengths", None)
        if "output_router_logits" not in options:
            maybe("without_logits")
        maybe("metrics")
    if door == "SFT":
        family = chance.choice(["qwen3", "mixtral", "nemotron_h"])
        batches = chance.choice(["lists", "bfd", "padding_free", "stream"])
        if family == "nemotron_h":
            batches = "lists"
        if family == "mixtral":  # whose balancing loss counts once for each group
            world = size
        maybe("gradient_accumulation_steps", 2)
    if door in ("Trainer", "SFT", "accelerate"):
        options["prove"] = chance.choice([False, False, True])
    if options.get("output_router_logits") and family != "mixtral":
        del options["output_router_logits"]
    return Case(seed, door, family, batches, world, size, tuple(sorted(options.items())))


# ---- models and batches


def model_of(case: Case, size: int) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM, set_seed

    set_seed(0)
    config = AutoConfig.for_model(
        case.family,
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        max_position_embeddings=64,
        initializer_range=0.1,
        use_cache=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **{"num_hidden_layers": 2, **FAMILIES[case.family]},
    )
    if case.has("output_router_logits"):
        config.output_router_logits = True
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    if size == 1 and not case.has("label_smoothing_factor"):
        model.loss_function = wide_loss
    return model


class Rows(torch.utils.data.Dataset):
    """Rows of ids, of different lengths unless batches have none of their own."""

    def __init__(self, case: Case, count: int, seed: int):
        chance = torch.Generator().manual_seed(1000 * case.seed + seed)
        even = case.batches in ("rows", "masked", "late")
        lens = torch.randint(3, 19, (count,), generator=chance)
        lens = torch.full((count,), 17 + case.seed % 2) if even else lens
        self.ids = [torch.randint(5, VOCABULARY, (n,), generator=chance) for n in lens.tolist()]
        self.kept = [torch.rand(len(x), generator=chance) > 0.4 for x in self.ids]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[i], "kept": self.kept[i]}


class Collate:
    """Rows as the batches of a case. ``alone``: documents in rows of their own."""

    def __init__(self, case: Case, alone: bool = False):
        self.alone = alone and case.batches in PACKED
        self.kind = "right" if alone and case.batches in PACKED else case.batches
        self.counts = case.family == "roberta"

    def __call__(self, rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        batch = self._batch(rows)
        if self.alone:  # as in a row of documents
            batch["labels"][:, 0] = -100
        if self.counts and "position_ids" not in batch:  # as RoBERTa counts
            real = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
            batch["position_ids"] = real.cumsum(1) * real
        return batch

    def _batch(self, rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        ids = [row["input_ids"] for row in rows]
        if self.kind in PACKED:
            return self._packed(ids)
        longest = max(map(len, ids))
        if self.kind in ("right", "left"):
            pads = [longest - len(x) for x in ids]
            sides = [(0, n) if self.kind == "right" else (n, 0) for n in pads]
            mask = torch.stack([F.pad(torch.ones_like(x), s) for x, s in zip(ids, sides)])  # noqa: B905
            ids = torch.stack([F.pad(x, s) for x, s in zip(ids, sides)])  # noqa: B905
            labels = ids.masked_fill(mask == 0, -100)
            if self.kind == "left":  # nothing predicts a row's first token
                labels = labels.masked_fill(mask.cumsum(1) == 1, -100)
            return {"input_ids": ids, "labels": labels, "attention_mask": mask}
        ids, kept = torch.stack(ids), torch.stack([row["kept"] for row in rows])
        labels = ids.masked_fill(~kept, -100) if self.kind == "masked" else ids.clone()
        batch = {"input_ids": ids, "labels": labels}
        if self.kind == "late":
            batch["position_ids"] = torch.arange(7, 7 + longest).expand_as(ids).contiguous()
        return batch

    def _packed(self, ids: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        from transformers import DataCollatorWithFlattening

        collate = DataCollatorWithFlattening(
            return_position_ids=self.kind != "starts",
            return_seq_idx=self.kind == "numbered",
            return_flash_attn_kwargs=self.kind == "starts",
        )
        return collate([{"input_ids": x.tolist()} for x in ids])


def _collate(case: Case, size: int) -> Collate:
    """transformers' own recurrent layers let state through to the next document."""
    alone = size == 1 and (case.family in HAVE_STATE or case.batches == "starts")
    return Collate(case, alone)


# ---- doors


def _trainer(case: Case, size: int, batch: int) -> list[dict]:
    from transformers import Trainer

    names = ("label_smoothing_factor", "gradient_accumulation_steps")
    settings = {n: x for n, x in case.options if n in names}
    if case.only_evaluates:
        settings["learning_rate"] = 0.0
    cls, more = Trainer, {}
    if size > 1:
        from deepsp.integrations.transformers import SequenceParallelTrainer as cls

        names = ("mix_lengths", "without_logits", "prove")
        more = {n: x for n, x in case.options if n in names} | {"sequence_parallel_size": size}
    metrics = case.has("metrics") and case.batches not in PACKED
    args = arguments(
        per_device_train_batch_size=batch,
        per_device_eval_batch_size=batch,
        max_steps=2,
        eval_steps=2,
        remove_unused_columns=False,
        prediction_loss_only=not metrics,
        **settings,
    )
    # An evaluation weighs a batch of documents in rows of their own by its rows.
    rows = 8 if case.batches in PACKED else 7
    trainer = cls(
        model_of(case, size),
        args,
        train_dataset=Rows(case, 24, 0),
        eval_dataset=Rows(case, rows, 1),
        data_collator=_collate(case, size),
        compute_metrics=_counts if metrics else None,
        **more,
    )
    trainer.train()
    return logs(trainer)


def _counts(prediction) -> dict[str, float]:
    logits, labels = prediction.predictions, prediction.label_ids
    logits = logits if isinstance(logits, tuple) else (logits,)  # routers have some, too
    logits = next(x for x in logits if getattr(x, "shape", ())[:2] == labels.shape)
    counted = labels != -100
    return {"rows": float(len(labels)), "size": float(abs(logits[counted]).sum())}


def _sft(case: Case, size: int, batch: int) -> list[dict]:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    cls, more = SFTTrainer, {}
    if size > 1:
        from deepsp.integrations.transformers import sequence_parallel

        cls = sequence_parallel(SFTTrainer)
        more = {"sequence_parallel_size": size, "prove": case.has("prove")}
    packs = case.batches in ("bfd", "stream")
    settings = {n: x for n, x in case.options if n == "gradient_accumulation_steps"}
    args = arguments(
        SFTConfig,
        per_device_train_batch_size=batch,
        per_device_eval_batch_size=batch,
        bf16=False,
        max_length=32 if packs else None,
        packing=packs,
        max_steps=2,
        eval_steps=2,
        padding_free=case.batches == "padding_free",
        dataset_num_proc=None,
        dataloader_drop_last=packs and case.groups > 1,
        **settings,
    )
    train, evaluation = (
        Dataset.from_dict({"input_ids": [x.tolist() for x in Rows(case, count, seed).ids]})
        # The last batch of documents in a row must be full, if groups have one each.
        for count, seed in ((80, 0), (12 if case.groups > 1 else 11, 1))
    )
    if case.batches == "stream":
        train, evaluation = train.to_iterable_dataset(), evaluation.to_iterable_dataset()
    trainer = cls(
        model_of(case, size),
        args,
        train_dataset=train,
        eval_dataset=evaluation,
        processing_class=tokenizer(),
        **more,
    )
    trainer.train()
    return logs(trainer)


def _accelerate(case: Case, size: int, batch: int) -> list[dict]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, prepare, more = model_of(case, size), Accelerator.prepare, {}
    loader = torch.utils.data.DataLoader(
        Rows(case, 8, 0), batch_size=batch, collate_fn=_collate(case, size)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if size > 1:
        from deepsp.integrations.accelerate import prepare

        more = {"sequence_parallel_size": size, "prove": case.has("prove")}
    model, optimizer, loader = prepare(accelerator, model, optimizer, loader, **more)
    logged, groups = [], accelerator.num_processes
    for each in loader:
        # The mean over groups of a sum is that of all rows.
        loss = model(**each, num_items_in_batch=_ITEMS // groups).loss
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss = accelerator.reduce(loss.detach(), "mean")
        logged.append({"loss": loss.item(), "norm": norm.item()})
    return logged


_ITEMS = 60


def _loop(case: Case, size: int, batch: int) -> list[dict]:
    model, logged = model_of(case, size), []
    if size > 1:
        from deepsp.integrations.transformers import register

        register()
        model.set_attn_implementation("deepsp")
    loader = torch.utils.data.DataLoader(
        Rows(case, 8, 0), batch_size=batch, collate_fn=_collate(case, size)
    )
    for each in loader:
        if size > 1:
            each, *_ = getattr(deepsp, case.door)(each)
        loss = model(**each).loss
        loss.backward()
        if size > 1:
            deepsp.sync_gradients(model)
        norms = {n: p.grad.norm().item() for n, p in model.named_parameters() if p.grad is not None}
        logged.append({"loss": loss.item(), **norms})
        model.zero_grad()
    return logged


_DOORS = {
    "Trainer": _trainer,
    "SFT": _sft,
    "accelerate": _accelerate,
    "shard_batch": _loop,
    "deal_batch": _loop,
}


def run(case: Case, size: int, fault: str = "", **options: object) -> list[dict]:
    """What a case logs, on one process (``size=1``) or as one of its ranks. ``fault``: one that is
    put back. ``options``: in the place of the case's."""
    case = dataclasses.replace(case, options=tuple({**dict(case.options), **options}.items()))
    in_float64()
    with launched(), put_back(fault):
        return _DOORS[case.door](case, size, 4 if size == 1 else 4 // case.groups)


def difference(case: Case, mine: list[dict], one: list[dict]) -> str:
    """The first number of a rank's that isn't one process's; "": none."""
    if case.only_evaluates:
        mine, one = ([x for x in log if "eval_loss" in x] for log in (mine, one))
    for step, (a, b) in enumerate(itertools.zip_longest(mine, one, fillvalue={})):
        if a.keys() != b.keys():
            return f"at {step}: {sorted(a)} in place of {sorted(b)}"
        for name, x in b.items():
            # transformers adds up losses in float32, and its recurrent layers round to that.
            if abs(a[name] - x) > 2e-5 * max(abs(x), 1e-3):
                return f"at {step}: {name} {a[name]} in place of {x}"
    return ""
