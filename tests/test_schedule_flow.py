"""The dry run: what it finds against the gradients of one process, and what it refuses."""

import random

import pytest
import torch
from harness import on_ranks
from placed import Placed, Sync, partial_of
from torch import nn

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
        _mlp(),
        _TP,
        [Sync("up", "bwd_post", "all_reduce"), Sync("down", "fwd_post", "all_reduce")],
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
    assert placed.findings.origins == {syncs[1]: syncs[0], syncs[3]: syncs[0]}


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
        ("whole one.*but this rank's share", [Sync("down", "fwd_post", "all_reduce")]),
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
            "grad is 'partial'.*'replicated' is right",
            [
                Sync("up", "bwd_post", "all_reduce"),
                Sync("down", "fwd_post", "all_reduce", grad="partial"),
            ],
        ),
        (
            "grad is 'replicated'.*'partial' is right",
            [
                Sync("", "fwd_pre", "scatter", 1),
                Sync("up", "fwd_pre", "all_gather", 1, grad="replicated"),
                Sync("down", "fwd_post", "reduce_scatter", 1),
                Sync("", "fwd_post", "all_gather", 1),
            ],
        ),
        ("would count P times", [Sync("up", "bwd_post", "all_reduce")]),
        (
            "down.*each rank.*|is sharded along axis 1.*but.*is whole",
            [Sync("down", "fwd_post", "reduce_scatter", 1)],
        ),
    ],
)
def test_refused(size, text, syncs):
    on_ranks(size, _refused, text, _TP, syncs)


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
