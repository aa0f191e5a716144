"""How much of its communication an attention layer hides behind its own compute.

Two ranks, one thread each, on a link of a set speed (benchmarks/netlink.py: needs root and
iproute2), since on one machine the loopback is memory; and on that loopback. For one attention
layer, forward and backward, and for the training step of examples/train.py:

  compute    a rank's own work without any exchange
  exchange   the bare exchange of the same bytes: isend and irecv on warm buffers
  off        SequenceParallelAttention(overlap=False): one after another
  on         SequenceParallelAttention(overlap=True)
  ideal      the same pipeline by hand (benchmarks/ideal.py): raw sends, plain matmuls, no autograd

exposed = (on - compute) / exchange; hidden = (off - on) / (off - ideal). With two cores, bytes cost
compute its own time: ideal says what can be hidden here. "sleep": attention that sleeps as long as
the exchange takes, for the pipeline's order alone.

The rate is that at which exchange and compute take about equal time, unless --rates says
otherwise. A time is that of the slower rank; contenders are interleaved; min and median.

What VeOmni's asynchronous Ulysses and DeepSpeed's sp_stream hide is in
benchmarks/results/overlap.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from pathlib import Path

import timeline
import torch
from contenders import (
    RANKS,
    demo,
    demo_shape,
    measure_layer,
    measure_sleep,
    measure_step,
    record_layer,
    train_curves,
)
from netlink import Netlink
from ranks import Ranks

PARTS = ["loopback", "curves", "layer", "sleep", "timeline", "step"]


def median(values: list[float]) -> float:
    return statistics.median(values)


def mbit(ms: float, size: int) -> float:
    """The rate at which `size` bytes each way take `ms`."""
    return size * 8 / ms / 1e3


def equal_rate(ranks: Ranks, shape: dict) -> str:
    """The rate at which a layer's exchange takes as long as its compute, as tc writes it."""
    times = ranks(measure_layer, shape, [], 3)
    return f"{mbit(median(total(times['compute'])), 2 * times['bytes']):.0f}mbit"


def total(times: dict) -> list[float]:
    return [sum(each) for each in zip(*times.values(), strict=True)]


def table(title: str, columns: list[str]):
    from rich.table import Table

    return Table(*columns, title=title, title_justify="left")


def show_layer(console, title: str, times: dict) -> list[dict]:
    rows = []
    t = table(title, ["phase", "", "min ms", "median ms", "exposed", "hidden of ideal"])
    for phase in ("forward", "backward", "both"):
        of = {
            name: total(calls) if phase == "both" else calls[phase]
            for name, calls in times.items()
            if name != "bytes"
        }
        for name, ms in of.items():
            row = {"phase": phase, "contender": name, "min_ms": min(ms), "median_ms": median(ms)}
            if name.startswith("on"):
                hidden = median(of["off"]) - median(ms)
                exchange = median(of["exchange"])
                row["exposed"] = (median(ms) - median(of["compute"])) / exchange
                ideal = name.replace("on", "ideal")
                if ideal in of:
                    row["hidden"] = hidden / (median(of["off"]) - median(of[ideal]))
            rows.append(row)
            t.add_row(
                phase,
                name,
                f"{row['min_ms']:.1f}",
                f"{row['median_ms']:.1f}",
                f"{row['exposed']:.2f}" if "exposed" in row else "",
                f"{row['hidden']:.2f}" if "hidden" in row else "",
            )
        t.add_section()
    console.print(t)
    return rows


def fill_of(shape: dict, chunks: int) -> float:
    """The share of a layer's bytes that no pipeline of so many chunks hides behind attention: the
    first chunk on its way in (with the kv heads that it reads), the last on its way out."""
    heads, kv_heads = shape["heads"], shape["kv_heads"]
    q0, q1, kv0, kv1 = torch.ops.deepsp.head_split(heads, kv_heads, RANKS, 0, 0, chunks)
    out0, out1, _, _ = torch.ops.deepsp.head_split(heads, kv_heads, RANKS, 0, chunks - 1, chunks)
    whole = (2 * heads + 2 * kv_heads) / RANKS
    return (q1 - q0 + 2 * (kv1 - kv0) + out1 - out0) / whole


