"""Which rank owns which tokens and heads: what each rank holds, for which heads and queries it
computes attention, and the loop that receives chunks, attends and sends the output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from deepsp.ranks.groups import Group, Member, constant, member_of
from deepsp.ranks.lengths import check_four, lens_or_equal

ORDERS = {"bshd": (0, 1, 2, 3), "sbhd": (1, 0, 2, 3), "bhsd": (0, 2, 1, 3)}
"""By layout: the positions of batch, sequence, heads and head_dim. Each order is its own
inverse."""


def ordered(x: Tensor, layout: str) -> Tensor:
    """[B, S, H, D] from ``layout``, or the other way round."""
    return x if layout == "bshd" else x.permute(ORDERS[layout])


def check_layout(layout: str) -> None:
    if layout not in ORDERS:
        raise ValueError(f"expected layout to be 'bshd', 'sbhd' or 'bhsd', got {layout!r}")


_SWAPPED = "; if q, k and v are [batch, heads, sequence, head_dim], pass layout='bhsd'"


def local_heads(
    num_heads: int, group: Group = None, num_kv_heads: int | None = None
) -> range | tuple[range, range]:
    """The heads for which this rank computes attention if heads are whole (``query_parts`` 1): a
    contiguous range of the global heads, the same for any number of chunks.

    Slice a model's per-head values with it: ``slopes[heads.start : heads.stop]``.

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


@constant
def validate(query_parts: int | str, group: Group | Member) -> int | str:
    """Checks ``query_parts``. Over a mesh of two dimensions, returns the number of rows.

    Raises:
        ValueError: it isn't "auto" or an int >= 1, or differs from the mesh's rows.
    """
    if query_parts != "auto" and (type(query_parts) is not int or query_parts < 1):
        raise ValueError(f'expected query_parts to be "auto" or an int >= 1, got {query_parts!r}')
    if not isinstance(group, DeviceMesh) or group.ndim != 2:
        return query_parts
    rows = group.size(0)
    if query_parts not in ("auto", rows):
        raise ValueError(
            f"expected query_parts to be 'auto' or {rows}, the size of the first dimension of the "
            f"mesh, got {query_parts}"
        )
    return query_parts if rows == 1 else rows


