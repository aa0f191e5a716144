"""Each mistake in a schedule has its message; print(sch) shows what was said."""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import on_ranks
from scheduled import Mlp, data, f64, run, seeded
from scheduled import check as built_and_compared
from torch import nn

import deepsp


def chain(*modules):
    return nn.Sequential(*modules).to(f64)


def block():
    return chain(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6), nn.Dropout(0.0))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(8, 6), nn.Linear(6, 8, bias=False)
        self.head.weight = self.embed.weight


_all_reduce = functools.partial(
    deepsp.schedule.Schedule.sync, mode="fwd_post", sync_op_or_fn="all_reduce", grad="replicated"
)


def _says(make, say, pattern):
    """What is said raises, when it is said."""
    sch = deepsp.create_schedule(make())
    with pytest.raises(ValueError, match=pattern):
        say(sch)


SAID = {
    "no such module": (block, lambda s: s["lin"], "name of a module, .*, got 'lin'"),
    "no module matches": (Mlp, lambda s: s["u.*"], r"name of a module, .*, got 'u\.\*'"),
    "a near name": (Mlp, lambda s: s["dwn"], "name of a module, .*, got 'dwn'; did you mean down"),
    "not a name": (Mlp, lambda s: s[0], "the name of a module, or a pattern, got 0"),
    "no such parameter": (
        Mlp,
        lambda s: s["up"].shard("weights", 0),
        r"up: .* buffer of Linear, \['weight', 'bias'\], got 'weights'",
    ),
    "no names": (Mlp, lambda s: s["up"].shard([], 0), "names to have at least one .*, got none"),
    "axis out of range": (
        Mlp,
        lambda s: s["up"].shard("weight", 2),
        r"axis to be from -2 to 1 for up\.weight \[11, 5\], got 2",
    ),
    "an axis that is none": (
        Mlp,
        lambda s: s["up"].shard("weight", None),
        "axis to be an int, got None",
    ),
    "a name that is none": (Mlp, lambda s: s["up"].shard(0, 0), r"names to be strings, got \[0\]"),
    "replaced by none": (
        Mlp,
        lambda s: s["up"].replace(None),
        "module to be a module, or a function .*, got None",
    ),
    "sharded twice": (
        Mlp,
        lambda s: s["up"].shard("weight", 0).shard("weight", 1),
        r"up\.weight is sharded already",
    ),
    "the follower first": (
        Mlp,
        lambda s: s["up"].shard("bias", 0),
        r"up: .* to have weight, .* which bias follows, got \['bias'\]",
    ),
    "a bias that stays whole": (
        Mlp,
        lambda s: s["down"].shard(["weight", "bias"], 1),
        "down: expected names without 'bias', which stays Replicate",
    ),
    "parts that don't divide": (
        Mlp,
        lambda s: s["up"].shard("weight", 0, parts=3),
        r"parts to divide the length 11 of up\.weight along axis 0, got 3",
    ),
    "parts of another sum": (
        Mlp,
        lambda s: s["up"].shard("weight", 0, parts=[4, 4]),
        r"the length 11 of up\.weight along axis 0, got \[4, 4\], which add up to 8",
    ),
    "a unit that doesn't divide": (
        Mlp,
        lambda s: s["up"].shard("weight", 0, unit=4),
        r"unit to divide the part of 11 along axis 0 of up\.weight, got 4",
    ),
    "too few rows": (
        lambda: chain(nn.Linear(4, 1)),
        lambda s: s["0"].shard("weight", 0),
        r"0\.weight to have at least 2 rows along axis 0, .*, got 1",
    ),
    "too few heads": (
        lambda: chain(nn.Linear(4, 8)),
        lambda s: s["0"].shard("weight", 0, unit=8),
        r"0\.weight to have at least 2 units of 8 along axis 0, .*, got 1",
    ),
    "an embedding that writes": (
        lambda: chain(nn.Embedding(4, 4, max_norm=1.0)),
        lambda s: s["0"].shard("weight", 0),
        r"0: expected max_norm to be None, got 1\.0",
    ),
    "mode": (
        Mlp,
        lambda s: s["up"].sync("post", "all_gather", 0),
        "sync at up: .* mode to be one of fwd_pre, fwd_post, bwd_post, got 'post'",
    ),
    "op": (
        Mlp,
        lambda s: s["up"].sync("fwd_pre", "gather", 0),
        "sync_op_or_fn to be one of all_gather, .*, got 'gather'",
    ),
    "no op": (Mlp, lambda s: s["up"].sync("fwd_pre", 3), "sync_op_or_fn to be one of .*, got 3"),
    "no axis": (
        Mlp,
        lambda s: s["up"].sync("fwd_pre", "all_gather"),
        "axis to be the dimension that all_gather gathers, got None",
    ),
    "an axis too many": (
        Mlp,
        lambda s: s["up"].sync("fwd_post", "all_reduce", 1),
        "no axis for all_reduce, got 1",
    ),
    "another axis": (
        Mlp,
        lambda s: s["up"].sync("fwd_post", "seq_to_heads", 2),
        "no axis, since seq_to_heads exchanges the dimensions 1 and 2 .*, got 2",
    ),
    "a gather in backward": (
        Mlp,
        lambda s: s["up"].sync("bwd_post", "all_gather", 1),
        "all_reduce, or a function, with mode='bwd_post', got 'all_gather'",
    ),
    "grad": (
        Mlp,
        lambda s: s["up"].sync("fwd_pre", "all_gather", 1, grad="sum"),
        "grad to be 'replicated' or 'partial', got 'sum'",
    ),
    "grad of what doesn't ask": (
        Mlp,
        lambda s: s["up"].sync("fwd_post", "reduce_scatter", 1, grad="partial"),
        r"the backward of reduce_scatter doesn't depend on it",
    ),
    "a function with an axis": (
        Mlp,
        lambda s: s["up"].sync("fwd_pre", lambda m, a: a, axis=1),
        "no axis, since sync_op_or_fn is a function",
    ),
    "no such number": (
        Mlp,
        lambda s: s["up"].divide("num_heads"),
        r"up\.num_heads to be an int, got None",
    ),
    "a number that is too small": (
        Mlp,
        lambda s: s["up"].divide("in_features", unit=5),
        r"up\.in_features to be a multiple of unit \(5\).*, got 5",
    ),
    "checkpointed twice": (
        Mlp,
        lambda s: s["up"].checkpoint().checkpoint(),
        "up is checkpointed already",
    ),
    "replaced too late": (
        lambda: chain(Mlp()),
        lambda s: (s["0.up"].checkpoint(), s["0"].replace(Mlp())),
        r"0 to be replaced before .* steps for 0\.up already",
    ),
    "one for two places": (
        block,
        lambda s: s["*"].replace(nn.Identity()),
        "function for 4 places, got one module; pass a function",
    ),
    "replaced by nothing": (
        block,
        lambda s: s["0"].replace(lambda old: None),
        "module for 0, got NoneType",
    ),
    "replaced as a whole": (block, lambda s: s.replace(Mlp()), "model itself can't be replaced"),
    "no projections": (
        lambda: chain(Mlp()),
        lambda s: s["0"].parallelize_attention(),
        r"0: expected a linear layer for q, called q_proj, .*; pass q=, .*Mlp \(up: Linear",
    ),
    "no number of heads": (
        lambda: chain(Mlp(6, 6)),
        lambda s: s["0"].parallelize_attention("up", "up", "up", "down"),
        "0: expected Mlp to have num_heads, .* pass num_heads",
    ),
    "inputs before it is built": (Mlp, lambda s: s.check(data(2, 5)), "the model isn't built yet"),
}


