"""Completions by vLLM for the groups of ranks of TRL's trainers.

A group asks a server once: its first rank sends the group's prompts, and the completions, their
log-probabilities and errors become those of all its ranks. Engines in the trainer's processes each
take a share of the group's prompts. Weights are sent as TRL sends them. Read from TRL 1.16
(``trl.generation.vllm_generation``), which supports vLLM 0.22 to 0.31."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from deepsp.integrations.door import Groups, replaced, subclass
from deepsp.ranks.groups import Member, device_of, member_of, objects_on_all_ranks

if TYPE_CHECKING:
    from transformers import Trainer

_WAIT = 0.9
"""The part of ``ddp_timeout`` for which a group waits for its completions: beyond ``ddp_timeout``,
the other ranks' collectives would fail without a reason."""


@contextlib.contextmanager
def by_group(trainer_class: type[Trainer]) -> Iterator[None]:
    """In this context, a trainer of TRL's that is made generates by :class:`Rollouts`."""
    module = sys.modules[trainer_class.__module__]
    if not hasattr(module, "VLLMGeneration"):
        yield
        return
    with replaced(module, "VLLMGeneration", subclass(Rollouts, module.VLLMGeneration)):
        yield


class Rollouts:
    """:func:`by_group` puts this class before TRL's ``VLLMGeneration``."""

    sequence_groups: Groups | None = None
    """None: ranks don't share sequences."""
    sequence_timeout: float = 1800.0
    """Seconds: ``ddp_timeout`` of the trainer."""
    sequence_weights: Iterator | None = None
    """The parameters that are sent now."""
    sequence_asks = False
    """Whether this rank generates: groups may do so in other numbers of turns."""

    def _init_vllm(self) -> None:
        self.sequence_groups = groups = getattr(self.accelerator, "sequence_groups", None)
        init = super()._init_vllm
        if groups is None:
            init()
            return

        def connect() -> None:
            with self.accelerator.sequence_counting("processes"):  # as vLLM counts them
                init()
            if self.mode != "server":
                return
            if self.accelerator.is_main_process:
                self.vllm_client.get_server_info()  # TRL asks for it on this rank alone
            elif groups.member[0] == 0:
                client = self._sequence_module.VLLMClient
                url = self.server_base_url or f"http://{self.server_host}:{self.server_port}"
                self.vllm_client = client(base_url=url, connection_timeout=self.server_timeout)

        # TRL's barrier would wait for a rank that has raised.
        with replaced(self.accelerator, "wait_for_everyone", lambda: None):
            on_all_ranks(connect, "vLLM to start", member_of(None))

    @property
    def _sequence_module(self) -> ModuleType:
        """TRL's, which has imported the client."""
        return sys.modules[type(self).__mro__[2].__module__]

    def generate(self, prompts, images, num_generations, profiler=None) -> tuple:
        if self.sequence_groups is None:
            return super().generate(prompts, images, num_generations, profiler)
        ask = functools.partial(super().generate, profiler=profiler)
        member = self.sequence_groups.member
        if self.mode == "server":
            call = functools.partial(self._sequence_ask, ask, prompts, images, num_generations)
            return once(call, "completions from the vLLM server", self.sequence_groups)
        share = -(-len(prompts) // member[1])
        mine = range(member[0] * share, (member[0] + 1) * share)
        if self.tensor_parallel_size == 1:
            mine = [i for i in mine if i < len(prompts)]
        else:  # TRL expects equally many prompts on the ranks of an engine
            mine = [min(i, len(prompts) - 1) for i in mine]
        if not mine and self.enable_sleep_mode:  # waking up may gather weights on all ranks
            mine = [len(prompts) - 1]
        call = functools.partial(
            ask,
            [prompts[i] for i in mine],
            None if images is None else [images[i] for i in mine],
            num_generations,
        )
        call = call if mine else lambda: ([], [], [], [])
        with replaced(self, "sequence_asks", True):
            parts = on_all_ranks(call, "completions from vLLM", member)
        return tuple(
            None if None in column else list(itertools.chain(*column))[: len(prompts)]
            for column in zip(*parts, strict=True)
        )

    def _sequence_ask(self, ask: Callable, prompts, images, num_generations: int) -> tuple:
        """The completions of the group's prompts, from the server: as one process asks for them."""
        module = self._sequence_module
        repeats = len(prompts) % num_generations == 0 and all(
            ids == prompts[i - i % num_generations] for i, ids in enumerate(prompts)
        )
        alone = SimpleNamespace(is_main_process=True, process_index=0)
        with contextlib.ExitStack() as stack:
            stack.enter_context(replaced(self, "accelerator", alone))
            stack.enter_context(replaced(module, "gather_object", list))
            stack.enter_context(replaced(module, "broadcast_object_list", lambda *_, **__: None))
            # Only the request is left to a thread, which may outlive this call.
            request = functools.partial(
                _within, _WAIT * self.sequence_timeout, self.vllm_client.generate
            )
            stack.enter_context(replaced(self.vllm_client, "generate", request))
            answer = ask(prompts, images, num_generations if repeats else 1)
        _, completions, log_probs, _ = answer
        lengths = [len(ids) for ids in completions]
        if len(lengths) != len(prompts):
            raise RuntimeError(f"{len(lengths)} completions of {len(prompts)} prompts")
        if log_probs is not None and [len(x) for x in log_probs] != lengths:
            counts = [len(x) for x in log_probs]
            raise RuntimeError(f"{counts} log-probabilities of completions of {lengths} tokens")
        return answer

    # ---- weights

    def sync_weights(self) -> None:
        if self.sequence_groups is None or self.sequence_asks:
            super().sync_weights()
            return
        self.sequence_weights = None
        send_weights(
            super().sync_weights, lambda: self.sequence_weights or self._iter_named_params()
        )

    def _iter_named_params(self) -> Iterator:
        self.sequence_weights = super()._iter_named_params()
        return self.sequence_weights


def send_weights(send: Callable, rest: Callable[[], Iterator]) -> None:
    """Calls ``send`` on all ranks, and raises on all if it raises on one.

    Args:
        send: gathers weights on every rank, in an order.
        rest: returns the weights that a rank that has raised must gather yet, as the others do.
    """

    def call() -> None:
        try:
            send()
        except Exception:
            for _ in rest():
                pass
            raise

    on_all_ranks(call, "vLLM to take the weights", member_of(None))


def on_all_ranks(call: Callable, what: str, member: Member) -> list[Any]:
    """The results of ``call``, which has no collectives, by rank. Raises on all ranks if it raises
    on one."""
    result, error = None, None
    try:
        result = call()
    except Exception as raised:
        error = raised
    outcome = (result, None if error is None else f"{type(error).__name__}: {error}")
    outcomes = objects_on_all_ranks(outcome, member, device_of(member))
    for rank, (_, text) in enumerate(outcomes):
        if text is not None:
            raise RuntimeError(f"expected {what}, but rank {rank} got {text}") from error
    return [result for result, _ in outcomes]


def once(call: Callable, what: str, groups: Groups) -> Any:
    """The result of ``call``, or its error, which the first rank of a group gets for all."""
    call = call if groups.member[0] == 0 else lambda: None
    return on_all_ranks(call, what, groups.member)[0]


def _within(seconds: float, call: Callable, *args: Any, **kwargs: Any) -> Any:
    """The result of ``call``. Raises if it takes longer; then a thread still waits for it."""
    outcome = {}

    def run() -> None:
        try:
            outcome["result"] = call(*args, **kwargs)
        except Exception as error:
            outcome["error"] = error

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if "error" in outcome:
        raise outcome["error"]
    if "result" not in outcome:
        raise TimeoutError(
            f"no answer within {seconds:g} s, {_WAIT:g} of ddp_timeout; set a longer ddp_timeout "
            "in the trainer's arguments, or ask for shorter completions"
        )
    return outcome["result"]


# ---- tools


def check_tools(tools: list[Callable]) -> None:
    """Raises for tools whose results can't be shared."""
    if names := [tool.__name__ for tool in tools if inspect.iscoroutinefunction(tool)]:
        raise ValueError(
            "expected tools that are plain functions, since a group's ranks share their results "
            f"in the order of their calls, got the coroutine functions {names}; make each a "
            "function that calls asyncio.run"
        )


@contextlib.contextmanager
def tools_once(trainer: Trainer, member: Member) -> Iterator[None]:
    """In this context, a trainer's tools run on the first rank of a group only, which shares their
    results and errors."""

    def on_first_rank(tool: Callable) -> Callable:
        @functools.wraps(tool)
        def call(*args, **kwargs):
            result, error = None, None
            if member[0] == 0:
                try:
                    result = tool(*args, **kwargs)
                    # TRL's own conversion: other ranks couldn't unpickle every object.
                    result = result if isinstance(result, list) else str(result)
                    pickle.dumps(result)
                except Exception as raised:
                    error = str(raised)
            device = device_of(member)
            result, error = objects_on_all_ranks((result, error), member, device)[0]
            if error is not None:
                raise RuntimeError(error)  # TRL tells the model its text
            return result

        return call

    with contextlib.ExitStack() as stack:
        for name in ("_sync_tool_dicts", "_tool_dict"):
            if (tools := getattr(trainer, name, None)) is not None:
                each = tools if isinstance(tools, list) else [tools]
                shared = [{n: on_first_rank(tool) for n, tool in named.items()} for named in each]
                shared = shared if isinstance(tools, list) else shared[0]
                stack.enter_context(replaced(trainer, name, shared))
        yield
