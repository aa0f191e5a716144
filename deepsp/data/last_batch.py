"""The local batch that was handed out last in this process. By it, a model that gets a rank's
tokens is told from one that gets full rows, and positions that count from 0 on each rank from those
of a batch that was sharded."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deepsp.data.roles import Roles


class _Last:
    tokens: weakref.ref | Tensor | None = None
    """Ids, or a weak reference to embeddings, which are large."""
    is_part: bool = False
    """Whether they are fewer than those of the full batch."""
    positions: Tensor | None = None
    version: int = 0
    """That of ``positions``, which counts changes in place."""
    first: int = -1
    """The first of them, where they count the full sequence's tokens; -1: not known."""
    lens: Sequence[int] = ()
    """The number of tokens of each rank."""
    folded: weakref.ref | Tensor | None = None
    """Those of a folded batch, like ``tokens``."""


_last = _Last()


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Forgets what is handed out in this context."""
    before = vars(_last).copy()
    try:
        yield
    finally:
        vars(_last).clear()
        vars(_last).update(before)


def remember(
    local: Mapping[str, Any], roles: Roles, lens: Sequence[int], *, first: int = -1
) -> None:
    """Called with each local batch that is handed out. ``roles``: of the full batch; ``first``:
    this rank's first position, if they are known to count the full sequence's tokens."""
    part = local[roles.tokens]
    _last.is_part, _last.tokens = part.size(roles.dim) < roles.length, None
    _last.folded = None
    if _last.is_part or 0 in lens:
        _last.tokens = part if roles.tokens == "input_ids" else weakref.ref(part)
        _last.lens = lens
    positions = _last.positions = local.get("position_ids")
    _last.first = -1
    if positions is not None and not positions.is_inference():
        _last.first, _last.version = first, positions._version


def remember_fold(local: Mapping[str, Any], name: str) -> None:
    """Called after :func:`remember` with a batch that is folded. ``name``: of its tokens."""
    part = local[name]
    _last.folded = part if name == "input_ids" else weakref.ref(part)


def is_folded(tokens: Tensor | None) -> bool:
    """Whether these are the local tokens of the last batch, and it was folded."""
    return _are(tokens, _last.folded)


def has_positions(positions: Tensor) -> bool:
    """Whether these are the positions of the last batch that was sharded."""
    if _last.positions is None:
        return False
    if _last.positions is positions:  # on a GPU, the host would wait to compare them
        return True
    last = _last.positions.to(positions.device)
    return last.shape[-1:] == positions.shape[-1:] and bool((last == positions).all())


def first_of(positions: Tensor | None) -> int:
    """The first of these positions, if they are the last batch's and count the tokens of its full
    sequence; else -1. Nothing is read of the tensor."""
    is_last = positions is not None and _last.positions is positions
    return _last.first if is_last and _last.version == positions._version else -1


def has_tokens(tokens: Tensor | None) -> bool:
    """Whether these are the local tokens of the last batch, and not all of them: the same tensor,
    or the same ids."""
    return _last.is_part and _are(tokens, _last.tokens)


def _are(tokens: Tensor | None, last: weakref.ref | Tensor | None) -> bool:
    if tokens is None or last is None:
        return False
    if isinstance(last, weakref.ref):
        return last() is tokens
    if last is tokens:
        return True
    if last.shape != tokens.shape or last.dtype != tokens.dtype:
        return False
    with torch._C.DisableTorchFunction():  # a schedule's dry run doesn't compare these tokens
        return bool((last.to(tokens.device) == tokens).all())


def lens_with(tokens: Tensor | None) -> Sequence[int]:
    """The number of tokens of each rank in the last batch, if these are its local tokens; else
    none."""
    return _last.lens if _are(tokens, _last.tokens) else ()