def _all_said():
    for make, say, pattern in SAID.values():
        _says(make, say, pattern)


def test_what_is_said_wrong():
    on_ranks(2, _all_said)


# ---- what doesn't fit together: check(), before anything is changed


def _forgotten(s):
    s["0"].shard("weight", 0).sync("bwd_post", "all_reduce")
    s["2"].shard("weight", 1)


def _at_the_parent(s):
    s["0.up"].shard("weight", 0).sync("bwd_post", "all_reduce")
    s["0.down"].shard("weight", 1)
    _all_reduce(s["0"])


def _gathered_twice(s):
    s["0"].shard("weight", 0).sync("bwd_post", "all_reduce")
    s["0"].sync("fwd_post", "all_gather", -1).sync("fwd_post", "all_gather", -1)


def _gathered_twice_apart(s):
    s["0"].shard("weight", 0).sync("bwd_post", "all_reduce").sync("fwd_post", "all_gather", -1)
    s["1"].sync("fwd_post", "all_gather", -1)


def _reduced_but_whole(s):
    s["0"].sync("fwd_post", "reduce_scatter", 0)


def _reduced_but_sharded(s):
    s["0"].shard("weight", 0).sync("bwd_post", "all_reduce").sync("fwd_post", "all_reduce")


def _reduced_twice(s):
    s["2"].shard("weight", 1).sync("fwd_pre", "scatter", -1)
    s["2"].sync("fwd_post", "all_reduce").sync("fwd_post", "all_reduce")


