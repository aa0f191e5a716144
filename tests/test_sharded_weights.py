"""``module.weight`` where it is sharded: what writes to it, reads it, or puts another in its place,
against the same on a module in one process."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import on_ranks
from reference import draw
from torch import nn

import deepsp
from deepsp.weights.parameters import sharded_parameters

f64 = torch.float64


class Model(nn.Module):
    """Padding in the embedding, rows that don't divide by the ranks, fewer rows than ranks."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 5, padding_idx=1)
        self.up = nn.Linear(5, 8)
        self.conv = nn.Conv1d(8, 1, 1)
        self.head = nn.Linear(5, 7, bias=False)
        self.scale = nn.Parameter(torch.tensor(0.5))  # no dimensions
        self.inside = lambda: None

    def forward(self, ids):
        self.inside()
        x = self.embed(ids)
        x = x + self.scale * self.conv(self.up(x).mT).mT
        return self.head(x)


def _pair(**kwargs):
    torch.manual_seed(1)
    reference = Model().to(f64)
    model = copy.deepcopy(reference)
    deepsp.shard_parameters(model, **{"dtype": f64, "reduce_dtype": f64, **kwargs})
    return reference, model


IDS = torch.arange(12).view(2, 6) % 7


def _same(model, reference):
    full, expected = deepsp.full_state_dict(model), reference.state_dict()
    assert set(full) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(full[name], value, rtol=0, atol=0, msg=lambda m, n=name: n + m)
    torch.testing.assert_close(model(IDS), reference(IDS), rtol=1e-12, atol=1e-12)


def _trained(model, reference):
    """A step of each; every gradient is the same."""
    for m in (model, reference):
        m.zero_grad()
        F.cross_entropy(m(IDS).flatten(0, 1), IDS.flatten()).backward()
    for name, p, shards, index in sharded_parameters(model):
        whole = reference.get_parameter(name).grad
        if whole is None:
            assert p.grad is None
        else:
            expected = shards.rows_of(index, whole) * dist.get_world_size()
            torch.testing.assert_close(p.grad.as_subclass(torch.Tensor), expected)


def _in_data(m):
    m.up.weight.data.clamp_(-0.1, 0.2)
    m.up.weight.detach().mul_(2)
    m.up.bias.data = torch.arange(8.0, dtype=f64)
    m.head.weight.data[2] = 1
    m.head.weight.data[-3:, 1:3] = 4
    m.head.weight.data[3:5][1].copy_(draw(5))
    m.embed.weight.data[:] = draw(7, 5)
    m.scale.data.add_(1)
    m.conv.weight.data[0, 2, 0] = 8


def _initialized(m):
    nn.init.zeros_(m.up.weight)
    nn.init.constant_(m.up.bias, 3.0)
    nn.init.xavier_normal_(m.head.weight)
    nn.init.kaiming_uniform_(m.conv.weight)
    nn.init.kaiming_normal_(m.embed.weight)
    nn.init.normal_(m.scale)


def _reset(m):
    for inner in (m.embed, m.up, m.conv, m.head):
        inner.reset_parameters()


WRITES = [_in_data, _initialized, _reset]


