"""Shards parameters over ranks, and gathers them in a narrow dtype for use."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.nn.utils import parametrize

from deepsp.ranks.agreement import first_difference
from deepsp.ranks.groups import Group, Member, member_of
from deepsp.weights.replicated import compare, replicated_tensors
from deepsp.weights.shards import ShardParametrization, Shards


def shard_parameters(
    module: nn.Module,
    group: Group = None,
    dtype: torch.dtype | Callable[[str, nn.Parameter], torch.dtype] = torch.bfloat16,
    reduce_dtype: torch.dtype = torch.float32,
    *,
    reduction: str = "exact",
    min_numel: int = 0,
    skip: Callable[[str, nn.Parameter], bool] | None = None,
    gradient_reduction: str = "sum",
    reshard_after_forward: bool = True,
    prefetch_bytes: int = 64 << 20,
) -> nn.Module:
    """Shards every parameter over ``group``, and gathers it in ``dtype`` for use.

    In place: a parameter becomes this rank's rows (dimension 0 split like ``torch.tensor_split``).
    It stays the same ``nn.Parameter`` object with its dtype, so optimizers made before or after
    see it. Before a use, the rows are cast and gathered; after it, the gathered copy is freed.
    autograd keeps nothing of it but gathers again in backward. The first step records the order of
    uses; from then on, the next gathers are in flight meanwhile. The gradient of a shard is the sum
    of its rows over the ranks; zero if the parameter was used but had no part in the loss.

    Every rank makes the same calls in the same order, with the same parameters.

    Args:
        module: any module but RNNs; a parameter that several submodules share is sharded once.
        group: the ranks over which parameters are sharded.
        dtype: of the gathered parameters; or a function of name and parameter that returns it.
        reduce_dtype: the dtype in which gradients, which are sent in ``dtype``, are summed.
        reduction: "exact": gradients are summed in rank order. "backend": by the reduce-scatter of
            the group's backend, in its own order; they are sent in ``reduce_dtype``. Between
            machines NCCL's sends less; gloo's is slower.
        min_numel: a parameter with fewer elements stays full on every rank.
        skip: a function of name and parameter; if it returns true, the parameter stays full on
            every rank. Reduce the gradients of such parameters: :func:`deepsp.sync_gradients`.
        gradient_reduction: "sum", or "mean": the sum divided by the number of ranks.
        reshard_after_forward: False keeps in memory what autograd saves of gathered parameters.
        prefetch_bytes: at most this many gathered bytes, or one parameter if it is larger, are in
            flight or unused ahead of time; 0: each parameter is gathered alone, when it is used.

    Returns:
        ``module``.

    Raises:
        ValueError: a parameter is not floating, has a gradient, is parametrized already, or belongs
            to an RNN or an Embedding with max_norm or sparse gradients; ranks disagree about the
            parameters, or hold different values of parameters or persistent buffers.

    Outside of a forward, ``module.weight`` takes writes by element and random ones, which go to the
    shards. :func:`deepsp.full_parameters` gathers, for reading and for any write.
    ``module.to(dtype)`` changes the dtype of the shards and the one in which they are gathered.

    The sharding is that of ZeRO-3 (Rajbhandari et al., 2020, arXiv:1910.02054).
    """
    if reduction not in ("exact", "backend"):
        raise ValueError(
            "expected reduction to be 'exact' or 'backend' (NCCL's own reduce-scatter where the "
            f"group is NCCL's), got {reduction!r}"
        )
    if gradient_reduction not in ("sum", "mean"):
        raise ValueError(
            f'expected gradient_reduction to be "sum" or "mean", got {gradient_reduction!r}'
        )
    if prefetch_bytes < 0:
        raise ValueError(f"expected prefetch_bytes >= 0, got {prefetch_bytes}")
    member = member_of(group)
    chosen: dict[nn.Parameter, torch.dtype] = {}
    names: dict[nn.Parameter, str] = {}
    for name, parameter in module.named_parameters():
        if parameter.numel() < min_numel or (skip is not None and skip(name, parameter)):
            continue
        names[parameter] = name
        chosen[parameter] = dtype if isinstance(dtype, torch.dtype) else dtype(name, parameter)
        _check(name, parameter, chosen[parameter])
    owners = [
        (owner, name, parameter)
        for owner in module.modules()
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False)
        if parameter in chosen
    ]
    for owner, name, parameter in owners:
        if isinstance(owner, parametrize.ParametrizationList):
            raise ValueError(
                f"module: {names[parameter]} is parametrized already ({name} of a "
                "ParametrizationList): remove the parametrization, or skip it"
            )
        if isinstance(owner, nn.RNNBase):
            raise ValueError(
                f"module: {names[parameter]} belongs to an {type(owner).__name__}, which keeps its "
                "weights in a list of its own: skip its parameters"
            )
        if isinstance(owner, nn.Embedding) and owner.max_norm is not None:
            raise ValueError(
                f"module: {names[parameter]} belongs to an Embedding with max_norm, which writes "
                "to its weight: skip it"
            )
        if getattr(owner, "sparse", False):
            raise ValueError(
                f"module: {names[parameter]} belongs to an {type(owner).__name__} with "
                "sparse=True, and only dense gradients can be summed: pass sparse=False, or skip it"
            )
    sums = f"reduction={reduction!r} with reduce_dtype={reduce_dtype}"
    _check_ranks_agree(member, [(names[p], p, d) for p, d in chosen.items()], sums)
    compare(replicated_tensors(module), member)
    mean = gradient_reduction == "mean"
    shards = Shards(
        member, reduce_dtype, reduction == "backend", mean, reshard_after_forward, prefetch_bytes
    )
    indices = {p: shards.add(names[p], p, d) for p, d in chosen.items()}
    shards.owners = [None] * len(indices)
    for owner, name, parameter in owners:
        shard = ShardParametrization(shards, indices[parameter])
        parametrize.register_parametrization(owner, name, shard, unsafe=True)
        shard.home.append(owner.parametrizations[name])
        shards.owners[indices[parameter]] = owner.parametrizations[name]
        shards.infos[indices[parameter]].owners += 1
        _assign_parameters(type(owner))
    shards.refresh()
    module.register_forward_pre_hook(shards.enter, prepend=True)
    module.register_forward_hook(shards.leave, always_call=True)
    return module


def _assign_parameters(owner: type[nn.Module]) -> None:
    """Lets ``module.weight = nn.Parameter(...)`` set a sharded parameter; PyTorch would register a
    second one beside it, and refuse. ``owner``: the class that register_parametrization made for
    the module."""
    if "register_parameter" in vars(owner):
        return
    register = owner.register_parameter

    def register_parameter(self: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        parametrizations = self._modules.get("parametrizations", {})
        if name in parametrizations:
            parametrizations[name].right_inverse(parameter)
        else:
            register(self, name, parameter)

    owner.register_parameter = register_parameter


def _check(name: str, parameter: nn.Parameter, dtype: torch.dtype) -> None:
    floats = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    for what, value in ((f"module: {name}", parameter.dtype), (f"dtype of {name}", dtype)):
        if value not in floats:
            raise ValueError(
                f"expected {what} to be float64, float32, bfloat16 or float16, got {value}"
            )
    if parameter.grad is not None:
        raise ValueError(
            f"module: {name} has a gradient, that of the full parameter: call "
            "module.zero_grad(set_to_none=True) first"
        )


def _check_ranks_agree(member: Member, parameters, sums: str) -> None:
    items = [
        (f"parameter {i}", f"{n}: {p.dtype} {list(p.shape)}, gathered in {d}")
        for i, (n, p, d) in enumerate(parameters)
    ]
    differs = first_difference([*items, ("the sums of gradients", sums)], member)
    if differs is not None:
        raise differs.error(
            f"module: {differs.name}",
            "make the same model, and pass the same dtype, reduce_dtype, reduction, min_numel and "
            "skip, on all ranks",
        )


def sharded_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter, Shards, int]]:
    """(name of the full parameter, shard, its Shards, its index there) for every sharded parameter
    of the module; for a tied one, once for each module."""
    for prefix, owner in module.named_modules():
        if not parametrize.is_parametrized(owner):
            continue
        for name, parametrizations in owner.parametrizations.items():
            if isinstance(parametrizations[0], ShardParametrization):
                full = f"{prefix}.{name}" if prefix else name
                shard = parametrizations[0]
                yield full, parametrizations.original, shard.shards, shard.index


@contextlib.contextmanager
def full_parameters(module: nn.Module) -> Iterator[None]:
    """In this context, sharded parameters of ``module`` are full, for reading and writing, in the
    dtype of the shards. Every rank enters and leaves. ::

        with deepsp.full_parameters(model.head):
            norm = model.head.weight.norm()
            nn.init.orthogonal_(model.head.weight)  # the same on all ranks

    Writes go to the shards at the end; after an exception, they are lost. If gradients are enabled,
    gradients of what is computed here go to the shards. Pass a part of the model to gather only
    that part. A module without sharded parameters is left unchanged.

    Raises:
        ValueError: at the end, on every rank: ranks have written different values, or one of them
            left by an exception.
        RuntimeError: within a forward, or within another such block.
    """
    parameters = {(id(s), i): (s, i) for _, _, s, i in sharded_parameters(module)}.values()
    for shards, index in parameters:
        if shards.inside or index in shards.full:
            raise RuntimeError(
                f"full_parameters: {shards.infos[index].name} is gathered already: enter once, "
                "outside of the module's forward"
            )
    for shards, index in parameters:
        shards.full[index] = shards.gather_to_write(index)
    failed = True
    try:
        yield
        failed = False
    finally:
        members = {shards.member: None for shards, _ in parameters}
        written = [(s, i, s.full.pop(i).detach()) for s, i in parameters]
        for member in members:
            local = [(s.infos[i].name, x) for s, i, x in written if s.member == member]
            differ = first_difference([("", failed), *local], member)
            if differ is not None and not failed:
                what = f"what full_parameters writes to {differ.name}"
                if not differ.name:
                    what = "the way out of full_parameters (one left by an exception)"
                raise differ.error(what, "write the same on every rank")
        if not failed:
            for shards, index, full in written:
                shards.take_rows(index, full)
