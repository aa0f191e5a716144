"""TRL's AsyncGRPOTrainer over sharded sequences: rows of the rollouts of stale policies, which
share prefixes, as one process trains on them."""

import inspect
import queue

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from by_trl import same
from harness import on_ranks
from trained import VOCABULARY, arguments, everywhere, launched, logs, pairs, tiny, tokenizer
from vllm_stub import answer, log_probs_of

_SENT = []


class _Attention:
    """FlashAttention 3's varlen function, by SDPA, for the CPU."""

    @staticmethod
    def flash_attn_varlen_func(q, k, v, cu_q, cu_k, max_q, max_k, softmax_scale, causal, **_):
        outputs = []
        borders = (x.tolist() for x in (cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:]))
        for a, b, c, d in zip(*borders, strict=True):
            assert b - a <= max_q and d - c <= max_k and causal
            # The last query sees all keys.
            mask = torch.ones(b - a, d - c, dtype=torch.bool).tril(d - c - (b - a))
            rows = (x.transpose(0, 1)[None] for x in (q[a:b], k[c:d], v[c:d]))
            out = F.scaled_dot_product_attention(
                *rows, attn_mask=mask, scale=softmax_scale, enable_gqa=True
            )
            outputs.append(out[0].transpose(0, 1))
        return torch.cat(outputs)


class _Worker:
    """Rollouts by rule, of three policies. ``fails_at``: the sample at which it dies."""

    def __init__(self, prompts, generations, fails_at=None):
        self.metrics_queue, self.version = queue.Queue(), 0
        self.rollout_buffer, self.count = self, 0
        self.prompts, self.generations, self.fails_at = prompts, generations, fails_at

    def get(self, timeout):
        from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

        number, self.count = self.count, self.count + 1
        if number == self.fails_at:
            raise RuntimeError("the rollout process has died")
        group, n = divmod(number, self.generations)
        prompt = self.prompts[group % len(self.prompts)]
        ids = answer(prompt, n, 9)
        scores = [0.0] * len(prompt) + log_probs_of(ids)
        mask = [0] * len(prompt) + [1] * len(ids)
        mask[len(prompt) + 1] = number % 2  # a tool's token
        return RolloutSample(
            prompt=[],
            completion=[],
            input_ids=np.array(prompt + ids),
            completion_mask=np.array(mask),
            old_log_probs=np.array(scores, dtype=np.float32),
            advantage=(number * 7 % 5 - 2) / 2,
            model_version=max(0, self.version - number % 3),
            group_id=group,
            metrics={"reward": number % 4 / 4},
        )

    def qsize(self):
        return 1

    def start(self):
        pass

    stop = start

    def update_model_version(self, version):
        self.version = version

    def check_health(self, stale_after_s):
        pass


class _Transfer:
    """Takes the weights. ``fails_at``: the update that it refuses."""

    def __init__(self, fails_at=None):
        self.fails_at = fails_at

    def send_weights(self, iterator):
        if len(_SENT) == self.fails_at:
            raise RuntimeError("vLLM has other weights")
        _SENT.append({name: float(x.double().sum()) for name, x in iterator})

    def init_weight_transfer(self):
        pass

    pause = resume = destroy = init_weight_transfer


def _trained(size, batch, folder, fails_at=None, transfer_fails_at=None, **given):
    import trl.experimental.async_grpo.async_grpo_trainer as module
    import trl.experimental.async_grpo.packing as packing
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    from deepsp.integrations.transformers import sequence_parallel

    _SENT.clear()
    packing._flash_attn = lambda: _Attention
    module.get_peak_flops_per_device = lambda *_: None
    cls, more = AsyncGRPOTrainer, {}
    if size > 1:
        cls, more = sequence_parallel(cls), {"sequence_parallel_size": size}
    generator = torch.Generator().manual_seed(3)
    prompts = [
        torch.randint(5, VOCABULARY, (3 + i % 7,), generator=generator).tolist() for i in range(9)
    ]
    trainer = cls(
        model=folder,
        reward_funcs=[],
        args=arguments(
            AsyncGRPOConfig,
            max_steps=4,
            per_device_train_batch_size=batch,
            num_generations=2,
            max_completion_length=9,
            eval_strategy="no",
            dtype="float32",
            bf16=False,
            **{"token_budget": -1, "gradient_checkpointing": False, **given},
        ),
        processing_class=tokenizer(splits=True),
        train_dataset=pairs(8).remove_columns(["chosen", "rejected"]),
        rollout_worker=_Worker(prompts, 2, fails_at),
        weight_transfer=_Transfer(transfer_fails_at),
        **more,
    )
    trainer.train()
    # Times, and what only the first process counts, as in TRL.
    skipped = ("perf/", "time_in_queue", "batch/", "sample/", "reward")
    kept = [
        {k: v for k, v in entry.items() if not any(word in k for word in skipped)}
        for entry in logs(trainer)
    ]
    updates = enumerate(everywhere(_SENT))
    return [*kept, {f"{n}.{i}": x for i, update in updates for n, x in update.items()}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("policy")
    tiny().save_pretrained(path)
    return str(path)


def test_async(folder):
    same(_trained, 2, 2, batch=4, digits=1e-4, folder=folder)


_KINDS = [
    {"world": 3},
    {"world": 4, "batch": 2},
    {"token_budget": 40},
    {"gradient_checkpointing": True, "gradient_accumulation_steps": 2},
]


@pytest.mark.nightly
@pytest.mark.parametrize("given", _KINDS, ids=str)
def test_kinds_of_async(given, folder):
    given = {"world": 2, "batch": 4, "digits": 1e-4, **given}
    given["size"] = given["world"] if given["world"] < 4 else 2
    same(_trained, folder=folder, **given)


_FAULTS = [
    ({"fails_at": 6}, "expected rollouts, but rank 0 got RuntimeError: the rollout process has"),
    ({"transfer_fails_at": 2}, "vLLM to take the weights, but rank 0 got RuntimeError: vLLM has o"),
]


def _raises(given, pattern, folder):
    with launched(), pytest.raises(RuntimeError, match=pattern):
        _trained(2, 4, folder, **given)


@pytest.mark.parametrize(("given", "pattern"), _FAULTS)
def test_faults(given, pattern, folder):
    on_ranks(2, _raises, given, pattern, folder)


def test_arguments_of_trees():
    """Calls pass on what an attention requires, but for what deepsp's attention knows itself."""
    from transformers import AttentionInterface
    from trl.experimental.async_grpo.packing import register_tree_attention, tree_attention

    from deepsp.integrations.transformers.cores import required_by

    def own(module, query, key, value, mask, *, scaling, position_ids, dropout=0.0):
        raise AssertionError

    register_tree_attention()
    trees = {p for p in inspect.signature(tree_attention).parameters if p.startswith("tree_")}
    assert required_by("tree_fa3") == trees and len(trees) == 5
    AttentionInterface.register("own", own)
    for name in ("own", "sdpa", "flash_attention_2", "flex_attention", "auto", ""):
        assert required_by(name) == set(), name
