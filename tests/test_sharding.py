"""shard_parameters against the same module, whole, in one process."""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import on_ranks
from reference import attention, draw, events, names, sent, warm_up
from torch import nn
from torch.utils.checkpoint import checkpoint

import deepsp
from deepsp.weights.parameters import sharded_parameters
from deepsp.weights.prefetch import GatherOrder, Use, bucket_bytes

f64 = torch.float64


class Block(nn.Module):
    def __init__(self, dim, checkpointed):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 3 * dim + 1)
        self.down = nn.Linear(3 * dim + 1, dim, bias=False)
        self.scale = nn.Parameter(torch.tensor(0.7))  # no dimensions
        self.checkpointed = checkpointed

    def compute(self, x):
        return x + self.scale * self.down(F.gelu(self.up(self.norm(x))))

    def forward(self, x):
        if self.checkpointed is None:
            return self.compute(x)
        return checkpoint(self.compute, x, use_reentrant=self.checkpointed == "reentrant")


class Model(nn.Module):
    """Tied embedding and head, a frozen layer, rows that don't divide by the ranks."""

    def __init__(self, dim=6, vocab=11, layers=3, checkpointed=None):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(Block(dim, checkpointed) for _ in range(layers))
        self.frozen = nn.Linear(dim, dim).requires_grad_(False)
        self.head = nn.Linear(dim, vocab, bias=False)
        self.head.weight = self.embed.weight
        self.few = nn.Parameter(torch.ones(2, dim))  # fewer rows than ranks
        self.skipped: set[int] = set()

    def forward(self, ids):
        x = self.embed(ids)
        for n, block in enumerate(self.blocks):
            if n not in self.skipped:
                x = block(x)
        return self.head(self.frozen(x) * self.few.sum(0))


def _model(dtype=f64, **kwargs):
    torch.manual_seed(3)
    return Model(**kwargs).to(dtype)


def _ids(step, rank=0):
    return torch.randint(0, 11, (2, 7), generator=torch.Generator().manual_seed(50 * step + rank))


def _loss(model, ids):
    return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten().roll(-1))


def _whole(model, **kwargs):
    return deepsp.shard_parameters(model, dtype=f64, reduce_dtype=f64, **kwargs)


def _compare_parameters(model, reference, **tolerance):
    full = deepsp.full_state_dict(model)
    expected = reference.state_dict()
    assert list(full) and set(full) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(
            full[name], value, msg=lambda m, n=name: f"{n}: {m}", **tolerance
        )


