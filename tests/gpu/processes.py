"""Runs tests on processes that are a group's ranks. A failure hides no other test: one rank goes on
as long as its device answers, and what several ranks have left runs on new ones."""

from __future__ import annotations

import datetime
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


class Run(NamedTuple):
    backend: str
    size: int
    sends_to_itself: bool
    transport: str

    def __str__(self) -> str:
        itself = ", collectives" * self.sends_to_itself
        return f"{self.backend} x {self.size}{itself}" + ", mapped" * (self.transport == "mapped")


class Answer(NamedTuple):
    rank: int
    name: str
    seconds: float
    error: str | None
    lines: list[str] | None
    goes_on: bool


def _device_answers() -> bool:
    try:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except Exception:
        return False
    return True


def environment_of(rank: int, run: Run, devices: int) -> dict[str, str]:
    """Returns what a rank's environment needs before its group is made."""
    own = {
        "DEEPSP_TEST_COLLECTIVES": str(int(run.sends_to_itself)),
        "DEEPSP_TRANSPORT": run.transport,
    }
    if run.backend == "nccl" and run.size > devices:
        # NCCL refuses two ranks on one GPU of one host, so each rank says that it is on another.
        # They then really exchange, by NCCL's sockets. Times say nothing about links.
        own |= {"NCCL_HOSTID": f"host{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
        own |= {
            f"TORCH_SYMM_MEM_{name}": "1"
            for name in ("ALLOW_OVERLAPPING_DEVICES", "DISABLE_MULTICAST")
        }
    return own


def _join(rank: int, run: Run, path: str) -> None:
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    os.environ.update(environment_of(rank, run, devices))
    if devices > 0:
        torch.cuda.set_device(rank if run.backend == "nccl" and run.size <= devices else 0)
    dist.init_process_group(
        run.backend,
        init_method=f"file://{path}",
        rank=rank,
        world_size=run.size,
        timeout=datetime.timedelta(seconds=90),
    )
    dist.barrier()  # or a rank that fails at once would leave before the others have connected


def _work(rank: int, run: Run, tests, path: str, pipe) -> None:
    for test in tests:
        start, error, lines = time.perf_counter(), None, None
        try:
            if not dist.is_initialized():
                _join(rank, run, path)
            lines = test()
        except Exception:
            error = traceback.format_exc()
        goes_on = error is None or (run.size == 1 and dist.is_initialized() and _device_answers())
        seconds = time.perf_counter() - start
        pipe.send(Answer(rank, test.__name__, seconds, error, lines, goes_on))
        if not goes_on:
            break
    else:
        dist.barrier()
        dist.destroy_process_group()
    os._exit(0)  # threads of a broken group must not keep the process


class Ranks:
    """Tests of one run, one after another.

    Args:
        report: called with each line of the results.
        deadline: when to give up, by ``time.monotonic()``.
        silence: seconds without an answer after which a test has failed.
        grace: seconds that other ranks have after the first one failed.
    """

    def __init__(
        self,
        run: Run,
        report: Callable[[str], None],
        deadline: float,
        silence: float = 150,
        grace: float = 15,
    ):
        self.run, self.report, self.deadline = run, report, deadline
        self.silence, self.grace = silence, grace
        self.passed = self.failed = 0

    def all(self, tests: Sequence[Callable]) -> None:
        while tests and time.monotonic() < self.deadline:
            tests = tests[self._until_a_failure(tests) :]
        for test in tests:
            self._fail(f"{test.__name__}: no time was left")

    def _fail(self, what: str) -> None:
        self.failed += 1
        self.report(f"FAILED {self.run}, {what}")

    def _take(self, answer: Answer) -> None:
        what = f"rank {answer.rank}: {answer.name} {answer.seconds:.1f} s"
        if answer.error:
            self._fail(what)
        else:
            self.passed += 1
            self.report(f"passed {self.run}, {what}")
        for line in [answer.error] if answer.error else answer.lines or []:
            self.report(f"    {line}")

    def _until_a_failure(self, tests: Sequence[Callable]) -> int:
        """Runs tests on new processes. Returns how many are over, a failed one among them."""
        spawn = mp.get_context("spawn")
        over = [0] * self.run.size
        failed_at = len(tests)
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "store")
            group, pipes = [], {}
            for rank in range(self.run.size):
                mine, theirs = spawn.Pipe(duplex=False)
                arguments = (rank, self.run, tests, path, theirs)
                group.append(spawn.Process(target=_work, args=arguments))
                group[rank].start()
                theirs.close()
                pipes[mine] = rank
            until = time.monotonic() + self.silence
            while pipes and time.monotonic() < min(until, self.deadline):
                for pipe in wait(list(pipes), timeout=0.5):
                    try:
                        answer = pipe.recv()
                    except EOFError:  # it is over, or died
                        rank = pipes.pop(pipe)
                        failed_at = min(failed_at, over[rank])
                    else:
                        self._take(answer)
                        if not answer.goes_on:
                            failed_at = min(failed_at, over[answer.rank])
                        over[answer.rank] += 1
                    left = self.silence if failed_at == len(tests) else self.grace
                    until = time.monotonic() + left
            for process in group:
                process.join(timeout=0 if pipes else 10)
                if process.is_alive():
                    process.kill()
        first = min(over)
        if first < len(tests) and first <= failed_at:
            silent = [rank for rank, done in enumerate(over) if done == first]
            self._fail(f"{tests[first].__name__}: no answer from ranks {silent}")
            return first + 1
        return min(failed_at + 1, len(tests))
