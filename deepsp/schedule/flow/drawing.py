"""Records which modules draw random numbers, for replicated tensors or for sharded ones."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from deepsp.ranks import randomness
from deepsp.schedule.flow.values import TracedCall

_DROPOUTS = {
    "dropout",
    "alpha_dropout",
    "feature_alpha_dropout",
    "feature_dropout",
    "rrelu",
    "native_dropout",
    "rrelu_with_noise",
}


def drawn_since(before: list[Tensor]) -> bool:
    """Whether random numbers were drawn since the generators had these states."""
    with torch._C.DisableTorchFunction():
        after = randomness.states()
        return any(not torch.equal(a, b) for a, b in zip(before, after, strict=False))


def _draws(call: TracedCall) -> bool:
    """Whether an op draws from the default generators, also if it draws no elements here."""
    if call["generator"] is not None or call.target is None:
        return False
    if call.name in _DROPOUTS:
        p, training = call["p"], call["train"] or call["training"]
        return bool(training) and (p is None or p > 0)
    if call.name in ("scaled_dot_product_attention", "deepsp.distributed_attention"):
        return (call["dropout_p"] or 0.0) > 0
    return torch.Tag.nondeterministic_seeded in call.target.tags


def note(flow, call: TracedCall, before: list[Tensor]) -> bool:
    """Records that a module draws random numbers; returns whether it does."""
    if not _draws(call) and not drawn_since(before):
        return False
    _note(flow, call)
    return True


def _note(flow, call: TracedCall) -> None:
    kind = "sharded" if any(v.split or v.item for _, v in call.tensors) else "replicated"
    if randomness.inside():
        if kind == "replicated" and call.tensors and call.name in _DROPOUTS:
            call.fail(
                f"{call.tensors[0][1].name} is {call.tensors[0][1].place}, but random numbers "
                "differ by rank in sharded_randomness"
            )
        return
    module = flow.stack[-1] if flow.stack else flow.model
    had = flow.findings.streams.get(module)
    if had is not None and had != kind:
        call.fail(
            "this module draws random numbers both for Replicate tensors, the same on every rank, "
            "and for Shard ones, which differ by rank; put one of the two into a module of its own "
            "(nn.Dropout), or into deepsp.sharded_randomness(group)"
        )
    flow.findings.streams[module] = kind
    flow.drawn_in.setdefault(module, set()).update(flow.stack[:-1])


def nested(flow) -> set[nn.Module]:
    """The modules that draw for replicated tensors and were called inside one that draws for
    sharded tensors."""
    streams = flow.findings.streams
    return {
        module
        for module, containers in flow.drawn_in.items()
        if streams[module] == "replicated" and any(streams.get(m) == "sharded" for m in containers)
    }
