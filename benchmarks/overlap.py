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
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import timeline
import torch
import torch.distributed as dist
from ideal import IdealLayer
from netlink import Netlink
from torch import Tensor, nn

import deepsp

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import train as demo

RANKS = 2
PARTS = ["loopback", "curves", "layer", "sleep", "timeline", "step"]


# ------------------------------------------------------------------------- what is compared


class Sleep(torch.autograd.Function):
    """An attention that takes a set time, and no CPU."""

    @staticmethod
    def forward(ctx, q, k, v, seconds):
        ctx.save_for_backward(q, k, v)
        ctx.seconds = seconds
        time.sleep(seconds[0] * q.size(2))
        return q

    @staticmethod
    def backward(ctx, grad):
        q, k, v = ctx.saved_tensors
        time.sleep(ctx.seconds[1] * q.size(2))
        return grad, k, v, None


class Local(nn.Module):
    """The layer's compute with nothing exchanged: q, k and v of my tokens and all heads are taken
    for those of all tokens and my heads, which are as many elements."""

    def __init__(self, layer: deepsp.SequenceParallelAttention):
        super().__init__()
        self.layer = [layer]

    def forward(self, x: Tensor, **kwargs) -> Tensor:
        (layer,) = self.layer
        counts = (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)
        q, k, v = (
            p(x).view(x.size(0), RANKS * x.size(1), count // RANKS, -1)
            for p, count in zip((layer.q_proj, layer.k_proj, layer.v_proj), counts, strict=True)
        )
        if layer.rope_theta is not None:
            turn = layer._angles(x, [x.size(1)] * RANKS, None)
            q, k = layer._turned(q, k, turn)
        out = layer._attend(q, [k], [v], 0, 1, (), kwargs)
        return layer.o_proj(out.reshape(x.size(0), x.size(1), -1))


def bare_exchange(shape: dict) -> dict:
    """Forward and backward: q, k, v there and the output back; the same in reverse."""
    rows = shape["seq"] // RANKS
    heads, kv_heads, dim = shape["heads"], shape["kv_heads"], shape["head_dim"]
    sizes = [rows * (heads + 2 * kv_heads) * dim // RANKS, rows * heads * dim // RANKS]
    sent, received = ([torch.randn(n) for n in sizes] for _ in range(2))
    peer = 1 - dist.get_rank()

    def run(order):
        for i in order:
            arriving = dist.irecv(received[i], peer)
            dist.isend(sent[i], peer).wait()
            arriving.wait()

    return {
        "forward": lambda: run((0, 1)),
        "backward": lambda: run((1, 0)),
        "bytes": sum(sizes) * 4,
    }


def layer_of(shape: dict, **kwargs) -> deepsp.SequenceParallelAttention:
    torch.manual_seed(0)
    return deepsp.SequenceParallelAttention(
        shape["hidden"], shape["heads"], shape["kv_heads"], head_dim=shape["head_dim"], **kwargs
    )


def steps_of(layer, x: Tensor, dy: Tensor, **kwargs) -> dict:
    """A layer's forward and backward as two calls."""
    kept = {}
    wanted = (
        [x, *layer.parameters()] if list(layer.parameters()) else [x, *layer.layer[0].parameters()]
    )

    def forward():
        kept["y"] = layer(x, **kwargs)

    def backward():
        torch.autograd.grad(kept.pop("y"), wanted, dy)

    return {"forward": forward, "backward": backward}


def timed(contenders: dict, repeats: int, phases=("forward", "backward")) -> dict:
    """Milliseconds of the slower rank, by contender and phase."""
    taken = {name: {phase: [] for phase in phases} for name in contenders}
    for repeat in range(repeats + 1):
        for name, calls in contenders.items():
            for phase in phases:
                dist.barrier()
                begin = time.perf_counter()
                calls[phase]()
                seconds = time.perf_counter() - begin
                if repeat > 0:  # the first is a warm-up
                    taken[name][phase].append(seconds)
    for of_contender in taken.values():
        for phase, seconds in of_contender.items():
            slowest = torch.tensor(seconds, dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            of_contender[phase] = [1e3 * s for s in slowest.tolist()]
    return taken


def data(shape: dict) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1 + dist.get_rank())
    rows = shape["seq"] // RANKS
    return torch.randn(1, rows, shape["hidden"], requires_grad=True), torch.randn(
        1, rows, shape["hidden"]
    )


# ------------------------------------------------------------------------- tasks of the ranks


def measure_layer(shape: dict, chunks: list, repeats: int) -> dict:
    x, dy = data(shape)
    causal = {"is_causal": True}
    off = layer_of(shape, overlap=False)
    contenders = {
        "compute": steps_of(Local(off), x, dy, **causal),
        "exchange": bare_exchange(shape),
        "off": steps_of(off, x, dy, **causal),
    }
    for count in chunks:
        on = layer_of(shape, chunks=count)
        contenders[f"on {count}"] = steps_of(on, x, dy, **causal)
        if shape["heads"] == shape["kv_heads"] and count != "auto":
            weights = [p.weight.detach() for p in (on.q_proj, on.k_proj, on.v_proj, on.o_proj)]
            ideal = IdealLayer(weights, shape["heads"], shape["seq"] // RANKS, count)
            check_ideal(ideal, on, x, dy)
            contenders[f"ideal {count}"] = {
                "forward": lambda ideal=ideal: ideal.forward(x.detach()[0], True),
                "backward": lambda ideal=ideal: ideal.backward(dy[0], True),
            }
    return timed(contenders, repeats) | {"bytes": contenders["exchange"]["bytes"]}


def check_ideal(ideal: IdealLayer, layer, x: Tensor, dy: Tensor) -> None:
    """It computes what the layer computes."""
    close = {"rtol": 1e-3, "atol": 1e-3}
    y = layer(x, is_causal=True)
    torch.testing.assert_close(ideal.forward(x.detach()[0], True), y.detach()[0], **close)
    dx, *dw = torch.autograd.grad(y, [x, *layer.parameters()], dy)
    for a, b in zip(ideal.backward(dy[0], True), (dx[0], *dw), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3 * b.abs().max().item())


def measure_sleep(shape: dict, chunks: list, repeats: int, seconds: list[float]) -> dict:
    """Attention sleeps for `seconds` forward and backward, over all heads of a rank."""
    x, dy = data(shape)
    each = [s * RANKS / shape["heads"] for s in seconds]

    def attention(q, k, v):
        return Sleep.apply(q, k, v, each)

    off = layer_of(shape, overlap=False, local_attention=attention)
    contenders = {
        "compute": steps_of(Local(off), x, dy),
        "exchange": bare_exchange(shape),
        "off": steps_of(off, x, dy),
    }
    for count in chunks:
        layer = layer_of(shape, chunks=count, local_attention=attention)
        contenders[f"on {count}"] = steps_of(layer, x, dy)
    return timed(contenders, repeats)


def measure_step(seq: int, chunks: int | str, repeats: int, dtype: str = "float32") -> dict:
    """The demo's training step: forward, backward, gradient sync, optimizer."""
    torch.manual_seed(0)
    model = demo.ByteTransformer()
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(demo.VOCAB, (1, seq))
    batch, lens = deepsp.shard_batch({"input_ids": ids, "labels": ids})

    def layers(**kwargs):
        return {
            block: deepsp.SequenceParallelAttention.from_projections(
                block.q_proj, block.k_proj, block.v_proj, block.o_proj, demo.HEADS,
                rope_theta=demo.ROPE_THETA, **kwargs,
            )
            for block in model.blocks
        }  # fmt: skip

    def step(of_block, kwargs, sync=True):
        def attend(block, h):
            return of_block[block](h, is_causal=True, **kwargs)

        loss = deepsp.cross_entropy(model(batch["input_ids"], attend), batch["shift_labels"])
        loss.backward()
        if sync:
            deepsp.sync_gradients(model)
        optimizer.step()
        optimizer.zero_grad()

    off, on = layers(overlap=False), layers(chunks=chunks)
    local = {block: Local(layer) for block, layer in off.items()}
    contenders = {
        "compute": {"step": lambda: step(local, {}, sync=False)},
        "off": {"step": lambda: step(off, {"seq_lens": lens})},
        "on": {"step": lambda: step(on, {"seq_lens": lens})},
    }
    # The attention layers alone: what can be hidden.
    shape = demo_shape(seq)
    x, dy = data(shape)
    block = model.blocks[0]
    for name, layer, kwargs in (
        ("layer compute", local[block], {}),
        ("layer off", off[block], {"seq_lens": lens}),
        ("layer on", on[block], {"seq_lens": lens}),
    ):
        calls = steps_of(layer, x, dy, is_causal=True, **kwargs)
        contenders[name] = {"step": lambda calls=calls: (calls["forward"](), calls["backward"]())}
    calls = bare_exchange(shape)
    contenders["layer exchange"] = {
        "step": lambda calls=calls: (calls["forward"](), calls["backward"]())
    }
    return timed(contenders, repeats, ("step",)) | {"bytes": calls["bytes"]}


def demo_shape(seq: int) -> dict:
    return {
        "seq": seq,
        "hidden": demo.DIM,
        "heads": demo.HEADS,
        "kv_heads": demo.KV_HEADS,
        "head_dim": demo.HEAD_DIM,
    }


def record_layer(shape: dict, chunks: int, interface: str) -> dict:
    """What timeline.draw takes, overlap off and on."""
    x, dy = data(shape)
    unit = shape["seq"] // RANKS * shape["heads"] // RANKS * shape["head_dim"] * 4
    layers = {
        "overlap off": (layer_of(shape, overlap=False), 1),
        f"overlap on, {chunks} chunks": (layer_of(shape, chunks=chunks), chunks),
    }
    found = {}
    for name, (layer, n) in layers.items():
        # In one exchange of dq, dk, dv that is large they travel one by one.
        alone = n == 1 and 3 * shape["seq"] * shape["heads"] * shape["head_dim"] * 4 >= 16 << 20
        sizes = {
            "q, k, v": [3 * unit // n] * n,
            "output": [unit // n] * n,
            "dO": [unit // n] * n,
            "dq, dk, dv": [unit] * 3 if alone else [3 * unit // n] * n,
        }
        calls = steps_of(layer, x, dy, is_causal=True)
        found[name] = timeline.record(calls["forward"], calls["backward"], sizes, interface)
    return found


def train_curves(variants: dict, steps: int, seq: int) -> dict:
    """Losses and gradient norms of the demo's model in float64."""
    found = {}
    for name, options in variants.items():
        args = argparse.Namespace(
            steps=steps, seq_len=seq, dtype="float64", lr=1e-3, seed=1, data=None, device="cpu",
            **options,
        )  # fmt: skip
        result = demo.train_sharded(args, torch.device("cpu"))
        found[name] = {key: result[key] for key in ("losses", "gradient_norms")}
    return found


# ------------------------------------------------------------------------- running the ranks


def serve(rank: int, size: int, link: Netlink | None, path: str, pipe) -> None:
    init = f"file://{path}"
    if link is not None:
        link.enter(rank)
        os.environ["GLOO_SOCKET_IFNAME"] = link.interface
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=size)
    while (task := pipe.recv()) is not None:
        function, args = task
        pipe.send(function(*args))
    dist.barrier()
    dist.destroy_process_group()


class Ranks:
    """Processes on a link (None: the loopback); called like a function."""

    def __init__(self, link: Netlink | None, size: int = RANKS):
        self.link, self.size = link, size

    def __enter__(self) -> Ranks:
        spawn = multiprocessing.get_context("spawn")
        self.folder = tempfile.TemporaryDirectory()
        path = os.path.join(self.folder.name, "store")
        self.pipes, self.processes = [], []
        for rank in range(self.size):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(
                target=serve, args=(rank, self.size, self.link, path, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        return self

    def __call__(self, function, *args):
        for pipe in self.pipes:
            pipe.send((function, args))
        try:
            first, *_ = [pipe.recv() for pipe in self.pipes]
            return first
        except EOFError:
            raise SystemExit("overlap: a rank died; its message is above") from None

    def __exit__(self, *error) -> None:
        for pipe in self.pipes:
            if error[0] is None:
                pipe.send(None)
        for process in self.processes:
            if error[0] is None:
                process.join(timeout=20)
            if process.is_alive():
                process.terminate()
                process.join()
        self.folder.cleanup()


# ------------------------------------------------------------------------- report


def median(values: list[float]) -> float:
    return statistics.median(values)


def mbit(ms: float, size: int) -> float:
    """The rate at which `size` bytes each way take `ms`."""
    return size * 8 / ms / 1e3


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
    add("--parts", nargs="+", default=PARTS, choices=PARTS, help="what to measure")  # fmt: skip
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
                times = ranks(measure_layer, shape, [], 3)
                equal = mbit(median(total(times["compute"])), 2 * times["bytes"])
                for rate in args.rates or [f"{equal:.0f}mbit"]:
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
                times = ranks(measure_layer, shape, [], 3)
                equal = mbit(median(total(times["compute"])), 2 * times["bytes"])
                link.set_rate(f"{equal:.0f}mbit")
                recorded = ranks(record_layer, shape, max(args.chunks), link.interface)
                file = args.output / "overlap_timeline.png"
                title = f"One attention layer, rank 0 of {RANKS}, {equal:.0f} Mbit/s"
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
