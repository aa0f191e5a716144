"""Models for the compile pass: written for one device, none knows of a group."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import deepsp

VOCAB, DIM, HEADS, MAX = 50, 24, 4, 64


def heads_of(x, heads):
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def merged(x):
    return x.transpose(1, 2).flatten(2)


class Attention(nn.Module):
    def __init__(self, dim=DIM, heads=HEADS, kv_heads=None):
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads or heads
        self.q = nn.Linear(dim, dim)
        self.kv = nn.Linear(dim, 2 * dim // heads * self.kv_heads)
        self.out = nn.Linear(dim, dim)

    def forward(self, x, memory=None, mask=None, causal=True):
        k, v = self.kv(x if memory is None else memory).chunk(2, -1)
        q, k, v = heads_of(self.q(x), self.heads), *(heads_of(y, self.kv_heads) for y in (k, v))
        gqa = self.heads != self.kv_heads
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal and mask is None, enable_gqa=gqa
        )
        return self.out(merged(y))


class MLP(nn.Sequential):
    def __init__(self, dim=DIM):
        super().__init__(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))


class Experts(nn.Module):
    """The best two of four experts for each token, all computed."""

    def __init__(self, dim=DIM, experts=4):
        super().__init__()
        self.gate = nn.Linear(dim, experts)
        self.up = nn.Parameter(torch.randn(experts, dim, 2 * dim) / dim**0.5)
        self.down = nn.Parameter(torch.randn(experts, 2 * dim, dim) / dim**0.5)

    def forward(self, x):
        weight, chosen = self.gate(x).softmax(-1).topk(2, -1)
        weight = torch.zeros_like(self.gate(x)).scatter(-1, chosen, weight / weight.sum(-1, True))
        y = torch.einsum("bsd,edf->bsef", x, self.up).relu()
        return torch.einsum("bsef,efd,bse->bsd", y, self.down, weight)


class Block(nn.Module):
    def __init__(self, post=False, kv_heads=None, mlp=MLP, dropout=0.0):
        super().__init__()
        self.attention, self.mlp = Attention(kv_heads=kv_heads), mlp()
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(2))
        self.post, self.dropout = post, dropout

    def forward(self, x, mask=None, causal=True):
        def attend(x):
            return self.attention(x, mask=mask, causal=causal)

        for norm, layer in zip(self.norms, (attend, self.mlp), strict=True):
            if self.post:
                x = norm(x + layer(x))
            else:
                x = x + F.dropout(layer(norm(x)), self.dropout, self.training)
        return x


class LM(nn.Module):
    """Learned positions, tied embeddings; the loss is shifted inside."""

    def __init__(self, outside=False, **block):
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCAB, DIM), nn.Embedding(MAX, DIM)
        self.blocks = nn.ModuleList(Block(**block) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.outside = outside

    def mask(self, ids):
        return None

    def forward(self, ids, labels):
        x = self.embed(ids) + self.position(torch.arange(ids.size(1), device=ids.device))
        mask = self.mask(ids)
        for block in self.blocks:
            x = block(x, mask)
        logits = self.head(self.norm(x))
        if self.outside:
            return logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class PositionTable(LM):
    """The first rows of a parameter, added."""

    def forward(self, ids, labels):
        x = self.embed(ids) + self.position.weight[: ids.size(1)]
        for block in self.blocks:
            x = block(x)
        labels = F.pad(labels, (0, 1), value=-100)[:, 1:]
        return F.cross_entropy(self.head(self.norm(x)).transpose(1, 2), labels)


class Alibi(LM):
    def __init__(self):
        super().__init__()
        self.register_buffer("slopes", 2.0 ** -torch.arange(1, HEADS + 1).double())

    def mask(self, ids):
        place = torch.arange(ids.size(1), device=ids.device)
        distance = place[None, :] - place[:, None]
        bias = self.slopes[:, None, None] * distance
        return bias.masked_fill(distance > 0, float("-inf")).unsqueeze(0)


class RelativeBias(LM):
    """A learned bias for each head and distance."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Embedding(9, HEADS)

    def mask(self, ids):
        place = torch.arange(ids.size(1), device=ids.device)
        distance = (place[None, :] - place[:, None]).clamp(-4, 4) + 4
        return self.bias(distance).permute(2, 0, 1).unsqueeze(0)


class Packed(LM):
    """Documents in one row: a token sees those of its own document only."""

    def mask(self, ids):
        document = (ids == 0).cumsum(1)
        same = document[:, None, :, None] == document[:, None, None, :]
        return same & torch.ones(ids.size(1), ids.size(1), dtype=torch.bool).tril()


class EncoderDecoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.encoder, self.decoder = Block(), Block()
        self.cross = Attention()
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, ids, labels, source):
        memory = self.encoder(self.embed(source), causal=False)
        x = self.decoder(self.embed(ids))
        x = x + self.cross(x, memory, causal=False)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Classifier(LM):
    """One answer for a whole sequence: the tokens' mean, or one of them."""

    def __init__(self, pool):
        super().__init__()
        self.pool, self.answer = pool, nn.Linear(DIM, VOCAB)

    def forward(self, ids, labels):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, causal=False)
        pooled = {
            "mean": lambda: x.mean(1),
            "masked": lambda: (x * (ids > 0)[..., None]).sum(1) / (ids > 0).sum(1, True),
            "first": lambda: x[:, 0],
            "last": lambda: x[:, -1],
        }[self.pool]()
        gate = torch.sigmoid(self.answer(pooled)).mean(1)[:, None, None]
        token_loss = F.cross_entropy(self.head(x * gate).flatten(0, 1), labels.flatten())
        return F.cross_entropy(self.answer(pooled), labels[:, 0]) + token_loss


class Written(LM):
    """In place: what a model may do to tensors of its own."""

    def forward(self, ids, labels):
        x = self.embed(ids)
        x = x * 2
        x += 1
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        labels = labels.clone()
        labels[:, :3] = -100
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)


class Weighted(LM):
    def __init__(self):
        super().__init__()
        self.register_buffer("weight", torch.rand(VOCAB).double() + 0.5)

    def forward(self, ids, labels):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        each = F.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), weight=self.weight, reduction="none"
        )
        mean = F.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), weight=self.weight, label_smoothing=0.2
        )
        return (each.view(labels.shape) * (labels > 3)).sum() / (labels > 3).sum() + mean


class Measured(LM):
    """Something is computed without gradients first, from what is trained."""

    def forward(self, ids, labels):
        with torch.no_grad():
            scale = self.embed(ids).abs().mean() + self.head(self.norm(self.embed(ids))).std(-1)
        x = self.embed(ids) * scale[..., None].detach()
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


MODELS = {
    "pre-norm": lambda: LM(),
    "post-norm": lambda: LM(post=True),
    "grouped": lambda: LM(kv_heads=2),
    "logits": lambda: LM(outside=True),
    "position table": PositionTable,
    "alibi": Alibi,
    "relative bias": RelativeBias,
    "packed": Packed,
    "encoder-decoder": EncoderDecoder,
    "experts": lambda: LM(mlp=Experts),
    "mean": lambda: Classifier("mean"),
    "masked mean": lambda: Classifier("masked"),
    "first": lambda: Classifier("first"),
    "last": lambda: Classifier("last"),
    "in place": Written,
    "weighted": Weighted,
    "no grad": Measured,
}


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def repeated(x, times):
    return x[:, :, None].expand(-1, -1, times, -1, -1).flatten(1, 2)


