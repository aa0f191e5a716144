"""More ranks than heads: a whole attention, forward and backward, next to all-to-all + ring.

yunchang's hybrid has CUDA kernels for its ring only: here it is given torch's CPU flash kernel, the
one that deepsp calls. Its ring is the balanced one ("zigzag"), whose tokens are in another order.
All in bfloat16: yunchang's gradients are wrong in float32, in which it adds to the buffers that its
kernel writes. What a peer refuses is in the table. Then, for heads that ranks don't divide, each
rank's CPU time.

    python benchmarks/more_ranks.py
"""

import argparse
import functools
import importlib
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from tqdm import tqdm

HERE = Path(__file__).parent
RANKS = 4
# tokens, heads, kv heads, head_dim
SHAPES = ((512, 2, 2, 64), (2048, 2, 2, 64), (4096, 2, 2, 128), (4096, 2, 1, 128), (8192, 2, 2, 64))
aten = torch.ops.aten


def heads_first(*tensors):
    return [x.transpose(1, 2) for x in tensors]


def _flash(q, k, v, dropout_p, softmax_scale, causal, **_):
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        *heads_first(q, k, v), 0.0, causal, scale=softmax_scale
    )
    return out.transpose(1, 2), lse


def _flash_backward(dout, q, k, v, out, lse, dq, dk, dv, dropout_p, scale, causal, *_, **__):
    found = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *heads_first(dout, q, k, v, out), lse, 0.0, causal, scale=scale
    )
    for to, x in zip((dq, dk, dv), found, strict=True):
        to.copy_(x.transpose(1, 2))


def yunchang(ulysses: int):
    """Its hybrid of ``ulysses`` ranks and a ring of the others."""
    from yunchang import LongContextAttention, set_seq_parallel_pg
    from yunchang.kernels import AttnType

    ring = importlib.import_module("yunchang.ring.zigzag_ring_flash_attn")
    ring.select_flash_attn_impl = lambda _, stage, **__: (
        _flash if stage == "fwd-only" else _flash_backward
    )
    set_seq_parallel_pg(ulysses, RANKS // ulysses, dist.get_rank(), RANKS)
    attend = LongContextAttention(ring_impl_type="zigzag", attn_type=AttnType.TORCH_FLASH)
    return lambda q, k, v: attend(q, k, v, causal=True)


def context_parallel():
    """torch's."""
    from torch.distributed.tensor.experimental import context_parallel

    mesh = dist.init_device_mesh("cpu", (RANKS,))

    def attend(q, k, v):
        unused = torch.zeros(2 * RANKS)  # it shards this, and expects at least one
        with context_parallel(mesh, buffers=[unused], buffer_seq_dims=[0]):
            return F.scaled_dot_product_attention(
                *heads_first(q, k, v), is_causal=True, enable_gqa=q.size(2) != k.size(2)
            ).transpose(1, 2)

    return attend


def ours():
    import deepsp

    return lambda q, k, v: deepsp.distributed_attention(q, k, v, is_causal=True, enable_gqa=True)


def order_of(name: str, tokens: int, ulysses: int) -> torch.Tensor:
    """The tokens of this rank, as a contender has them."""
    rank = dist.get_rank()
    if name == "deepsp":
        return torch.arange(tokens).chunk(RANKS)[rank]
    ring = RANKS // ulysses
    chunks = torch.arange(tokens).chunk(2 * ring)
    r, u = rank // ulysses, rank % ulysses
    return torch.cat([chunks[r], chunks[2 * ring - 1 - r]]).chunk(ulysses)[u]


def step(attend, q, k, v, grad):
    out = attend(q, k, v)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad)]


