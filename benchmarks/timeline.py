"""A picture of one layer, forward and backward: when it computed, and when what travelled.

Compute is what the profiler recorded. An exchange begins when it is launched; it has arrived when
the bytes that the interface has received, sampled every millisecond, reach what was sent until then
(one link, first in, first out).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import bench
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

COMPUTE = {
    "aten::mm": "projections",
    "aten::addmm": "projections",
    "aten::addmm_": "projections",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": "attention",
}
ROWS = ["compute", "q, k, v", "output", "dO", "dq, dk, dv"]
COLORS = {
    "projections": "steelblue",
    "attention": "darkorange",
    "q, k, v": "seagreen",
    "output": "mediumpurple",
    "dO": "indianred",
    "dq, dk, dv": "goldenrod",
}


class Received:
    """Samples (seconds, bytes received so far) of an interface."""

    def __init__(self, interface: str):
        self.interface = interface
        self.samples: list[tuple[float, int]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _now(self) -> int:
        for line in Path("/proc/self/net/dev").read_text().splitlines():
            name, _, fields = line.partition(":")
            if name.strip() == self.interface:
                return int(fields.split()[0])
        raise ValueError(f"there is no interface {self.interface}")

    def _run(self) -> None:
        while not self._stop.is_set():
            self.samples.append((time.perf_counter(), self._now()))
            time.sleep(1e-3)

    def __enter__(self) -> Received:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        time.sleep(0.02)
        self._stop.set()
        self._thread.join()


def record(forward: Callable, backward: Callable, sizes: dict[str, list[int]], interface: str):
    """Return bars (row, color, begin, end) in seconds. `sizes`: bytes of each exchange received by
    this rank, by kind, in the order of the launches."""
    for _ in range(3):
        forward()
        backward()
    dist.barrier()
    with Received(interface) as received:
        time.sleep(0.02)
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            begin = time.perf_counter()
            with record_function("timeline::begin"):
                pass
            forward()
            between = time.perf_counter() - begin
            backward()
    events = profiled.events()
    zero = next(e for e in events if e.name == "timeline::begin").time_range.start

    def at(event) -> tuple[float, float]:
        return (event.time_range.start - zero) / 1e6, (event.time_range.end - zero) / 1e6

    bars = [("compute", COMPUTE[e.name], *at(e)) for e in events if e.name in COMPUTE]
    launches = sorted(at(e)[0] for e in events if e.name == "deepsp::exchange")
    kinds = [(kind, size) for kind, each in sizes.items() for size in each]
    if len(launches) != len(kinds):
        raise ValueError(f"{len(launches)} exchanges were recorded, not {len(kinds)}")
    first, last = received.samples[0][1], received.samples[-1][1]
    scale = (last - first) / sum(size for _, size in kinds)  # headers, too
    arrived = 0.0
    for launch, (kind, size) in zip(launches, kinds, strict=True):
        arrived += size * scale
        end = next(
            (t for t, n in received.samples if n - first >= arrived - 1500), received.samples[-1][0]
        )
        bars.append((kind, kind, launch, max(launch, end - begin)))
    return {"bars": bars, "between": between}


def draw(file: Path, title: str, recorded: dict[str, dict]) -> None:
    from matplotlib.patches import Patch

    shape = {"sharex": True, "figsize": (11, 2.6 * len(recorded))}
    with bench.picture(file, len(recorded), dpi=130, **shape) as (figure, panels):
        for panel, (name, record) in zip(panels, recorded.items(), strict=True):
            for row, color, begin, end in record["bars"]:
                panel.barh(
                    len(ROWS) - 1 - ROWS.index(row),
                    1e3 * (end - begin),
                    left=1e3 * begin,
                    height=0.7,
                    color=COLORS[color],
                    edgecolor="white",
                    linewidth=0.5,
                    alpha=1 if row == "compute" else 0.75,
                )
            panel.axvline(1e3 * record["between"], color="gray", linestyle=":")
            panel.set_yticks(range(len(ROWS)), ROWS[::-1])
            panel.set_title(f"{name} (dotted: backward begins)", loc="left", fontsize=10)
        panels[-1].set_xlabel("ms")
        figure.legend(
            handles=[Patch(color=COLORS[n], label=n) for n in ("projections", "attention")],
            loc="outside upper right",
            ncols=2,
        )
        figure.suptitle(title, x=0.02, ha="left")
