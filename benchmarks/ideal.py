"""One attention layer on two ranks, forward and backward, written by hand: what overlap can hide.

The same chunks, exchanges and data dependencies as ``SequenceParallelAttention``, with raw isend
and irecv, plain matmuls and the attention kernels called directly, on buffers made before. No
autograd, no dispatch of ours, no checks; two ranks, even sizes, as many kv heads as query heads,
one sequence.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
attend_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class IdealLayer:
    """``weights``: q, k, v [heads * D, hidden] and output [hidden, heads * D]."""

    def __init__(self, weights: list[Tensor], heads: int, tokens: int, chunks: int):
        self.rank = dist.get_rank()
        self.wq, self.wk, self.wv, self.wo = weights
        self.chunks, self.tokens = chunks, tokens
        self.dim = self.wq.size(0) // heads
        self.each = heads // 2 // chunks  # heads of a chunk
        self.width = self.each * self.dim
        rows, width, hidden = tokens, self.width, self.wq.size(1)

        def buffers(n, *shape):
            return [torch.randn(*shape) for _ in range(n)]

        self.sent = buffers(chunks, rows, 3 * width)  # q, k, v for the other rank
        self.qkv = buffers(chunks, 2 * rows, 3 * width)  # of all tokens
        self.mixed = buffers(chunks, rows, width)  # attention's output from the other rank
        self.y = torch.empty(rows, hidden)
        self.dsent = buffers(chunks, rows, width)  # dO for the other rank
        self.dout = buffers(chunks, 2 * rows, width)
        self.packed = buffers(chunks, rows, 3 * width)  # dq, dk, dv for the other rank
        self.dqkv = buffers(chunks, rows, 3 * width)  # from the other rank
        self.dx = torch.empty(rows, hidden)
        self.dw = [torch.empty_like(w) for w in weights]

    def columns(self, rank: int, chunk: int) -> slice:
        begin = (rank * self.chunks + chunk) * self.width
        return slice(begin, begin + self.width)

    def mine(self, whole: Tensor, rank: int) -> Tensor:
        return whole[rank * self.tokens : (rank + 1) * self.tokens]

    def forward(self, x: Tensor, causal: bool) -> Tensor:
        me, peer, n = self.rank, 1 - self.rank, self.chunks
        self.x = x
        arriving = [dist.irecv(self.mine(self.qkv[c], peer), peer) for c in range(n)]
        sends = []

        def project(rank, chunk, out):
            rows = self.columns(rank, chunk)
            for i, w in enumerate((self.wq, self.wk, self.wv)):
                torch.mm(x, w[rows].t(), out=out[:, i * self.width : (i + 1) * self.width])

        for c in range(n):
            project(peer, c, self.sent[c])
            sends.append(dist.isend(self.sent[c], peer))
        for c in range(n):
            project(me, c, self.mine(self.qkv[c], me))
        self.saved, returning = [], []
        for c in range(n):
            returning.append(dist.irecv(self.mixed[c], peer))
            arriving[c].wait()
            q, k, v = (
                t.view(1, 2 * self.tokens, self.each, self.dim).transpose(1, 2)
                for t in self.qkv[c].split(self.width, 1)
            )
            out, lse = attend(q, k, v, 0.0, causal)
            rows = out.transpose(1, 2).reshape(2 * self.tokens, self.width)
            sends.append(dist.isend(self.mine(rows, peer), peer))
            self.saved.append((q, k, v, out, lse, rows))
        for c in range(n):
            part = self.mine(self.saved[c][5], me)
            weight = self.wo[:, self.columns(me, c)].t()
            torch.mm(part, weight, out=self.y) if c == 0 else self.y.addmm_(part, weight)
        for c in range(n):
            returning[c].wait()
            self.y.addmm_(self.mixed[c], self.wo[:, self.columns(peer, c)].t())
        for work in sends:
            work.wait()
        return self.y

    def backward(self, dy: Tensor, causal: bool) -> list[Tensor]:
        me, peer, n = self.rank, 1 - self.rank, self.chunks
        backwards = range(n - 1, -1, -1)
        arriving = {c: dist.irecv(self.mine(self.dout[c], peer), peer) for c in backwards}
        sends = []
        for c in backwards:
            torch.mm(dy, self.wo[:, self.columns(peer, c)], out=self.dsent[c])
            sends.append(dist.isend(self.dsent[c], peer))
        for c in backwards:
            torch.mm(dy, self.wo[:, self.columns(me, c)], out=self.mine(self.dout[c], me))
        for c in range(n):
            for rank, part in ((me, self.mine(self.saved[c][5], me)), (peer, self.mixed[c])):
                torch.mm(dy.t(), part, out=self.dw[3][:, self.columns(rank, c)])
        own, returning = {}, {}
        for c in backwards:
            returning[c] = dist.irecv(self.dqkv[c], peer)
            arriving[c].wait()
            q, k, v, out, lse, _ = self.saved[c]
            grad = self.dout[c].view(1, 2 * self.tokens, self.each, self.dim).transpose(1, 2)
            grads = attend_backward(grad, q, k, v, out, lse, 0.0, causal)
            rows = [g.transpose(1, 2).reshape(2 * self.tokens, self.width) for g in grads]
            for i, g in enumerate(rows):
                self.packed[c][:, i * self.width : (i + 1) * self.width] = self.mine(g, peer)
            sends.append(dist.isend(self.packed[c], peer))
            own[c] = [self.mine(g, me) for g in rows]
        first = True

        def finish(rank, c, parts):
            nonlocal first
            rows = self.columns(rank, c)
            for w, dw, g in zip((self.wq, self.wk, self.wv), self.dw, parts, strict=False):
                torch.mm(g, w[rows], out=self.dx) if first else self.dx.addmm_(g, w[rows])
                first = False
                torch.mm(g.t(), self.x, out=dw[rows])

        for c in backwards:
            finish(me, c, own[c])
        for c in backwards:
            returning[c].wait()
            finish(peer, c, self.dqkv[c].split(self.width, 1))
        for work in sends:
            work.wait()
        return [self.dx, *self.dw]
