"""GRPO and RLOO with rollouts by vLLM (a stub of its interface): groups of ranks ask as often as
one process, send the same weights, and log its numbers."""

import contextlib
import threading

import pytest
import torch
import torch.distributed as dist
from by_trl import made, reference_of, reinforced, reward_of, same
from harness import on_ranks
from trained import everywhere, launched, logs, pairs
from vllm_stub import Client, Engine, installed


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference")
    reference_of().save_pretrained(folder)
    return str(folder)


def _rollouts(size, batch, reference, mode="server", engine=False, **given):
    """What a training logs, and what the server was asked and sent."""
    if mode == "colocate" and engine:
        given["vllm_tensor_parallel_size"] = size
    with installed():
        logged = reinforced(size, batch, reference, use_vllm=True, vllm_mode=mode, **given)
        asked, sent = everywhere(Client.asked), everywhere(Client.sent)
        sums = [{n: float(x.double().sum()) for n, x in weights.items()} for weights in sent]
        assert len(sums) >= 3
        if mode == "colocate":  # each rank loads all
            copies = dist.get_world_size() if dist.is_initialized() else 1
            assert len(sums) % copies == 0
            sums = sums[: len(sums) // copies]
            if given.get("vllm_enable_sleep_mode"):
                assert Engine.levels[:4] == ["sleep 2", "wake weights", "wake kv_cache", "sleep 2"]
        weights = {f"{n}.{i}": x for i, update in enumerate(sums) for n, x in update.items()}
        return [*logged, {"asked": str(sorted(asked))}, weights]


# The models are float64; TRL's head computes in float32.
_CLOSE = {"digits": 1e-5, "dtype": torch.float64}


_NIGHTLY = pytest.mark.nightly
_MODES = [
    ("GRPO", "server"),
    ("RLOO", "colocate"),
    pytest.param("GRPO", "colocate", marks=_NIGHTLY),
    pytest.param("RLOO", "server", marks=_NIGHTLY),
]


@pytest.mark.parametrize(("name", "mode"), _MODES)
def test_rollouts(name, mode, reference):
    given = {"vllm_enable_sleep_mode": True} if mode == "colocate" else {}
    same(_rollouts, 2, 2, batch=4, reference=reference, name=name, mode=mode, **given, **_CLOSE)


_KINDS = {
    "three ranks": {"world": 3, "batch": 6, "steps_per_generation": 2},
    "two groups": {"world": 4, "batch": 4, "digits": 1e-4},
    "two groups of engines": {"world": 4, "batch": 3, "mode": "colocate"},
    "an engine of a group": {"mode": "colocate", "engine": True, "batch": 6},
    "LoRA": {"kind": "LoRA"},
    "FSDP": {"fsdp": True, "dtype": torch.float32, "digits": 1e-3},
    "ZeRO 3": {"stage": 3, "dtype": torch.float32, "digits": 1e-3},
    "DAPO": {
        "loss_type": "dapo",
        "epsilon_high": 0.28,
        "mask_truncated_completions": True,
        "num_iterations": 2,
        "steps_per_generation": 2,
    },
    "Dr. GRPO": {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "GSPO": {
        "importance_sampling_level": "sequence",
        "loss_type": "grpo",
        "steps_per_generation": 2,
        "num_iterations": 2,
        "vllm_importance_sampling_mode": "sequence_truncate",
    },
    "masked": {"vllm_importance_sampling_mode": "token_mask", "off_policy_mask_threshold": 0.1},
    "CISPO": {"loss_type": "cispo", "epsilon_high": 5.0, "steps_per_generation": 2},
    "SAPO": {"loss_type": "sapo", "vllm_importance_sampling_correction": False},
    "VESPO": {"loss_type": "vespo", "vllm_importance_sampling_mode": "token_truncate"},
}


@pytest.mark.parametrize(
    "kind", [k if k == "FSDP" else pytest.param(k, marks=_NIGHTLY) for k in _KINDS]
)
def test_kinds_of_rollouts(kind, reference):
    given = {"batch": 4, "size": 2, "world": 2, **_CLOSE, **_KINDS[kind]}
    if given["world"] == 3:
        given["size"] = 3
    same(_rollouts, reference=reference, **given)


def _faults(fault, reference):
    size = dist.get_world_size()
    given = {"use_vllm": True, "vllm_mode": "server", "num_generations": 2}
    rows = pairs(24).remove_columns(["chosen", "rejected"])
    with launched(), installed(fault):
        cls, more = made("GRPO", size, batch=4, evaluates=False, max_completion_length=9, **given)
        more["model"].config._name_or_path = reference
        trainer = cls(reward_funcs=[reward_of], train_dataset=rows, **more)
        assert trainer.vllm_generation.sequence_timeout == trainer.args.ddp_timeout
        if fault == "slow":  # ddp_timeout itself would be that of other tests' groups, too
            trainer.vllm_generation.sequence_timeout = 1
        trainer.train()


_FAULTS = {
    "absent": r"vLLM to start, but rank 0 got ConnectionError: The vLLM server can't be reached",
    "dies": r"completions from the vLLM server, but rank 0 got ConnectionError: connection reset",
    "slow": r"but rank 0 got TimeoutError: no answer within 0.9 s, 0.9 of ddp_timeout; set a lon",
    "fewer": r"rank 0 got RuntimeError: 3 completions of 4 prompts",
    "unscored": r"rank 0 got RuntimeError: \[.* log-probabilities of completions of \[",
    "deaf": r"vLLM to take the weights, but rank 0 got RuntimeError: weights of the wrong shape",
}


def _raises(fault, pattern, reference):
    with pytest.raises(RuntimeError, match=pattern):
        _faults(fault, reference)


@pytest.mark.parametrize("fault", _FAULTS)
def test_faults(fault, reference):
    """A server that fails is an error on every rank."""
    on_ranks(2, _raises, fault, _FAULTS[fault], reference)


_CALLS = []


def draw(x: int) -> str:
    """Draws a word.

    Args:
        x: a number.
    """
    _CALLS.append(x)
    if x % 5 == 0:
        raise KeyError(x)
    return _Word(f"t{30 + (x + 7 * len(_CALLS)) % 40}")  # another one on each call


class _Word:
    """What can't be pickled, but has a text."""

    def __init__(self, text):
        self.text, self.lock = text, threading.Lock()

    def __str__(self):
        return self.text


def _parsed(tokenizer, ids, **_):
    """A message, with a call of the tool if its first id is even."""
    message = {"role": "assistant", "content": tokenizer.decode(ids)}
    if ids[0] % 2 == 0:
        call = {"name": "draw", "arguments": {"x": ids[0]}}
        message["tool_calls"] = [{"type": "function", "function": call}]
    return message


def _with_tools(size, batch, reference, mode, **given):
    import trl.trainer.grpo_trainer as module

    _CALLS.clear()
    template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    given |= {"use_vllm": True, "vllm_mode": mode, "num_generations": 2}
    cls, more = made("GRPO", size, batch=batch, max_completion_length=24, **given)
    more["model"].config._name_or_path = reference
    more["processing_class"].chat_template = template
    more["processing_class"].response_schema = {}
    rows = pairs(24).remove_columns(["chosen", "rejected"])
    rows = rows.map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]})
    with contextlib.ExitStack() as stack:
        stack.enter_context(installed())
        patched = pytest.MonkeyPatch()
        stack.callback(patched.undo)
        patched.setattr(module, "supports_tool_calling", lambda *_: True)
        patched.setattr(module, "is_chat_template_prefix_preserving", lambda *_: True)
        patched.setattr(module, "parse_response", _parsed)
        trainer = cls(
            reward_funcs=[reward_of],
            train_dataset=rows,
            eval_dataset=rows.select(range(4)),
            tools=[draw],
            **more,
        )
        trainer.train()
        asked, calls = everywhere(Client.asked), everywhere(_CALLS)
        assert len(calls) > 5 and any(x % 5 == 0 for x in calls)
        # Where engines sleep, a rank without a prompt asks for one, too.
        asked = "" if "vllm_enable_sleep_mode" in given else str(sorted(asked))
        return [*logs(trainer), {"asked": asked, "calls": str(sorted(calls))}]


@pytest.mark.parametrize("mode", ["server", pytest.param("colocate", marks=_NIGHTLY)])
def test_tools(mode, reference):
    """Tools run once for a group, whose ranks share results and errors."""
    same(_with_tools, 2, 2, batch=4, digits=1e-4, reference=reference, mode=mode)


@_NIGHTLY
def test_tools_of_groups(reference):
    """Groups whose tools are called in other numbers of turns, and engines that sleep."""
    how = {"mode": "colocate", "vllm_enable_sleep_mode": True, "dtype": torch.float64}
    same(_with_tools, 4, 2, batch=4, digits=1e-4, reference=reference, **how)