def by_tiles(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether flash attention can't compute causal attention of some of the queries, which needs
    its log-sum-exp."""
    return device.type == "cuda" and dtype not in (torch.bfloat16, torch.float16)


def resolve(
    wanted: int | str, num_heads: int, size: int, slow: bool = False, why_whole: str | None = None
) -> int:
    """``query_parts`` as ops take it: 1 for whole heads, 0 to split queries as evenly as possible.

    Args:
        wanted: the user's, "auto" or an int.
        num_heads: the number of query heads.
        size: the number of ranks.
        slow: whether attention of split queries is slow: "auto" then keeps heads whole if it can.
        why_whole: why queries can't be split, and what to do; None: they can.
    """
    auto = isinstance(wanted, str)  # Dynamo can't compare an int that it traces with a string
    if not auto and wanted == 1 and num_heads < size:
        raise ValueError(
            f"expected at least as many query heads as ranks ({size}) with query_parts 1, got "
            f"{num_heads}; pass query_parts='auto', or use a group of at most {num_heads} ranks"
        )
    enough = num_heads >= size and (why_whole is not None or slow)
    if (auto and (num_heads % size == 0 or enough)) or (not auto and wanted == 1):
        return 1
    if why_whole is not None:
        problem = (
            f"expected at least as many query heads as ranks ({size}), got {num_heads}"
            if auto
            else "expected query_parts (over a mesh of two dimensions: its rows) to be 1 or "
            f"'auto', got {wanted}"
        )
        raise ValueError(f"{problem}: {why_whole}")
    return 0 if auto else wanted


def gather_pair(
    a: Tensor, b: Tensor, dim: int, lens: Sequence[int], member: Member
) -> tuple[Tensor, Tensor]:
    """Gathers two tensors along ``dim``, in one message where dtypes and other sizes allow it. In
    backward, the ranks' gradients are summed.

    Args:
        a: any shape and dtype.
        b: likewise.
        dim: the dimension of tokens, not the last.
        lens: the number of tokens of each rank.
        member: the group.
    """
    (rank, _, name), ops = member, torch.ops.deepsp
    if a.dtype != b.dtype or a.shape[:-1] != b.shape[:-1]:
        a, b = (ops.all_gather(x.contiguous(), dim, lens, "partial", rank, name) for x in (a, b))
        return a, b
    both = ops.all_gather(torch.cat([a, b], -1), dim, lens, "partial", rank, name)
    a, b = both.split([a.size(-1), b.size(-1)], -1)
    return a, b


class AttentionCall:
    """The arguments of one attention over a group, checked.

    Attributes:
        qkv: q, k and v in ``layout``.
        lens: tokens of each rank.
        query_parts: as ops take it.
        member: the group.

    Raises:
        ValueError: they don't fit each other or the group.
    """

    def __init__(self, q, k, v, layout: str, seq_lens, member: Member, wanted, why_whole=None):
        self.qkv, self.layout, self.member = (q, k, v), layout, member
        check_four({"q": q, "k": k, "v": v}, layout)
        s, h = layout.index("s"), layout.index("h")
        length, heads = q.size(s), q.size(h)
        for x, name in ((k, "k"), (v, "v")):
            if x.size(s) != length:
                swapped = layout != "bhsd" and heads == k.size(h) == v.size(h)
                raise ValueError(
                    f"expected {name} to have the sequence length of q ({length}), got {x.size(s)}"
                    + (_SWAPPED if swapped else "")
                )
        rank, size, _ = member
        self.lens = lens_or_equal(seq_lens, length, size)
        if length != self.lens[rank]:
            swapped = layout != "bhsd" and heads == self.lens[rank]
            raise ValueError(
                f"expected q to have sequence length {self.lens[rank]}, which is seq_lens[{rank}], "
                f"this rank's entry, got {length}" + (_SWAPPED if swapped else "")
            )
        self.num_heads, self.device = heads, q.device
        self.query_parts = resolve(wanted, heads, size, by_tiles(q.device, q.dtype), why_whole)

    @property
    def batch(self) -> int:
        return self.qkv[0].size(self.layout.index("b"))

    def by_tokens(self) -> list[Tensor]:
        """q, k and v [B, S_r, H, D]."""
        return [ordered(x, self.layout) for x in self.qkv]

    def needs_gradient(self) -> list[bool]:
        return [torch.is_grad_enabled() and x.requires_grad for x in self.qkv]


class Cell(NamedTuple):
    """Some heads of a rank, and some of their queries."""

    heads: tuple[int, int]
    queries: tuple[tuple[int, int], ...]  # ascending ranges of tokens; some may be empty


def cells_of(
    num_heads: int,
    total: int,
    query_parts: int,
    size: int,
    rank: int,
    chunk: int = 0,
    chunks: int = 1,
) -> list[Cell]:
    """A rank's cells in a chunk; ``query_parts`` as ops take it."""
    n = torch.ops.deepsp._cells(num_heads, total, size, rank, chunk, chunks, query_parts)
    return [
        Cell((n[i], n[i + 1]), ((n[i + 2], n[i + 3]), (n[i + 4], n[i + 5])))
        for i in range(0, len(n), 6)
    ]


class CellInputs(NamedTuple):
    """A cell with its received q, k and v."""

    q: Tensor  # [B, n, h, D]
    k: Tensor  # [B, S, h_kv, D]; heads are repeated if query heads read them unevenly
    v: Tensor
    cell: Cell
    where: tuple  # the cell, as ops take it: ranks, rank, chunk, chunks, query_parts, cell


def attend(
    arriving: Sequence[Tensor],
    function: Callable[[CellInputs], Tensor | tuple[Tensor, Tensor]],
    shape: tuple[list[int], list[int], int],
    lens: list[int],
    member: Member,
    query_parts: int = 1,
    tokens_first: bool | None = None,
    merged: bool = True,
    on_arrival: Callable[[Tensor, int, tuple], Tensor] = lambda x, *_: x,
) -> tuple[list[Tensor], int]:
    """Receives q, k and v, calls a function for each cell, and sends the output. While the function
    works on a chunk, the others are in flight.

    Args:
        arriving: the buffers of q, k and v, one for each chunk.
        function: computes attention of a part, [B, n, h, Dv], or that and its log-sum-exp [B, n,
            h], which are sent as one tensor.
        shape: the numbers of heads and the head dimensions of q, k and v, and the batch size.
        lens: tokens of each rank.
        member: the group.
        query_parts: as ops take it.
        tokens_first: the memory layout of q, k, v and the output, as for ``seq_to_heads_wait``.
        merged: whether ``heads_to_seq_wait`` waits for the output.
        on_arrival: applied to q, k and v when they are received: called with the tensor, 0, 1 or 2
            (k has no heads in some chunks), and the ranges of its tokens.

    Returns:
        The output's buffers in flight, one for each chunk; and the number of its features.
    """
    ops, (rank, size, name) = torch.ops.deepsp, member
    (heads, kv_heads, _), _, _ = shape
    chunks, total = len(arriving), sum(lens)
    leaving, ks, vs = [], [], []
    for chunk in range(chunks):
        arrived = ops.seq_to_heads_wait(
            arriving[chunk],
            *shape,
            lens,
            chunk,
            chunks,
            rank,
            name,
            tokens_first=tokens_first,
            query_parts=query_parts,
        )
        cells = cells_of(heads, total, query_parts, size, rank, chunk, chunks)
        for i, all_ in enumerate((ks, vs)):
            if len(arrived) > len(cells):
                all_.append(on_arrival(arrived[len(cells) + i], 1 + i, ((0, total),)))
        outs = []
        for i, cell in enumerate(cells):
            where = (size, rank, chunk, chunks, query_parts, i)
            k, v = (ops._kv_of_cell(x, heads, kv_heads, *where) for x in (ks, vs))
            q = on_arrival(arrived[i], 0, cell.queries)
            out = function(CellInputs(q, k, v, cell, where))
            outs.append(ops._join_log_sum(*out) if isinstance(out, tuple) else out)
        leaving.append(
            ops.heads_to_seq_start(
                outs,
                [heads],
                lens,
                chunk,
                chunks,
                rank,
                name,
                tokens_first=tokens_first if merged else None,
                query_parts=query_parts,
            )
        )
    return leaving, outs[0].size(3)
