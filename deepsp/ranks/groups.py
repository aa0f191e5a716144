"""Process groups as ops take them: rank, size and name."""

from __future__ import annotations

import contextlib
import ctypes
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

Group = dist.ProcessGroup | DeviceMesh | None
"""The groups that public functions take: a group, a mesh, or None for the default group. A mesh of
two dimensions stands for the group of all its ranks; the ranks of a row (the last dimension) divide
the heads, and the rows split queries."""


Member = tuple[int, int, str]
"""This process's place in a group: rank, size and the group's name. Not a named tuple: Dynamo of
torch 2.11 can't unpack a constant one."""


Function = TypeVar("Function", bound=Callable)


def constant(function: Function) -> Function:
    """``torch.compiler.assume_constant_result``, but without importing Dynamo."""
    function._dynamo_marked_constant = True
    return function


@constant
def member_of(group: Group | Member) -> Member:
    """This process's place in ``group``.

    Raises:
        ValueError: there is no default group yet, the mesh has more than two dimensions, or this
            process isn't in the group.
    """
    if isinstance(group, tuple):
        return _replaced.get(group[2], group)
    if isinstance(group, DeviceMesh):
        if group.ndim > 2:
            raise ValueError(
                f"expected group to be a mesh of 1 or 2 dimensions, got one of {group.ndim} "
                "dimensions; pass one or two of them, mesh['name'] or mesh['outer', 'heads']"
            )
        group = group.get_group() if group.ndim == 1 else _flattened(group)
    if not dist.is_initialized():
        raise ValueError(
            "expected group to exist, but there is no process group yet; call "
            "torch.distributed.init_process_group first"
        )
    if group is None:
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError(_outside())
        raise ValueError(
            "expected group to be a ProcessGroup, a DeviceMesh of one or two dimensions or None, "
            f"got {group!r}"
        )
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError(_outside())
    member = rank, dist.get_world_size(group), group.group_name
    return _replaced.get(member[2], member)


_replaced: dict[str, Member] = {}
"""While a proof runs: by a group's name, the place that stands in for the one in it. Backward runs
in threads of its own, so it is the process's."""


@contextlib.contextmanager
def in_place_of(member: Member, other: Member) -> Iterator[None]:
    """In this context :func:`member_of` returns ``other`` for the group of ``member``."""
    before = _replaced.get(member[2])
    _replaced[member[2]] = other
    try:
        yield
    finally:
        del _replaced[member[2]]
        if before is not None:
            _replaced[member[2]] = before


def ranks_of(name: str) -> list[int]:
    """The global ranks of the group with this name."""
    group = dist.distributed_c10d._resolve_process_group(name)
    return dist.get_process_group_ranks(group)


def is_dtensor(tensor: Any) -> bool:
    """Whether ``tensor`` is a DTensor. Importing the class takes a second, and until it is imported
    there are no DTensors."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _flattened(mesh: DeviceMesh) -> dist.ProcessGroup:
    """One group of all ranks of a mesh. All processes make it, once."""
    ranks = mesh.mesh.flatten().tolist()
    if ranks != sorted(ranks):
        raise ValueError(
            "expected the ranks of a mesh of two dimensions to ascend, row by row, got "
            f"{mesh.mesh.tolist()}; order them so, since a group does"
        )
    if len(ranks) == dist.get_world_size():
        return dist.group.WORLD
    if not mesh.mesh_dim_names:
        raise ValueError(
            "expected the dimensions of the mesh to have names, got none; pass mesh_dim_names to "
            "init_device_mesh"
        )
    return mesh._flatten().get_group()


def _outside() -> str:
    return (
        f"expected group to include this process (rank {dist.get_rank()}), which isn't in it; call "
        "this on the ranks of the group only"
    )


def objects_on_all_ranks(value: Any, group: Group | Member, device: torch.device) -> list[Any]:
    """Every rank's value, by rank: anything that can be pickled. Sent by deepsp's ops: with c10d's
    ``all_gather_object``, gloo's threads may still hold tensors when the process exits, which kills
    it."""
    rank, _, name = member_of(group)
    local = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(device)
    sizes = [n for (n,) in on_all_ranks([len(local)], group, device)]
    everything = torch.ops.deepsp.all_gather(local, 0, sizes, "replicated", rank, name)
    parts = (x.contiguous() for x in everything.cpu().split(sizes))
    return [pickle.loads(ctypes.string_at(x.data_ptr(), len(x))) for x in parts]


def on_all_ranks(values: Sequence[int], group: Group, device: torch.device) -> list[list[int]]:
    """Every rank's numbers, by rank; equally many on each (one small collective on ``device``)."""
    rank, size, name = member_of(group)
    if size == 1:
        return [[int(value) for value in values]]
    table = torch.zeros(size, len(values), dtype=torch.int64, device=device)
    table[rank] = torch.tensor(values, device=device)
    return torch.ops.deepsp.all_reduce(table, "replicated", rank, size, name).tolist()


def device_of(group: Group = None) -> torch.device:
    """The device on which a group exchanges numbers: the CPU, unless its backend takes only tensors
    of an accelerator."""
    process_group = dist.distributed_c10d._resolve_process_group(member_of(group)[2])
    return torch.device(dist.distributed_c10d._get_object_coll_device(process_group))
