"""Gradients that ranks have parts of: GradScaler, norms, and the sum over ranks."""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from harness import on_ranks
from reference import draw
from shards import check_gradients_of_parameters, shard_by_schedule
from torch import nn

import deepsp

f64 = torch.float64


def _sharded(reference):
    model = copy.deepcopy(reference)
    deepsp.shard_parameters(model, dtype=f64, reduce_dtype=f64, gradient_reduction="mean")
    return model, lambda: deepsp.full_state_dict(model)


def _spoil(row, features, module, inputs, output):
    """Makes the gradient of a row infinite; of a layer's rows that ranks have parts of, too."""
    factor = torch.ones(output.size(-1), dtype=f64)
    if output.size(-1) == features:
        factor[row] = float("inf")
    elif dist.get_rank() == (0 if row == 0 else dist.get_world_size() - 1):
        factor[0 if row == 0 else -1] = float("inf")
    return output + (output - output.detach()).mul(factor)


def _scaled(make, optimizer, clip):
    """Infinities in the rows of one rank: all ranks skip, and the scale is that of one process."""
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(4, 7), nn.ReLU(), nn.Linear(7, 5)).to(f64)
    model, full = make(reference)
    scales = []
    models = [reference, model]
    steps = [optimizer(m.parameters()) for m in models]
    scalers = [torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2) for _ in models]
    # (layer, row) whose gradient has an infinity: of the first, of the last rank; none.
    for step, bad in enumerate([None, (0, 0), None, (2, 4), (0, 6), None, None]):
        for m, opt, scaler in zip(models, steps, scalers, strict=True):
            handle = None
            if bad is not None:
                layer, row = bad
                hook = functools.partial(_spoil, row, reference[layer].out_features)
                handle = m[layer].register_forward_hook(hook)
            opt.zero_grad()
            out = m(draw(3, 4, seed=step))
            scaler.scale(out.abs().mean() + out.sum()).backward()
            if clip:
                scaler.unscale_(opt)
                if m is reference:
                    nn.utils.clip_grad_norm_(m.parameters(), 0.5)
                else:
                    deepsp.clip_grad_norm_(m if step % 2 else m.parameters(), 0.5)
            scaler.step(opt)
            scaler.update()
            if handle is not None:
                handle.remove()
        assert scalers[0].get_scale() == scalers[1].get_scale(), (step, bad)
        scales.append(scalers[1].get_scale())
        for name, value in full().items():
            torch.testing.assert_close(value, reference.state_dict()[name], rtol=1e-9, atol=1e-10)
    assert len(set(scales)) > 2
    return scales


OPTIMIZERS = [
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
]


def _scalers():
    for make in (_sharded, shard_by_schedule):
        for n, optimizer in enumerate(OPTIMIZERS):
            _scaled(make, optimizer, clip=n < 2)


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_ranks_skip_a_step_together(ranks):
    on_ranks(ranks, _scalers)


