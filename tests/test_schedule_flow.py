"""The dry run: what it finds against the gradients of one process, and what it refuses."""

import contextlib
import copy
import functools
import random

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import on_ranks
from placed import Placed, Sync, partial_of
from reference import draw
from torch import nn

import deepsp
from deepsp.schedule.flow.flow import Flow

f64 = torch.float64

SIZES = [2, 3]


def _same(placed, *args):
    """Loss, output, every gradient and that of the input: as in one process."""
    reference = placed.whole
    theirs = [a.clone().requires_grad_(a.is_floating_point()) for a in args]
    mine = [a.clone().requires_grad_(a.is_floating_point()) for a in args]
    reference.zero_grad()
    expected = reference(*theirs)
    weight = torch.randn(expected.shape, dtype=f64, generator=torch.Generator().manual_seed(5))
    (expected * weight).sum().backward()
    placed.check(*mine)
    out = placed.model(*mine)
    torch.testing.assert_close(out, expected)
    (out * weight).sum().backward()
    placed.compare(reference)
    for a, b in zip(mine, theirs, strict=True):
        if a.requires_grad:
            torch.testing.assert_close(a.grad, b.grad)


class Mlp(nn.Module):
    """norm, up, gelu, down, around them a residual."""

    def __init__(self, dim=6, wide=10, bias=True):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, wide, bias=bias)
        self.act = nn.GELU()
        self.down = nn.Linear(wide, dim, bias=False)
        self.drop = nn.Identity()

    def forward(self, x):
        return x + self.drop(self.down(self.act(self.up(self.norm(x)))))


def _mlp():
    torch.manual_seed(2)
    return Mlp().double()


_TP = {"up.weight": 0, "up.bias": 0, "down.weight": 1}
_X = torch.randn(2, 7, 6, dtype=f64, generator=torch.Generator().manual_seed(1))


def _tensor_parallel():
    placed = Placed(
        _mlp(), _TP, [Sync("up", "bwd_post", "all_reduce"), Sync("down", "fwd_post", "all_reduce")]
    )
    _same(placed, _X)
    assert partial_of(placed) == set()
    assert list(placed.findings.grads.values()) == ["replicated"]


@pytest.mark.parametrize("size", SIZES)
def test_tensor_parallel(size):
    on_ranks(size, _tensor_parallel)


def _sequence_parallel():
    syncs = [
        Sync("", "fwd_pre", "scatter", 1),
        Sync("up", "fwd_pre", "all_gather", 1),
        Sync("down", "fwd_post", "reduce_scatter", 1),
        Sync("", "fwd_post", "all_gather", 1),
    ]
    placed = Placed(_mlp(), _TP, syncs)
    _same(placed, _X)
    assert partial_of(placed) == {"norm.weight", "norm.bias"}
    grads = placed.findings.grads
    assert grads[syncs[1]] == "partial" and grads[syncs[3]] == "replicated"


@pytest.mark.parametrize("size", SIZES)
def test_sequence_parallel(size):
    on_ranks(size, _sequence_parallel)


def _refused(text, shards, syncs, model=None, x=_X, **kwargs):
    placed = Placed(model or _mlp(), shards, syncs, **kwargs)
    with pytest.raises(ValueError, match=text):
        placed.check(x.clone().requires_grad_(x.is_floating_point()))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "text, syncs",
    [
        # The input of a column-parallel layer without its all_reduce in backward.
        ("Replicate.*but Partial", [Sync("down", "fwd_post", "all_reduce")]),
        # The same where the layer's input is used by nothing else: it's the norm's that is short.
        (
            "P times too large",
            [
                Sync("up", "bwd_post", "all_reduce"),
                Sync("norm", "bwd_post", "all_reduce"),
                Sync("down", "fwd_post", "all_reduce"),
            ],
        ),
        (
            "expected grad='replicated'.*, got 'partial'",
            [
                Sync("up", "bwd_post", "all_reduce"),
                Sync("down", "fwd_post", "all_reduce", grad="partial"),
            ],
        ),
        (
            "expected grad='partial'.*, got 'replicated'",
            [
                Sync("", "fwd_pre", "scatter", 1),
                Sync("up", "fwd_pre", "all_gather", 1, grad="replicated"),
                Sync("down", "fwd_post", "reduce_scatter", 1),
                Sync("", "fwd_post", "all_gather", 1),
            ],
        ),
        ("would count P times", [Sync("up", "bwd_post", "all_reduce")]),
        (r"is Shard\(1\).*but.*is Replicate", [Sync("down", "fwd_post", "reduce_scatter", 1)]),
    ],
)
def test_refused(size, text, syncs):
    on_ranks(size, _refused, text, _TP, syncs)


