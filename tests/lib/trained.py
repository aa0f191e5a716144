"""Small trainings by transformers' Trainer and its kind, for tests: what they log, by step."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import tempfile
from collections.abc import Iterator

import indexed
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import on_ranks

VOCABULARY, LENGTH = 97, 21


class Rows(torch.utils.data.Dataset):
    """Rows of random ids. Half of them have labels for some tokens only, every fifth for none;
    ``keep``: no token behind the first so many has one."""

    def __init__(self, count: int, seed: int = 0, keep: int | None = None):
        generator = torch.Generator().manual_seed(seed)
        self.keep = LENGTH if keep is None else keep
        self.ids = torch.randint(5, VOCABULARY, (count, LENGTH), generator=generator)
        self.kept = torch.rand((count, LENGTH), generator=generator) > 0.4

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> dict:
        labels = self.ids[i].clone()
        if i % 2:
            labels[~self.kept[i]] = -100
        if i % 5 == 2:
            labels[:] = -100
        labels[self.keep :] = -100
        return {"input_ids": self.ids[i], "labels": labels}


def tokenizer(splits: bool = False, special=None, ids=None):
    """Words t0, t1, ... are the ids 0, 1, ...; ``splits``: at spaces. ``special``: names of special
    tokens, which have other ``ids``."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    taken = (ids or {}).values()
    words = {f"t{n}": n for n in range(VOCABULARY) if n not in taken} | (ids or {})
    made = Tokenizer(models.WordLevel(words, "t3"))
    if splits:
        made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="t0",
        bos_token="t1",
        eos_token="t2",
        unk_token="t3",
        extra_special_tokens=special or {},
    )


