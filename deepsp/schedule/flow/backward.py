"""The tape, read backwards: what each gradient will be on the ranks.

A replicated tensor's gradient is "replicated" (the full gradient on each rank) or "partial" (the
ranks' gradients are to be summed). What makes something sharded or partial of it gives it a partial
gradient; what makes something replicated of it passes on the state of that gradient.
"""

from __future__ import annotations

from typing import Any

from deepsp.schedule.flow.values import Entry, Trusted, Value

_SAID = {
    "replicated": "Replicate (the full gradient on every rank)",
    "partial": "Partial (a term of the sum over the ranks)",
}
_BWD_POST = "sync(mode='bwd_post', sync_op_or_fn='all_reduce')"


def walk(tape: list[Entry], outputs: list[Value]) -> dict[Any, str]:
    """Finds the state of every value's gradient.

    Returns:
        The state of what each all_gather and all_reduce on the tape made; None where no gradient
        arrives.

    Raises:
        ValueError: a tensor gets both kinds of gradients, or a sync's ``grad`` isn't what arrives.
    """
    end = Entry("what follows", "the model's end", [], [])
    for value in outputs:
        if value.carries:
            _reach(value, "replicated", end)
    found: dict[Any, str] = {}
    for entry in reversed(tape):
        arriving = [o for o in entry.outputs if o.state is not None]
        if entry.sync is not None:
            _sync(entry, arriving, found)
            continue
        for out in arriving:
            for value in entry.inputs:
                if value.carries:
                    _reach(value, out.state if out.replicated else "partial", entry)
    return found


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
            f"the gradient of {value.name} is {_SAID['replicated']} from {full}, but "
            f"{_SAID['partial']} from {part}, and the two can't be added; {fix}"
        )


def _sync(entry: Entry, arriving: list[Value], found: dict[Any, str]) -> None:
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
                f"{entry}: expected a Partial gradient, got {_SAID['replicated']} from {out.why}, "
                "whose sum over the ranks would be P times too large; leave this sync out"
            )
        if value.carries:
            _reach(value, "replicated", entry)
        return
    if sync.op in ("all_gather", "all_reduce"):
        if out is None:
            found.setdefault(sync, None)
            return
        if grad is not None and grad != out.state:
            raise ValueError(
                f"{entry}: expected grad={out.state!r} or None, since the gradient of its output "
                f"is {_SAID[out.state]} from {out.why}, got {grad!r}"
            )
        before = found.get(sync)
        if before is not None and before != out.state:
            raise ValueError(
                f"{entry}: expected the same gradient in every call, but the gradient of its "
                f"output is {_SAID[out.state]} from {out.why}, and {_SAID[before]} in another call"
            )
        found[sync] = out.state
    if out is not None and value.carries:
        # Only scatter takes a replicated tensor: its backward gathers the parts, or doesn't.
        _reach(value, grad or "replicated", entry)
