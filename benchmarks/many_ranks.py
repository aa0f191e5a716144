"""Host time a call of every op over groups of up to 1024 ranks: what Python and C++ do on each rank
before and after bytes move, which must be linear in the number of ranks.

Each size runs in a process of its own, in a fake group, where nothing is sent; a rank holds one
token, so that most of the time is that of plans, checks and lists (not all: 1024 tokens attend to
each other on 1024 ranks). Milliseconds, minimum of many calls on one thread.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import time
from collections.abc import Callable

import bench
from tqdm import tqdm

TOKENS, DIM = 1, 8  # of a rank; of a head


def calls(size: int) -> dict[str, Callable[[], object]]:
    """Return calls by their name in the table."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import deepsp

    torch.set_num_threads(1)
    rank, lens = size // 2, [TOKENS] * size
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    op, name = torch.ops.deepsp, dist.group.WORLD.group_name
    by_name = {}

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
            by_name |= {
                f"seq_to_heads of q, k, v, {kind}": lambda x=x: op.seq_to_heads(
                    x, lens, rank, name
                ),
                f"heads_to_seq of q, k, v, {kind}": lambda t=there, h=heads, kv=kv_heads: (
                    op.heads_to_seq(t, [h, kv, kv], lens, rank, name)
                ),
            }
        by_name |= {
            f"attention, {kind}": lambda x=x: forward(x),
            f"attention, forward + backward, {kind}": lambda x=with_grad: both(x),
        }
    layer = deepsp.SequenceParallelAttention(16, size, size, head_dim=2)
    hidden = torch.randn(1, TOKENS, 16, requires_grad=True)

    def through_layer():
        y = layer(hidden, seq_lens=lens, is_causal=True)
        torch.autograd.grad(y.sum(), [hidden, *layer.parameters()])

    by_name["layer, forward + backward, H = P"] = through_layer
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
    by_name |= {
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
    return by_name


def minimum(call: Callable[[], object], budget: float) -> float:
    call()
    times, end = [], time.perf_counter() + budget
    while len(times) < 3 or (time.perf_counter() < end and len(times) < 2000):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times) * 1e3


def measure(size: int, budget: float, only: str) -> dict[str, float]:
    return {what: minimum(call, budget) for what, call in calls(size).items() if only in what}


def report(results: dict[int, dict[str, float]]) -> str:
    """Return a table that also says how each call grows from 64 ranks on: 1 is linear."""
    sizes = sorted(results)
    first = max((size for size in sizes if size <= 64), default=sizes[0])
    rows = []
    for what in results[sizes[0]]:
        times, grows = {size: results[size][what] for size in sizes}, ""
        if sizes[-1] > max(64, first):
            power = math.log(times[sizes[-1]] / times[first]) / math.log(sizes[-1] / first)
            grows = f"P^{power:.2f}"
        rows.append([what, *(f"{t:.3g}" for t in times.values()), grows])
    columns = ["call", *(f"P = {size}" for size in sizes), "grows like"]
    text = "Host milliseconds a call (`python benchmarks/many_ranks.py`), minimum."
    return "\n".join([text, "", *bench.in_markdown(columns, rows)])


def main() -> None:
    args = bench.parser_of(
        __doc__,
        sizes=([2, 8, 64, 256, 1024], "of the group"),
        only=("", "calls whose name has it"),
        seconds=(0.5, "a call, at least"),
        write=(False, "writes many_ranks.md into results/"),
    ).parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    results = {}
    for size in tqdm(args.sizes, unit="size"):
        with multiprocessing.get_context("spawn").Pool(1) as process:
            results[size] = process.apply(measure, (size, args.seconds, args.only))
    text = report(results)
    print(text)
    if args.write:
        (bench.RESULTS / "many_ranks.md").write_text(f"# Many ranks\n\n{text}\n")


if __name__ == "__main__":
    main()