def _whole_features(s):
    s["2"].shard("weight", 1).sync("fwd_post", "all_reduce")


def _gather_forgotten(s):
    s["0"].shard("weight", 0).sync("bwd_post", "all_reduce")


def _gradient(s):
    s["0"].shard("weight", 0).sync("fwd_post", "all_gather", -1, grad="replicated")


def _scattered_partial(s):
    s["2"].shard("weight", 1).sync("fwd_pre", "scatter", -1).sync("fwd_post", "scatter", 0)
    s["3"].sync("fwd_post", "all_reduce")


def _overlap_nowhere(s):
    s["1"].sync("fwd_post", "reduce_scatter", 0, overlap=True)


def _overlap_other(s):
    _whole_features(s)
    s["0"].sync("fwd_post", "scatter", -1, overlap=True)


def _overlap_replicated(s):
    s["0"].shard("weight", 0).sync("fwd_pre", "scatter", 0)
    s["0"].sync("fwd_pre", "all_gather", 0, grad="replicated", overlap=True)
    s["0"].sync("fwd_post", "all_gather", -1)


def _overlap_second(s):
    s["0"].shard("weight", 0).sync("fwd_pre", "all_gather", 0, overlap=True)
    s["0"].sync("bwd_post", "all_reduce").sync("fwd_pre", "scatter", 0)


def no_bias():
    return chain(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6, bias=False), nn.Dropout(0.0))


CHECKED = {
    "partial, and nothing reduces it": (
        no_bias,
        _forgotten,
        "2: its output is Partial, and nothing reduces it",
    ),
    "partial, into dropout": (no_bias, _forgotten, "3: .*, got Partial; put a reduce_scatter"),
    "a bias reduced elsewhere": (
        lambda: chain(Mlp()),
        _at_the_parent,
        r"0\.down: its output is Partial, and its bias counts once",
    ),
    "gathered twice": (block, _gathered_twice, r"0 \(fwd_post all_gather\).* gathered twice"),
    "gathered twice, apart": (
        block,
        _gathered_twice_apart,
        r"1 \(fwd_post all_gather\): .* is Shard, got Replicate; .* gathered twice",
    ),
    "reduced, but whole": (
        block,
        _reduced_but_whole,
        r"0 \(fwd_post reduce_scatter\): .* is Partial, got Replicate; the sum .* P times",
    ),
    "reduced, but sharded": (
        block,
        _reduced_but_sharded,
        r"0 \(fwd_post all_reduce\): .* got Shard\(-1\); use all_gather",
    ),
    "reduced twice": (
        block,
        _reduced_twice,
        r"2 \(fwd_post all_reduce\): .* is Partial, got Replicate; the sum",
    ),
    "whole features come in": (
        block,
        _whole_features,
        r"2: expected its input to be Shard\(-1\), .*, got Replicate",
    ),
    "sharded features go on": (
        block,
        _gather_forgotten,
        r"2: expected all features in its input, .*, got Shard\(-1\); put an all_gather",
    ),
    "a gradient that nothing reduces": (
        block,
        _gradient,
        "0: the gradient of its input is Partial.*nothing reduces it; sync it, .*mode='bwd_post'",
    ),
    "scattered, but partial": (
        no_bias,
        _scattered_partial,
        r"2 \(fwd_post scatter\): .* is Replicate, got Partial; use reduce_scatter",
    ),
    "tied": (
        Tied,
        lambda s: _all_reduce(s["embed"].shard("weight", 0)),
        r"embed\.weight \(Shard\(0\)\) is tied to head\.weight, which is not .* alike: axis=0",
    ),
    "tied, another way": (
        Tied,
        lambda s: (
            _all_reduce(s["embed"].shard("weight", 0)),
            _all_reduce(s["head"].shard("weight", 1)),
        ),
        r"\(Shard\(0\)\) is tied to head\.weight, which is Shard\(1\)",
    ),
    "overlap nowhere": (block, _overlap_nowhere, r"overlap=True needs a linear layer with shard"),
    "overlap of a scatter": (
        block,
        _overlap_other,
        "overlap=True is for fwd_post reduce_scatter and fwd_pre all_gather",
    ),
    "overlap, but whole after it": (
        block,
        _overlap_replicated,
        "since the layer's output features are sharded .*, got 'replicated'",
    ),
    "overlap, but not the last": (
        block,
        _overlap_second,
        r"overlap=True needs the last sync at the input",
    ),
}


