"""Diffusion transformers of diffusers over sharded sequences of image, video and text tokens.

A plan, mostly the model's own (``_cp_plan``), says which tensors are sharded and where the output
is gathered. Hooks of this model do that, and its attention processors get a backend of diffusers
that attends over all ranks' tokens."""

from deepsp.integrations.diffusers.sharding import disable, enable

__all__ = ["disable", "enable"]
