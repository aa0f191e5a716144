"""The tape, read backwards: what each gradient will be on the ranks.

A whole tensor's gradient is "replicated" (whole, the same on each rank) or "partial" (the ranks'
gradients are to be summed). What makes something sharded or partial of it gives it a share only;
what makes something whole of it passes on the state of that gradient.
"""

from __future__ import annotations

from typing import Any

from deepsp.schedule.flow.values import Entry, Trusted, Value

_SAID = {
    "replicated": "the whole one, the same on each rank,",
    "partial": "this rank's share of one, to be summed over the ranks,",
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
                    _reach(value, out.state if out.whole else "partial", entry)
    return found


def _reach(value: Value, state: str, entry: Entry) -> None:
    if not value.whole:
        state = "own"
    if value.state is None:
        value.state, value.why = state, entry
    elif value.state != state:
        whole, share = (entry, value.why) if state == "replicated" else (value.why, entry)
        if value.leaf is not None:
            fix = (
                f"use it on alike tensors only, or put {_BWD_POST} where the share comes from, or "
                "keep two of it"
            )
        else:
            fix = f"put {_BWD_POST} at {share.module}, so that the shares are summed there"
        raise ValueError(
            f"the gradient of {value.name} is {_SAID['replicated']} from {whole}, but "
            f"{_SAID['partial']} from {share}: their sum would be neither; {fix}"
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
        if out.whole and out.state == "replicated":
            raise ValueError(
                f"{entry}: the gradient that arrives is {_SAID['replicated']} from {out.why}; its "
                f"sum over the ranks would be P times too large: leave this sync out"
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
                f"{entry}: grad is {grad!r}, but the gradient of what it makes is "
                f"{_SAID[out.state]} from {out.why}; grad={out.state!r} is right (or none: it is "
                "found)"
            )
        before = found.get(sync)
        if before is not None and before != out.state:
            raise ValueError(
                f"{entry}: it is called several times, and the gradient of what it makes is "
                f"{_SAID[out.state]} from {out.why}, but {_SAID[before]} in another call"
            )
        found[sync] = out.state
    if out is not None and value.carries:
        # Only scatter takes something whole: its backward gathers the parts, or doesn't.
        _reach(value, grad or "replicated", entry)
