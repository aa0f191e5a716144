"""The projections' ops as Inductor sees them: see :mod:`deepsp.compile.lowering.decompositions`.

One GEMM for each rank's part, so that an exchange is launched when its parts are there and the
products of an arrived chunk don't wait for the next.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepsp.compile.exchange import Blocks, land, launch, sum_parts


def _rows(x: Tensor) -> Tensor:
    """[B, S_r, dim] -> [S_r * B, dim], in the order of the blocks."""
    return x.transpose(0, 1).reshape(-1, x.size(2))


def _batches(rows: Tensor, batch) -> Tensor:
    """The way back, contiguous."""
    return rows.view(-1, batch, rows.size(1)).transpose(0, 1).contiguous()


def _of_heads(weight: Tensor, begin: int, end: int, dim) -> Tensor:
    return weight.narrow(0, begin * dim, (end - begin) * dim)


def _head_dims(weights: list[Tensor], num_heads) -> list:
    return [w.size(0) // h for w, h in zip(weights, num_heads, strict=True)]


class _Sum:
    """A sum of products; of 16-bit ones in float32."""

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype
        self.wide = dtype in (torch.bfloat16, torch.float16)
        self.sum: Tensor | None = None

    def add_product(self, a: Tensor, b: Tensor) -> None:
        if self.sum is None:
            self.sum = torch.mm(a, b)
        elif self.wide:
            self.sum = self.sum.float() + torch.mm(a, b).float()
        else:
            self.sum = torch.addmm(self.sum, a, b)

    def total(self) -> Tensor:
        return self.sum.to(self.dtype)


def project_to_heads_start(
    x, weights, biases, num_heads, seq_lens, chunks, last_first, rank, group_name
):
    dims = _head_dims(weights, num_heads)
    chunks = torch.ops.deepsp.head_chunks(int(num_heads[0]), len(seq_lens), chunks)
    rows = _rows(x)
    buffers = [None] * chunks
    for chunk in reversed(range(chunks)) if last_first else range(chunks):
        b = Blocks(num_heads, dims, x.size(0), seq_lens, chunk, chunks, rank)
        blocks = []
        for of_rank in b.ranges:
            parts = []
            for i, (begin, end) in enumerate(of_rank):
                if end > begin:
                    weight = _of_heads(weights[i], begin, end, dims[i]).t()
                    if biases:
                        bias = _of_heads(biases[i], begin, end, dims[i])
                        parts.append(torch.addmm(bias, rows, weight))
                    else:
                        parts.append(torch.mm(rows, weight))
            blocks.append(torch.cat(parts, 1).reshape(-1))
        buffers[chunk] = launch(blocks, b.by_heads, b.by_tokens, b.pad_by_heads, rank, group_name)
    return buffers


def _blocks(flat: Tensor, b: Blocks) -> list[Tensor]:
    """Every rank's block of a buffer by tokens: [S_r * B, X_p]."""
    return [
        block.view(b.mine * b.batch, columns)
        for block, columns in zip(flat.split(b.by_tokens), b.columns, strict=True)
    ]


def project_to_heads_backward(
    buffers, x, weights, num_heads, batch, seq_lens, wanted, rank, group_name
):
    dims = _head_dims(weights, num_heads)
    chunks, n = len(buffers), len(weights)
    rows = None if x is None else _rows(x)
    of_x = _Sum(buffers[0].dtype)
    # [i][head] -> what ranks say of a head that several of them read
    shared_heads: list[dict] = [{} for _ in weights]
    # [i][first head] -> gradients of rows
    of_weight: list[dict] = [{} for _ in weights]
    of_bias: list[dict] = [{} for _ in weights]
    everything = [
        Blocks(num_heads, dims, batch, seq_lens, chunk, chunks, rank) for chunk in range(chunks)
    ]

    def add(i: int, begin: int, end: int, grad: Tensor) -> None:
        if wanted[0]:
            of_x.add_product(grad, _of_heads(weights[i], begin, end, dims[i]))
        if wanted[1 + i]:
            of_weight[i][begin] = torch.mm(grad.t(), rows)
        if wanted[1 + n + i]:
            of_bias[i][begin] = grad.sum(0)

    readers = [[0] * int(heads) for heads in num_heads]
    for b in everything:
        for of_rank in b.ranges:
            for i, (begin, end) in enumerate(of_rank):
                for head in range(begin, end):
                    readers[i][head] += 1
    for chunk in reversed(range(chunks)):  # as they were sent
        b = everything[chunk]
        flat = land(buffers[chunk], b.by_tokens, b.pad_by_tokens, rank)
        for p, (block, of_rank) in enumerate(zip(_blocks(flat, b), b.ranges, strict=True)):
            column = 0
            for i, (begin, end) in enumerate(of_rank):
                part = block.narrow(1, column, (end - begin) * dims[i])
                column += (end - begin) * dims[i]
                if all(readers[i][head] == 1 for head in range(begin, end)):
                    if end > begin:
                        add(i, begin, end, part)
                    continue
                for head in range(begin, end):  # some are shared: head by head
                    one = part.narrow(1, (head - begin) * dims[i], dims[i])
                    if readers[i][head] == 1:
                        add(i, head, head + 1, one)
                    else:
                        shared_heads[i].setdefault(head, []).append((p, one))
    for i, shared in enumerate(shared_heads):
        for head, parts in sorted(shared.items()):
            in_rank_order = [part for _, part in sorted(parts, key=lambda p: p[0])]
            add(i, head, head + 1, sum_parts(in_rank_order))

    def whole(parts: dict) -> Tensor:
        return torch.cat([parts[begin] for begin in sorted(parts)])

    results = [_batches(of_x.total(), batch)] if wanted[0] else []
    results += [whole(of_weight[i]) for i in range(n) if wanted[1 + i]]
    results += [whole(of_bias[i]) for i in range(n) if wanted[1 + n + i]]
    return results


def heads_to_output_wait(buffers, weight, bias, num_heads, batch, seq_lens, rank, group_name):
    dim = weight.size(1) // num_heads
    total = _Sum(buffers[0].dtype)
    for chunk, buffer in enumerate(buffers):
        b = Blocks([num_heads], [dim], batch, seq_lens, chunk, len(buffers), rank)
        flat = land(buffer, b.by_tokens, b.pad_by_tokens, rank)
        for block, ((begin, end),) in zip(_blocks(flat, b), b.ranges, strict=True):
            total.add_product(block, _of_heads(weight.t(), begin, end, dim))
    y = total.total()
    return _batches(y if bias is None else y + bias, batch)


def heads_to_output_weight_grad(grad, buffers, num_heads, head_dim, seq_lens, rank, group_name):
    rows = _rows(grad).t()
    parts = {}
    for chunk, buffer in enumerate(buffers):
        b = Blocks([num_heads], [head_dim], grad.size(0), seq_lens, chunk, len(buffers), rank)
        flat = land(buffer, b.by_tokens, b.pad_by_tokens, rank)
        for block, ((begin, _),) in zip(_blocks(flat, b), b.ranges, strict=True):
            parts[begin] = torch.mm(rows, block)
    return torch.cat([parts[begin] for begin in sorted(parts)], 1)
