"""``deepsp.check``: models that mix tokens outside of attention are refused by the module's name,
right ones pass, and nothing is left changed."""

import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import on_ranks
from reference import draw
from torch import nn

import deepsp

DIM, HEADS, KV = 16, 4, 2


class Attention(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how = how
        if how == "layer":
            self.layer = deepsp.SequenceParallelAttention(DIM, HEADS, KV, rope_theta=100.0)
        elif how.startswith("module"):
            self.attend = deepsp.DistributedAttention()
        elif how == "bhsd":
            self.attend = deepsp.DistributedAttention(layout="bhsd")
        self.qkv = nn.Linear(DIM, (HEADS + 2 * KV) * DIM // HEADS)
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x, position_ids, seq_lens):
        if self.how == "layer":
            return self.layer(x, is_causal=True, seq_lens=seq_lens)
        q, k, v = self.qkv(x).unflatten(-1, (HEADS + 2 * KV, -1)).split([HEADS, KV, KV], 2)
        angles = position_ids[..., None, None] * torch.tensor([1.0, 0.1]).to(x)
        turn = torch.polar(torch.ones_like(angles), angles)
        q, k = (
            torch.view_as_real(torch.view_as_complex(y.unflatten(-1, (-1, 2))) * turn).flatten(-2)
            for y in (q, k)
        )
        options = {"is_causal": True, "enable_gqa": True, "seq_lens": seq_lens}
        if self.how.endswith("lse"):
            attend = self.attend if self.how == "module, lse" else deepsp.distributed_attention
            trunk = attend(q, k, v, return_lse=True, **options)
            out, _ = deepsp.merge_attention([trunk, (trunk[0] * 0.5, trunk[1])])
        elif self.how == "function":
            out = deepsp.distributed_attention(q, k, v, **options)
        elif self.how == "bhsd":
            out = self.attend(*(y.transpose(1, 2) for y in (q, k, v)), **options).transpose(1, 2)
        elif self.how == "plain":
            q, k, v = (y.transpose(1, 2) for y in (q, k, v))
            out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2)
        else:
            out = self.attend(q, k, v, **options)
        return self.out(out.flatten(2))


class Recurrence(nn.Module):
    """A decaying sum over the tokens before."""

    def __init__(self):
        super().__init__()
        self.inputs = nn.Linear(DIM, DIM + HEADS)
        self.recur = deepsp.DistributedRecurrence(self.sums)

    @staticmethod
    def sums(value, g):
        raise AssertionError("a check doesn't run it")

    def forward(self, x):
        value, g = self.inputs(x).split([DIM, HEADS], 2)
        return x + self.recur(value=value.unflatten(2, (HEADS, -1)), g=g).flatten(2)


class Experts(nn.Module):
    """The best two of four for each token."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(DIM, 4)
        self.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, x):
        flat = x.flatten(0, 1)
        weight, chosen = self.router(flat).softmax(-1).topk(2)
        out = torch.zeros_like(flat)
        for n, expert in enumerate(self.experts):
            token, slot = (chosen == n).nonzero(as_tuple=True)
            out.index_add_(0, token, expert(flat[token]) * weight[token, slot, None])
        return out.view_as(x)


class Of(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def _smear(x):
    return torch.cat([x[:, :1], x[:, 1:] + x[:, :-1]], 1)


class Convolution(nn.Module):
    """A causal convolution of the tokens before, with so many too few, or that looks ahead."""

    def __init__(self, missing=0, ahead=0, starts=False, then=None):
        super().__init__()
        self.convolution = nn.Conv1d(DIM, DIM, 4, groups=DIM)
        self.missing, self.ahead, self.starts, self.then = missing, ahead, starts, then

    def forward(self, x):
        n, lens = 3 - self.missing, [12 + p for p in range(dist.get_world_size())]
        lens = lens if lens[dist.get_rank()] == x.size(1) else None  # a check's run of a part
        if self.starts:
            before = deepsp.previous_tokens_start(x, n, seq_lens=lens).wait()
        else:
            before = deepsp.previous_tokens(x, n, seq_lens=lens)
        x = torch.cat([F.pad(before, (0, 0, self.missing, 0)), x], 1)
        x = F.pad(x, (0, 0, -self.ahead, self.ahead))
        x = self.convolution(x.mT).mT
        return x if self.then is None else self.then(x)


class Loads(nn.Module):
    """Counts the tokens of each expert, over all ranks or this one's."""

    def __init__(self, sums):
        super().__init__()
        self.router, self.sums = nn.Linear(DIM, 4), sums
        self.register_buffer("load", torch.zeros(4, dtype=torch.int64))

    def forward(self, x):
        if self.training:
            counts = self.router(x).argmax(-1).flatten().bincount(minlength=4)
            self.load += deepsp.sum_over_ranks(counts) if self.sums else counts
        return x


