"""The exchange, and the tokens before a rank's own, for layers of your own.

Shapes: B batch, S tokens of the full sequence, S_r those of this rank, H_i and D_i heads and head
dimension of tensor i, h_i its heads on this rank. Any dtype.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from deepsp.ranks.agreement import compare_calls
from deepsp.ranks.groups import Group, Member, member_of
from deepsp.ranks.lengths import check_dim, check_four, lens_or_equal

Arriving = TypeVar("Arriving")
_compared: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
"""Groups whose ranks have compared a call of previous_tokens."""


class Pending(Generic[Arriving]):
    """A collective in flight; :meth:`wait` returns its result.

    Call :meth:`wait` once, and don't write to the inputs before. Start and wait must be on the same
    side of ``torch.compile``: both in eager code or both in compiled code, where buffers have
    another layout.

    Args:
        wait: called once, when the result is needed.
    """

    def __init__(self, wait: Callable[[], Arriving]):
        self._wait = wait

    def wait(self) -> Arriving:
        """Waits for the collective.

        Returns:
            The result of the op without ``_start``.

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
    """Exchanges this rank's tokens of all heads for all tokens of this rank's heads, in one
    collective.

    This is the all-to-all of DeepSpeed-Ulysses (Jacobs et al., 2023, arXiv:2309.14509).

    Args:
        inputs: local tensors [B, S_r, H_i, D_i] of one dtype, any. ``inputs[0]`` is q: its heads
            are split over the ranks like ``torch.tensor_split``, and its head j reads head ``j //
            (H_0 // H_i)`` of the others. A head is sent only to the ranks that read it.
        group: the sequence group.
        seq_lens: the number of tokens of each rank; None: all ranks have as many as this one.

    Returns:
        A list of tensors [B, S, h_i, D_i]: views of one new buffer, whose last two dimensions are
        contiguous. Their backward is :func:`heads_to_seq`.

    Raises:
        ValueError: ``inputs`` or ``seq_lens`` don't fit each other or the group.
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
    """Exchanges all tokens of this rank's heads for this rank's tokens of all heads: the adjoint of
    :func:`seq_to_heads`.

    Args:
        inputs: tensors [B, S, h_i, D_i] of one dtype.
        num_heads: H_i, the number of heads of each tensor over all ranks.
        group: the sequence group.
        seq_lens: the number of tokens of each rank; None: S divided evenly.

    Returns:
        A list of new, contiguous local tensors [B, S_r, H_i, D_i]. A head that several ranks hold
        is summed over them, in float32 (float64 for float64), in rank order. Their backward is
        :func:`seq_to_heads`.

    Raises:
        ValueError: ``inputs``, ``num_heads`` or ``seq_lens`` don't fit each other or the group.
    """
    rank, size, name = member_of(group)
    lens = _full_lens(seq_lens, _length(inputs), size)
    return torch.ops.deepsp.heads_to_seq(inputs, list(num_heads), lens, rank, name)


def seq_to_heads_start(
    inputs: Sequence[Tensor], group: Group = None, seq_lens: Sequence[int] | None = None
) -> Pending[list[Tensor]]:
    """Launches :func:`seq_to_heads`; ``.wait()`` returns its result.

    In backward, the reverse exchange is in flight during the backward of the ops between start and
    wait.

    Args:
        inputs: as in :func:`seq_to_heads`.
        group: the sequence group.
        seq_lens: the number of tokens of each rank; None: all ranks have as many as this one.

    Returns:
        A :class:`Pending` of the list of tensors [B, S, h_i, D_i].

    Raises:
        ValueError: ``inputs`` or ``seq_lens`` don't fit each other or the group.
    """
    rank, size, name = member_of(group)
    lens = lens_or_equal(seq_lens, _length(inputs), size)
    num_heads = [x.size(2) for x in inputs]
    head_dims = [x.size(3) for x in inputs]
    batch = inputs[0].size(0)
    (buffer,) = torch.ops.deepsp.seq_to_heads_start(inputs, lens, 1, False, rank, name)
    return Pending(
        lambda: torch.ops.deepsp.seq_to_heads_wait(
            buffer, num_heads, head_dims, batch, lens, 0, 1, rank, name, tokens_first=False
        )
    )


def heads_to_seq_start(
    inputs: Sequence[Tensor],
    num_heads: Sequence[int],
    group: Group = None,
    seq_lens: Sequence[int] | None = None,
) -> Pending[list[Tensor]]:
    """Launches :func:`heads_to_seq`; ``.wait()`` returns its result.

    In backward, the reverse exchange is in flight during the backward of the ops between start and
    wait.

    Args:
        inputs: as in :func:`heads_to_seq`.
        num_heads: H_i, the number of heads of each tensor over all ranks.
        group: the sequence group.
        seq_lens: the number of tokens of each rank; None: S divided evenly.

    Returns:
        A :class:`Pending` of the list of local tensors [B, S_r, H_i, D_i].

    Raises:
        ValueError: ``inputs``, ``num_heads`` or ``seq_lens`` don't fit each other or the group.
    """
    rank, size, name = member_of(group)
    lens = _full_lens(seq_lens, _length(inputs), size)
    heads = list(num_heads)
    head_dims = [x.size(3) for x in inputs]
    batch = inputs[0].size(0)
    buffer = torch.ops.deepsp.heads_to_seq_start(
        inputs, heads, lens, 0, 1, rank, name, tokens_first=False
    )
    return Pending(
        lambda: torch.ops.deepsp.heads_to_seq_wait(
            [buffer], heads, head_dims, batch, lens, rank, name
        )
    )


def previous_tokens(
    x: Tensor, n: int, group: Group = None, seq_lens: Sequence[int] | None = None, dim: int = 1
) -> Tensor:
    """Returns the ``n`` tokens of the sequence before this rank's first one, from as many ranks as
    hold them. Exactly these tokens are sent.

    A causal convolution of width k over a sharded sequence needs k - 1 tokens before its own:
    ``conv(torch.cat([previous_tokens(x, k - 1), x], 1))``, without padding. In backward, their
    gradients go back to the ranks that hold them, and are added there (in rank order, 16-bit floats
    in float32). All ranks use the result, also the first one, which gets zeros.

    A group's first call compares the arguments across its ranks, unless it is compiled; later ones
    do with ``DEEPSP_DEBUG=1``.

    Args:
        x: [B, S_r, ...], this rank's tokens along ``dim``, any dtype.
        n: how many tokens, the same on every rank; 0 and more than there are, too.
        group: the sequence group.
        seq_lens: the number of tokens of each rank, zero included; None: all ranks have as many as
            this one.
        dim: the dimension of the sequence; may be negative.

    Returns:
        [B, n, ...], a new tensor: the tokens before, with zeros in front where the sequence has
        fewer than ``n``.

    Raises:
        ValueError: ``n``, ``dim`` or ``seq_lens`` doesn't fit, or ranks disagree.
    """
    (rank, _, name), lens = _compared_lens(x, n, group, seq_lens, dim)
    return torch.ops.deepsp.previous_tokens(x, n, dim, lens, rank, name)


def previous_tokens_start(
    x: Tensor, n: int, group: Group = None, seq_lens: Sequence[int] | None = None, dim: int = 1
) -> Pending[Tensor]:
    """Launches :func:`previous_tokens`; ``.wait()`` returns its result.

    In backward, the gradients travel during the backward of the ops between start and wait.

    Args:
        x: as in :func:`previous_tokens`, as are the others.
        n: how many tokens.
        group: the sequence group.
        seq_lens: the number of tokens of each rank; None: all ranks have as many as this one.
        dim: the dimension of the sequence; may be negative.

    Returns:
        A :class:`Pending` of the tokens before.

    Raises:
        ValueError: ``n``, ``dim`` or ``seq_lens`` doesn't fit, or ranks disagree.
    """
    (rank, _, name), lens = _compared_lens(x, n, group, seq_lens, dim)
    shape, ops = list(x.shape), torch.ops.deepsp
    buffer = ops.previous_tokens_start(x, n, dim, lens, rank, name)
    return Pending(lambda: ops.previous_tokens_wait(buffer, n, dim, lens, shape, rank, name))


def _compared_lens(
    x: Tensor, n: int, group: Group, seq_lens: Sequence[int] | None, dim: int
) -> tuple[Member, list[int]]:
    check_dim(x, dim)
    member = member_of(group)
    lens = lens_or_equal(seq_lens, x.size(dim), member[1])
    if not torch.compiler.is_compiling():
        process_group = dist.distributed_c10d._resolve_process_group(member[2])
        if process_group not in _compared:
            shape, dim = list(x.shape), dim % x.dim()
            shape[dim] = "S_r"
            alike = {"n": n, "dim": dim, "seq_lens": lens, "shape": shape, "dtype": x.dtype}
            alike["gradients"] = x.requires_grad and torch.is_grad_enabled()
            if compare_calls("previous_tokens", member, x, **alike):
                _compared.add(process_group)
    return member, lens


def _length(inputs: Sequence[Tensor]) -> int:
    if len(inputs) == 0:
        raise ValueError("expected inputs to have at least one tensor, got an empty list")
    check_four({f"inputs[{i}]": x for i, x in enumerate(inputs)}, "bshd")
    return inputs[0].size(1)


def _full_lens(lens: Sequence[int] | None, total: int, size: int) -> list[int]:
    if lens is None and total % size != 0:
        raise ValueError(
            f"expected the sequence length of inputs[0] to be a multiple of the {size} ranks, got "
            f"{total}; pass seq_lens, the number of tokens of each rank"
        )
    return lens_or_equal(lens, total // size, size)
