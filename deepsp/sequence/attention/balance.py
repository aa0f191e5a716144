"""Which rank computes what of an attention, and at which cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from deepsp.sequence.attention.parts import Cell, by_tiles, cells_of, resolve


@dataclass(frozen=True)
class RankShare:
    """One rank's part in :class:`AttentionPlan`."""

    cells: list[Cell]
    """Heads, and the ranges (begin, end) of their queries' tokens."""
    kv_heads: tuple[int, int]
    """The heads of the keys and values that it receives, of all tokens."""
    share: float
    """Its fraction of all ranks' work."""
    received: int
    """Bytes received in a forward: queries, keys and values, and the output of its own tokens."""
    from_other_rows: int
    """The part of ``received`` that other rows of a mesh send."""


@dataclass(frozen=True)
class AttentionPlan:
    """What :func:`plan_attention` finds; printed as a table."""

    query_parts: int
    """1: whole heads; 0: queries are split as evenly as possible; else the ranks per head."""
    why: str
    ranks: list[RankShare]
    is_mesh: bool
    """Whether ``ranks`` described a mesh."""
    dense_tokens: int | None = None
    """On a GPU, in 16 bits: documents of so many tokens are dense calls of cuDNN's attention where
    ``scaled_dot_product_attention`` would take it, as are all of one length together if they are
    as much work; others are flash attention, one call for all. None: there is no such choice."""

    @property
    def imbalance(self) -> float:
        """The largest share over the mean."""
        return max(r.share for r in self.ranks) * len(self.ranks)

    def __str__(self) -> str:
        rows = [["rank", "query heads: tokens", "kv heads", "share", "received"]]
        if self.is_mesh:
            rows[0].append("from other rows")
        for rank, r in enumerate(self.ranks):
            heads = "; ".join(f"{_ranges([c.heads])}: {_ranges(c.queries)}" for c in r.cells)
            rows.append(
                [str(rank), heads, _ranges([r.kv_heads]), f"{r.share:.1%}", _size(r.received)]
            )
            if self.is_mesh:
                rows[-1].append(_size(r.from_other_rows))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(text.ljust(n) for text, n in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        lines = [self.why, *lines, f"largest share / mean: {self.imbalance:.3f}"]
        if self.dense_tokens:
            lines.append(
                f"kernels: cuDNN's from documents of {self.dense_tokens} tokens on, where "
                "scaled_dot_product_attention takes it; else flash attention"
            )
        return "\n".join(lines)


def plan_attention(
    num_heads: int,
    num_kv_heads: int | None = None,
    *,
    seq_len: int,
    ranks: int | tuple[int, int],
    head_dim: int = 128,
    query_parts: int | str = "auto",
    is_causal: bool = True,
    seq_lens: Sequence[int] | None = None,
    batch: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device = "cpu",
) -> AttentionPlan:
    """Shows which part of an attention :func:`distributed_attention` gives each rank. Nothing is
    computed or sent, and no group is needed. ::

        print(deepsp.plan_attention(8, 2, seq_len=32768, ranks=3))

    Args:
        num_heads: the number of query heads.
        num_kv_heads: the number of key and value heads; None: as many.
        seq_len: the number of tokens of the full sequence.
        ranks: the number of ranks; (rows, ranks of a row) of a mesh of two dimensions.
        head_dim: the number of features of a head.
        query_parts: as in :func:`distributed_attention`.
        is_causal: whether tokens attend only to themselves and to tokens before them.
        seq_lens: the number of tokens of each rank; None: like ``torch.tensor_split``.
        batch: the number of sequences.
        dtype: the dtype of q, k and v.
        device: where attention is computed; "auto" depends on it and on ``dtype``.

    Returns:
        An :class:`AttentionPlan`: each rank's heads, tokens, share of the work (pairs of query and
        key) and received bytes.

    Raises:
        ValueError: sizes that don't fit.
    """
    kv = num_heads if num_kv_heads is None else num_kv_heads
    ops = torch.ops.deepsp
    rows, row = (1, ranks) if isinstance(ranks, int) else ranks
    if rows < 1 or row < 1:
        raise ValueError(f"expected ranks >= 1, or (rows, ranks of a row) >= 1, got {ranks}")
    size = rows * row
    if not isinstance(ranks, int) and query_parts not in ("auto", rows):
        raise ValueError(
            f"expected query_parts to be 'auto' or {rows}, the rows of ranks, got {query_parts}"
        )
    lens = list(ops.token_split(seq_len, size) if seq_lens is None else seq_lens)
    if len(lens) != size or sum(lens) != seq_len:
        raise ValueError(
            f"expected seq_lens to have {size} entries that sum to {seq_len}, got {lens}"
        )
    wanted = query_parts if rows == 1 else rows
    device = torch.device(device)
    not_by_flash = by_tiles(device, dtype)
    parts = resolve(wanted, num_heads, size, not_by_flash)
    ops.head_split(num_heads, kv, 1, 0)  # checks them
    every = [_cells(num_heads, kv, seq_len, parts, size, rank) for rank in range(size)]
    ranges = [(end - n, end) for n, end in zip(lens, accumulate(lens), strict=True)]

    def queries(cells: Sequence[Cell], tokens: tuple[int, int]) -> int:
        """Count the queries of ``cells`` among these tokens, times heads."""
        return sum(_heads(c) * _common(r, tokens) for c in cells for r in c.queries)

    loads = []
    for rank, (cells, (first, last)) in enumerate(every):
        # The ranks of a row hold consecutive tokens, and have all heads of the same queries.
        begin = rank // row * row
        tokens_of_row = ranges[begin][0], ranges[begin + row - 1][1]
        row_cell = Cell((0, num_heads), cells[0].queries if rows > 1 else ((0, seq_len),))
        received, at_home, in_row = (
            queries(cells, tokens) + 2 * (last - first) * (tokens[1] - tokens[0]) + returned
            for tokens, returned in (
                ((0, seq_len), num_heads * lens[rank]),
                (ranges[rank], queries(cells, ranges[rank])),
                (tokens_of_row, queries([row_cell], ranges[rank])),
            )
        )
        work = sum(_heads(c) * _pairs(r, seq_len, is_causal) for c in cells for r in c.queries)
        loads.append((work, received - at_home, received - in_row))
    total = sum(work for work, *_ in loads) or 1
    item = dtype.itemsize * batch * head_dim
    return AttentionPlan(
        parts,
        _why(parts, num_heads, size),
        [
            RankShare(*shares, work / total, received * item, away * item)
            for shares, (work, received, away) in zip(every, loads, strict=True)
        ],
        not isinstance(ranks, int),
        None if not_by_flash or device.type != "cuda" else ops._dense_tokens(),
    )


def _cells(
    num_heads: int, num_kv_heads: int, seq_len: int, parts: int, size: int, rank: int
) -> tuple[list[Cell], tuple[int, int]]:
    """A rank's cells, and the kv heads that they read."""
    cells = [
        Cell(c.heads, tuple(r for r in c.queries if r[0] < r[1]))
        for c in cells_of(num_heads, seq_len, parts, size, rank)
    ]
    each = num_heads // num_kv_heads
    return cells, (cells[0].heads[0] // each, -(-cells[-1].heads[1] // each))


def _heads(cell: Cell) -> int:
    return cell.heads[1] - cell.heads[0]


def _common(a: tuple[int, int], b: tuple[int, int]) -> int:
    return max(0, min(a[1], b[1]) - max(a[0], b[0]))


def _pairs(queries: tuple[int, int], seq_len: int, is_causal: bool) -> int:
    begin, end = queries
    if not is_causal:
        return (end - begin) * seq_len
    return (end * (end + 1) - begin * (begin + 1)) // 2


def _why(parts: int, num_heads: int, ranks: int) -> str:
    heads = f"{num_heads} query head{'s' * (num_heads != 1)} on {ranks} ranks"
    if parts == 1 and num_heads % ranks == 0:
        return f"{heads}: whole heads, as many on every rank"
    if parts == 1:
        return f"{heads}: whole heads, one more on some ranks"
    if parts == 0:
        return f"{heads}: {num_heads / ranks:.3g} heads on each, by parts of their queries"
    return f"{heads}: {ranks // parts} groups of heads, each head's queries on {parts} ranks"


def _ranges(ranges) -> str:
    return ", ".join(str(a) if b == a + 1 else f"{a}-{b - 1}" for a, b in ranges)


def _size(count: int) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.4g} {unit}"
        count /= 1024
    return ""
