"""Are all_gather_matmul and matmul_reduce_scatter, which send one rank's part while they multiply
another, faster than collectives and products one after the other? On gloo on this machine, by
shared memory and by messages, contenders interleaved in one run, one thread a rank. A time is that
of the slowest rank.

fused    the ops
plain    all_gather and linear, linear and reduce_scatter. Backward gathers the input again, as the
         ops do; of what it launches, a product hides what a product can
saved    the same in autograd's words: what was gathered is kept for backward
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Callable
from pathlib import Path

import bench
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

import deepsp

DTYPES = ["float32", "bfloat16"]
op = torch.ops.deepsp


def weight_grad(grad: Tensor, x: Tensor) -> Tensor:
    return grad.flatten(0, -2).t() @ x.flatten(0, -2)


def group_of() -> tuple[int, int, str]:
    return dist.get_rank(), dist.get_world_size(), dist.group.WORLD.group_name


class GatherLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        rank, size, name = group_of()
        whole = op.all_gather(x, 1, [x.size(1)] * size, "partial", rank, name)
        return F.linear(whole, weight)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        rank, size, name = group_of()
        lens = [x.size(1)] * size
        gathering = op.all_gather_start(x, 1, lens, "partial", rank, name)
        product = grad @ weight
        scattering = op.reduce_scatter_start(product, 1, lens, rank, name)
        shape = [x.size(0), sum(lens), x.size(2)]
        whole = op.all_gather_wait(gathering, 1, lens, shape, "partial", rank, name)[0]
        of_weight = weight_grad(grad, whole)
        return op.reduce_scatter_wait(scattering, 1, lens, shape, rank, name), of_weight


class LinearScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        rank, size, name = group_of()
        lens = [x.size(1) // size] * size
        return op.reduce_scatter(F.linear(x, weight), 1, lens, rank, name)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        rank, size, name = group_of()
        whole = op.all_gather(grad, 1, [grad.size(1)] * size, "partial", rank, name)
        return whole @ weight, weight_grad(whole, x)


def contenders(kind: str, tokens: int, features: int, dtype: torch.dtype) -> dict[str, Callable]:
    """Return calls by contender and part. kind: the collective; features: of input and output."""
    size = dist.get_world_size()
    if kind == "all_gather":
        x = torch.randn(1, tokens // size, features)
        y = torch.randn(1, tokens, features)
        calls = {
            "fused": lambda x, w: deepsp.collectives.all_gather_matmul(x, w, None, 1),
            "plain": GatherLinear.apply,
            "saved": lambda x, w: F.linear(deepsp.collectives.all_gather(x, 1, grad="partial"), w),
        }
    else:
        x = torch.randn(1, tokens, features)
        y = torch.randn(1, tokens // size, features)
        calls = {
            "fused": lambda x, w: deepsp.collectives.matmul_reduce_scatter(x, w, None, 1),
            "plain": LinearScatter.apply,
            "saved": lambda x, w: deepsp.collectives.reduce_scatter(F.linear(x, w), 1),
        }
    x, dy = x.to(dtype).requires_grad_(), y.to(dtype)
    w = (torch.randn(features, features) / features**0.5).to(dtype).requires_grad_()

    def forward(call: Callable) -> None:
        with torch.no_grad():
            call(x, w)

    parts = {}
    for name, call in calls.items():
        parts[name, "forward"] = lambda call=call: forward(call)
        parts[name, "both"] = lambda call=call: torch.autograd.grad(call(x, w), (x, w), dy)
    results = [parts[name, "both"]() for name in calls]
    for result in results[1:]:
        for a, b in zip(result, results[0], strict=True):
            close = 1e-3 if dtype == torch.float32 else 0.05
            torch.testing.assert_close(a, b, rtol=close, atol=close * b.abs().max().item())
    return parts


def measure(kind: str, tokens: int, features: int, dtype: str, repeats: int) -> dict:
    calls = contenders(kind, tokens, features, getattr(torch, dtype))
    return bench.timed(calls, repeats, warmups=2)


def run(args: argparse.Namespace) -> list[list[str]]:
    """Return the rows of the table."""
    rows = []
    cases = list(itertools.product(args.sizes, args.dtypes, ("all_gather", "reduce_scatter")))
    ways = ["memory", "messages"] if args.rate is None else ["messages"]
    for size, way in itertools.product(args.ranks, ways):
        os.environ["DEEPSP_TRANSPORT"] = "auto" if way == "memory" else "messages"
        with bench.ranks_on(args.rate or bench.LOOPBACK, size) as ranks:
            for (tokens, features), dtype, kind in tqdm(cases, desc=f"{size} ranks, {way}"):
                ms = ranks(measure, kind, tokens, features, dtype, args.repeats)
                for part in ("forward", "both"):
                    fused = ms["fused", part]
                    cells = [bench.min_median(fused)]
                    for name in ("plain", "saved"):
                        other = ms[name, part]
                        cells.append(f"{bench.min_median(other)} ({bench.ratio(other, fused)})")
                    case = [f"{size}, {args.rate or way}", kind, f"{tokens} x {features}", dtype]
                    rows.append([*case, part, *cells])
    return rows


def size_of(text: str) -> tuple[int, int]:
    tokens, features = text.split("x")
    return int(tokens), int(features)


def main() -> None:
    parser = bench.parser_of(
        __doc__,
        ranks=([2], "group sizes"),
        dtypes=(DTYPES, "of tokens and weights", DTYPES),
        repeats=(7, "of each contender"),
        rate=(str, "of a link between ranks, 1gbit, say (root, iproute2)"),
        results=(Path, "folder for tensor_parallel.md and .json"),
    )
    sizes = [(4096, 1024), (16384, 1024), (4096, 2048)]
    parser.add_argument("--sizes", type=size_of, nargs="+", default=sizes, help="tokens x features")
    args = parser.parse_args()
    columns = ["ranks, way", "collective", "tokens x features", "dtype", ""]
    columns += ["fused, ms, min / median", "plain (times fused)", "saved (times fused)"]
    rows = run(args)
    title = "A linear layer fused with its collective, and the two in turn"
    about = "What the contenders are: `--help`."
    table = bench.Table("One after the other, and fused", columns, rows)
    bench.report(args, "tensor_parallel", title, [about], [table], {"rows": rows})


if __name__ == "__main__":
    main()
