"""Programs as people write them for one device: small language models, classifiers, U-Nets."""

from __future__ import annotations

import functools
import math

import torch
import torch.nn.functional as F
from torch import nn

from corpus.step import Case, Entry
from corpus.tokens import VOCAB, language_batch

DIM, HEADS = 32, 4


def split_heads(x):
    return x.view(x.size(0), x.size(1), HEADS, -1).transpose(1, 2)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM)

    def rotate(self, x):
        return x

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward(self, x):
        q, k, v = map(split_heads, self.qkv(x).split(DIM, 2))
        y = self.attend(self.rotate(q), self.rotate(k), v)
        return self.out(y.transpose(1, 2).contiguous().view(x.shape))


class ByHand(Attention):
    """A mask cut out of a registered triangle."""

    def __init__(self):
        super().__init__()
        self.register_buffer("triangle", torch.tril(torch.ones(64, 64)).view(1, 1, 64, 64))

    def attend(self, q, k, v):
        n = q.size(-2)
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        scores = scores.masked_fill(self.triangle[:, :, :n, :n] == 0, float("-inf"))
        return F.softmax(scores, dim=-1) @ v


def angles(x):
    frequencies = 1e4 ** -(torch.arange(0, x.size(-1), 2, dtype=x.dtype) / x.size(-1))
    return torch.outer(torch.arange(x.size(-2), dtype=x.dtype), frequencies)


class ComplexRoPE(Attention):
    def rotate(self, x):
        a = angles(x)
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(a), a)).flatten(-2)


class InterleavedRoPE(Attention):
    def rotate(self, x):
        cos, sin = angles(x).cos(), angles(x).sin()
        even, odd = x[..., ::2], x[..., 1::2]
        return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)


class HalvesRoPE(Attention):
    def rotate(self, x):
        a = torch.cat([angles(x)] * 2, -1)
        first, second = x.chunk(2, -1)
        return x * a.cos() + torch.cat([-second, first], -1) * a.sin()


class Alibi(Attention):
    def attend(self, q, k, v):
        place = torch.arange(q.size(-2))
        distance = (place[None] - place[:, None]).to(q.dtype)
        slopes = torch.tensor([2.0 ** -(2 * h + 2) for h in range(HEADS)], dtype=q.dtype)
        bias = slopes[:, None, None] * distance
        bias = bias.masked_fill(distance > 0, float("-inf"))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias[None])


class Window(Attention):
    def attend(self, q, k, v):
        place = torch.arange(q.size(-2))
        distance = place[:, None] - place[None]
        mask = (distance >= 0) & (distance < 4)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class Linear(Attention):
    """Causal attention without a softmax, by cumulative sums over the sequence."""

    def attend(self, q, k, v):
        q, k = F.elu(q) + 1, F.elu(k) + 1
        state = (k.unsqueeze(-1) * v.unsqueeze(-2)).cumsum(2)
        total = (q * k.cumsum(2)).sum(-1, keepdim=True)
        return (q.unsqueeze(-2) @ state).squeeze(-2) / total


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Experts(nn.Module):
    """Every expert computes every token; weights of all but the best two are zero."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(DIM, 4, bias=False)
        self.experts = nn.ModuleList(MLP() for _ in range(4))

    def forward(self, x):
        best, chosen = self.router(x).softmax(-1).topk(2, dim=-1)
        weights = torch.zeros_like(self.router(x)).scatter(-1, chosen, best / best.sum(-1, True))
        return sum(weights[..., i : i + 1] * e(x) for i, e in enumerate(self.experts))


class TokenShift(nn.Module):
    """A mix with the token before, and a gated product over channels."""

    def __init__(self):
        super().__init__()
        self.shift = nn.ZeroPad2d((0, 0, 1, -1))
        self.mix = nn.Parameter(torch.rand(2, DIM))
        self.key, self.value = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)
        self.gate = nn.Linear(DIM, DIM)

    def forward(self, x):
        before = self.shift(x)
        k, r = (x * m + before * (1 - m) for m in self.mix)
        return torch.sigmoid(self.gate(r)) * self.value(torch.relu(self.key(k)).square())


class Block(nn.Module):
    def __init__(self, attention=Attention, mlp=MLP, parallel=False):
        super().__init__()
        self.attention, self.mlp, self.parallel = attention(), mlp(), parallel
        self.first, self.second = nn.LayerNorm(DIM), nn.LayerNorm(DIM)

    def forward(self, x):
        if self.parallel:
            y = self.first(x)
            return x + self.attention(y) + self.mlp(y)
        x = x + self.attention(self.first(x))
        return x + self.mlp(self.second(x))


class LM(nn.Module):
    def __init__(self, tied=True, positions=True, **block):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, DIM)
        self.positions = nn.Embedding(64, DIM) if positions else None
        self.blocks = nn.ModuleList(Block(**block) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def embed(self, ids):
        x = self.tokens(ids)
        if self.positions is not None:
            x = x + self.positions(torch.arange(0, ids.size(1), device=ids.device))
        return x

    def run(self, x):
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, ids, labels):
        logits = self.head(self.run(self.embed(ids)))
        labels = F.pad(labels[:, 1:], (0, 1), value=-100)
        return F.cross_entropy(logits.view(-1, VOCAB), labels.view(-1), ignore_index=-100)


class NextTwo(LM):
    """A second head for the token after the next one."""

    def __init__(self):
        super().__init__()
        self.join, self.extra = nn.Linear(2 * DIM, DIM), Block()

    def forward(self, ids, labels):
        x = self.run(self.embed(ids))
        y = self.extra(self.join(torch.cat([x[:, :-1], self.tokens(ids[:, 1:])], -1)))
        first = F.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), labels[:, 1:].flatten())
        second = F.cross_entropy(self.head(y[:, :-1]).flatten(0, 1), labels[:, 2:].flatten())
        return first + 0.3 * second


class Prefix(LM):
    """Learned tokens in front, which have no labels."""

    def __init__(self):
        super().__init__()
        self.prefix = nn.Parameter(torch.randn(3, DIM))

    def forward(self, ids, labels):
        x = torch.cat([self.prefix.expand(ids.size(0), -1, -1), self.embed(ids)], 1)
        logits = self.head(self.run(x)[:, 3:])
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class ConvStem(LM):
    """A short causal convolution before the blocks."""

    def __init__(self):
        super().__init__(positions=False)
        self.stem = nn.Conv1d(DIM, DIM, 3)

    def embed(self, ids):
        x = self.tokens(ids).transpose(1, 2)
        return F.gelu(self.stem(F.pad(x, (2, 0)))).transpose(1, 2)


class UNet(LM):
    """The first layers' outputs are joined to the last layers' inputs."""

    def __init__(self):
        super().__init__()
        self.up = nn.ModuleList(Block() for _ in range(2))
        self.join = nn.ModuleList(nn.Linear(2 * DIM, DIM) for _ in range(2))

    def run(self, x):
        skips = []
        for block in self.blocks:
            x = block(x)
            skips.append(x)
        for block, join in zip(self.up, self.join, strict=True):
            x = block(join(torch.cat([x, skips.pop()], -1)))
        return self.norm(x)


class Encoder(Attention):
    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v)


class Pooled(LM):
    """A sequence's class, from the mean of its valid tokens."""

    def __init__(self):
        super().__init__(attention=Encoder)

    def forward(self, ids, labels):
        x, valid = self.run(self.embed(ids)), (labels != -100).unsqueeze(-1)
        pooled = (x * valid).sum(1) / valid.sum(1).clamp(min=1)
        return F.cross_entropy(self.head(pooled), ids[:, 0])


