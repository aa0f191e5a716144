"""Modules that work on each token alone and run a tile of tokens at a time."""