def _train(checkpointed, reduction, prefetch, reshard, micro, sums="exact"):
    """Five steps of AdamW with clipping; every rank has data of its own."""
    rank, size = dist.get_rank(), dist.get_world_size()
    reference, model = _model(), _model(checkpointed=checkpointed)
    _whole(
        model,
        gradient_reduction=reduction,
        prefetch_bytes=prefetch,
        reshard_after_forward=reshard,
        reduction=sums,
    )
    trained = [p for p in model.parameters() if p.requires_grad]
    rows = sum(p.numel() for p in model.parameters())
    assert rows <= sum(p.numel() for p in reference.parameters()) / size + 80
    ours = torch.optim.AdamW(trained, lr=1e-2)
    theirs = torch.optim.AdamW([p for p in reference.parameters() if p.requires_grad], lr=1e-2)
    factor = 1 / size if reduction == "mean" else 1.0
    for step in range(5):
        whole = [
            _loss(reference, _ids(10 * step + m, r)) for m in range(micro) for r in range(size)
        ]
        (sum(whole) * factor).backward()
        losses = [_loss(model, _ids(10 * step + m, rank)) for m in range(micro)]
        for m, loss in enumerate(losses):  # all forwards, then all backwards
            torch.testing.assert_close(loss, whole[m * size + rank], rtol=1e-11, atol=1e-12)
            loss.backward()
        kind = 2.0 if step % 2 else float("inf")
        a = deepsp.clip_grad_norm_(model, 0.5, kind)
        b = nn.utils.clip_grad_norm_(reference.parameters(), 0.5, kind)
        torch.testing.assert_close(a, b, rtol=1e-10, atol=0)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        _compare_parameters(model, reference, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("checkpointed", [None, "reentrant", "not reentrant"])
def test_training_is_that_of_one_process(ranks, checkpointed):
    on_ranks(ranks, _train, checkpointed, "sum", 1 << 20, True, 1)


@pytest.mark.parametrize("prefetch", [0, 600, 1 << 20])
@pytest.mark.parametrize("micro", [1, 2])
def test_training_however_far_it_looks_ahead(prefetch, micro):
    on_ranks(2, _train, None, "mean", prefetch, True, micro)


def _backend_sums():
    """float32 weights gathered in bfloat16: one reduce-scatter of the backend for each gather, and
    no sum of deepsp's; compiled, the same gradients."""
    torch.manual_seed(0)
    rank, size = dist.get_rank(), dist.get_world_size()
    reference = nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 5, bias=False))
    model = deepsp.shard_parameters(copy.deepcopy(reference), reduction="backend")
    xs = [draw(4, 6, seed=p).to(torch.bfloat16) for p in range(size)]
    found = []
    compiled = torch.compile(lambda x: model(x), fullgraph=True, backend="aot_eager")
    for step in (model, model, compiled):
        loss = step(xs[rank]).square().sum()
        seen = names(loss.backward)
        assert seen["deepsp::sum"] == 0
        launched = sum(event.startswith("gloo:") for event in seen.elements())
        assert launched == {0: 3, 1: 1, 2: 3}[len(found)], launched
        found.append([p.grad for p in model.parameters()])
        model.zero_grad()
    exact = copy.deepcopy(reference).double()
    sum(exact(x.double()).square().sum() for x in xs).backward()
    for grads in found:
        for (name, _, shards, n), grad in zip(sharded_parameters(model), grads, strict=True):
            expected = shards.rows_of(n, exact.get_parameter(name).grad).float()
            torch.testing.assert_close(grad, expected, rtol=5e-2, atol=0.3)
            torch.testing.assert_close(grad, found[0][n], rtol=1e-6, atol=1e-6)


def test_training_with_sums_of_the_backend():
    for prefetch in (0, 1 << 20):
        on_ranks(3, _train, "not reentrant", "mean", prefetch, True, 1, "backend")
    on_ranks(3, _backend_sums)


def test_training_without_resharding():
    on_ranks(3, _train, None, "mean", 1 << 20, False, 1)


def _bitwise():
    """The same data on two ranks: their mean is each one's, to the bit."""
    reference, model = _model(), _model()
    _whole(model, gradient_reduction="mean")
    for step in range(3):
        losses = [_loss(m, _ids(step)) for m in (model, reference)]
        assert torch.equal(*losses)
        for loss in losses:
            loss.backward()
        with torch.no_grad():
            for m in (model, reference):
                for p in m.parameters():
                    if p.grad is not None:
                        p.sub_(p.grad, alpha=0.1)
                        p.grad = None
        _compare_parameters(model, reference, rtol=0, atol=0)


@pytest.mark.parametrize("ranks", [1, 2])
def test_float64_is_exact(ranks):
    on_ranks(ranks, _bitwise)


def _autocast():
    """Matrices gathered in bfloat16 are what autocast makes of float32 ones, and so are their
    gradients: training is the same to the bit (two ranks have the same data)."""
    torch.manual_seed(0)
    reference = nn.Sequential(
        nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 32), nn.Linear(32, 4)
    )
    model = copy.deepcopy(reference)
    deepsp.shard_parameters(
        model,
        dtype=lambda name, p: torch.bfloat16 if p.dim() > 1 else torch.float32,
        gradient_reduction="mean",
    )
    x = torch.randn(8, 16)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (reference, model)]
    for _ in range(5):
        losses = []
        for m, optimizer in zip((reference, model), optimizers, strict=True):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = m(x).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        assert torch.equal(*losses)
    _compare_parameters(model, reference, rtol=0, atol=0)


def test_autocast():
    on_ranks(2, _autocast)


