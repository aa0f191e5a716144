"""What ordinary models do with tokens, one small thing each: equal to one process."""

import torch
import torch.nn.functional as F
from torch import nn
from zoo import DIM, HEADS, LM, VOCAB, StraightThrough, heads_of, merged


class Scaled(torch.autograd.Function):
    """Weights, sums over tokens, several results and sizes in a function of one's own."""

    @staticmethod
    def forward(ctx, x, weight, y):
        ctx.save_for_backward(x, weight)
        ctx.tokens = x.size(1)
        return x.flatten(0, 1).view_as(x) * weight + y, x.mean(1)

    @staticmethod
    def backward(ctx, gradient, of_mean):
        x, weight = ctx.saved_tensors
        of_x = gradient * weight + of_mean[:, None] / ctx.tokens
        return of_x, (gradient * x).sum((0, 1)), gradient


class Ordinary(LM):
    def __init__(self, case):
        super().__init__()
        self.case = case
        self.q, self.k, self.v, self.aux = (nn.Linear(DIM, DIM) for _ in range(4))
        self.p = nn.Parameter(torch.randn(DIM))
        self.latents = nn.Parameter(torch.randn(3, DIM))
        self.pairs = nn.Bilinear(DIM, DIM, DIM)
        self.short, self.long = (
            nn.Conv1d(DIM, DIM, k, padding=k - 1, groups=DIM, bias=k < 5) for k in (4, 7)
        )
        self.mixing = nn.Parameter(torch.randn(DIM, DIM, 3) / DIM)
        self.planar = nn.Parameter(torch.randn(1, 1, 3, 3) / 3)
        self.register_buffer("lower", torch.ones(64, 64).tril())

    def loss(self, x, labels):
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())

    def forward(self, ids, labels):
        return getattr(self, self.case)(ids, labels)

    # Teachers

    def shifted_ids(self, ids, labels):
        x = self.embed(ids[:, :-1])
        for block in self.blocks:
            x = block(x)
        return self.loss(x, labels[:, 1:])

    def begun(self, ids, labels):
        x = self.embed(torch.cat([torch.ones_like(ids[:, :1]), ids[:, :-1]], 1))
        for block in self.blocks:
            x = block(x)
        return self.loss(x, labels)

    def shifted_right(self, ids, labels):
        before = ids.new_zeros(ids.shape)
        before[:, 1:] = ids[:, :-1].clone()
        before[:, 0] = 1
        x = self.embed(before) + self.position(torch.arange(ids.size(1)))
        for block in self.blocks:
            x = block(x)
        return self.loss(x, labels)

    def prefixed(self, ids, labels):
        x = self.embed(ids)
        front = self.latents.expand(x.size(0), -1, -1)
        x = torch.cat([front, x, self.p.expand(x.size(0), 1, -1)], 1)
        for block in self.blocks:
            x = block(x)
        return self.loss(x[:, 3:-1], labels) + x[:, 0].pow(2).mean() + x[:, -1].sum()

    # .data

    def data_written(self, ids, labels):
        before = self.aux(self.embed(ids))
        self.aux.weight.data.clamp_(-0.01, 0.01)
        return self.loss(self.aux(self.embed(ids)), labels) + before.pow(2).mean()

    def data_read(self, ids, labels):
        x = self.embed(ids)
        return self.loss(self.aux(x) * x.data.abs() + self.p.data, labels)

    # Attention by hand

    def _heads(self, x):
        return (heads_of(f(x), HEADS) for f in (self.q, self.k, self.v))

    def by_hand(self, ids, labels):
        x = self.embed(ids)
        n = ids.size(1)
        q, k, v = self._heads(x)
        scores = q @ k.transpose(2, 3) / 2
        scores = 5 * torch.tanh(scores / 5)
        scores = torch.where(self.lower[:n, :n] > 0, scores, torch.finfo(x.dtype).min)
        scores = scores + self.position.weight[:n, :1].T  # a bias for each key
        weights = F.dropout(scores.softmax(-1, dtype=torch.float64), 0.0)
        return self.loss(merged(weights @ v), labels)

    def by_hand_in_one(self, ids, labels):
        x = self.embed(ids)
        q, k, v = (y.flatten(0, 1) for y in self._heads(x))
        bias = self.lower[None, : ids.size(1), : ids.size(1)].double()
        scores = torch.baddbmm(bias, q, k.transpose(1, 2), beta=1.0, alpha=0.5)
        y = torch.bmm(scores.softmax(-1), v).unflatten(0, (x.size(0), HEADS))
        return self.loss(merged(y), labels)

    def by_einsum(self, ids, labels):
        x = self.embed(ids)
        q, k, v = (y.transpose(1, 2) for y in self._heads(x))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k).softmax(-1)
        return self.loss(torch.einsum("bhqk,bkhd->bqhd", scores, v).flatten(2), labels)

    def one_head(self, ids, labels):
        x = self.embed(ids)
        return self.loss((x @ x.transpose(1, 2)).softmax(-1) @ x, labels)

    def with_itself(self, ids, labels):
        x = self.embed(ids)
        scores = torch.einsum("bsd,btd->bst", x, x)
        return self.loss((scores @ scores).softmax(-1) @ x, labels)

    def distances(self, ids, labels):
        x = self.embed(ids)
        a, b = self.q(x).mean(-1), self.k(x).mean(-1)
        return self.loss((a[:, :, None] - b[:, None, :]).abs().neg().softmax(-1) @ x, labels)

    # Sums over tokens

    def attention_pooling(self, ids, labels):
        x = self.embed(ids)
        weights = self.aux(x)[..., 0].tanh().softmax(1)
        pooled = torch.einsum("bsd,bs->bd", x, weights) + (weights[:, None] @ self.v(x))[:, 0]
        logs = F.log_softmax(self.k(x)[..., :2], 1).mean()
        return self.loss(x * pooled[:, None], labels) + logs

    def masked_average(self, ids, labels):
        x = self.embed(ids)
        n = ids.size(1)
        return self.loss(self.lower[:n, :n].double() @ self.aux(x) / n, labels)

    def correlation(self, ids, labels):
        x = self.aux(self.embed(ids))
        gram = x.transpose(1, 2) @ x
        weight = self.position.weight[: ids.size(1), :2]
        mixed = torch.einsum("bsd,sk->bdk", x, weight)
        mixed = mixed + F.linear(x.transpose(1, 2), weight.T, self.p[:2])  # the bias counts once
        return self.loss(x @ gram, labels) + torch.tensordot(x, x, 3) + mixed.pow(2).sum()

    def one_query(self, ids, labels):
        x = self.embed(ids)
        q, k, v = self._heads(x)
        mask = (ids > 9)[:, None, None]
        last = F.scaled_dot_product_attention(q[:, :, -1:], k, v, attn_mask=mask)
        latents = heads_of(self.latents.expand(x.size(0), -1, -1), HEADS)
        y = merged(F.scaled_dot_product_attention(latents, k[:, :2], v[:, :2], enable_gqa=True))
        return self.loss(x * merged(last) + y.mean(1, keepdim=True), labels)

    def one_kv_head(self, ids, labels):
        q, k, v = self._heads(self.embed(ids))
        k, v = k[:, :1], v[:, :1]
        return self.loss(merged(F.scaled_dot_product_attention(q, k, v, is_causal=True)), labels)

    # Losses

    def losses(self, ids, labels):
        x = self.embed(ids)
        y, z = self.aux(x), self.v(x).detach()
        found = [F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss]
        total = sum(f(y, z) + f(y, z, reduction="sum") / 100 for f in found)
        weight = torch.arange(1, DIM + 1).double()
        total = total + F.binary_cross_entropy_with_logits(y, z.sigmoid(), pos_weight=weight)
        return total + F.cosine_embedding_loss(
            y.flatten(0, 1), z.flatten(0, 1), ids.flatten().sign()
        )

    # Each token by itself

    def broadcast(self, ids, labels):
        x = self.embed(ids)
        y = torch.lerp(self.aux(x), x, self.p.sigmoid())
        y = torch.addcmul(y, self.p, x, value=0.5) + torch.lerp(x, self.p, 0.3)
        y = y * torch.addcdiv(self.p, x, self.p.exp() + 1)
        return self.loss(y + self.p.expand_as(x), labels)

    def similar(self, ids, labels):
        x = self.embed(ids)
        y = self.aux(x)
        a = F.cosine_similarity(x, y, -1) + F.pairwise_distance(x, y)
        return self.loss(x * a[..., None] + self.pairs(x, y), labels)

    def along_features(self, ids, labels):
        x = self.embed(ids)
        y = F.pad(x.diff(dim=-1), (0, 1)) + torch.tensordot(x, self.aux.weight, 1)
        y = y + torch.einsum("...d,ed->...e", x, self.aux.weight)
        y = y + x.quantile(0.3, dim=-1, keepdim=True)
        y = y + torch.bucketize(x, torch.linspace(-1, 1, 5, dtype=x.dtype))
        y = y + torch.kron(x[..., :2], self.p[:12])
        pooled = F.avg_pool1d(x, 2).repeat(1, 1, 2) + F.max_pool1d(y, 2).repeat_interleave(2, -1)
        return self.loss(y + pooled + F.adaptive_avg_pool1d(x, 1), labels)

    def channels(self, ids, labels):
        x = self.embed(ids)
        y = x.flip(-1) + x.roll(1, 0) + x.roll((1, 2), (0, -1)) + x.flip(0, -1)
        y = y + F.group_norm(x.flatten(0, 1), 4).view_as(x)
        n = ids.size(1)
        squares = x[..., None].expand(-1, -1, -1, 3).permute(3, 0, 2, 1)[:2]
        diagonal = squares.diagonal(0, 0, 1).mean() + (self.lower[n, :n].double() @ x).mean()
        return (
            self.loss(y, labels)
            + diagonal
            + (self.p @ x.transpose(1, 2)).mean()
            + (x @ self.p).mean()
        )

    def written(self, ids, labels):
        x = self.aux(self.embed(ids))
        y = x.clone()
        y[..., :4] = self.p[:4]
        y[..., 4:8] *= 2
        y[..., -1] = 0
        y.transpose(1, 2)[:, 9].add_(x[..., 0])
        z = torch.empty_like(y)
        z[..., ::2], z[..., 1::2] = y[..., ::2].sin(), y[..., 1::2].cos()
        z[ids == 3] = 0
        narrow = x.float()
        narrow += y  # keeps its dtype
        narrow[..., :4] *= x[..., 4:8]
        return self.loss(z + narrow.detach(), labels)

    def function(self, ids, labels):
        x = StraightThrough.apply(self.aux(self.embed(ids)) * 3)
        y, mean = Scaled.apply(x, self.p, self.v(x))
        return self.loss(y, labels) + mean.sum()

    # Tokens before each one

    def extremes(self, ids, labels):
        x = self.embed(ids)
        return (x / x.abs().amax((1, 2), keepdim=True)).square().mean() + x.amin()

    def convolutions(self, ids, labels):
        n = ids.size(1)
        x = self.embed(ids).transpose(1, 2)
        y = self.short(x)[..., :n] + self.long(x)[:, :, :-6].tanh()  # more than a rank has
        front = self.p[:, None].expand(x.size(0), -1, 6)
        y = y * F.conv1d(torch.cat([front, y], 2), self.long.weight, groups=DIM)
        y = y + F.conv1d(F.pad(x, (4, 0), value=0.5), self.mixing, self.p, dilation=2)
        y = y + F.conv1d(F.pad(x, (3, 0)), self.short.weight, groups=DIM, padding="valid")
        valid = F.conv1d(y, self.short.weight, groups=DIM).square().mean()
        partial = F.conv1d(x, self.short.weight, groups=DIM, padding=1).sin().mean((0, 2))
        return self.loss(y.transpose(1, 2) * partial, labels) + valid

    def planes(self, ids, labels):
        """Rows of a picture are tokens; columns are padded on both sides."""
        x = self.embed(ids)[:, None]
        y = F.conv2d(x, self.planar, padding=(2, 1))[:, :, : ids.size(1)]
        return self.loss(y[:, 0] + x[:, 0], labels)

    def cumulative(self, ids, labels):
        x = self.aux(self.embed(ids))
        y = x.cumsum(1) + (ids == 3).cumsum(1)[..., None] + (x > 0).cumsum(1) + x.cumsum(-1)
        y = y + x.detach().bfloat16().cumsum(1) + x.cumsum(1, dtype=torch.float64)
        z = Summed.apply(self.v(x))
        return self.loss(y / 9 + z.exp() + x.flatten(1).cumsum(-1).view_as(x), labels)

    def mixture(self, ids, labels):
        """Tokens sorted by their experts, as transformers has it; computed in order."""
        x = self.embed(ids).flatten(0, 1)
        weight, chosen = self.aux(x)[:, :4].softmax(-1).topk(2)
        expert, order = torch.sort(chosen.reshape(-1))
        rows = x[order // 2] * self.latents[expert % 3]
        rows = rows * weight.reshape(-1)[order, None]
        back = torch.empty_like(order)
        back[order] = torch.arange(order.size(0))
        y = rows[back].view(x.size(0), 2, DIM).sum(1)
        return self.loss(y.view(*ids.shape, DIM), labels)


ORDINARY = [
    name
    for name, method in vars(Ordinary).items()
    if callable(method) and not name.startswith("_") and name not in ("loss", "forward")
]
assert VOCAB > 9


class Lost(LM):
    """Nothing is left that could be sharded."""

    def forward(self, ids, labels):
        x = self.embed(ids.flatten()[:6])
        return self.head(self.norm(x)).pow(2).mean()


class Summed(torch.autograd.Function):
    """Cumulative sums, forward and backward."""

    @staticmethod
    def forward(ctx, x):
        return x.cumsum(1) / 9

    @staticmethod
    def backward(ctx, gradient):
        return (gradient.sum(1, True) - gradient.cumsum(1) + gradient) / 9


class Backward(torch.autograd.Function):
    """Its backward mixes tokens."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient.cumprod(1)


class Sorted(LM):
    """An order that each rank has for itself, used for something else than experts."""

    def forward(self, ids, labels):
        x = self.embed(ids).flatten(0, 1)
        order = x[:, 0].sort().indices
        return F.cross_entropy(self.head(x) * order[:, None], labels.flatten())


class SortedRows(Sorted):
    def forward(self, ids, labels):
        x = self.embed(ids).flatten(0, 1)
        x = x[x[:, 0].sort().indices]
        return F.cross_entropy(self.head(x), labels.flatten())


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(DIM, 4, 2 * DIM, 0.0, batch_first=True)
        self.embed, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, ids, labels):
        mask = nn.Transformer.generate_square_subsequent_mask(ids.size(1), dtype=torch.float64)
        x = self.encoder(self.embed(ids), mask=mask, is_causal=True)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
