"""Ways to write models for one device: tokens of other positions, statistics and orders of tokens,
windows of them; each is one method."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from zoo import DIM, LM, VOCAB, Attention

import deepsp


class Construct(LM):
    def __init__(self, case):
        super().__init__()
        del self.blocks[1:]
        self.case = case
        self.q, self.k, self.aux = (nn.Linear(DIM, DIM) for _ in range(3))
        self.p = nn.Parameter(torch.randn(DIM))
        self.centered = nn.Conv1d(DIM, DIM, 3, padding=1, groups=DIM)
        self.strided = nn.Conv1d(DIM, DIM, 4, stride=2, padding=1)
        self.merge = nn.Linear(2 * DIM, DIM)
        self.query = nn.Parameter(torch.randn(1, 1, DIM))
        self.mha = nn.MultiheadAttention(DIM, 2, batch_first=True)
        self.attend = Attention()
        self.norm1d = nn.BatchNorm1d(DIM, momentum=0.3)

    def loss(self, x, labels):
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())

    def forward(self, ids, labels):
        x = self.embed(ids) + self.position(torch.arange(ids.size(1)))
        return getattr(self, self.case)(self.aux(x), ids, labels)

    # Shifts

    def smear(self, x, ids, labels):
        return self.loss(torch.cat([x[:, :1], x[:, 1:] + self.p * x[:, :-1]], 1), labels)

    def padded_and_cut(self, x, ids, labels):
        return self.loss(x + self.p * F.pad(x, (0, 0, 1, 0))[:, :-1], labels)

    def rolled(self, x, ids, labels):
        return self.loss(x + self.p * x.roll(1, 1) + x.roll(-2, 1).sin(), labels)

    def behind_zeros(self, x, ids, labels):
        zeros = x.new_zeros(x.shape[0], 1, DIM)
        return self.loss(x + self.p * torch.cat([zeros, x[:, :-1]], 1), labels)

    def zero_padded(self, x, ids, labels):
        return self.loss(x + self.p * nn.ZeroPad2d((0, 0, 1, -1))(x), labels)

    def looks_ahead(self, x, ids, labels):
        return self.loss(x + self.p * F.pad(x[:, 2:], (0, 0, 0, 2)), labels)

    def differences(self, x, ids, labels):
        return self.loss(F.pad(x[:, 1:] - x[:, :-1], (0, 0, 1, 0)), labels)

    def diff(self, x, ids, labels):
        return self.loss(torch.cat([x[:, :1], x.diff(dim=1)], 1), labels)

    def swapped_halves(self, x, ids, labels):
        n = x.size(1) // 2
        return self.loss(x + torch.cat([x[:, n:], x[:, :n]], 1), labels)

    def flipped(self, x, ids, labels):
        return self.loss(x + self.p * x.flip(1), labels)

    def every_second(self, x, ids, labels):
        y = self.merge(torch.cat([x[:, :12:2], x[:, 1:12:2]], -1))
        return self.loss(y, labels[:, :12:2]) + x[:, 3::4].pow(2).mean()

    def written_by_step(self, x, ids, labels):
        y = torch.zeros_like(x)
        y[:, 1:] = x[:, 1:] + self.p * x[:, :-1]
        return self.loss(y, labels)

    def two_shifts_and_attention(self, x, ids, labels):
        k = F.pad(x, (0, 0, 1, 0))[:, :-1]
        y = self.attend(x[:, 1:] * 2, k[:, 1:], causal=False)
        return self.loss(self.blocks[0](y + x[:, :-1]), labels[:, 1:])

    def ends(self, x, ids, labels):  # most ranks have no token of either
        return self.loss(x, labels) + (x[:, :2] * x[:, -2:].exp()).sum()

    def two_tokens(self, x, ids, labels):
        y = self.q(x[:, 0]) + self.k(x[:, 1]).tanh()
        return self.loss(x, labels) + y.pow(2).sum()

    # Multi-token prediction

    def mtp(self, x, ids, labels):
        y = self.merge(torch.cat([x[:, :-1], self.embed(ids[:, 1:])], -1))
        return self.loss(x, labels) + self.loss(self.blocks[0](y), labels[:, 1:])

    def mtp_padded(self, x, ids, labels):
        y = self.merge(torch.cat([x, self.embed(F.pad(ids[:, 1:], (0, 1)))], -1))
        return self.loss(self.blocks[0](y)[:, :-2], labels[:, 2:])

    def mtp_rolled(self, x, ids, labels):
        y = self.merge(torch.cat([x, self.embed(torch.roll(ids, -1, 1))], -1))
        return self.loss(self.blocks[0](y)[:, :-2], labels[:, 2:])

    def mtp_twice(self, x, ids, labels):
        loss = self.loss(x, labels)
        for n in (1, 2):
            x = self.merge(torch.cat([x[:, :-1], self.embed(ids[:, n:])], -1))
            loss = loss + self.loss(self.blocks[0](x), labels[:, n:])
        return loss

    # Merged tokens

    def attention_then_sum(self, x, ids, labels):
        y = torch.stack([self.q(x), self.k(x)], 2).flatten(1, 2)
        z = self.attend(y, causal=False) + y
        return self.loss(z.unflatten(1, (-1, 2))[:, :, 1], labels)

    def sum_then_attention(self, x, ids, labels):
        y = torch.stack([self.q(x), self.k(x)], 2).flatten(1, 2)
        z = y + self.attend(y, causal=False)
        return self.loss(z.unflatten(1, (-1, 2))[:, :, 1], labels)

    def attention_alone(self, x, ids, labels):
        y = torch.stack([self.q(x), self.k(x)], 2).flatten(1, 2)
        return self.loss(self.attend(y, causal=False).unflatten(1, (-1, 2))[:, :, 1], labels)

    def pairs_merged(self, x, ids, labels):
        y = x[:, :12].unflatten(1, (6, 2)).flatten(2)
        return self.loss(self.merge(y), labels[:, :12:2])

    # Windows

    def centered_convolution(self, x, ids, labels):
        return self.loss(x + self.centered(x.mT).mT, labels)

    def same_convolution(self, x, ids, labels):
        y = F.conv1d(x.mT, self.centered.weight, groups=DIM, padding="same", dilation=2)
        return self.loss(x + y.mT, labels)

    def strided_convolution(self, x, ids, labels):
        return self.loss(self.strided(x[:, :12].mT).mT, labels[:, :12:2])

    def cut_on_both_sides(self, x, ids, labels):
        y = F.conv1d(x.mT, self.centered.weight, groups=DIM, padding=2)[..., 1:-1]
        return self.loss(x + y.mT, labels)

    def whisper(self, x, ids, labels):
        x = F.conv1d(x.mT, self.centered.weight, groups=DIM, padding=1, stride=2)
        return self.loss(self.blocks[0](F.gelu(x).mT, causal=False), labels[:, ::2])

    def pooled(self, x, ids, labels):
        y = F.avg_pool1d(x[:, :12].mT, 2) + F.max_pool1d(x[:, :12].mT, 2, 2)
        y = y + F.max_pool1d(x[:, :12].mT - 5, 3, 2, 1)  # less than zero
        return self.loss(y.mT, labels[:, :12:2])

    def pooled_planes(self, x, ids, labels):
        planes = x[:, :12].unflatten(2, (4, -1)).movedim(2, 3).mT
        y = F.unfold(planes.movedim(1, 2), (3, 2), padding=(1, 0), stride=(2, 1))
        rows = y.mT.unflatten(1, (6, -1)).mean(2)
        y = F.avg_pool2d(planes, (2, 1)).pow(2).sum() + self.loss(rows, labels[:, :12:2])
        return y + self.loss(x, labels)

    def interpolated(self, x, ids, labels):
        y = F.interpolate(x.mT, scale_factor=2, mode="nearest")
        return self.loss(x + F.avg_pool1d(y.sin(), 2).mT, labels)

    def other_windows(self, x, ids, labels):
        y = F.interpolate(x[:, :2].mT, scale_factor=3).sin().sum()
        return self.loss(x, labels) + y + F.adaptive_avg_pool1d(x[:, :2].mT, 1).exp().sum()

    # Statistics of tokens

    def batch_norm(self, x, ids, labels):
        return self.loss(x + self.norm1d(x.mT).mT, labels)

    def norms(self, x, ids, labels):
        y = x.norm(dim=1) + torch.linalg.vector_norm(x, dim=1) + x.norm(1, dim=1)
        return self.loss(F.normalize(x, dim=1), labels) + y.mean() + x.norm()

    def highest_norm(self, x, ids, labels):
        return self.loss(x, labels) + torch.linalg.vector_norm(x, float("inf"), dim=1).sum()

    def variances(self, x, ids, labels):
        y = (
            x.var(1)
            + x.var(1, correction=None)
            + x.std(1, keepdim=True)[:, 0]
            + x.var(dim=1, unbiased=False)
        )
        return self.loss((x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True), labels) + y.mean()

    def variance_and_mean(self, x, ids, labels):
        var, mean = torch.var_mean(x, 1, keepdim=True)
        return self.loss((x - mean) * (var + 1e-3).rsqrt(), labels) + x.std()

    def log_sum(self, x, ids, labels):
        return self.loss(x - x.logsumexp(1, keepdim=True), labels) + x.logsumexp((1, 2)).sum()

    def products(self, x, ids, labels):
        return self.loss(x, labels) + (1 + 0.1 * x).prod(1).sum()

    def mean_of_some(self, x, ids, labels):
        y = torch.where(labels[..., None] != -100, x, torch.nan).nanmean(1)
        return self.loss(x, labels) + y.sum()

    # Orders of tokens

    def largest(self, x, ids, labels):
        value, at = x.max(1)
        return self.loss(x, labels) + (value * self.p).sum() + (at * x[:, 0]).sum()

    def most_likely(self, x, ids, labels):
        at = x.argmax(1)
        return self.loss(x, labels) + x.gather(1, at[:, None]).sum() + self.embed(at).sum()

    def read_by_position(self, x, ids, labels):
        n = torch.arange(ids.size(1))
        at = x[..., 0].argmax(1)
        y = x + x.take_along_dim(at[:, None, None], 1)
        y = y + self.p * x.take_along_dim((ids % 4)[..., None], 1)
        y = y + x[:, n[:2] - 3].sum(1, keepdim=True)
        y = y + self.q(x).index_select(1, at[:1]) + self.k(x).index_select(1, ids[0] % 4)
        return self.loss(y, labels) + (self.q(x) @ self.k(x).mT)[:, n, n].sin().sum()

    def best(self, x, ids, labels):
        scores, chosen = x[..., 0].topk(3, 1)
        y = x.gather(1, chosen[..., None].expand(-1, -1, DIM))
        return self.loss(x, labels) + (y * scores[..., None].sigmoid()).sum()

    def sorted_features(self, x, ids, labels):
        return self.loss(x.sort(1).values + x.argsort(1), labels)

    def medians(self, x, ids, labels):
        return (
            self.loss(x, labels) + x.median(1).values.sum() + x[..., :7].kthvalue(3, 1).values.sum()
        )

    def scan(self, x, ids, labels):
        decay = torch.sigmoid(x).cumprod(1)
        x = x + x.mT.unflatten(1, (4, -1)).cumprod(-1).flatten(1, 2).mT
        return self.loss(decay * (x / decay).cumsum(1) + x.cummax(1).values, labels)

    def log_scan(self, x, ids, labels):
        return self.loss(x.logcumsumexp(1), labels)

    # Writes

    def first_token_written(self, x, ids, labels):
        x = x * 1
        x[:, 0] = self.p
        x[:, -1] = x[:, 0] * 2
        return self.loss(x, labels)

    def constant_written(self, x, ids, labels):
        with torch.no_grad():
            y = x * 2
            y[:, 0] = 0.5
        return self.loss(x * y, labels)

    def features_written(self, x, ids, labels):
        x = x * 1
        x[..., torch.arange(DIM) % 3 == 0] = 0.5
        return self.loss(x.index_fill(2, torch.tensor([1, 4]), 0.25), labels)

    def scattered(self, x, ids, labels):
        where = (ids % 2 == 0)[..., None].expand_as(x)
        rows = torch.cat([self.embed.weight[: VOCAB // 2] * 2, self.embed.weight[VOCAB // 2 :]])
        return self.loss(x.masked_scatter(where, rows), labels)

    def replicated_written(self, x, ids, labels):
        p = (self.p * 2).relu_()
        y = self.query[0, 0] * 1
        y.add_(p).mul_(2)
        x = x * y
        return self.loss(x * p, labels)

    def chosen_in_full(self, x, ids, labels):
        """Ops that are refused, after the way out that the refusal names."""
        z = deepsp.replicated(self.q(x)).mT
        z = F.pad(z, (1, 0), mode="circular")[..., :-1].mT
        z = z + z.gather(1, ids[..., None] % 4)
        scores = deepsp.replicated(x @ x.mT)
        n = scores.size(1)
        shifted = F.pad(scores, (1, 0)).view(-1, n + 1, n)[:, 1:].reshape(scores.shape)
        return self.loss(x + self.p * z + shifted.softmax(-1) @ x, labels)

    def written_twice(self, x, ids, labels):
        y = x * 1
        y[..., :5].mul_(2).add_(1)
        z = y[:, 1:]
        z.mul_(2)
        z.add_(self.p)
        y.add_(1)
        for t in (1, 2):
            row = y[:, t]
            row += self.p
            row *= 2
        table = self.position.weight[:4] * 1
        row = table[2]
        row.add_(1)
        row.mul_(3)
        return self.loss(y + table.sum(0), labels) + z.sin().sum()

    def halves_written(self, x, ids, labels):
        y = x * 2
        first, second = y[..., : DIM // 2], y[..., DIM // 2 :]
        first.addcmul_(-self.p[: DIM // 2], x[..., DIM // 2 :])
        second.addcmul_(self.p[: DIM // 2], x[..., : DIM // 2])
        return self.loss(y, labels) + first.mean()

    # Others

    def log_sigmoid(self, x, ids, labels):
        return self.loss(F.logsigmoid(x), labels)

    def number_checked(self, x, ids, labels):
        assert (ids != 2).sum(1).max().item() <= ids.size(1)
        return self.loss(x, labels)

    def diagonal(self, x, ids, labels):
        scores = self.q(x) @ self.k(x).mT
        return self.loss(x, labels) + torch.diagonal(scores, dim1=1, dim2=2).mean()

    def documents(self, x, ids, labels):
        first = torch.cat([torch.ones_like(ids[:, :1]), (ids[:, 1:] % 5 == 0).long()], 1)
        number = first.cumsum(1)
        mask = (number[:, None, :, None] == number[:, None, None]).tril()
        return self.loss(self.blocks[0](x, mask), labels)


CONSTRUCTS = [
    name
    for name, method in vars(Construct).items()
    if callable(method) and name not in ("__init__", "loss", "forward")
]


# Their numbers of tokens are constants, or become constants.
FIXED = [
    "diagonal",
    "every_second",
    "pairs_merged",
    "strided_convolution",
    "pooled",
    "pooled_planes",
    "read_by_position",
]


class Together(Construct):
    """Several in one model, some in checkpoints."""

    def __init__(self, *cases, checkpoints=()):
        super().__init__("")
        self.cases, self.checkpoints = cases, checkpoints

    def forward(self, ids, labels):
        x = self.aux(self.embed(ids) + self.position(torch.arange(ids.size(1))))
        plain = [getattr(self, case)(x, ids, labels) for case in self.cases]
        again = [
            checkpoint(getattr(self, case), x, ids, labels, use_reentrant=False)
            for case in self.checkpoints
        ]
        return sum(plain) + sum(again)
