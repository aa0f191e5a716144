"""Builds a parallel model from a schedule."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from deepsp.schedule import flow, forwards
from deepsp.schedule.around import Checkpointed
from deepsp.schedule.attention import ScheduledAttention
from deepsp.schedule.check import added_by
from deepsp.schedule.materialize import materialize
from deepsp.schedule.plan import Plan, Steps
from deepsp.schedule.running import RUNNING, Running, SyncInput, SyncOutput
from deepsp.schedule.schedule import Schedule
from deepsp.schedule.swap import swap
from deepsp.schedule.sync import Sync
from deepsp.weights.replicated import compare, replicated_tensors
from deepsp.weights.rows import SHARDS, shards_of


def build(
    sch: Schedule,
    optimizer: Callable[..., Optimizer] | Optimizer | None = None,
    *,
    checkpoint: Mapping[str, torch.Tensor] | str | Any | None = None,
    init: Callable[[nn.Module], None] | None = None,
    outputs: str = "full",
    device: torch.device | str | None = None,
) -> tuple[nn.Module, Optimizer | None]:
    """Applies a schedule to its model, in place. Every rank makes the call.

    The first call of each kind runs the forward once more, without gradients, and derives the
    placement of every tensor. This dry run finds mistakes before anything is sent.

    Args:
        sch: the schedule.
        optimizer: a function that is called with the model's parameters; or an optimizer made
            before, which is kept: parameters stay the same objects, and its state is sharded with
            them.
        checkpoint: where the parameters come from, by their names in the model's ``state_dict()``:
            such a dict, of full tensors; a file of ``torch.save``; a .safetensors file; or a
            directory with one, or with a model.safetensors.index.json. Only this rank's part is
            read from files. None: the model's own.
        init: a function that fills a module. It is called with each module that has parameters on
            the meta device and none of them in the checkpoint. None: the module's
            ``reset_parameters()``; for buffers that no checkpoint has, a transformers model's
            ``_init_weights``. Replicated parameters get the same random numbers on each rank,
            sharded ones don't.
        outputs: "local": the model may return sharded tensors. "full": that is an error.
        device: where parameters are made that are on the meta device. None: the default device; the
            current one for a group of NCCL.

    Returns:
        The model, and the optimizer or None.

    Raises:
        ValueError: the schedule has a mistake, or was built before; parameters have gradients; the
            ranks have different values of a parameter or persistent buffer; the checkpoint doesn't
            fit; parameters have no values; the optimizer has parameters that aren't in the model
            any more.
    """
    if not isinstance(sch, Schedule):
        raise ValueError(f"expected sch to be a Schedule, got {type(sch).__name__}")
    if outputs not in ("full", "local"):
        raise ValueError(f"expected outputs to be 'full' or 'local', got {outputs!r}")
    if not (optimizer is None or callable(optimizer) or isinstance(optimizer, Optimizer)):
        raise ValueError(
            "expected optimizer to be an optimizer, or a function that makes one from parameters, "
            f"such as functools.partial(AdamW, lr=...), got {type(optimizer).__name__}"
        )
    plan = sch.plan
    root = Schedule(plan, [""])
    root._open()
    root.check()
    syncs = [sync for steps in plan.steps.values() for sync in steps.syncs if sync.op is not None]
    _derive(plan)
    running = Running(plan.member, syncs, outputs)
    before = set(plan.model.parameters())
    modules = dict(plan.walk())
    if checkpoint is None:
        compare(replicated_tensors(modules), plan.member)
    for name, new in plan.replaced.items():
        parent, _, child = name.rpartition(".")
        modules[parent]._modules[child] = new
        if isinstance(new, ScheduledAttention):
            new.build(name, running)
    for name, steps in plan.steps.items():
        _compute(name, modules[name], steps)
    materialize(plan, modules, optimizer, checkpoint, init, device)
    if checkpoint is not None:
        compare(replicated_tensors(plan.model), plan.member)
    for name, steps in plan.steps.items():
        _communicate(name, modules[name], steps, running)
    # Before all other pre-hooks, so that it sees the caller's arguments.
    plan.model.register_forward_pre_hook(running, prepend=True, with_kwargs=True)
    plan.model.register_forward_hook(running.leave, always_call=True)
    setattr(plan.model, RUNNING, running)
    plan.running = running
    running.mark(plan.model)
    return plan.model, _optimizer(plan.model, optimizer, before)


def _derive(plan: Plan) -> None:
    """Takes the gradient's placement of an input sync from the effect of its module."""
    for steps in plan.steps.values():
        before = steps.of_mode("fwd_pre")
        effect = steps.effect
        if steps.of_mode("bwd_post"):
            continue  # it changes the gradient's placement
        if before and effect is not None and effect.input_gradient and before[-1].asks_grad:
            before[-1].grad = effect.input_gradient