class Gathered(nn.Module):
    """What ``gather`` makes goes to a residual and to a column-parallel layer."""

    def __init__(self, dim=6, wide=8):
        super().__init__()
        self.gather = nn.Identity()
        self.up = nn.Linear(dim, wide)
        self.down = nn.Linear(wide, dim, bias=False)
        self.late = nn.Parameter(torch.rand(dim))

    def forward(self, x):
        x = self.gather(x)
        return x + self.down(torch.tanh(self.up(x))) + self.late


def _gathered():
    torch.manual_seed(2)
    model = Gathered().double()
    syncs = [
        Sync("", "fwd_pre", "scatter", 1),
        Sync("gather", "fwd_post", "all_gather", 1),
        Sync("down", "fwd_post", "all_reduce"),
    ]
    with pytest.raises(ValueError, match=r"Replicate.*from add.*Partial.*from linear in up.*at up"):
        Placed(model, _TP, syncs).check(_X.clone().requires_grad_())
    syncs.append(Sync("up", "bwd_post", "all_reduce"))
    placed = Placed(model, _TP, syncs)
    _same(placed, _X)
    assert placed.findings.grads[syncs[1]] == "replicated"
    assert partial_of(placed) == set()


@pytest.mark.parametrize("size", SIZES)
def test_gathered_for_a_residual_and_a_sharded_layer(size):
    on_ranks(size, _gathered)


class Late(nn.Module):
    """A bias added after the reduction."""

    def __init__(self, dim=6, wide=8):
        super().__init__()
        self.up = nn.Linear(dim, wide)
        self.down = nn.Linear(wide, dim, bias=False)
        self.late = nn.Parameter(torch.rand(dim))

    def forward(self, x):
        return self.down(torch.tanh(self.up(x))) + self.late


def _late(op):
    torch.manual_seed(2)
    syncs = [Sync("up", "bwd_post", "all_reduce")]
    if op == "reduce_scatter":
        syncs.append(Sync("down", "fwd_post", "reduce_scatter", 1))
        syncs.append(Sync("", "fwd_post", "all_gather", 1))
    else:
        syncs.append(Sync("down", "fwd_post", "all_reduce"))
    placed = Placed(Late().double(), _TP, syncs)
    _same(placed, _X)
    assert partial_of(placed) == ({"late"} if op == "reduce_scatter" else set())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("op", ["reduce_scatter", "all_reduce"])
def test_bias_after_the_reduction(size, op):
    on_ranks(size, _late, op)


class Tied(nn.Module):
    """One parameter, used on whole tensors and on sharded ones."""

    def __init__(self):
        super().__init__()
        self.first = nn.LayerNorm(6)
        self.second = nn.LayerNorm(6)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def _tied():
    syncs = [Sync("second", "fwd_pre", "scatter", 1), Sync("second", "fwd_post", "all_gather", 1)]
    _refused("gradient of first.weight is Replicate.*Partial", {}, syncs, Tied().double())


def test_one_parameter_of_two_kinds():
    on_ranks(2, _tied)


class Detached(Mlp):
    """What carries no gradient doesn't count: the layer's input is used elsewhere, too, but so."""

    def __init__(self, how):
        super().__init__()
        self.how = how

    def forward(self, x):
        x = self.norm(x)
        y = self.down(self.act(self.up(x)))
        if self.how == "detach":
            return y + x.detach()
        if self.how == "compare":
            return y * (x > 0)
        if self.how == "no_grad":
            with torch.no_grad():
                z = x * 2
            return y + z
        if self.how == "decorated":
            return y + self._double(x)
        if self.how == "enabled again":
            with torch.no_grad(), torch.enable_grad():
                z = x * 2
            return y + z
        if self.how == "after":
            with torch.no_grad():
                x.sum()
            return y + x
        z = x.clone()
        z.mul_(2)
        return y + z

    @torch.no_grad()
    def _double(self, x):
        return x * 2


