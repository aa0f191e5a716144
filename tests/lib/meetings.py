"""Every way in which a value that each rank has in full meets tokens of which it has a part, and
every way of writing a result: models of a line, equal to one process."""

import torch
import torch.nn.functional as F
from torch import nn
from zoo import DIM, LM

# What is full: [B, D], made of all tokens or of some.
FULL = {
    "mean": lambda m, x, ids: x.mean(1),
    "first": lambda m, x, ids: x[:, 0],
    "of an id": lambda m, x, ids: m.embed(ids[:, :1])[:, 0],
    "weight": lambda m, x, ids: m.p.expand(len(x), -1),
}

# How it meets x [B, S, D].
MEETS = {
    "expand, cat": lambda x, v: torch.cat([x, v[:, None].expand(-1, x.size(1), -1)], -1),
    "expand, add": lambda x, v: x + v[:, None].expand(-1, x.size(1), -1),
    "expand_as": lambda x, v: torch.cat([x, v[:, None].expand_as(x)], -1),
    "repeat": lambda x, v: torch.cat([x, v[:, None].repeat(1, x.size(1), 1)], -1),
    "repeat_interleave": lambda x, v: torch.cat(
        [x, v[:, None].repeat_interleave(x.size(1), 1)], -1
    ),
    "tile": lambda x, v: torch.cat([x, v[:, None].tile(1, x.size(1), 1)], -1),
    "broadcast_to": lambda x, v: x * v[:, None].broadcast_to(x.shape),
    "broadcast_tensors": lambda x, v: torch.cat(torch.broadcast_tensors(x, v[:, None]), -1),
    "stack": lambda x, v: torch.stack([x, v[:, None].expand(-1, x.size(1), -1)], 2).flatten(2),
    "where": lambda x, v: torch.where(x > 0, v[:, None].expand(-1, x.size(1), -1), x),
    "ones times": lambda x, v: x * (torch.ones_like(x[..., :1]) @ v[:, None]),
    "outer": lambda x, v: torch.einsum("bsd,be->bsde", x, v[:, :2]).flatten(2),
    "work on it": lambda x, v: x + (v[:, None].expand(-1, x.size(1), -1) * 2).tanh().sin(),
    "linear on it": lambda x, v: x @ (v[:, None].expand(-1, x.size(1), -1).mean(0)[:1].T @ v[:1]),
    "index": lambda x, v: x + v[:, None].expand(-1, x.size(1), -1)[:, torch.arange(x.size(1))],
    "gather": lambda x, v: x + v[:, None].expand(-1, x.size(1), -1).gather(2, x.argsort(-1)),
    "flipped": lambda x, v: x + v[:, None].expand(-1, x.size(1), -1).flip(1),
    "slice": lambda x, v: x[:, :-2] + v[:, None].expand(-1, x.size(1), -1)[:, 2:],
    "pad": lambda x, v: x + F.pad(v[:, None].expand(-1, x.size(1) - 1, -1), (0, 0, 0, 1)),
    "cumsum": lambda x, v: x + v[:, None].expand(-1, x.size(1), -1).cumsum(1),
    "masked_fill": lambda x, v: x + v[:, None].expand(-1, x.size(1), -1).masked_fill(x < 0, 0.0),
    "addcmul": lambda x, v: torch.addcmul(x, x, v[:, None].expand(-1, x.size(1), -1)),
    "lerp": lambda x, v: x.lerp(v[:, None].expand(-1, x.size(1), -1), 0.3),
    "bmm": lambda x, v: x @ (v[:, :, None] * v[:, None]),
    "norm": lambda x, v: F.layer_norm(x, (DIM,), v[0], v[1]),
    "written": lambda x, v: _written(x, v),
    "topk": lambda x, v: x + v[:, None].expand(-1, x.size(1), -1).topk(DIM, -1)[0],
    "chunks": lambda x, v: torch.cat(v[:, None].expand(-1, x.size(1), -1).chunk(2, -1)[::-1], -1),
    "heads": lambda x, v: x + v.view(-1, 1, 2, DIM // 2).expand(-1, x.size(1), -1, -1).flatten(2),
}


def _written(x, v):
    y = x.new_zeros(x.size(0), x.size(1), 2 * DIM)
    y[..., :DIM] = x
    y[..., DIM:] = v[:, None]
    return y


class Meeting(LM):
    def __init__(self, full, meets):
        super().__init__()
        self.full, self.meets = FULL[full], MEETS[meets]
        self.p = nn.Parameter(torch.randn(DIM))
        self.aux = nn.Linear(DIM, DIM)
        self.out = nn.LazyLinear(DIM)

    def forward(self, ids, labels):
        x = self.embed(ids) + self.position(torch.arange(ids.size(1)))
        full = self.aux(self.full(self, x, ids))
        x = self.out(self.meets(x, full))
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels[:, : x.size(1)].flatten())


def make(full, meets):
    model = Meeting(full, meets)
    with torch.no_grad():
        model(torch.zeros(2, 5, dtype=torch.int64), torch.zeros(2, 5, dtype=torch.int64))
    return model


