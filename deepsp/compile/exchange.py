"""The exchange's ops as Inductor sees them: see :mod:`deepsp.compile.lowering.decompositions`."""

from __future__ import annotations

import torch
from torch import Tensor

_c10d = torch.ops._c10d_functional


def _split_ranges(num_heads: list[int], parts: int, chunk: int, chunks: int):
    """[rank][i] -> (begin, end): the heads of tensor i that each rank holds in a chunk."""
    ranges = []
    for rank in range(parts):
        of_rank = []
        for heads in num_heads:
            _, _, begin, end = torch.ops.deepsp.head_split(
                num_heads[0], heads, parts, rank, chunk, chunks
            )
            of_rank.append((begin, end))
        ranges.append(of_rank)
    return ranges


class Blocks:
    """Sizes of one exchange, all that both directions need."""

    def __init__(self, num_heads, head_dims, batch, seq_lens, chunk, chunks, rank):
        self.parts = len(seq_lens)
        self.rank = rank
        self.batch = batch
        self.seq_lens = list(seq_lens)
        self.head_dims = list(head_dims)
        self.num_heads = [int(h) for h in num_heads]
        self.ranges = _split_ranges(self.num_heads, self.parts, chunk, chunks)
        self.columns = [
            sum((end - begin) * d for (begin, end), d in zip(of_rank, head_dims, strict=True))
            for of_rank in self.ranges
        ]
        self.mine = self.seq_lens[rank]
        self.total = sum(self.seq_lens)
        self.by_heads = [s * batch * self.columns[rank] for s in self.seq_lens]
        self.by_tokens = [self.mine * batch * columns for columns in self.columns]
        # Both directions' buffers have the size of the larger one: they are each other's
        # gradients. The difference travels from this rank to itself, behind its own block.
        heads, tokens = sum(self.by_heads), sum(self.by_tokens)
        larger_by_heads = bool(heads >= tokens)  # one question, lest two answers make a third
        self.pad_by_heads = 0 if larger_by_heads else tokens - heads
        self.pad_by_tokens = heads - tokens if larger_by_heads else 0


def is_zero(size) -> bool:
    # Not size == 0: that would tie the graph to lengths where the two happen to be equal.
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(size == 0)


def launch(blocks: list[Tensor], gets, gives, pad, rank: int, group_name: str) -> Tensor:
    """One all-to-all of flat blocks, with ``pad`` elements more for this rank itself."""
    gets, gives = list(gets), list(gives)
    if not is_zero(pad):
        gets[rank] = gets[rank] + pad
        gives[rank] = gives[rank] + pad
        blocks = [
            *blocks[: rank + 1],
            blocks[rank].new_zeros(pad),
            *blocks[rank + 1 :],
        ]
    sent = torch.cat(blocks) if len(blocks) > 1 else blocks[0]
    if len(gets) == 1:
        return sent.clone()
    return _c10d.all_to_all_single(sent, gets, gives, group_name)


def land(buffer: Tensor, gets, pad, rank: int) -> Tensor:
    """What arrived, without the padding."""
    whole = buffer if len(gets) == 1 else _c10d.wait_tensor(buffer)
    if is_zero(pad):
        return whole
    end = sum(gets[: rank + 1])
    rest = sum(gets[rank + 1 :])
    return torch.cat([whole.narrow(0, 0, end), whole.narrow(0, end + pad, rest)])


