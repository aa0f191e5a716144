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
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from collective_contenders import timed
from netlink import Netlink
from ranks import Ranks
from torch import Tensor

import deepsp

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
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
    """Contender -> a call. kind: the collective; features: of the input and of the output."""
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

    found = {}
    for name, call in calls.items():
        found[f"{name}, forward"] = lambda call=call: forward(call)
        found[f"{name}, both"] = lambda call=call: torch.autograd.grad(call(x, w), (x, w), dy)
    results = [found[f"{name}, both"]() for name in calls]
    for result in results[1:]:
        for a, b in zip(result, results[0], strict=True):
            close = 1e-3 if dtype == torch.float32 else 0.05
            torch.testing.assert_close(a, b, rtol=close, atol=close * b.abs().max().item())
    return found


def measure(kind: str, tokens: int, features: int, dtype: torch.dtype, repeats: int) -> dict:
    return timed(contenders(kind, tokens, features, dtype), repeats)


def rows(args: argparse.Namespace) -> list[list[str]]:
    found = []
    ways = ["memory", "messages"] if args.rate is None else ["messages"]
    for size, way in itertools.product(args.ranks, ways):
        os.environ["DEEPSP_TRANSPORT"] = "auto" if way == "memory" else "messages"
        link = None if args.rate is None else Netlink(size, args.rate).__enter__()
        with Ranks(link, size) as ranks:
            for (tokens, features), dtype, kind in itertools.product(
                args.sizes, args.dtypes, ("all_gather", "reduce_scatter")
            ):
                times = ranks(measure, kind, tokens, features, DTYPES[dtype], args.repeats)
                for part in ("forward", "both"):
                    row = [f"{size}, {args.rate or way}", kind, f"{tokens} x {features}", dtype]
                    row.append(part)
                    base = times[f"fused, {part}"]
                    for name in ("fused", "plain", "saved"):
                        ms = times[f"{name}, {part}"]
                        text = f"{min(ms):.1f} / {statistics.median(ms):.1f}"
                        if name != "fused":
                            text += f" ({min(ms) / min(base):.2f} / "
                            text += f"{statistics.median(ms) / statistics.median(base):.2f})"
                        row.append(text)
                    found.append(row)
                    print("| " + " | ".join(row) + " |", flush=True)
        if link is not None:
            link.__exit__(None, None, None)
    return found


def size_of(text: str) -> tuple[int, int]:
    tokens, features = text.split("x")
    return int(tokens), int(features)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], help="sizes of the group")
    parser.add_argument(
        "--sizes",
        type=size_of,
        nargs="+",
        help="tokens x features",
        default=[(4096, 1024), (16384, 1024), (4096, 2048)],
    )
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=[*DTYPES])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--rate", help="of a link between ranks, 1gbit, say (root, iproute2)")
    parser.add_argument("--results", type=Path, help="a file for the table, in Markdown")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    lines = rows(args)
    if args.results:
        columns = ["ranks, way", "collective", "tokens x features", "dtype", ""]
        columns += ["fused, ms, min / median", "plain (times fused)", "saved (times fused)"]
        text = [
            f"`python benchmarks/tensor_parallel.py {' '.join(sys.argv[1:])}`: {os.cpu_count()} "
            f"cores, torch {torch.__version__}, load {load:.1f} at the start, "
            f"{os.getloadavg()[0]:.1f} at the end.",
            "",
            "| " + " | ".join(columns) + " |",
            "|---" * len(columns) + "|",
            *("| " + " | ".join(row) + " |" for row in lines),
            "",
        ]
        args.results.parent.mkdir(parents=True, exist_ok=True)
        args.results.write_text("\n".join(text))


if __name__ == "__main__":
    main()
