"""Walks the tape backwards: the placement of each gradient.

A replicated tensor's gradient is "replicated" (the full gradient on each rank) or "partial" (to be
summed over the ranks). An op with a sharded or partial result gives its replicated inputs a partial
gradient; an op with a replicated result passes the state of its gradient on.
"""

from __future__ import annotations

from typing import Any

from deepsp.schedule.flow.values import Entry, Trusted, Value

_GRADS = {
    "replicated": "Replicate (the full gradient on every rank)",
    "partial": "Partial (a term of the sum over the ranks)",
}
_BWD_POST = "sync(mode='bwd_post', sync_op_or_fn='all_reduce')"


def walk(tape: list[Entry], outputs: list[Value]) -> dict[Any, str]:
    """Finds the state of every value's gradient.

    Returns:
        By sync, the state of the gradient of an all_gather's or all_reduce's output; None if it
        gets no gradient.

    Raises:
        ValueError: a tensor gets both kinds of gradients, or a sync's ``grad`` is wrong.
    """
    end = Entry("what follows", "the model's end", [], [])
    for value in outputs:
        if value.carries:
            _reach(value, "replicated", end)
    states: dict[Any, str] = {}
    for entry in reversed(tape):
        arriving = [o for o in entry.outputs if o.state is not None]
        if entry.sync is not None:
            _sync(entry, arriving, states)
            continue
        for out in arriving:
            for value in entry.inputs:
                if value.carries:
                    _reach(value, out.state if out.replicated else "partial", entry)
    return states


def _reach(value: Value, state: str, entry: Entry) -> None:
    if not value.replicated:
        state = "own"
    if value.state is None:
        value.state, value.why = state, entry
    elif value.state != state:
        full, part = (entry, value.why) if state == "replicated" else (value.why, entry)
        if value.leaf is not None:
            fix = (
                "use it on tensors of one placement only, put "
                f"{_BWD_POST} where the Partial gradient comes from, or keep two copies of it"
            )
        else:
            fix = f"put {_BWD_POST} at {part.module}, which sums the Partial gradient there"
        raise ValueError(
            f"the gradient of {value.name} is {_GRADS['replicated']} from {full}, but "
            f"{_GRADS['partial']} from {part}, and the two can't be added; {fix}"
        )


def _sync(entry: Entry, arriving: list[Value], states: dict[Any, str]) -> None:
    sync, (value,) = entry.sync, entry.inputs
    grad = getattr(sync, "grad", None)
    out = arriving[0] if arriving else None
    if isinstance(sync, Trusted):
        if out is not None and value.carries:
            _reach(value, "replicated", entry)
        return
    if sync.mode == "bwd_post":
        if out is None:
            return
        if out.replicated and out.state == "replicated":
            raise ValueError(
                f"{entry}: expected a Partial gradient, got {_GRADS['replicated']} from {out.why}, "
                "whose sum over the ranks would be P times too large; leave this sync out"
            )
        if value.carries:
            _reach(value, "replicated", entry)
        return
    if sync.op in ("all_gather", "all_reduce"):
        if out is None:
            states.setdefault(sync, None)
            return
        if grad is not None and grad != out.state:
            raise ValueError(
                f"{entry}: expected grad={out.state!r} or None, since the gradient of its output "
                f"is {_GRADS[out.state]} from {out.why}, got {grad!r}"
            )
        before = states.get(sync)
        if before is not None and before != out.state:
            raise ValueError(
                f"{entry}: expected the same gradient in every call, but the gradient of its "
                f"output is {_GRADS[out.state]} from {out.why}, and {_GRADS[before]} in "
                "another call"
            )
        states[sync] = out.state
    if out is not None and value.carries:
        # Only scatter takes a replicated tensor; its backward may gather the parts.
        _reach(value, grad or "replicated", entry)
