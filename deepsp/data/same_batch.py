"""The ranks of a group read the same batch, or it is an error: compared on every step.

:func:`deepsp.shard_batch` computes a digest of the full batch. Where each batch is followed by an
exchange of numbers anyway (attention of transformers' models exchanges lengths once a forward), the
digest travels with that. Elsewhere the ranks compare digests in ``shard_batch``, in one small
collective.
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
"""What to do about different batches in a training loop of the user's own."""


@dataclass
class _Batches:
    """What a group's ranks have yet to compare."""

    digests: list[tuple[str, int]] = field(default_factory=list)
    carried: bool = False
    """Whether an exchange of the model has come after the last batch. The next one's will."""
    advice: str = ADVICE
    thread: int | None = None
    """The thread in which the model exchanges; None: not known, the main thread."""


_of_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, _Batches] = weakref.WeakKeyDictionary()
"""By group. An entry goes with its group."""


def _batches(member: Member) -> _Batches:
    group = dist.distributed_c10d._resolve_process_group(member[2])
    return _of_groups.setdefault(group, _Batches())


def compare_batches(
    tensors: Sequence[tuple[str, Tensor]], group: Group | Member, advice: str = ADVICE
) -> None:
    """Compares a batch's tensors across the group, now or in the next :func:`compare_carried`.
    Every rank calls it. In a data loader's worker, or another thread than the training's, it does
    nothing, since an exchange there would meet those of the training.

    Raises:
        ValueError: on every rank, where one holds another batch than the others.
    """
    member = member_of(group)
    if member[1] == 1 or torch.utils.data.get_worker_info() is not None:
        return
    batches = _batches(member)
    if threading.get_ident() != (batches.thread or threading.main_thread().ident):
        return
    # What is computed with gradients may be rounded otherwise on each rank.
    known = ((name, x.to("meta") if x.requires_grad else x) for name, x in tensors)
    batches.digests += sorted(digests(known).items())
    batches.advice = advice
    if batches.carried and os.environ.get("DEEPSP_DEBUG") != "1":
        batches.carried = False
        return
    _compare(batches, member)


def carried(member: Member) -> int:
    """The number that this rank sends with an exchange after which all ranks call
    :func:`compare_carried`."""
    said = _batches(member).digests
    return number_of(said) if said else 0


def compare_carried(numbers: Sequence[int], member: Member) -> None:
    """Compares what the ranks have sent, by rank.

    Raises:
        ValueError: on every rank, where one holds another batch than the others.
    """
    if member[1] == 1:
        return
    batches = _batches(member)
    batches.carried = True
    if torch._C._current_graph_task_id() == -1:  # no checkpoint that runs again in backward
        batches.thread = threading.get_ident()
    if any(number != numbers[0] for number in numbers):
        _compare(batches, member)
    batches.digests = []


def _compare(batches: _Batches, member: Member) -> None:
    said, batches.digests = batches.digests, []
    found = difference(said, member)
    if found is not None:
        raise found.error(f"{found.name}, a full tensor,", batches.advice)
