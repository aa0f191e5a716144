"""What depends on the rank where nothing should, and steps as people write them."""

import copy
import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import on_ranks
from scheduled import GroupedAttention, Mlp, check, compare, data, seeded
from torch import nn

import deepsp

f64 = torch.float64


class Masked(nn.Module):
    """An embedding, and hooks of somebody who masks ids by rank."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.drop = nn.Dropout(0.25)
        self.mlp = Mlp(4, 6)

    def forward(self, ids):
        return self.mlp(self.drop(self.embed(ids)))


def _by_rank():
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = torch.arange(11).tensor_split(size)[rank]
    begin, end = int(rows[0]), int(rows[-1]) + 1
    constant = torch.tensor(begin)

    def where(module, inputs):
        ids = inputs[0]
        return torch.where((ids < begin) | (ids >= end), 0, ids - begin)

    def product(module, inputs):
        ids = inputs[0]
        return (ids - begin) * ((ids >= begin) & (ids < end))

    def written(module, inputs):
        ids = inputs[0].clone()
        ids[(ids < begin) | (ids >= end)] = begin
        return ids - begin

    def outside(module, inputs):
        return (inputs[0] - constant).clamp(min=0)

    def part(module, inputs):
        return inputs[0].chunk(size, 1)[rank]

    ids = torch.arange(12).view(2, 6) % 11
    for training in (True, False):
        for hook in (where, product, written, outside, part, None):
            model = seeded(Masked).train(training)
            sch = deepsp.create_schedule(model)
            sch["embed"].shard("weight", axis=0)
            sch["embed"].sync("fwd_post", "all_reduce")
            if hook is not None:
                sch["embed"].sync("fwd_pre", hook)
            built, _ = deepsp.build(sch)
            if hook is None:
                torch.manual_seed(3)
                built(ids)
                continue
            message = r"in embed \(Embedding\) makes|made elsewhere"
            for _ in range(2):
                with pytest.raises(ValueError, match=rf"({message}).* ranks 0 and 1.*by rank"):
                    built(ids)
    # Random numbers of whole tensors differ in a dry run, where sharded ones were drawn before.
    torch.manual_seed(0)
    layers = [nn.Linear(4, 7), nn.Dropout(0.5), nn.Linear(7, 4)]
    model = nn.Sequential(*layers, nn.Dropout(0.5), nn.Linear(4, 6), nn.Linear(6, 4)).to(f64)
    sch = deepsp.create_schedule(model)
    for column, row in (("0", "2"), ("4", "5")):
        sch[column].shard("weight", axis=0)
        sch[row].shard("weight", axis=1)
        sch[row].sync("fwd_post", "all_reduce")
        sch[column].sync("bwd_post", "all_reduce")
    torch.manual_seed(0)
    deepsp.build(sch)[0](data(3, 4))


def _batches():
    rank, size = dist.get_rank(), dist.get_world_size()
    sch = deepsp.create_schedule(seeded(Mlp))
    sch["up"].shard("weight", axis=0)
    sch["down"].shard("weight", axis=1)
    sch["down"].sync("fwd_post", "all_reduce")
    sch["up"].sync("bwd_post", "all_reduce")
    built, _ = deepsp.build(sch)
    other = data(3, 5)
    other[-1, -1] += rank == size - 1
    message = rf"inputs \(for example tensor 0.* ranks 0 and {size - 1};.*DistributedSampler"
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            built(other)
    with pytest.raises(ValueError, match=r"inputs .* different values on ranks 0 and 1;"):
        built(data(3 + rank, 5))
    with pytest.raises(ValueError, match=r"inputs .* different values on ranks 0 and 1;"):
        sch.check(data(3, 5, seed=rank))
    built(data(3, 5))


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("case", [_by_rank, _batches])
def test_what_depends_on_the_rank_is_named(ranks, case):
    on_ranks(ranks, case)


def _one_by_one():
    """weight, then bias, each by a step of its own."""

    def plan(sch):
        sch["up"].shard("weight", axis=0)
        sch["up"].shard("bias", axis=0)
        sch["down"].shard("weight", axis=1)
        sch["down"].sync("fwd_post", "all_reduce")
        sch["up"].sync("bwd_post", "all_reduce")

    check(Mlp, plan, data(3, 7, 5))

    def attention(sch):
        sch.shard("in_proj_weight", axis=0)
        sch.shard("in_proj_bias", axis=0)
        sch["out_proj"].shard("weight", axis=1)

    attention(deepsp.create_schedule(nn.MultiheadAttention(12, 3)))
    sch = deepsp.create_schedule(Mlp())
    sch["up"].shard("weight", axis=0, parts=[5, 6])
    with pytest.raises(
        ValueError, match=r"bias to be .*parts=\[5, 6\].* follows .*, got .*parts=\[11\]"
    ):
        sch["up"].shard("bias", axis=0, parts=[11])
    sch["up"].shard("bias", axis=-1)
    for again in ("weight", "bias"):
        with pytest.raises(
            ValueError, match=r"sharded already|weight, which is sharded in Linear and which bias"
        ):
            sch["up"].shard(again, axis=0)
    sch["down"].shard("weight", axis=1)
    with pytest.raises(ValueError, match="down: expected names without 'bias'"):
        sch["down"].shard("bias", axis=0)


class Column(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.column = nn.Linear(5, 7)

    def forward(self, x):
        return self.column(self.first(x))


def _evaluated():
    """A plan for evaluation needs no bwd_post; what training needs is said, or done."""

    def plan(sch):
        sch["column"].shard("weight", axis=0)
        sch["column"].sync("fwd_post", "all_gather", axis=-1)

    with pytest.raises(ValueError, match="gradient of its input is Partial"):
        check(Column, plan)
    x = data(3, 5)
    for frozen in (True, False):
        model = seeded(Column).eval().requires_grad_(not frozen)
        sch = deepsp.create_schedule(copy.deepcopy(model))
        plan(sch)
        sch.check()
        built, _ = deepsp.build(sch)
        with torch.no_grad():
            torch.testing.assert_close(built(x), model(x))
    # It is trained after all: the parameters' gradients are summed, an input's can't be.
    compare_parameters(model, built, x)
    with pytest.raises(ValueError, match="gradient of an input of the model would be Partial"):
        built(x.clone().requires_grad_())


def compare_parameters(model, built, x):
    for m in (model, built):
        m.zero_grad()
        m(x).pow(2).sum().backward()
    full = deepsp.full_state_dict(built, gradients=True)
    for name, p in model.named_parameters():
        torch.testing.assert_close(full[name], p.grad)


def _gathered_and_summed():
    """An all_gather in front, and bwd_post all_reduce behind it: its gradient is whole by then."""

    def plan(sch):
        sch["up"].sync("fwd_pre", "scatter", axis=1)
        sch["up"].sync("fwd_pre", "all_gather", axis=1)
        sch["up"].sync("bwd_post", "all_reduce")
        sch["up"].shard("weight", axis=0)
        sch["down"].shard("weight", axis=1)
        sch["down"].sync("fwd_post", "all_reduce")

    model, built, _ = check(Mlp, plan, data(3, 7, 5))
    compare(model, built, data(2, 4, 5))


class Unflattened(nn.Module):
    def __init__(self, sizes, of_weight=False):
        super().__init__()
        self.sizes, self.of_weight = sizes, of_weight
        self.up, self.down = nn.Linear(5, 18), nn.Linear(18, 5)

    def forward(self, x):
        if self.of_weight:
            heads = self.up.weight.unflatten(0, self.sizes)
            h = torch.einsum("bd,nhd->bnh", x, heads) + self.up.bias.unflatten(0, self.sizes)
        else:
            h = self.up(x).unflatten(-1, self.sizes)
        return self.down(h.flatten(1))


def _unflattened():
    def plan(sch):
        sch["up"].shard("weight", axis=0, unit=3)
        sch["down"].shard("weight", axis=1, unit=3)
        sch["down"].sync("fwd_post", "all_reduce")
        sch.sync("bwd_post", "all_reduce")

    for of_weight in (False, True):
        check(lambda of_weight=of_weight: Unflattened((-1, 3), of_weight), plan, data(2, 5))
        with pytest.raises(ValueError, match=r"unflatten: its sizes don't fit .*up.* divide"):
            check(lambda of_weight=of_weight: Unflattened((6, 3), of_weight), plan, data(2, 5))


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("case", [_one_by_one, _evaluated, _gathered_and_summed, _unflattened])
def test_steps(ranks, case):
    on_ranks(ranks, case)


class Own(nn.Module):
    """An Mlp, with code of somebody's own before it, within it and after it."""

    def __init__(self):
        super().__init__()
        self.mlp, self.code, self.total = Mlp(), {}, nn.Identity()

    def forward(self, x):
        x = self._run("before", x)
        try:
            y = self.mlp(self.total(x))
        except ValueError:
            if "caught" not in self.code:
                raise
            y = self.mlp(x)
        return self._run("after", y)

    def _run(self, where, x):
        return self.code[where](x) if where in self.code else x