# What is written, besides a first argument.
WRITES = {
    "mul": lambda m, x: torch.mul(m.p, 2, out=m.buffer),
    "add a part": lambda m, x: torch.add(x, 1, out=torch.empty_like(x)) * m.p,
    "mean of a part": lambda m, x: torch.mean(x, 1, out=m.rows[: len(x)])[:, None] * m.p,
    "cat of parts": lambda m, x: torch.cat([x, x * 2], -1, out=x.new_empty(*x.shape[:2], 2 * DIM))[
        ..., DIM:
    ],
    "normalize": lambda m, x: F.normalize(m.p, dim=0, out=m.buffer) * x,
    "two results": lambda m, x: torch.max(m.two, 0, out=(m.buffer, m.places)).values,
    "buffer used": lambda m, x: _then(torch.sub(m.p, 1, out=m.buffer), m.buffer),
    "cumsum": lambda m, x: torch.cumsum(m.p, 0, out=m.buffer),
    "foreach": lambda m, x: sum(torch._foreach_mul([m.p, m.two[0]], 3.0)),
    "foreach in place": lambda m, x: _then(
        torch._foreach_add_([m.buffer, m.two[1]], [m.p, m.p], alpha=2), m.buffer * m.two[1]
    ),
    "foreach copy": lambda m, x: _then(torch._foreach_copy_([m.buffer], [m.p]), m.buffer),
    "foreach of tokens": lambda m, x: torch._foreach_mul([x, x], 2.0)[1],
    "clamp": lambda m, x: torch.clamp(m.p, 0, 1, out=m.buffer),
    "empty": lambda m, x: torch.mul(m.p, 2, out=torch.empty_like(m.p)),
    "power": lambda m, x: _power(m),
}


def _then(_, x):
    return x


def _power(m):
    """An iteration of spectral norm."""
    weight = m.aux.weight
    for _ in range(2):
        u = F.normalize(torch.mv(weight, m.buffer), dim=0, out=m.buffer)
        v = F.normalize(torch.mv(weight.t(), u), dim=0, out=m.other)
    return torch.dot(u, torch.mv(weight, v))


class Writing(LM):
    def __init__(self, writes):
        super().__init__()
        self.writes = WRITES[writes]
        self.p = nn.Parameter(torch.randn(DIM))
        self.aux = nn.Linear(DIM, DIM)
        for name, shape in (("buffer", (DIM,)), ("other", (DIM,)), ("two", (2, DIM))):
            self.register_buffer(name, torch.randn(shape))
        self.register_buffer("rows", torch.zeros(2, DIM))
        self.register_buffer("places", torch.zeros(DIM, dtype=torch.int64))

    def forward(self, ids, labels):
        x = self.embed(ids) + self.position(torch.arange(ids.size(1)))
        with torch.no_grad():
            factor = self.writes(self, x)
        x = self.norm(x * factor + self.aux(x))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def _quantized(m, x, ids):
    scale = x.detach().abs().amax() / 127
    return x + ((x / scale).round() * scale - x).detach()


def _nearest(m, x, ids):
    """A codebook, straight through."""
    distance = torch.cdist(x.flatten(0, 1), m.code)
    chosen = m.code[distance.argmin(-1)].view_as(x)
    return x + (chosen - x).detach() + chosen + distance.amin(-1).view(*x.shape[:2], 1)


def _ties(m, x, ids):
    y = x.relu()
    return x + y.amin((0, 1), keepdim=True) + y.amax(1, keepdim=True) - y.min()


def _rows(m, x):
    return m.classes(x).flatten(0, 1)


# Ops that are plain, whatever they are called: [B, S, D] to that, or to a loss.
OPS = {
    "batch norm": lambda m, x, ids: m.batch_norm.eval()(x.transpose(1, 2)).transpose(1, 2),
    "batch norm of rows": lambda m, x, ids: m.batch_norm.eval()(x.flatten(0, 1)).view_as(x),
    "cdist": lambda m, x, ids: x + torch.cdist(x, m.code.expand(2, -1, -1)).softmax(-1) @ m.code,
    "codebook": _nearest,
    "fft": lambda m, x, ids: torch.fft.irfft(torch.fft.rfft(x), n=DIM) + torch.fft.fft(x).real,
    "multi margin": lambda m, x, ids: F.multi_margin_loss(_rows(m, x), (ids % 5).flatten()),
    "multilabel margin": lambda m, x, ids: F.multilabel_margin_loss(
        _rows(m, x), F.one_hot(ids % 5, 5).flatten(0, 1), reduction="sum"
    ),
    "amax": lambda m, x, ids: x / x.abs().amax(),
    "max": lambda m, x, ids: x / x.abs().max() + x.min(),
    "quantized": _quantized,
    "ties": _ties,
    "pooled by index": lambda m, x, ids: m.aux(x)[torch.arange(len(x)), ids.argmax(-1) - 1].sum(),
    "bincount": lambda m, x, ids: x * torch.bincount(ids.flatten(), minlength=200)[:DIM],
    "cond": lambda m, x, ids: (
        x + torch.cond(m.code.sum() > 0, lambda c: c * 2, lambda c: c * 3, (m.code,)).mean(0)
    ),
}


class Op(LM):
    def __init__(self, op):
        super().__init__()
        self.op = OPS[op]
        self.batch_norm = nn.BatchNorm1d(DIM)
        self.batch_norm.running_mean.normal_()
        self.batch_norm.running_var.uniform_(1, 2)
        self.code = nn.Parameter(torch.randn(7, DIM))
        self.aux, self.classes = nn.Linear(DIM, DIM), nn.Linear(DIM, 5)

    def forward(self, ids, labels):
        x = self.embed(ids) + self.position(torch.arange(ids.size(1)))
        x = self.op(self, x, ids)
        if x.dim() == 0:
            return x
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
