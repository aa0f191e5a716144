"""Tensors that transformers records inside a module, such as the logits of routers."""

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
    """The keys of outputs that the running model records in its submodules."""
    collector = _collector()
    lists = None if collector is None else collector.get()
    return tuple(key for key, value in (lists or {}).items() if isinstance(value, list))


@contextlib.contextmanager
def recorded(keys: tuple[str, ...]) -> Iterator[dict[str, list[Tensor]]]:
    """Records these keys' tensors separately, as extra outputs of the current tile."""
    collector = _collector()
    separate: dict[str, list[Tensor]] = {key: [] for key in keys}
    if collector is None:
        yield separate
        return
    token = collector.set(separate or None)
    try:
        yield separate
    finally:
        collector.reset(token)


def record(recorded: dict[str, list[Tensor]]) -> None:
    """Adds separately recorded tensors to the model's record."""
    for key, tensors in recorded.items():
        if tensors:
            _collector().get()[key].extend(tensors)
