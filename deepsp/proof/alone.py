"""A context in which this process is the only rank of a group, for a run on a full batch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_pre_hook

from deepsp.attention.layer import SequenceParallelAttention
from deepsp.attention.module import DistributedAttention
from deepsp.ranks.groups import Group, Member, in_place_of, member_of
from deepsp.recurrence.module import DistributedRecurrence

_KINDS = (DistributedAttention, DistributedRecurrence, SequenceParallelAttention)
"""Modules that keep their place in the group."""


@contextlib.contextmanager
def alone(group: Group | Member) -> Iterator[None]:
    """In this context ``group`` is a group of this process, for deepsp's functions and modules. So
    each rank runs on a full batch, by itself. Weights that are sharded over the group still are.
    Compiled code runs as it was written."""
    member, rank = member_of(group), dist.get_rank()
    own = dist.new_group([rank], use_local_synchronization=True, group_desc="deepsp alone")
    single = member_of(own)
    before: list[tuple[torch.nn.Module, Member]] = []

    def enter(module: torch.nn.Module, args: tuple) -> None:
        if isinstance(module, _KINDS) and module.member == member:
            before.append((module, module.member))
            module.member = single

    handle = register_module_forward_pre_hook(enter)
    try:
        with in_place_of(member, single), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        handle.remove()
        for module, known in before:
            module.member = known
        dist.destroy_process_group(own)
