"""Who owns which tokens and heads."""

from __future__ import annotations

import torch

from deepsp.groups import Group, member_of


def seq_lens(total: int, group: Group = None) -> list[int]:
    """Splits ``total`` tokens over the ranks of ``group`` like ``torch.tensor_split``: the first
    ``total % P`` of P ranks get one more.

    Args:
        total: the number of tokens of the full sequence.
        group: the sequence group.

    Returns:
        The number of tokens of each rank, by rank: a list of P ints.

    Raises:
        ValueError: ``total`` is negative, or this process isn't in the group.
    """
    _, size, _ = member_of(group)
    return list(torch.ops.deepsp.token_split(total, size))


def local_heads(
    num_heads: int, group: Group = None, num_kv_heads: int | None = None
) -> range | tuple[range, range]:
    """The heads that this rank computes attention for where heads are whole (``query_parts`` 1): a
    contiguous range of the global heads, the same for any number of chunks.

    Slice with it what a model has per head: ``slopes[heads.start : heads.stop]``.

    Args:
        num_heads: the number of query heads of the model, at least one for each rank.
        group: the sequence group.
        num_kv_heads: the number of key and value heads of the model; divides ``num_heads``.

    Returns:
        The range of query heads; with ``num_kv_heads``, a pair of it and the range of the kv heads
        that they read.

    Raises:
        ValueError: fewer query heads than ranks, or ``num_kv_heads`` doesn't divide ``num_heads``.
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
            f"expected seq_lens to be ints, such as {[int(n) for n in lens]}, got {lens}"
        )
    if len(lens) != size:
        raise ValueError(
            f"expected seq_lens to have one entry for each of the {size} ranks of the group, got "
            f"{len(lens)}"
        )
    return list(lens)
