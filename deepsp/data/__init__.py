"""Batches: compared across a group's ranks, sharded over them, loaded and dealt out."""
