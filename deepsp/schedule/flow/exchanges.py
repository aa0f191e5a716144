"""Placement rules of deepsp's own ops, for modules that call them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

from torch.distributed import ProcessGroup

from deepsp.schedule.flow.values import Split, TracedCall, Value, public, tensors_in
from deepsp.schedule.placement import REPLICATE, misfit

_TOKENS, _HEADS = 1, 2  # dimensions of [B, S, H, D]

_TO_TOKENS = (
    "deepsp.distributed_attention",
    "deepsp.distributed_attention_with_lse",
    "deepsp.DistributedAttention",
)
_ATTENTION = (*_TO_TOKENS, "deepsp._attention_of_cell")  # take q, k and v


@dataclass(frozen=True)
class OpSync:
    """A collective that a module calls itself."""

    op: str
    module_name: str
    grad: str | None = None
    mode: str = "op"


def _group(call: TracedCall) -> str | None:
    return call["group_name"]


def communicates(call: TracedCall) -> bool:
    """Whether an op is a collective over the schedule's group, also one of torch.distributed."""
    group = call["process_group"]
    if group is None:
        return _group(call) == call.flow.member[2]
    between_two = call.name in ("c10d.send", "c10d.recv", "c10d.recv_any_source")
    return not between_two and ProcessGroup.unbox(group).group_name == call.flow.member[2]


def _fail_other_group(call: TracedCall, value: Value) -> NoReturn:
    call.fail(
        f"expected {value.name} to be Replicate over the schedule's group, since the op is over "
        f"another group, got {value.place}; use {'all_reduce' if value.partial else 'all_gather'} "
        "before"
    )


def _check(call: TracedCall, value: Value, op: str, dim: int | None) -> None:
    """Refuses what a collective can't take. ``dim``: its sharded dimension; None: any."""
    place = public(value.place)
    needed, advice = misfit(op, place) or (None, "")
    if needed is None and value.split and dim is not None and place.axis != dim:
        needed, at = "Shard", value.place.axis
        advice = f"gather it along that dimension before, and scatter it along {dim}"
        if at in (None, dim):
            advice = "the ranks' tensors, one after another, aren't the full tensor; gather before"
        elif op == "all_gather":
            advice = f"pass dim={at}"
    if needed is not None:
        exchanged = op == "seq_to_heads" and value.split
        of = " of [batch, sequence, heads, head_dim]" if exchanged else ""
        wanted = f"Shard({dim}){of}" if needed == "Shard" and dim is not None else needed
        call.fail(f"expected {value.name} to be {wanted}, got {value.place}; {advice}")


def _exchange(source: int | None, target: int | None):
    """A rule for inputs sharded along ``source`` and outputs along ``target``; None: a buffer in
    flight."""

    def rule(call: TracedCall):
        first = call.values[:3] if call.name in _ATTENTION else call.values[:1]
        moved = list(tensors_in(first))
        if _group(call) not in (None, call.flow.member[2]):
            other = next((v for _, v in call.tensors if not v.replicated), None)
            if other is None:
                return REPLICATE
            if call.name in _TO_TOKENS and all(
                call.value(x).split and call.place(x).axis == _HEADS for x in moved
            ):
                return call.place(moved[0])
            _fail_other_group(call, other)
        for x in moved:
            _check(call, call.value(x), "seq_to_heads", source)
        for t, v in call.tensors:
            if not any(t is x for x in moved) and not v.replicated:
                use = "all_reduce" if v.partial else "all_gather"
                call.fail(f"expected {v.name} to be Replicate, got {v.place}; use {use} before")
        origin = call.place(moved[0]).origin if moved else None

        def result(out):
            return [
                Split(target, () if target is None else (x.size(target),), origin)
                for x in tensors_in(out)
            ]

        return result

    return rule


def _collective(op: str):
    """A collective over the schedule's group that a module calls itself, with its own ``grad``."""

    def rule(call: TracedCall):
        x = call.values[0]
        value = call.value(x)
        if _group(call) != call.flow.member[2]:
            if not value.replicated:
                _fail_other_group(call, value)
            return REPLICATE
        dim = None if op == "all_reduce" else call["dim"] % x.dim()
        _check(call, value, op, dim)
        call.sync = OpSync(op, call.flow.where(), call["grad"])
        if op in ("all_reduce", "all_gather"):
            return REPLICATE
        return lambda out: [Split(dim, (out.size(dim),), None)]

    return rule


def _merge(call: TracedCall):
    """Outputs and log-sum-exps of the same tokens."""
    first, *others = (call.value(x) for x in tensors_in(call.values))
    for value in others:
        if value.replicated != first.replicated or value.place.axis != first.place.axis:
            call.fail(
                f"expected all parts to be {first.place}, as {first.name} is, got {value.place} of "
                f"{value.name}; compute all of them from this rank's tokens"
            )
    return first.place


def _scale_gradient(call: TracedCall):
    value = call.value(call.values[0])
    if value.carries and call["scale"] != 1.0:
        call.fail(
            "the gradients are scaled (average_gradients=True), but the schedule itself sums them; "
            "leave average_gradients out"
        )
    return value.place


RULES = {
    "deepsp.seq_to_heads": _exchange(_TOKENS, _HEADS),
    "deepsp.heads_to_seq": _exchange(_HEADS, _TOKENS),
    "deepsp.seq_to_heads_start": _exchange(_TOKENS, None),
    "deepsp.seq_to_heads_wait": _exchange(None, _HEADS),
    "deepsp.heads_to_seq_start": _exchange(_HEADS, None),
    "deepsp.heads_to_seq_wait": _exchange(None, _TOKENS),
    "deepsp._kv_of_cell": _exchange(_HEADS, _HEADS),
    "deepsp._attention_of_cell": _exchange(_HEADS, _HEADS),
    **dict.fromkeys(_TO_TOKENS, _exchange(_TOKENS, _TOKENS)),
    "deepsp.merge_attention": _merge,
    "deepsp.project_to_heads": _exchange(_TOKENS, _HEADS),
    "deepsp._project_to_heads_start": _exchange(_TOKENS, None),
    "deepsp.heads_to_output": _exchange(_HEADS, _TOKENS),
    "deepsp._heads_to_output_wait": _exchange(None, _TOKENS),
    "deepsp.all_reduce": _collective("all_reduce"),
    "deepsp.all_gather": _collective("all_gather"),
    "deepsp.reduce_scatter": _collective("reduce_scatter"),
    "deepsp.scatter": _collective("scatter"),
    "deepsp._scale_gradient": _scale_gradient,
    "deepsp._check_attention": lambda call: REPLICATE,
}
