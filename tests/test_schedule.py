"""A model made parallel by a schedule, against the same model in one process."""

import copy
import functools
import pickle
from typing import NamedTuple

import pytest
import torch
from harness import on_ranks
from scheduled import GroupedAttention, Mlp, check, compare, data, f64, seeded
from torch import nn

import deepsp


def _issue(axis, bias, overlap):
    """linear -> reduce_scatter -> dropout -> all_gather."""

    def plan(sch):
        sch["up"].shard("weight", axis=0).sync("bwd_post", "all_reduce")
        sch["down"].shard("weight", axis=1)
        sch["down"].sync(
            mode="fwd_post", sync_op_or_fn="reduce_scatter", axis=axis, overlap=overlap
        )
        sch["drop"].sync(mode="fwd_post", sync_op_or_fn="all_gather", axis=axis)

    check(functools.partial(Mlp, bias=bias), plan, data(4, 7, 5), data(5, 8, 5, seed=8))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("axis", [0, 1, 2, -1])
@pytest.mark.parametrize("bias", [True, False])
def test_linear_reduce_scatter_dropout_all_gather(size, axis, bias):
    on_ranks(size, _issue, axis, bias, False)
    if bias and axis in (0, 1):
        on_ranks(size, _issue, axis, bias, True)


def _column_row(bias):
    def plan(sch):
        sch["up"].shard(["weight", "bias"] if bias else "weight", axis=0)
        sch["down"].shard("weight", axis=-1).sync("fwd_post", "all_reduce", grad="replicated")
        sch.sync("bwd_post", "all_reduce")

    _, built, _ = check(functools.partial(Mlp, bias=bias), plan, data(3, 7, 5))
    rank, size, _ = deepsp.ranks.groups.member_of(None)
    mine = [11 // size + (r < 11 % size) for r in range(size)][rank]
    assert built.up.weight.shape == (mine, 5) and built.up.out_features == mine
    assert built.down.weight.shape == (5, mine) and built.down.in_features == mine


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("bias", [True, False])
def test_column_then_row_parallel(size, bias):
    on_ranks(size, _column_row, bias)


def _gathered_input(overlap):
    """Tokens are sharded around the layers: the gather's backward sums the shares."""

    def plan(sch):
        sch.sync("fwd_pre", "scatter", axis=1)
        sch["up"].shard("weight", axis=0)
        sch["up"].sync("fwd_pre", "all_gather", axis=1, grad="partial", overlap=overlap)
        sch["down"].shard("weight", axis=1)
        sch["down"].sync("fwd_post", "reduce_scatter", axis=1, overlap=overlap)
        sch.sync("fwd_post", "all_gather", axis=1, grad="replicated")

    _, built, _ = check(Mlp, plan, data(3, 7, 5), data(2, 5, 5))
    assert type(built.up).__name__ == "Linear" and isinstance(built.up, nn.Linear)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("overlap", [False, True])
def test_gather_before_the_linear_layer(size, overlap):
    on_ranks(size, _gathered_input, overlap)


def _partial_scatter():
    """A split whose gradient is left partial, and summed further down."""

    def plan(sch):
        sch["0"].sync("bwd_post", "all_reduce").sync("fwd_post", "scatter", axis=1, grad="partial")
        sch["1"].sync("fwd_post", "all_gather", axis=1, grad="replicated")

    check(lambda: nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 4)), plan, data(2, 7, 5))


def test_a_scatter_with_a_partial_gradient():
    on_ranks(3, _partial_scatter)