def _large():
    """More than two buckets (25 MiB), of several dtypes."""
    rank, size = dist.get_rank(), dist.get_world_size()
    sizes = [(1 << 20, torch.float32)] * 30 + [(3, torch.float64)] + [(5 << 20, torch.bfloat16)] * 3
    parameters = [nn.Parameter(torch.zeros(n, dtype=dtype)) for n, dtype in sizes]
    for i, p in enumerate(parameters):
        p.grad = torch.full_like(p, float(i + rank))
    deepsp.sync_gradients(parameters)
    for i, p in enumerate(parameters):
        expected = torch.full_like(p, float(size * i + size * (size - 1) // 2))
        assert torch.equal(p.grad, expected), i


def test_many_buckets():
    on_ranks(2, _large)


def _sparse():
    torch.manual_seed(0)
    embedding = nn.Embedding(4, 2, sparse=True)
    with pytest.raises(ValueError, match=r"Embedding with sparse=True.*skip it"):
        deepsp.shard_parameters(embedding)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match=r"gradient of weight is sparse.*sparse=False"):
        deepsp.clip_grad_norm_(embedding, 1.0)
    with pytest.raises(ValueError, match=r"parameter 0 of shape \[4, 2\] is sparse"):
        deepsp.sync_gradients(embedding.parameters())
    for kind, instead in (
        (torch.float8_e4m3fn, "bfloat16"),
        (torch.complex64, "view_as_real"),
        (torch.int16, "int32"),
    ):
        x = torch.ones(3).to(kind)
        for call in (deepsp.collectives.all_reduce, deepsp.collectives.all_reduce_start):
            with pytest.raises(
                ValueError,
                match=rf"expected x to be .*, got {kind}.*{instead}".replace("torch.", ""),
            ):
                call(x, grad="replicated")


def _weights():
    """Weights that differ are named before the first step, by whoever sees them first."""
    rank, size = dist.get_rank(), dist.get_world_size()

    def make(of, seed=0):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 7), nn.BatchNorm1d(7), nn.Linear(7, 5)).to(f64)
        model.register_buffer("kept", torch.ones(3))
        model.register_buffer("cache", torch.ones(3 + rank), persistent=False)
        with torch.no_grad():
            if rank == size - 1 and of is not None:
                (getattr(model, of) if of == "kept" else model.get_parameter(of)).view(-1)[-1] += 1
        return model

    def build(model):
        sch = deepsp.create_schedule(model)
        sch["0"].shard("weight", axis=0)
        sch["2"].shard("weight", axis=1)
        sch["1"].sync("fwd_pre", "all_gather", axis=-1)
        sch["2"].sync("fwd_pre", "scatter", axis=-1)
        sch["2"].sync("fwd_post", "all_reduce")
        deepsp.build(sch)

    for door in (deepsp.sync_gradients, deepsp.shard_parameters, build):
        for of in ("0.weight", "2.bias", "kept"):
            message = (
                rf"expected {of} to be the same on every rank .*, got different values on ranks "
                rf"0 and {size - 1}; call torch.manual_seed"
            )
            model = make(of)
            for _ in range(2):  # once only is where it is right
                with pytest.raises(ValueError, match=message):
                    door(model)
        with pytest.raises(ValueError, match=r"0\.weight .* different values on ranks 0 and 1"):
            door(make(None, seed=rank))
        model = make(None)
        if door is not build:
            model(draw(3, 4, seed=rank))  # running statistics follow what a rank has seen
        door(model)
    model = make(None)
    deepsp.sync_gradients(model)
    with torch.no_grad():
        model[0].weight.add_(rank)
    deepsp.sync_gradients(model)  # compared once
    other = make("0.weight")
    with pytest.raises(ValueError, match=r"expected parameter 0 of shape .* different values"):
        deepsp.sync_gradients(other.parameters())
    deepsp.sync_gradients(list(other.parameters())[1:])
    with pytest.raises(ValueError, match=r"expected 0\.weight .* different values"):
        deepsp.sync_gradients(other)


class _Model(nn.Module):
    def __init__(self, bias, tied):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(9, 8)
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, 9, bias=bias)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.mix(self.embed(ids)).tanh()


