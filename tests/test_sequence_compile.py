"""The compile pass: models written for one device, sharded; against one process in float64.

What the pass makes of a model is proved in lock step, in this process; real ranks prove that
compilers take it, and what depends on a group."""

import copy
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import on_ranks
from lockstep import BACKEND, compare, gradients_of
from torch import nn
from zoo import LM, MODELS, VOCAB, Changed, Dropped, OwnDropout, batch, total

import deepsp
from deepsp.compile import explain, parallelize, rule

# -------------------------------------------------------------------------- the two contracts


def _of_one():
    compare(MODELS["grouped"], (13, 14))


def test_a_group_of_one():
    on_ranks(1, _of_one)


def _local_outputs():
    torch._dynamo.reset()
    torch.manual_seed(0)
    rank, size = dist.get_rank(), dist.get_world_size()
    reference = MODELS["logits"]().double()
    model = copy.deepcopy(reference)
    options = {"inner": "eager", "outputs": "local"}
    compiled = torch.compile(model, options=options, **BACKEND)
    inputs = batch(13)
    shifted = F.pad(inputs["labels"], (0, 1), value=-100)[:, 1:]
    expected = F.cross_entropy(reference(**inputs).flatten(0, 1), shifted.flatten())
    expected.backward()
    logits = compiled(**deepsp.prepare_inputs(inputs))
    assert logits.size(1) == deepsp.ranks.seq_lens(13)[rank] and size > 1
    loss = deepsp.cross_entropy(logits, deepsp.shard(shifted, 1))
    loss.backward()
    torch.testing.assert_close(loss, expected)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-12)


class _Cut(LM):
    def forward(self, ids):
        x = self.embed(ids[:, :-1])
        return x * 2, x[:, 1:]


def _local_outputs_of_other_lengths():
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, ids = _Cut().double(), batch(13)["ids"]
    compiled = torch.compile(model, options={"inner": "eager", "outputs": "local"}, **BACKEND)
    for part, full in zip(compiled(*deepsp.prepare_inputs(ids)), model(ids), strict=True):
        torch.testing.assert_close(part, deepsp.shard(full, 1))


def test_local_outputs():
    on_ranks(3, _local_outputs)
    on_ranks(3, _local_outputs_of_other_lengths)


def _trained():
    """Plain optimizers, five steps, two forward calls in each: one process's parameters."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    reference = MODELS["pre-norm"]().double()
    model = copy.deepcopy(reference)
    compiled = torch.compile(model, **BACKEND)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, reference)]
    for step in range(5):
        for part in range(2):
            inputs = batch(12 + 2 * part + 4 * (step > 2), seed=10 * step + part)
            reference(**inputs).backward()
            compiled(**deepsp.prepare_inputs(inputs)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    # The first length, and all that divide.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-8, atol=1e-10)
        others = [torch.empty_like(p) for _ in range(dist.get_world_size())]
        dist.all_gather(others, p.detach())
        assert all(torch.equal(other, p) for other in others)


def test_training():
    on_ranks(2, _trained)


# ---------------------------------------------------------------------------------- in use


def _modes():
    torch._dynamo.reset()
    torch.manual_seed(0)
    reference = MODELS["logits"]()
    model = copy.deepcopy(reference)
    compiled = torch.compile(model, options={"inner": "eager"}, **BACKEND)
    inputs = batch(13)
    marked = deepsp.prepare_inputs(dict(inputs))
    for m in (model, reference):
        m.eval()
    with torch.no_grad():
        torch.testing.assert_close(compiled(**marked), reference(**inputs))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, expected = compiled(**marked), reference(**inputs)
    assert out.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(out, expected, rtol=0.05, atol=0.1)
    total(out, inputs["labels"]).backward()
    total(expected, inputs["labels"]).backward()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        scale = q.grad.abs().max().item()
        torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=0.05 * scale)


def test_modes():
    on_ranks(2, _modes)


class _Narrow(nn.Module):
    """Products in bfloat16, but for one, and a loss of merged rows and tokens."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB)

    def forward(self, ids, labels):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.head(self.embed(ids)) @ self.head.weight
            with torch.autocast("cpu", enabled=False):
                x = self.head(x.float())
            x = x @ self.head.weight
        return F.cross_entropy(self.head(x.float()).view(-1, VOCAB), labels.view(-1))