def _alive(model):
    shards = next(sharded_parameters(model))[2]
    return sum(not reference.expired() for reference, _ in shards._gathered.values())


def _memory(reshard):
    model = _whole(_model(), reshard_after_forward=reshard)
    for step in range(3):
        loss = _loss(model, _ids(step))
        assert (_alive(model) == 0) == reshard
        loss.backward()
        del loss
        assert _alive(model) == 0
        with torch.no_grad():
            model(_ids(step))
        assert _alive(model) == 0


@pytest.mark.parametrize("reshard", [True, False])
def test_nothing_gathered_outlives_its_use(reshard):
    on_ranks(2, _memory, reshard)


def _ahead():
    """From the second step on, gathers are few, and leave before what they serve."""
    torch.manual_seed(0)
    layers = [nn.Linear(512, 512) for _ in range(8)]
    model = nn.Sequential(*layers).requires_grad_()
    deepsp.shard_parameters(model, dtype=torch.float32)  # 1 MiB each
    warm_up()
    x = torch.randn(4, 512)
    first, second = (events(lambda: model(x).sum().backward()) for _ in range(2))

    def kinds(found):
        return [
            {"gloo:send": "s", "aten::addmm": "c", "aten::mm": "c"}.get(e.name)
            for e in found
            if e.name in ("gloo:send", "aten::addmm", "aten::mm")
        ]

    first, second = ("".join(kinds(found)) for found in (first, second))
    # One gather a parameter, and what it serves behind it.
    assert first.startswith("ssc" * 8)
    # Three MiB-and-a-bit in the first bucket: the second leaves before the first is used.
    assert second.index("c") > second.count("s") // 3
    return first, second


def test_it_looks_ahead():
    on_ranks(2, _ahead, apart="messages")


def _limit(prefetch, expected, bucket):
    """``expected``: how many parameters were launched by each use, from the second step on."""
    started, landed = [], []

    def start(uses):
        started.extend(uses)
        return lambda: landed.extend(uses) or [lambda: torch.zeros(()) for _ in uses]

    order = GatherOrder(start, lambda index: 100, lambda: bucket, prefetch)
    uses = [Use(n, False) for n in (0, 1, 0, 2, 3, 4, 5, 0)] + [Use(6, True), Use(7, False)]
    for _ in range(3):
        started.clear()
        landed.clear()
        order.begin()
        order.look_ahead()
        counts = [len(started)]
        for use in uses:
            order.take(use)
            counts.append(len(started))
        assert sorted(started) == sorted(landed)
    assert counts == expected


@pytest.mark.parametrize(
    ("prefetch", "expected", "bucket"),
    # Buckets of two: 0 1, 2 3, 4 5, 0 (again, since it had gone), 6 (autograd sees it), 7.
    [
        (250, [2, 4, 4, 4, 6, 6, 8, 8, 9, 9, 9], 1000),
        # One by one: as many as fit.
        (250, [2, 3, 4, 5, 6, 7, 8, 9, 10, 10, 10], 100),
        (0, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10], 1000),
        # Each is larger than the limit: the next one travels nevertheless.
        (50, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 10], 1000),
        (10_000, [8] * 11, 1000),
    ],
)
def test_the_limit_holds(prefetch, expected, bucket):
    _limit(prefetch, expected, bucket)


def test_buckets_are_larger_between_gpus():
    assert [bucket_bytes(torch.device(d)) for d in ("cpu", "cuda:1")] == [4 << 20, 64 << 20]


def _other_order():
    """Steps that differ are computed as they come."""
    reference, model = _model(), _model()
    _whole(model, gradient_reduction="mean")
    for step, skipped in enumerate([set(), {1}, {1}, {0, 2}, set(), set()]):
        gradients = []
        for m in (model, reference):
            m.skipped = skipped
            m.zero_grad()
            _loss(m, _ids(step)).backward()
            m.skipped = set()
        for name, p, shards, index in sharded_parameters(model):
            whole = reference.get_parameter(name).grad
            if p.grad is None or whole is None:
                assert p.grad is None and whole is None, name
                continue
            expected = shards.rows_of(index, whole)
            torch.testing.assert_close(p.grad, expected, rtol=1e-11, atol=1e-12)
            gradients.append(p)
        assert gradients


