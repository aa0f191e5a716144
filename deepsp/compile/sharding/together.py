"""Ranks agree that compilation succeeded on all of them, with the same weights and batch, before
any rank runs the compiled graph.

A rank that refuses a graph, or whose compiler fails, would leave the others waiting. The ranks post
their results in the group's store, since compilers may take longer than the group's timeout: they
wait for a slow rank as long as its process shows that it is alive.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch._dynamo.exc import RestartAnalysis
from torch.distributed.distributed_c10d import _get_process_group_store, _resolve_process_group

from deepsp.ranks.agreement import Difference, digests
from deepsp.ranks.groups import Member
from deepsp.weights.replicated import SEED

_BEAT = 1.0  # seconds
_SILENT = 120.0  # seconds without a sign of life after which a rank counts as dead

# By group, the number of compilations so far: part of the keys in the store.
_compilations: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)


def together(
    work: Callable[[], Any], alike: Callable[[], Iterable[tuple[str, torch.Tensor]]], member: Member
) -> Any:
    """``work()``, if it succeeds on every rank of a group. ``alike`` is called then: its names and
    tensors must be the same on all ranks.

    Raises:
        ValueError: ranks have different values of a tensor.
        Exception: what ``work`` raised here.
        RuntimeError: another rank failed, or gives no sign of life.
    """
    rank, size, name = member
    group = _resolve_process_group(name)
    if size == 1 or dist.get_backend(group) == "fake":
        return work()
    store = dist.PrefixStore(
        f"deepsp/compile/{name}/{next(_compilations[name])}", _get_process_group_store(group)
    )
    with _alive(store, rank):
        try:
            result = work()
            local = digests(alike())
        except RestartAnalysis:  # Dynamo restarts, on every rank
            raise
        except BaseException as error:
            store.set(f"result/{rank}", json.dumps(f"{type(error).__name__}: {error}"))
            raise
    store.set(f"result/{rank}", json.dumps(local))
    for other, hashes in _wait(store, rank, size).items():
        names = [name for name in local if hashes.get(name) != local[name]]
        if names:
            difference = Difference(names[0], min(rank, other), max(rank, other), (0, 0))
            raise difference.error(
                difference.name,
                f"{SEED}, and give every rank of a sequence group the same full batch (a sampler "
                "that distributes over data-parallel ranks alone)",
            )
    return result


@contextlib.contextmanager
def _alive(store: dist.Store, rank: int):
    """Posts signs of life while this rank works."""
    done = threading.Event()

    def beat():
        for count in itertools.count():
            store.set(f"alive/{rank}", str(count))
            if done.wait(_BEAT):
                return

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _wait(store: dist.Store, rank: int, size: int) -> dict[int, dict[str, int]]:
    """Waits for the other ranks' digests; raises if one of them failed."""
    everyone: dict[int, dict[str, int]] = {}
    seen: dict[int, tuple[bytes, float]] = {}
    pause = 0.005
    waiting = [r for r in range(size) if r != rank]
    while waiting:
        for other in list(waiting):
            if store.check([f"result/{other}"]):
                result = json.loads(store.get(f"result/{other}"))
                if isinstance(result, str):
                    raise RuntimeError(
                        f"rank {other} of the group couldn't compile this graph, so no rank runs "
                        f"it: {result}"
                    )
                everyone[other] = result
                waiting.remove(other)
                continue
            beat = store.get(f"alive/{other}") if store.check([f"alive/{other}"]) else b""
            now = time.monotonic()
            if other not in seen or seen[other][0] != beat:
                seen[other] = beat, now
            elif now - seen[other][1] > _SILENT:
                raise RuntimeError(
                    f"rank {other} of the group is not compiling and has not responded for "
                    f"{_SILENT:.0f} s; every rank must call the compiled model"
                )
        time.sleep(pause)
        pause = min(2 * pause, 0.2)
    return dict(sorted(everyone.items()))