def _all_checked():
    for make, say, pattern in CHECKED.values():
        model = make()
        before = copy.deepcopy(model.state_dict())
        sch = deepsp.create_schedule(model)
        say(sch)
        for check in (sch.check, lambda sch=sch: deepsp.build(sch)):
            with pytest.raises(ValueError, match=pattern):
                check()
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, before[name])


def test_what_does_not_fit():
    on_ranks(2, _all_checked)


# ---- what only shows when the model is called, on every rank alike


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp, self.norm, self.out = Mlp(6, 8, bias=False), nn.LayerNorm(6), nn.Linear(6, 6)

    def forward(self, x):
        return self.out(x + self.mlp(self.norm(x)))


def _column_row(s, **kwargs):
    s["mlp.up"].shard("weight", 0).sync("bwd_post", "all_reduce")
    s["mlp.down"].shard("weight", 1)
    return s


def _mixed(s):
    """Sharded tokens are added to whole ones."""
    _column_row(s)["mlp.down"].sync("fwd_post", "reduce_scatter", 0)
    s["out"].sync("fwd_pre", "all_gather", 0)


def _wrong_axis(s):
    _column_row(s)["mlp.down"].sync("fwd_post", "reduce_scatter", 0)
    s["mlp"].sync("fwd_post", "all_gather", 1)


def _wrong_grad(s):
    _column_row(s)["mlp.down"].sync("fwd_post", "all_reduce", grad="partial")


def _summed_twice(s):
    _column_row(s)["mlp.down"].sync("fwd_post", "all_reduce")
    s["mlp"].sync("bwd_post", "all_reduce")


def _not_summed(s):
    """The residual's gradient is whole, that of the norm a share."""
    s["mlp.up"].shard("weight", 0)
    s["mlp.down"].shard("weight", 1).sync("fwd_post", "all_reduce")


def _local_output(s):
    _column_row(s)["mlp.down"].sync("fwd_post", "all_reduce")
    s["out"].sync("fwd_post", "scatter", 0)


def _partial_sum(s):
    """A reduction, but of something else."""
    _column_row(s)
    s["out"].sync("fwd_post", "all_reduce")


def _no_such_axis(s):
    _column_row(s)["mlp.down"].sync("fwd_post", "reduce_scatter", 5)


def _no_such_tensor(s):
    _column_row(s)["mlp.down"].sync("fwd_post", "all_reduce")
    s["mlp"].sync("fwd_pre", "scatter", 0, tensor="y")


def _heads_of_what(s):
    s["out"].sync("fwd_pre", "seq_to_heads")


