"""Less memory: checkpoints, offload, tiles, and plans of it."""
