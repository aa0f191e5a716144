"""What benchmarks/collectives.py compares: a tensor gathered, or summed and scattered, along a
dimension, forward and backward."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from torch import Tensor

import deepsp

# Copies of whole tensors, as the profiler names them: aten's, and our kernels'.
COPIES = {"aten::copy_", "aten::cat", "deepsp::pack", "deepsp::land"}
MESSAGES = {"gloo:send", "gloo:recv"}  # of which an exchange of ours consists


class Gather(torch.autograd.Function):
    """All-gather along dimension 0 by torch alone, its gradient's reduce-scatter too."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        whole = x.new_empty(dist.get_world_size() * x.size(0), *x.shape[1:])
        dist.all_gather_into_tensor(whole, x)
        return whole

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        part = grad.new_empty(grad.size(0) // dist.get_world_size(), *grad.shape[1:])
        dist.reduce_scatter_tensor(part, grad.contiguous())
        return part


class Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return Gather.backward(None, x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return Gather.forward(None, grad.contiguous())


def gather_transposed(x: Tensor) -> Tensor:
    return Gather.apply(x.transpose(0, 1).contiguous()).transpose(0, 1).contiguous()


def scatter_transposed(x: Tensor) -> Tensor:
    return Scatter.apply(x.transpose(0, 1).contiguous()).transpose(0, 1).contiguous()


def floor(elements: int, dtype: torch.dtype) -> Callable[[], None]:
    """Forward and backward as bare sends and receives of the same bytes, on warm buffers."""
    rank, size = dist.get_rank(), dist.get_world_size()
    sent = torch.ones(size, elements, dtype=dtype)
    received = torch.ones(size, elements, dtype=dtype)

    def call() -> None:
        for _ in range(2):
            others = [(rank + step) % size for step in range(1, size)]
            works = [dist.irecv(received[p], p) for p in others]
            works += [dist.isend(sent[p], p) for p in others]
            for work in works:
                work.wait()

    return call


def landed(grad: Tensor, *others: Tensor) -> Tensor:
    """Functional collectives give tensors that are waited for when they are used."""
    return grad.wait() if isinstance(grad, functional.AsyncCollectiveTensor) else grad


def collectives(kind: str, shape: tuple[int, int, int], dtype: torch.dtype) -> dict[str, Callable]:
    """Name -> forward and backward of one collective along dimension 1. shape: the whole's."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    whole = torch.randn(shape, dtype=dtype)
    part = whole.chunk(size, 1)[rank].contiguous()
    if kind == "all_gather":
        x, dy = part.requires_grad_(), torch.randn_like(whole)
        ops = {
            "deepsp": lambda: deepsp.collectives.all_gather(x, 1, grad="partial"),
            "transpose + dim 0": lambda: gather_transposed(x),
            "functional": lambda: functional.all_gather_single_autograd(x, 1, group),
        }
    else:
        x, dy = whole.requires_grad_(), torch.randn_like(part)
        ops = {
            "deepsp": lambda: deepsp.collectives.reduce_scatter(x, 1),
            "transpose + dim 0": lambda: scatter_transposed(x),
            "functional": lambda: functional.reduce_scatter_single_autograd(x, "sum", 1, group),
        }

    def both(op: Callable[[], Tensor]) -> Callable[[], Tensor]:
        def call() -> Tensor:
            return landed(*torch.autograd.grad(op(), x, dy))

        return call

    calls = {name: both(op) for name, op in ops.items()}
    reference = calls["deepsp"]()
    for name, call in calls.items():
        close = (
            dict(rtol=0.05, atol=0.05) if dtype == torch.bfloat16 else dict(rtol=1e-4, atol=1e-4)
        )
        torch.testing.assert_close(
            call(), reference, **close, msg=lambda m, name=name: f"{name}: {m}"
        )
    return calls | {"floor": floor(part.numel(), dtype)}


def linears(shape: tuple[int, int, int], columns: int, dtype: torch.dtype) -> dict[str, Callable]:
    """all-gather, linear, gelu, linear, reduce-scatter along dimension 1: plain and pipelined."""
    size = dist.get_world_size()
    batch, tokens, hidden = shape
    x = torch.randn(batch, tokens // size, hidden, dtype=dtype).requires_grad_()
    up = torch.randn(columns // size, hidden, dtype=dtype).mul_(0.02).requires_grad_()
    down = torch.randn(hidden, columns // size, dtype=dtype).mul_(0.02).requires_grad_()
    dy = torch.randn_like(x)

    def plain() -> Tensor:
        h = F.gelu(F.linear(deepsp.collectives.all_gather(x, 1, grad="partial"), up))
        return deepsp.collectives.reduce_scatter(F.linear(h, down), 1)

    def pipelined() -> Tensor:
        h = F.gelu(deepsp.collectives.all_gather_matmul(x, up, None, 1))
        return deepsp.collectives.matmul_reduce_scatter(h, down, None, 1)

    def functional_plain() -> Tensor:
        group = dist.group.WORLD
        h = F.gelu(F.linear(functional.all_gather_single_autograd(x, 1, group), up))
        return functional.reduce_scatter_single_autograd(F.linear(h, down), "sum", 1, group)

    whole = torch.randn(batch, tokens, hidden, dtype=dtype).requires_grad_()

    def compute() -> Tensor:
        return F.linear(F.gelu(F.linear(whole, up)), down)

    def both(op: Callable[[], Tensor], of: Tensor, grad: Tensor) -> Callable:
        return lambda: landed(*torch.autograd.grad(op(), (of, up, down), grad))

    return {
        "plain": both(plain, x, dy),
        "pipelined": both(pipelined, x, dy),
        "functional": both(functional_plain, x, dy),
        "compute alone": both(compute, whole, torch.randn_like(whole)),
    }


def slowest(seconds: float) -> float:
    largest = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.item()


def timed(calls: dict[str, Callable], repeats: int) -> dict[str, list[float]]:
    """Milliseconds of the slowest rank, by contender, interleaved."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(repeats + 2):
        for name, call in calls.items():
            dist.barrier()
            begin = time.perf_counter()
            call()
            took = slowest(time.perf_counter() - begin)
            if repeat >= 2:
                times[name].append(1e3 * took)
    return times


def counted(call: Callable) -> dict[str, int]:
    """Copies of one call, and what it launches."""
    dist.barrier()
    with torch.profiler.profile() as profile:
        call()
    names = [event.name for event in profile.events()]
    return {
        "copies": sum(name in COPIES for name in names),
        "launches": sum(
            name == "deepsp::exchange" or (name.startswith("gloo:") and name not in MESSAGES)
            for name in names
        ),
    }


def measure_collectives(kind: str, shape: tuple, dtype: torch.dtype, repeats: int) -> dict:
    calls = collectives(kind, shape, dtype)
    times = timed(calls, repeats)
    return {name: {"ms": times[name], **counted(call)} for name, call in calls.items()}


def measure_linears(shape: tuple, columns: int, dtype: torch.dtype, repeats: int) -> dict:
    return {n: {"ms": ms} for n, ms in timed(linears(shape, columns, dtype), repeats).items()}
