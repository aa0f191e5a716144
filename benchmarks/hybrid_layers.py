"""What benchmarks/hybrid.py compares: two recurrent layers, and the ways to run them on a sequence
that ranks share.

The layers have the parts that they have in transformers: one projection of the input, a causal
convolution with silu of some of its outputs, the recurrence, a gated norm, and the projection of
the output. The convolution and the recurrences are transformers' own functions, in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    causal_conv1d_fn,
    torch_chunk_gated_delta_rule,
)

import deepsp
from deepsp.sequence.recurrence.convolution import causal_convolution

WIDTH = 4  # of the convolution
SEGMENT = 1024  # tokens of a call of the delta rule


@dataclass
class Part:
    """Some heads of a layer: how many, and the parameters that belong to them."""

    heads: dict[str, int]
    conv: Tensor  # [channels, WIDTH]
    norm: Tensor
    per_head: dict[str, Tensor]


class Layer(nn.Module):
    """A recurrent layer.

    Attributes of subclasses:
        heads: the number of heads of each output of in_proj, in order.
        dims: the size of one of its heads.
        convolved: the outputs, the first ones, that the convolution takes.
        value: the output that has the heads of the recurrence.
        own_norms: whether each head has its own weight of the norm, or all have the same.
    """

    heads: dict[str, int]
    dims: dict[str, int]
    convolved: tuple[str, ...]
    value: str
    own_norms: bool

    def __init__(self, hidden: int):
        super().__init__()
        heads, dims = self.heads, self.dims
        inner = heads[self.value] * dims[self.value]
        self.in_proj = nn.Linear(hidden, sum(heads[n] * dims[n] for n in heads), bias=False)
        channels = sum(heads[n] * dims[n] for n in self.convolved)
        self.conv = nn.Parameter(torch.randn(channels, WIDTH) / 2)
        self.norm = nn.Parameter(torch.ones(inner if self.own_norms else dims[self.value]))
        self.out_proj = nn.Linear(inner, hidden, bias=False)
        self.A_log = nn.Parameter(torch.rand(heads[self.value]).mul_(8).add_(0.1).log_())
        self.dt_bias = nn.Parameter(torch.rand(heads[self.value]) - 3)

    def per_head(self) -> dict[str, Tensor]:
        return {"A_log": self.A_log, "dt_bias": self.dt_bias}

    def part(self, rank: int = 0, size: int = 1) -> Part:
        """This rank's heads; the numbers of all heads divide by the ranks."""

        def of(x: Tensor, dim: int = 0) -> Tensor:
            return x.chunk(size, dim)[rank]

        sizes = [self.heads[n] * self.dims[n] for n in self.convolved]
        return Part(
            {n: h // size for n, h in self.heads.items()},
            torch.cat([of(w) for w in self.conv.split(sizes)]) if size > 1 else self.conv,
            of(self.norm) if self.own_norms else self.norm,
            {n: of(x) for n, x in self.per_head().items()},
        )

    def sections(self, part: Part) -> list[int]:
        """The widths of what the convolution takes, and of the rest."""
        widths = [h * self.dims[n] for n, h in part.heads.items()]
        return [sum(widths[: len(self.convolved)]), *widths[len(self.convolved) :]]

    def mix(self, part: Part, projected: Tensor, convolve: Callable, run: Callable) -> Tensor:
        """From in_proj's outputs [B, S, channels] to out_proj's inputs."""
        mixed, *rest = projected.split(self.sections(part), -1)
        mixed = convolve(mixed.transpose(1, 2), part.conv).transpose(1, 2)
        mixed = mixed.split([part.heads[n] * self.dims[n] for n in self.convolved], -1)
        outputs = dict(zip(self.heads, [*mixed, *rest], strict=True))
        outputs = {n: x.unflatten(-1, (part.heads[n], self.dims[n])) for n, x in outputs.items()}
        gate = outputs.pop("z")
        return self.gated(run(**self.arguments(outputs, part)), gate, part.norm).flatten(2)

    def arguments(self, outputs: dict[str, Tensor], part: Part) -> dict[str, Tensor]:
        """Return the arguments of the recurrence."""
        raise NotImplementedError

    def gated(self, out: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        raise NotImplementedError

    def distributed(self, state: str, group=None) -> deepsp.DistributedRecurrence:
        raise NotImplementedError


class GatedDeltaNet(Layer):
    """As in Qwen3.5, with an eighth of its 9B's hidden size and heads of half the size."""

    convolved = ("query", "key", "value")
    value = "value"
    own_norms = False

    def __init__(self, hidden: int, heads: int, dim: int):
        self.heads = {"query": heads // 2, "key": heads // 2, "value": heads, "z": heads}
        self.dims = dict.fromkeys(self.heads, dim) | {"b": 1, "a": 1}
        self.heads |= {"b": heads, "a": heads}
        super().__init__(hidden)

    def arguments(self, outputs, part):
        a, beta = outputs.pop("a").squeeze(3), outputs.pop("b").squeeze(3).sigmoid()
        g = -part.per_head["A_log"].exp() * F.softplus(a + part.per_head["dt_bias"])
        return outputs | {"g": g, "beta": beta}

    @staticmethod
    def run(query, key, value, g, beta, initial_state=None, output_final_state=False):
        """In segments: the backward of transformers' function takes time that is quadratic in the
        number of its chunks, each of which has a gradient of full size."""
        outputs, state = [], initial_state
        segments = [x.split(SEGMENT, 1) for x in (query, key, value, g, beta)]
        for segment in zip(*segments, strict=True):
            out, state = torch_chunk_gated_delta_rule(
                *segment, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
            )
            outputs.append(out)
        return torch.cat(outputs, 1), state if output_final_state else None

    def gated(self, out, gate, weight):
        return F.rms_norm(out, out.shape[-1:], eps=1e-6) * weight * F.silu(gate)

    def distributed(self, state, group=None):
        return deepsp.DistributedRecurrence(self.run, group, state=state)


class Mamba2(Layer):
    """As in Nemotron-H, with an eighth of its 8B's hidden size and channels."""

    convolved = ("x", "B", "C")
    value = "x"
    own_norms = True

    def __init__(self, hidden: int, heads: int, dim: int, groups: int, state: int, chunk: int):
        self.heads = {"x": heads, "B": groups, "C": groups, "z": heads, "dt": heads}
        self.dims = {"x": dim, "B": state, "C": state, "z": dim, "dt": 1}
        self.groups, self.chunk = groups, chunk
        super().__init__(hidden)
        self.D = nn.Parameter(torch.ones(heads))

    def per_head(self):
        return super().per_head() | {"D": self.D}

    def arguments(self, outputs, part):
        p = part.per_head
        outputs["dt"] = outputs["dt"].squeeze(3)
        return outputs | {"A": -p["A_log"].exp(), "D": p["D"], "dt_bias": p["dt_bias"]}

    def run(self, x, B, C, dt, A, D, dt_bias, initial_state=None, output_final_state=False):
        result = mamba2_chunk_scan(
            x,
            dt,
            A,
            B,
            C,
            self.chunk,
            D=D,
            dt_bias=dt_bias,
            dt_softplus=True,
            initial_states=None if initial_state is None else initial_state.mT,
            return_final_states=output_final_state,
        )
        return (result[0], result[1].mT) if output_final_state else (result,)

    def gated(self, out, gate, weight):
        y = (out * F.silu(gate)).flatten(2)  # a norm for each group
        y = y.unflatten(-1, (-1, self.heads["x"] // self.groups * self.dims["x"]))
        return F.rms_norm(y, y.shape[-1:], eps=1e-5).flatten(2) * weight

    def distributed(self, state, group=None):
        return deepsp.DistributedRecurrence(
            self.run,
            group,
            value="x",
            per_head=("A", "D", "dt_bias"),
            state=state,
            decay=lambda dt, A, dt_bias, **_: F.softplus(dt + dt_bias) * A,
            read=lambda x, C, **_: C.repeat_interleave(x.size(2) // C.size(2), 2),
        )


# ----------------------------------------------------------------------------------- ways


def silu_conv(x: Tensor, weight: Tensor) -> Tensor:
    """[B, C, S]."""
    return causal_conv1d_fn(x, weight, activation="silu")


def whole(layer: Layer) -> Callable[[Tensor], Tensor]:
    """The whole sequence in one process."""
    return lambda x: layer.mix(layer.part(), x, silu_conv, lambda **a: layer.run(**a)[0])


def sharded(layer: Layer, state: str, group=None) -> Callable[[Tensor], Tensor]:
    """deepsp's way: a rank's own tokens, but for the recurrence by heads."""
    module = layer.distributed(state, group)

    size = dist.get_world_size(group)

    def convolve(x: Tensor, weight: Tensor) -> Tensor:
        return causal_convolution(
            lambda part: silu_conv(part, weight), x, WIDTH, group, [x.size(2)] * size
        )

    return lambda x: layer.mix(layer.part(), x, convolve, module)


def megatron(layer: Layer, to_heads: Callable, to_tokens: Callable) -> Callable[[Tensor], Tensor]:
    """Megatron's way: everything between the projections on the whole sequence, for some heads."""
    rank, size = dist.get_rank(), dist.get_world_size()
    widths = [h * layer.dims[n] for n, h in layer.heads.items()]

    def between(projected: Tensor) -> Tensor:
        mine = to_heads(list(projected.split(widths, -1)), layer)
        out = layer.mix(layer.part(rank, size), mine, silu_conv, lambda **a: layer.run(**a)[0])
        return to_tokens(out, layer)

    return between


# Tokens of all heads for all tokens of some heads, and back; the results are [B, S, channels].


def to_heads_by_torch(sections: list[Tensor], layer: Layer) -> Tensor:
    """A copy, so that each rank's channels lie together, and one all_to_all_single."""
    size = dist.get_world_size()
    sent = [x.unflatten(-1, (size, -1)).movedim(2, 0) for x in sections]
    received = AllToAll.apply(torch.cat(sent, -1))  # [P, B, S_r, channels of a rank]
    return received.movedim(0, 1).flatten(1, 2)


def to_tokens_by_torch(out: Tensor, layer: Layer) -> Tensor:
    size = dist.get_world_size()
    received = AllToAll.apply(out.unflatten(1, (size, -1)).movedim(1, 0).contiguous())
    return received.movedim(0, 2).flatten(2)


class AllToAll(torch.autograd.Function):
    """[P, ...]: a block for each rank, for one of each rank."""

    received = 0
    """Bytes, over all calls of this process."""

    @staticmethod
    def forward(ctx, sent):
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        AllToAll.received += received.nbytes * (len(sent) - 1) // len(sent)
        return received

    @staticmethod
    def backward(ctx, grad):
        return AllToAll.apply(grad.contiguous())


def to_heads_by_deepsp(sections: list[Tensor], layer: Layer) -> Tensor:
    heads = zip(sections, layer.heads.items(), strict=True)
    inputs = {n: x.unflatten(-1, (h, layer.dims[n])) for x, (n, h) in heads}
    order = [layer.value, *(n for n in inputs if n != layer.value)]  # the first one's are dealt out
    outputs = dict(zip(order, deepsp.seq_to_heads([inputs[n] for n in order]), strict=True))
    return torch.cat([outputs[n].flatten(2) for n in inputs], -1)


def to_tokens_by_deepsp(out: Tensor, layer: Layer) -> Tensor:
    out = out.unflatten(-1, (-1, layer.dims[layer.value]))
    return deepsp.heads_to_seq([out], [layer.heads[layer.value]])[0].flatten(2)


def ways(layer: Layer, group=None) -> dict[str, Callable[[Tensor], Tensor]]:
    """From in_proj's outputs to out_proj's inputs. ``group``: of deepsp's ways."""
    if dist.get_world_size() == 1:
        return {WHOLE: whole(layer)}
    return {
        HEADS: sharded(layer, "heads", group),
        STATE: sharded(layer, "pass", group),
        MEGATRON: megatron(layer, to_heads_by_torch, to_tokens_by_torch),
        MEGATRON_BY_DEEPSP: megatron(layer, to_heads_by_deepsp, to_tokens_by_deepsp),
    }


WHOLE, HEADS, STATE = "one process", "deepsp, by heads", "deepsp, by state"
MEGATRON = "Megatron's way"
MEGATRON_BY_DEEPSP = "Megatron's way, deepsp's exchange"


class Nothing(torch.autograd.Function):
    """A recurrence that costs nothing: its results were there before."""

    made: ClassVar[dict[torch.Size, Tensor]] = {}

    @staticmethod
    def of(x: Tensor) -> Tensor:
        if x.shape not in Nothing.made:
            Nothing.made[x.shape] = torch.randn(x.shape)
        return Nothing.made[x.shape].view_as(x)

    @staticmethod
    def forward(ctx, value, *others):
        ctx.inputs = value, *others
        return Nothing.of(value)

    @staticmethod
    def backward(ctx, grad):
        return tuple(Nothing.of(x) for x in ctx.inputs)


def do_nothing(layer: Layer) -> None:
    """Replaces a layer's recurrence."""

    def run(initial_state=None, output_final_state=False, **arguments):
        return (Nothing.apply(arguments.pop(layer.value), *arguments.values()),)

    layer.run = run