@pytest.mark.parametrize("ranks", [2, 3])
def test_steps_that_differ(ranks):
    on_ranks(ranks, _other_order)


def _state():
    reference, model = _model(), _model()
    _whole(model)
    _compare_parameters(model, reference, rtol=0, atol=0)
    assert model.embed.weight.shape == (11, 6)
    with torch.no_grad():
        for p in reference.parameters():
            p.mul_(3).add_(1)
    deepsp.load_full_state_dict(model, reference.state_dict())
    _compare_parameters(model, reference, rtol=0, atol=0)
    assert (
        model.head.parametrizations.weight.original is model.embed.parametrizations.weight.original
    )
    torch.testing.assert_close(_loss(model, _ids(0)), _loss(reference, _ids(0)))
    # Shards as any other state.
    again = _whole(_model())
    again.load_state_dict(model.state_dict())
    _compare_parameters(again, reference, rtol=0, atol=0)
    with torch.no_grad():
        model.frozen.weight = torch.full((6, 6), 2.0, dtype=f64)  # assigned whole
    with deepsp.full_parameters(model.frozen):
        assert torch.equal(model.frozen.weight, torch.full((6, 6), 2.0, dtype=f64))
    with pytest.raises(ValueError, match=r"frozen\.weight to be set .* \(6, 6\), got \(5, 5\)"):
        model.frozen.weight = torch.zeros(5, 5, dtype=f64)
    with pytest.raises(ValueError, match=r"few'\] to have shape .* got \(3,\)"):
        deepsp.load_full_state_dict(model, {**reference.state_dict(), "few": torch.zeros(3)})
    with pytest.raises(RuntimeError, match="Missing key"):
        deepsp.load_full_state_dict(model, {})


@pytest.mark.parametrize("ranks", [1, 3])
def test_state_dict(ranks):
    on_ranks(ranks, _state)


def _copied():
    """A copy, made between forward and backward, lives on its own."""
    reference, model = _model(), _model()
    _whole(model, reshard_after_forward=False)
    loss = _loss(model, _ids(0))
    other = copy.deepcopy(model)
    assert not next(sharded_parameters(other))[2]._gathered  # weak references, freed once
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)
    for step in range(3):
        torch.testing.assert_close(_loss(other, _ids(step)), _loss(reference, _ids(step)))
    with torch.inference_mode():
        torch.testing.assert_close(_loss(other, _ids(3)), _loss(reference, _ids(3)))
    _compare_parameters(other, reference, rtol=0, atol=0)


def test_a_copy():
    on_ranks(2, _copied)


