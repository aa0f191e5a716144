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
        device="cuda", dtype=torch.float64,
    )  # fmt: skip
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


def sharded_training():
    """shard_parameters against the whole module, three steps."""
    size = dist.get_world_size()
    torch.manual_seed(0)
    layers = [torch.nn.Linear(33, 65), torch.nn.GELU(), torch.nn.Linear(65, 33)]
    whole = torch.nn.Sequential(*layers).to("cuda", torch.float64)
    model = copy.deepcopy(whole)
    deepsp.shard_parameters(
        model, dtype=torch.float64, reduce_dtype=torch.float64, gradient_reduction="mean"
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
    return [f"parameters of one of {size} ranks: {sum(p.numel() for p in model.parameters())}"]
