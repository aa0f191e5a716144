"""Predicts the memory of a training step before it runs."""

from deepsp.memory.planning.memory import MemoryPlan

__all__ = ["MemoryPlan"]