def _norm_gathers(size):
    """The gather's consumer is another module: that its gradient is partial has to be found."""

    def plan(sch):
        sch["0"].sync("fwd_post", "scatter", 0)
        sch["1"].sync("fwd_post", "all_gather", 0)
        sch["2.up"].shard("weight", 0)
        sch["2.down"].shard("weight", 1).sync("fwd_post", "reduce_scatter", 0)
        sch["3.lin"].sync("fwd_post", "all_gather", 0)

    make = lambda: nn.Sequential(nn.Linear(5, 5), nn.LayerNorm(5), Mlp(), Gathers())  # noqa: E731
    # [S, B, D]: batches of one, and others; other lengths.
    _, built, _ = check(
        make, plan, data(7, 1, 5), data(8, 2, 5), data(7, 3, 5), data(9, 1, 5), data(1 * size, 2, 5)
    )
    kinds = built._deepsp_running.kinds.values()
    assert len(kinds) == 2
    for kind in kinds:
        found = {sync.module_name: grad for sync, grad in kind.grads.items()}
        assert found == {"1": "partial", "3.lin": "replicated"}


class Gathers(nn.Module):
    """Works on tokens in one row, [S * B, D], as mixtures of experts do."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(5, 5)

    def forward(self, x):
        return self.lin(x.flatten(0, 1)).unflatten(0, (-1, x.size(1)))


@pytest.mark.parametrize("size", [2, 3])
def test_what_follows_a_gather_is_found(size):
    on_ranks(size, _norm_gathers, size)


class Ways(nn.Module):
    """Called in several ways, in which its norm works on parts, isn't used, or works on all."""

    def __init__(self):
        super().__init__()
        self.split, self.join = nn.Identity(), nn.Identity()
        self.norm, self.out = nn.LayerNorm(5), nn.Linear(5, 5)

    def forward(self, x, way="parts"):
        if way == "parts":
            x = self.join(self.norm(self.split(x)))
        return self.out(self.norm(x) if way == "all" else x)


def _ways():
    model = seeded(Ways)
    sch = deepsp.create_schedule(copy.deepcopy(model))
    sch["split"].sync("fwd_post", "scatter", 0)
    sch["join"].sync("fwd_post", "all_gather", 0)
    built, _ = deepsp.build(sch)
    compare(model, built, data(7, 5))
    for one in (model, built):  # another kind of call between forward and backward
        one.zero_grad()
        out = one(data(7, 5))
        one(data(7, 5), way="unused")
        out.square().sum().backward()
    for name, parameter in built.named_parameters():
        torch.testing.assert_close(parameter.grad, model.get_parameter(name).grad)
    with pytest.raises(
        ValueError, match=r"norm\.bias is Partial in one kind of call, and Replicate"
    ):
        built(data(7, 5), way="all")


def test_kinds_of_calls():
    on_ranks(2, _ways)


# ---- what is in the registry


def _alone(make, steps, x):
    def plan(sch):
        for step, args, kwargs in steps:
            getattr(sch["0"], step)(*args, **kwargs)

    check(lambda: nn.Sequential(make()), plan, x)


def _ids(*shape):
    return torch.randint(0, 11, shape, generator=torch.Generator().manual_seed(2))


def _step(step, *args, **kwargs):
    return step, args, kwargs


_split_last = _step("sync", "fwd_pre", "scatter", axis=-1)
_sum_gradient = _step("sync", "bwd_post", "all_reduce")
_gather_last = _step("sync", "fwd_post", "all_gather", axis=-1, grad="replicated")
_sum = _step("sync", "fwd_post", "all_reduce", grad="replicated")


def _conv1d():
    from transformers.pytorch_utils import Conv1D

    return Conv1D(8, 7)


