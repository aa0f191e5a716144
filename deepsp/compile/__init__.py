"""What torch.compile is told of the ops, a backend that shards models, and passes over graphs.

``parallelize``, ``explain``, ``rule`` and ``CannotShard``: :mod:`deepsp.compile.sharding`,
:mod:`deepsp.compile.explanation`, :mod:`deepsp.compile.rules`, :mod:`deepsp.compile.messages`.
``fuse_gather_cast``, ``FuseGatherCast``, ``regather_in_backward``, ``RegatherInBackward``: see
:mod:`deepsp.compile.gather_cast` and :mod:`deepsp.compile.regather`. They are imported on first
use: they need Inductor, which takes longer to import than deepsp.
"""

import importlib

_HOMES = {
    "CannotShard": "messages",
    "explain": "explanation",
    "parallelize": "sharding",
    "rule": "rules",
    "FuseGatherCast": "gather_cast",
    "fuse_gather_cast": "gather_cast",
    "RegatherInBackward": "regather",
    "regather_in_backward": "regather",
}


def __getattr__(name: str):
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
