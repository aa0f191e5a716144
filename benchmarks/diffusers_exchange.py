"""An exchange of a video transformer's shape: deepsp's next to the Ulysses attention of diffusers.

The shape is that of a Wan model: q, k and v of S / P tokens on each rank go to all tokens of a
part of the heads, and the output comes back; then all gradients, the same ways. In place of
attention, which takes as long in both, stands one copy. The two take turns in one run, on warm
buffers. Min and median of the slowest rank.

    python benchmarks/diffusers_exchange.py --results benchmarks/results
"""

import statistics
from pathlib import Path

import bench
import torch
import torch.distributed as dist


class Copy(torch.autograd.Function):
    """In place of attention."""

    @staticmethod
    def forward(ctx, q, k, v, *_, **__):  # diffusers passes more
        return v.clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, gradient, gradient


def _deepsp():
    import deepsp

    return deepsp.DistributedAttention(Copy.apply)


def _diffusers():
    from diffusers.models._modeling_parallel import ContextParallelConfig, ParallelConfig
    from diffusers.models.attention_dispatch import TemplatedUlyssesAttention

    size = dist.get_world_size()
    config = ContextParallelConfig(ulysses_degree=size)
    mesh = dist.init_device_mesh("cpu", (1, size), mesh_dim_names=("ring", "ulysses"))
    config.setup(dist.get_rank(), size, torch.device("cpu"), mesh)
    config = ParallelConfig(context_parallel_config=config)

    options = (None, 0.0, False, None, False, False, Copy.forward, Copy.backward, config)

    def attend(q, k, v):
        return TemplatedUlyssesAttention.apply(q, k, v, *options)

    return attend


CONTENDERS = {"deepsp": _deepsp, "diffusers": _diffusers}


class Contender:
    """An attention, and the tensors of its latest step."""

    def __init__(self, attend, shape: tuple[int, ...]):
        self.attend, self.gradient = attend, torch.randn(shape)
        self.qkv = [torch.randn(shape).requires_grad_() for _ in range(3)]

    def forward(self) -> None:
        for x in self.qkv:
            x.grad = None
        self.out = self.attend(*self.qkv)

    def backward(self) -> None:
        torch.autograd.backward(self.out, self.gradient)

    def error(self) -> float:
        q, _, v = self.qkv
        return ((self.out - v).abs().max() + (q.grad - self.gradient).abs().max()).item()


def measure(shape: tuple[int, ...], rounds: int) -> dict:
    """Return milliseconds of the slowest rank, by contender and direction."""
    torch.manual_seed(dist.get_rank())
    contenders = {name: Contender(make(), shape) for name, make in CONTENDERS.items()}
    calls = {}
    for name, contender in contenders.items():
        calls[name, "forward"] = contender.forward
        calls[name, "backward"] = contender.backward
    ms = bench.timed(calls, rounds, warmups=3)
    for name, contender in contenders.items():
        assert contender.error() == 0, name
        both = zip(ms[name, "forward"], ms[name, "backward"], strict=True)
        ms[name, "both"] = [a + b for a, b in both]
    return ms


def main() -> None:
    parser = bench.parser_of(
        __doc__,
        ranks=(2, "processes"),
        tokens=(8192, "of all ranks"),
        heads=(12, "of q, k and v"),
        head_dim=(64, "of q, k and v"),
        rounds=(30, "of both"),
        note=("", "about the machine, for the results"),
        results=(Path, "folder for diffusers_exchange.md and .json"),
    )
    args = parser.parse_args()
    if args.tokens % args.ranks or args.heads % args.ranks:
        parser.error("expected --tokens and --heads that --ranks divides: diffusers needs it")
    shape = (1, args.tokens // args.ranks, args.heads, args.head_dim)
    with bench.ranks_on(bench.LOOPBACK, args.ranks) as ranks:
        ms = ranks(measure, shape, args.rounds)
    parts = ("forward", "backward", "both")
    rows = [[name, *(bench.min_median(ms[name, p], ".2f") for p in parts)] for name in CONTENDERS]
    shares = [bench.ratio(ms["diffusers", p], ms["deepsp", p]) for p in parts]
    rows.append(["diffusers / deepsp", *shares])
    table = bench.Table("ms, min / median", ["", *parts], rows)
    results = {
        name: [[min(ms[name, p]), statistics.median(ms[name, p])] for p in parts]
        for name in CONTENDERS
    }
    title, about = "An exchange next to diffusers' Ulysses", f"Shape on each rank: {shape}."
    record = {"shape": shape, "rows": results}
    bench.report(args, "diffusers_exchange", title, [about], [table], record)


if __name__ == "__main__":
    main()
