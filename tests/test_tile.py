"""Tiled modules against the same modules untiled, on the full sequence: outputs, every gradient."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from models import MLP, Experts, leaf
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import deepsp

f64 = torch.float64


def _pair(module, **kwargs):
    module = module.to(f64)
    return copy.deepcopy(module), deepsp.tile(module, **kwargs)


def _leaves(result):
    return [x for x in torch.utils._pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]


def _same(reference, module, *args, **kwargs):
    """Outputs and gradients, of arguments and parameters, also a second time."""
    for seed in range(2):
        found = []
        for m in (reference, module):
            given = torch.utils._pytree.tree_map(
                lambda x: (
                    x.detach().clone().requires_grad_(x.requires_grad)
                    if isinstance(x, torch.Tensor)
                    else x
                ),
                (args, kwargs),
            )
            m.zero_grad()
            outputs = _leaves(m(*given[0], **given[1]))
            floats = [x for x in outputs if x.requires_grad]
            heads = [leaf(*x.shape, seed=seed + i).detach() for i, x in enumerate(floats)]
            torch.autograd.backward(floats, heads)
            gradients = [x.grad for x in _leaves(given) if x.requires_grad]
            found.append((outputs, gradients, [p.grad for p in m.parameters()]))
        torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-13)
        assert [x.requires_grad for x in found[1][0]] == [x.requires_grad for x in found[0][0]]
    return found[1]


@pytest.mark.parametrize("make", [MLP, lambda: nn.LayerNorm(6), lambda: nn.Linear(6, 11, False)])
def test_equals_the_whole(make):
    torch.manual_seed(0)
    for tokens in (1, 3, "auto"):
        pair = _pair(make(), tokens=tokens)
        for shape in ((2, 7, 6), (1, 9, 6), (2, 1, 6), (2, 0, 6), (2, 3, 6)):
            _same(*pair, leaf(*shape))
    _same(*_pair(make(), tokens=2, dim=0), leaf(7, 6))
    _same(*_pair(make(), tokens=2, dim=-2), leaf(2, 2, 7, 6))
    _same(*_pair(make(), tokens=2), leaf(2, 6, 7).mT)  # not contiguous
    _same(*_pair(nn.Embedding(9, 4), tokens=2), torch.arange(14).view(2, 7) % 9)


class Router(nn.Module):
    """Everything that arguments and outputs may be."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6))
        self.frozen = nn.Parameter(torch.randn(6), requires_grad=False)

    def forward(self, x, position, *, scale, mask=None, plain=2.0):
        logits = x.flatten(0, 1) @ self.weight.T  # [B * S, E]
        best = logits.argmax(-1)
        y = (x + position * self.frozen) * scale * plain
        if mask is not None:
            y = y * mask[..., None]
        return {
            "y": y,
            "rest": (logits, best, None),
            "alone": logits.detach().view(*x.shape[:2], -1),
        }


def test_arguments_and_outputs():
    torch.manual_seed(0)
    reference, module = _pair(Router(), tokens=3)
    for batch in (2, 1):
        x, position, scale = leaf(batch, 8, 6), leaf(1, 8, 6, seed=1), leaf(6, seed=2)
        mask = torch.arange(8 * batch).view(batch, 8) % 3 > 0
        _same(reference, module, x, position, scale=scale, mask=mask)
        _same(reference, module, x, position, scale=scale, plain=3.0)
    module.zero_grad()
    result = module(x, position, scale=scale)
    assert result["rest"][2] is None and result["rest"][1].dtype == torch.int64
    result["y"].sum().backward()  # the others aren't used
    assert module.weight.grad.abs().max() == 0


def test_a_tile_at_a_time():
    _, module = _pair(MLP(), tokens=3)
    x = leaf(2, 8, 6)
    module(x).sum().backward()
    module.seen.clear()  # the check's runs
    packed = []
    with saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        y = module(x)
    assert module.seen == [3, 3, 2]
    expected = [x, *module.parameters()]
    assert len(packed) == len(expected)
    assert all(a is b for a, b in zip(packed, expected, strict=True))
    calls = []
    for p in module.parameters():
        p.register_hook(lambda g: calls.append("tensor"))
        p.register_post_accumulate_grad_hook(lambda p: calls.append("parameter"))
    y.sum().backward()
    assert module.seen == [3, 3, 2, 3, 3, 2]
    assert sorted(calls) == ["parameter"] * 3 + ["tensor"] * 3
    with torch.no_grad():
        assert not module(x).requires_grad
    with torch.inference_mode():
        module(x)