def _llama_norm():
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    return LlamaRMSNorm(7)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("make", "steps", "x"),
    [
        (
            functools.partial(nn.Linear, 7, 8),
            [_step("shard", "weight", 0), _sum_gradient, _gather_last],
            data(2, 3, 7),
        ),
        (
            functools.partial(nn.Linear, 7, 8),
            [_step("shard", ["weight"], -1), _split_last, _sum],
            data(2, 3, 7),
        ),
        (
            _conv1d,
            [_step("shard", ["weight", "bias"], 1), _sum_gradient, _gather_last],
            data(2, 3, 7),
        ),
        (_conv1d, [_step("shard", "weight", 0), _split_last, _sum], data(2, 3, 7)),
        (
            functools.partial(nn.Embedding, 11, 5, padding_idx=6),
            [_step("shard", "weight", 0), _sum],
            _ids(4, 9),
        ),
        (functools.partial(nn.Embedding, 11, 5), [_step("shard", "weight", 0), _sum], _ids(4)),
        (
            functools.partial(nn.Embedding, 11, 5, padding_idx=-1),
            [_step("shard", "weight", 1), _gather_last],
            _ids(4, 9),
        ),
        (
            functools.partial(nn.LayerNorm, 7),
            [_step("shard", ["weight", "bias"], 0), _split_last, _gather_last],
            data(2, 3, 7),
        ),
        (
            functools.partial(nn.LayerNorm, 7, bias=False),
            [_step("shard", "weight", 0), _split_last, _gather_last],
            data(2, 3, 7),
        ),
        (
            functools.partial(nn.RMSNorm, 7),
            [_step("shard", "weight", 0), _split_last, _gather_last],
            data(2, 3, 7),
        ),
        (
            functools.partial(nn.RMSNorm, 7, eps=0.1),
            [_step("shard", "weight", 0), _split_last, _gather_last],
            data(2, 3, 7),
        ),
    ],
    ids=[
        "linear-out",
        "linear-in",
        "conv1d-out",
        "conv1d-in",
        "embedding-vocabulary",
        "embedding-1d",
        "embedding-hidden",
        "layernorm",
        "layernorm-no-bias",
        "rmsnorm",
        "rmsnorm-eps",
    ],
)
def test_registry(size, make, steps, x):
    on_ranks(size, _alone, make, steps, x)


def _narrow_norms():
    """16-bit inputs have float32 statistics; Llama's norm rounds before it scales."""
    x = data(4, 7).bfloat16() * 3
    for make in (_llama_norm, functools.partial(nn.RMSNorm, 7), functools.partial(nn.LayerNorm, 7)):
        model = seeded(make).bfloat16()
        sch = deepsp.create_schedule(copy.deepcopy(nn.Sequential(model)))
        sch["0"].shard("weight", 0).sync("fwd_pre", "scatter", -1)
        sch["0"].sync("fwd_post", "all_gather", -1, grad="replicated")
        built, _ = deepsp.build(sch)
        torch.testing.assert_close(built(x), model(x), rtol=1e-2, atol=1e-2)
        wide = seeded(make).float()
        wide.load_state_dict(model.state_dict())
        # At most one rounding at the end (two, of Llama's) away from float32.
        error = (built(x).float() - wide(x.float())).abs() / wide(x.float()).abs()
        assert error.max() < 2**-7, error.max()


def test_norms_of_narrow_dtypes():
    on_ranks(3, _narrow_norms)