def show_step(console, title: str, times: dict, fill: float) -> dict:
    of = {name: median(calls["step"]) for name, calls in times.items() if name != "bytes"}
    shorter = min(of["layer exchange"], of["layer compute"])
    hidable = demo.LAYERS * min(of["layer exchange"] * (1 - fill), of["layer compute"])
    gain = of["off"] - of["on"]
    exposed = (of["layer on"] - of["layer compute"]) / of["layer exchange"]
    t = table(title, ["", "min ms", "median ms"])
    for name, calls in times.items():
        if name != "bytes":
            t.add_row(name, f"{min(calls['step']):.0f}", f"{median(calls['step']):.0f}")
    console.print(t)
    console.print(
        f"on is {of['off'] / of['on']:.2f} times as fast as off. {demo.LAYERS} layers' exchange "
        f"(or compute, if shorter) is {demo.LAYERS * shorter:.0f} ms; without the pipeline's fill "
        f"({fill:.0%} of the bytes) {hidable:.0f} ms can be hidden; {gain:.0f} ms are gained: "
        f"{gain / hidable:.2f}. A layer's exposed communication is {exposed:.2f}."
    )
    return of | {
        "speedup": of["off"] / of["on"],
        "gain_ms": gain,
        "exposed": exposed,
        "fill": fill,
        "hidable_ms": hidable,
        "gain_of_hidable": gain / hidable,
    }


