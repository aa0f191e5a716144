"""Finds the row of :mod:`deepsp.placement` for an op's operands, or refuses the op and says what to
do."""

from __future__ import annotations

from typing import NoReturn

from torch import Tensor

from deepsp import placement
from deepsp.placement import ANYTHING, MEAN, SUM, Row, Rule
from deepsp.schedule.flow.values import TracedCall, TracedPlacement, Value
from deepsp.schedule.placement import PARTIAL, REPLICATE

_ADVICE = {
    "scaled_dot_product_attention": "use parallelize_attention (deepsp.DistributedAttention), or "
    "gather the tokens with all_gather before the projections",
    "embedding": "shard an nn.Embedding through the schedule, which masks the ids of other ranks",
    **dict.fromkeys(
        ("layer_norm", "rms_norm", "group_norm"),
        "shard the norm through the schedule, which takes its statistics over the group",
    ),
}


def place_of(call: TracedCall) -> TracedPlacement:
    """The place of all results.

    Raises:
        ValueError: no row has the operands' places.
    """
    rule = placement.find(call.target)
    if rule is None:
        value = next(v for _, v in call.tensors if not v.replicated)
        fix = "fwd_post all_reduce" if value.partial else "fwd_pre all_gather"
        call.fail(
            f"what it does to {value.name}, which is {value.place}, isn't known; make it Replicate "
            f"before (sync with {fix}), or shard a module around it with a registered method"
        )
    rows = rule.rows(call)
    fits = [r for r in rows if all(_fits(t, v, r) for t, v in call.tensors) and _deciding(call, r)]
    certain = [r for r in fits if all(v.place.axis is not None for _, v in call.tensors if v.split)]
    if certain:
        row = certain[0]
        _check_parts(call, row)
        return _outputs(call, rule, row)
    unknown = [t for t, v in call.tensors if v.split and v.place.axis is None]
    if unknown and fits:
        return _unknown(call, rule, rows, fits, unknown)
    _refuse(call, rule, rows)


def _fits(tensor: Tensor, value: Value, row: Row) -> bool:
    place = row.place(tensor)
    if place is ANYTHING or (value.uniform and not isinstance(place, str)):
        return not (value.split and value.place.axis != place) or place is ANYTHING
    if value.split:
        return isinstance(place, int) and value.place.axis in (None, place)
    return place == (SUM if value.partial else None)


def _first(call: TracedCall) -> tuple[Tensor, Value]:
    """The operand that errors name: a sharded one, with a known axis if possible."""
    sharded = [(t, v) for t, v in call.tensors if v.split]
    return next((x for x in sharded if x[1].place.axis is not None), sharded[0])


def _check_parts(call: TracedCall, row: Row) -> None:
    sharded = [(t, v) for t, v in call.tensors if v.split and row.place(t) is not ANYTHING]
    for t, v in sharded[1:]:
        first, reference = sharded[0]
        grouped = call.name == "scaled_dot_product_attention"  # grouped heads: equally many parts
        alike = len if grouped else tuple
        if alike(v.place.parts) != alike(reference.place.parts):
            call.fail(
                f"{reference.name} is {reference.place}, of local shape {list(first.shape)}, but "
                f"{v.name} is {v.place}, of local shape {list(t.shape)}: expected the same parts, "
                f"got {list(reference.place.parts)} and {list(v.place.parts)}; gather one of them "
                "with all_gather"
            )


def _deciding(call: TracedCall, row: Row) -> list[Value]:
    """The sharded operands from which a row's result takes its parts: not those that may have any
    placement, unless there are no others (a copy's destination)."""
    sharded = [(row.place(t), v) for t, v in call.tensors if v.split]
    read = [v for place, v in sharded if place is not ANYTHING]
    return (
        read
        or [v for _, v in sharded if row.outputs is None or v.place.axis in (None, row.outputs)]
        or [v for _, v in call.tensors if v.partial]
    )


def _outputs(call: TracedCall, rule: Rule, row: Row) -> TracedPlacement:
    if row.outputs is None:
        return REPLICATE
    if isinstance(row.outputs, int):
        return _deciding(call, row)[0].place.at(row.outputs)
    if row.outputs == SUM:
        return PARTIAL
    _refuse_combined(call, rule, row.outputs)


def _refuse_combined(call: TracedCall, rule: Rule, place: str) -> NoReturn:
    _, value = _first(call)
    if place == MEAN and call["reduction"] is not None:
        call.fail(
            f"{value.name} is {value.place}, and its local mean isn't the mean of the full tensor; "
            "use deepsp.cross_entropy, whose mean is over the tokens of all ranks, or sync it with "
            "all_gather before"
        )
    more = " (a sum can be: it is Partial then)" if place == MEAN else ""
    call.fail_split(value, f"{rule.why}{more}")


