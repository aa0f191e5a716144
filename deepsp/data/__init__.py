"""Batches: compared across the ranks of a group, sharded over them, loaded and dealt out."""