def test_auto():
    module = deepsp.tile(MLP(16, 4))
    for shape, expected in (((1, 1100, 16), [367, 367, 366]), ((4, 256, 16), [128, 128])):
        x = leaf(*shape, dtype=torch.float32)
        module(x)
        module.seen.clear()
        module(x)
        assert module.seen == expected


def test_sums_are_wide():
    """One by one, bfloat16 doesn't count beyond 256."""
    module = deepsp.tile(nn.Linear(1, 1).bfloat16(), tokens=1)
    module(torch.ones(1, 1000, 1, dtype=torch.bfloat16)).sum().backward()
    assert module.weight.grad.item() == module.bias.grad.item() == 1000
    assert module.weight.grad.dtype == torch.bfloat16


def test_saved_tensors():
    reference, module = _pair(MLP(), tokens=3)
    x = leaf(2, 7, 6)
    expected = torch.autograd.grad(reference(x).sum(), x)
    with save_on_cpu():
        y = module(x)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x), expected)
    for change in (x, module.up.weight):
        y = module(x)
        with torch.no_grad():
            change.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace"):
            y.sum().backward()


@pytest.mark.parametrize("reentrant", [True, False])
def test_in_a_checkpoint(reentrant):
    reference, module = _pair(MLP(dropout=0.5), tokens=3)
    x = leaf(2, 8, 6)

    class Checkpointed(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return checkpoint(lambda x: self.inner(2 * x), x, use_reentrant=reentrant)

    Checkpointed(module)(x).sum().backward()
    x.grad = None
    module.seen.clear()
    torch.manual_seed(1)
    y = Checkpointed(module)(x)
    y.sum().backward()
    # What is saved is known before the tiles run, and a checkpoint stops there.
    assert len(module.seen) == (9 if reentrant else 6)
    torch.manual_seed(1)
    found, x.grad = x.grad, None
    module(2 * x).sum().backward()  # the same numbers
    torch.testing.assert_close(found, x.grad)
    module.dropout = reference.dropout = 0.0
    _same(Checkpointed(reference), Checkpointed(module), x)


def test_dropout():
    module = deepsp.tile(nn.Sequential(nn.Dropout(0.5)), tokens=3)
    x = leaf(2, 8, 6)
    module(x)
    torch.manual_seed(3)
    first = torch.rand(3)
    torch.manual_seed(3)
    y = module(x)
    state = torch.get_rng_state()
    y.sum().backward()
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(x.grad, (y / x).detach())
    assert 0 < (x.grad == 0).double().mean() < 1
    torch.manual_seed(3)
    deepsp.tile(nn.Sequential(nn.Dropout(0.0)), tokens=3)(x)
    assert torch.equal(torch.rand(3), first)  # the check draws none


def test_autocast():
    torch.manual_seed(0)
    module = MLP()
    reference = copy.deepcopy(module)
    deepsp.tile(module, tokens=8)
    x = leaf(1, 8, 6, dtype=torch.float32)
    found = []
    for m in (reference, module):
        with torch.autocast("cpu", torch.bfloat16):
            y = m(x)
            tied = F.linear(x, m.up.weight)  # not what the tiles have cast, without gradients
        assert y.dtype == torch.bfloat16
        (y.float().sum() + 2 * tied.float().sum()).backward()
        found.append([y, x.grad, *[p.grad for p in m.parameters()]])
        x.grad = None
    torch.testing.assert_close(*found, rtol=1e-2, atol=1e-2)
    assert found[1][2].dtype == torch.float32


def test_unused_parameters():
    torch.manual_seed(0)
    module = deepsp.tile(Experts(), tokens=2)
    reference = copy.deepcopy(module)
    x = leaf(1, 5, 6, dtype=torch.float32)
    module(x).sum().backward()
    reference.__class__ = Experts
    reference(x).sum().backward()
    assert any(p.grad is None for p in reference.parameters())
    for a, b in zip(module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a.grad, torch.zeros_like(b) if b.grad is None else b.grad)


class Whole(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.linear, self.function = nn.Linear(6, 6), function
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        return self.function(self, self.linear(x))


OUTSIDE = nn.Parameter(torch.ones(6))


def _counts(self, x):
    self.calls += 1
    return x


def _communicates(self, x):
    torch.distributed._functional_collectives.all_reduce(x, "sum", torch.distributed.group.WORLD)


REFUSED = {
    "softmax": (Whole(lambda m, x: x.softmax(1)), "mixes tokens"),
    "hidden": (Whole(lambda m, x: x + 0 * x.roll(1, 1)), "mixes tokens"),
    "batch norm": (nn.BatchNorm1d(6), "couldn't be run on 13 tokens"),
    "statistics": (Whole(lambda m, x: F.batch_norm(x.mT, None, None, training=True).mT), "mixes"),
    "positions": (Whole(lambda m, x: x + torch.arange(x.size(1))[:, None]), "a part of the tokens"),
    "capacity": (Experts(1.0), "mixes tokens"),
    "attention": (nn.TransformerEncoderLayer(6, 2, 8, batch_first=True), "mixes tokens"),
    "convolution": (Whole(lambda m, x: F.conv1d(x.mT, torch.ones(1, 6, 3), padding=1).mT), "mixes"),
    "mean": (Whole(lambda m, x: x.mean(1)), "dimension for the tokens, got shapes"),
    "loss": (Whole(lambda m, x: (x, x.mean())), "dimension for the tokens, got shapes"),
    "buffer": (Whole(_counts), "Whole writes to its buffer calls"),
    "outside": (Whole(lambda m, x: x * OUTSIDE), r"shape \[6\] that requires gradients"),
    "wrong dimension": (nn.Linear(7, 7), r"dimension 1 of shape \[2, 13, 6\]"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    module, message = copy.deepcopy(REFUSED[case])
    deepsp.tile(module.train(), tokens=4)
    before = copy.deepcopy(module.state_dict())
    for x in (torch.zeros(2, 9, 6), torch.randn(2, 0, 6)):
        state = torch.get_rng_state()
        with pytest.raises(ValueError, match=message):
            module(x.clone())
        assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(module.state_dict(), before)


def test_what_branches_on_many_tokens():
    module = deepsp.tile(Whole(lambda m, x: x * 2 if x.size(1) > 16 else x), tokens=10)
    with pytest.raises(ValueError, match="mixes tokens: its outputs for 20 tokens are others"):
        module(leaf(2, 40, 6, dtype=torch.float32))


def test_refused_in_one_mode():
    norm = nn.Sequential(nn.Flatten(0, 1), nn.BatchNorm1d(6), nn.Unflatten(0, (2, -1)))
    reference, module = _pair(norm, tokens=3)
    with pytest.raises(ValueError, match="BatchNorm1d writes to its buffer"):
        module(leaf(2, 8, 6))
    _same(reference.eval(), module.eval(), leaf(2, 8, 6))
    module[1].train()  # a mode of a submodule counts, too
    with pytest.raises(ValueError, match="writes to its buffer"):
        module(leaf(2, 8, 6))
    in_place = deepsp.tile(_InPlace())
    with pytest.raises(ValueError, match="writes to its input in place"):
        in_place(torch.randn(2, 8, 6))


class _InPlace(nn.Module):
    def forward(self, x):
        x *= 2
        return x


def test_wrong_arguments():
    for tokens in (0, -1, 1.5, True, "all"):
        with pytest.raises(ValueError, match=r'tokens to be "auto" or an int >= 1'):
            deepsp.tile(MLP(), tokens=tokens)
    with pytest.raises(ValueError, match="dim to be an int"):
        deepsp.tile(MLP(), dim=None)
    with pytest.raises(ValueError, match="MLP is tiled already"):
        deepsp.tile(deepsp.tile(MLP()))
    with pytest.raises(ValueError, match="Sequential contains 0, which is tiled already"):
        deepsp.tile(nn.Sequential(deepsp.tile(MLP())))
    with pytest.raises(ValueError, match=r"got a \(ModuleList\), which is a container"):
        deepsp.tile_(nn.ModuleDict({"a": nn.ModuleList([MLP()])}), "a")
    replaced = MLP()
    replaced.forward = lambda x: x
    with pytest.raises(ValueError, match="was set on the module itself"):
        deepsp.tile(replaced)
    with pytest.raises(ValueError, match="called with a tensor, got none"):
        deepsp.tile(MLP())(3)
    with pytest.raises(ValueError, match=r"tokens in dimension 1, got shape \[6\]"):
        deepsp.tile(MLP())(torch.randn(6))
    partitioned = deepsp.tile(MLP())
    weight = partitioned.up.weight  # as ZeRO 3 leaves a parameter that it has partitioned
    weight.ds_id, weight.ds_numel, weight.ds_shape = 1, weight.numel(), weight.shape
    weight.data = weight.new_empty(0)
    with pytest.raises(ValueError, match=r"up.weight of MLP to be the full parameter \(\d+, 6\)"):
        partitioned(torch.randn(2, 8, 6))


def test_names():
    layer = nn.ModuleDict({"mlp": MLP(), "norm": nn.LayerNorm(6)})
    tower = nn.ModuleDict({"mlp": MLP()})
    model = nn.ModuleDict({"a": layer, "mlp": MLP(), "vision_tower": tower})
    assert deepsp.tile_(copy.deepcopy(model)) == ["a.mlp", "mlp"]
    assert deepsp.tile_(copy.deepcopy(model), "a.mlp", "*.norm", "vision*.mlp", tokens=4) == [
        "a.mlp",
        "a.norm",
        "vision_tower.mlp",
    ]
    with pytest.raises(
        ValueError, match=r"nothing matches 'b\.\*'; its submodules are a\.mlp, a\."
    ):
        deepsp.tile_(model, "mlp", "b.*")
    with pytest.raises(ValueError, match=r"got a\.mlp and a\.mlp\.up in it"):
        deepsp.tile_(model, "a.mlp*")
    with pytest.raises(ValueError, match=r"nothing matches '\*\.mlp', .* are 0"):
        deepsp.tile_(nn.ModuleList([nn.Linear(2, 2)]))
    assert deepsp.tile_(model, "mlp") == ["mlp"]  # what failed has changed nothing


def test_copies():
    module = deepsp.tile(MLP(), tokens=3)
    assert isinstance(module, MLP) and list(module.state_dict()) == list(MLP().state_dict())
    x = leaf(2, 8, 6, dtype=torch.float32)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(other(x), module(x))
        assert other.seen[-1] == 2 and other.up.weight is not module.up.weight
        assert isinstance(other, MLP)


def test_twice_differentiated():
    module = deepsp.tile(MLP(), tokens=3)
    x = leaf(2, 8, 6, dtype=torch.float32)
    (gradient,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
    assert not gradient.requires_grad
    with pytest.raises(RuntimeError, match="does not require grad"):
        gradient.sum().backward()
    y = module(x).sum()
    first, second = (torch.autograd.grad(y, x, retain_graph=True) for _ in range(2))
    assert torch.equal(first[0], second[0])


def test_compiled_around():
    inner = _pair(MLP(), tokens=3)
    inner[1].load_state_dict(inner[0].state_dict())
    model = nn.Sequential(nn.LayerNorm(6).to(f64), inner[1])
    expected = nn.Sequential(copy.deepcopy(model[0]), inner[0])
    torch._dynamo.reset()
    _same(expected, torch.compile(model, backend="aot_eager"), leaf(2, 8, 6))
    with pytest.raises(Exception, match="runs outside of compiled graphs"):
        torch.compile(model, backend="eager", fullgraph=True)(leaf(2, 8, 6))


@pytest.mark.parametrize("name", ["Llama", "Gemma 2", "Mixtral", "Qwen3 MoE"])
def test_models_of_transformers(name):
    from architectures import make

    torch.manual_seed(0)
    model = make(name).double()
    experts = "M" in name
    given = {"output_router_logits": True, "use_cache": False} if experts else {}
    if experts:
        model.set_experts_implementation("eager")
    reference = copy.deepcopy(model)
    tiled = deepsp.tile_(model, tokens=3) + deepsp.tile_(model, "lm_head", tokens=4)
    assert tiled == ["model.layers.0.mlp", "model.layers.1.mlp", "lm_head"]
    ids = torch.randint(3, 60, (2, 11), generator=torch.Generator().manual_seed(0))
    losses = []
    for m in (reference, model):
        output = m(input_ids=ids, labels=ids, **given)
        output.loss.backward()
        routers = [x.shape for x in output.router_logits] if experts else []
        losses.append((output.loss.item(), routers))
    assert losses[1][1] == losses[0][1]
    torch.testing.assert_close(losses[1][0], losses[0][0], rtol=1e-6, atol=0)
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        # Norms and losses are computed in float32.
        torch.testing.assert_close(
            p.grad, q.grad, rtol=1e-5, atol=1e-7, msg=lambda m, n=name: n + m
        )