def _writes():
    for write in WRITES:
        reference, model = _pair()
        for m in (reference, model):
            torch.manual_seed(5)
            write(m)
        _same(model, reference)
        _trained(model, reference)
    reference, model = _pair()
    for m in (reference, model):
        torch.manual_seed(5)
        with torch.no_grad():
            m.up.weight.fill_(0.3).add_(draw(8, 5)).sub_(draw(5)).mul_(draw(8, 1))
            m.up.weight += 2
            m.up.weight[1:6] *= 3
            m.up.bias.normal_(std=2.0)
            m.head.weight.uniform_(-1, 1).lerp_(draw(7, 5), 0.25)
            torch.clamp_(m.head.weight, min=0)
            m.embed.weight.copy_(m.head.weight)
            m.embed.weight.masked_fill_(draw(7, 5) > 0, 0.5)[1].zero_()
            m.scale.copy_(torch.tensor(3.0, dtype=f64))
            m.conv.weight.bernoulli_(0.5)
    _same(model, reference)
    _trained(model, reference)
    # What depends on all of it, and what PyTorch doesn't allow.
    before = deepsp.full_state_dict(model)
    for refused in (
        lambda: nn.init.orthogonal_(model.up.weight),
        lambda: model.up.weight.data.cumsum_(0),
        lambda: model.up.weight.data.t_(),
        lambda: model.up.weight.data[::2].fill_(1),
        lambda: torch.add(draw(8, 5), 1, out=model.up.weight.data),
        lambda: model.up.weight.data.view(-1).fill_(1),
    ):
        with pytest.raises(RuntimeError, match=r"up\.weight is sharded .*full_parameters"):
            refused()
    with pytest.raises(RuntimeError, match="requires grad and is used in an in-place"):
        model.up.weight.fill_(1)
    after = deepsp.full_state_dict(model)
    assert all(torch.equal(before[name], after[name]) for name in before)


def _reads():
    """On one rank alone: named there, and the others go on."""
    rank = dist.get_rank()
    reference, model = _pair(dtype=torch.bfloat16)
    weight = model.head.weight
    assert weight is model.head.weight and "head.weight" in repr(weight)
    assert weight.shape == (7, 5) and weight.dtype == torch.bfloat16 and weight.numel() == 35
    assert weight.requires_grad and weight.device.type == "cpu" and len(weight) == 7
    assert hasattr(model.head, "weight") and model.head.weight.dim() == 2
    named = pytest.raises(RuntimeError, match=r"head\.weight is sharded .*full_parameters")
    if rank == 0:
        for read in (
            lambda: weight.norm(),
            lambda: weight + 1,
            lambda: F.linear(torch.ones(1, 5), weight),
            lambda: weight.tolist(),
            lambda: weight.grad,
            lambda: torch.equal(reference.head.weight, weight),
            lambda: torch.empty(7, 5).copy_(weight),
            lambda: copy.deepcopy(weight),
            lambda: weight.numpy(),
            lambda: bool((weight > 0).all()),
        ):
            with named:
                read()
    dist.barrier()
    with deepsp.full_parameters(model):
        if rank == 0:
            right = reference.head.weight
            assert torch.equal(model.head.weight, right)
            assert model.head.weight.norm() == right.norm()
        with pytest.raises(RuntimeError, match=r"called within deepsp\.full_parameters"):
            model(IDS)
        twice = pytest.raises(RuntimeError, match="gathered already")
        with twice, deepsp.full_parameters(model.head):
            pass
    # A part called by itself: a forward, too.
    out = model.head(torch.ones(1, 5, dtype=torch.bfloat16))
    torch.testing.assert_close(
        out, reference.head(torch.ones(1, 5, dtype=f64)).bfloat16(), rtol=0.05, atol=0.05
    )


