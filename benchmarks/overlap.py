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

import json
from pathlib import Path
from statistics import median

import bench
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
from tqdm import tqdm

PARTS = ["loopback", "curves", "layer", "sleep", "timeline", "step"]


def rate_of(ms: float, size: int) -> str:
    """Return the rate at which `size` bytes each way take `ms`, as tc writes it."""
    return f"{size * 8 / ms / 1e3:.0f}mbit"


def equal_rate(ranks: bench.Ranks, shape: dict) -> str:
    """Return the rate at which a layer's exchange takes as long as its compute."""
    times = ranks(measure_layer, shape, [], 3)
    return rate_of(median(total(times["compute"])), 2 * times["bytes"])


def total(times: dict) -> list[float]:
    return [sum(each) for each in zip(*times.values(), strict=True)]


def show_layer(title: str, times: dict) -> list[dict]:
    results = []
    for phase in ("forward", "backward", "both"):
        of = {
            name: total(calls) if phase == "both" else calls[phase]
            for name, calls in times.items()
            if name != "bytes"
        }
        for name, ms in of.items():
            row = {"phase": phase, "contender": name, "min_ms": min(ms), "median_ms": median(ms)}
            if name.startswith("on"):
                exposed = median(ms) - median(of["compute"])
                row["exposed"] = exposed / median(of["exchange"])
                ideal = name.replace("on", "ideal")
                if ideal in of:
                    hidden = median(of["off"]) - median(ms)
                    row["hidden"] = hidden / (median(of["off"]) - median(of[ideal]))
            results.append(row)
    columns = ["phase", "contender", "min_ms", "median_ms", "exposed", "hidden"]
    forms = ["", "", ".1f", ".1f", ".2f", ".2f"]
    rows = [
        [format(row[c], form) if c in row else "" for c, form in zip(columns, forms, strict=True)]
        for row in results
    ]
    columns = ["phase", "", "min ms", "median ms", "exposed", "hidden of ideal"]
    bench.show([bench.Table(title, columns, rows)])
    return results


def fill_of(shape: dict, chunks: int) -> float:
    """Return the share of a layer's bytes that no pipeline of so many chunks hides behind
    attention: the first chunk on its way in (with the kv heads that it reads), the last on its way
    out."""
    heads, kv_heads = shape["heads"], shape["kv_heads"]
    q0, q1, kv0, kv1 = torch.ops.deepsp.head_split(heads, kv_heads, RANKS, 0, 0, chunks)
    out0, out1, _, _ = torch.ops.deepsp.head_split(heads, kv_heads, RANKS, 0, chunks - 1, chunks)
    whole = (2 * heads + 2 * kv_heads) / RANKS
    return (q1 - q0 + 2 * (kv1 - kv0) + out1 - out0) / whole