def _forgotten():
    """Weights that drift are found on the step after an update, and nothing else is."""
    rank, size = dist.get_rank(), dist.get_world_size()
    ids = torch.arange(5 * size).view(1, -1).mul(4).remainder(9)
    mine = ids[:, :0] if rank == size - 1 > 1 else ids[:, 5 * rank : 5 * rank + 5]
    drifts = r"weight of shape .9, 8. that makes the logits .*call deepsp.sync_gradients.model."

    def plain(model, **options):
        return deepsp.cross_entropy(model.head(model(mine)), mine, **options)

    def capped(model, **options):
        return deepsp.cross_entropy(30 * torch.tanh(model.head(model(mine)) / 30), mine, **options)

    def linear(model, **options):
        head = model.head
        return deepsp.linear_cross_entropy(model(mine), head.weight, mine, head.bias, **options)

    for loss_of in (plain, capped, linear):
        for bias, tied, kind, accumulated in (
            (False, False, torch.optim.SGD, 1),
            (True, True, torch.optim.AdamW, 3),
        ):
            for syncs in (True, False):
                model = _Model(bias, tied)
                optimizer = kind(model.parameters(), lr=1e-3)
                for step in range(5 * accumulated):
                    with torch.no_grad():
                        loss_of(model)  # an evaluation compares nothing
                    if not syncs and step == accumulated:
                        with pytest.raises(ValueError, match=drifts):
                            loss_of(model)
                        break
                    loss_of(model).backward()
                    if (step + 1) % accumulated == 0:
                        if syncs:
                            deepsp.sync_gradients(model)
                        optimizer.step()
                        optimizer.zero_grad()

    # The head is frozen, as with LoRA.
    for loss_of in (plain, linear):
        model = _Model(True, False)
        for p in model.head.parameters():
            p.requires_grad_(False)
        loss_of(model).backward()
        with torch.no_grad():
            for p in model.mix.parameters():
                p.sub_(p.grad)
        with pytest.raises(ValueError, match=r"weight of shape .* \(the trained one nearest"):
            loss_of(model)

    # Different rightly: other weights than the head's, from the start (experts), with a trained
    # head or a frozen one; and one that a schedule or shard_parameters shards.
    for loss_of in (plain, linear):
        model = _Model(False, False)
        model.mix.weight.data.add_(rank)
        frozen = _Model(False, False)
        for p in frozen.parameters():
            p.data.add_(rank)
        frozen.head.weight.requires_grad_(False)
        for m in (model, frozen, deepsp.shard_parameters(_Model(False, False).head)):
            weight = m.head.weight if m is not frozen and hasattr(m, "head") else None
            for _ in range(4):
                if isinstance(m, nn.Linear):
                    loss = deepsp.cross_entropy(m(torch.ones(1, 9, 8).bfloat16()), ids[:, :9])
                else:
                    loss = loss_of(m)
                loss.backward()
                if weight is not None:
                    deepsp.sync_gradients([weight])
                with torch.no_grad():
                    for p in m.parameters():
                        if p.grad is not None:
                            p.sub_(p.grad)
                            p.grad = None

    # Averaged already: by a wrapper that is seen, or isn't.
    for wraps in (True, False):
        model = _Model(True, False)
        plain(model, average_gradients=True).backward()
        for p in model.parameters():
            if wraps:
                p.grad = deepsp.collectives.all_reduce(p.grad, grad="replicated") / size
        with pytest.raises(ValueError, match=r"called with average_gradients=True.*leave that out"):
            deepsp.sync_gradients(model)
    plain(model).backward()
    deepsp.sync_gradients(model)
    ddp = nn.parallel.DistributedDataParallel(_Model(True, False))
    with pytest.raises(ValueError, match=r"the module is a DistributedDataParallel over ranks of"):
        deepsp.sync_gradients(ddp)
    with ddp.no_sync():
        ddp(mine).sum().backward()
        ddp.module.head(torch.ones(1, 8)).sum().backward()
    deepsp.sync_gradients(ddp)  # nothing was averaged
    alone = [dist.new_group([p]) for p in range(size)][rank]
    of_data = nn.parallel.DistributedDataParallel(nn.Linear(2, 2), process_group=alone)
    with torch.no_grad():
        for p in of_data.parameters():
            p.fill_(1.0)
    of_data(torch.ones(1, 2)).sum().backward()
    deepsp.sync_gradients(of_data)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("case", [check_gradients_of_parameters, _sparse, _weights, _forgotten])
def test_gradients(ranks, case):
    on_ranks(ranks, case)
