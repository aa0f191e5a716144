"""The comparison of a run on a full batch with a sharded one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepsp.integrations.proof.outcome import Outcome
from deepsp.ranks.groups import Member, device_of, on_all_ranks

_ROUNDING = {torch.float64: 1e-8, torch.float32: 5e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2}
"""By the least precise dtype of the weights, relative to a loss. That of gradients is 20 times as
much, but less than a factor of two."""
_MOST = 0.25

Suspects = Sequence[tuple[str, Callable[[], Outcome]]]
"""Mistakes, and the run of one process that makes each."""


@dataclass
class Difference:
    """What differs first in two runs: "loss", "counted", "gradients", "buffers" or "results", and
    its name."""

    kind: str
    name: str
    alone: Any
    sharded: Any


def raise_unless_alike(
    alone: Outcome | None,
    sharded: Outcome | None,
    dtypes: Iterable[torch.dtype],
    member: Member,
    everyone: Member,
    context: str,
    suspects: Suspects = (),
) -> None:
    """Raises on all ranks if two runs differ by more than rounding on one.

    Args:
        alone: of the run on the full batch; None: this rank has none to compare.
        sharded: of the other.
        dtypes: of the weights.
        member: rank, size and name of the group that shares the batch.
        everyone: of all ranks that make this call.
        context: what was run, and the table of roles.
        suspects: tried one after another, on a difference of losses.
    """
    differs = None if alone is None else difference(alone, sharded, dtypes)
    ranks = on_all_ranks([int(differs is not None)], everyone, device_of(everyone))
    if not any(n for (n,) in ranks):
        return
    wrong = _runs(suspects)  # on all ranks, since weights may be sharded over them
    if differs is None:
        first = next(r for r, (n,) in enumerate(ranks) if n)
        raise ValueError(
            f"expected a step over sharded sequences to be that of one process, but rank {first} "
            f"has found a difference; its error says which. {context}"
        )
    cause = _cause(differs, alone, sharded, member[1], wrong)
    raise ValueError(
        "expected a step over sharded sequences to be that of one process, got another "
        f"{differs.name}: {differs.sharded} in place of {differs.alone}. Likely: {cause}. {context}"
    )


def difference(
    alone: Outcome, sharded: Outcome, dtypes: Iterable[torch.dtype]
) -> Difference | None:
    """The first difference that is larger than rounding."""
    off = max((_ROUNDING.get(d, 0.0) for d in dtypes), default=_ROUNDING[torch.float32])
    if alone.counted == sharded.counted == 0:
        return None  # the loss is 0 of 0
    if alone.counted != sharded.counted:
        name = "number of tokens that count in the loss"
        return Difference("counted", name, alone.counted, sharded.counted)
    if alone.loss is not None and not _are_close(alone.loss, sharded.loss, off):
        return Difference("loss", "loss", *map(_text, (alone.loss, sharded.loss)))
    return _of_tensors("gradients", "gradient of", alone.gradients, sharded.gradients, off) or (
        _of_tensors("buffers", "content of buffer", alone.buffers, sharded.buffers, off)
        or _of_tensors("results", "result", alone.results, sharded.results, off)
    )


def _of_tensors(kind: str, name: str, alone: dict, sharded: dict, off: float) -> Difference | None:
    sizes = {n: (_norm(x), _norm(sharded.get(n))) for n, x in alone.items()}
    largest = max((n for n, _ in sizes.values()), default=0.0)
    for key, x in alone.items():
        y, (before, after) = sharded.get(key), sizes[key]
        if kind == "gradients" and max(before, after) < 1e-5 * largest:
            continue  # nothing but rounding, as of a bias before a norm
        both = x is not None and y is not None and x.shape == y.shape
        if both and bool(x.isnan().any()) and torch.equal(x.isnan(), y.isnan()):
            continue
        apart = _norm(x.double() - y.double()) if both else abs(before - after)
        if not apart <= min(20 * off, _MOST) * max(before, after):
            return Difference(kind, f"{name} {key}", _of_norm(x), _of_norm(y))
    return None


def _norm(x: Tensor | None) -> float:
    return 0.0 if x is None else float(x.detach().double().norm())


def _of_norm(x: Tensor | None) -> str:
    if x is None:
        return "none"
    if x.numel() == 1:
        return _text(x)
    return f"one of norm {_norm(x):.6g}"


def _text(x: Tensor | None) -> str:
    return "none" if x is None else f"{float(x):.6g}"


def _are_close(x: Tensor, y: Tensor | None, off: float) -> bool:
    if y is None:
        return False
    x, y = (t.detach().double().cpu() for t in (x, y))
    return torch.allclose(x, y, rtol=off, atol=off * 1e-2, equal_nan=True)


def _runs(suspects: Suspects) -> list[tuple[str, Tensor | None]]:
    """The loss of each mistake."""
    losses = []
    for name, run in suspects:
        with contextlib.suppress(Exception):  # the model needs what the mistake leaves out
            losses.append((name, run().loss))
    return losses


def _cause(
    differs: Difference,
    alone: Outcome,
    sharded: Outcome,
    ranks: int,
    wrong: Sequence[tuple[str, Tensor | None]],
) -> str:
    """Which of the usual mistakes explains a difference."""
    if differs.kind == "counted":
        return "count: labels are shifted or masked twice, or not at all"
    if differs.kind == "buffers":
        return (
            "buffers: each rank writes it from its own tokens; write it from the sum of all ranks' "
            "numbers, deepsp.sum_over_ranks(x, group)"
        )
    if differs.kind == "results":
        return "count: tokens or rows of some ranks are missing, repeated, or in another order"
    pair = alone.loss, sharded.loss
    if differs.kind == "gradients":
        key = differs.name.removeprefix("gradient of ")
        pair = alone.gradients[key], sharded.gradients.get(key)
    for factor, text in ((ranks, "multiplied by"), (1 / ranks, "divided by")):
        if None not in pair and _are_close(pair[0] * factor, pair[1], 1e-3):
            return (
                f"scale: it is {text} the number of ranks. A loss needs average_gradients=True "
                "where a wrapper averages gradients over the ranks of a sequence, and nowhere else"
            )
    if differs.kind == "gradients":
        return (
            "each rank has the gradient of its own tokens (deepsp.sync_gradients is missing), or "
            "a sum over ranks in a loss of your own drops the gradient of other ranks' tokens"
        )
    for name, loss in wrong:
        if _are_close(loss, sharded.loss, 1e-4) and not _are_close(loss, alone.loss, 1e-4):
            return f"{name}: one process that makes this mistake has the same loss"
    return "none of the usual mistakes (positions, shift, count, scale, aux loss, buffers)"
