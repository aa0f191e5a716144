"""Parameter gradients over a group: their sums, and their norm."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from deepsp.ranks.groups import Group, Member, is_dtensor, member_of, ranks_of
from deepsp.sequence.experts.module import DEALT
from deepsp.weights.drift import is_averaged
from deepsp.weights.partitioned import is_partitioned
from deepsp.weights.replicated import compare_once, ranks_in, replicated_tensors
from deepsp.weights.rows import all_shards, shards_of
from deepsp.weights.shard_gradient import is_built, plain, shard_member

Parameters = nn.Module | Iterable[Tensor] | Tensor
"""A module, or parameters as ``torch.nn.utils.clip_grad_norm_`` takes them."""


def sync_gradients(module: Parameters, group: Group = None) -> None:
    """Sums every parameter's ``.grad`` over ``group``: the full gradient, on every rank.

    For training without DDP, FSDP or DeepSpeed, which do this themselves. All-reduces flat buckets.
    A parameter without a gradient on some ranks counts as zero there; one without a gradient on any
    rank keeps none. Parameters of :func:`deepsp.shard_parameters` are skipped, since their
    gradients are sums already. For DTensors, the local tensors are summed: FSDP over the data ranks
    alone doesn't sum over the sequence group.

    The first call with a parameter compares parameters and persistent buffers across the group, by
    a digest (one pass over memory).

    Args:
        module: a module, or parameters: ``model.parameters()``.
        group: the ranks whose gradients are partial.

    Raises:
        ValueError: a gradient is sparse; a schedule built the module; DDP averages gradients over
            ranks of ``group``, or the loss had ``average_gradients=True``; FSDP shards parameters,
            or averages their gradients, over ranks of ``group``; DeepSpeed's ZeRO 3 has
            partitioned them; the ranks have different weights, as after different seeds.

    Without this call weights drift apart, and the loss raises on a step after an update.
    """
    rank, size, name = member = member_of(group)
    named, sharded = _named(module)
    if any(is_built(p) for _, p in named) or (
        isinstance(module, nn.Module)
        and any(shards_of(m) and not hasattr(m, DEALT) for m in module.modules())
    ):
        raise ValueError(
            "module was built by a schedule, so the gradients of its parameters are full already; "
            "don't call sync_gradients"
        )
    if size == 1:
        return
    _check_no_ddp(module, name)
    _check_experts(module, name)
    replicated = [(n, p) for n, p in named if p not in sharded]
    for n, p in replicated:
        if p.requires_grad and is_dtensor(p) and ranks_in(p, name) > 1:
            raise ValueError(
                f"module: {n} is a DTensor over ranks of this group, whose gradient is averaged "
                "already; don't call sync_gradients, and pass average_gradients=True to "
                "deepsp.cross_entropy"
            )
    trained = [(n, p) for n, p in replicated if p.requires_grad]
    of_module = isinstance(module, nn.Module)
    compare_once(replicated_tensors(module, sharded) if of_module else trained, member)
    if not trained:
        return
    sparse = size + 1  # larger than any sum of ones
    present = torch.tensor(
        [
            0 if p.grad is None else 1 if p.grad.layout == torch.strided else sparse
            for _, p in trained
        ]
        + [any(is_averaged(p, name) for _, p in trained)],
        dtype=torch.int64,
        device=trained[0][1].device,
    )
    somewhere = torch.ops.deepsp.all_reduce(present, "replicated", rank, size, name).tolist()
    if somewhere.pop():
        raise ValueError(
            "module: the loss was called with average_gradients=True, for wrappers that average "
            "gradients themselves (DDP, FSDP, DeepSpeed), so their sum would be too large; leave "
            "that out, or, with such a wrapper, don't call sync_gradients"
        )
    for (n, _), ranks in zip(trained, somewhere, strict=True):
        if ranks >= sparse:  # on every rank
            raise ValueError(
                f"module: expected dense gradients, but the gradient of {n} is sparse; make the "
                "embedding with sparse=False"
            )
    gradients = []
    for (_, p), ranks in zip(trained, somewhere, strict=True):
        if ranks > 0:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            gradients.append(p.grad)
    with torch.no_grad():
        gradients = [g.to_local() if is_dtensor(g) else g for g in gradients]
        if gradients:
            torch.ops.deepsp._sum_gradients_(gradients, rank, size, name)


def _check_experts(module: Parameters, group: str) -> None:
    for n, m in module.named_modules() if isinstance(module, nn.Module) else ():
        if dealt := getattr(m, DEALT, None):
            have = ranks_of(dealt.experts.member[2])
            if not set(ranks_of(group)) <= set(have):
                raise ValueError(
                    f"module: the experts of {n or 'the module'} are sharded over ranks {have}, "
                    f"and this group has more, {ranks_of(group)}, whose experts would not be "
                    "summed; call sync_gradients with the group of shard_experts, and average over "
                    "data ranks by DistributedDataParallel(model, process_group=data_group)"
                )


def _check_no_ddp(module: Parameters, group: str) -> None:
    ranks = set(ranks_of(group))
    for n, m in module.named_modules() if isinstance(module, nn.Module) else ():
        if isinstance(m, nn.parallel.DistributedDataParallel) and m.require_forward_param_sync:
            common = ranks & set(ranks_of(m.process_group.group_name))
            if len(common) > 1:
                raise ValueError(
                    f"module: {n or 'the module'} is a DistributedDataParallel over ranks of this "
                    "group, so gradients are averaged already; don't call sync_gradients, and pass "
                    "average_gradients=True to the loss (or give DDP the group of the data ranks)"
                )


def _named(module: Parameters) -> tuple[list[tuple[str, Tensor]], dict[Tensor, Member]]:
    """Parameters with their names, each once; and the sharded ones with the group over which they
    are sharded."""
    if isinstance(module, nn.Module):
        by_key = dict(module.named_parameters(remove_duplicate=False))
        sharded = {by_key[k]: shard.member for k, _, shard in all_shards(module) if k in by_key}
        return _not_partitioned(list(module.named_parameters())), sharded
    parameters = [module] if isinstance(module, Tensor) else list(module)
    for n, p in enumerate(parameters):
        if not isinstance(p, Tensor):
            raise ValueError(
                "expected module to be a module or its parameters, such as model.parameters(), got "
                f"{type(p).__name__} as item {n}"
            )
    parameters = dict.fromkeys(parameters)
    named = _not_partitioned(
        [(f"parameter {n} of shape {list(p.shape)}", p) for n, p in enumerate(parameters)]
    )
    members = {p: shard_member(p) for p in parameters}
    return named, {p: member for p, member in members.items() if member is not None}


def _not_partitioned(named: list[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    for n, p in named:
        if is_partitioned(p):
            raise ValueError(
                f"module: expected parameters with gradients of their own, but DeepSpeed's ZeRO 3 "
                f"has partitioned {n}, and its engine averages and clips gradients; pass "
                "average_gradients=True to the loss, and set gradient_clipping in its config"
            )
    return named


def clip_grad_norm_(module: Parameters, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """``torch.nn.utils.clip_grad_norm_`` for parameters that :func:`deepsp.shard_parameters` or a
    schedule sharded: the norm is that of the full gradient, the same on every rank.

    Parameters that aren't sharded count once: every rank must have the same gradient of them
    (:func:`deepsp.sync_gradients`). DTensors count as the full tensors.

    Args:
        module: a module, or parameters: ``model.parameters()``.
        max_norm: the largest norm, as in ``torch.nn.utils.clip_grad_norm_``.
        norm_type: the order of the norm; may be ``inf``.

    Returns:
        The norm before clipping, a scalar tensor.

    Raises:
        ValueError: a gradient is sparse, or DeepSpeed's ZeRO 3 has partitioned the parameters.
    """
    named, sharded = _named(module)
    local: dict[Member, list[Tensor]] = {}
    replicated: dict[DeviceMesh | None, list[Tensor]] = {}  # by the mesh of DTensors
    for name, parameter in named:
        gradient = parameter.grad
        if gradient is not None and gradient.layout != torch.strided:
            raise ValueError(
                f"module: expected dense gradients, but the gradient of {name} is sparse; make the "
                "embedding with sparse=False"
            )
        if parameter in sharded:
            # Add the group also without a gradient, so that every rank makes the same calls.
            of_group = local.setdefault(sharded[parameter], [])
            if gradient is not None and parameter.numel() > 0:
                of_group.append(plain(gradient))
        elif gradient is not None:
            mesh = gradient.device_mesh if is_dtensor(gradient) else None
            replicated.setdefault(mesh, []).append(gradient)
    norms = []
    for mesh, some in replicated.items():
        norm = torch.nn.utils.get_total_norm(some, norm_type)
        norms.append(norm if mesh is None else norm.full_tensor())
    for (rank, size, name), gradients in local.items():
        norm = torch.nn.utils.get_total_norm(gradients, norm_type)
        device = next(iter(sharded)).device
        # The same dtype on every rank.
        norm = norm.to(device, torch.float64).reshape(1)
        norms.append(torch.ops.deepsp.all_gather(norm, 0, [1] * size, "replicated", rank, name))
    dtypes = [p.dtype for _, p in named] or [torch.float32]
    dtype = functools.reduce(torch.promote_types, dtypes)
    every = [x.reshape(-1).double() for x in norms] or [torch.zeros(1)]
    total = torch.linalg.vector_norm(torch.cat(every), norm_type).to(dtype)
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    if math.isfinite(max_norm):
        for _, parameter in named:
            if (gradient := parameter.grad) is not None:
                gradient.mul_(factor.to(gradient.device, gradient.dtype))
    return total
