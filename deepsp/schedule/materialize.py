"""Replaces full parameters by this rank's part, or makes the part."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from deepsp.ranks.groups import on_all_ranks
from deepsp.schedule.files import Source, source_of
from deepsp.schedule.plan import Plan
from deepsp.weights.rows import ParameterShard, sharded, shards_of


def materialize(
    plan: Plan,
    modules: dict[str, nn.Module],
    optimizer,
    checkpoint,
    init: Callable[[nn.Module], None] | None,
    device,
) -> None:
    """Gives every parameter and buffer its final size and values."""
    model = plan.model
    shards = _shards_by_tensor(model)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if id(tensor) in shards and tensor.grad is not None:
            raise ValueError(
                f"expected {name} to have no gradient, but {name} has a gradient, of the full "
                "parameter; call model.zero_grad(set_to_none=True) before"
            )
    with contextlib.ExitStack() as stack:
        source = None if checkpoint is None else stack.enter_context(source_of(checkpoint))
        if source is not None:
            _check_names(model, source)
        tensors = _make(model, shards, _device(plan, device))
        _shrink(model, shards, tensors, optimizer)
        filled = set() if source is None else _fill(model, source)
    _initialize(plan, tensors, filled, init)


def _shards_by_tensor(model: nn.Module) -> dict[int, ParameterShard]:
    by_tensor = {}
    for module in model.modules():
        for name, shard in shards_of(module).items():
            tensors = module._parameters if name in module._parameters else module._buffers
            by_tensor[id(tensors[name])] = shard
    return by_tensor


def _device(plan: Plan, device) -> torch.device:
    if device is not None:
        return torch.device(device)
    group = dist.distributed_c10d._resolve_process_group(plan.member[2])
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.get_default_device()


def _make(model: nn.Module, shards: dict[int, ParameterShard], device) -> dict[int, Tensor]:
    """Replaces meta tensors by empty ones of their shard's size; returns the new ones by id."""
    new: dict[int, Tensor] = {}
    new_tensors: dict[int, Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, old in tensors.items():
                if old is None or not old.is_meta:
                    continue
                if id(old) not in new:
                    shard = shards.get(id(old))
                    shape = old.shape if shard is None else shard.local_shape
                    tensor = torch.empty(shape, dtype=old.dtype, device=device)
                    if isinstance(old, nn.Parameter):
                        tensor = nn.Parameter(tensor, requires_grad=old.requires_grad)
                        vars(tensor).update(vars(old))
                    new[id(old)] = tensor
                    new_tensors[id(tensor)] = tensor
                tensors[name] = new[id(old)]
    return new_tensors


def _shrink(
    model, shards: dict[int, ParameterShard], new_tensors: dict[int, Tensor], optimizer
) -> None:
    """Replaces each other tensor, and its optimizer state, by this rank's part."""
    state = optimizer.state if isinstance(optimizer, Optimizer) else {}
    for tensor in [*model.parameters(), *model.buffers()]:
        shard = shards.get(id(tensor))
        if shard is None or id(tensor) in new_tensors:
            continue
        for key, value in state.get(tensor, {}).items():
            if isinstance(value, Tensor) and tuple(value.shape) == shard.shape:
                state[tensor][key] = shard.take(value)
        tensor.data = shard.take(tensor.data)


# ---- from a checkpoint


def _names(model: nn.Module) -> dict[int, list[str]]:
    """Names of each tensor in the state_dict."""
    names: dict[int, list[str]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and name not in module._non_persistent_buffers_set:
                    names.setdefault(id(tensor), []).append(f"{prefix}.{name}".lstrip("."))
    return names


def _check_names(model: nn.Module, source: Source) -> None:
    names = _names(model)
    missing = [n[0] for n in names.values() if not any(name in source for name in n)]
    left = source.names - {name for alike in names.values() for name in alike}
    problems = ("has no", missing), ("has names that the model doesn't have:", sorted(left))
    for problem, keys in problems:
        if keys:
            shown = ", ".join(keys[:5]) + " ..." * (len(keys) > 5)
            raise ValueError(f"checkpoint {problem} {shown}")


def _fill(model: nn.Module, source: Source) -> set[int]:
    """Reads this rank's part of each tensor. Returns the ids of the filled tensors."""
    names, filled = _names(model), set()
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None or id(tensor) not in names or id(tensor) in filled:
                    continue
                filled.add(id(tensor))
                key = next(n for n in names[id(tensor)] if n in source)
                shard = shards_of(module).get(name)
                shape = tuple(tensor.shape) if shard is None else shard.shape
                if source.shape(key) != shape:
                    raise ValueError(
                        f"checkpoint: expected {key} to have shape {list(shape)}, got "
                        f"{list(source.shape(key))}"
                    )
                with torch.no_grad():
                    _read(source, key, shard, tensor)
    return filled


def _read(source: Source, key: str, shard: ParameterShard | None, tensor: Tensor) -> None:
    if shard is None:
        tensor.copy_(source.read(key))
        return
    begin = 0
    for first, end in shard.ranges():
        piece = source.read(key, shard.axis, first, end)
        tensor.narrow(shard.axis, begin, end - first).copy_(piece)
        begin += end - first


# ---- without a checkpoint


def _initialize(plan: Plan, new_tensors: dict[int, Tensor], filled: set[int], init) -> None:
    empty = {key for key in new_tensors if key not in filled}
    if not empty:
        return
    seeds = _seeds(plan, next(iter(new_tensors.values())).device)
    for name, module in reversed(list(plan.model.named_modules())):  # children first
        names = [
            n
            for named in (module._parameters, module._buffers)
            for n, t in named.items()
            if t is not None and id(t) in empty
        ]
        if not names:
            continue
        fill = init or _own_initialization(plan.model, name, module, names)
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        parts = sharded(module)
        kept = {n: t.detach().clone() for n, t in tensors.items() if id(t) not in empty}
        with torch.random.fork_rng(devices=_devices(tensors)):
            # First with the same random numbers on each rank, for replicated ones, then with
            # others.
            seeds[0] = _fill_with(seeds[0], fill, module)
            if parts:
                replicated = [n for n in tensors if n not in parts and n not in kept]
                kept.update({n: tensors[n].detach().clone() for n in replicated})
                seeds[1] = _fill_with(seeds[1], fill, module)
            with torch.no_grad():
                for n, tensor in kept.items():
                    tensors[n].copy_(tensor)


def _own_initialization(
    model: nn.Module, name: str, module: nn.Module, empty: list[str]
) -> Callable[[nn.Module], None]:
    """The function that fills a module: its own method; for buffers that no checkpoint has, such as
    rotary frequencies, the ``_init_weights`` of a transformers model around it."""
    cls = type(module)
    for method in ("reset_parameters", "_reset_parameters"):
        if hasattr(cls, method):
            return getattr(cls, method)
    path = name.split(".")
    around = (model.get_submodule(".".join(path[:n])) for n in reversed(range(len(path) + 1)))
    outer = next((m for m in around if hasattr(m, "_init_weights")), None)
    buffers = [getattr(module, n) for n in empty if n in module._non_persistent_buffers_set]
    error = ValueError(
        f"{f'{name}.{empty[0]}'.lstrip('.')} was on the meta device, and {cls.__name__} has no "
        "reset_parameters() that fills it; pass init=, a function of a module"
        + ("" if len(buffers) == len(empty) else ", or checkpoint=")
    )
    fits = len(buffers) == len(empty) and all(b.is_floating_point() for b in buffers)
    if outer is None or not fits:
        raise error

    def fill(module: nn.Module) -> None:
        for buffer in buffers:
            buffer.fill_(torch.nan)
        outer._init_weights(module)
        if any(buffer.isnan().any() for buffer in buffers):
            raise error

    return fill


def _fill_with(seed: int, fill: Callable[[nn.Module], None], module: nn.Module) -> int:
    """Calls ``fill``; returns the next seed."""
    torch.manual_seed(seed)
    fill(module)
    return int(torch.randint(2**62, ()))


def _devices(tensors: dict[str, Tensor]) -> list:
    return list({t.device for t in tensors.values() if t.device.type == "cuda"})


def _seeds(plan: Plan, device) -> list[int]:
    """Seeds for replicated and for sharded parameters, from rank 0's default generator."""
    drawn = int(torch.randint(2**31, (), device="cpu"))
    first = on_all_ranks([drawn], plan.member, device)[0][0]
    rank = plan.member[0]
    return [first, (first * 1_000_003 + 7919 * (rank + 1)) % (2**62)]
