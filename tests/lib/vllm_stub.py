"""vLLM for tests, with the interface that TRL 1.16 calls: a client of a server, and an engine. They
answer by rule, the same for the same prompt, and record what they are asked."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import ClassVar

import torch
from trained import VOCABULARY

END = 2


def answer(prompt: list[int], number: int, most: int) -> list[int]:
    """The ids of a prompt's completion with that number, of which most end with an end token."""
    seed = sum((i + 1) * token for i, token in enumerate(prompt)) + 31 * number
    ids = [5 + (seed * (k + 3) + k * k) % (VOCABULARY - 5) for k in range(2 + seed % 7)]
    return [*ids, END][:most] if seed % 3 else ids[:most]


def log_probs_of(ids: list[int]) -> list[float]:
    """What the sampler says of a completion's tokens."""
    return [-4.0 - token % 9 / 10 for token in ids]


class Client:
    """A client of a server. ``fault``: how the server fails on its second request."""

    asked: ClassVar[list[list[int]]] = []
    """The prompts of this process's requests."""
    sent: ClassVar[list[dict[str, torch.Tensor]]] = []
    """The weights of each update."""
    scored: ClassVar[list[list[int]]] = []
    """The sequences whose log-probabilities were asked for."""
    fault = ""

    def __init__(self, base_url=None, group_port=0, connection_timeout=0.0, **_):
        self.requests = 0
        if self.fault == "absent":
            raise ConnectionError(f"The vLLM server can't be reached at {base_url}")

    def init_communicator(self, device=None) -> None:
        pass

    def get_server_info(self) -> dict:
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def generate(self, prompts, features=None, n=1, max_tokens=16, logprobs=0, **_) -> dict:
        self.requests += 1
        asked = self.asked  # a slow request outlives its test
        if self.requests == 2 and self.fault == "dies":
            raise ConnectionError("connection reset by peer")
        if self.requests == 2 and self.fault == "slow":
            time.sleep(5)
        asked.extend(prompts)
        ids = [answer(p, i, max_tokens) for p in prompts for i in range(n)]
        if self.requests == 2 and self.fault == "fewer":
            ids = ids[:-1]
        scores = [[[x] for x in log_probs_of(c)] for c in ids] if logprobs is not None else None
        if self.requests == 2 and self.fault == "unscored":
            scores[0] = scores[0][:-1]
        return {"prompt_ids": prompts, "completion_ids": ids, "logprobs": scores}

    def get_sequence_logprobs(self, sequences, prompt_lengths, top_logprobs, temperature) -> dict:
        self.scored.extend(sequences)
        result = {"logprobs": [], "logprob_token_ids": [], "actual_logprobs": []}
        for ids, length in zip(sequences, prompt_lengths, strict=True):
            own = ids[length:]
            result["actual_logprobs"].append([[x] for x in log_probs_of(own)])
            result["logprobs"].append([[-0.9 - k for k in range(top_logprobs)] for _ in own])
            result["logprob_token_ids"].append(
                [[(token + 3 * k) % VOCABULARY for k in range(top_logprobs)] for token in own]
            )
        return result

    def update_named_params(self, metadata, params) -> None:
        if self.fault == "deaf" and self.sent:
            raise RuntimeError("weights of the wrong shape")
        weights = {name: param.detach().clone() for name, param in params}
        assert [(n, list(x.shape)) for n, x in weights.items()] == [
            (name, shape) for name, _, shape in metadata
        ]
        self.sent.append(weights)

    def reset_prefix_cache(self) -> None:
        pass


class Engine:
    """``vllm.LLM``, in a trainer's process."""

    levels: ClassVar[list[str]] = []
    """How it slept and woke."""

    def __init__(self, tensor_parallel_size=1, **_):
        runner = SimpleNamespace(model=SimpleNamespace(load_weights=self._load))
        executor = SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner))
        config = SimpleNamespace(max_model_len=64)
        self.llm_engine = SimpleNamespace(model_executor=executor, model_config=config)
        self.weights = {}
        self.is_first = int(os.environ["RANK"]) % tensor_parallel_size == 0

    def _load(self, pairs) -> None:
        for name, param in pairs:
            self.weights[name] = param.detach().clone()

    def reset_prefix_cache(self) -> None:
        Client.sent.append(self.weights)
        self.weights = {}

    def sleep(self, level: int) -> None:
        self.levels.append(f"sleep {level}")

    def wake_up(self, tags) -> None:
        self.levels.append(f"wake {' '.join(tags)}")

    def generate(self, prompts, sampling_params, use_tqdm=False) -> list:
        outputs = []
        for prompt in (x["prompt_token_ids"] for x in prompts):
            if self.is_first:  # of the ranks of an engine
                Client.asked.append(prompt)
            ids = answer(prompt, 0, sampling_params.max_tokens)
            scores = [
                {token: SimpleNamespace(rank=1, logprob=x)}
                for token, x in zip(ids, log_probs_of(ids), strict=True)
            ]
            completion = SimpleNamespace(token_ids=ids, logprobs=scores)
            outputs.append(SimpleNamespace(prompt_token_ids=prompt, outputs=[completion]))
        return outputs


@contextlib.contextmanager
def installed(fault: str = "") -> Iterator[None]:
    """In this context TRL finds vLLM, which is this one."""
    import trl.trainer.distillation_trainer as distillation
    from trl.generation import vllm_client, vllm_generation

    with contextlib.ExitStack() as stack:
        for module, name, value in (
            (vllm_generation, "is_vllm_available", lambda *_, **__: True),
            (distillation, "is_vllm_available", lambda *_, **__: True),
            (vllm_generation, "VLLMClient", Client),
            (vllm_client, "VLLMClient", Client),
            (vllm_generation, "LLM", Engine),
            (vllm_generation, "SamplingParams", SimpleNamespace),
            (vllm_generation, "empty_cache", lambda: None),
            (Client, "fault", fault),
            (Client, "asked", []),
            (Client, "sent", []),
            (Client, "scored", []),
            (Engine, "levels", []),
        ):
            if hasattr(module, name):
                stack.callback(setattr, module, name, getattr(module, name))
            else:
                stack.callback(delattr, module, name)
            setattr(module, name, value)
        yield