def _compute(name: str, module: nn.Module, steps: Steps) -> None:
    """Changes what the module computes."""
    if steps.shards:
        vars(module)[SHARDS] = {**shards_of(module), **steps.shards}
    for attribute, value in steps.attributes.items():
        setattr(module, attribute, value)
    if steps.attributes:
        vars(module)[flow.DIVIDED] = tuple(steps.attributes)
    if steps.effect is not None:
        if steps.effect.forward is not None:
            swap(module, steps.effect.forward, name)
        if steps.effect.opaque:
            module._deepsp_effect = (name, steps.effect)
            swap(module, forwards.Opaque, name)


def _communicate(name: str, module: nn.Module, steps: Steps, running: Running) -> None:
    add, after = None, None
    if steps.effect is not None and steps.effect.add_after is not None:
        parameter = steps.effect.add_after
        owner, _, child = parameter.rpartition(".")
        if getattr(module.get_submodule(owner), child, None) is not None:
            after = added_by(steps)
            add = parameter, Sync(name, "fwd_post", "scatter", 0)
    for sync in steps.syncs:
        if sync.function is not None:
            _hook(module, sync)
        elif sync.mode == "fwd_post":
            hook = SyncOutput(running, sync, add if sync is after else None)
            if sync.overlap:
                module._deepsp_reduce = hook
                swap(module, forwards.ReduceOverlapped, name)
            else:
                module.register_forward_hook(hook)
        elif sync.overlap:
            module._deepsp_gather = SyncInput(running, sync)
            swap(module, forwards.GatherOverlapped, name)
        else:
            module.register_forward_pre_hook(SyncInput(running, sync), with_kwargs=True)
    if steps.checkpoint is not None:
        module._deepsp_checkpoint = steps.checkpoint
        swap(module, Checkpointed, name)


def _hook(module: nn.Module, sync: Sync) -> None:
    """Registers a function as a hook, with keyword arguments if the function takes them."""
    if sync.mode == "bwd_post":
        module.register_forward_pre_hook(_trust, with_kwargs=True)
        module.register_full_backward_hook(sync.function)
        return
    try:
        count = len(inspect.signature(sync.function).parameters)
    except (TypeError, ValueError):
        count = 0
    if sync.mode == "fwd_pre":
        module.register_forward_pre_hook(sync.function, with_kwargs=count == 3)
    else:
        module.register_forward_hook(sync.function, with_kwargs=count == 4)


def _trust(module: nn.Module, args: tuple, kwargs: dict):
    """The dry run doesn't see what a backward hook does to the inputs' gradients, so it takes these
    for replicated."""
    following = flow.current()
    if following is None:
        return None
    return pytree.tree_map_only(Tensor, following.trusted, (args, kwargs))


def _optimizer(model: nn.Module, optimizer, before: set) -> Optimizer | None:
    if optimizer is None:
        return None
    if not isinstance(optimizer, Optimizer):
        return optimizer(model.parameters())
    now = set(model.parameters())
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter in before and parameter not in now:
                raise ValueError(
                    f"optimizer: a parameter of shape {list(parameter.shape)} isn't in the model "
                    "any more, since it was on the meta device or its module was replaced; pass a "
                    "function that makes the optimizer, functools.partial(AdamW, lr=...)"
                )
    return optimizer