FOUND = {
    "sharded and whole": (_mixed, r"is Shard\(0\)"),
    "another axis": (_wrong_axis, r"mlp \(fwd_post all_gather\): .* is Shard\(1\), got Shard\(0\)"),
    "another grad": (_wrong_grad, r"(?s)mlp\.down.*expected grad='replicated'.*, got 'partial'"),
    "summed twice": (_summed_twice, r"(?s)mlp.*P times too large"),
    "not summed": (_not_summed, r"gradient of an input.* from layer_norm in norm.*'bwd_post'"),
    "a local output": (_local_output, r"model's output 0 .*is Shard\(0\).*outputs='local'"),
    "partial elsewhere": (_partial_sum, "is Partial"),
    "no such axis": (
        _no_such_axis,
        r"mlp\.down \(fwd_post reduce_scatter\): .* axis to be in .*, got 5",
    ),
    "no such input": (
        _no_such_tensor,
        r"mlp \(fwd_pre scatter\): expected tensor= to name one of .*, got 'y'",
    ),
    "not heads": (_heads_of_what, r"out \(fwd_pre seq_to_heads\): .* 4 dimensions .*, got 2"),
}


def _all_found():
    for say, pattern in FOUND.values():
        sch = deepsp.create_schedule(seeded(Residual))
        say(sch)
        built, _ = deepsp.build(sch)
        for call in (sch.check, built):
            with pytest.raises(ValueError, match=pattern):
                call(data(4, 6).requires_grad_())


def test_what_the_first_call_finds():
    on_ranks(2, _all_found)


def _afterwards():
    sch = deepsp.create_schedule(block())
    sch["0"].shard("weight", 0).sync("bwd_post", "all_reduce")
    sch["0"].sync("fwd_post", "all_gather", -1)
    with pytest.raises(ValueError, match=r"outputs to be .*, got 'all'"):
        deepsp.build(sch, outputs="all")
    with pytest.raises(
        ValueError, match=r"optimizer to be an optimizer, or a function .*, got str"
    ):
        deepsp.build(sch, optimizer="adam")
    built, optimizer = deepsp.build(sch)
    assert optimizer is None
    for again in (built, nn.Sequential(built[0])):
        with pytest.raises(ValueError, match="is built already, by another schedule"):
            deepsp.create_schedule(again)
    for late in (
        lambda: deepsp.build(sch),
        lambda: sch["0"].shard("weight", 0),
        lambda: sch["2"].sync("fwd_post", "all_reduce"),
        lambda: sch["2"].replace(nn.Identity()),
    ):
        with pytest.raises(ValueError, match="the schedule is built already"):
            late()
    # A part of the model alone, before the model was called: nobody knows what follows.
    with pytest.raises(
        ValueError, match=r"0 \(fwd_post all_gather\): grad isn't given.*Pass grad="
    ):
        built[0](data(4, 6))
    with torch.no_grad():
        assert built[0](data(4, 6)).shape == (4, 8)
    with pytest.raises(ValueError, match="expected inputs, since the model is built"):
        sch.check()
    sch.check(data(4, 6))
    built(data(4, 6))
    with pytest.raises(ValueError, match="the model itself was not called"):
        built[0](data(4, 6))  # what follows it in the model needn't be what follows it here
    with pytest.raises(ValueError, match="model to be a module, got list"):
        deepsp.create_schedule([])
    with pytest.raises(ValueError, match="sch to be a Schedule, got Sequential"):
        deepsp.build(built)


def test_afterwards():
    on_ranks(2, _afterwards)


class Drops(nn.Module):
    """Leaves out the last tokens."""

    def __init__(self):
        super().__init__()
        self.tokens = 0

    def forward(self, x):
        return x[:, : x.size(1) - self.tokens]


def _other_lengths():
    sch = deepsp.create_schedule(nn.Sequential(nn.Identity(), Drops(), nn.Identity()))
    sch["0"].sync("fwd_post", "scatter", 1)
    sch["2"].sync("fwd_pre", "all_gather", 1)
    model, _ = deepsp.build(sch)
    model(data(2, 5, 3))
    model[1].tokens = 1
    rank, sizes = dist.get_rank(), [3, 2]
    message = (
        rf"length {sizes[rank]} in dimension 1 on rank {rank}, since .* the ranks \[3, 2\], .* "
        rf"got {sizes[rank] - 1}; "
    )
    with pytest.raises(ValueError, match=message):
        model(data(2, 5, 3))


