"""A schedule that makes a model parallel, module by module."""

from deepsp.schedule import methods  # noqa: F401  (they register themselves)
from deepsp.schedule.build import build
from deepsp.schedule.placement import PARTIAL, REPLICATE, Partial, Replicate, Shard
from deepsp.schedule.registry import Effect, Follow, register_shard_method
from deepsp.schedule.schedule import Schedule, create_schedule

__all__ = [
    "PARTIAL",
    "REPLICATE",
    "Effect",
    "Follow",
    "Partial",
    "Replicate",
    "Schedule",
    "Shard",
    "build",
    "create_schedule",
    "register_shard_method",
]
