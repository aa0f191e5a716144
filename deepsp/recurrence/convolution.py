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
    """A convolution of ``width`` tokens, each channel on its own: of this rank's tokens, and then
    once more of the few that see tokens of other ranks, or would see those of another document.

    Args:
        function: convolves [B, C, S] as if zeros came before; any S > 0.
        x: this rank's tokens [B, C, S_r].
        width: the number of tokens that an output depends on.
        group: the sequence group.
        seq_lens: the number of tokens of each rank.
        documents: [N, 2], as in :func:`deepsp.attention.documents.ranges_of`; None: each row is
            one.

    Returns:
        [B, C, S_r].
    """
    before, batch, length = width - 1, x.size(0), x.size(2)
    halo = previous_tokens(x, before, group, seq_lens, dim=2)
    if before == 0:
        return function(x)
    if length == 0:  # every rank uses its halo, or backward would wait for it
        return function(halo)[:, :, :0]
    total, first = sum(seq_lens), sum(seq_lens[: member_of(group)[0]])
    rows = [[row * total, (row + 1) * total] for row in range(batch)]
    again = []
    for begin, end in rows if documents is None else documents.tolist():
        row, start = begin // total, begin % total - first  # counted from this rank's first token
        for token in range(max(start, 0), min(max(start, 0) + before, start + end - begin, length)):
            again.append((row, token, [token - back >= start for back in range(before, -1, -1)]))
    row, token, valid = (torch.tensor(given, device=x.device) for given in zip(*again, strict=True))
    place = token[:, None] + torch.arange(width, device=x.device)  # in the halo and x together
    own = x[row[:, None], :, (place - before).clamp(min=0)]  # [N, width, C]
    others = halo[row[:, None], :, place.clamp(max=before - 1)]
    windows = torch.where((place < before)[..., None], others, own) * valid[..., None]
    out = function(x)
    return out.mT.index_put((row, token), function(windows.mT)[:, :, -1].to(out.dtype)).mT