def _pack_by_tokens(inputs: list[Tensor], b: Blocks) -> list[Tensor]:
    """One flat block [S_r, B, X_p] for every rank p."""
    even = all(
        begin == p * (end - begin) and (end - begin) * b.parts == x.size(2)
        for p, of_rank in enumerate(b.ranges)
        for x, (begin, end) in zip(inputs, of_rank, strict=True)
    )
    if even:
        # All at once: [B, S_r, P, h, D] -> [P, S_r, B, X].
        parts = [
            x.reshape(b.batch, b.mine, b.parts, x.size(2) // b.parts, x.size(3))
            .permute(2, 1, 0, 3, 4)
            .flatten(3)
            for x in inputs
        ]
        packed = torch.cat(parts, 3) if len(parts) > 1 else parts[0]
        return list(packed.reshape(b.parts, -1).unbind())
    return [
        torch.cat(
            [
                x.narrow(2, begin, end - begin).permute(1, 0, 2, 3).flatten(2)
                for x, (begin, end) in zip(inputs, of_rank, strict=True)
            ],
            2,
        ).reshape(-1)
        for of_rank in b.ranges
    ]


def _views_by_heads(flat: Tensor, b: Blocks) -> list[Tensor]:
    whole = flat.view(b.total, b.batch, b.columns[b.rank])
    views, column = [], 0
    for (begin, end), dim in zip(b.ranges[b.rank], b.head_dims, strict=True):
        width = (end - begin) * dim
        view = whole.narrow(2, column, width).unflatten(2, (end - begin, dim))
        views.append(view.transpose(0, 1))
        column += width
    return views


def _pack_by_heads(inputs: list[Tensor]) -> Tensor:
    """The flat blocks [S_p, B, X_r] for every rank p, one after another."""
    parts = [x.transpose(0, 1).flatten(2) for x in inputs]
    packed = torch.cat(parts, 2) if len(parts) > 1 else parts[0]
    return packed.reshape(-1)


def _merge(flats: list[Tensor], blocks: list[Blocks], tokens_first: bool) -> list[Tensor]:
    """flats[chunk]: blocks [S_r, B, X_p] -> [B, S_r, H_i, D_i]."""
    first = blocks[0]
    outputs = []
    pieces = [  # [chunk][rank] -> [S_r, B, X_p]
        [
            block.view(b.mine, b.batch, b.columns[p])
            for p, block in enumerate(flat.split(b.by_tokens))
        ]
        for flat, b in zip(flats, blocks, strict=True)
    ]
    for i, (heads, dim) in enumerate(zip(first.num_heads, first.head_dims, strict=True)):
        by_head: list[list[Tensor]] = [[] for _ in range(heads)]
        runs: list[tuple[int, int, Tensor]] = []
        for p in range(first.parts):
            for chunk, b in enumerate(blocks):
                column = sum(
                    (end - begin) * d
                    for (begin, end), d in zip(b.ranges[p][:i], b.head_dims[:i], strict=True)
                )
                begin, end = b.ranges[p][i]
                part = pieces[chunk][p].narrow(2, column, (end - begin) * dim)
                runs.append((begin, end, part.unflatten(2, (end - begin, dim))))
        if sum(end - begin for begin, end, _ in runs) == heads:
            # Every head comes from one rank only.
            out = torch.cat([part for _, _, part in sorted(runs, key=lambda r: r[0])], 2)
        else:
            for begin, end, part in runs:
                for head in range(begin, end):
                    by_head[head].append(part.select(2, head - begin))
            out = torch.stack([sum_parts(parts) for parts in by_head], 2)
        out = out.transpose(0, 1)
        outputs.append(out if tokens_first else out.contiguous())
    return outputs


def sum_parts(parts: list[Tensor]) -> Tensor:
    """What several ranks say of a head, added up as the kernels do."""
    if len(parts) == 1:
        return parts[0]
    wide = torch.float64 if parts[0].dtype == torch.float64 else torch.float32
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    return total.to(parts[0].dtype)


def seq_to_heads_start(inputs, seq_lens, chunks, last_first, rank, group_name):
    heads = [x.size(2) for x in inputs]
    dims = [x.size(3) for x in inputs]
    chunks = torch.ops.deepsp.head_chunks(int(heads[0]), len(seq_lens), chunks)
    buffers = [None] * chunks
    for chunk in reversed(range(chunks)) if last_first else range(chunks):
        b = Blocks(heads, dims, inputs[0].size(0), seq_lens, chunk, chunks, rank)
        buffers[chunk] = launch(
            _pack_by_tokens(inputs, b), b.by_heads, b.by_tokens, b.pad_by_heads, rank, group_name
        )
    return buffers


def seq_to_heads_wait(
    buffer, num_heads, head_dims, batch, seq_lens, chunk, chunks, rank, group_name
):
    b = Blocks(num_heads, head_dims, batch, seq_lens, chunk, chunks, rank)
    return _views_by_heads(land(buffer, b.by_heads, b.pad_by_heads, rank), b)


def heads_to_seq_start(inputs, num_heads, seq_lens, chunk, chunks, rank, group_name):
    dims = [x.size(3) for x in inputs]
    b = Blocks(num_heads, dims, inputs[0].size(0), seq_lens, chunk, chunks, rank)
    packed = _pack_by_heads(inputs)
    # Padding goes behind this rank's own block: only for it are the blocks told apart.
    blocks = [packed] if is_zero(b.pad_by_tokens) else list(packed.split(b.by_heads))
    return launch(blocks, b.by_tokens, b.by_heads, b.pad_by_tokens, rank, group_name)


def heads_to_seq_wait(
    buffers, num_heads, head_dims, batch, seq_lens, rank, group_name, *, tokens_first=False
):
    chunks = len(buffers)
    blocks = [
        Blocks(num_heads, head_dims, batch, seq_lens, chunk, chunks, rank)
        for chunk in range(chunks)
    ]
    flats = [
        land(buffer, b.by_tokens, b.pad_by_tokens, rank)
        for buffer, b in zip(buffers, blocks, strict=True)
    ]
    return _merge(flats, blocks, tokens_first)


def heads_to_seq(inputs, num_heads, seq_lens, rank, group_name, *, tokens_first=False):
    buffer = heads_to_seq_start(inputs, num_heads, seq_lens, 0, 1, rank, group_name)
    dims = [x.size(3) for x in inputs]
    return heads_to_seq_wait(
        [buffer], num_heads, dims, inputs[0].size(0), seq_lens, rank, group_name,
        tokens_first=tokens_first,
    )  # fmt: skip