class Channels(nn.Module):
    """[B, C, S] inside."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x.mT).mT


class Model(nn.Module):
    def __init__(self, mlp, attention="module", positions="given", norm=None, out=None):
        super().__init__()
        self.embed, self.places = nn.Embedding(50, DIM), nn.Embedding(64, DIM)
        self.attention = Attention(attention)
        self.norm = norm or nn.RMSNorm(DIM)
        self.mlp, self.positions, self.out = mlp, positions, out
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(DIM, 50)

    def forward(self, ids, position_ids, seq_lens=None):
        if self.positions == "own":
            position_ids = torch.arange(ids.size(1)).expand_as(ids)
        x = self.embed(ids) + self.places(position_ids)
        x = x + self.attention(self.norm(x), position_ids, seq_lens)
        x = x + self.mlp(self.drop(x))
        if self.out is not None:
            return self.out(self.head(x))
        return {"logits": self.head(x), "hidden": x}


def _mlp():
    return nn.Sequential(nn.Linear(DIM, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, DIM))


def _right():
    kinds = ("module", "bhsd", "layer", "function", "lse", "module, lse")
    yield from (Model(_mlp(), attention=how) for how in kinds)
    yield Model(Experts())
    yield Model(Recurrence())
    yield Model(nn.Identity(), norm=nn.LayerNorm(DIM))
    yield Model(Channels(nn.Conv1d(DIM, DIM, 1)))
    yield Model(Channels(nn.BatchNorm1d(DIM)).eval())
    yield Model(Of(lambda x: F.normalize(x, dim=-1)), out=lambda x: (x, x.argmax(-1)))
    yield torch.compile(Model(_mlp()), backend="eager")
    yield Model(Convolution())
    yield Model(Convolution(starts=True))
    yield Model(Loads(sums=True))
    yield Model(Loads(sums=False)).eval()


def _wrong():
    mlp = "mlp"
    for model, name, kind in (
        (Model(Of(_smear)), mlp, "Of"),
        (Model(Channels(nn.Conv1d(DIM, DIM, 3, padding=1))), "mlp.inner", "Conv1d"),
        (Model(Of(lambda x: x.cumsum(1))), mlp, "Of"),
        (Model(Of(lambda x: x + x.mean(1, keepdim=True))), mlp, "Of"),
        (Model(Of(lambda x: x + 1e-30 * x[:, :1])), mlp, "Of"),
        (Model(Of(lambda x: x * (x.argmax(1, keepdim=True) > 3))), mlp, "Of"),
        (Model(Channels(nn.BatchNorm1d(DIM))), "mlp.inner", "BatchNorm1d"),
        (Model(Channels(nn.GroupNorm(2, DIM))), "mlp.inner", "GroupNorm"),
        (Model(nn.GRU(DIM, DIM, batch_first=True)), None, None),
        (Model(_mlp(), attention="plain"), "attention", "Attention"),
        (Model(_mlp(), out=_smear), "forward", "Model"),
    ):
        yield (
            model,
            rf"^{re.escape(name)} \({kind}\) of Model mixes tokens" if name else "GRU|Model",
        )
    pooled = Model(_mlp(), out=lambda x: x.mean(1))
    yield pooled, r"expected output of Model to have shape \[B, S, \.\.\.\], .* got \[\d+, 50\]"
    loss = Model(_mlp(), out=lambda x: x.square().mean())
    yield loss, r"each token's own, got \[\]: .*Leave labels out of the example"
    for how in ("module", "function"):
        own = Model(_mlp(), attention=how, positions="own")
        yield own, r"another logits for some of the tokens alone.*torch.arange.*take position_ids"
    only = Model(_mlp(), positions="own", out=lambda x: x[..., :3].argmax(-1) * 0 + x.size(1))
    yield only, "another output for some"
    mean = lambda x: x + x.mean(1, keepdim=True)  # noqa: E731
    for wrong in (Convolution(missing=1), Convolution(ahead=1), Convolution(then=mean)):
        yield Model(wrong), "another logits for some of the tokens alone"
    if dist.get_world_size() > 1:
        yield Model(Loads(sums=False)), r"same into buffer mlp.load on every .*deepsp.sum_over_rank"


def _state(model):
    return (
        [m.training for m in model.modules()],
        {n: x.clone() for n, x in (*model.named_parameters(), *model.named_buffers())},
        torch.get_rng_state(),
    )


def _cases():
    torch.manual_seed(1)
    rank, size = dist.get_rank(), dist.get_world_size()
    lens = [12 + p for p in range(size)]
    begin = sum(lens[:rank])
    ids = torch.arange(begin, begin + lens[rank]).mul(7).remainder(50).expand(2, -1)
    position_ids = torch.arange(begin, begin + lens[rank]).expand(2, -1)
    for model in _right():
        for m in (model, model.double()):
            before = _state(m)
            deepsp.check(m, (ids, position_ids, lens))
            for given in (position_ids[:1], position_ids[0]):
                deepsp.check(m, {"ids": ids, "position_ids": given, "seq_lens": lens})
            after = _state(m)
            assert before[0] == after[0] and torch.equal(before[2], after[2])
            assert all(torch.equal(x, after[1][n]) for n, x in before[1].items())
            assert not any(inner._forward_hooks for inner in m.modules())
            attend = getattr(m, "attention", None)
            assert all("forward" not in vars(inner) for inner in attend.modules())
    for model, message in _wrong():
        before = _state(model)
        with pytest.raises(ValueError, match=message):
            deepsp.check(model, (ids, position_ids, lens))
        after = _state(model)
        assert before[0] == after[0] and torch.equal(before[2], after[2])
        assert all(torch.equal(x, after[1][n]) for n, x in before[1].items())

    # Embeddings in place of ids, and one tensor alone.
    x = draw(2, lens[rank], DIM)
    deepsp.check(_mlp().double(), x)
    with pytest.raises(ValueError, match=r"forward \(Of\) of Of mixes tokens"):
        deepsp.check(Of(_smear), x)
    for example, says in (
        (x[:, :3], "at least 4 of a row, got"),
        ((), "at least 4 of a row, got"),
        (3, "a tuple, a mapping of keyword arguments or a tensor, got int"),
    ):
        with pytest.raises(ValueError, match=says):
            deepsp.check(_mlp(), example)
    with pytest.raises(
        ValueError, match=r"1 .Linear. of Sequential couldn't be run on .*RuntimeEr"
    ):
        deepsp.check(nn.Sequential(nn.Identity(), nn.Linear(3, 3)).double(), x)


@pytest.mark.parametrize("ranks", [1, 2])
def test_check(ranks):
    on_ranks(ranks, _cases)