class Attention(nn.Module):
    def __init__(self, batch_first, need_weights, average=True, bias=True, masked=True):
        super().__init__()
        self.attn = nn.MultiheadAttention(12, 3, batch_first=batch_first, bias=bias)
        self.options = {"need_weights": need_weights, "average_attn_weights": average}
        self.masked, self.batch_first = masked, batch_first

    def forward(self, x):
        options = dict(self.options)
        batch, length = x.shape[:2] if self.batch_first else (x.size(1), x.size(0))
        if self.masked:
            options["attn_mask"] = torch.ones(length, length, dtype=torch.bool).triu(1)
            options["key_padding_mask"] = torch.zeros(batch, length).double()
            options["key_padding_mask"][0, length // 2 :] = -0.5
        if self.masked == "by head":
            options["attn_mask"] = data(batch * 3, length, length)
        out, weights = self.attn(x, x, x, **options)
        return out if weights is None else (out, weights)


def _attention(*args):
    def plan(sch):
        sch["attn"].shard("in_proj_weight", axis=0)
        sch["attn"].sync("fwd_post", "all_reduce", tensor=0, grad="replicated")
        sch.sync("bwd_post", "all_reduce")

    _, built, _ = check(functools.partial(Attention, *args), plan, data(4, 6, 12))
    rank, size, _ = deepsp.ranks.groups.member_of(None)
    heads = [3 // size + (r < 3 % size) for r in range(size)][rank]
    assert built.attn.num_heads == heads and built.attn.in_proj_weight.shape == (12 * heads, 12)
    assert built.attn.out_proj.weight.shape == (12, 4 * heads)


@pytest.mark.parametrize("size", [2, 3])
def test_multihead_attention(size):
    on_ranks(size, _attention, True, False)
    on_ranks(size, _attention, False, True)
    on_ranks(size, _attention, True, True, False, False, False)
    on_ranks(size, _attention, True, False, True, True, "by head")


def _grouped(num_heads, num_kv_heads):
    group = num_heads // num_kv_heads

    def plan(sch):
        sizes = [num_heads * 4, num_kv_heads * 4, num_kv_heads * 4]
        sch["qkv"].shard("weight", axis=0, parts=sizes, unit=[group * 4, 4, 4])
        sch.divide("num_heads", unit=group).divide("num_kv_heads")
        sch["out"].shard("weight", axis=1, unit=group * 4)
        sch["out"].sync("fwd_post", "all_reduce", grad="replicated")
        sch.sync("bwd_post", "all_reduce")

    make = functools.partial(GroupedAttention, 12, num_heads, num_kv_heads)
    model, built, _ = check(make, plan, data(2, 5, 12))
    for name, tensor in deepsp.full_state_dict(built).items():
        assert torch.equal(tensor, model.state_dict()[name]), name


@pytest.mark.parametrize("size", [2, 3])
def test_fused_projections_of_grouped_heads(size):
    on_ranks(size, _grouped, 6, 3)
    on_ranks(size, _grouped, 8, 4)


def _own_method():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(7))
            self.register_buffer("shift", torch.arange(7.0))
            self.features = 14

        def forward(self, x):
            return x * self.scale + self.shift

    model = seeded(lambda: nn.Sequential(Scale()))
    sch = deepsp.create_schedule(copy.deepcopy(model))
    with pytest.raises(ValueError, match=r"(?s)0 is a Scale.*register_shard_method\(Scale\)"):
        sch["0"].shard("scale", 0)

    @deepsp.register_shard_method(Scale)
    def shard_scale(module, names, axis):
        last = deepsp.schedule.Shard(-1)
        return deepsp.schedule.Effect(
            also={"shift": 0}, attributes=["features"], input=last, output=last
        )

    sch["0"].shard("scale", 0).sync("fwd_pre", "scatter", -1)
    sch["0"].sync("fwd_post", "all_gather", -1, grad="replicated")
    built, _ = deepsp.build(sch)
    assert built[0].features == 2 * len(built[0].shift) < 14
    compare(model, built, data(4, 7))
    for name, tensor in deepsp.full_state_dict(built).items():
        assert torch.equal(tensor, model.state_dict()[name]), name


def test_a_method_of_the_users_own():
    on_ranks(2, _own_method)


# ---- inputs, outputs, functions, and what else can be done with a module


class Several(nn.Module):
    """Several inputs and outputs, by position and name."""

    def __init__(self, kind):
        super().__init__()
        self.lin, self.kind = nn.Linear(5, 7), kind

    def forward(self, mask, x, scale=None):
        out = self.lin(x * scale)
        if self.kind == "dict":
            return {"mask": mask, "out": out}
        if self.kind == "named":
            return Pair(mask, out)
        return [mask, out] if self.kind == "list" else (mask, out)


class Pair(NamedTuple):
    mask: torch.Tensor
    out: torch.Tensor


class Around(nn.Module):
    def __init__(self, kind, by_name):
        super().__init__()
        self.inner, self.kind, self.by_name = Several(kind), kind, by_name

    def forward(self, x):
        scale = torch.full((5,), 2.0, dtype=x.dtype)
        mask = torch.ones(3)
        args, kwargs = (mask,), {"scale": scale}
        if self.by_name:
            kwargs["x"] = x
        else:
            args = mask, x
        out = self.inner(*args, **kwargs)
        return out["out"] if self.kind == "dict" else out[1]


def _several(kind, by_name, key_in, key_out):
    def plan(sch):
        sch["inner.lin"].shard("weight", 0)
        sch["inner"].sync("bwd_post", "all_reduce", tensor=key_in)
        sch["inner"].sync("fwd_post", "all_gather", -1, "replicated", tensor=key_out)

    _, built, _ = check(functools.partial(Around, kind, by_name), plan, data(4, 5))
    assert built.inner(torch.ones(3), data(4, 5), scale=1.0)[
        "out" if kind == "dict" else 1
    ].shape == (4, 7)


def test_several_inputs_and_outputs():
    for args in [
        ("tuple", False, 1, 1),
        ("list", True, "x", -1),
        ("dict", False, "x", "out"),
        ("named", True, 1, "out"),
    ]:
        on_ranks(2, _several, *args)


def _functions():
    seen = []

    def before(module, args, kwargs):
        seen.append(("before", len(args)))
        return args, kwargs

    def gather(module, args, output):
        return deepsp.collectives.all_gather(output, -1, grad="replicated")

    def after_backward(module, grad_input, grad_output):
        seen.append("backward")
        return (deepsp.collectives.all_reduce(grad_input[0], grad="replicated"),)

    def plan(sch):
        sch["lin"].shard("weight", 0).sync("fwd_pre", before).sync("fwd_post", gather)
        sch["lin"].sync("bwd_post", after_backward)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(5, 8)

        def forward(self, x):
            return self.lin(x)

    model = seeded(Model)
    sch = deepsp.create_schedule(copy.deepcopy(model))
    plan(sch)
    built, _ = deepsp.build(sch, outputs="local")
    x = data(3, 5).requires_grad_()
    y = x.detach().clone().requires_grad_()
    torch.testing.assert_close(built(x), model(y))
    built(x).square().sum().backward()
    model(y).square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    assert ("before", 1) in seen and seen.count("backward") == 1


def test_functions():
    on_ranks(2, _functions)


def _heads():
    """Tokens to heads and back, around what works on each head alone."""

    class PerHead(nn.Module):
        def forward(self, x):
            return x.cumsum(1)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.per_head = nn.Linear(6, 20), PerHead()

        def forward(self, x):
            return self.per_head(self.up(x).unflatten(-1, (5, 4))).flatten(2)

    def plan(sch):
        sch.sync("fwd_pre", "scatter", 1)
        sch["per_head"].sync("fwd_pre", "seq_to_heads").sync("fwd_post", "heads_to_seq")
        sch.sync("fwd_post", "all_gather", 1, grad="replicated")

    model = seeded(Model)
    sch = deepsp.create_schedule(copy.deepcopy(model))
    plan(sch)
    built, _ = deepsp.build(sch)
    x = data(2, 7, 6)
    compare(model, built, x)


@pytest.mark.parametrize("size", [2, 3])
def test_tokens_to_heads(size):
    on_ranks(size, _heads)


def _copies():
    """Copies and files of a built model work like it."""
    model = seeded(lambda: nn.Sequential(nn.Embedding(11, 6), Mlp(6), nn.LayerNorm(6)))
    sch = deepsp.create_schedule(copy.deepcopy(model))
    sch["0"].shard("weight", 0).sync("fwd_post", "reduce_scatter", 1)
    sch["1.up"].shard("weight", 0).sync("fwd_pre", "all_gather", 1, overlap=True)
    sch["1.down"].shard("weight", 1).sync("fwd_post", "reduce_scatter", 1, overlap=True)
    sch["1"].checkpoint()
    sch["2"].sync("fwd_post", "all_gather", 1, grad="replicated")
    built, _ = deepsp.build(sch)
    x = _ids(3, 7)
    for other in (copy.deepcopy(built), pickle.loads(pickle.dumps(built)), built):
        compare(model, other, x)
        compare(model, copy.deepcopy(other), x)


def test_copies():
    on_ranks(2, _copies)


def _checkpointed(use_reentrant):
    """A module that is computed again in backward; the batch before had another length."""

    def plan(sch):
        sch["1"].shard(["up.weight"], 0)
        sch["1.up"].sync("fwd_pre", "all_gather", 1)
        sch["1.down"].shard("weight", 1).sync("fwd_post", "reduce_scatter", 1)
        sch["1"].checkpoint(use_reentrant=use_reentrant)
        sch["0"].sync("fwd_post", "scatter", 1)
        sch["2"].sync("fwd_pre", "all_gather", 1, grad="replicated")

    make = lambda: nn.Sequential(nn.Linear(5, 5), Mlp(), nn.Linear(5, 3))  # noqa: E731
    model, built, _ = check(make, plan, data(3, 7, 5), data(2, 8, 5))
    # Two forwards, then both backwards.
    x, y = data(1, 9, 5), data(1, 8, 5)
    for one in (model, built):
        one.zero_grad()
        (one(x).square().sum() + one(y).square().sum()).backward()
    full = deepsp.full_state_dict(built, gradients=True)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(full[name], parameter.grad)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint(use_reentrant):
    on_ranks(2, _checkpointed, use_reentrant)


def _replaced():
    model = seeded(lambda: nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 4)))
    sch = deepsp.create_schedule(copy.deepcopy(model))
    new = nn.Sequential(nn.GELU(), nn.Linear(6, 6).to(f64))
    sch["1"].replace(lambda old: new)
    sch["1.1"].shard("weight", 0).sync("bwd_post", "all_reduce")
    sch["1.1"].sync("fwd_post", "all_gather", -1, grad="replicated")
    model[1] = copy.deepcopy(new)
    built, _ = deepsp.build(sch)
    assert built[1] is new
    compare(model, built, data(3, 5))


