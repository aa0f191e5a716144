"""A torch function that the model calls: what it does to placements, on the tape."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from deepsp.ranks import randomness
from deepsp.schedule.flow import (
    drawing,
    functions,
    lengths,
    names,
    pointwise,
    reshapes,
    writes,
)
from deepsp.schedule.flow.naming import name_of
from deepsp.schedule.flow.values import Call, Entry, Value, differentiable, tensors_in
from deepsp.schedule.placement import REPLICATE

if TYPE_CHECKING:
    from deepsp.schedule.flow.flow import Flow

_KEEP_UNIFORM = names.words(
    "view reshape expand expand_as unsqueeze squeeze transpose permute getitem broadcast_to "
    "contiguous to type float double half bfloat16 clone type_as detach neg"
)
# They don't show numbers: what they make is compared where it is used.
_VIEWS = functions.AFTER.keys() | names.SAME | names.ABOUT
_POINTWISE = (pointwise.pointwise, pointwise.same)


def follow(flow: Flow, func, args, kwargs):
    """A torch function, called by the model."""
    raw = getattr(func, "__name__", str(func))
    if raw == "_set_grad_enabled":
        flow.grad.set(args[0])
        return func(*args, **kwargs)
    if flow.is_paused:
        return func(*args, **kwargs)
    name, inplace = name_of(func, raw)
    call = Call(flow, name, args, kwargs)
    rule = None
    if flow.any_not_replicated(call.tensors) or name.startswith("deepsp."):
        rule = _rule(flow, call)
    places = rule(call) if rule is not None and name in functions.BEFORE else None
    if name not in _VIEWS:
        flow.note_replicated(call.tensors)
    lengths.check(call)
    before = randomness.states()
    flow.unseen.seen += 1
    try:
        out = func(*args, **kwargs)
    except (RuntimeError, IndexError, TypeError) as error:
        split = next((v for _, v in call.tensors if v.split), None)
        if split is not None and functions.AFTER.get(name) is reshapes.reshape:
            shape = list(call.tensors[0][0].shape)
            call.fail(
                f"its sizes don't fit {split.name}, which is {split.place} and has local shape "
                f"{shape} ({error}). A number of heads or channels in it must be the local one: "
                "divide the module's attribute (sch[...].divide), or pass -1 for that size"
            )
        what = ", ".join(f"{v.name}: {v.place}" for _, v in call.tensors)
        error.add_note(f"In the schedule's dry run, in {flow.where()}: {name} of {what}.")
        raise
    finally:
        flow.unseen.seen -= 1
    made = [t for t in tensors_in(out)]
    if not made and not inplace:
        _read(call)
        return lengths.read(call, out)
    if callable(places):
        places = places(out)
    elif rule is not None and places is None:
        places = rule(call, out)
    random = drawing.note(flow, call, before) or any(v.random for _, v in call.tensors)
    if inplace:
        made = [args[0]]
    _record(flow, call, made, places, inplace, random)
    return out


def _read(call: Call) -> None:
    """What Python has seen has to be the same on every rank."""
    value = next((v for _, v in call.tensors if not v.replicated), None)
    if value is not None and call.name in names.READS:
        call.fail(
            f"its values are read, but {value.name} is {value.place}, and each rank would see "
            "different ones; gather or reduce it before"
        )


def _rule(flow: Flow, call: Call):
    name = call.name
    rule = functions.BEFORE.get(name) or functions.AFTER.get(name)
    if rule is not None:
        return rule
    if not call.tensors or (not flow.any_not_replicated(call.tensors) and "deepsp." not in name):
        return None
    value = next((v for _, v in call.tensors if not v.replicated), None)

    def unknown(call: Call, out):
        if value is None:
            call.fail(
                "this op communicates, which can't be followed inside a module; let the schedule "
                "do it (sync)"
            )
        fix = "fwd_post all_reduce" if value.partial else "fwd_pre all_gather"
        call.fail(
            f"what it does to {value.name}, which is {value.place}, isn't known; make it Replicate "
            f"before (sync with {fix}), or shard a module around it with a registered method"
        )

    return unknown


def _record(
    flow: Flow, call: Call, made: list[Tensor], places, inplace: bool, random: bool
) -> None:
    if not isinstance(places, list):
        places = [REPLICATE if places is None else places] * len(made)
    inputs = [v for _, v in call.tensors]
    carries = flow.grad.enabled and any(v.carries for v in inputs) and (call.name not in names.LIKE)
    uniform = call.name in names.FILLED or (
        bool(inputs)
        and all(v.uniform for v in inputs)
        and (call.name in _KEEP_UNIFORM or functions.BEFORE.get(call.name) in _POINTWISE)
        and call.name not in names.DROPOUTS | names.RANDOM
    )
    since = next((v.since for v in inputs if v.since), "")
    where = flow.where()
    outputs = []
    for tensor, place in zip(made, places, strict=True):
        if not inplace and any(tensor is t for t, _ in call.tensors):
            continue  # returned as it is: contiguous(), to()
        value = Value(
            place, carries and differentiable(tensor), f"what {call.name} in {where} makes"
        )
        value.uniform, value.random = uniform, random
        if value.partial:
            value.since = since or where
        outputs.append((tensor, value))
    if inplace:
        writes.overwrite(flow, call, outputs)
    sync = getattr(call, "sync", None)
    if sync is not None:
        inputs = [inputs[0]]
    carrying = [v for _, v in outputs if v.carries]
    if carrying:
        flow.tape.append(Entry(call.name, where, [v for v in inputs if v.carries], carrying, sync))
    for tensor, value in outputs:
        flow.values[tensor] = value
    if inplace:
        writes.pass_to_aliases(flow, call, outputs)
