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


def check_pair(pair) -> None:
    """Raises ValueError unless it is (cos, sin)."""
    if (
        not isinstance(pair, (tuple, list))
        or len(pair) != 2
        or not all(isinstance(x, Tensor) for x in pair)
    ):
        raise ValueError(
            "expected rotary to be a callable (x, position_ids) -> (cos, sin) or the tensors (cos, "
            f"sin), got {type(pair).__name__}"
        )


def of_pair(
    pair: tuple[Tensor, Tensor],
    batch: int,
    total: int,
    head_dim: int,
    interleaved: bool,
    look: bool,
) -> tuple[Tensor, Tensor]:
    """Cosine and sine [1 or B, S, 1, R / 2], as :func:`angles` has them, from a model's cos and sin
    [S, R] or [1 or B, S, R], where each is there twice. ``look``: compares the two.

    Raises:
        ValueError: other shapes, or what is there twice differs.
    """
    check_pair(pair)
    halves = []
    for name, x in zip(("cos", "sin"), pair, strict=True):
        shape = list(x.shape)
        if (
            x.dim() not in (2, 3)
            or shape[-2] != total
            or (x.dim() == 3 and shape[0] not in (1, batch))
            or shape[-1] % 2 != 0
            or not 0 < shape[-1] <= head_dim
            or x.shape != pair[0].shape
        ):
            raise ValueError(
                f"expected {name} of rotary to have shape [{total}, R] or [batch, {total}, R], for "
                f"the full sequence and R rotated channels, even, at most {head_dim} and the same "
                f"for cos and sin, got {shape}"
            )
        x = x if x.dim() == 3 else x[None]
        one, other = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
        if look and not torch.equal(one, other):
            raise ValueError(
                f"expected {name} of rotary to have each value twice, once for each channel of a "
                "pair, but "
                + ("channels 2i and 2i + 1" if interleaved else "its two halves")
                + f" differ (shape {shape}); rope_interleaved says which channels are pairs"
            )
        halves.append(one[:, :, None])
    return halves[0], halves[1]


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x [B, S, H, D] rotated in its first R channels, where cos and sin have R / 2. Pairs are
    channels (2i, 2i + 1) if ``interleaved``, else (i, i + R / 2).

    The embedding is that of RoFormer (Su et al., 2021, arXiv:2104.09864); the half-rotated form
    is that of GPT-NeoX.
    """
    turning = 2 * cos.size(-1)
    if turning < x.size(-1):
        turned = rotate(x[..., :turning], cos, sin, interleaved)
        return torch.cat([turned, x[..., turning:]], -1)
    a, b = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    turned = (a * cos - b * sin, a * sin + b * cos)
    result = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return result.type_as(x)