def _whole():
    """Writes of any kind, and gradients of what is computed outside of a forward."""
    rank, size = dist.get_rank(), dist.get_world_size()
    reference, model = _pair()
    with deepsp.full_parameters(model):
        for m in (reference, model):
            torch.manual_seed(8)
            nn.init.orthogonal_(m.up.weight)
            nn.init.trunc_normal_(m.conv.weight, std=0.3)
            m.head.weight.data.t()[2] = 3
            m.embed.weight.data.view(-1)[3:20].fill_(2)
            m.scale.data.fill_(float("nan"))
    full, expected = deepsp.full_state_dict(model), reference.state_dict()
    for name, value in expected.items():
        torch.testing.assert_close(full[name], value, rtol=0, atol=0, equal_nan=True)
    reference, model = _pair(gradient_reduction="mean")
    with deepsp.full_parameters(model.head):
        loss = model.head.weight.pow(3).sum()
    loss.backward()
    reference.head.weight.pow(3).sum().backward()
    p, shards, index = next(x[1:] for x in sharded_parameters(model) if x[0] == "head.weight")
    torch.testing.assert_close(
        p.grad.as_subclass(torch.Tensor), shards.rows_of(index, reference.head.weight.grad)
    )
    # Ops of deepsp are calls that every rank makes.
    hidden, labels = draw(4, 5, seed=2), torch.arange(4)
    for m in (model, reference):
        m.zero_grad()
        deepsp.linear_cross_entropy(hidden, m.head.weight, labels, reduction="sum").backward()
    expected = shards.rows_of(index, reference.head.weight.grad)
    torch.testing.assert_close(p.grad.as_subclass(torch.Tensor), expected)
    # Written differently, or left by one rank alone: an error on all, and nothing is written.
    before = deepsp.full_state_dict(model)
    differ = pytest.raises(ValueError, match=rf"writes to up\.weight .* ranks 0 and {size - 1}")
    with differ, deepsp.full_parameters(model):
        model.up.weight.data.fill_(float(rank == size - 1))
    left = pytest.raises(KeyError, match="mine")
    if rank > 0:
        left = pytest.raises(ValueError, match="left by an exception")
    with left, deepsp.full_parameters(model):
        model.up.weight.data.fill_(5)
        if rank == 0:
            raise KeyError("mine")
    after = deepsp.full_state_dict(model)
    assert all(torch.equal(before[name], after[name]) for name in before)
    _same(model, reference)


def _zero(weight):
    weight.zero_()


def _in_forward():
    """What is written to in a forward is a copy: raised at its end, at the latest."""
    reference, model = _pair()

    def fill():
        with torch.no_grad():
            model.up.weight.fill_(1)

    def set_data():
        model.up.weight.data = torch.zeros(8, 5, dtype=f64)

    def replace():
        model.up.weight = torch.zeros(8, 5, dtype=f64)

    written = {
        fill: r"up\.weight .* written to in a forward",
        lambda: model.up.weight.data.clamp_(0): r"up\.weight .* written to in a forward",
        lambda: nn.init.zeros_(model.conv.weight): r"conv\.weight .* written to in a forward",
        set_data: "data is set in a forward",
        replace: r"up\.weight is sharded, and is set in a forward",
    }
    for inside, message in written.items():
        for _ in range(2):  # recorded, and looked ahead
            model.inside = inside
            with pytest.raises(RuntimeError, match=message):
                model(IDS)
            model.inside = lambda: None
            _same(model, reference)
    # In a part that is called by itself: at the next forward.
    handle = model.head.register_forward_pre_hook(lambda m, _: _zero(m.weight.data))
    model.head(torch.ones(1, 5, dtype=f64))
    handle.remove()
    with pytest.raises(RuntimeError, match=r"head\.weight .* written to in a forward"):
        model(IDS)
    _same(model, reference)


