"""Attention to several sets of keys, merged."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor


def merge_attention(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """What the same queries give with several sets of keys, as attention to all of the keys.

    Each part is an output and the log-sum-exp of its scores, which say how much it weighs (Milakov
    and Gimelshein, arXiv:1805.02867). One key is a part, too: its value and its score. ::

        trunk = deepsp.distributed_attention(q, k, v, is_causal=True, return_lse=True)
        own = more_v, (q * more_k).sum(-1) * scale  # a key of each token's own
        out, lse = deepsp.merge_attention([trunk, own])

    Args:
        parts: pairs of an output [..., D], floating point, and its log-sum-exp [...], all of one
            shape. Outputs of several dtypes are promoted, as by ``torch.cat``; log-sum-exps become
            float32 (float64 for float64). -inf: no key is in this part, and what its output says,
            even NaN, doesn't count.

    Returns:
        The output [..., D], 0 where no part has a key, in the dtype of the parts' outputs; and its
        log-sum-exp [...]. Both have gradients, which are exact.

    Raises:
        ValueError: there is no part, or one that isn't a pair of tensors; or shapes differ.
    """
    parts = list(parts)
    for part in parts or [None]:
        pair = isinstance(part, (tuple, list)) and len(part) == 2
        if not pair or not all(isinstance(x, Tensor) for x in part):
            raise ValueError(
                "expected parts to be pairs, at least one, of an output and its log-sum-exp, as "
                "distributed_attention returns them with return_lse=True, got "
                + (f"{[type(x).__name__ for x in part]}" if pair else type(part).__name__)
            )
    dtype = functools.reduce(torch.promote_types, [out.dtype for out, _ in parts])
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return torch.ops.deepsp.merge_attention(
        [out.to(dtype) for out, _ in parts], [lse.to(wide) for _, lse in parts]
    )
