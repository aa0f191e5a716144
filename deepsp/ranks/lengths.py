"""How many tokens each rank of a group holds."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from deepsp.ranks.groups import Group, member_of


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


def lens_or_equal(lens, length, size: int) -> list[int]:
    """``lens``, or, if it is None, the same ``length`` on each of ``size`` ranks."""
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


def check_dim(x: Tensor, dim: int) -> None:
    """ValueError unless ``x`` has a dimension ``dim``, which may be negative."""
    if not -x.dim() <= dim < x.dim():
        raise ValueError(
            f"expected dim to be in [{-x.dim()}, {x.dim() - 1}] for a tensor with {x.dim()} "
            f"dimensions, got {dim}"
        )


_NAMES = {"b": "batch", "s": "sequence", "h": "heads", "d": "head_dim"}


def check_four(tensors: Mapping[str, Tensor], layout: str) -> None:
    """Raises ValueError for a tensor that hasn't 4 dimensions."""
    for name, x in tensors.items():
        if x.dim() != 4:
            dims = ", ".join(_NAMES[d] for d in layout)
            raise ValueError(f"expected {name} to have 4 dimensions [{dims}], got {x.dim()}")
