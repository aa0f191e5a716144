"""What benchmarks/collectives.py compares: a tensor gathered, or summed and scattered, along a
dimension, forward and backward."""

from __future__ import annotations

from collections.abc import Callable

import bench
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
    """Gathers along dimension 0 by torch alone, and reduce-scatters the gradient."""

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


def waited(grad: Tensor, *others: Tensor) -> Tensor:
    """Wait for a functional collective's tensor, which waits only when it is used."""
    return grad.wait() if isinstance(grad, functional.AsyncCollectiveTensor) else grad


def collectives(kind: str, shape: tuple[int, int, int], dtype: torch.dtype) -> dict[str, Callable]:
    """Return forward and backward of one collective along dimension 1, by name. shape: the
    whole tensor's."""
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
            return waited(*torch.autograd.grad(op(), x, dy))

        return call

    calls = {name: both(op) for name, op in ops.items()}
    reference = calls["deepsp"]()
    for name, call in calls.items():
        close = 0.05 if dtype == torch.bfloat16 else 1e-4
        torch.testing.assert_close(
            call(), reference, rtol=close, atol=close, msg=lambda m, name=name: f"{name}: {m}"
        )
    send = bench.bare_messages(part.nbytes)
    return calls | {"floor": lambda: (send(), send())}  # forward and backward


def linears(shape: tuple[int, int, int], columns: int, dtype: torch.dtype) -> dict[str, Callable]:
    """Return all-gather, linear, gelu, linear, reduce-scatter along dimension 1, by name."""
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
        return lambda: waited(*torch.autograd.grad(op(), (of, up, down), grad))

    return {
        "plain": both(plain, x, dy),
        "pipelined": both(pipelined, x, dy),
        "functional": both(functional_plain, x, dy),
        "compute alone": both(compute, whole, torch.randn_like(whole)),
    }


def counted(call: Callable) -> dict[str, int]:
    """Count the copies of one call, and what it launches."""
    dist.barrier()
    names = [event.name for event in bench.profiled(call)]
    return {
        "copies": sum(name in COPIES for name in names),
        "launches": sum(
            name == "deepsp::exchange" or (name.startswith("gloo:") and name not in MESSAGES)
            for name in names
        ),
    }


def measure_collectives(kind: str, shape: tuple, dtype: str, repeats: int) -> dict:
    calls = collectives(kind, shape, getattr(torch, dtype))
    times = bench.timed(calls, repeats, warmups=2)
    return {name: {"ms": times[name], **counted(call)} for name, call in calls.items()}


def measure_linears(shape: tuple, columns: int, repeats: int) -> dict:
    times = bench.timed(linears(shape, columns, torch.float32), repeats, warmups=2)
    return {name: {"ms": ms} for name, ms in times.items()}
