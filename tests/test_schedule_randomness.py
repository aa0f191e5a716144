"""Masks: alike on whole tensors, different on sharded ones, and the same again when run again."""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import on_ranks
from placed import Placed, Sync
from torch import nn
from torch.utils.checkpoint import checkpoint

from deepsp.ranks import randomness
from deepsp.ranks.randomness import sharded_randomness

SIZES = [2, 3]


def _all(x):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return parts


def _alike(x):
    return all(torch.equal(x, other) for other in _all(x))


def _all_different(x):
    parts = _all(x)
    return not any(torch.equal(a, b) for n, a in enumerate(parts) for b in parts[n + 1 :])


def _give(streams):
    """Random numbers around modules' forwards, as a built schedule has them."""
    sharded = [module for module, stream in streams.items() if stream == "sharded"]
    for module, stream in streams.items():
        if stream == "sharded":
            module.forward = _around(module.forward, sharded_randomness)
        elif any(module in outer.modules() for outer in sharded):
            common = functools.partial(randomness.common_randomness, "inner")
            module.forward = _around(module.forward, common)


def _around(forward, context):
    def call(*args):
        with context():
            return forward(*args)

    return call


class Block(nn.Module):
    """Three dropouts: of whole tensors, of sharded ones, and of its own."""

    def __init__(self, checkpointed=None):
        super().__init__()
        self.before = nn.Dropout(0.5)
        self.inner = nn.Dropout(0.5)
        self.after = nn.Dropout(0.5)
        self.checkpointed = checkpointed
        self.masks = []

    def _body(self, x):
        outs = [self.before(x), self.inner(torch.ones_like(x)), self.after(x)]
        self.masks.append([(o != 0).detach().clone() for o in outs])
        return sum(outs) ** 2  # saves its input: what runs again runs to here

    def forward(self, x):
        if self.checkpointed is None:
            return self._body(x)
        return checkpoint(self._body, x, use_reentrant=self.checkpointed == "reentrant")


def _streams(checkpointed):
    torch.manual_seed(7)
    model = Block(checkpointed)
    streams = {model.before: "replicated", model.inner: "sharded", model.after: "replicated"}
    _give(streams)
    x = torch.ones(40, requires_grad=True)
    for step in range(2):
        model(x).sum().backward()
        runs = model.masks if checkpointed is None else model.masks[::2]
        before, inner, after = runs[step]
        assert _alike(before) and _alike(after) and _all_different(inner)
        if checkpointed is not None:
            for a, b in zip(model.masks[2 * step], model.masks[2 * step + 1], strict=True):
                assert torch.equal(a, b)
    first = model.masks[0]
    later = model.masks[1 if checkpointed is None else 2]
    assert not any(torch.equal(a, b) for a, b in zip(first, later, strict=True))
    assert _alike(torch.rand(3)), "the default generators go on alike"
    torch.manual_seed(7)
    again = Block(None)
    streams = {again.inner: "sharded"}
    _give(streams)
    again(x)
    for a, b in zip(again.masks[0], first, strict=True):
        assert torch.equal(a, b), "the seed alone decides"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("checkpointed", [None, "reentrant", "nonreentrant"])
def test_masks(size, checkpointed):
    on_ranks(size, _streams, checkpointed)


class Outer(nn.Module):
    """Drops by itself, and has a module in it that does."""

    def __init__(self, around_inner=False):
        super().__init__()
        self.inner = nn.Dropout(0.5)
        self.around_inner = around_inner

    def forward(self, x):
        self.first = F.dropout(x, 0.5)
        if self.around_inner:
            self.middle = checkpoint(self.inner, x, use_reentrant=False)
        else:
            self.middle = self.inner(x)
        self.last = F.dropout(x, 0.5)
        return self.first + self.middle + self.last


def _nested():
    torch.manual_seed(1)
    model = Outer()
    _give({model: "sharded", model.inner: "replicated"})
    x = torch.ones(40)
    model(x)
    assert _all_different(model.first) and _all_different(model.last) and _alike(model.middle)
    assert not torch.equal(model.first, model.last)
    middle = model.middle
    model(x)
    assert _alike(model.middle) and not torch.equal(model.middle, middle)
    assert _alike(torch.rand(3))

    drawn = []
    with sharded_randomness():
        for _ in range(2):
            with randomness.common_randomness("inner"):
                drawn.append(torch.rand(9))
    assert _alike(drawn[0]) and _alike(drawn[1]) and not torch.equal(*drawn)

    both = Outer()
    _give({both: "sharded", both.inner: "sharded"})
    both(x)
    assert _all_different(both.middle)
    assert _alike(torch.rand(3))

    refused = Outer(around_inner=True)
    _give({refused: "sharded", refused.inner: "replicated"})
    out = refused(torch.ones(40, requires_grad=True))
    with pytest.raises(ValueError, match="checkpoint the outer module"):
        out.sum().backward()


