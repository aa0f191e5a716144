"""What transformers records within a module: the logits of routers, say."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from contextvars import ContextVar

from torch import Tensor


def _collector() -> ContextVar | None:
    module = sys.modules.get("transformers.utils.output_capturing")
    return getattr(module, "_active_collector", None)


def recording() -> tuple[str, ...]:
    """What the model that is being called collects of its submodules' outputs."""
    collector = _collector()
    found = None if collector is None else collector.get()
    return tuple(key for key, value in (found or {}).items() if isinstance(value, list))


@contextlib.contextmanager
def recorded(keys: tuple[str, ...]) -> Iterator[dict[str, list[Tensor]]]:
    """Collects these apart in here: of one tile, they are further outputs of its."""
    collector = _collector()
    apart: dict[str, list[Tensor]] = {key: [] for key in keys}
    if collector is None:
        yield apart
        return
    token = collector.set(apart or None)
    try:
        yield apart
    finally:
        collector.reset(token)


def record(found: dict[str, list[Tensor]]) -> None:
    """Hands the model what was collected apart."""
    for key, tensors in found.items():
        if tensors:
            _collector().get()[key].extend(tensors)