class _Outer(nn.Module):
    """Reads a weight that isn't its own."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model.embed(ids) @ self.model.embed.weight.t()


def _elsewhere():
    rank, size = dist.get_rank(), dist.get_world_size()
    reference, model = _pair()
    ids = torch.arange(4)
    torch.testing.assert_close(_Outer(model)(ids), _Outer(reference)(ids))
    model.embed(ids).sum().backward()
    assert "embed.weight" in deepsp.full_state_dict(model, gradients=True)
    if rank == size - 1:
        model.embed.parametrizations.weight.original.grad = None
    with pytest.raises(ValueError, match=rf"embed\.weight on all {size} ranks .*, got it on"):
        deepsp.full_state_dict(model, gradients=True)


def _put_in_place():
    """Other parameters, and the same ones, frozen."""
    reference, model = _pair()
    for m in (reference, model):
        m.up.weight.requires_grad_(False)
        m.up.bias.requires_grad = False
    assert not model.up.weight.requires_grad and not model.up.bias.requires_grad
    _trained(model, reference)
    for m in (reference, model):
        m.up.weight.requires_grad_(True)
        m.conv.weight = nn.Parameter(draw(1, 8, 1))
        m.up.bias = nn.Parameter(draw(8), requires_grad=False)
        m.head.weight = m.embed.weight  # tied
    _same(model, reference)
    _trained(model, reference)
    _trained(model, reference)
    assert model.head.weight is model.embed.weight
    assert len(list(model.parameters())) == len(list(reference.parameters()))
    other = _pair()[1]
    for wrong, message in (
        (nn.Parameter(draw(7, 5)), "shared by 2 modules"),
        (nn.Parameter(draw(5, 7)), r"shape \(7, 5\), got \(5, 7\)"),
        (None, r"shape \(7, 5\), got None"),
        (torch.zeros(7, 5), r"tensor of torch\.float64, .*, got torch\.float32"),
        (other.head.weight, "another call of shard_parameters"),
    ):
        with pytest.raises(ValueError, match=message):
            model.head.weight = wrong
    with pytest.raises(TypeError, match="cannot assign"):  # not sharded: PyTorch's own
        nn.Linear(5, 7).weight = model.head.weight
    _same(model, reference)


def _converted():
    """``.to(dtype)``: the shards, and what is gathered of them, as the whole would be."""
    for start, convert, kind in (
        (torch.bfloat16, lambda m: m.float(), torch.float32),
        (torch.float32, lambda m: m.bfloat16(), torch.bfloat16),
        (torch.bfloat16, lambda m: m.half(), torch.float16),
        (torch.float32, lambda m: m.double(), f64),
        (torch.bfloat16, lambda m: m.to(f64), f64),
    ):
        torch.manual_seed(1)
        reference = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
        model = deepsp.shard_parameters(
            copy.deepcopy(reference), dtype=start, gradient_reduction="mean"
        )
        model(torch.ones(2, 5, dtype=start)).sum().backward()
        model.zero_grad()
        convert(model)
        convert(reference)
        assert model[0].weight.dtype == kind
        x = draw(4, 5).to(kind)
        for _ in range(2):
            for m in (model, reference):
                m.zero_grad()
                m(x).pow(2).sum().backward()
        torch.testing.assert_close(model(x), reference(x))
        for name, p, shards, index in sharded_parameters(model):
            assert p.dtype == kind
            expected = shards.rows_of(index, reference.get_parameter(name).grad)
            torch.testing.assert_close(p.grad.as_subclass(torch.Tensor), expected)


class _Product(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 3))

    def forward(self, x):
        return x @ self.weight


def _without_autocast():
    """Says what to do, in place of PyTorch's error; what is right stays as it is."""
    torch.manual_seed(1)
    x = torch.ones(2, 3, 3)
    for module in (nn.Linear(3, 3), nn.Conv1d(3, 3, 1)):
        model = deepsp.shard_parameters(nn.Sequential(module))
        says = (
            "input of 0.weight's module in bfloat16, in which shard_parameters gathers 0.weight, "
            r'got float32; call the module within torch.autocast\("cpu", dtype=torch.bfloat16\), '
            "or pass dtype=torch.float32 to shard_parameters"
        )
        for _ in range(2):
            with pytest.raises(ValueError, match=says):
                model(x)
        assert model(x.bfloat16()).dtype == torch.bfloat16
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(x)
    model = deepsp.shard_parameters(_Product())
    with pytest.raises(RuntimeError) as caught:
        model(x)
    (note,) = caught.value.__notes__
    assert "such as weight in bfloat16, and autocast is off; call the module within" in note
    model(x.bfloat16())
    model = deepsp.shard_parameters(nn.LayerNorm(3))
    with pytest.raises(RuntimeError) as caught, torch.autocast("cpu", dtype=torch.bfloat16):
        model(x)
    assert "pass dtype to shard_parameters as a function" in caught.value.__notes__[0]
    model = deepsp.shard_parameters(nn.Sequential(nn.Embedding(4, 3), nn.RMSNorm(3)))
    model(torch.arange(4))


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    "case",
    [
        _writes,
        _reads,
        _whole,
        _in_forward,
        _elsewhere,
        _put_in_place,
        _converted,
        _without_autocast,
    ],
    ids=lambda f: f.__name__,
)
def test_weights(ranks, case):
    on_ranks(ranks, case)
