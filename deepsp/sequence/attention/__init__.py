"""Attention over a sequence that is sharded over a group."""

from deepsp.sequence.attention.balance import AttentionPlan
from deepsp.sequence.attention.parts import local_heads

__all__ = ["AttentionPlan", "local_heads"]
