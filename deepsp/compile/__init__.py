"""deepsp's ops under torch.compile, a backend that shards models, and passes over graphs.

``lowering``: the ops as Inductor sees them, and their order. ``sharding``: the backend, which
rewrites a graph into one rank's part. ``passes``: for graphs that gather weights. Modules that need
Inductor are imported on first use: Inductor takes longer to import than deepsp.
"""

import importlib

_HOMES = {
    "CannotShard": "sharding.report",
    "explain": "sharding.explanation",
    "parallelize": "sharding.backend",
    "rule": "sharding.rules",
    "FuseGatherCast": "passes.fuse_gather_cast",
    "fuse_gather_cast": "passes.fuse_gather_cast",
    "RegatherInBackward": "passes.regather",
    "regather_in_backward": "passes.regather",
}


def __getattr__(name: str):
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