def _raises(x):
    raise KeyError("no such head")


def _sums_squares(module, args):
    dist.all_reduce(args[0].square().sum())


def _alone():
    """An error on one rank alone is one on all ranks, and they can go on."""
    last = dist.get_world_size() - 1
    right = seeded(Mlp)
    for where, hook, error in [
        ({"before": _raises}, None, (KeyError, "no such head", r"KeyError: 'no such head'\n")),
        ({"before": _raises}, _sums_squares, (KeyError, "no such head", "KeyError")),
        ({"before": _raises, "caught": None}, None, (KeyError, "no such head", "KeyError")),
        ({"after": _raises}, None, (KeyError, "no such head", "KeyError")),
        # What the dry run itself refuses.
        (
            {"after": lambda y: deepsp.collectives.all_reduce(y, grad="replicated")},
            None,
            (ValueError, "P times too large", "ValueError: .*P times too large"),
        ),
    ]:
        model = Own().to(f64)
        model.mlp = copy.deepcopy(right)
        sch = deepsp.create_schedule(model)
        sch["mlp.up"].shard("weight", axis=0)
        sch["mlp.down"].shard("weight", axis=1)
        sch["mlp.down"].sync("fwd_post", "all_reduce")
        sch["mlp"].sync("bwd_post", "all_reduce")
        if hook is not None:
            sch["total"].sync("fwd_pre", hook)
        built, _ = deepsp.build(sch)
        mine = dist.get_rank() == last
        model.code = where if mine else {key: lambda x: x for key in where}
        kind, own, told = error
        with pytest.raises(kind if mine else ValueError) as raised:
            built(data(2, 5))
        if mine:
            assert own in str(raised.value) and "rank" not in str(raised.value).split(";")[0]
        else:
            message = rf"(?s)every rank, got an error on rank {last} of the group only: {told}"
            assert re.search(message, str(raised.value)), raised.value
        model.code = {}
        torch.testing.assert_close(built(data(2, 5)), right(data(2, 5)))