def _checkpoint_around(reentrant):
    """A checkpoint around the sharded module, whose own tensors it saves and computes again."""
    torch.manual_seed(2)
    reference = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).to(f64)
    model = deepsp.shard_parameters(
        copy.deepcopy(reference), dtype=f64, reduce_dtype=f64, gradient_reduction="mean"
    )
    for rows in (6, 4):
        x = draw(rows, 6).requires_grad_()

        def outer(x, module):
            return torch.tanh(x) * module(x)

        for m in (model, reference):
            m.zero_grad()
        checkpoint(outer, x, model, use_reentrant=reentrant).square().sum().backward()
        mine, x.grad = x.grad, None
        outer(x, reference).square().sum().backward()
        torch.testing.assert_close(mine, x.grad, rtol=1e-11, atol=1e-12)
        for (_, p, shards, index), q in zip(
            sharded_parameters(model), reference.parameters(), strict=True
        ):
            expected = shards.rows_of(index, q.grad)
            torch.testing.assert_close(p.grad, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_around_the_module(reentrant):
    on_ranks(2, _checkpoint_around, reentrant)


def _replaced():
    """What takes a parameter's place is what is gathered; what is written to is noticed."""
    reference, model = _model(), _model()
    _whole(model)
    state = {k: torch.zeros_like(v) for k, v in model.state_dict().items()}
    _loss(model, _ids(0))
    _loss(model, _ids(0))
    out = torch.func.functional_call(model, state, (_ids(0),), tie_weights=False)
    assert not out.any()
    torch.testing.assert_close(model(_ids(0)), reference(_ids(0)))
    loss = _loss(model, _ids(0))
    with torch.no_grad():
        next(model.parameters()).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    y = model(_ids(0)).sigmoid()
    y.mul_(2)
    model_output = y.sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model_output.backward()
    model.load_state_dict(state, assign=True)
    assert not model(_ids(0)).any() and not deepsp.full_state_dict(model)["embed.weight"].any()


def test_parameters_that_are_replaced_or_written_to():
    on_ranks(2, _replaced)


def _interrupted():
    """Ctrl-C in a forward leaves nothing behind."""
    reference, model = _model(), _model()
    _whole(model, gradient_reduction="mean")
    _loss(model, _ids(0)).backward()

    def stop(*_):
        raise KeyboardInterrupt

    handle = model.blocks[1].register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        model(_ids(0))
    handle.remove()
    for step in range(2):
        model.zero_grad()
        reference.zero_grad()
        for m in (model, reference):
            _loss(m, _ids(step)).backward()
        name, p, shards, index = next(sharded_parameters(model))
        expected = shards.rows_of(index, reference.get_parameter(name).grad)
        torch.testing.assert_close(p.grad, expected)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_an_interrupt():
    on_ranks(2, _interrupted)


def _few_rows(kind):
    """A rank without a row of anything takes part in the norm, in the same dtype."""
    torch.manual_seed(0)
    reference = nn.Linear(8, 1, bias=False, dtype=kind)
    model = deepsp.shard_parameters(copy.deepcopy(reference), dtype=kind, gradient_reduction="mean")
    x = draw(3, 8).to(kind)
    for m in (model, reference):
        m(x).sum().backward()
    norms = [deepsp.clip_grad_norm_(model, 0.1)]
    norms.append(nn.utils.clip_grad_norm_(reference.parameters(), 0.1))
    torch.testing.assert_close(*norms)


@pytest.mark.parametrize("kind", [f64, torch.bfloat16])
def test_the_norm_where_a_rank_has_no_rows(kind):
    on_ranks(3, _few_rows, kind)


def _left_alone():
    """What isn't sharded is summed by sync_gradients, and sharded ones are left as they are."""
    rank, size = dist.get_rank(), dist.get_world_size()
    reference, model = _model(), _model()
    _whole(model, min_numel=10, skip=lambda name, p: name.startswith("blocks.1"))
    names = {name for name, _, _, _ in sharded_parameters(model)}
    assert "blocks.1.up.weight" not in names and "blocks.0.scale" not in names
    assert {"blocks.0.up.weight", "embed.weight", "head.weight"} <= names
    sum(_loss(reference, _ids(0, r)) for r in range(size)).backward()
    _loss(model, _ids(0, rank)).backward()
    deepsp.sync_gradients(model)
    for name, p in reference.named_parameters():
        mine = dict((n, (q, s, i)) for n, q, s, i in sharded_parameters(model)).get(name)
        if mine is not None and p.grad is not None:
            expected, grad = mine[1].rows_of(mine[2], p.grad), mine[0].grad
        elif p.grad is not None:
            expected, grad = p.grad, model.get_parameter(name).grad
        else:
            continue
        torch.testing.assert_close(grad, expected, rtol=1e-11, atol=1e-12)
    a = deepsp.clip_grad_norm_(model, 0.1)
    b = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
    torch.testing.assert_close(a, b, rtol=1e-11, atol=0)


@pytest.mark.parametrize("ranks", [1, 3])
def test_parameters_left_alone(ranks):
    on_ranks(ranks, _left_alone)


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            deepsp.SequenceParallelAttention(16, 4, num_kv_heads=2, chunks=2, dtype=f64)
            for _ in range(2)
        )

    def forward(self, x, lens):
        for layer in self.layers:
            x = x + layer(x, is_causal=True, seq_lens=lens)
        return x


