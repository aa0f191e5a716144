"""Sharded weights on a GPU: bits, sums and training."""

import copy

import torch
import torch.distributed as dist
from common import TIGHT, draw

import deepsp

op = torch.ops.deepsp


def gathered():
    """Casts of any dtype to any other to the bit, their sums, and float8; one and many at once."""
    rank, size = dist.get_rank(), dist.get_world_size()
    name = dist.group.WORLD.group_name
    floats = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    special = torch.tensor(
        [0.0, -0.0, float("inf"), -float("inf"), 1e-40, 3e-8, 65520.0, 3.4e38, 1 + 2**-9],
        device="cuda",
        dtype=torch.float64,
    )
    for dtype in floats:
        for target in floats:
            for rows, columns in ((9, 33), (5, 1024), (1, 7)):
                whole = (draw(rows, columns) * 100).to(dtype)
                whole.view(-1)[: special.numel()] = special.to(dtype)[: whole.numel()]
                sizes = op.token_split(rows, size)
                shard = whole.split(sizes)[rank].contiguous().requires_grad_()
                out = op.gather_cast(shard, sizes, target, rank, name)
                assert torch.equal(out, whole.to(target)), (dtype, target)
                weight = draw(rows, columns, seed=rank).to(target)
                (grad,) = torch.autograd.grad(out, shard, weight)
                wide = torch.float64 if target == torch.float64 else torch.float32
                total = sum(draw(rows, columns, seed=p).to(target).to(wide) for p in range(size))
                assert torch.equal(grad, total.split(sizes)[rank].to(dtype)), (dtype, target)
    nan = torch.full((4, 4), float("nan"), device="cuda")
    sizes = op.token_split(4, size)
    out = op.gather_cast(nan.split(sizes)[rank], sizes, torch.bfloat16, rank, name)
    assert torch.equal(out.view(torch.int16), nan.bfloat16().view(torch.int16))

    wholes = [draw(n + 1, 3 * n % 41 + 1, seed=n).float() for n in range(600)]  # more than a launch
    targets = [floats[n % 4] for n in range(600)]
    lists = [op.token_split(w.size(0), size) for w in wholes]
    shards = [w.split(s)[rank].requires_grad_() for w, s in zip(wholes, lists, strict=True)]
    flat = [n for s in lists for n in s]
    out = op.gather_cast_coalesced(shards, flat, targets, rank, name)
    for o, w, t in zip(out, wholes, targets, strict=True):
        assert torch.equal(o, w.to(t))
    grads = torch.autograd.grad(out, shards, [torch.ones_like(o) for o in out])
    assert all(torch.equal(g, torch.full_like(g, size)) for g in grads)

    data, inv_scale = op.gather_cast_float8(
        shards[40].detach(), lists[40], torch.float8_e4m3fn, rank, name
    )
    scaled = wholes[40] * (448 / wholes[40].abs().max())
    assert torch.equal(data.view(torch.uint8), scaled.to(torch.float8_e4m3fn).view(torch.uint8))
    torch.testing.assert_close(inv_scale, wholes[40].abs().max() / 448)


def summed_by_nccl():
    """Gradients of gathered weights by one reduce-scatter of NCCL, against float64: uneven rows,
    several dtypes on the wire, padded and sent as they are."""
    if dist.get_backend() != "nccl":
        return ["only on NCCL"]
    rank, size = dist.get_rank(), dist.get_world_size()
    name = dist.group.WORLD.group_name
    f64, f32, bf16, f16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
    for rows, wires in (
        ([9, 4, 1], [bf16, f32, f16]),
        ([64 * size], [f32]),
        ([64 * size], [bf16]),
        ([1], [f64]),
    ):
        sizes = [op.token_split(n, size) for n in rows]
        shards = [
            draw(s[rank], 33 - n % 2).float().requires_grad_()
            for n, s in zip(rows, sizes, strict=True)
        ]
        flat = [n for s in sizes for n in s]
        weights = [
            [draw(n, 33 - n % 2, seed=p).to(wire) for n, wire in zip(rows, wires, strict=True)]
            for p in range(size)
        ]
        for dtype in (f64, f32, bf16):
            out = op.gather_cast_coalesced(shards, flat, wires, rank, name, backend_sums=dtype)
            seen = []
            with torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CPU]
            ) as profile:
                seen += torch.autograd.grad(out, shards, weights[rank])
            launched = sum(event.name == "deepsp::exchange" for event in profile.events())
            assert (size > 1) <= launched <= 1, launched
            for i, grad in enumerate(seen):
                terms = torch.stack([w[i].double() for w in weights]).split(sizes[i], 1)[rank]
                bound = 4 * max(torch.finfo(dtype).eps, 2**-23) * terms.abs().sum(0)
                assert bool(((grad - terms.sum(0)).abs() <= bound).all()), (rows, dtype, i)


def sharded_training():
    """shard_parameters against the whole module, three steps; sums of deepsp and of NCCL."""
    for reduction in ("exact", "backend")[: 1 + (dist.get_backend() == "nccl")]:
        mine = _trained(reduction)
    return [f"parameters of one of {dist.get_world_size()} ranks: {mine}"]


def _trained(reduction):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(33, 65), torch.nn.GELU(), torch.nn.Linear(65, 33)]
    whole = torch.nn.Sequential(*layers).to("cuda", torch.float64)
    model = copy.deepcopy(whole)
    deepsp.shard_parameters(
        model,
        dtype=torch.float64,
        reduce_dtype=torch.float64,
        gradient_reduction="mean",
        reduction=reduction,
    )
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (whole, model)]
    for step in range(3):
        x = draw(4, 33, seed=step)
        for m, optimizer in zip((whole, model), optimizers, strict=True):
            m(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    full = deepsp.full_state_dict(model)
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(full[name], value, **TIGHT)
    return sum(p.numel() for p in model.parameters())