def test_other_lengths_than_in_the_first_call():
    on_ranks(2, _other_lengths)


def _printed():
    model = nn.ModuleDict(
        {
            "embed": nn.Embedding(8, 6),
            "layers": nn.ModuleList(nn.ModuleDict({"mlp": Mlp(6, 8)}) for _ in range(3)),
            "norm": nn.LayerNorm(6),
        }
    )
    sch = deepsp.create_schedule(model)
    sch["layers.*"]["mlp"]["up"].shard("weight", 0)
    sch["layers.*.mlp.down"].shard("weight", 1).sync("fwd_post", "reduce_scatter", 1, overlap=True)
    sch["layers"]["[0-2].mlp"].checkpoint()
    sch["norm"].replace(nn.Identity()).sync(
        "fwd_post", "all_gather", 1, "replicated", reduce_dtype=torch.float32
    )
    shown = str(sch)
    assert shown == repr(sch)
    return shown, str(sch["layers.1"])


TREE = """\
ModuleDict over 2 ranks
├─ layers: ModuleList
│  └─ 0 to 2, each: ModuleDict
│     └─ mlp: Mlp
│        │  checkpoint
│        ├─ up: Linear
│        │     weight: Shard(0), [8, 6] -> [4, 6]
│        │     bias: Shard(0), [8] -> [4]
│        │     out_features = 4
│        └─ down: Linear
│              weight: Shard(1), [6, 8] -> [6, 4]
│              in_features = 4
│              sync fwd_post reduce_scatter axis=1 overlap
└─ norm: Identity
      replaced
      sync fwd_post all_gather axis=1 grad=replicated reduce_dtype=float32"""


def test_printed():
    for shown, part in on_ranks(2, _printed):
        assert shown == TREE
        assert "1: ModuleDict" in part and "to 2" not in part and "norm" not in part


def _dropout(use_checkpoint):
    """Masks differ where tokens are sharded, agree where they are whole, and repeat."""
    model = seeded(functools.partial(Both, 0.0))
    sch = deepsp.create_schedule(seeded(functools.partial(Both, 0.5)))
    sch["mlp.up"].shard("weight", 0).sync("bwd_post", "all_reduce")
    sch["mlp.down"].shard("weight", 1).sync("fwd_post", "reduce_scatter", 1)
    sch["mlp.drop"].sync("fwd_post", "all_gather", 1)
    if use_checkpoint:
        sch["mlp.drop"].checkpoint()
        sch["drop"].checkpoint(use_reentrant=True)
    built, _ = deepsp.build(sch)
    x = data(3, 8, 5)
    torch.manual_seed(11)
    built.keep = []
    _, out, x_grad = run(built, x)
    grads = deepsp.full_state_dict(built, gradients=True)
    first, second = built.keep
    torch.manual_seed(11)
    again = run(built, x)[1]
    assert torch.equal(out, again) and not torch.equal(out, run(built, x)[1])
    # What was dropped, of both; then the same in one process.
    keep = [(t != 0).double() * 2 for t in (first, second)]
    parts = keep[0].tensor_split(torch.distributed.get_world_size(), 1)
    assert not torch.equal(parts[0][:, :2], parts[1][:, :2])
    everyones = [None] * len(parts)
    torch.distributed.all_gather_object(everyones, keep)
    assert all(torch.equal(a, b) for other in everyones for a, b in zip(other, keep, strict=True))
    model.masks = keep
    _, right, right_x_grad = run(model, x)
    torch.testing.assert_close(out, right)
    torch.testing.assert_close(x_grad, right_x_grad)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad)


class Both(nn.Module):
    masks = (1, 1)
    keep = None

    def __init__(self, dropout):
        super().__init__()
        self.mlp, self.drop = Mlp(dropout=dropout), nn.Dropout(dropout)

    def forward(self, x):
        x = self.mlp(x) * self.masks[0]
        if self.keep is not None:
            self.keep = [x.detach()]
        x = self.drop(x.sin()) * self.masks[1]
        if self.keep is not None:
            self.keep.append(x.detach())
        return x.sin()


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("use_checkpoint", [False, True])
def test_dropout(size, use_checkpoint):
    on_ranks(size, _dropout, use_checkpoint)


