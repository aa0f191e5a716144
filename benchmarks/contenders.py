"""What benchmarks/overlap.py compares, as its ranks run it: layers, exchanges, training steps."""

from __future__ import annotations

import argparse
import copy
import sys
import time
from pathlib import Path

import bench
import timeline
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ideal import IdealLayer
from torch import Tensor

import deepsp
from deepsp.sequence.attention import rope

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


class Local:
    """The layer's compute with nothing exchanged: q, k and v of this rank's tokens and all heads
    stand for those of all tokens and its own heads, which are as many elements."""

    def __init__(self, layer: deepsp.SequenceParallelAttention):
        self.layer, self.parameters = layer, layer.parameters

    def __call__(self, x: Tensor, is_causal: bool = False) -> Tensor:
        layer = self.layer
        counts = (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)
        q, k, v = (
            p(x).view(x.size(0), RANKS * x.size(1), count // RANKS, -1)
            for p, count in zip((layer.q_proj, layer.k_proj, layer.v_proj), counts, strict=True)
        )
        if layer.rope_theta is not None:
            options = {"theta": layer.rope_theta, "head_dim": layer.head_dim}
            turn = rope.angles_of(
                x, q.size(1), None, None, **options, interleaved=layer.rope_interleaved, look=False
            )
            q, k = (rope.rotate(y, *turn, layer.rope_interleaved) for y in (q, k))
        if layer.local_attention is not None:
            out = layer.local_attention(q, k, v)
        else:
            q, k, v = (y.transpose(1, 2) for y in (q, k, v))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)
            out = out.transpose(1, 2)
        return layer.o_proj(out.reshape(x.size(0), x.size(1), -1))


def bare_exchange(shape: dict) -> dict:
    """Return forward and backward: q, k, v there and the output back; the same in reverse."""
    rows = shape["seq"] // RANKS
    heads, kv_heads, dim = shape["heads"], shape["kv_heads"], shape["head_dim"]
    sizes = [4 * rows * n * dim // RANKS for n in (heads + 2 * kv_heads, heads)]
    qkv, output = (bench.bare_messages(size) for size in sizes)
    return {
        "forward": lambda: (qkv(), output()),
        "backward": lambda: (output(), qkv()),
        "bytes": sum(sizes),
    }


def layer_of(shape: dict, **kwargs) -> deepsp.SequenceParallelAttention:
    torch.manual_seed(0)
    return deepsp.SequenceParallelAttention(
        shape["hidden"], shape["heads"], shape["kv_heads"], head_dim=shape["head_dim"], **kwargs
    )


def steps_of(layer, x: Tensor, dy: Tensor, **kwargs) -> dict:
    """Return a layer's forward and backward as two calls."""
    outputs = []

    def forward():
        outputs.append(layer(x, **kwargs))

    def backward():
        torch.autograd.grad(outputs.pop(), [x, *layer.parameters()], dy)

    return {"forward": forward, "backward": backward}


def step_of(calls: dict) -> dict:
    """Return forward and backward as one call."""
    return {"step": lambda: (calls["forward"](), calls["backward"]())}


def timed(contenders: dict, repeats: int, phases=("forward", "backward")) -> dict:
    """Return milliseconds of the slower rank, by contender and phase."""
    calls = {(name, phase): of[phase] for name, of in contenders.items() for phase in phases}
    ms = bench.timed(calls, repeats)
    return {name: {phase: ms[name, phase] for phase in phases} for name in contenders}


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
    """Compare with what the layer computes."""
    close = {"rtol": 1e-3, "atol": 1e-3}
    y = layer(x, is_causal=True)
    torch.testing.assert_close(ideal.forward(x.detach()[0], True), y.detach()[0], **close)
    dx, *dw = torch.autograd.grad(y, [x, *layer.parameters()], dy)
    for a, b in zip(ideal.backward(dy[0], True), (dx[0], *dw), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3 * b.abs().max().item())


def measure_sleep(shape: dict, chunks: list, repeats: int, seconds: list[float]) -> dict:
    """Time a layer whose attention sleeps for `seconds`, forward and backward, over all heads of a
    rank."""
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
    """Time the demo's training step: forward, backward, gradient sync, optimizer."""
    torch.manual_seed(0)
    model = demo.ByteTransformer()
    alone = copy.deepcopy(model)  # without a sync, its ranks' weights drift apart
    ids = torch.randint(demo.VOCAB, (1, seq))
    batch, lens = deepsp.shard_batch({"input_ids": ids, "labels": ids})
    labels = batch["shift_labels"]

    def layers(model, **kwargs):
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

    def stepper(model, of_block, **kwargs):
        optimizer = torch.optim.AdamW(model.parameters())

        def attend(block, h):
            return of_block[block](h, is_causal=True, **kwargs)

        def step():
            logits = model(batch["input_ids"], attend)
            if model is alone:
                F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
            else:
                deepsp.cross_entropy(logits, labels).backward()
                deepsp.sync_gradients(model)
            optimizer.step()
            optimizer.zero_grad()

        return {"step": step}

    off, on = layers(model, overlap=False), layers(model, chunks=chunks)
    local = {block: Local(layer) for block, layer in layers(alone, overlap=False).items()}
    contenders = {
        "compute": stepper(alone, local),
        "off": stepper(model, off, seq_lens=lens),
        "on": stepper(model, on, seq_lens=lens),
    }
    # The attention layers alone: what can be hidden.
    shape = demo_shape(seq)
    x, dy = data(shape)
    block = model.blocks[0]
    for name, layer, kwargs in (
        ("layer compute", Local(off[block]), {}),
        ("layer off", off[block], {"seq_lens": lens}),
        ("layer on", on[block], {"seq_lens": lens}),
    ):
        contenders[name] = step_of(steps_of(layer, x, dy, is_causal=True, **kwargs))
    calls = bare_exchange(shape)
    contenders["layer exchange"] = step_of(calls)
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
    """Return what timeline.draw takes, overlap off and on."""
    x, dy = data(shape)
    unit = shape["seq"] // RANKS * shape["heads"] // RANKS * shape["head_dim"] * 4
    layers = {
        "overlap off": (layer_of(shape, overlap=False), 1),
        f"overlap on, {chunks} chunks": (layer_of(shape, chunks=chunks), chunks),
    }
    records = {}
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
        records[name] = timeline.record(calls["forward"], calls["backward"], sizes, interface)
    return records


def train_curves(variants: dict, steps: int, seq: int) -> dict:
    """Return losses and gradient norms of the demo's model in float64."""
    curves = {}
    for name, options in variants.items():
        args = argparse.Namespace(
            heads=demo.HEADS,
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
        curves[name] = {key: result[key] for key in ("losses", "gradient_norms")}
    return curves
