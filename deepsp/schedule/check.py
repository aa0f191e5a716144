"""Checks of a schedule before the model has run.

They report only what is certain: except in ``nn.Sequential``, the order of calls of modules is not
known. The dry run finds the rest.
"""

from __future__ import annotations

from torch import nn

from deepsp.schedule import forwards
from deepsp.schedule.placement import PARTIAL, REPLICATE, Partial, Placement, Replicate, Shard
from deepsp.schedule.plan import Plan, Steps, is_inside
from deepsp.schedule.sync import Sync
from deepsp.schedule.tree import placement_of

_LINEAR = (forwards.InputSharded, forwards.Conv1DInputSharded)

_BY_ELEMENT = (
    nn.Dropout, nn.AlphaDropout, nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.ELU,
    nn.LeakyReLU, nn.Softplus, nn.Mish, nn.Hardswish, nn.Hardtanh, nn.LogSigmoid,
)  # fmt: skip
_BY_FEATURES = (nn.Linear, nn.LayerNorm, nn.RMSNorm)  # need all features


def problems(plan: Plan) -> list[str]:
    """The mistakes found, one line each."""
    return [
        *_tied(plan),
        *_overlaps(plan),
        *_biases(plan),
        *_flow(plan),
        *_partial_outputs(plan),
        *(_partial_gradients(plan) if _trains(plan) else []),
    ]


def _trains(plan: Plan) -> bool:
    """Whether gradients are expected. If the guess is wrong, the first call's dry run reports what
    is missing."""
    return plan.model.training and any(p.requires_grad for p in plan.model.parameters())


def added_by(steps: Steps) -> Sync | None:
    """The sync after which the parameter that the forward leaves out is added: the first sync that
    reduces the output."""
    return next((s for s in steps.of_mode("fwd_post") if s.reduces and s.tensor in (None, 0)), None)


def _tied(plan: Plan):
    for name, steps in plan.steps.items():
        module = plan.module(name)
        for tensor_name, shard in steps.shards.items():
            for other, key in plan.owners(_tensor(module, tensor_name)):
                sharded = plan.steps.get(other, Steps()).shards.get(key)
                if sharded is None or not shard.alike(sharded):
                    yield (
                        f"{shard.name} ({placement_of(shard)}) is tied to {other}.{key}, which is "
                        f"{'not sharded' if sharded is None else placement_of(sharded)}; shard it "
                        f"alike: axis={shard.axis}, parts={list(shard.parts)}, "
                        f"unit={list(shard.units)}"
                    )


def _tensor(module: nn.Module, name: str):
    return module._parameters[name] if name in module._parameters else module._buffers[name]


def _overlaps(plan: Plan):
    for steps in plan.steps.values():
        for sync in steps.syncs:
            if not sync.overlap:
                continue
            effect, same = steps.effect, steps.of_mode(sync.mode)
            if (sync.mode, sync.op) == ("fwd_post", "reduce_scatter"):
                if effect is None or effect.forward not in _LINEAR:
                    yield (
                        f"{sync.where}: overlap=True needs a linear layer with sharded input "
                        "features (nn.Linear: axis=1)"
                    )
                elif same[0] is not sync:
                    yield f"{sync.where}: overlap=True needs the first sync at the output"
            elif (sync.mode, sync.op) == ("fwd_pre", "all_gather"):
                if effect is None or effect.input_gradient is None or effect.forward is not None:
                    yield (
                        f"{sync.where}: overlap=True needs a linear layer with sharded output "
                        "features (nn.Linear: axis=0)"
                    )
                elif same[-1] is not sync:
                    yield f"{sync.where}: overlap=True needs the last sync at the input"
                elif sync.grad == "replicated":
                    yield (
                        f"{sync.where}: expected grad='partial' or None, since the layer's output "
                        "features are sharded and its input's gradient is Partial, got 'replicated'"
                    )
            else:
                yield (
                    f"{sync.where}: overlap=True is for fwd_post reduce_scatter and fwd_pre "
                    "all_gather only; leave it out"
                )


def _biases(plan: Plan):
    for name, steps in plan.steps.items():
        if steps.effect is None or steps.effect.add_after is None:
            continue
        owner, _, child = steps.effect.add_after.rpartition(".")
        bias = getattr(plan.module(name).get_submodule(owner), child, None)
        if bias is not None and added_by(steps) is None:
            yield (
                f"{name or 'the model'}: its output is Partial, and its bias counts once, so it is "
                "added after the output is reduced. Put the fwd_post reduce_scatter or all_reduce "
                "at this module, or use bias=None"
            )


# ---- placements from one step to the next


