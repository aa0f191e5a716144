"""Real process groups for tests: spawned once per group size, reused by every test.

``on_ranks(P, function, *args)`` calls ``function(*args)`` on each of P ranks of a gloo group, one
thread each. ``function`` is a module-level function; what it asserts is asserted on every rank. The
results come back as a list, by rank.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import functools
import gc
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

GROUP_TIMEOUT = 60.0
CALL_TIMEOUT = 240.0


# What processes that are kept apart under these words find in their environment, by rank.
ENVIRONMENTS = {
    "messages": lambda rank: {"DEEPSP_TRANSPORT": "messages"},
    "mapped": lambda rank: {"DEEPSP_TRANSPORT": "mapped"},
    # Collectives, as for CUDA tensors.
    "collectives": lambda rank: {"DEEPSP_TEST_COLLECTIVES": "1"},
    # Ranks 0 and 1 on one machine, 2 and 3 on another.
    "machines": lambda rank: {"DEEPSP_TRANSPORT": "auto", "DEEPSP_TEST_MACHINE": str(rank // 2)},
}


def _serve(rank: int, size: int, path: str, timeout: float, pipe, environment: dict) -> None:
    os.environ.update(environment)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    # Compilers make millions of objects that stay; walking them all took 6 % of the time.
    gc.set_threshold(100_000, 50, 100)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{path}",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=timeout),
    )
    linear = torch.nn.functional.linear
    while True:
        task = pipe.recv()
        if task is None:
            break
        function, args = task
        try:
            answer = (True, function(*args))
        except BaseException:
            answer = (False, traceback.format_exc())
        torch.nn.functional.linear = linear  # DeepSpeed's ZeRO 3 replaces it for good
        pipe.send(answer)
    # Gloo's threads may hold Python tensors for a moment longer; exiting then kills the process.
    dist.barrier()
    dist.destroy_process_group()


@functools.cache
def _server() -> multiprocessing.context.BaseContext:
    """Forks processes that have imported what takes seconds. The one that they are forked from does
    nothing else, so that no thread is lost."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["deepsp", "torch._inductor.compile_fx"])
    return context


class Workers:
    """A group of processes that wait for something to do."""

    def __init__(self, size: int, timeout: float = GROUP_TIMEOUT, apart: str = ""):
        self.size = size
        server = _server()
        self.folder = tempfile.TemporaryDirectory()
        path = os.path.join(self.folder.name, "store")
        self.pipes, self.processes = [], []
        for rank in range(size):
            mine, theirs = server.Pipe()
            environment = ENVIRONMENTS[apart](rank) if apart in ENVIRONMENTS else {}
            process = server.Process(
                target=_serve, args=(rank, size, path, timeout, theirs, environment), daemon=True
            )
            process.start()
            theirs.close()
            self.pipes.append(mine)
            self.processes.append(process)

    def call(self, function: Callable, *args) -> list[tuple[bool, Any]]:
        """What each rank answers: (True, result), or (False, why not)."""
        for pipe in self.pipes:
            pipe.send((function, args))
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + CALL_TIMEOUT
        while len(answers) < self.size and time.monotonic() < deadline:
            for rank, pipe in enumerate(self.pipes):
                if rank in answers or not pipe.poll(0.002):
                    continue
                try:
                    answers[rank] = pipe.recv()
                except (EOFError, ConnectionResetError):
                    answers[rank] = (False, "the process died")
                if not answers[rank][0]:
                    # The others may wait for this one: not for much longer.
                    deadline = min(deadline, time.monotonic() + 10)
        return [answers.get(rank, (False, "no answer in time")) for rank in range(self.size)]

    def stop(self) -> None:
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        deadline = time.monotonic() + 5
        for process in self.processes:
            process.join(timeout=max(0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        self.folder.cleanup()


def error_of(traceback_: str) -> str:
    """The first line of the error at a traceback's end."""
    lines = [line for line in traceback_.splitlines() if line and not line.startswith(" ")]
    at = next((i for i, line in enumerate(lines) if line.startswith("Traceback")), -1)
    return next((line for line in lines[at + 1 :] if ":" in line or "Error" in line), lines[-1])


_workers: dict[tuple[int, str], Workers] = {}  # those used last are the last
# That wait for something to do: each holds some 300 MiB.
MOST_PROCESSES = 12 if "PYTEST_XDIST_WORKER" in os.environ else 24


def on_ranks(size: int, function: Callable, *args, apart: str = "") -> list[Any]:
    """Calls ``function(*args)`` on every rank of a group of ``size``; AssertionError if any of
    them fails, with the tracebacks of those that do. ``apart``: on processes that only calls with
    the same word share, for what changes a process for good, or needs one of
    ENVIRONMENTS."""
    key = size, apart
    workers = _workers.pop(key, None)
    while _workers and size + sum(idle.size for idle in _workers.values()) > MOST_PROCESSES:
        _workers.pop(next(iter(_workers))).stop()
    _workers[key] = workers or Workers(size, apart=apart)
    answers = _workers[key].call(function, *args)
    if not all(fine for fine, _ in answers):
        _workers.pop(key).stop()  # nobody knows what state it is in
        failures = [(rank, what) for rank, (fine, what) in enumerate(answers) if not fine]
        # pytest's summary has room for one line: what each rank's error says.
        short = "; ".join(f"rank {r} of {size}: {error_of(what)}" for r, what in failures)
        raise AssertionError("\n".join([short, *(f"rank {r}: {what}" for r, what in failures)]))
    return [result for _, result in answers]


def stop(apart: str) -> None:
    """Ends the processes that were kept ``apart``."""
    for key in [key for key in _workers if key[1] == apart]:
        _workers.pop(key).stop()


@atexit.register
def stop_all() -> None:
    while _workers:
        _workers.popitem()[1].stop()
