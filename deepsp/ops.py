"""The exchange for people who write their own layers.

Shapes: B batch, S tokens of the whole sequence, S_r those of this rank, H_i and D_i heads and head
dimension of tensor i, h_i the heads of it that this rank holds. Any dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from deepsp.groups import Group, member_of
from deepsp.layout import lens_or_equal
from deepsp.local import check_four

Arriving = TypeVar("Arriving")


class Pending(Generic[Arriving]):
    """An exchange on its way. ``wait()`` gives what arrives; call it once, and don't write to what
    was sent before. Start and wait stand on the same side of ``torch.compile``: both in eager code,
    or both in compiled code, where buffers are laid out in another way."""

    def __init__(self, wait: Callable[[], Arriving]):
        self._wait = wait

    def wait(self) -> Arriving:
        """What arrived.

        Raises:
            RuntimeError: it was waited for already.
        """
        if self._wait is None:
            raise RuntimeError("this exchange was waited for already")
        wait, self._wait = self._wait, None
        return wait()


def seq_to_heads(
    inputs: Sequence[Tensor], group: Group = None, seq_lens: Sequence[int] | None = None
) -> list[Tensor]:
    """Exchanges my tokens of all heads for all tokens of my heads, in one collective.

    Args:
        inputs: [B, S_r, H_i, D_i] each; ``inputs[0]`` is q: its heads are split over the ranks like
            ``torch.tensor_split``, and head j of it reads head ``j // (H_0 // H_i)`` of the others.
            A head goes to the ranks that read it and to no other.
        group: the sequence group.
        seq_lens: tokens of each rank; None: all hold as many as this one.

    Returns:
        [B, S, h_i, D_i] each: views, last two dimensions contiguous, of one fresh buffer. The
        gradient is :func:`heads_to_seq` of the outputs' gradients.

    Raises:
        ValueError: inputs that don't fit each other or the group.

    The sharding is that of DeepSpeed-Ulysses (Jacobs et al., 2023, arXiv:2309.14509).
    """
    rank, size, name = member_of(group)
    lens = lens_or_equal(seq_lens, _length(inputs), size)
    return torch.ops.deepsp.seq_to_heads(inputs, lens, rank, name)


def heads_to_seq(
    inputs: Sequence[Tensor],
    num_heads: Sequence[int],
    group: Group = None,
    seq_lens: Sequence[int] | None = None,
) -> list[Tensor]:
    """The adjoint of :func:`seq_to_heads`: all tokens of my heads for my tokens of all heads.

    Args:
        inputs: [B, S, h_i, D_i] each.
        num_heads: H_i, the heads of each tensor over all ranks.
        group: the sequence group.
        seq_lens: tokens of each rank; None: S divided evenly.

    Returns:
        [B, S_r, H_i, D_i] each, fresh and contiguous. Where several ranks hold a head, the sum
        of theirs, in float32 (float64 for float64), in rank order.

    Raises:
        ValueError: inputs that don't fit each other or the group.
    """
    rank, size, name = member_of(group)
    lens = _lens_of_whole(seq_lens, _length(inputs), size)
    return torch.ops.deepsp.heads_to_seq(inputs, list(num_heads), lens, rank, name)


def seq_to_heads_start(
    inputs: Sequence[Tensor], group: Group = None, seq_lens: Sequence[int] | None = None
) -> Pending[list[Tensor]]:
    """:func:`seq_to_heads` in two halves: launched here, finished by ``.wait()``. Differentiable;
    in backward, the exchange back is in flight during the backward of whatever stood between."""
    rank, size, name = member_of(group)
    lens = lens_or_equal(seq_lens, _length(inputs), size)
    num_heads = [x.size(2) for x in inputs]
    head_dims = [x.size(3) for x in inputs]
    batch = inputs[0].size(0)
    (buffer,) = torch.ops.deepsp.seq_to_heads_start(inputs, lens, 1, False, rank, name)
    return Pending(
        lambda: torch.ops.deepsp.seq_to_heads_wait(
            buffer, num_heads, head_dims, batch, lens, 0, 1, rank, name
        )
    )


def heads_to_seq_start(
    inputs: Sequence[Tensor],
    num_heads: Sequence[int],
    group: Group = None,
    seq_lens: Sequence[int] | None = None,
) -> Pending[list[Tensor]]:
    """:func:`heads_to_seq` in two halves: launched here, finished by ``.wait()``."""
    rank, size, name = member_of(group)
    lens = _lens_of_whole(seq_lens, _length(inputs), size)
    heads = list(num_heads)
    head_dims = [x.size(3) for x in inputs]
    batch = inputs[0].size(0)
    buffer = torch.ops.deepsp.heads_to_seq_start(inputs, heads, lens, 0, 1, rank, name)
    return Pending(
        lambda: torch.ops.deepsp.heads_to_seq_wait(
            [buffer], heads, head_dims, batch, lens, rank, name
        )
    )


def _length(inputs: Sequence[Tensor]) -> int:
    if len(inputs) == 0:
        raise ValueError("inputs is empty; at least one tensor is needed")
    for i, x in enumerate(inputs):
        check_four(x, f"inputs[{i}]", "bshd")
    return inputs[0].size(1)


def _lens_of_whole(lens: Sequence[int] | None, total: int, size: int) -> list[int]:
    if lens is None and total % size != 0:
        raise ValueError(
            f"inputs[0] has sequence length {total}, which {size} ranks don't divide evenly; "
            "pass seq_lens, the tokens of each rank"
        )
    return lens_or_equal(lens, total // size, size)
