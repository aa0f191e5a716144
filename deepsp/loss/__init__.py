"""Losses of the full sequence from each rank's tokens."""
