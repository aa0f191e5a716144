"""Rotary position embedding: rotates pairs of a head's channels by the token's position."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from deepsp.data.borders import Segments


def angles(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple:
    """Cosine and sine [..., S, 1, head_dim / 2] of positions [..., S]: pair i rotates by
    ``position * theta ** (-2 i / head_dim)``. In float64 for float64, else in float32."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    channel = torch.arange(0, head_dim, 2, device=positions.device, dtype=wide) / head_dim
    turned = positions.to(wide)[..., None, None] * theta**-channel
    return turned.cos(), turned.sin()


def angles_of(
    x: Tensor,
    total: int,
    position_ids: Tensor | None,
    rotary: Callable | tuple[Tensor, Tensor] | None,
    *,
    theta: float | None,
    head_dim: int,
    interleaved: bool,
    look: bool,
    documents: Tensor | Segments | None = None,
) -> tuple[Tensor, Tensor] | None:
    """Cosine and sine for the ``total`` tokens of the full sequence, as from :func:`angles`, from a
    layer's arguments; None: no rotary embedding. Without position_ids, a tree's ``documents`` say
    where a token is in its sequences.

    Raises:
        ValueError: arguments that don't fit each other or the sequence.
    """
    _check_one(theta, rotary)
    used = theta is not None or callable(rotary)
    if not used and position_ids is not None:
        raise ValueError(
            "expected no position_ids, which nothing uses: "
            + ("rope_theta is None" if rotary is None else "rotary is (cos, sin)")
        )
    if used and position_ids is None:
        position_ids = torch.arange(total, device=x.device)
        if isinstance(documents, Segments):
            own = documents.positions[0]
            position_ids = F.pad(own, (0, total - len(own))).to(x.device)
        elif documents is not None and documents.dim() == 2 and documents.size(1) == 3:
            raise ValueError(
                "expected position_ids with documents that have parents, got none; pass "
                "documents=deepsp.Segments(...), which has them, or position_ids"
            )
    elif used and (
        position_ids.dim() not in (1, 2)
        or position_ids.size(-1) != total
        or (position_ids.dim() == 2 and position_ids.size(0) not in (1, x.size(0)))
    ):
        raise ValueError(
            f"expected position_ids of the full sequence, [{total}] or [batch, {total}], got "
            f"shape {tuple(position_ids.shape)}; deepsp.unshard(position_ids, 1) gathers the "
            "local ones"
        )
    if theta is not None:
        return angles(position_ids, head_dim, theta, x.dtype)
    if callable(rotary):
        rotary = rotary(x, position_ids if position_ids.dim() == 2 else position_ids[None])
    if rotary is None:
        return None
    return of_pair(rotary, x.size(0), total, head_dim, interleaved, look)


def check(theta: float | None, rotary: Callable | tuple | None, head_dim: int) -> None:
    """Raises ValueError for arguments of a layer that don't fit each other."""
    if theta is not None and head_dim % 2 != 0:
        raise ValueError(f"expected head_dim to be even for a rotary embedding, got {head_dim}")
    _check_one(theta, rotary)
    if rotary is not None and not callable(rotary):
        _check_pair(rotary)


def _check_one(theta: float | None, rotary: Callable | tuple | None) -> None:
    if theta is not None and rotary is not None:
        raise ValueError(f"expected rope_theta or rotary, got both (rope_theta is {theta})")


def _check_pair(pair) -> None:
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
    """Cosine and sine [1 or B, S, 1, R / 2], as from :func:`angles`, from a model's cos and sin [S,
    R] or [1 or B, S, R], which have each value twice. ``look``: checks that.

    Raises:
        ValueError: wrong shapes, or the two copies differ.
    """
    _check_pair(pair)
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
    """Rotates x [B, S, H, D] in its first R channels; cos and sin have R / 2. Pairs are channels
    (2i, 2i + 1) if ``interleaved``, else (i, i + R / 2).

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
