"""Short causal convolutions over a sharded sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from deepsp.ops import previous_tokens
from deepsp.ranks.groups import Group, member_of


def causal_convolution(
    function: Callable[[Tensor], Tensor],
    x: Tensor,
    width: int,
    group: Group,
    seq_lens: Sequence[int],
    documents: Tensor | None = None,
) -> Tensor:
    """A convolution of ``width`` tokens, each channel on its own.

    Args:
        function: convolves [B, C, S] as if zeros came before.
        x: this rank's tokens [B, C, S_r].
        width: the number of tokens that an output depends on.
        group: the sequence group.
        seq_lens: the number of tokens of each rank.
        documents: [N, 2], as in :func:`deepsp.data.borders.ranges_of`; None: each row is
            one.

    Returns:
        [B, C, S_r].
    """
    before = width - 1
    earlier = previous_tokens(x, before, group, seq_lens, dim=2)
    total, first = sum(seq_lens), sum(seq_lens[: member_of(group)[0]])

    def convolve(earlier: Tensor, x: Tensor) -> Tensor:
        length = x.size(2)
        x = torch.cat([earlier, x], 2)
        out = function(x)[:, :, before:]
        # The tokens that would see another document, once more.
        again = []
        for begin, end in [] if documents is None else documents.tolist():
            row, start = begin // total, begin % total - first  # counted from this rank's first one
            for token in range(max(start, 0), min(start + before, start + end - begin, length)):
                again.append((row, token, [token - n >= start for n in range(before, -1, -1)]))
        if not again:
            return out
        row, token, valid = (torch.tensor(x, device=out.device) for x in zip(*again, strict=True))
        windows = token[:, None] + torch.arange(width, device=out.device)
        windows = x[row[:, None], :, windows] * valid[..., None]  # [N, width, C]
        return out.mT.index_put((row, token), function(windows.mT)[:, :, -1].to(out.dtype)).mT

    # Computed again in backward: the copy that joins them, and what an activation keeps, would be
    # kept for each token.
    return checkpoint(convolve, earlier, x, use_reentrant=False, preserve_rng_state=False)
