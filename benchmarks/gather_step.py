"""The training step that benchmarks/gather_cast.py measures: one small transformer, sharded by each
contender."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable

import bench
import torch
import torch.distributed as dist
import torch.nn.functional as F
from gather_contenders import FLOAT, HALF, account, all_gather, reduce_scatter
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import deepsp

COMPUTE, FSDP, AHEAD = "compute", "FSDP2", "FSDP2, ahead"


class Norm(nn.Module):
    """RMS norm in float32, whatever the dtypes of x and the weight."""

    def __init__(self, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], self.weight.float()).to(x.dtype)


class Block(nn.Module):
    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = Norm(dim), Norm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.up = nn.Linear(dim, 4 * dim, bias=False)
        self.down = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """A pre-norm causal transformer."""

    def __init__(self, dim: int, layers: int, heads: int, vocab: int):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm = Norm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


# ----------------------------------------------------------------------- unfused, torch alone


def gather_then_cast(shard: Tensor) -> Tensor:
    whole = shard.new_empty(dist.get_world_size() * shard.size(0), *shard.shape[1:])
    all_gather(whole, shard)
    return whole.to(HALF)


class GatherThenCast(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shard):
        return gather_then_cast(shard)

    @staticmethod
    def backward(ctx, grad):
        size = dist.get_world_size()
        shard = grad.new_empty(grad.size(0) // size, *grad.shape[1:], dtype=FLOAT)
        reduce_scatter(shard, grad.to(FLOAT))
        return shard.div_(size)


class Unfused(nn.Module):
    """A layer whose weights are gathered for its forward, and again for its backward."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = [layer]
        self.names = [name for name, _ in layer.named_parameters()]
        rank, size = dist.get_rank(), dist.get_world_size()
        self.shards = nn.ParameterList(
            p.detach().chunk(size)[rank].clone() for p in layer.parameters()
        )

    def forward(self, x: Tensor) -> Tensor:
        weights = [GatherThenCast.apply(shard) for shard in self.shards]
        shard_of = {
            w.untyped_storage().data_ptr(): shard
            for w, shard in zip(weights, self.shards, strict=True)
        }

        def pack(saved: Tensor):
            shard = shard_of.get(saved.untyped_storage().data_ptr())
            if shard is None:
                return saved
            return shard.detach(), saved.size(), saved.stride(), saved.storage_offset()

        def unpack(packed):
            if isinstance(packed, Tensor):
                return packed
            shard, *view = packed
            return gather_then_cast(shard).as_strided(*view)

        with saved_tensors_hooks(pack, unpack):
            named = dict(zip(self.names, weights, strict=True))
            return torch.func.functional_call(self.layer[0], named, (x,))


# ---------------------------------------------------------------------------- the contenders


def as_unfused(model: Model) -> Model:
    for name in ("embed", "norm", "head"):
        setattr(model, name, Unfused(getattr(model, name)))
    model.blocks = nn.ModuleList(Unfused(block) for block in model.blocks)
    return model


def as_fsdp(model: Model, ahead: bool = False) -> Model:
    """Shard by FSDP2, by block; `ahead`: with what it offers for overlap without streams."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=HALF, reduce_dtype=FLOAT)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    if ahead:
        model._set_unshard_async_op(True)
        modules = [model, *model.blocks]
        for this, following in itertools.pairwise(modules):
            this.set_modules_to_forward_prefetch([following])
    return model


def as_ours(model: Model, **options) -> Model:
    deepsp.shard_parameters(
        model, dtype=HALF, reduce_dtype=FLOAT, gradient_reduction="mean", **options
    )
    return model


def stepper(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Callable:
    def step(ids: Tensor) -> Tensor:
        logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        if optimizer is not None:
            optimizer.step()
        model.zero_grad()
        return loss.detach()

    return step


def contenders(shape: dict) -> dict[str, Callable]:
    torch.manual_seed(0)
    base = Model(shape["dim"], shape["layers"], shape["heads"], shape["vocab"])
    shard = {
        "unfused": as_unfused,
        FSDP: as_fsdp,
        AHEAD: lambda model: as_fsdp(model, ahead=True),
        "fused": lambda model: as_ours(model, prefetch_bytes=0),
        "fused, prefetch": as_ours,
    }
    # What a rank computes, with weights that are there, and no optimizer.
    steps = {COMPUTE: stepper(copy.deepcopy(base).to(HALF), None)}
    for name, make in shard.items():
        model = make(copy.deepcopy(base))
        steps[name] = stepper(model, torch.optim.AdamW(model.parameters(), lr=shape["lr"]))
    return steps


# ------------------------------------------------------------------------- task of the ranks


def measure_step(interface: str | None, shape: dict, repeats: int) -> dict[str, dict]:
    """Return, by contender, milliseconds of the slowest rank, losses of the whole batch, bytes on
    the wire and peak of memory of one step."""
    steps = contenders(shape)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    size = (shape["batch"], shape["seq"] + 1)
    batches = [torch.randint(shape["vocab"], size, generator=generator) for _ in range(3 + repeats)]
    losses: dict[str, list[float]] = {name: [] for name in steps}

    def step(name: str) -> None:
        losses[name].append(steps[name](batches[len(losses[name])]).item())

    calls = {name: lambda name=name: step(name) for name in steps}
    bench.timed(calls, 1, warmups=0)  # makes the optimizers' states
    results = {name: account(call, interface)[1] for name, call in calls.items()}
    ms = bench.timed(calls, repeats)
    for name in steps:
        mean = [bench.summed(loss) / dist.get_world_size() for loss in losses[name]]
        results[name] |= {"ms": ms[name], "losses": mean}
    return results