def _overlap_along_features():
    sch = deepsp.create_schedule(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)))
    sch["0"].shard("weight", 0).sync("bwd_post", "all_reduce")
    sch["1"].shard("weight", 1)
    sch["1"].sync("fwd_post", "reduce_scatter", axis=2, overlap=True)
    sch["1"].sync("fwd_post", "all_gather", axis=2)
    built, _ = deepsp.build(sch)
    with pytest.raises(ValueError, match=r"1 \(fwd_post reduce_scatter\): .*, got 2, the features"):
        built(torch.ones(2, 3, 4))


def test_overlap_along_features():
    on_ranks(2, _overlap_along_features)


class Views(nn.Module):
    """Attention of one head on each rank, with views as models write them."""

    def __init__(self, how, num_heads=2):
        super().__init__()
        self.how, self.num_heads = how, num_heads
        self.q, self.out = nn.Linear(6, 4 * num_heads), nn.Linear(4 * num_heads, 6, bias=False)
        self.scale = nn.Parameter(torch.rand(4))

    def forward(self, x):
        b, t, _ = x.shape
        q = self.q(x).view(b, t, self.num_heads, 4)
        if self.how == "pairs":  # as Llama's reference code turns them
            z = torch.view_as_complex(q.reshape(*q.shape[:-1], -1, 2)) * 1j
            q = torch.view_as_real(z).flatten(3) + q
        elif self.how == "unflattened":
            q = q.unflatten(-1, (-1, 2)).flatten(3) + q
        elif self.how == "repeated":
            n = self.num_heads
            q = q[:, :, :, None].expand(b, t, n, 2, 4).reshape(b, t, n * 2, 4)[:, :, ::2] + q
        elif self.how == "one by one":
            heads = q.flatten(2).split(4, -1)
            q = torch.stack([F.softmax(h @ h.mT, -1) @ h * self.scale for h in heads], 2)
        elif self.how == "one of them":
            return q.unbind(2)[0]
        elif self.how == "averaged":
            return self.out((q / self.num_heads).flatten(2))
        elif self.how == "by hand":
            q = q.reshape(b, t, 1, 2, 2).reshape(b, t, 1, 4) + q
        return self.out(q.reshape(b, t, -1))


def _one_head():
    size = dist.get_world_size()

    def plan(sch):
        sch["q"].shard("weight", axis=0, unit=4)
        sch["out"].shard("weight", axis=1, unit=4)
        sch.divide("num_heads")
        sch["out"].sync("fwd_post", "all_reduce")
        sch.sync("bwd_post", "all_reduce")

    for heads in (size, 2 * size):
        for how in ("pairs", "unflattened", "repeated", "one by one"):
            built_and_compared(
                lambda how=how, heads=heads: Views(how, heads), plan, data(1, 5, 6), data(2, 1, 6)
            )
    for how, text in [
        ("by hand", r"Shard\(unknown axis\): .*x\.shape.*divide.*unit="),
        ("one of them", r"model's output: .* unbind .* is item 0 .*; join them in order with cat"),
        ("averaged", r"div: it computes with 2, .* an attribute that is divided"),
    ]:
        heads = size if how == "by hand" else 2 * size
        with pytest.raises(ValueError, match=text):
            built_and_compared(lambda how=how, heads=heads: Views(how, heads), plan, data(2, 5, 6))


@pytest.mark.parametrize("ranks", [2, 3])
def test_one_head_on_each_rank(ranks):
    on_ranks(ranks, _one_head)