def _detached(how):
    torch.manual_seed(2)
    model = Detached(how).double()
    end = [Sync("down", "fwd_post", "all_reduce")]
    if how in ("detach", "compare", "no_grad", "decorated"):
        # The norm gets a share from ``up`` only: one all_reduce at the norm is as right as at up.
        _same(Placed(model, _TP, [*end, Sync("up", "bwd_post", "all_reduce")]), _X)
        placed = Placed(model, _TP, [*end, Sync("norm", "bwd_post", "all_reduce")])
        _same(placed, _X)
        assert partial_of(placed) == {"norm.weight", "norm.bias"}
    else:
        with pytest.raises(ValueError, match=r"Replicate.*Partial"):
            Placed(model, _TP, [*end, Sync("norm", "bwd_post", "all_reduce")]).check(_X)
        _same(Placed(model, _TP, [*end, Sync("up", "bwd_post", "all_reduce")]), _X)


@pytest.mark.parametrize(
    "how", ["detach", "compare", "no_grad", "decorated", "enabled again", "after", "in place"]
)
def test_what_carries_no_gradient(how):
    on_ranks(2, _detached, how)


class Unseen(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)

    def forward(self, x):
        return self.second(torch.from_dlpack(self.first(x).detach()))


def test_what_cannot_be_followed():
    shards = {"first.weight": 0, "first.bias": 0}
    on_ranks(2, _refused, "can't be followed.*shares memory", shards, [], Unseen().double())


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        with torch.no_grad():
            return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class InFunction(Detached):
    """Gradients are off in the forward of a Function, and of a checkpoint, but pass them."""

    def forward(self, x):
        x = self.norm(x)
        y = self.down(self.act(self.up(x)))
        if self.how == "function":
            return y + _Double.apply(x)
        return y + torch.utils.checkpoint.checkpoint(lambda x: x * 2, x, use_reentrant=True)


def _in_function(how):
    torch.manual_seed(2)
    model = InFunction(how).double()
    end = Sync("down", "fwd_post", "all_reduce")
    with pytest.raises(ValueError, match=r"Replicate.*Partial"):
        Placed(model, _TP, [end, Sync("norm", "bwd_post", "all_reduce")]).check(_X)
    _same(Placed(model, _TP, [end, Sync("up", "bwd_post", "all_reduce")]), _X)


@pytest.mark.parametrize("how", ["function", "checkpoint"])
def test_gradients_that_pass_functions(how):
    on_ranks(2, _in_function, how)


class KeepsGraph(Detached):
    """Its buffer is made of what has gradients."""

    def __init__(self):
        super().__init__("detach")
        self.register_buffer("last", torch.zeros(6))

    def forward(self, x):
        out = super().forward(x)
        self.last.copy_(out.mean((0, 1)))
        return out


def _buffers():
    placed = Placed(
        KeepsGraph().double(),
        _TP,
        [Sync("down", "fwd_post", "all_reduce"), Sync("up", "bwd_post", "all_reduce")],
    )
    placed.check(_X)
    last = placed.model.last
    assert last.grad_fn is None and not last.requires_grad and not last.any()


def test_a_dry_run_leaves_buffers_as_they_were():
    on_ranks(2, _buffers)


