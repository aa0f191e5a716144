"""Rotary position embedding: the channels of a head, in pairs, turned by the token's position."""

from __future__ import annotations

import torch
from torch import Tensor


def angles(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple:
    """Cosine and sine [..., S, 1, head_dim / 2] of positions [..., S]: pair i turns by
    ``position * theta ** (-2 i / head_dim)``. In float32, or float64 where ``dtype`` is."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    channel = torch.arange(0, head_dim, 2, device=positions.device, dtype=wide) / head_dim
    turned = positions.to(wide)[..., None, None] * theta**-channel
    return turned.cos(), turned.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x [B, S, H, D] rotated. Pairs are channels (2i, 2i + 1) if ``interleaved``, else
    (i, i + D / 2).

    The embedding is that of RoFormer (Su et al., 2021, arXiv:2104.09864); the half-rotated form
    is that of GPT-NeoX.
    """
    a, b = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    turned = (a * cos - b * sin, a * sin + b * cos)
    whole = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return whole.type_as(x)
