"""Compares weights that are replicated over a group, once."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.nn.modules.batchnorm import _NormBase

from deepsp.ranks.agreement import first_difference
from deepsp.ranks.groups import Member, is_dtensor
from deepsp.weights.rows import shards_of

SEED = (
    "call torch.manual_seed with the same seed on all ranks before you make the model, or load the "
    "same state_dict on all ranks"
)
"""Advice for different weights."""

_COMPARED = "_deepsp_compared"  # an attribute of parameters: names of groups


def replicated_tensors(
    module: nn.Module | Mapping[str, nn.Module], sharded: Container[Tensor] = ()
) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors that are replicated over a group: a module's parameters and persistent
    buffers, except for those that are ``sharded`` or that a schedule shards. Leaves out running
    statistics of batch norms, which depend on each rank's data, and non-persistent buffers, which
    may, too. A mapping has all modules by name."""
    seen = set()
    modules = module.items() if isinstance(module, Mapping) else module.named_modules()
    for prefix, inner in modules:
        statistics = isinstance(inner, _NormBase)
        shards = shards_of(inner)
        tensors = [*inner._parameters.items()]
        tensors += [
            (name, buffer)
            for name, buffer in inner._buffers.items()
            if name not in inner._non_persistent_buffers_set and not statistics
        ]
        for name, tensor in tensors:
            if tensor is None or name in shards or id(tensor) in seen:
                continue
            seen.add(id(tensor))
            if tensor not in sharded:
                yield f"{prefix}.{name}".removeprefix("."), tensor


def compare(tensors: Iterable[tuple[str, Tensor]], member: Member) -> None:
    """Compares tensors over the group. All ranks call it: one small collective, and one pass over
    the tensors.

    Raises:
        ValueError: on every rank, if they differ.
    """
    if member[1] == 1:
        return
    differs = first_difference([_local(n, t, member[2]) for n, t in tensors], member)
    if differs is not None:
        raise differs.error(differs.name, SEED)


def compare_once(tensors: Iterable[tuple[str, Tensor]], member: Member) -> None:
    """:func:`compare` on the first call with these parameters and this group."""
    tensors, group = list(tensors), member[2]
    parameters = [t for _, t in tensors if isinstance(t, nn.Parameter)]
    if all(group in getattr(p, _COMPARED, ()) for p in parameters):
        return
    compare(tensors, member)
    for parameter in parameters:
        setattr(parameter, _COMPARED, {*getattr(parameter, _COMPARED, ()), group})


def _local(name: str, tensor: Tensor, group: str) -> tuple[str, Tensor]:
    """The properties that all ranks must agree on. For a DTensor: its mesh and placements, and its
    local part if no other rank of the group is on its mesh."""
    if not is_dtensor(tensor):
        return name, tensor.detach()
    text = f"{name} {tensor.placements}"
    if ranks_in(tensor, group) > 1:
        return text, torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return f"{text} at {tensor.device_mesh.get_coordinate()}", tensor.detach().to_local()


def ranks_in(parameter: Tensor, name: str) -> int:
    """The number of ranks of the group ``name`` on the mesh of a DTensor parameter."""
    group = distributed_c10d._resolve_process_group(name)
    mesh = parameter.device_mesh.mesh.flatten().tolist()
    return len(set(mesh) & set(distributed_c10d.get_process_group_ranks(group)))