def _flow(plan: Plan):
    problems: dict[str, None] = {}  # in order, each once
    inside: set[str] = set()
    for name, module in plan.walk():
        if name not in inside and isinstance(module, nn.Sequential):
            _through(plan, name, module, REPLICATE if name == "" else None, problems, inside)
    for name in plan.steps:
        if name not in inside:
            _through(plan, name, plan.module(name), None, problems, inside)
    return problems


def _through(plan, name, module, placement, problems, inside) -> Placement | None:
    """From a module's input to its output; None: not known."""
    inside.add(name)
    steps = plan.steps.get(name, Steps())
    try:
        placement = _chain([*steps.of_mode("fwd_pre"), *steps.of_mode("bwd_post")], placement)
        placement = _across(plan, name, module, steps, placement, problems, inside)
        return _chain(steps.of_mode("fwd_post"), placement)
    except ValueError as error:
        problems[str(error)] = None
        return None


def _chain(syncs: list[Sync], placement: Placement | None) -> Placement | None:
    for sync in syncs:
        if sync.function is not None:
            placement = None
        elif sync.tensor in (None, 0):
            result = sync.result(placement)
            placement = placement if sync.mode == "bwd_post" else result
    return placement


def _across(plan, name, module, steps, placement, problems, inside) -> Placement | None:
    where, effect = name or "the model", steps.effect
    if effect is not None:
        if (
            placement is not None
            and effect.input is not None
            and not forwards.fits(placement, effect.input, None)
        ):
            raise ValueError(
                f"{where}: expected its input to be {effect.input}, since its weight is sharded, "
                f"got {placement}" + _missing(placement)
            )
        return effect.output
    if isinstance(module, nn.Sequential):
        for child, submodule in module._modules.items():
            below = f"{name}.{child}" if name else child
            placement = _through(plan, below, submodule, placement, problems, inside)
        return placement
    if placement is None or isinstance(module, nn.Identity):
        return placement
    if isinstance(module, _BY_ELEMENT):
        if isinstance(placement, Partial):
            raise ValueError(
                f"{where}: expected its input to be Replicate or Shard, got {placement}"
                + _missing(placement)
            )
        return placement
    if isinstance(module, _BY_FEATURES):
        last = isinstance(placement, Shard) and placement.axis == -1
        if last or isinstance(placement, Partial):
            raise ValueError(
                f"{where}: expected all features in its input, since its weight isn't sharded, got "
                f"{placement}" + _missing(placement)
            )
        return placement if isinstance(placement, Replicate) else None
    return None


def _missing(placement: Placement) -> str:
    if isinstance(placement, Partial):
        return "; put a reduce_scatter or all_reduce before it"
    if isinstance(placement, Shard):
        return "; put an all_gather before it"
    return ""


# ---- partial tensors that nothing reduces


def _any_function(plan: Plan) -> bool:
    return any(s.function is not None for steps in plan.steps.values() for s in steps.syncs)


def _partial_outputs(plan: Plan):
    if _any_function(plan):
        return
    partial = {n for n, s in plan.steps.items() if s.effect and s.effect.output == PARTIAL}
    for name in partial:
        if not any(
            sync.reduces and _serves(container, sync.mode == "fwd_post", name, partial)
            for container, steps in plan.steps.items()
            for sync in steps.syncs
        ):
            yield (
                f"{name or 'the model'}: its output is Partial, and nothing reduces it; sync it "
                "with mode='fwd_post' and reduce_scatter or all_reduce"
            )


def _partial_gradients(plan: Plan):
    if _any_function(plan):
        return
    partial = {
        n for n, s in plan.steps.items() if s.effect and s.effect.input_gradient == "partial"
    }
    for name in partial:
        if not any(
            _reduces_gradient(sync) and _serves(container, sync.mode != "fwd_post", name, partial)
            for container, steps in plan.steps.items()
            for sync in steps.syncs
        ):
            yield (
                f"{name or 'the model'}: the gradient of its input is Partial, and nothing reduces "
                "it; sync it, or a module around it, with mode='bwd_post' and all_reduce, or "
                "gather its input with all_gather"
            )


def _reduces_gradient(sync: Sync) -> bool:
    if sync.mode == "bwd_post":
        return sync.op == "all_reduce"
    return sync.op in ("all_gather", "all_reduce") and sync.grad != "replicated"


def _serves(container: str, serves_itself: bool, name: str, partial: set[str]) -> bool:
    """Whether a sync at module ``at`` may reduce the partial tensor of module ``name``.
    ``serves_itself``: it reduces a tensor that module ``at`` makes."""
    if is_inside(name, container):
        return serves_itself
    return not serves_itself or not any(is_inside(other, container) for other in partial)