def _autocast_in_a_model():
    torch._dynamo.reset()
    torch.manual_seed(0)
    reference = _Narrow()
    model = copy.deepcopy(reference)
    compiled = torch.compile(model, options={"inner": "eager"}, **BACKEND)
    for rows, length in ((2, 12), (3, 14)):  # then rows, too, are a symbol
        inputs = {n: x.repeat(2, 1)[:rows] for n, x in batch(length).items()}
        for m in (reference, model):
            m.zero_grad()
        loss, expected = compiled(**deepsp.prepare_inputs(dict(inputs))), reference(**inputs)
        loss.backward()
        expected.backward()
        torch.testing.assert_close(loss, expected)
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            scale = q.grad.abs().max().item()
            torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=0.03 * scale)
        assert not torch.is_autocast_enabled("cpu")


def test_autocast_in_a_model_and_other_numbers_of_rows():
    on_ranks(2, _autocast_in_a_model)


def _random(drop, then):
    rank, size = dist.get_rank(), dist.get_world_size()
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Dropped(drop, then).double()
    compiled = torch.compile(model, options={"inner": "aot_eager"}, **BACKEND)
    seen = []
    for _ in range(2):
        x, pooled = compiled(**deepsp.prepare_inputs(batch(13 * size + 1)))
        batches = deepsp.ranks.groups.objects_on_all_ranks(torch.rand(3), None, torch.device("cpu"))
        assert all(torch.equal(other, batches[0]) for other in batches)  # whoever has more tokens
        others = [torch.empty_like(pooled) for _ in range(size)]
        dist.all_gather(others, pooled.detach())
        assert all(torch.equal(other, pooled) for other in others)
        kept = pooled != 0
        assert then is None or 0 < kept.sum() < kept.numel()
        factor = 1 if then is None else 2
        torch.testing.assert_close(pooled[kept], factor * x.mean(1)[kept])
        first, second = (x == 0)[:, :13], (x == 0)[:, 14:27]  # two ranks' tokens
        seen += [first, second]
    for i, a in enumerate(seen):
        for b in seen[:i]:
            assert 0.35 < (a == b).double().mean() < 0.65
    assert rank < size


def test_random_numbers():
    on_ranks(2, _random, F.dropout, F.dropout)
    on_ranks(2, _random, OwnDropout.apply, None)


