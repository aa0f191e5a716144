"""The step that shards parameters and those that follow them."""

from __future__ import annotations

import torch
from torch import nn

from deepsp.schedule.plan import Plan, tensor_of
from deepsp.schedule.registry import Effect, Follow, method_of
from deepsp.weights.rows import ParameterShard, make_shard


def shard(plan: Plan, name: str, names: tuple[str, ...], axis: int, parts, unit) -> None:
    """Records the step for a module: :meth:`deepsp.schedule.Schedule.shard`."""
    if all("." in n for n in names):  # of a child
        child = names[0].rpartition(".")[0]
        if any(n.rpartition(".")[0] != child for n in names):
            raise ValueError(f"expected names of one module's parameters, got {list(names)}")
        (name,) = plan.find(f"{name}.{child}" if name else child)
        names = tuple(n.rpartition(".")[2] for n in names)
    module = plan.module(name)
    where = name or "the model"
    tensors = {n: _tensor(where, module, n) for n in names}
    first = tensors[names[0]]
    if not -first.dim() <= axis < first.dim():
        make_shard(f"{where}.{names[0]}", first.shape, axis, parts, unit, plan.member)  # raises
    if name in plan.steps and set(names) <= plan.of(name).followers:
        for n, tensor in tensors.items():
            _confirm(plan, name, n, tensor, axis, parts, unit)
        return
    method = method_of(name, module)
    axis %= first.dim()
    try:
        effect = method(module, names, axis)
    except ValueError as error:
        why = _together(plan, name, method, names) or error
        raise ValueError(f"{where}: {why}") from None
    if not isinstance(effect, Effect):
        raise ValueError(
            f"{where}: expected the shard method of {type(module).__name__} to return a "
            f"deepsp.schedule.Effect, got {type(effect).__name__}"
        )
    parts = effect.parts if parts == 1 and effect.parts is not None else parts
    unit = effect.unit if unit == 1 and effect.unit is not None else unit
    wanted = {n: Follow(axis, parts, unit) for n in names if n not in effect.also}
    for n, how in effect.also.items():
        if not isinstance(how, Follow):
            how = Follow(how, parts, unit)
        owner, _, child_name = n.rpartition(".")
        if tensor_of(module.get_submodule(owner), child_name) is not None:
            wanted[n] = how
    shards: list[tuple[str, str, ParameterShard]] = []
    for n, how in wanted.items():
        child, _, child_name = n.rpartition(".")
        owner = f"{name}.{child}".strip(".") if child else name
        full = f"{owner}.{child_name}" if owner else child_name
        if child_name in plan.of(owner).shards:
            raise ValueError(f"{full} is sharded already")
        shape = _tensor(owner, plan.module(owner), child_name).shape
        shards.append(
            (owner, child_name, make_shard(full, shape, how.axis, how.parts, how.unit, plan.member))
        )
    steps = plan.of(name)
    merged = effect if steps.effect is None else steps.effect.merged(effect, where)
    attributes = _shrunk(where, module, effect.attributes, shards[0][2])
    steps.effect = merged
    steps.attributes.update(attributes)
    for owner, child_name, shard in shards:
        plan.of(owner).shards[child_name] = shard
        if owner != name or child_name not in names:
            plan.of(owner).followers.add(child_name)


def _together(plan: Plan, name: str, method, names: tuple[str, ...]) -> ValueError | None:
    """Why these parameters can't be sharded after the earlier ones: a better reason than the
    method's own, that they can't be sharded alone."""
    before = plan.of(name).shards if name in plan.steps else {}
    if not before or set(before) & set(names):
        return None
    try:
        method(plan.module(name), (*before, *names), next(iter(before.values())).axis)
    except ValueError as error:
        return error
    return None


def _confirm(plan: Plan, name: str, key: str, tensor: torch.Tensor, axis: int, parts, unit) -> None:
    """Accepts a step for a parameter that follows another one: ``shard("weight", 0)``, then
    ``shard("bias", 0)``.

    Raises:
        ValueError: the step shards it in another way than it follows.
    """
    steps = plan.of(name)
    have = steps.shards[key]
    if parts == 1:
        parts, unit = have.parts, have.units if unit == 1 else unit
    wanted = make_shard(have.name, tensor.shape, axis, parts, unit, plan.member)
    if not have.alike(wanted):
        raise ValueError(
            f"expected {have.name} to be sharded with axis={have.axis}, parts={list(have.parts)}, "
            f"unit={list(have.units)}, since it follows a parameter that is sharded already, got "
            f"axis={wanted.axis}, parts={list(wanted.parts)}, unit={list(wanted.units)}; remove "
            "this call, or pass the same"
        )
    steps.followers.discard(key)


def _tensor(where: str, module: nn.Module, name: str) -> torch.Tensor:
    tensor = tensor_of(module, name)
    if tensor is None:
        tensors = [
            n
            for tensors in (module._parameters, module._buffers)
            for n, v in tensors.items()
            if v is not None
        ]
        raise ValueError(
            f"{where}: expected a parameter or buffer of {type(module).__name__}, {tensors}, got "
            f"{name!r}"
        )
    return tensor


def _shrunk(where: str, module, attributes, shard: ParameterShard) -> dict[str, int]:
    shrunk = {}
    for attribute in attributes:
        value = getattr(module, attribute)
        length = shard.shape[shard.axis]
        local, rest = divmod(value * shard.local, length)
        if rest != 0:
            raise ValueError(
                f"{where}: expected this rank's part of {attribute} to be an int, got "
                f"{value} * {shard.local} / {length}, since this rank has {shard.local} of the "
                f"{length} elements of {shard.name} along axis {shard.axis}; pass unit=, the "
                "number of elements that stay together, such as head_dim"
            )
        shrunk[attribute] = local
    return shrunk
