"""What a model does besides computing: the dry run leaves no trace, and sees what a call does."""

import copy

import pytest
import torch
import torch.nn.functional as F
from harness import on_ranks
from torch import nn

import deepsp

f64 = torch.float64
D = 12


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(D, 24), nn.Linear(24, D)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Tokens(nn.Module):
    """A norm, on sharded tokens or on all of them."""

    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(D), MLP()
        self.cut, self.join = nn.Identity(), nn.Identity()

    def forward(self, x, shared=True):
        return self.mlp(self.join(self.norm(self.cut(x))) if shared else self.norm(x))


class AsksForGradients(Tokens):
    def forward(self, x):
        return super().forward(x, torch.is_grad_enabled())


class AsksTensor(Tokens):
    def forward(self, x):
        return super().forward(x, (x * 2).requires_grad)


class Average(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("average", torch.zeros(()))
        self.mlp = MLP()

    def forward(self, x):
        self.average = 0.9 * self.average + 0.1 * x.detach().mean()
        return self.mlp(x) + self.average


class Cache:
    def __init__(self):
        self.seen = []


class Caches(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = MLP()

    def forward(self, x):
        return self.fill(x, Cache())

    def fill(self, x, cache):
        cache.seen.append(x)
        return self.mlp(torch.cat(cache.seen, 1))


class FillsCache(Caches):
    def forward(self, x, cache):
        return self.fill(x, cache)


def _built(make, seed=0):
    torch.manual_seed(seed)
    one = make().to(f64)
    model = copy.deepcopy(one)
    sch = deepsp.create_schedule(model)
    if hasattr(model, "mlp"):
        sch["mlp.up"].shard("weight", axis=0)
        sch["mlp.down"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
        sch["mlp"].sync("bwd_post", "all_reduce")
    if hasattr(model, "cut"):
        sch["cut"].sync("fwd_pre", "scatter", axis=1)
        sch["join"].sync("fwd_post", "all_gather", axis=1)
    return one, deepsp.build(sch)[0]


def _same(make, *more):
    one, model = _built(make)
    torch.manual_seed(1)
    x = torch.randn(2, 5, D, dtype=f64)
    for _ in range(2):
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        expected = one(a, *(m() for m in more))
        out = model(b, *(m() for m in more))
        torch.testing.assert_close(out, expected)
        expected.square().sum().backward()
        out.square().sum().backward()
        torch.testing.assert_close(b.grad, a.grad)
    found = deepsp.full_state_dict(model, gradients=True)
    for name, p in one.named_parameters():
        torch.testing.assert_close(found[name], p.grad, msg=name)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("make", [AsksForGradients, AsksTensor, Average, Caches])
def test_as_in_an_ordinary_call(make, size):
    on_ranks(size, _same, make)


def test_objects_among_the_arguments_are_not_written_to():
    on_ranks(2, _same, FillsCache, Cache)


def _by_number():
    _, model = _built(Tokens)
    x = torch.randn(2, 5, D, dtype=f64)
    model(x, 0)
    with pytest.raises(ValueError, match="in one kind of call, and Replicate in another"):
        model(x, 1)


def test_numbers_tell_kinds_of_calls_apart():
    on_ranks(2, _by_number)


class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.LayerNorm(D), nn.Identity())
        self.mlp = MLP()

    def forward(self, x):
        return self.mlp(self.body(x))


def _part_alone():
    model = Parts().to(f64)
    sch = deepsp.create_schedule(model)
    sch["mlp.up"].shard("weight", axis=0)
    sch["mlp.down"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
    sch["body.0"].sync("fwd_pre", "scatter", axis=1)
    sch["body.1"].sync("fwd_post", "all_gather", axis=1)
    model, _ = deepsp.build(sch)
    x = torch.randn(2, 5, D, dtype=f64)
    model(x).sum().backward()
    with pytest.raises(ValueError, match="the model itself was not called"):
        model.body(x)  # what follows it in the model needs a sum, what follows it here doesn't
    with torch.no_grad():
        model.body(x)


def test_a_part_called_alone_after_the_model():
    on_ranks(2, _part_alone)


class Drops(nn.Module):
    """Random numbers of a child's for whole tensors, then of its own for sharded ones."""

    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)
        self.cut, self.join = nn.Identity(), nn.Identity()

    def forward(self, x):
        x = self.drop(x)
        return x, self.join(F.dropout(self.cut(x), 0.5, self.training))


def _drops():
    _, model = _built(Drops)
    torch.manual_seed(7)
    ones = torch.ones(2, 8, 64, dtype=f64)
    model.drop.p = 0.5
    for _ in range(3):
        whole, both = model(ones)
        every = deepsp.collectives.all_gather(whole[None], 0, grad="replicated")
        assert (every == whole).all()
        first, second = (both / (2 * whole)).nan_to_num().chunk(2, 1)
        kept = (whole.chunk(2, 1)[0] > 0) & (whole.chunk(2, 1)[1] > 0)
        assert not torch.equal(first[kept], second[kept])


def test_own_random_numbers_after_a_childs():
    on_ranks(2, _drops)


# ----------------------------------------------------------------------- what isn't seen


@torch.jit.script
def _scripted(x):
    return x * torch.sigmoid(1.702 * x)


class _Unseen(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.up, self.how = nn.Linear(4, 6), how

    def forward(self, x):
        x = self.up(x)
        if self.how == "scripted":
            x = _scripted(x)
        elif self.how == "turned off":
            with torch._C.DisableTorchFunction():
                x = x.sigmoid().mul(2)
        elif self.how == "mean over tokens":
            return x.sum(1) / x.size(1)
        elif self.how == "mean over features":
            return x.sum(-1) * (1 / x.shape[-1])
        elif self.how == "scaled":
            x = x * x.shape[-1] ** -0.5
        return x.square().sum(-1)


def _refused(how, axis, message):
    torch.manual_seed(0)
    sch = deepsp.create_schedule(_Unseen(how).double())
    if axis == 1:
        sch["up"].sync("fwd_pre", "scatter", axis=1)
    else:
        sch["up"].shard("weight", 0).sync("bwd_post", "all_reduce")
    sch.sync("fwd_post", "all_reduce")
    built, _ = deepsp.build(sch)
    with pytest.raises(ValueError, match=message):
        built(torch.ones(2, 5, 4).double())


@pytest.mark.parametrize(
    ("how", "axis", "message"),
    [
        ("mean over tokens", 1, "it computes with [23], which comes from the length of a sharded"),
        ("mean over features", 2, "it computes with 0.33+, which comes from the length"),
        ("scaled", 2, "which comes from the length of a sharded dimension"),
    ],
)
def test_what_cannot_be_followed_is_refused(how, axis, message):
    on_ranks(2, _refused, how, axis, message)


def _script(how):
    """A scripted function is followed op by op, and so is code that turns torch functions off."""
    torch.manual_seed(0)
    model = _Unseen(how).double()
    sch = deepsp.create_schedule(copy.deepcopy(model))
    sch["up"].shard("weight", 0).sync("bwd_post", "all_reduce")
    sch.sync("fwd_post", "all_reduce")
    built, _ = deepsp.build(sch)
    x = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0)).double()
    y, z = model(x), built(x)
    torch.testing.assert_close(z, y)
    for out in (y, z):
        out.square().sum().backward()
    gradients = deepsp.full_state_dict(built, gradients=True)
    for name, p in model.named_parameters():
        torch.testing.assert_close(gradients[name], p.grad)


@pytest.mark.parametrize("how", ["scripted", "turned off"])
def test_what_no_torch_function_shows(how):
    on_ranks(2, _script, how)


class _Shapes(nn.Module):
    """Sizes of sharded tensors that shape others."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x):
        x = self.up(x)
        b, s, h = x.shape
        x = x.view(b, s, -1, 3).reshape(b, s, h)
        x = x + torch.zeros(b, s, h, dtype=x.dtype)
        x = x.transpose(1, 2).reshape(b, h, -1).transpose(1, 2)
        return self.down(x) / b


def _shapes():
    torch.manual_seed(0)
    model = _Shapes().double()
    sch = deepsp.create_schedule(copy.deepcopy(model))
    sch["up"].shard("weight", 0, unit=3).sync("bwd_post", "all_reduce")
    sch["down"].shard("weight", 1, unit=3).sync("fwd_post", "all_reduce")
    built, _ = deepsp.build(sch)
    x = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0)).double()
    for m in (model, built):
        m(x).square().sum().backward()
    gradients = deepsp.full_state_dict(built, gradients=True)
    for name, p in model.named_parameters():
        torch.testing.assert_close(gradients[name], p.grad)


def test_sizes_may_shape_tensors():
    on_ranks(2, _shapes)