def test_replace():
    on_ranks(2, _replaced)


class Causal(nn.Module):
    def __init__(self, dim=12, num_heads=4):
        super().__init__()
        self.num_heads = num_heads
        self.wq, self.wk = nn.Linear(dim, dim), nn.Linear(dim, dim // 2)
        self.wv, self.wo = nn.Linear(dim, dim // 2), nn.Linear(dim, dim)

    def forward(self, x):
        q, k, v = (
            p(x).unflatten(-1, (-1, x.size(-1) // self.num_heads)).transpose(1, 2)
            for p in (self.wq, self.wk, self.wv)
        )
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        )
        return self.wo(out.transpose(1, 2).flatten(2))


def _parallel_attention(query_parts):
    model = seeded(lambda: nn.Sequential(nn.Linear(12, 12), Causal()))
    sch = deepsp.create_schedule(copy.deepcopy(model))
    sch["0"].sync("fwd_post", "scatter", 1)
    sch["1"].parallelize_attention(arguments={"is_causal": True}, query_parts=query_parts)
    sch["1"].sync("fwd_post", "all_gather", 1, grad="replicated")
    built, _ = deepsp.build(sch)
    assert isinstance(built[1], deepsp.SequenceParallelAttention)
    assert list(built.state_dict()) == list(model.state_dict())
    compare(model, built, data(2, 7, 12))


@pytest.mark.parametrize("size", [2, 3])
def test_parallelize_attention(size):
    on_ranks(size, _parallel_attention, size if size == 2 else "auto")
