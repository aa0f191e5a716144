"""Who owns which tokens and heads."""

from __future__ import annotations

import torch

from deepsp.groups import Group, member_of


def seq_lens(total: int, group: Group = None) -> list[int]:
    """Tokens of each rank when ``total`` are split over ``group``, like ``torch.tensor_split``:
    the first ``total % P`` ranks get one more."""
    _, size, _ = member_of(group)
    return list(torch.ops.deepsp.token_split(total, size))


def local_heads(
    num_heads: int, group: Group = None, num_kv_heads: int | None = None
) -> range | tuple[range, range]:
    """The heads that this rank computes attention for: a contiguous range of the global heads,
    whatever the number of chunks.

    Args:
        num_heads: query heads of the whole model, at least as many as the group has ranks.
        group: the sequence group.
        num_kv_heads: key/value heads of the whole model; divides ``num_heads``.

    Returns:
        The range of query heads; with ``num_kv_heads`` a pair: the query heads, and the kv heads
        that they read.

    Anything per head is sliced with it: ``slopes[heads.start : heads.stop]``.
    """
    rank, size, _ = member_of(group)
    q_begin, q_end, kv_begin, kv_end = torch.ops.deepsp.head_split(
        num_heads, num_heads if num_kv_heads is None else num_kv_heads, size, rank
    )
    if num_kv_heads is None:
        return range(q_begin, q_end)
    return range(q_begin, q_end), range(kv_begin, kv_end)


def lens_or_equal(lens, length, size: int) -> list[int]:
    """``lens``; where it is None, the same ``length`` on each of ``size`` ranks."""
    if lens is None:
        return [length] * size
    if any(not isinstance(n, (int, torch.SymInt)) for n in lens):
        raise ValueError(
            f"seq_lens is {lens}; numbers of tokens are right, ints: {[int(n) for n in lens]}"
        )
    if len(lens) != size:
        raise ValueError(
            f"seq_lens has {len(lens)} entries, but the group has {size} ranks; one entry for each "
            "is right"
        )
    return list(lens)
