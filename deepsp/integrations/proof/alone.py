"""A context in which this process is the only rank of a group, for a run on a full batch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from deepsp.ranks.groups import Group, Member, in_place_of, member_of
from deepsp.sequence.attention.layer import SequenceParallelAttention
from deepsp.sequence.attention.module import DistributedAttention
from deepsp.sequence.experts.module import DistributedExperts
from deepsp.sequence.recurrence.module import DistributedRecurrence

_KINDS = (DistributedAttention, DistributedRecurrence, SequenceParallelAttention)
"""Modules that keep their place in the group."""


@contextlib.contextmanager
def alone(group: Group | Member) -> Iterator[None]:
    """In this context ``group`` is a group of this process, for deepsp's functions and modules. So
    each rank runs on a full batch, by itself. Weights and experts that are sharded over the group
    still are. Compiled code runs as it was written."""
    member, rank = member_of(group), dist.get_rank()
    alone_group = dist.new_group([rank], use_local_synchronization=True, group_desc="deepsp alone")
    single = member_of(alone_group)
    changed: set[torch.nn.Module] = set()

    def enter(module: torch.nn.Module, args: tuple) -> None:
        if isinstance(module, _KINDS) and module.member in (member, single):
            changed.add(module)  # or made in this context
            module.member = single
        if isinstance(module, DistributedExperts):
            together.enter_context(in_place_of(member, member))

    def leave(module: torch.nn.Module, args: tuple, output: object) -> None:
        if isinstance(module, DistributedExperts):
            together.close()

    together = contextlib.ExitStack()
    handles = [
        register_module_forward_pre_hook(enter),
        register_module_forward_hook(leave, always_call=True),
    ]
    try:
        with in_place_of(member, single), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for handle in handles:
            handle.remove()
        for module in changed:
            module.member = member
        dist.destroy_process_group(alone_group)
