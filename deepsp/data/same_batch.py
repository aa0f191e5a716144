"""Compares the batches of a group's ranks on every step.

:func:`deepsp.shard_batch` computes a digest of the full batch. If the model exchanges numbers after
each batch anyway (attention of transformers' models exchanges lengths once a forward), the digest
is sent with them. Otherwise the ranks compare digests in ``shard_batch``, in one small collective.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from deepsp.ranks.agreement import difference, digests, number_of
from deepsp.ranks.groups import Group, Member, member_of

ADVICE = (
    "put deepsp.SequenceLoader around a loader that gives each process its own samples, as "
    "DistributedSampler, accelerate and Trainer make it, or use DistributedSampler(data, "
    "num_replicas=<number of groups>, rank=<index of this rank's group>), or no sampler if all "
    "processes form one group. Random numbers of samplers, data sets and collators need the same "
    "seed on all ranks of a group"
)
"""Advice for different batches, in a training loop of the user's own."""


@dataclass
class _Batches:
    """The digests that a group's ranks have yet to compare."""

    digests: list[tuple[str, int]] = field(default_factory=list)
    carried: bool = False
    """Whether the model exchanged numbers after the last batch; then it will after the next one."""
    advice: str = ADVICE
    thread: int | None = None
    """The thread in which the model exchanges; None: the main thread, as a guess."""


_of_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, _Batches] = weakref.WeakKeyDictionary()
"""By group. An entry is dropped with its group."""


def _batches(member: Member) -> _Batches:
    group = dist.distributed_c10d._resolve_process_group(member[2])
    return _of_groups.setdefault(group, _Batches())


def compare_batches(
    tensors: Sequence[tuple[str, Tensor]],
    group: Group | Member,
    advice: str = ADVICE,
    may_wait: bool = True,
) -> None:
    """Compares a batch's tensors across the group, now or, if it ``may_wait`` because a model that
    exchanges numbers follows, in the next :func:`compare_carried`.
    Every rank calls it. In a data loader's worker, or another thread than the training's, it does
    nothing, since its collective could meet those of the training.

    Raises:
        ValueError: on every rank, if the batches differ.
    """
    member = member_of(group)
    if member[1] == 1 or torch.utils.data.get_worker_info() is not None:
        return
    batches = _batches(member)
    if threading.get_ident() != (batches.thread or threading.main_thread().ident):
        return
    # Values with gradients may be rounded differently on each rank.
    compared = ((name, x.to("meta") if x.requires_grad else x) for name, x in tensors)
    batches.digests += sorted(digests(compared).items())
    batches.advice = advice
    if may_wait and batches.carried and os.environ.get("DEEPSP_DEBUG") != "1":
        batches.carried = False
        return
    _compare(batches, member)


def carried(member: Member) -> int:
    """The number that this rank sends in an exchange, after which all ranks call
    :func:`compare_carried`."""
    pending = _batches(member).digests
    return number_of(pending) if pending else 0


def compare_carried(numbers: Sequence[int], member: Member) -> None:
    """Compares the numbers that the ranks have sent, by rank.

    Raises:
        ValueError: on every rank, if the batches differ.
    """
    if member[1] == 1:
        return
    batches = _batches(member)
    batches.carried = True
    if torch._C._current_graph_task_id() == -1:  # not a recomputation in backward
        batches.thread = threading.get_ident()
    if any(number != numbers[0] for number in numbers):
        _compare(batches, member)
    batches.digests = []


def _compare(batches: _Batches, member: Member) -> None:
    pending, batches.digests = batches.digests, []
    differs = difference(pending, member)
    if differs is not None:
        raise differs.error(f"{differs.name}, a full tensor,", batches.advice)
