"""Parameter gradients over a group: their sums, and their norm."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor

from deepsp.groups import Group, Member, member_of
from deepsp.schedule.shards import shards_of
from deepsp.sharding import sharded_parameters


def sync_gradients(module: nn.Module, group: Group = None) -> None:
    """Makes every parameter's ``.grad`` its sum over ``group``: the full gradient, on every rank.

    For people without DDP, FSDP or DeepSpeed, which do it themselves. All-reduces flat buckets; a
    parameter without a gradient on some ranks only counts as zero there, one without a gradient on
    any rank keeps none. Parameters of :func:`deepsp.shard_parameters` are left alone: their
    gradients are sums already. DTensors' local parts are summed: FSDP over the data ranks alone
    leaves the sum over the sequence group to be taken.

    Raises:
        ValueError: a gradient is sparse; a schedule built the module; FSDP shards parameters,
            or averages their gradients, over ranks of ``group``.
    """
    rank, size, name = member_of(group)
    if any(shards_of(inner) for inner in module.modules()):
        raise ValueError(
            "module: a schedule built it, and so its parameters' gradients are full already; leave "
            "sync_gradients out"
        )
    sharded = {p for _, p, _, _ in sharded_parameters(module)}
    parameters = [p for p in module.parameters() if p.requires_grad and p not in sharded]
    if size == 1 or not parameters:
        return
    names = {id(p): n for n, p in module.named_parameters()}
    for p in parameters:
        if isinstance(p, DTensor) and _ranks_in(p, name) > 1:
            raise ValueError(
                f"module: {names[id(p)]} is sharded or replicated over ranks of this group, and "
                "its gradient averaged by whoever did that; leave sync_gradients out, and pass "
                "average_gradients=True to deepsp.cross_entropy"
            )
    sparse = size + 1  # no sum of ones reaches it
    present = torch.tensor(
        [
            0 if p.grad is None else 1 if p.grad.layout == torch.strided else sparse
            for p in parameters
        ],
        dtype=torch.int64,
        device=parameters[0].device,
    )
    somewhere = torch.ops.deepsp.all_reduce(present, "replicated", rank, size, name).tolist()
    for p, ranks in zip(parameters, somewhere, strict=True):
        if ranks >= sparse:  # known to every rank by now
            raise ValueError(
                f"module: the gradient of {names[id(p)]} is sparse; only dense ones can be summed"
            )
    gradients = []
    for p, ranks in zip(parameters, somewhere, strict=True):
        if ranks > 0:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            gradients.append(p.grad)
    with torch.no_grad():
        gradients = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
        torch.ops.deepsp.sum_gradients_(gradients, rank, size, name)


def _ranks_in(parameter: DTensor, name: str) -> int:
    """How many ranks of the group called ``name`` the parameter lies on."""
    group = distributed_c10d._resolve_process_group(name)
    mesh = parameter.device_mesh.mesh.flatten().tolist()
    return len(set(mesh) & set(distributed_c10d.get_process_group_ranks(group)))


def clip_grad_norm_(module: nn.Module, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """``torch.nn.utils.clip_grad_norm_`` of a module with parameters that
    :func:`deepsp.shard_parameters` or a schedule sharded: the norm is that of the whole gradient,
    the same on every rank.

    Parameters that are not sharded count once: every rank is taken to have the same gradient of
    them (:func:`deepsp.sync_gradients`). DTensors count as the tensors that they are parts of.

    Returns:
        The norm before clipping, a tensor of no dimensions.
    """
    sharded = {p: shards.member for _, p, shards, _ in sharded_parameters(module)}
    for inner in module.modules():
        for name, shard in shards_of(inner).items():
            if isinstance(parameter := getattr(inner, name), nn.Parameter):
                sharded[parameter] = shard.member
    local: dict[Member, list[Tensor]] = {}
    whole = []
    for parameter in module.parameters():
        if parameter in sharded:
            # Also without a gradient: every rank makes the same calls.
            of_group = local.setdefault(sharded[parameter], [])
            if parameter.grad is not None and parameter.numel() > 0:
                of_group.append(parameter.grad)
        elif parameter.grad is not None:
            whole.append(parameter.grad)
    norms = []
    for of_fsdp in (False, True):
        some = [g for g in whole if isinstance(g, DTensor) is of_fsdp]
        if some:
            norm = torch.nn.utils.get_total_norm(some, norm_type)
            norms.append(norm.full_tensor() if of_fsdp else norm)
    for (rank, size, name), gradients in local.items():
        norm = torch.nn.utils.get_total_norm(gradients, norm_type)
        device = next(p.device for p in sharded)
        # One dtype on every rank, whatever shards it has.
        norm = norm.to(device, torch.float64).reshape(1)
        norms.append(torch.ops.deepsp.all_gather(norm, 0, [1] * size, "replicated", rank, name))
    dtype = functools.reduce(torch.promote_types, (p.dtype for p in module.parameters()))
    every = [x.reshape(-1).double() for x in norms] or [torch.zeros(1)]
    total = torch.linalg.vector_norm(torch.cat(every), norm_type).to(dtype)
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    if math.isfinite(max_norm):
        for gradient in gradients:
            gradient.mul_(factor.to(gradient.device, gradient.dtype))
    return total
