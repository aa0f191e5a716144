"""Layers on a sharded sequence: attention, recurrences, experts; and which layers need nothing."""
