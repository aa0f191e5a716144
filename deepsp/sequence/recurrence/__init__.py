"""Recurrences, such as linear attention, over a sharded sequence."""
