"""Shares of attention, where heads alone can't be dealt out evenly: ranks cut queries, too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from deepsp.groups import Group, Member


def check(query_parts: int | str) -> None:
    """Raises ValueError unless it is "auto" or an int >= 1."""
    if query_parts != "auto" and (type(query_parts) is not int or query_parts < 1):
        raise ValueError(f'expected query_parts to be "auto" or an int >= 1, got {query_parts!r}')


@torch.compiler.assume_constant_result
def asked_of(query_parts: int | str, group: Group | Member) -> int | str:
    """``query_parts`` over ``group``: where that is a mesh of two dimensions, as many as it has
    rows.

    Raises:
        ValueError: it isn't "auto" or an int >= 1, or not what the mesh says.
    """
    check(query_parts)
    if not isinstance(group, DeviceMesh) or group.ndim != 2:
        return query_parts
    rows = group.size(0)
    if query_parts not in ("auto", rows):
        raise ValueError(
            f"expected query_parts to be 'auto' or {rows}, the size of the first dimension of the "
            f"mesh, got {query_parts}"
        )
    return query_parts if rows == 1 else rows


def parts_of(
    asked: int | str, num_heads: int, size: int, device: torch.device, whole: str | None = None
) -> int:
    """``query_parts`` as ops take it: 1 for heads alone, 0 for shares that are as even as can be.

    Args:
        asked: "auto" or an int.
        num_heads: the number of query heads.
        size: the number of ranks.
        device: where attention is computed.
        whole: why queries can't be cut, and what to do about it; None: they can.
    """
    auto = isinstance(asked, str)  # Dynamo can't compare an int that it traces with a string
    if not auto and asked == 1 and num_heads < size:
        raise ValueError(
            f"expected at least as many query heads as ranks ({size}) with query_parts 1, got "
            f"{num_heads}; pass query_parts='auto', or use a group of at most {num_heads} ranks"
        )
    # Not on a GPU unless needed: causal attention of a part runs by tiles there, not by one kernel.
    enough = num_heads >= size and (whole is not None or device.type == "cuda")
    if (auto and (num_heads % size == 0 or enough)) or (not auto and asked == 1):
        return 1
    if whole is not None:
        problem = (
            f"expected at least as many query heads as ranks ({size}), got {num_heads}"
            if auto
            else "expected query_parts (over a mesh of two dimensions: its rows) to be 1 or "
            f"'auto', got {asked}"
        )
        raise ValueError(f"{problem}: {whole}")
    return 0 if auto else asked


class Cell(NamedTuple):
    """Some heads of a rank, and some of their queries."""

    heads: tuple[int, int]
    queries: tuple[tuple[int, int], ...]  # ascending ranges of tokens, of which some may be empty


def cells_of(
    num_heads: int,
    total: int,
    query_parts: int,
    size: int,
    rank: int,
    chunk: int = 0,
    chunks: int = 1,
) -> list[Cell]:
    """What a rank computes, in a chunk; ``query_parts`` as ops take it."""
    split = torch.ops.deepsp.share_split
    n = split(num_heads, total, query_parts, size, rank, chunk, chunks)
    return [
        Cell((n[i], n[i + 1]), ((n[i + 2], n[i + 3]), (n[i + 4], n[i + 5])))
        for i in range(0, len(n), 6)
    ]


def attend(
    qkv: Sequence[Tensor],
    attend_cell: Callable[[Tensor, Tensor, Tensor, Cell], Tensor],
    query_parts: int,
    chunks: int,
    lens: list[int],
    member: Member,
) -> Tensor:
    """Attention of this rank's tokens by a function for the queries of a cell.

    Args:
        qkv: q, k and v [B, S_r, h, D].
        attend_cell: takes q [B, n, h, D] of a cell, k and v [B, S, h_kv, D], and the cell.
        query_parts: as ops take it.
        chunks: at most 2 are made.
        lens: tokens of each rank.
        member: the group.
    """
    ops, (rank, size, name) = torch.ops.deepsp, member
    heads = [x.size(2) for x in qkv]
    shape = (heads, [x.size(3) for x in qkv], qkv[0].size(0), query_parts, lens)
    chunks = min(chunks, 2)
    arriving = ops.seq_to_shares_start(list(qkv), query_parts, lens, chunks, False, rank, name)
    leaving, kv = [], []
    for chunk in range(chunks):
        cells = cells_of(heads[0], sum(lens), query_parts, size, rank, chunk, chunks)
        arrived = ops.seq_to_shares_wait(arriving[chunk], *shape, chunk, chunks, rank, name)
        kv = arrived[len(cells) :] or kv
        outs = []
        for i, cell in enumerate(cells):
            k, v = (ops.kv_of_share(x, heads[0], heads[1], query_parts, size, rank, i) for x in kv)
            outs.append(attend_cell(arrived[i], k, v, cell))
        leaving.append(
            ops.shares_to_seq_start(outs, heads[:1], query_parts, lens, chunk, chunks, rank, name)
        )
    (out,) = ops.shares_to_seq_wait(
        leaving, heads[:1], [outs[0].size(3)], qkv[0].size(0), query_parts, lens, rank, name
    )
    return out
