"""What a training step needs, said before it runs."""

from deepsp.planning.memory import MemoryPlan

__all__ = ["MemoryPlan"]