@pytest.mark.parametrize("size", SIZES)
def test_nested(size):
    on_ranks(size, _nested)


def _early_stop():
    """What runs again stops inside of the module, once nothing more is needed."""
    torch.manual_seed(1)
    inner = nn.Dropout(0.5)
    model = nn.Sequential(inner)
    _give({inner: "sharded"})
    x = torch.ones(40, requires_grad=True)
    out = checkpoint(model, x, use_reentrant=False)
    before = torch.get_rng_state()
    out.sum().backward()
    assert torch.equal(torch.get_rng_state(), before) and not randomness.inside()
    assert torch.equal(x.grad, out.detach()) and _all_different(x.grad)


def test_early_stop():
    on_ranks(2, _early_stop)


def _context(reentrant):
    torch.manual_seed(3)
    masks = []

    def body(x):
        with sharded_randomness():
            a = F.dropout(x, 0.5)
        b = F.dropout(x, 0.5)
        with sharded_randomness():
            c = F.dropout(x, 0.5)
        masks.append([t.detach().clone() for t in (a, b, c)])
        return (a + b + c) ** 2

    x = torch.ones(50, requires_grad=True)
    checkpoint(body, x, use_reentrant=reentrant).sum().backward()
    (a, b, c), again = masks
    assert _all_different(a) and _alike(b) and _all_different(c) and not torch.equal(a, c)
    for t, u in zip((a, b, c), again, strict=True):
        assert torch.equal(t, u)
    with pytest.raises(KeyError), sharded_randomness():
        raise KeyError
    assert not randomness.inside()
    assert _alike(torch.rand(3))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("reentrant", [True, False])
def test_context(size, reentrant):
    on_ranks(size, _context, reentrant)


class Dropping(nn.Module):
    def __init__(self, dim=6, wide=12):
        super().__init__()
        self.first = nn.Dropout(0.5)
        self.up = nn.Linear(dim, wide)
        self.wide = nn.Dropout(0.25)
        self.down = nn.Linear(wide, dim, bias=False)
        self.last = nn.Dropout(0.5)

    def forward(self, x):
        x = self.first(x)
        return x + self.last(self.down(self.wide(F.gelu(self.up(x)))))


_SHARDS = {"up.weight": 0, "up.bias": 0, "down.weight": 1}


def _found(tokens):
    torch.manual_seed(4)
    end = [Sync("down", "fwd_post", "all_reduce"), Sync("up", "bwd_post", "all_reduce")]
    if tokens:
        end = [
            Sync("", "fwd_pre", "scatter", 1),
            Sync("up", "fwd_pre", "all_gather", 1),
            Sync("down", "fwd_post", "reduce_scatter", 1),
            Sync("", "fwd_post", "all_gather", 1),
        ]
    placed = Placed(Dropping(), _SHARDS, end)
    before = torch.get_rng_state()
    findings = placed.check(torch.randn(2, 7, 6, generator=torch.Generator().manual_seed(1)))
    assert torch.equal(torch.get_rng_state(), before), "as it was"
    m = placed.model
    kind = "sharded" if tokens else "replicated"
    assert findings.streams == {m.first: kind, m.wide: "sharded", m.last: kind}
    placed.model.eval()
    assert placed.check(torch.ones(2, 7, 6)).streams == {}
    torch.manual_seed(dist.get_rank())
    placed.check(torch.ones(2, 7, 6))  # nothing random: anything goes
    placed.model.train()
    with pytest.raises(ValueError, match="with the same seed on every rank"):
        placed.check(torch.ones(2, 7, 6))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("tokens", [False, True])
def test_found(size, tokens):
    on_ranks(size, _found, tokens)


class Both(Dropping):
    def forward(self, x):
        x = F.dropout(x, 0.1, self.training)
        return self.down(F.dropout(self.up(x), 0.1, self.training))


def _both():
    torch.manual_seed(0)
    syncs = [Sync("down", "fwd_post", "all_reduce"), Sync("up", "bwd_post", "all_reduce")]
    placed = Placed(Both(), _SHARDS, syncs)
    with pytest.raises(ValueError, match=r"both for Replicate tensors.* and for Shard"):
        placed.check(torch.ones(2, 7, 6))


def test_both_in_one():
    on_ranks(2, _both)


def _buffers():
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5))
    placed = Placed(model)
    before = copy.deepcopy(placed.model.state_dict())
    placed.check(torch.randn(5, 3, generator=torch.Generator().manual_seed(0)))
    for name, value in placed.model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_buffers_and_generators_are_as_before():
    on_ranks(2, _buffers)