def lists(count, seed=0, length=None):
    """Rows of different lengths, or of one, as a data set of lists of ids."""
    from datasets import Dataset

    ids = Rows(count, seed).ids
    ids = ids.repeat(1, -(-(length or 1) // ids.size(1)))
    cut = [ids[i, : length or 5 + (7 * i) % 16].tolist() for i in range(count)]
    return Dataset.from_dict({"input_ids": cut})


def pairs(count, seed=0):
    """Prompts of different lengths, with two completions of different lengths."""
    from datasets import Dataset

    generator = torch.Generator().manual_seed(seed)

    def words(count):
        ids = torch.randint(5, VOCABULARY, (count,), generator=generator)
        return " ".join(f"t{i}" for i in ids.tolist())

    return Dataset.from_list(
        [
            {
                "prompt": words(3 + i % 5),
                "chosen": " " + words(2 + 3 * i % 7),
                "rejected": " " + words(3 + 5 * i % 11),
            }
            for i in range(count)
        ]
    )


RECURRENT = {
    "qwen3_next": {
        "num_hidden_layers": 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
        "mlp_only_layers": [0, 1],
        "num_experts": 2,
    },
    "nemotron_h": {
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 8,
        "chunk_size": 8,
    },
}
"""What models with a recurrent layer and one with attention need beside the rest."""


def tiny(name: str = "llama", dtype: torch.dtype = torch.float32, **kwargs):
    """A causal language model of transformers with two layers, the same on every rank."""
    from transformers import AutoConfig, AutoModelForCausalLM, set_seed

    set_seed(0)
    given = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if name in RECURRENT:
        given |= {**RECURRENT[name], "layer_types": ["linear_attention", "full_attention"]}
    if name in indexed.TEXT:
        given = {**indexed.TEXT[name], "vocab_size": VOCABULARY}
    config = AutoConfig.for_model(name, **{**given, **kwargs})
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    if name in indexed.TEXT:
        model.set_experts_implementation("eager")
    if dtype == torch.float64:  # transformers' own norms round to float32 in between
        for module in list(model.modules()):
            for child, norm in list(module.named_children()):
                if type(norm).__name__.endswith("RMSNorm") and hasattr(norm, "weight"):
                    wide = torch.nn.RMSNorm(norm.weight.shape, norm.variance_epsilon, dtype=dtype)
                    setattr(module, child, wide)
    return model


def arguments(cls=None, **kwargs):
    from transformers import TrainingArguments

    given = {
        "output_dir": tempfile.mkdtemp(),
        "use_cpu": True,
        "max_steps": 3,
        "logging_steps": 1,
        "report_to": [],
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "save_strategy": "no",
        "disable_tqdm": True,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "ddp_find_unused_parameters": False,
    }
    return (cls or TrainingArguments)(**{**given, **kwargs})


@contextlib.contextmanager
def launched() -> Iterator[None]:
    """As torchrun launches a process; without a group, as python does."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    names = {}
    if dist.is_initialized() and dist.get_world_size() > 1:
        rank, size = str(dist.get_rank()), str(dist.get_world_size())
        names = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": size,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "1",
        }
    before = dict(os.environ)
    os.environ.update(names)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        for state in (AcceleratorState, GradientState, PartialState):
            state._shared_state.clear()


def under_fsdp(cls: type) -> type:
    """The trainer's class with FSDP2 around each layer. accelerate turns it on where there are GPUs
    only: here this class does."""
    from accelerate import DistributedType, FullyShardedDataParallelPlugin
    from torch.distributed.tensor import DTensor

    class Sharded(cls):
        def create_accelerator_and_postprocess(self):
            super().create_accelerator_and_postprocess()
            self._turn_on()
            self.is_fsdp_enabled = True

        def _turn_on(self):
            state = self.accelerator.state
            state.distributed_type = DistributedType.FSDP
            state.fsdp_plugin = FullyShardedDataParallelPlugin(
                fsdp_version=2, auto_wrap_policy="transformer_based_wrap"
            )

        def train(self, *args, **kwargs):
            self._turn_on()  # TRL's arguments may have made the state anew
            found = super().train(*args, **kwargs)
            assert any(isinstance(p, DTensor) for p in self.model_wrapped.parameters())
            return found

    Sharded.__name__ = cls.__name__
    return Sharded


def logs(trainer) -> list[dict]:
    """Of each step: loss, gradient norm, evaluation loss and metrics."""
    skipped = ("runtime", "per_second", "flos", "epoch")
    return [
        {k: v for k, v in entry.items() if not any(word in k for word in skipped)}
        for entry in trainer.state.log_history
    ]


def wide_loss(logits, labels, vocab_size, num_items_in_batch=None, **kwargs):
    """transformers' own, but for its cast to float32."""
    labels = F.pad(labels, (0, 1), value=-100)[..., 1:]
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=reduction)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


@functools.cache
def one_process(function, *args):
    """``function(*args)``, computed once."""
    return function(*args)


def trainer_class(size):
    """Returns a trainer for one process or for groups of ``size`` ranks, and its arguments."""
    if size > 1:
        from deepsp.integrations.transformers import SequenceParallelTrainer

        return SequenceParallelTrainer, {"sequence_parallel_size": size}
    from transformers import Trainer

    return Trainer, {}


def run_launched(function, size, batch, items):
    with launched():
        return function(size, batch, **dict(items))


def compare_logs(function, world, size, batch=4, digits=1e-5, **given):
    """Compares what every rank of ``world``, in groups of ``size``, logs with one process."""
    items = tuple(given.items())
    expected = one_process(run_launched, function, 1, batch, items)
    rank_batch = batch // (world // size)
    for mine in on_ranks(world, run_launched, function, size, rank_batch, items):
        assert len(mine) == len(expected) > 3
        for a, b in zip(mine, expected, strict=True):
            # transformers adds up the losses of steps in float32.
            rough = {k: max(digits, 1e-6) if k in ("loss", "train_loss") else digits for k in b}
            assert a.keys() == b.keys()
            assert all(a[k] == pytest.approx(b[k], rel=rough[k]) for k in b), (a, b)


def everywhere(values):
    """The lists of all ranks, joined."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return values
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, values)
    return list(itertools.chain(*every))