def _meshes():
    """Two sequences, each on a group of its own."""
    from torch.distributed.device_mesh import init_device_mesh

    torch._dynamo.reset()
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))
    reference = MODELS["pre-norm"]().double()
    model = copy.deepcopy(reference)
    options = {"inner": "eager", "group": mesh["sequence"], "gradients": "mean"}
    compiled = torch.compile(model, options=options, **BACKEND)
    losses = [reference(**batch(13, seed=s)) for s in range(2)]
    (sum(losses) / 2).backward()
    compiled(**deepsp.prepare_inputs(batch(13, seed=dist.get_rank() // 2))).backward()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        dist.all_reduce(p.grad)  # as DDP averages
        torch.testing.assert_close(p.grad / 4, q.grad, rtol=1e-9, atol=1e-12)


def test_data_and_sequence():
    on_ranks(4, _meshes)


def _sharded_inputs():
    """Every rank has some tokens, as many as it likes."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    rank = dist.get_rank()
    reference = MODELS["encoder-decoder"]().double()
    model = copy.deepcopy(reference)
    compiled = torch.compile(model, options={"inner": "eager"}, **BACKEND)
    inputs = batch(13, "encoder-decoder")
    lens = {"ids": [2, 11, 0], "labels": [2, 11, 0], "source": [0, 8, 9]}
    mine = {name: x.split(lens[name], 1)[rank] for name, x in inputs.items()}
    prepared = deepsp.prepare_inputs(mine, sharded_inputs=True)
    assert all(torch.equal(prepared[name], x) for name, x in inputs.items())
    expected = reference(**inputs)
    expected.backward()
    out = compiled(**prepared)
    out.backward()
    torch.testing.assert_close(out, expected)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-12)

    # Embeddings, with a gradient.
    x = torch.randn(2, 13, 4).double().requires_grad_()
    part = x.detach().split(lens["ids"], 1)[rank].requires_grad_()
    embedded, labels = deepsp.prepare_inputs(part, mine["labels"], sharded_inputs=True)
    weight = torch.randn(4, VOCAB).double()

    def loss(x, labels):
        return F.cross_entropy((x @ weight).flatten(0, 1), labels.flatten())

    torch._dynamo.reset()
    torch.compile(loss, options={"inner": "eager"}, **BACKEND)(embedded, labels).backward()
    loss(x, inputs["labels"]).backward()
    torch.testing.assert_close(part.grad, x.grad.split(lens["ids"], 1)[rank])

    other = torch.zeros(2, 5, dtype=torch.int64 if rank else torch.int32)
    message = r"of sharded_inputs,.*int32.* on rank 0 and .*int64.* on rank 1;.*shape"
    with pytest.raises(ValueError, match=message):
        deepsp.prepare_inputs(other, sharded_inputs=True)


def test_sharded_inputs():
    on_ranks(3, _sharded_inputs)


def _chunks():
    def graphs(gm, example_inputs):
        seen.extend(n.args for n in gm.graph.nodes if "distributed_attention" in str(n.target))
        return gm

    seen = []
    torch._dynamo.reset()
    torch.manual_seed(0)
    reference = MODELS["pre-norm"]().double()
    model = copy.deepcopy(reference)
    options = {"inner": graphs, "chunks": 2}
    compiled = torch.compile(model, options=options, **BACKEND)
    compiled(**deepsp.prepare_inputs(batch(13))).backward()
    reference(**batch(13)).backward()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-12)
    assert [args[8] for args in seen] == [2, 2]


def test_chunks():
    on_ranks(2, _chunks)


# ------------------------------------------------------------------- weights that are sharded


def _sharded_weights(groups, kind, reduction):
    """Gradients of shards are those of their rows, summed over the data ranks, or their mean."""
    from torch.distributed.device_mesh import init_device_mesh

    torch._dynamo.reset()
    torch.manual_seed(0)
    size = dist.get_world_size()
    data = 2 if groups != "sequence" else 1
    names = ("data", "sequence")
    mesh = init_device_mesh("cpu", (data, size // data), mesh_dim_names=names)
    over = {"world": None, "data": mesh["data"], "sequence": mesh["sequence"]}[groups]
    reference = MODELS["pre-norm"]().double()
    model = copy.deepcopy(reference)
    f64 = torch.float64
    deepsp.shard_parameters(
        model, group=over, dtype=f64, reduce_dtype=f64, gradient_reduction=reduction
    )
    inner = "aot_eager" if (groups, size) == ("sequence", 2) else "eager"
    options = {"inner": inner, "group": mesh["sequence"], "gradients": kind}
    compiled = torch.compile(model, options=options, **BACKEND)
    sum(reference(**batch(13, seed=s)) for s in range(data)).backward()
    compiled(**deepsp.prepare_inputs(batch(13, seed=mesh["data"].get_local_rank()))).backward()
    member = deepsp.ranks.groups.member_of(over)
    shards = dict(model.named_parameters())
    wholes = [(n, p) for n, p in reference.named_parameters() if p.grad is not None]
    assert len(wholes) > 10
    for n, p in wholes:
        path, _, last = n.rpartition(".")
        mine = shards[f"{path}.parametrizations.{last}.original"]
        rows = torch.ops.deepsp.token_split(p.size(0), member[1])
        expected = p.grad.split(list(rows))[member[0]]
        divisor = member[1] if reduction == "mean" else 1
        torch.testing.assert_close(
            mine.grad * divisor, expected, rtol=1e-9, atol=1e-12, msg=lambda m, n=n: f"{n}: {m}"
        )


@pytest.mark.parametrize(
    "groups, ranks, kind, reduction",
    [
        ("sequence", 3, "sum", "sum"),
        ("sequence", 2, "local", "mean"),
        ("world", 4, "sum", "mean"),
        pytest.param("data", 4, "sum", "sum", marks=pytest.mark.nightly),
    ],
)
def test_sharded_weights(groups, ranks, kind, reduction):
    on_ranks(ranks, _sharded_weights, groups, kind, reduction)


class _Gathered(torch.nn.Module):
    """A weight gathered by whatever is given; used with tokens, and by itself."""

    def __init__(self, gather):
        super().__init__()
        self.embed = torch.nn.Embedding(VOCAB, 4)
        self.weight = torch.nn.Parameter(torch.randn(6, 4))
        self.gather = gather

    def forward(self, ids, labels):
        weight = self.gather(self.weight)
        return (self.embed(ids) @ weight.t()).square().mean() + weight.exp().sum()


def _own_gathers(kind):
    from torch.distributed._functional_collectives import (
        all_gather_into_tensor_coalesced,
        all_gather_tensor_autograd,
    )

    rank, size = dist.get_rank(), dist.get_world_size()
    name = dist.group.WORLD.group_name
    rows = [6 // size] * size
    for gather in (
        lambda shard: all_gather_tensor_autograd(shard, 0, dist.group.WORLD),
        lambda shard: all_gather_into_tensor_coalesced([shard], dist.group.WORLD)[0],
        lambda shard: torch.ops.deepsp.gather_cast_coalesced(
            [shard, shard * 0], [*rows, *rows], [shard.dtype] * 2, rank, name
        )[0],
    ):
        torch._dynamo.reset()
        torch.manual_seed(0)
        reference = _Gathered(lambda weight: weight).double()
        model = copy.deepcopy(reference)
        model.gather = gather
        model.weight = torch.nn.Parameter(reference.weight.detach().split(rows)[rank].clone())
        options = {"inner": "aot_eager", "gradients": kind}
        compiled = torch.compile(model, options=options, **BACKEND)
        compiled(**deepsp.prepare_inputs(batch(13))).backward()
        reference(**batch(13)).backward()
        expected = reference.weight.grad.split(rows)[rank]
        torch.testing.assert_close(model.weight.grad, expected, rtol=1e-9, atol=1e-12)
        gradients = gradients_of(model, kind)["embed.weight"]
        torch.testing.assert_close(gradients, reference.embed.weight.grad)


@pytest.mark.parametrize("kind, ranks", [("sum", 3), ("local", 2), ("mean", 2)])
def test_gathers_in_the_model(kind, ranks):
    on_ranks(ranks, _own_gathers, kind)


def _some_of_the_ranks():
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2])]
    mine = groups[dist.get_rank() // 2]
    name, parts = mine.group_name, mine.size()
    rows, rank = [2] * parts, dist.get_rank(mine)
    torch._dynamo.reset()

    def gather(shard):
        return torch.ops.deepsp.gather_cast(shard[:2], rows, shard.dtype, rank, name)

    compiled = torch.compile(_Gathered(gather), **BACKEND)
    # Rank 2 gathers alone, which is right by itself; it hears from the others what isn't.
    with pytest.raises(Exception, match=r"sequence group, \[0, 1, 2\], .*, got ranks \[0, 1\]"):
        compiled(**deepsp.prepare_inputs(batch(13)))


def test_gathers_over_some_ranks():
    on_ranks(3, _some_of_the_ranks)


class _Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.scale = torch.nn.Embedding(VOCAB, 4), 1.0
        self.norm = torch.nn.LayerNorm(4)

    def forward(self, ids):
        return self.norm(self.embed(ids) * self.scale).exp().mean() * self.scale


def _floats_that_change():
    for dynamic in (None, True):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        torch.manual_seed(0)
        model = _Scaled().double()
        options = {"inner": "eager"}
        compiled = torch.compile(model, dynamic=dynamic, options=options, **BACKEND)
        ids = batch(12)["ids"]
        deepsp.prepare_inputs(ids)
        for step in range(5):
            model.scale = 1.0 + 0.1 * step
            torch.testing.assert_close(compiled(ids), model(ids))
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


def test_floats_that_change():
    on_ranks(2, _floats_that_change)


def _fused_gathers():
    from torch._inductor import compile_fx, config

    def compiler(gm, example_inputs, config_patches=None):
        given.append(config_patches)
        return gm

    given, original = [], compile_fx.compile_fx
    compile_fx.compile_fx = compiler
    for shard in (deepsp.shard_parameters, lambda model: model):
        torch._dynamo.reset()
        model = shard(MODELS["logits"]())
        torch.compile(model, **BACKEND)(**deepsp.prepare_inputs(batch(13)))
    compile_fx.compile_fx = original
    fuse, none = given
    assert none is None
    (fuse,) = fuse.values()
    assert isinstance(fuse, deepsp.compile.FuseGatherCast)
    assert fuse.before is config.post_grad_custom_post_pass


def test_gathers_are_fused():
    on_ranks(2, _fused_gathers)


def _own_backend():
    seen = []

    def backend(gm, example_inputs):
        new = parallelize(gm, example_inputs)
        seen.append([str(n.target) for n in new.graph.nodes])
        return new

    torch._dynamo.reset()
    torch.manual_seed(0)
    model = MODELS["grouped"]().double()
    inputs = batch(12)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(**deepsp.prepare_inputs(inputs)), model(**inputs))
    (targets,) = seen
    # Two layers' attention, the loss and its count, one bucket of gradients, and nothing else.
    assert targets.count("deepsp.distributed_attention.default") == 2
    assert targets.count("deepsp.all_reduce.default") == 2
    assert targets.count("deepsp.replicate_start.default") == 1
    assert not any("unshard" in t or "gather" in t for t in targets)

    text = str(explain(model, **deepsp.prepare_inputs(batch(12))))
    assert "distributed attention" in text and "zoo.py" in text and "2 all_reduce" in text, text
    assert text.split()[:6] == ["op", "full", "shape", "its", "result", "line"]
    refused = explain(Changed("circular").double(), **deepsp.prepare_inputs(batch(12)))
    assert "adds elements" in refused.refused and "circular" in str(refused)


def test_an_own_backend_and_explain():
    on_ranks(2, _own_backend)


def _own_rule():
    torch._dynamo.reset()
    library = torch.library.Library("zoo_ops", "FRAGMENT")
    library.define("double(Tensor x) -> Tensor")
    library.impl("double", lambda x: x * 2, "CompositeExplicitAutograd")
    op = torch.ops.zoo_ops.double.default

    def model(ids, labels):
        return op(F.one_hot(ids, VOCAB).double() @ weight).sum()

    weight = torch.nn.Parameter(torch.ones(VOCAB, 3).double())
    compiled = torch.compile(model, options={"inner": "aot_eager"}, **BACKEND)
    with torch.no_grad():
        with pytest.raises(Exception, match=r"zoo_ops.double.*no rule.*deepsp.compile.rule"):
            compiled(**deepsp.prepare_inputs(batch(12)))

        @rule(op)
        def double(call):
            return call.one_of()

        torch._dynamo.reset()
        assert compiled(**deepsp.prepare_inputs(batch(12))) == 2 * 3 * 2 * 12
    with pytest.raises(ValueError, match=r"an overload, such as torch.ops.aten.relu.default"):
        rule(torch.relu)
    del library


def test_own_rules():
    on_ranks(2, _own_rule)


def _wrong():
    inputs = batch(12)
    model = MODELS["pre-norm"]().double()
    with pytest.raises(Exception, match=r"no input of this graph is known.*prepare_inputs"):
        torch.compile(model, **BACKEND)(**inputs)
    torch._dynamo.reset()
    marked = deepsp.prepare_inputs(inputs)
    for options, message in (
        ({"gradients": "all"}, "gradients to be 'sum', 'local' or 'mean', got 'all'"),
        ({"outputs": "all"}, "outputs to be 'full' or 'local', got 'all'"),
        ({"inner_": "all"}, "options to have .*, got .*inner_"),
    ):
        torch._dynamo.reset()
        with pytest.raises(Exception, match=message):
            torch.compile(model, options=options, **BACKEND)(**marked)
    with pytest.raises(
        ValueError, match=r"labels to have 12 tokens in dimension 1, .*, got shape \(2, 11\)"
    ):
        deepsp.prepare_inputs(torch.ones(2, 12), torch.ones(2, 11))
    with pytest.raises(ValueError, match=r"input_ids to have a dimension 1, got shape \(12,\)"):
        deepsp.prepare_inputs(torch.ones(12))

    def broken(ids, labels):
        x = model.embed(ids)
        torch._dynamo.graph_break()
        return model.head(x).sum()

    torch._dynamo.reset()
    with pytest.raises(Exception, match="no input of this graph is known"):
        torch.compile(broken, backend="deepsp", options={"inner": "aot_eager"})(**marked)


def test_wrong_input():
    on_ranks(2, _wrong)


def test_the_backend_is_known_without_an_import():
    code = "import torch; print('deepsp' in torch._dynamo.list_backends())"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "True" in out.stdout