def _unknown(call: TracedCall, rule: Rule, rows, fitting, unknown) -> TracedPlacement:
    """The result of operands sharded along an unknown dimension: unknown, too, if every dimension
    has a row."""
    x = unknown[0]
    value = call.value(x)
    if any(v.split and v.place.axis is not None for _, v in call.tensors):
        dims = {r.place(x) for r in fitting if x.size(r.place(x)) > 1}
        if len(dims) != 1:
            call.fail_split(value, "it is combined with another sharded tensor")
        row = next(r for r in fitting if r.place(x) in dims)
        return _outputs(call, rule, row)
    if any(y.shape != x.shape for y in unknown):
        call.fail_split(value, "it is combined with another sharded tensor")
    for dim in range(x.dim()):
        at_dim = [r for r in rows if r.place(x) == dim]
        if not at_dim:
            call.fail_split(value, rule.why or "it is combined with another tensor")
        # A replicated operand of this length shows that x isn't sharded here.
        for t, v in call.tensors:
            place = at_dim[0].place(t)
            ones = x.size(dim) == 1 and isinstance(place, int) and t.size(place) > 1
            if v.replicated and not v.uniform and ones:
                call.fail_split(value, f"it is combined with {v.name}, which is Replicate")
    places = {r.outputs for r in fitting}
    if places == {SUM}:
        return PARTIAL
    if any(isinstance(p, str) for p in places):
        call.fail_split(value, rule.why)
    return value.place


def _refuse(call: TracedCall, rule: Rule, rows: list[Row]) -> NoReturn:
    partial = next(((t, v) for t, v in call.tensors if v.partial), None)
    if partial is not None:
        _refuse_partial(call, *partial, rows)
    first, named = _first(call)
    advice = _ADVICE.get(call.name, "")
    axis = named.place.axis
    fitting = [
        r for r in rows if isinstance(r.place(first), int) and axis in (None, r.place(first))
    ]
    if not fitting:
        why = rule.why or "what it does along the sharded dimension isn't known"
        if advice:
            call.fail(f"{named.name} is {named.place}, and {why}; {advice}")
        call.fail_split(named, why)
    row = min(fitting, key=lambda r: sum(not _fits(t, v, r) for t, v in call.tensors))
    other, value = next((t, v) for t, v in call.tensors if not _fits(t, v, row))
    wanted = row.place(other)
    have = f"{call.role(first)} ({named.name}) is {named.place}, of local shape {list(first.shape)}"
    got = f"{call.role(other)} ({value.name}) is {value.place}, of shape {list(other.shape)}"
    if value.split:
        tile = any(isinstance(r.outputs, int) for r in fitting) and wanted is None
        text = (
            "each rank would have but a tile of the result"
            if tile
            else f"expected {call.role(other)} to be {_printed(wanted)}"
        )
        call.fail(f"{have}, but {got}: {text}; gather one of them with all_gather")
    if value.replicated and wanted == SUM:
        call.fail(
            f"{got}, and every rank would add it to its term of a sum, so that it would count P "
            "times; add it after the reduction (a sharded layer's own, or bias=None)"
        )
    if value.replicated and isinstance(wanted, int):
        fix = (
            "gather the first with all_gather or split the second with scatter (a tensor made from "
            "local sizes, such as positions, must begin at this rank's place; labels: deepsp.shard)"
        )
        if call.role(other) in ("weight", "bias"):
            fix = (
                f"shard {call.role(other)} along axis {wanted}, too, or gather {call.role(first)} "
                "with all_gather"
            )
        call.fail(f"{have}, but {got}, the same on every rank along axis {wanted}; {fix}")
    call.fail(f"{have}, but {got}: expected {_printed(wanted)}; gather one of them with all_gather")


def _printed(place) -> str:
    return "Replicate" if place is None else "Partial" if place == SUM else f"Shard({place})"


def _refuse_partial(call: TracedCall, tensor: Tensor, value: Value, rows: list[Row]) -> NoReturn:
    sums = [r for r in rows if r.place(tensor) == SUM]
    others = [(t, v) for t, v in call.tensors if t is not tensor]
    sharded = next((v for _, v in others if v.split), None)
    if sharded is not None:
        call.fail_partial(value, f"it is combined with {sharded.name}, which is {sharded.place}")
    number = next((x for x in (call["other"], call["self"]) if isinstance(x, (int, float))), None)
    if not sums and number is not None and call.name in ("add", "sub", "rsub"):
        call.fail_partial(value, f"{number}, which is Replicate, would count P times")
    if sums:
        other, partial = next((t, v) for t, v in others if not _fits(t, v, sums[0]))
        if sums[0].place(other) == SUM:
            role = call.role(other)
            what = f"{partial.name}" if role in ("self", "other") else f"{role} ({partial.name})"
            call.fail_partial(value, f"{what}, which is Replicate, would count P times")
        call.fail_partial(value, f"{partial.name} is Partial, too, and this isn't linear in both")
    call.fail_partial(value, "this isn't linear")
