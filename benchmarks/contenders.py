"""What benchmarks/overlap.py compares, as its ranks run it: layers, exchanges, training steps."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import timeline
import torch
import torch.distributed as dist
from ideal import IdealLayer
from torch import Tensor, nn

import deepsp

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import train as demo

RANKS = 2


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


def measure_step(seq: int, chunks: int, repeats: int) -> dict:
    """The demo's training step: forward, backward, gradient sync, optimizer."""
    torch.manual_seed(0)
    model = demo.ByteTransformer()
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(demo.VOCAB, (1, seq))
    batch, lens = deepsp.shard_batch({"input_ids": ids, "labels": ids})

    def layers(**kwargs):
        return {
            block: deepsp.SequenceParallelAttention.from_projections(
                block.q_proj,
                block.k_proj,
                block.v_proj,
                block.o_proj,
                demo.HEADS,
                rope_theta=demo.ROPE_THETA,
                **kwargs,
            )
            for block in model.blocks
        }

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
            steps=steps,
            seq_len=seq,
            dtype="float64",
            lr=1e-3,
            seed=1,
            data=None,
            device="cpu",
            **options,
        )
        result = demo.train_sharded(args, torch.device("cpu"))
        found[name] = {key: result[key] for key in ("losses", "gradient_norms")}
    return found