def compare(args, shape, rounds: int) -> list[str]:
    tokens, heads, kv_heads, dim = shape
    generator = torch.Generator().manual_seed(0)
    whole = [
        torch.randn(1, tokens, h, dim, generator=generator) for h in (heads, kv_heads, kv_heads)
    ]
    grad = torch.randn(1, tokens, heads, dim, generator=generator)
    *whole, grad = (x.bfloat16() for x in (*whole, grad))
    leaves = [x.clone().requires_grad_() for x in whole]
    expected = step(
        lambda q, k, v: F.scaled_dot_product_attention(
            *heads_first(q, k, v), is_causal=True, enable_gqa=True
        ).transpose(1, 2),
        *leaves, grad,
    )  # fmt: skip
    ways = {
        "deepsp": (ours, 1),
        "yunchang, 2 x ring of 2": (lambda: yunchang(2), 2),
        "yunchang, ring of 4": (lambda: yunchang(1), 1),
        "torch context_parallel": (context_parallel, 1),
    }
    calls, refused = {}, {}
    for name, (make, ulysses) in ways.items():
        mine = order_of(name, tokens, ulysses)
        part = [x[:, mine].clone().requires_grad_() for x in whole]
        try:
            attend = make()
            found = step(attend, *part, grad[:, mine])
            off = max(
                ((a - b[:, mine]).abs().max() / b.abs().max()).item()
                for a, b in zip(found, expected, strict=True)
            )
            problem = None if off < 0.05 else f"wrong by {off:.1g}"
        except Exception as error:
            problem = f"{type(error).__name__}: {str(error).splitlines()[0][:70]}"
        worst = [None] * RANKS
        dist.all_gather_object(worst, problem)
        if any(worst):
            refused[name] = next(filter(None, worst))
        else:
            calls[name] = functools.partial(step, attend, *part, grad[:, mine].clone())
    times = {name: [] for name in calls}
    bar = tqdm(range(rounds), desc=str(shape), disable=dist.get_rank() > 0)
    for _ in bar:
        for name, call in calls.items():
            dist.barrier()
            began = time.perf_counter()
            call()
            dist.barrier()
            times[name].append(time.perf_counter() - began)
    best = min(times["deepsp"]), statistics.median(times["deepsp"])
    lines = []
    for name in ways:
        if name in refused:
            lines.append(f"| {shape} | {name} | {refused[name].replace('|', ' ')} | | |")
            continue
        least, middle = min(times[name]), statistics.median(times[name])
        lines.append(
            f"| {shape} | {name} | {1e3 * least:.0f} / {1e3 * middle:.0f} | "
            f"{least / best[0]:.2f} | {middle / best[1]:.2f} |"
        )
    return lines


def balance(args, ranks: int, heads: int, kv_heads: int, tokens: int) -> list[str]:
    """CPU seconds of each rank in a forward."""
    import deepsp

    attend = deepsp.distributed_attention
    x = [torch.randn(1, tokens // ranks, h, 64) for h in (heads, kv_heads, kv_heads)]
    lines = []
    for parts in (1, "auto"):
        taken = []
        for _ in range(args.rounds + 1):
            dist.barrier()
            began = time.process_time()
            with torch.no_grad():
                attend(*x, is_causal=True, enable_gqa=True, query_parts=parts)
            taken.append(time.process_time() - began)
        mine = torch.tensor(min(taken[1:]))
        every = [torch.zeros(()) for _ in range(ranks)]
        dist.all_gather(every, mine)
        every = [t.item() for t in every]
        lines.append(
            f"| {heads} heads, {ranks} ranks | {parts} | {' '.join(f'{t:.2f}' for t in every)} | "
            f"{max(every) / min(every):.2f} |"
        )
    return lines


def run(rank: int, ranks: int, store: str, args, what: str, lines) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    if what == "compare":
        found = [line for shape in SHAPES for line in compare(args, shape, args.rounds)]
    else:
        found = balance(args, ranks, 8, 2, 840 * 16)
    if rank == 0:
        lines.put(found)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7, help="(default: 7)")
    args = parser.parse_args()

    def ask(ranks: int, what: str) -> list[str]:
        lines = mp.get_context("spawn").SimpleQueue()
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(run, (ranks, f"{folder}/store", args, what, lines), ranks)
        return lines.get()

    text = [
        "# More ranks than heads", "",
        f"{RANKS} ranks, causal, bfloat16, forward and backward, ms (min / median), and times",
        "deepsp's.",
        "", "| tokens, heads, kv heads, head_dim | | ms | min | median |", "|---|---|---|---|---|",
        *ask(RANKS, "compare"), "",
        "CPU seconds of each rank in a forward, and the largest over the smallest.", "",
        "| | query_parts | s | spread |", "|---|---|---|---|",
        *(line for ranks in (3, 5, 7) for line in ask(ranks, "balance")),
    ]  # fmt: skip
    print("\n".join(text))
    (HERE / "results/more_ranks.md").write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    main()
