"""Host time a call of every op over groups of up to 1024 ranks: what Python and C++ do on each rank
before and after bytes move, which must be linear in the number of ranks.

Each size runs in a process of its own, in a fake group, where nothing is sent; a rank holds one
token, so that most of the time is that of plans, checks and lists (not all: 1024 tokens attend to
each other on 1024 ranks). Milliseconds, minimum of many calls on one thread.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tqdm import tqdm

SIZES = (2, 8, 64, 256, 1024)
RESULTS = Path(__file__).parent / "results"
TOKENS, DIM = 1, 8  # of a rank; of a head


def calls(size: int) -> dict[str, Callable[[], object]]:
    """By what it is called in the table."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import deepsp

    torch.set_num_threads(1)
    rank, lens = size // 2, [TOKENS] * size
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    op, name = torch.ops.deepsp, dist.group.WORLD.group_name
    found = {}

    def tensors(heads, kv_heads, grad=False):
        shapes = [(1, TOKENS, h, DIM) for h in (heads, kv_heads, kv_heads)]
        return [torch.randn(shape, requires_grad=grad) for shape in shapes]

    def attention(x):
        return deepsp.distributed_attention(*x, is_causal=True, enable_gqa=True, seq_lens=lens)

    def forward(x):
        with torch.no_grad():
            attention(x)

    def both(x):
        torch.autograd.grad(attention(x).sum(), x)

    # As many heads as ranks; grouped heads; more ranks than heads.
    for kind, heads, kv_heads in (
        ("H = P", size, size),
        ("H = 2P, 8 kv heads", 2 * size, min(8, size)),
        ("H = P / 4", max(1, size // 4), 1),
    ):
        x, with_grad = tensors(heads, kv_heads), tensors(heads, kv_heads, True)
        if heads >= size:
            there = op.seq_to_heads(x, lens, rank, name)
            found |= {
                f"seq_to_heads of q, k, v, {kind}": lambda x=x: op.seq_to_heads(
                    x, lens, rank, name
                ),
                f"heads_to_seq of q, k, v, {kind}": lambda t=there, h=heads, kv=kv_heads: (
                    op.heads_to_seq(t, [h, kv, kv], lens, rank, name)
                ),
            }
        found |= {
            f"attention, {kind}": lambda x=x: forward(x),
            f"attention, forward + backward, {kind}": lambda x=with_grad: both(x),
        }
    layer = deepsp.SequenceParallelAttention(16, size, size, head_dim=2)
    hidden = torch.randn(1, TOKENS, 16, requires_grad=True)

    def through_layer():
        y = layer(hidden, seq_lens=lens, is_causal=True)
        torch.autograd.grad(y.sum(), [hidden, *layer.parameters()])

    found["layer, forward + backward, H = P"] = through_layer
    weights = [torch.randn(4, 8, requires_grad=True) for _ in range(20)]

    def gathered(count):
        full = op.gather_cast_coalesced(
            weights[:count], [4] * size * count, [torch.bfloat16] * count, rank, name
        )
        torch.autograd.grad(sum(t.float().sum() for t in full), weights[:count])

    rows = torch.randn(TOKENS, 8)
    of_all = torch.randn(TOKENS * size, 8)
    half = rows.bfloat16()
    c = deepsp.collectives
    found |= {
        "gather_cast, forward + backward": lambda: gathered(1),
        "gather_cast of 20, forward + backward": lambda: gathered(20),
        "all_gather": lambda: c.all_gather(rows, 0, grad="replicated"),
        "reduce_scatter": lambda: c.reduce_scatter(of_all, 0),
        "all_reduce, bfloat16": lambda: c.all_reduce(half, grad="replicated"),
        "plan_attention, H = P": lambda: deepsp.plan_attention(
            size, size, seq_len=TOKENS * size, ranks=size
        ),
        "plan_attention, H = P / 4": lambda: deepsp.plan_attention(
            max(1, size // 4), 1, seq_len=TOKENS * size, ranks=size
        ),
    }
    return found


def minimum(call: Callable[[], object], budget: float) -> float:
    call()
    times, end = [], time.perf_counter() + budget
    while len(times) < 3 or (time.perf_counter() < end and len(times) < 2000):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times) * 1e3


def measure(size: int, budget: float, only: str) -> dict[str, float]:
    found = {what: call for what, call in calls(size).items() if only in what}
    return {what: minimum(call, budget) for what, call in found.items()}


def report(found: dict[int, dict[str, float]]) -> str:
    """A table, and how each call grows from 64 ranks on: 1 is linear."""
    sizes = sorted(found)
    lines = [
        "Host milliseconds a call (`python benchmarks/many_ranks.py`), minimum.",
        "",
        "| call | " + " | ".join(f"P = {size}" for size in sizes) + " | grows like |",
        "|---|" + "--:|" * (len(sizes) + 1),
    ]
    for what in found[sizes[0]]:
        times = [found[size][what] for size in sizes]
        grows = ""
        if len(sizes) > 1 and sizes[-1] > 64:
            first = max(i for i, size in enumerate(sizes) if size <= 64)
            power = math.log(times[-1] / times[first]) / math.log(sizes[-1] / sizes[first])
            grows = f"P^{power:.2f}"
        lines.append(f"| {what} | " + " | ".join(f"{t:.3g}" for t in times) + f" | {grows} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, metavar="P")
    parser.add_argument("--only", default="", metavar="TEXT", help="calls whose name has it")
    parser.add_argument("--seconds", type=float, default=0.5, help="a call, at least")
    parser.add_argument("--write", action="store_true", help=f"into {RESULTS.name}/")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)  # in a process of its own
    args = parser.parse_args()
    if args.one is not None:
        print(json.dumps(measure(args.one, args.seconds, args.only)))
        return
    found = {}
    for size in tqdm(args.sizes, unit="size"):
        command = [sys.executable, __file__, "--one", str(size)]
        command += ["--only", args.only, "--seconds", str(args.seconds)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        run = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
        found[size] = json.loads(run.stdout.splitlines()[-1])
    text = report(found)
    print(text)
    if args.write:
        (RESULTS / "many_ranks.md").write_text(f"# Many ranks\n\n{text}\n")


if __name__ == "__main__":
    main()
