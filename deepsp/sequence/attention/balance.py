"""Which rank computes what of an attention, and at which cost."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch

from deepsp.sequence.attention.function import check_exchange
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
    exchange: str = "heads"
    """What travels: "heads" or "keys"."""

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
    window_size: tuple[int, int] | None = None,
    exchange: str = "heads",
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
        window_size: as in :func:`distributed_attention`.
        exchange: as in :func:`distributed_attention`; of "auto", the plan says what it is.

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
    window = (-1, -1) if window_size is None else window_size
    window = (window[0], 0) if is_causal else window
    made, exchange = chosen(exchange, _Sizes(num_heads, kv, lens, window, row), parts)
    total = sum(load.work for load in made) or 1
    item = dtype.itemsize * batch * head_dim
    return AttentionPlan(
        parts,
        _why(parts, num_heads, size) if exchange == "heads" else _WHY_KEYS,
        [
            RankShare(x.cells, x.kv_heads, x.work / total, x.received * item, x.away * item)
            for x in made
        ],
        not isinstance(ranks, int),
        None if not_by_flash or device.type != "cuda" else ops._dense_tokens(),
        exchange,
    )


_WHY_KEYS = "keys travel: each rank has its queries, of all heads, and the keys that they see"
_MOST_WORK = 1.1
"""How much more work than by heads the busiest rank may have where keys are chosen to travel."""


class _Load(NamedTuple):
    """A rank's part."""

    cells: list[Cell]
    kv_heads: tuple[int, int]
    work: int
    """Pairs of a query and a key, by heads."""
    received: int
    """Heads' vectors from other ranks, and those of them from other rows of a mesh."""
    away: int


class _Sizes(NamedTuple):
    """An attention. ``row``: how many ranks a row of the mesh has."""

    heads: int
    kv_heads: int
    lens: Sequence[int]
    window: tuple[int, int]
    row: int

    @property
    def ranges(self) -> list[tuple[int, int]]:
        return [(end - n, end) for n, end in zip(self.lens, accumulate(self.lens), strict=True)]


def choose_exchange(
    num_heads: int,
    num_kv_heads: int,
    lens: tuple[int, ...],
    window: tuple[int, int],
    query_parts: int,
) -> str:
    """Return what "auto" means, "keys" or "heads"; ``query_parts`` as ops take it."""
    # Dynamo warns of caches.
    choose = _choose if torch.compiler.is_compiling() else _choose_once
    return choose(_Sizes(num_heads, num_kv_heads, lens, window, len(lens)), query_parts)


def _choose(sizes: _Sizes, parts: int) -> str:
    return chosen("auto", sizes, parts)[1]


_choose_once = functools.lru_cache(maxsize=256)(_choose)


def chosen(exchange: str, sizes: _Sizes, parts: int) -> tuple[list[_Load], str]:
    """Return the ranks' parts, and what travels."""
    check_exchange(exchange, None, (), 1)
    if exchange != "auto":
        return _by_keys(sizes) if exchange == "keys" else _by_heads(sizes, parts), exchange
    keys, heads = _by_keys(sizes), _by_heads(sizes, parts)
    most = [(max(x.received for x in y), max(x.work for x in y)) for y in (keys, heads)]
    by_keys = most[0][0] < most[1][0] and most[0][1] <= _MOST_WORK * most[1][1]
    return (keys, "keys") if by_keys else (heads, "heads")


def _by_heads(sizes: _Sizes, parts: int) -> list[_Load]:
    heads, kv, lens, window, row = sizes
    seq_len, size, ranges = sum(lens), len(lens), sizes.ranges
    every = [_cells(heads, kv, seq_len, parts, size, rank) for rank in range(size)]

    def queries(cells: Sequence[Cell], tokens: tuple[int, int]) -> int:
        """Count the queries of ``cells`` among these tokens, times heads."""
        return sum(_heads(c) * _common(r, tokens) for c in cells for r in c.queries)

    loads = []
    for rank, (cells, (first, last)) in enumerate(every):
        # The ranks of a row hold consecutive tokens, and have all heads of the same queries.
        begin = rank // row * row
        tokens_of_row = ranges[begin][0], ranges[begin + row - 1][1]
        row_cell = Cell((0, heads), cells[0].queries if row < size else ((0, seq_len),))
        received, at_home, in_row = (
            queries(cells, tokens) + 2 * (last - first) * (tokens[1] - tokens[0]) + returned
            for tokens, returned in (
                ((0, seq_len), heads * lens[rank]),
                (ranges[rank], queries(cells, ranges[rank])),
                (tokens_of_row, queries([row_cell], ranges[rank])),
            )
        )
        work = sum(_heads(c) * _pairs(r, seq_len, window) for c in cells for r in c.queries)
        loads.append(_Load(cells, (first, last), work, received - at_home, received - in_row))
    return loads


def _by_keys(sizes: _Sizes) -> list[_Load]:
    heads, kv, lens, window, row = sizes
    seq_len, ranges, loads = sum(lens), sizes.ranges, []
    for rank, (first, last) in enumerate(ranges):
        begin = rank // row * row
        tokens_of_row = ranges[begin][0], ranges[begin + row - 1][1]
        seen = _seen((first, last), seq_len, window)
        count = seen[1] - seen[0]
        received = 2 * kv * (count - _common(seen, (first, last)))
        away = 2 * kv * (count - _common(seen, tokens_of_row))
        work = heads * _pairs((first, last), seq_len, window)
        cells = [Cell((0, heads), ((first, last),) * (first < last))]
        loads.append(_Load(cells, (0, kv), work, received, away))
    return loads


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


def _seen(queries: tuple[int, int], seq_len: int, window: tuple[int, int]) -> tuple[int, int]:
    """The keys that some of these queries see."""
    (begin, end), (left, right) = queries, window
    if begin == end:
        return begin, begin
    first = 0 if left < 0 else max(0, begin - left)
    return first, seq_len if right < 0 else min(seq_len, end + right)


def _pairs(queries: tuple[int, int], seq_len: int, window: tuple[int, int]) -> int:
    """How many keys these queries see."""
    (begin, end), (left, right) = queries, window

    def total(n: int) -> int:  # of 0 to n - 1
        return n * (n - 1) // 2

    ends = (end - begin) * seq_len
    if right >= 0:  # min(seq_len, query + right + 1)
        cut = min(max(seq_len - right - 1, begin), end)
        ends = total(cut + right + 1) - total(begin + right + 1) + (end - cut) * seq_len
    begins = 0 if left < 0 else total(max(end - left, 0)) - total(max(begin - left, 0))
    return ends - begins


def _why(parts: int, num_heads: int, ranks: int) -> str:
    heads = f"{num_heads} query head{'s' * (num_heads != 1)} on {ranks} ranks"
    if parts == 1 and num_heads % ranks == 0:
        return f"{heads}: whole heads, as many on every rank"
    if parts == 1:
        return f"{heads}: whole heads, one more on some ranks"
    if parts == 0:
        return f"{heads}: {num_heads / ranks:.3g} heads on each, by parts of their queries"
    groups = f"{ranks // parts} groups of heads, " if parts < ranks else ""
    return f"{heads}: {groups}each head's queries on {parts} ranks"


def _ranges(ranges) -> str:
    return ", ".join(str(a) if b == a + 1 else f"{a}-{b - 1}" for a, b in ranges)


def _size(count: int) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.4g} {unit}"
        count /= 1024
    return ""