def show_curves(console, file: Path, curves: dict[str, dict]) -> list[dict]:
    """`curves`: by group and variant; the first variant of a group is what others are compared
    with."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (upper, middle, lower) = plt.subplots(
        3, sharex=True, figsize=(9, 8), height_ratios=(2, 1, 1), layout="constrained"
    )
    t = table("losses and gradient norms, float64", ["", "largest relative difference", "equal"])
    rows = []
    for group, variants in curves.items():
        (_, base), *_ = variants.items()
        for n, (name, found) in enumerate(variants.items()):
            differences = [
                max(abs(a - b) / abs(b) for a, b in zip(pair, other, strict=True))
                for pair, other in zip(
                    zip(found["losses"], found["gradient_norms"], strict=True),
                    zip(base["losses"], base["gradient_norms"], strict=True),
                    strict=True,
                )
            ]
            label = f"{group}, {name}"
            upper.plot(found["losses"], linewidth=6 - n, alpha=0.6, label=label)
            middle.plot(found["gradient_norms"], linewidth=6 - n, alpha=0.6)
            if n > 0:
                lower.semilogy(differences, ".", label=label)
                bits = "bit-equal" if max(differences) == 0 else ""
                t.add_row(label, f"{max(differences):.1e}", bits)
                rows.append({"curve": label, "difference": max(differences)})
    lower.axhline(1e-12, color="gray", linestyle=":", label="accepted")
    upper.set_ylabel("loss (nats per byte)")
    middle.set_ylabel("gradient norm")
    lower.set_ylabel("relative difference\nfrom overlap off")
    lower.set_xlabel("step")
    upper.legend(fontsize=8)
    figure.savefig(file, dpi=130)
    console.print(t)
    console.print(f"plot: {file}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--parts", nargs="+", default=PARTS, choices=PARTS, help="what to measure")
    add("--seq", type=int, default=2048, help="tokens of the layer's sequence")
    add("--hidden", type=int, default=1024, help="features of the layer")
    add("--heads", type=int, default=16, help="heads of the layer, of 64 channels")
    add("--chunks", type=int, nargs="+", default=[1, 2, 4], help="head chunks")
    add("--rates", nargs="+", default=[], metavar="RATE", help="like 500mbit; default: see above")
    add("--step-seq", type=int, default=8192, help="tokens of the training step")
    add("--step-chunks", type=int, default=4, help="head chunks of the training step")
    add("--repeats", type=int, default=12, help="of each contender, interleaved")
    add("--curve-steps", type=int, default=50, help="optimizer steps of each curve")
    add("--output", type=Path, default=Path("overlap-output"), help="folder for the pictures")
    add("--json", metavar="FILE", help="writes the figures, too")
    args = parser.parse_args()

    from rich.console import Console
    from tqdm import tqdm

    console = Console(width=110)
    shape = {
        "seq": args.seq,
        "hidden": args.hidden,
        "heads": args.heads,
        "kv_heads": args.heads,
        "head_dim": 64,
    }
    found: dict = {"settings": vars(args), "load": os.getloadavg(), "torch": torch.__version__}
    shaped = set(args.parts) - {"loopback", "curves"}
    args.output.mkdir(parents=True, exist_ok=True)
    bar = tqdm(total=len(args.parts), unit="part")
    if "loopback" in args.parts:
        with Ranks(None) as ranks:
            times = ranks(measure_layer, shape, args.chunks, args.repeats)
        found["loopback"] = show_layer(console, "one layer, loopback", times)
        bar.update()
    if "curves" in args.parts:
        variants = {"overlap off": {"overlap": False, "chunks": 1}} | {
            f"overlap on, {n} chunks": {"overlap": True, "chunks": n} for n in (1, 2, 4)
        }
        curves = {}
        for size in (2, 3):
            with Ranks(None, size) as ranks:
                curves[f"{size} ranks"] = ranks(train_curves, variants, args.curve_steps, 512)
        found["curves"] = show_curves(console, args.output / "overlap_curves.png", curves)
        bar.update()
    if shaped:
        with Netlink(RANKS, None) as link, Ranks(link) as ranks:
            if "layer" in args.parts:
                for rate in args.rates or [equal_rate(ranks, shape)]:
                    link.set_rate(rate)
                    times = ranks(measure_layer, shape, args.chunks, args.repeats)
                    title = f"one layer, {rate}, {times['bytes'] / 2**20:.1f} MiB each way"
                    found[f"layer {rate}"] = show_layer(console, title, times)
                link.set_rate(None)
                bar.update()
            if "sleep" in args.parts:
                rate = "400mbit"
                link.set_rate(rate)
                small = shape | {"hidden": 64}
                times = ranks(measure_sleep, small, [], 3, [0.0, 0.0])
                seconds = [median(times["exchange"][p]) / 1e3 for p in ("forward", "backward")]
                times = ranks(measure_sleep, small, args.chunks, args.repeats, seconds)
                title = f"attention that sleeps as long as the exchange takes, {rate}"
                found["sleep"] = show_layer(console, title, times)
                link.set_rate(None)
                bar.update()
            if "timeline" in args.parts:
                rate = equal_rate(ranks, shape)
                link.set_rate(rate)
                recorded = ranks(record_layer, shape, max(args.chunks), link.interface)
                file = args.output / "overlap_timeline.png"
                title = f"One attention layer, rank 0 of {RANKS}, {rate}/s"
                timeline.draw(file, title, recorded)
                console.print(f"timeline: {file}")
                link.set_rate(None)
                bar.update()
            if "step" in args.parts:
                times = ranks(measure_step, args.step_seq, args.step_chunks, 2)
                equal = mbit(median(times["layer compute"]["step"]), 2 * times["bytes"])
                rate = f"{equal:.0f}mbit"
                link.set_rate(rate)
                times = ranks(measure_step, args.step_seq, args.step_chunks, args.repeats)
                title = f"training step of the demo, {args.step_seq} tokens, {rate}"
                fill = fill_of(demo_shape(args.step_seq), args.step_chunks)
                found["step"] = show_step(console, title, times, fill) | {"rate": rate}
                bar.update()
    bar.close()
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1, default=str))


if __name__ == "__main__":
    main()
