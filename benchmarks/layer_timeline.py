"""Draw what one attention layer computes and what is in flight meanwhile, from a profile.

    DEEPSP_TRANSPORT=messages torchrun --nproc-per-node 2 benchmarks/layer_timeline.py

Ranks that share memory copy a block when they launch an exchange, so that nothing is in flight.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import bench
import torch
import torch.distributed as dist
from timeline import COLORS, COMPUTE
from torch.profiler import ProfilerActivity, profile, record_function

import deepsp

PACKS = ("deepsp::pack", "deepsp::merge", "deepsp::own")
CHUNKS = 2
IN_FLIGHT = ["q, k, v", "output", "dO", "dq, dk, dv"]  # in the order of launches, CHUNKS of each
ROWS = ["compute", "pack, merge", *IN_FLIGHT]


def record(tokens: int, hidden: int, heads: int) -> tuple[list[tuple], float]:
    """Return bars (row, color, begin, end, chunk) in ms, and when backward begins."""
    layer = deepsp.SequenceParallelAttention(hidden, heads, num_kv_heads=heads // 2, chunks=CHUNKS)
    x = torch.randn(1, tokens // dist.get_world_size(), hidden, requires_grad=True)
    gradient = torch.randn_like(x)
    for _ in range(3):
        layer(x, is_causal=True).backward(gradient)
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        with record_function("forward"):
            out = layer(x, is_causal=True)
        out.backward(gradient)
    events = sorted(profiler.events(), key=lambda event: event.time_range.start)
    forward = next(event.time_range for event in events if event.name == "forward")

    def bar(row: str, color: str, event, chunk: int = -1) -> tuple:
        times = (event.time_range.start, event.time_range.end)
        return row, color, *((time - forward.start) / 1e3 for time in times), chunk

    bars = [bar("compute", COLORS[COMPUTE[e.name]], e) for e in events if e.name in COMPUTE]
    bars += [bar("pack, merge", "black", e) for e in events if e.name in PACKS]
    receives = [event for event in events if event.name == "gloo:recv"]
    if len(receives) != CHUNKS * len(IN_FLIGHT):
        raise SystemExit(
            f"expected {CHUNKS * len(IN_FLIGHT)} receives, got {len(receives)}; run on two ranks, "
            "with DEEPSP_TRANSPORT=messages"
        )
    for n, event in enumerate(receives):
        row = IN_FLIGHT[n // CHUNKS]
        bars.append(bar(row, COLORS[row], event, n % CHUNKS))
    return bars, (forward.end - forward.start) / 1e3


def draw(file: Path, title: str, bars: list[tuple], backward: float) -> None:
    from matplotlib.patches import Patch

    with bench.picture(file, dpi=110, figsize=(10, 3.2)) as (figure, axes):
        for row, color, begin, end, chunk in bars:
            middle = len(ROWS) - 1 - ROWS.index(row)
            height = 0.7 if chunk < 0 else 0.7 / CHUNKS
            top = middle + 0.35 - max(chunk, 0) * height
            edge = {"edgecolor": "white", "linewidth": 0.3}
            axes.barh(top - height / 2, end - begin, height, begin, color=color, **edge)
        axes.axvline(backward, color="gray", linestyle=":")
        axes.set_yticks(range(len(ROWS)), ROWS[::-1])
        axes.set_xlim(0)
        axes.set_xlabel("ms (dotted: backward begins)")
        axes.set_title(title, loc="left", fontsize=10)
        handles = [Patch(color=COLORS[name], label=name) for name in ("projections", "attention")]
        figure.legend(handles=handles, loc="outside upper right", ncols=2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("docs/overlap.png"))
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    bars, backward = record(args.tokens, args.hidden, args.heads)
    if dist.get_rank() == 0:
        title = (
            f"SequenceParallelAttention, rank 0 of 2, CPU, gloo, {args.tokens} tokens, "
            f"hidden size {args.hidden}, chunks={CHUNKS}"
        )
        draw(args.output, title, bars, backward)
        print(f"timeline: {args.output}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