def show_step(title: str, times: dict, fill: float) -> dict:
    steps = {name: calls["step"] for name, calls in times.items() if name != "bytes"}
    rows = [[name, f"{min(ms):.0f}", f"{median(ms):.0f}"] for name, ms in steps.items()]
    bench.show([bench.Table(title, ["", "min ms", "median ms"], rows)])
    of = {name: median(ms) for name, ms in steps.items()}
    shorter = min(of["layer exchange"], of["layer compute"])
    hidable = demo.LAYERS * min(of["layer exchange"] * (1 - fill), of["layer compute"])
    gain = of["off"] - of["on"]
    exposed = (of["layer on"] - of["layer compute"]) / of["layer exchange"]
    print(
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


def show_curves(file: Path, curves: dict[str, dict]) -> list[dict]:
    """Draw and compare curves, by group and variant, with the first variant of each group."""
    results, panels = [], {"sharex": True, "figsize": (9, 8), "height_ratios": (2, 1, 1)}
    with bench.picture(file, 3, dpi=130, **panels) as (_, (upper, middle, lower)):
        for group, variants in curves.items():
            (_, base), *_ = variants.items()
            for n, (name, curve) in enumerate(variants.items()):
                label = f"{group}, {name}"
                upper.plot(curve["losses"], linewidth=6 - n, alpha=0.6, label=label)
                middle.plot(curve["gradient_norms"], linewidth=6 - n, alpha=0.6)
                if n > 0:
                    both = [
                        [abs(a - b) / abs(b) for a, b in zip(curve[key], base[key], strict=True)]
                        for key in ("losses", "gradient_norms")
                    ]
                    differences = [max(pair) for pair in zip(*both, strict=True)]
                    lower.semilogy(differences, ".", label=label)
                    results.append({"curve": label, "difference": max(differences)})
        lower.axhline(1e-12, color="gray", linestyle=":", label="accepted")
        upper.set_ylabel("loss (nats per byte)")
        middle.set_ylabel("gradient norm")
        lower.set_ylabel("relative difference\nfrom overlap off")
        lower.set_xlabel("step")
        upper.legend(fontsize=8)
    rows = [[x["curve"], f"{x['difference']:.1e}"] for x in results]
    columns = ["", "largest relative difference"]
    bench.show([bench.Table("losses and gradient norms, float64", columns, rows)])
    print(f"plot: {file}")
    return results


def measure_sleeping(ranks: bench.Ranks, args, shape: dict) -> list[dict]:
    rate, small = "400mbit", shape | {"hidden": 64}
    ranks.link.set_rate(rate)
    times = ranks(measure_sleep, small, [], 3, [0.0, 0.0])
    seconds = [median(times["exchange"][p]) / 1e3 for p in ("forward", "backward")]
    times = ranks(measure_sleep, small, args.chunks, args.repeats, seconds)
    return show_layer(f"attention that sleeps as long as the exchange takes, {rate}", times)


def draw_timeline(ranks: bench.Ranks, args, shape: dict, rate: str) -> None:
    ranks.link.set_rate(rate)
    recorded = ranks(record_layer, shape, max(args.chunks), ranks.link.interface)
    file = args.output / "overlap_timeline.png"
    timeline.draw(file, f"One attention layer, rank 0 of {RANKS}, {rate}/s", recorded)
    print(f"timeline: {file}")


def measure_demo(ranks: bench.Ranks, args) -> dict:
    times = ranks(measure_step, args.step_seq, args.step_chunks, 2)
    rate = rate_of(median(times["layer compute"]["step"]), 2 * times["bytes"])
    ranks.link.set_rate(rate)
    times = ranks(measure_step, args.step_seq, args.step_chunks, args.repeats)
    fill = fill_of(demo_shape(args.step_seq), args.step_chunks)
    title = f"training step of the demo, {args.step_seq} tokens, {rate}"
    return show_step(title, times, fill) | {"rate": rate}


def measure_on_link(args, shape: dict, parts: list[str]) -> dict:
    results = {}
    with bench.ranks_on(None) as ranks:
        rates = args.rates
        if not rates and {"layer", "timeline"} & {*parts}:
            rates = [equal_rate(ranks, shape)]  # measured once: the table and the picture share it
        for part in tqdm(parts, desc="on the link"):
            if part == "layer":
                for rate in rates:
                    ranks.link.set_rate(rate)
                    times = ranks(measure_layer, shape, args.chunks, args.repeats)
                    title = f"one layer, {rate}, {times['bytes'] / 2**20:.1f} MiB each way"
                    results[f"layer {rate}"] = show_layer(title, times)
            elif part == "sleep":
                results["sleep"] = measure_sleeping(ranks, args, shape)
            elif part == "timeline":
                draw_timeline(ranks, args, shape, rates[0])
            else:
                results["step"] = measure_demo(ranks, args)
            ranks.link.set_rate(None)
    return results


def main() -> None:
    args = bench.parser_of(
        __doc__,
        parts=(PARTS, "what to measure", PARTS),
        seq=(2048, "tokens of the layer's sequence"),
        hidden=(1024, "features of the layer"),
        heads=(16, "heads of the layer, of 64 channels"),
        chunks=([1, 2, 4], "head chunks"),
        rates=([], "like 500mbit; without any: see above"),
        step_seq=(8192, "tokens of the training step"),
        step_chunks=(4, "head chunks of the training step"),
        repeats=(12, "of each contender, interleaved"),
        curve_steps=(50, "optimizer steps of each curve"),
        output=(Path("overlap-output"), "folder for the pictures"),
        json=(Path, "file for the figures"),
    ).parse_args()
    shape = {"seq": args.seq, "hidden": args.hidden, "head_dim": 64}
    shape |= {"heads": args.heads, "kv_heads": args.heads}
    results: dict = {"settings": vars(args)}
    args.output.mkdir(parents=True, exist_ok=True)
    if "loopback" in args.parts:
        with bench.ranks_on(bench.LOOPBACK) as ranks:
            times = ranks(measure_layer, shape, args.chunks, args.repeats)
        results["loopback"] = show_layer("one layer, loopback", times)
    if "curves" in args.parts:
        variants = {"overlap off": {"overlap": False, "chunks": 1}} | {
            f"overlap on, {n} chunks": {"overlap": True, "chunks": n} for n in (1, 2, 4)
        }
        curves = {}
        for size in (2, 3):
            with bench.ranks_on(bench.LOOPBACK, size) as ranks:
                curves[f"{size} ranks"] = ranks(train_curves, variants, args.curve_steps, 512)
        results["curves"] = show_curves(args.output / "overlap_curves.png", curves)
    if on_link := [part for part in args.parts if part not in ("loopback", "curves")]:
        results |= measure_on_link(args, shape, on_link)
    if args.json:
        results["machine"] = bench.about_machine()
        args.json.write_text(json.dumps(results, indent=1, default=str))


if __name__ == "__main__":
    main()
