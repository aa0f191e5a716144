"""Short causal convolutions over a sharded sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

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
        documents: [N, 2], as in :func:`deepsp.attention.documents.ranges_of`; None: each row is
            one.

    Returns:
        [B, C, S_r].
    """
    before, length = width - 1, x.size(2)
    x = torch.cat([previous_tokens(x, before, group, seq_lens, dim=2), x], 2)
    out = function(x)[:, :, before:]
    # The tokens that would see another document, once more.
    total, first = sum(seq_lens), sum(seq_lens[: member_of(group)[0]])
    again = []
    for begin, end in [] if documents is None else documents.tolist():
        row, start = begin // total, begin % total - first  # counted from this rank's first token
        for token in range(max(start, 0), min(start + before, start + end - begin, length)):
            again.append((row, token, [token - back >= start for back in range(before, -1, -1)]))
    if not again:
        return out
    row, token, valid = (torch.tensor(given, device=x.device) for given in zip(*again, strict=True))
    windows = token[:, None] + torch.arange(width, device=x.device)
    windows = x[row[:, None], :, windows] * valid[..., None]  # [N, width, C]
    return out.mT.index_put((row, token), function(windows.mT)[:, :, -1].to(out.dtype)).mT
