"""Modules that work on each token alone, run a tile of tokens at a time."""