def _with_sequence(lens):
    """Parameters and the sequence sharded over the same group; one process has all of both."""
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = Attending()
    weights = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    deepsp.shard_parameters(model, dtype=f64, reduce_dtype=f64)
    for step in range(3):
        x = draw(2, sum(lens), 16, seed=step)
        y = x
        for n in range(2):
            q, k, v = (
                F.linear(y, weights[f"layers.{n}.{name}_proj.weight"]).unflatten(-1, (-1, 4))
                for name in "qkv"
            )
            a = attention(q, k, v, is_causal=True).flatten(2)
            y = y + F.linear(a, weights[f"layers.{n}.o_proj.weight"])
        expected = dict(
            zip(weights, torch.autograd.grad(y.square().sum(), [*weights.values()]), strict=True)
        )
        model.zero_grad()
        out = model(x.split(lens, 1)[rank], lens)
        torch.testing.assert_close(out, y.split(lens, 1)[rank], rtol=1e-11, atol=1e-11)
        out.square().sum().backward()
        for name, p, shards, index in sharded_parameters(model):
            torch.testing.assert_close(
                p.grad, shards.rows_of(index, expected[name]), rtol=1e-10, atol=1e-10
            )


@pytest.mark.parametrize("lens", [[9], [5, 4], [3, 6, 1]])
def test_with_a_sharded_sequence(lens):
    on_ranks(len(lens), _with_sequence, lens)


def _bytes():
    """bfloat16 travels, both ways; nothing else."""
    torch.manual_seed(0)
    model = nn.Linear(64, 64, bias=False)
    deepsp.shard_parameters(model)
    warm_up()
    x = torch.randn(3, 64, dtype=torch.bfloat16, requires_grad=True)
    out = []
    forward = sum(sent(lambda: out.append(model(x))))
    backward = sum(sent(lambda: out[0].sum().backward()))
    assert forward == 32 * 64 * 2
    assert backward == 2 * 32 * 64 * 2  # the weight again, and its gradient
    grad = model.parametrizations.weight.original.grad
    assert grad.dtype == torch.float32 and grad.shape == (32, 64)


def test_bytes_on_the_wire():
    on_ranks(2, _bytes, apart="messages")


def _errors():
    torch.manual_seed(0)
    rank = dist.get_rank()
    linear = functools.partial(nn.Linear, 4, 4)
    shard = deepsp.shard_parameters
    with pytest.raises(ValueError, match=r"weight to be float64, .*, got torch\.complex64"):
        shard(linear(dtype=torch.complex64))
    with pytest.raises(ValueError, match=r"dtype of weight to be .*, got torch\.int8"):
        shard(linear(), dtype=torch.int8)
    with pytest.raises(ValueError, match='"sum" or "mean"'):
        shard(linear(), gradient_reduction="avg")
    with pytest.raises(ValueError, match=r"'exact' or 'backend' \(NCCL's own .*\), got 'nccl'"):
        shard(linear(), reduction="nccl")
    with pytest.raises(
        ValueError, match=r"sums of gradients .* got reduction='exact' .*'backend' .* on rank 1"
    ):
        shard(linear(), reduction="backend" if rank else "exact")
    with pytest.raises(ValueError, match="prefetch_bytes >= 0, got -1"):
        shard(linear(), prefetch_bytes=-1)
    with pytest.raises(ValueError, match="parametrized already"):
        shard(shard(linear()))
    with pytest.raises(ValueError, match="belongs to an LSTM"):
        shard(nn.LSTM(3, 3))
    with pytest.raises(ValueError, match="Embedding with max_norm"):
        shard(nn.Embedding(3, 3, max_norm=1.0))
    with_grad = linear()
    with_grad(torch.ones(1, 4)).sum().backward()
    with pytest.raises(ValueError, match="weight has a gradient"):
        shard(with_grad)
    with pytest.raises(
        ValueError, match=r"got weight: .*\[4, 4\].* on rank 0 and weight: .*\[5, 4\].* on rank 1"
    ):
        shard(nn.Linear(4, 4 + rank))


def test_errors():
    on_ranks(2, _errors)