class InPlace(nn.Module):
    """Writes to a view of what goes on."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6, bias=False)

    def forward(self, x):
        out = self.first(x)
        y = torch.zeros_like(out)
        rows = y.view(-1, 6)
        rows += self.down(torch.tanh(self.up(out))).view(-1, 6)
        return y * 2 + out


def _in_place():
    torch.manual_seed(3)
    model = InPlace().double()
    end = [Sync("down", "fwd_post", "all_reduce")]
    with pytest.raises(ValueError, match=r"Replicate.*Partial"):
        Placed(model, _TP, end).check(_X)
    _same(Placed(model, _TP, [*end, Sync("up", "bwd_post", "all_reduce")]), _X)


def test_in_place_through_a_view():
    on_ranks(2, _in_place)


class Calls(nn.Module):
    """Anything, in a user's module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def _own_collectives():
    """Collectives that a user's module calls on what doesn't fit them: each with its reason."""
    alone, _ = dist.new_subgroups(1)
    total = functools.partial(deepsp.collectives.all_reduce, grad="replicated")
    split = [Sync("", "fwd_pre", "scatter", 1)]
    for function, syncs, text in [
        (total, [], "to be Partial, got Replicate; .* P times too large"),
        (total, split, r"Partial, got Shard\(1\); .*all_gather.* different parts"),
        (
            lambda x: deepsp.collectives.reduce_scatter(x, 1),
            split,
            r"got Shard\(1\); .* different parts",
        ),
        (
            lambda x: deepsp.collectives.scatter(x, 1),
            split,
            r"to be Replicate, got Shard\(1\); .* already",
        ),
        (
            lambda x: deepsp.collectives.all_gather(x, 1, grad="partial"),
            [],
            r"to be Shard\(1\), got Replicate; .* already",
        ),
        (
            lambda x: deepsp.collectives.all_gather(x, 2, grad="partial"),
            split,
            r"to be Shard\(2\), got Shard\(1\); pass dim=1",
        ),
        (
            lambda x: deepsp.collectives.all_gather(torch.cat([x, x], 1), 1, grad="partial"),
            split,
            r"to be Shard\(1\), got Shard\(1\) in 2 parts; .* aren't the full tensor",
        ),
        (lambda x: total(x, alone), split, r"another group, got Shard\(1\); .*gather"),
        (lambda x: deepsp.seq_to_heads([x], alone), split, r"another group, got Shard\(1\)"),
        (lambda x: deepsp.seq_to_heads([x]), [], r"Shard\(1\), got Replicate; the ranks' copies"),
        (
            lambda x: deepsp.heads_to_seq([x], [6]),
            split,
            r"Shard\(2\) of .*, got Shard\(1\); gather",
        ),
        (
            lambda x: deepsp.merge_attention([(x, x.sum(-1)), (torch.ones(2, 4, 6, 2).to(x),) * 2]),
            split,
            r"expected all parts to be Shard\(1\), .* got Replicate of .*; compute all of them",
        ),
    ]:
        placed = Placed(Calls(function), {}, syncs)
        with pytest.raises(ValueError, match=text):
            placed.check(torch.ones(2, 8, 6, 2))


def test_own_collectives():
    on_ranks(2, _own_collectives)


class Attending(nn.Module):
    """Attention over the group in a user's module."""

    def __init__(self, local):
        super().__init__()
        self.local = local
        self.qkv = nn.Linear(6, 18, bias=False)
        self.out = nn.Linear(6, 6)
        self.attention = (
            deepsp.DistributedAttention(_LOCAL[local]) if dist.is_initialized() else None
        )

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (3, 2)) for t in self.qkv(x).chunk(3, -1))
        with torch.device("cpu"):  # a mode of the model's own
            if self.local.startswith("lse"):
                y = self.with_own_keys(q, k, v)
            else:
                y = _local(q, k, v) if self.attention is None else self.attention(q, k, v)
        return self.out(y.flatten(2))

    def with_own_keys(self, q, k, v):
        """Each token has a key of its own besides."""
        attend = _with_lse if self.attention is None else self.attention
        own = (v * 0.5, (q * k).sum(-1))
        out, _ = deepsp.merge_attention([attend(q, k, v, return_lse=True), own])
        return out


def _local(q, k, v):
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def _of_queries(q, k, v, query_indices):
    assert query_indices.numel() == q.size(1)
    return _local(q, k, v)


def _with_lse(q, k, v, return_lse):
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.size(-1) ** -0.5
    out = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)
    return out, scores.logsumexp(-1).transpose(1, 2)