class Case(LM):
    """One small thing each, of which a first version was silently wrong: all right or refused."""

    def __init__(self, case):
        super().__init__()
        self.case = case
        self.q, self.k, self.aux = (nn.Linear(DIM, DIM) for _ in range(3))
        self.p = nn.Parameter(torch.randn(DIM))
        self.counted = nn.Embedding(VOCAB, DIM, scale_grad_by_freq=True)

    def loss(self, x, labels):
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())

    def forward(self, ids, labels):
        return getattr(self, self.case)(self.embed(ids), ids, labels)

    def first_used_without_gradients(self, x, ids, labels):
        with torch.no_grad():
            a = self.aux(x.detach() * 0 + 1).mean() + (x * self.p.exp()).mean()
        return self.loss(self.aux(self.q(x)) * self.p.exp(), labels) + a + (self.p * self.p).sum()

    def windows(self, x, ids, labels):
        x = self.aux(x)
        half = x[:, -(ids.size(1) // 2) :].pow(2).mean() + x[:, -100:-1].pow(2).sum()
        return self.loss(x, labels) + half + x[:, 1:-1].mean() + x[:, -(ids.size(1) // 2)].sum()

    def repeated_then_written(self, x, ids, labels):
        q, k = heads_of(self.q(x), 4), heads_of(self.k(x), 4)[:, :2] * 1.5
        repeated_k, v = repeated(k, 2), repeated(k + 1, 2)
        k.mul_(30)
        y = F.scaled_dot_product_attention(q, repeated_k, v, is_causal=True)
        return self.loss(merged(y), labels) + k.mean()

    def attends_to_parameters(self, x, ids, labels):
        rows = heads_of(self.counted.weight[None, :6], 4)  # every rank has them whole
        mean = merged(F.scaled_dot_product_attention(rows, rows, rows)).mean(1, keepdim=True)
        return self.loss(x + mean, labels)

    def drawn_once(self, x, ids, labels):
        keep = torch.rand_like(ids.double()) < 0.5
        x = self.embed(torch.where(keep, ids, 0))
        kept = (x - self.embed.weight[0]).abs().sum(-1) > 1e-9
        labels = torch.where(keep, -100, ids)
        again = torch.cat([labels[:, :-1], labels[:, -1:]], 1)
        return (kept.to(x.dtype) * again.ne(-100)).sum() + 0 * self.loss(x, labels)

    def dead(self, x, ids, labels):
        self.aux(x)
        return self.loss(x + self.q(x).detach(), labels)

    def ignored_out_of_range(self, x, ids, labels):
        labels = labels.masked_fill(labels < 9, 1000)
        weight = self.embed.weight[:, 0].detach().abs()
        logits = self.head(x).flatten(0, 1)
        return F.cross_entropy(logits, labels.flatten(), weight=weight, ignore_index=1000)

    def cross_bias(self, x, ids, labels):
        memory, n = x[:, :-2], ids.size(1)
        distance = (torch.arange(n)[:, None] - torch.arange(n - 2)[None]).clamp(-3, 3) + 3
        q, k, v = (heads_of(y, 4) for y in (self.q(x), self.k(memory), memory))
        bias = self.embed.weight[distance][..., :4].permute(2, 0, 1)
        return self.loss(merged(F.scaled_dot_product_attention(q, k, v, attn_mask=bias)), labels)

    def ids_written(self, x, ids, labels):
        ids = ids.clone()
        ids.masked_fill_(ids == 3, 4)
        return self.loss(self.aux(self.embed(ids)), labels)

    def dtype_of(self, x, ids, labels):
        return self.loss(x * self.p.type_as(x), labels)

    def checkpointed(self, x, ids, labels):
        def block(x):
            return x + F.dropout(self.aux(x), 0.0) * x.mean(1, keepdim=True)

        x = checkpoint(block, x, use_reentrant=False, context_fn=deepsp.checkpoint_policy())
        x = checkpoint(block, x, use_reentrant=False)
        return self.loss(x, labels)

    def parameter_written(self, x, ids, labels):
        c = torch.zeros(ids.size(1), DIM, dtype=x.dtype)
        c[ids.size(1) // 2 :] = self.p
        return self.loss(x + c, labels)

    # Refused:

    def hook(self, x, ids, labels):
        x = self.aux(x)
        x.register_hook(lambda gradient: gradient * 2)
        return self.loss(x, labels)

    def selective(self, x, ids, labels):
        def contexts():
            return create_selective_checkpoint_contexts([torch.ops.aten.mm.default])

        x = checkpoint(self.aux, x, use_reentrant=False, context_fn=contexts)
        return self.loss(x, labels)

    def mapped(self, x, ids, labels):
        return self.loss(torch.vmap(self.aux)(x), labels)

    def channels_dropped(self, x, ids, labels):
        return self.loss(F.dropout1d(x.transpose(1, 2), 0.5, True).transpose(1, 2), labels)

    def broadcast_loss(self, x, ids, labels):
        return F.poisson_nll_loss(x[..., :1], self.aux(x).detach().abs())

    def short_index(self, x, ids, labels):
        return x.gather(2, torch.zeros(2, 6, 3, dtype=torch.long)).sum()

    def counts(self, x, ids, labels):
        return self.loss(self.counted(ids % 3), labels)


EQUAL_CASES = [
    "first_used_without_gradients",
    "windows",
    "repeated_then_written",
    "drawn_once",
    "dead",
    "ignored_out_of_range",
    "cross_bias",
    "ids_written",
    "dtype_of",
    "checkpointed",
    "attends_to_parameters",
    "parameter_written",
]
REFUSED_CASES = {
    "hook": "a gradient hook",
    "selective": "context_fn",
    "mapped": "torch.vmap of a tensor that requires grad",
    "channels_dropped": "feature_dropout.*drops channels",
    "broadcast_loss": "poisson_nll_loss.*expand them",
    "short_index": "gather.*expected .* tokens in dimension 1",
    "counts": "embedding.*scale_grad_by_freq",
}


class Changed(LM):
    """Refused: what depends on all tokens in ways that the pass doesn't know."""

    def __init__(self, change):
        super().__init__()
        self.change = change
        self.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))

    def forward(self, ids, labels):
        x = getattr(self, self.change)(self.embed(ids))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())

    def circular(self, x):
        return F.pad(x.mT, (2, 0), mode="circular")[..., :-2].mT

    def reflected(self, x):
        return F.pad(x.mT, (2, 0), mode="reflect")[..., :-2].mT

    def linearly_interpolated(self, x):
        return F.interpolate(x.mT, scale_factor=2, mode="linear")[..., ::2].mT

    def pooled_unevenly(self, x):
        return x + F.adaptive_avg_pool1d(x.mT, 5).mT.repeat(1, 3, 1)[:, : x.size(1)]

    def einsum_of_diagonals(self, x):
        return x * torch.einsum("bss->bs", x @ x.mT)[..., None]

    def experts_by_nonzero(self, x):
        flat = x.flatten(0, 1)
        out, chosen = torch.zeros_like(flat), flat[:, :2].argmax(-1)
        for n, expert in enumerate(self.experts):
            at = (chosen == n).nonzero().squeeze(1)
            out = out.index_add(0, at, expert(flat[at]))
        return out.view_as(x)

    def experts_by_where(self, x):
        flat = x.flatten(0, 1)
        out, chosen = torch.zeros_like(flat), flat[:, :2].argmax(-1)
        for n, expert in enumerate(self.experts):
            at = torch.where(chosen == n)[0]
            out[at] = expert(flat[at])
        return out.view_as(x)

    def experts_by_mask(self, x):
        out, chosen = torch.zeros_like(x), x[..., :2].argmax(-1)
        for n, expert in enumerate(self.experts):
            out[chosen == n] = expert(x[chosen == n])
        return out

    def written_without_gradients(self, x):
        x = x * 1
        with torch.no_grad():
            x.clamp_(-0.5, 0.5)
        return x

    def view_written_without_gradients(self, x):
        x = x * 1
        with torch.no_grad():
            x[:, 0] = 0.5
        return x

    def interpolated_by_a_fraction(self, x):
        return F.interpolate(x[:, :4].mT, scale_factor=2.1).mT.sum(1, keepdim=True) + x

    def relative_shift(self, x):
        scores = x @ x.mT
        merged = F.pad(scores, (1, 0)).view(x.size(0), -1, x.size(1))[:, 1:]
        return x + merged.reshape(scores.shape) @ x


# The method, and what the message must say of it.
REFUSED = {
    "circular": "pad.*adds elements",
    "reflected": "pad.*adds elements",
    "linearly_interpolated": "_unsafe_index.*no rule",
    "pooled_unevenly": "windows of different sizes; pass a divisor",
    "einsum_of_diagonals": "einsum.*each letter once.*got 'bss'; take the diagonal",
    "experts_by_nonzero": "nonzero.*depends on",
    "experts_by_where": "depends on data",
    "experts_by_mask": "index.*depends on a mask",
    "written_without_gradients": "clamp_.*under torch.no_grad",
    "view_written_without_gradients": "under torch.no_grad",
    "interpolated_by_a_fraction": "upsample_nearest1d.*by a fraction",
    "relative_shift": "view.*splits the sequence.*deepsp.replicated",
}


def batch(length, name="", seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(n):
        return torch.randint(0, VOCAB, (2, n), generator=generator)

    ids, labels = draw(length), draw(length)
    labels[0, : length // 2] = -100  # a rank without a valid token in a row
    if name in ("mean", "masked mean", "first", "last"):
        labels = labels.abs()
        labels[labels == 100] = 3
    inputs = {"ids": ids, "labels": labels}
    if name == "encoder-decoder":
        inputs["source"] = draw(length + 4)
    return inputs


def total(out, labels):
    """A loss of what a model returns."""
    if out.dim() == 0:
        return out
    return F.cross_entropy(out[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class OwnDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        kept = 2 * (torch.rand_like(x) > 0.5).to(x.dtype)
        ctx.save_for_backward(kept)
        return x * kept

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0]


class DrawnLate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient * torch.rand_like(gradient)


def drawn_in_a_branch(x):
    return x * torch.cond(x.size(1) * VOCAB > torch.ones(()).sum(), F.dropout, torch.sin, (P,))


P = torch.ones(8, dtype=torch.float64)


class Dropped(torch.nn.Module):
    """Random numbers: on tokens each rank draws its own, on what is whole all have the same."""

    def __init__(self, drop, pooled):
        super().__init__()
        self.embed, self.drop, self.pooled = torch.nn.Embedding(VOCAB, 8), drop, pooled

    def forward(self, ids, labels):
        x = self.drop(self.embed(ids))
        pooled = x.mean(1)
        if self.pooled is not None:
            pooled = self.pooled(pooled)
        return x, pooled
