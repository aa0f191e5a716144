"""An exchange of a video transformer's shape: deepsp's next to the Ulysses attention of diffusers.

The shape is that of a Wan model: q, k and v of S / P tokens on each rank go to all tokens of a
part of the heads, and the output comes back; then all gradients, the same ways. In place of
attention, which takes as long in both, stands one copy. The two take turns in one run, on warm
buffers. Min and median of the slowest rank.

    python benchmarks/diffusers_exchange.py --results benchmarks/results
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
from ranks import Ranks, about_machine
from tqdm import tqdm


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

    def attend(q, k, v):
        given = (None, 0.0, False, None, False, False, Copy.forward, Copy.backward, config)
        return TemplatedUlyssesAttention.apply(q, k, v, *given)

    return attend


CONTENDERS = {"deepsp": _deepsp, "diffusers": _diffusers}
_made: dict = {}


def measure(name: str, shape: tuple[int, ...], seed: int) -> tuple[float, float, float]:
    """Seconds of a forward and a backward on the slowest rank, and how far results are off."""
    if name not in _made:
        _made[name] = CONTENDERS[name]()
    attend = _made[name]
    generator = torch.Generator().manual_seed(10 * seed + dist.get_rank())
    q, k, v = (torch.randn(shape, generator=generator).requires_grad_() for _ in range(3))
    gradient = torch.randn(shape, generator=generator)
    dist.barrier()
    start = time.perf_counter()
    out = attend(q, k, v)
    middle = time.perf_counter()
    torch.autograd.backward(out, gradient)
    times = torch.tensor([middle - start, time.perf_counter() - middle])
    dist.all_reduce(times, dist.ReduceOp.MAX)
    error = (out.detach() - v.detach()).abs().max() + (q.grad - gradient).abs().max()
    return times[0].item(), times[1].item(), error.item()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--tokens", type=int, default=8192, help="of all ranks (default: 8192)")
    parser.add_argument("--heads", type=int, default=12, help="default: 12")
    parser.add_argument("--head-dim", type=int, default=64, help="default: 64")
    parser.add_argument("--rounds", type=int, default=30, help="of both (default: 30)")
    parser.add_argument("--note", default="", help="about the machine, for the results")
    parser.add_argument("--results", type=Path, help="a folder for diffusers_exchange.json")
    options = parser.parse_args()
    if options.tokens % options.ranks or options.heads % options.ranks:
        parser.error("expected --tokens and --heads that --ranks divides: diffusers needs it")
    load = os.getloadavg()[0]
    shape = (1, options.tokens // options.ranks, options.heads, options.head_dim)
    found = {name: [] for name in CONTENDERS}
    with Ranks(None, options.ranks) as ranks:
        for n in tqdm(range(options.rounds + 3)):
            for name in CONTENDERS:
                forward, backward, error = ranks(measure, name, shape, n)
                assert error == 0, (name, error)
                if n >= 3:
                    found[name].append((forward, backward, forward + backward))
    rows = {}
    for name, times in found.items():
        columns = list(zip(*times, strict=True))
        rows[name] = [[1000 * min(c), 1000 * statistics.median(c)] for c in columns]
    print("ms, min / median    forward          backward         both")
    for name, row in rows.items():
        print(f"{name:18}" + "".join(f"{a:8.2f} / {b:6.2f}" for a, b in row))
    print(
        "diffusers / deepsp"
        + "".join(
            f"{a / c:8.2f} / {b / d:6.2f}"
            for (a, b), (c, d) in zip(rows["diffusers"], rows["deepsp"], strict=True)
        )
    )
    if options.results:
        about = about_machine(load, options.note)
        path = options.results / "diffusers_exchange.json"
        path.write_text(json.dumps({"machine": about, "shape": shape, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