def _of_heads(q, k, v, return_lse):
    out, lse = _with_lse(q, k, v, return_lse)
    return out, lse.transpose(1, 2)


_LOCAL = {
    "sdpa": None,
    "local": _local,
    "queries": _of_queries,
    "lse": None,
    "lse, local": _of_heads,
}


def _attending(local):
    torch.manual_seed(2)
    x = torch.randn(2, 2 * dist.get_world_size(), 6, dtype=f64)
    model = Attending(local).double()
    syncs = [Sync("", "fwd_pre", "scatter", 1), Sync("", "fwd_post", "all_gather", 1)]
    placed = Placed(model, {}, syncs)
    placed.check(x)
    names = {name for name, _ in model.named_parameters()}
    assert partial_of(placed) == names
    out = placed.model(x)
    (out**2).sum().backward()
    plain = Attending.__new__(Attending)
    plain.__dict__.update(model.__dict__)
    plain._modules = {**model._modules, "attention": None}
    expected = plain(x)
    (expected**2).sum().backward()
    torch.testing.assert_close(out, expected)
    placed.compare(plain)
    with pytest.raises(ValueError, match=r"to be Shard\(1\), got Replicate; the ranks' copies"):
        Placed(model).check(x)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("local", _LOCAL)
def test_distributed_attention(size, local):
    on_ranks(size, _attending, local)


class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, 5)

    def forward(self, x, labels):
        return deepsp.cross_entropy(self.head(x), labels, reduction="mean")


class _Rotated(nn.Module):
    """Attention as nanoGPT views heads, with Meta's rotary embedding."""

    def __init__(self):
        super().__init__()
        self.n_head = 6
        self.q, self.k, self.v, self.out = (nn.Linear(24, 24) for _ in range(4))

    def forward(self, x):
        batch, tokens, _ = x.shape
        q, k, v = (p(x).view(batch, tokens, self.n_head, -1) for p in (self.q, self.k, self.v))
        angles = torch.arange(tokens)[:, None] * torch.tensor([1.0, 0.5], dtype=f64)
        turn = torch.polar(torch.ones_like(angles), angles)[:, None]
        q, k = (
            torch.view_as_real(torch.view_as_complex(y.reshape(*y.shape[:-1], -1, 2)) * turn)
            for y in (q, k)
        )
        q, k, v = (y.flatten(3).transpose(1, 2) for y in (q, k, v[..., None]))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(out.transpose(1, 2).reshape(batch, tokens, -1))


def _divided_views():
    """view(B, T, n_head, -1): right where the schedule has divided n_head, else refused."""
    for divides in (True, False):
        torch.manual_seed(0)
        reference = _Rotated().to(f64)
        sch = deepsp.create_schedule(copy.deepcopy(reference))
        for name in ("q", "k", "v"):
            sch[name].shard(["weight", "bias"], axis=0, unit=4)
            sch[name].sync("bwd_post", "all_reduce")
        sch["out"].shard("weight", axis=1, unit=4)
        sch["out"].sync("fwd_post", "all_reduce")
        if divides:
            sch.divide("n_head")
        model, _ = deepsp.build(sch)
        x = draw(2, 5, 24)
        if not divides:
            with pytest.raises(ValueError, match=r"inner one|sizes don't fit"):
                model(x)
            continue
        for m in (model, reference):
            m(x).square().sum().backward()
        torch.testing.assert_close(model(x), reference(x))
        full = deepsp.full_state_dict(model)
        assert full.keys() == reference.state_dict().keys()
        torch.testing.assert_close(model.out.bias.grad, reference.out.bias.grad)


@pytest.mark.parametrize("ranks", [2, 3])
def test_views_by_a_divided_number(ranks):
    on_ranks(ranks, _divided_views)