class Forgets(nn.Module):
    """Attention whose numbers of heads the schedule must divide, all of them."""

    def __init__(self, how, num_heads=4, num_kv_heads=4):
        super().__init__()
        self.how, self.num_heads, self.num_kv_heads = how, num_heads, num_kv_heads
        self.q, self.out = nn.Linear(6, 4 * num_heads), nn.Linear(4 * num_heads, 6, bias=False)
        self.k = nn.Linear(6, 4 * num_kv_heads)

    def forward(self, x):
        b, t, _ = x.shape
        q, k = self.q(x), self.k(x)
        if self.how == "channels":
            q, k = (y.view(b, t, self.num_heads, y.size(-1) // self.num_heads) for y in (q, k))
        else:
            q, k = (y.unflatten(-1, (-1, 4)) for y in (q, k))
        q, k = q.transpose(1, 2), k.transpose(1, 2)
        times = self.num_heads // self.num_kv_heads
        if self.how == "repeated":
            k = k.repeat_interleave(times, 1)
        if self.how == "expanded":
            k = k[:, :, None].expand(-1, -1, times, -1, -1).flatten(1, 2)
        out = F.scaled_dot_product_attention(q, k, k)
        return self.out(out.transpose(1, 2).flatten(2))


def _forgotten_divide():
    def plan(sch, *numbers):
        for name in "qk":
            sch[name].shard("weight", axis=0, unit=4)
        sch["out"].shard("weight", axis=1, unit=4)
        sch.divide(*numbers)
        sch["out"].sync("fwd_post", "all_reduce")
        sch.sync("bwd_post", "all_reduce")

    all_ = ("num_heads", "num_kv_heads")
    left = r"{}: it repeats .* Shard\(1\), 0 times, .* divide all .* num_key_value_heads"
    for how, numbers, text in [
        ("repeated", all_[:1], left.format("repeat_interleave")),
        ("expanded", all_[:1], left.format("expand")),
        ("channels", (), r"view: the size 2 is computed from a local length .* outer one \(4\)"),
    ]:
        built_and_compared(lambda how=how: Forgets(how), lambda s: plan(s, *all_), data(2, 5, 6))
        with pytest.raises(ValueError, match=text):
            built_and_compared(
                lambda how=how: Forgets(how), lambda s, n=numbers: plan(s, *n), data(2, 5, 6)
            )


def test_a_forgotten_divide():
    on_ranks(2, _forgotten_divide)


class _Heads(nn.Module):
    """Attention that gives the number of heads and -1, with rotary positions as complex numbers."""

    def __init__(self):
        super().__init__()
        self.n_head = 4
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16, bias=False) for _ in range(4))

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (f(x).view(b, t, self.n_head, -1) for f in (self.q, self.k, self.v))
        angles = torch.arange(t, dtype=x.dtype)[:, None] * torch.tensor([1.0, 0.1]).to(x.dtype)
        turns = torch.polar(torch.ones_like(angles), angles)[None, :, None]
        q, k = (
            torch.view_as_real(torch.view_as_complex(y.unflatten(-1, (-1, 2))) * turns).flatten(3)
            for y in (q, k)
        )
        y = F.scaled_dot_product_attention(*(y.transpose(1, 2) for y in (q, k, v)), is_causal=True)
        return self.o(y.transpose(1, 2).reshape(b, t, -1))


def _divided():
    rank, size = dist.get_rank(), dist.get_world_size()
    for divided in (True, False):
        torch.manual_seed(0)
        model = _Heads().double()
        full, x = copy.deepcopy(model), torch.randn(2, 6, 16, dtype=torch.float64)
        schedule = deepsp.create_schedule(model)
        for name in "qkv":
            schedule[name].shard("weight", axis=0, unit=4)
        schedule["o"].shard("weight", axis=1, unit=4).sync("fwd_post", "all_reduce")
        model.n_head //= size if divided else 1
        built = deepsp.build(schedule)[0]
        if not divided:
            with pytest.raises(
                ValueError, match=r"size given as -1 \(2 here\) .*with unit=<the in"
            ):
                built(x)
            continue
        out, expected = built(x), full(x)
        out.pow(2).sum().backward()
        expected.pow(2).sum().backward()
        torch.testing.assert_close(out, expected)
        for name, dim in (("q", 0), ("k", 0), ("v", 0), ("o", 1)):
            ours = built.get_submodule(name).weight.grad
            whole = full.get_submodule(name).weight.grad
            torch.testing.assert_close(ours, whole.tensor_split(size, dim)[rank])


def test_a_divided_number_of_heads_and_complex_numbers():
    on_ranks(2, _divided)