def _elsewhere():
    """Ranks whose code calls other modules would send what doesn't fit together."""
    model = Own().to(f64)
    sch = deepsp.create_schedule(model)
    sch["mlp"].sync("fwd_pre", "scatter", axis=0)
    sch["mlp"].sync("fwd_post", "all_gather", axis=0)
    sch["total"].sync("fwd_pre", "scatter", axis=0)
    sch["total"].sync("fwd_post", "all_gather", axis=0)
    built, _ = deepsp.build(sch)
    if dist.get_rank() == 1:
        model.code = {"before": model.mlp}
    message = r"got total \(fwd_pre scatter\) on rank 0 and mlp \(fwd_pre scatter\) on rank 1; .*"
    with pytest.raises(ValueError, match=message):
        built(data(4, 5))
    model.code = {}
    built(data(4, 5))


class Grouped(GroupedAttention):
    """Grouped heads, in the ways in which models repeat kv heads for the query heads."""

    def __init__(self, num_heads, num_kv_heads, how):
        super().__init__(12, num_heads, num_kv_heads)
        self.how = how

    def forward(self, x):
        heads = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
        q, k, v = (
            t.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for t in self.qkv(x).split([h * self.head_dim for h in heads], -1)
        )
        times = q.size(1) // k.size(1)
        if self.how == "repeated":
            k, v = (t.repeat_interleave(times, 1) for t in (k, v))
        if self.how == "expanded":
            k, v = (t[:, :, None].expand(-1, -1, times, -1, -1).flatten(1, 2) for t in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, enable_gqa=self.how == "read")
        return self.out(out.transpose(1, 2).flatten(2))


def _grouped(num_heads, num_kv_heads, how, group=1):
    def plan(sch):
        sch["qkv"].shard(
            ["weight", "bias"],
            axis=0,
            parts=[4 * num_heads, 4 * num_kv_heads, 4 * num_kv_heads],
            unit=[4 * group, 4, 4],
        )
        sch["out"].shard("weight", axis=1, unit=4 * group)
        sch.divide("num_heads", unit=group).divide("num_kv_heads")
        sch.sync("bwd_post", "all_reduce")
        sch["out"].sync("fwd_post", "all_reduce")

    check(lambda: Grouped(num_heads, num_kv_heads, how), plan, data(2, 5, 12))


def _uneven():
    """Six query heads and three kv heads on two ranks: rank 0 has three and two, unless each kv
    head keeps its query heads."""
    with pytest.raises(RuntimeError if dist.get_rank() == 0 else ValueError) as raised:
        _grouped(6, 3, "repeated")
    if dist.get_rank() == 0:
        text = "\n".join([str(raised.value), *raised.value.__notes__])
    else:
        text = str(raised.value)
        assert "error on rank 0 of the group only: RuntimeError: The size of tensor" in text
    for part in ("(Grouped): scaled_dot_product_attention", "the unit of q is all query heads"):
        assert part in text
    _grouped(6, 3, "repeated", group=2)


def _misgrouped():
    """Twelve query heads and three kv heads on two ranks: six and two run on rank 0, and six and
    one on rank 1, but a query head reads another kv head than in one process."""
    for how in ("read", "repeated", "expanded"):
        with pytest.raises(ValueError, match=r"same on every rank.*\[.*\] on rank 0.*unit of q is"):
            _grouped(12, 3, how)
        _grouped(12, 3, how, group=4)


@pytest.mark.parametrize("case", [_alone, _elsewhere, _uneven])
def test_one_rank_fails_alone(case):
    on_ranks(2, case)


def test_query_heads_read_other_kv_heads():
    on_ranks(2, _misgrouped)