def _with_loss():
    torch.manual_seed(2)
    placed = Placed(WithLoss().double(), {}, [Sync("", "fwd_pre", "scatter", 1)])
    labels = torch.arange(14).view(2, 7) % 5
    mine = deepsp.shard(labels, 1)
    with pytest.raises(ValueError, match="shift_labels to have shape"):
        placed.check(_X, labels)

    class Labels(nn.Module):
        def __init__(self):
            super().__init__()
            self.split = nn.Identity()
            self.inner = placed.whole

        def forward(self, x, labels):
            return self.inner(x, self.split(labels))

    syncs = [Sync("inner", "fwd_pre", "scatter", 1), Sync("split", "fwd_post", "scatter", 1)]
    placed = Placed(Labels(), {}, syncs)
    placed.check(_X, labels)
    assert partial_of(placed) == {"inner.head.weight", "inner.head.bias"}
    loss = placed.model(_X, labels)
    loss.backward()
    expected = F.cross_entropy(placed.whole.inner.head(_X).flatten(0, 1), labels.flatten())
    expected.backward()
    torch.testing.assert_close(loss, expected)
    placed.compare(placed.whole)
    assert mine.size(1) < 7


@pytest.mark.parametrize("size", SIZES)
def test_loss_of_sharded_tokens(size):
    on_ranks(size, _with_loss)


class Random(nn.Module):
    """Steps, one after another, on a tensor and on those put aside."""

    def __init__(self, steps, dim=6, wide=9):
        super().__init__()
        self.kinds = [kind for kind, *_ in steps]
        self.steps = nn.ModuleList(_STEPS[kind](dim, wide) for kind in self.kinds)

    def forward(self, x):
        kept = [x]
        for kind, step in zip(self.kinds, self.steps, strict=True):
            if kind == "keep":
                kept.append(step(x))
            elif kind == "add":
                x = step(x) + kept[-1]
            elif kind == "up_down":
                x = step[1](step[0](x))
            else:
                x = step(x)
        return x


class Scale(nn.Module):
    def __init__(self, dim, wide):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(dim) + 0.5)

    def forward(self, x):
        return x * self.weight


class Shift(Scale):
    def forward(self, x):
        return x + self.weight.view(1, -1)


class Sum(nn.Module):
    """Uses what comes in twice."""

    def __init__(self, dim, wide):
        super().__init__()
        self.other = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        return torch.tanh(x) + self.other(x)


def _up_down(dim, wide):
    return nn.Sequential(
        nn.Linear(dim, wide), nn.Sequential(nn.GELU(), nn.Linear(wide, dim, False))
    )


_STEPS = {
    "norm": lambda dim, wide: nn.LayerNorm(dim),
    "linear": lambda dim, wide: nn.Linear(dim, dim),
    "up_down": _up_down,
    "scale": Scale,
    "shift": Shift,
    "sum": Sum,
    "keep": lambda dim, wide: nn.Identity(),
    "add": lambda dim, wide: nn.Identity(),
    "pass": lambda dim, wide: nn.Identity(),
}


def _draw(rng):
    """A program, with shards and syncs, most of which make sense where they stand."""
    place, kept = "whole", ["whole"]
    steps, shards, syncs = [], {}, []

    def sync(name, mode, op, axis=None, chance=1.0):
        if rng.random() < chance:
            grad = rng.choice([None] * 8 + ["replicated", "partial"])
            if op not in ("all_gather", "all_reduce", "scatter") or mode == "bwd_post":
                grad = None
            syncs.append(Sync(name, mode, op, axis, grad))
            return True
        return False

    for n in range(rng.randint(2, 6)):
        kind = rng.choice(list(_STEPS))
        name = f"steps.{n}"
        # Changes of placement, of one kind or another.
        if place == "whole" and rng.random() < 0.3:
            sync(name, "fwd_pre", "scatter", 1)
            place = "tokens"
        elif place == "tokens" and rng.random() < 0.25:
            sync(name, "fwd_pre", "all_gather", 1)
            place = "whole"
        elif rng.random() < 0.15:
            sync(name, "bwd_post", "all_reduce")
        if rng.random() < 0.02:
            sync(name, rng.choice(["fwd_pre", "fwd_post"]), rng.choice(_OPS), rng.choice([0, 1, 2]))
        if kind == "up_down" and rng.random() < 0.75:
            up, down = f"{name}.0", f"{name}.1.1"
            shards.update({f"{up}.weight": 0, f"{up}.bias": 0, f"{down}.weight": 1})
            if place == "tokens":
                sync(up, "fwd_pre", "all_gather", 1, 0.97)
            else:
                sync(up, "bwd_post", "all_reduce", chance=0.8)
            if rng.random() < 0.5:
                sync(down, "fwd_post", "reduce_scatter", 1, 0.97)
                place = "tokens"
            else:
                sync(down, "fwd_post", "all_reduce", chance=0.97)
                place = "whole"
        if kind == "add" and place != kept[-1] and rng.random() < 0.95:
            kind = "pass"
        if kind == "keep":
            kept.append(place)
        steps.append((kind,))
    if place == "tokens":
        sync("", "fwd_post", "all_gather", 1, 0.97)
    return steps, shards, syncs