class Latents(LM):
    """A few learned queries read the tokens, and classify."""

    def __init__(self):
        super().__init__()
        self.latents = nn.Parameter(torch.randn(5, DIM))
        self.key, self.value = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, ids, labels):
        x = self.embed(ids)
        q = split_heads(self.latents.expand(ids.size(0), -1, -1))
        k, v = split_heads(self.key(x)), split_heads(self.value(x))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return F.cross_entropy(self.head(self.run(y).mean(1)), ids[:, 0])


class EncoderDecoder(LM):
    """``nn.Transformer``, which reads the ids and writes them shifted."""

    def __init__(self):
        super().__init__()
        self.core = nn.Transformer(DIM, HEADS, 1, 1, 48, 0.0, batch_first=True)

    def run(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.size(1), dtype=x.dtype)
        return self.core(x, x, tgt_mask=mask, tgt_is_causal=True)


class Patches(nn.Module):
    """An image's patches; four neighbours merge into one between two stages."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, DIM // 2, 4, stride=4)
        self.merge = nn.Linear(2 * DIM, DIM)
        self.blocks = nn.ModuleList(Block(Encoder) for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, pixels):
        x = self.stem(pixels).permute(0, 2, 3, 1)
        x = torch.cat([x[:, i::2, j::2] for j in (0, 1) for i in (0, 1)], -1)
        x = self.merge(x).flatten(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


_PROGRAMS = {
    "nanoGPT": lambda: LM(attention=ByHand),
    "GPT, flash attention": LM,
    "GPT, untied": lambda: LM(tied=False),
    "RoPE, complex": lambda: LM(positions=False, attention=ComplexRoPE),
    "RoPE, interleaved": lambda: LM(positions=False, attention=InterleavedRoPE),
    "RoPE, halves": lambda: LM(positions=False, attention=HalvesRoPE),
    "ALiBi": lambda: LM(positions=False, attention=Alibi),
    "sliding window": lambda: LM(attention=Window),
    "linear attention": lambda: LM(attention=Linear),
    "parallel blocks": lambda: LM(parallel=True),
    "mixture of experts": lambda: LM(mlp=Experts),
    "token shift": lambda: LM(mlp=TokenShift),
    "next two tokens": NextTwo,
    "prefix tokens": Prefix,
    "convolution first": ConvStem,
    "U-Net": UNet,
    "pooled encoder": Pooled,
    "latent queries": Latents,
    "nn.Transformer": EncoderDecoder,
    "merged patches": Patches,
}


def _make(name: str, length: int) -> Case:
    torch.manual_seed(0)
    model = _PROGRAMS[name]().double()
    if isinstance(model, Patches):
        generator = torch.Generator().manual_seed(0)
        pixels = torch.randn(2, 3, 40, 24, generator=generator, dtype=torch.float64)
        return Case(model, {"pixels": pixels}, {"pixels": 2})
    return Case(model, *language_batch(length))


PROGRAMS = {n: Entry("programs", functools.partial(_make, n)) for n in _PROGRAMS}