_OPS = ["all_gather", "reduce_scatter", "all_reduce", "scatter"]


def _property(first, count):
    accepted = refused = 0
    reasons = {}
    for seed in range(first, first + count):
        rng = random.Random(seed)
        steps, shards, syncs = _draw(rng)
        torch.manual_seed(seed)
        model = Random(steps).double()
        placed = Placed(model, shards, syncs)
        x = torch.randn(2, 7, 6, dtype=f64).requires_grad_(rng.random() < 0.7)
        try:
            placed.check(x)
        except ValueError as error:
            refused += 1
            reasons[seed] = str(error)
            continue
        try:
            _same_but_for_inputs(placed, x)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {steps} {shards} {syncs}: {error}") from error
        accepted += 1 if syncs else 0
    return accepted, refused, reasons


def _same_but_for_inputs(placed, x):
    reference = placed.whole
    theirs, mine = (x.detach().clone().requires_grad_(x.requires_grad) for _ in range(2))
    expected = reference(theirs)
    weight = torch.randn_like(expected)
    if not expected.requires_grad:
        return
    (expected * weight).sum().backward()
    out = placed.model(mine)
    torch.testing.assert_close(out, expected)
    (out * weight).sum().backward()
    placed.compare(reference)
    if x.requires_grad:
        torch.testing.assert_close(mine.grad, theirs.grad)


@pytest.mark.parametrize("size", SIZES)
def test_what_is_accepted_is_right(size):
    """Many small random models with random shards and syncs, right and wrong ones: whatever the dry
    run accepts has the loss and the gradients of one process."""
    answers = on_ranks(size, _property, 0, 250)
    assert len({(*a[:2], *a[2]) for a in answers}) == 1, "the ranks have to agree"
    accepted, refused, _ = answers[0]
    assert accepted > 60 and refused > 60, (accepted, refused)


def dry_run(model, x):
    return Flow(model, {}, (0, 1, "")).run((x,), {})


class _Grad(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return torch.func.grad(lambda y: self.fc(y).sum())(x)


def test_an_error_in_the_dry_run_says_that_gradients_are_on():
    with pytest.raises(RuntimeError) as raised:
        dry_run(_Grad(), torch.randn(2, 4))
    assert "torch.func.grad" in raised.value.__notes__[0]


class _Kept(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.last = nn.Linear(4, 4), None

    def forward(self, x):
        self.last = self.fc(x)
        return self.last


def test_a_tensor_kept_from_the_dry_run_has_no_backward():
    model = _Kept()
    dry_run(model, torch.randn(2, 4))
    with pytest.raises(RuntimeError, match="detach tensors that the model keeps"):
        model.last.square().sum().backward()


class _View(nn.Module):
    def __init__(self, fails):
        super().__init__()
        self.fc, self.fails = nn.Linear(4, 4), fails
        self.register_buffer("row", torch.zeros(3, 4)[0])

    def forward(self, x):
        self.row.copy_(self.fc(x).sum(0))
        if self.fails:
            raise KeyError("first")
        return self.fc(x)


@pytest.mark.parametrize("fails", [False, True])
def test_a_buffer_that_is_a_view_is_as_before(fails):
    model = _View(fails)
    with pytest.raises(KeyError, match="first") if fails else contextlib.nullcontext():
        dry_run(model, torch.randn(2, 4))
    assert not model.row.requires_grad and not model.row.any()
