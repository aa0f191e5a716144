"""Tiled modules on real ranks with different numbers of tokens, some without any, and the wrappers
that reduce gradients; against one process, untiled."""

import copy
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import on_ranks
from models import MLP, Experts, leaf, make_lm
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from under_deepspeed import launch_deepspeed

import deepsp
from deepsp.integrations.transformers import register
from deepsp.memory.tiling.weights import Weights
from deepsp.weights.parameters import sharded_parameters

f64 = torch.float64


def _offloaded(function, *args):
    """What transformers' offload=True does, which wants pinned memory: a GPU."""
    with save_on_cpu():
        return checkpoint(function, *args, use_reentrant=False)


def _trained(family, lens, offloads=False, **options):
    """transformers' models through deepsp's attention, with their MLPs and heads tiled."""
    register()
    model, reference = make_lm(family, "deepsp", **options), make_lm(family, **options)
    for m in (model, reference) if family == "Mixtral" else ():
        m.set_experts_implementation("eager")
    deepsp.tile_(model, tokens=2)
    deepsp.tile_(model, "lm_head", tokens=3)
    if offloads:
        model.activation_checkpointing_enable({"use_reentrant": False})
        for layer in model.model.layers:
            layer._gradient_checkpointing_func = _offloaded
    ids = torch.randint(0, 64, (2, sum(lens)), generator=torch.Generator().manual_seed(0))
    expected = F.cross_entropy(reference(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    expected.backward()
    rank = dist.get_rank()
    labels = F.pad(ids[:, 1:], (0, 1), value=-100).split(lens, 1)[rank]
    positions = torch.arange(sum(lens))[None].split(lens, 1)[rank]
    logits = model(ids.split(lens, 1)[rank], position_ids=positions).logits
    loss = deepsp.cross_entropy(logits, labels)
    loss.backward()
    deepsp.sync_gradients(model)
    close = {"rtol": 1e-6, "atol": 1e-8} if family == "Mixtral" else {"rtol": 1e-9, "atol": 1e-11}
    torch.testing.assert_close(loss, expected, **close)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, **close)


LENS = {1: [13], 2: [10, 3], 3: [1, 7, 5]}


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Mixtral"])
def test_models_of_transformers(family, ranks):
    on_ranks(ranks, _trained, family, LENS[ranks])


@pytest.mark.parametrize("ranks", [2, 3])
def test_offloaded_checkpoints(ranks):
    on_ranks(ranks, _trained, "Llama", LENS[ranks], True)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.mlp, self.experts = nn.Linear(6, 6), MLP(), Experts()

    def forward(self, x):
        return self.experts(self.mlp(self.before(x)))


def _ddp(**options):
    return lambda model: DistributedDataParallel(model, **options)


def _whole(model):
    for child in (model.mlp, model.experts):
        fully_shard(child)
    return fully_shard(model)


def _children(model):
    for child in (model.mlp.up, model.mlp.down, *model.experts.experts):
        fully_shard(child)
    return fully_shard(model)


def _left_in_memory(model):
    fully_shard(model.mlp.down)
    return fully_shard(model, reshard_after_forward=False)


WRAPS = {
    "ddp": _ddp(),
    "ddp, views": _ddp(gradient_as_bucket_view=True),
    "ddp, unused": _ddp(find_unused_parameters=True),
    "ddp, static": _ddp(static_graph=True),
    "fsdp": _whole,
    "fsdp, parent": fully_shard,
    "fsdp, children": _children,
    "fsdp, one child": _left_in_memory,
}


def _wrapped(wrap):
    """Three steps; the ranks have different numbers of tokens, one of them none."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    reference = Layer().to(f64)
    model = copy.deepcopy(reference)
    deepsp.tile(model.mlp, tokens=2)
    deepsp.tile(model.experts, tokens=3)
    wrapped = WRAPS[wrap](model)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (wrapped, reference)]
    for step in range(3):
        x = [leaf(1, n, 6, seed=step) for n in (9, 0, 4)[:size]]
        (sum((reference(one) ** 2).sum() for one in x) / size).backward()
        (wrapped(x[rank]) ** 2).sum().backward()
        for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
            found = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
            expected = torch.zeros_like(q) if q.grad is None else q.grad
            torch.testing.assert_close(found, expected, msg=lambda m, n=name: n + m)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def _all_wrapped(wraps):
    for wrap in wraps:
        _wrapped(wrap)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_wrapped(kind, ranks):
    on_ranks(ranks, _all_wrapped, [name for name in WRAPS if name.startswith(kind)])


def _freed():
    """What is gathered for the tiles isn't kept until backward."""
    torch.manual_seed(0)
    x = leaf(1, 5, 6)
    model = MLP().to(f64)
    for child in (model.up, model.down, model):
        fully_shard(child)
    y = deepsp.tile(model, tokens=2)(x)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    y.sum().backward()
    model = deepsp.shard_parameters(nn.Sequential(MLP().to(f64)), dtype=f64, reduce_dtype=f64)
    deepsp.tile(model[0], tokens=2)
    storages = []
    gathered = Weights.__init__

    def spy(self, *args):
        gathered(self, *args)
        storages.extend(StorageWeakRef(t.untyped_storage()) for t in self.tensors)

    with mock.patch.object(Weights, "__init__", spy):
        y = model(x)
    assert len(storages) == 3 and all(s.expired() for s in storages)
    y.sum().backward()


def test_gathered_weights_are_freed():
    on_ranks(2, _freed)


class _Reduces(nn.Module):
    def forward(self, x):
        return deepsp.collectives.all_reduce(x, grad="replicated")


def _communicates():
    module = deepsp.tile(_Reduces(), tokens=2)
    for tokens in (5, 0):
        with pytest.raises(ValueError, match="communicates"):
            module(leaf(1, tokens, 6))


def test_communication_is_refused():
    on_ranks(2, _communicates)


class Gathers(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "deepsp":
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def _sharded(first):
    """deepsp.shard_parameters, before or after tile: as many gathers as without tiles."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    reference = nn.Sequential(MLP(), nn.Linear(6, 7)).to(f64)
    model = copy.deepcopy(reference)
    sharded = {"dtype": f64, "reduce_dtype": f64, "prefetch_bytes": 0}
    if first == "shard":
        deepsp.shard_parameters(model, **sharded)
    for child in model:
        deepsp.tile(child, tokens=2)
    if first == "tile":
        deepsp.shard_parameters(model, **sharded)
    counts = set()
    for step in range(3):
        x = [leaf(1, n, 6, seed=step) for n in (9, 0, 4)[:size]]
        reference.zero_grad()
        model.zero_grad()
        sum((reference(one) ** 2).sum() for one in x).backward()
        with Gathers() as gathers:
            y = model(x[rank])
        (y**2).sum().backward()
        counts.add(sum("gather_cast" in name and "start" in name for name in gathers.found))
        for name, p, shards, index in sharded_parameters(model):
            expected = shards.rows_of(index, reference.get_parameter(name).grad)
            torch.testing.assert_close(p.grad.as_subclass(torch.Tensor), expected)
    assert counts == {5}, counts


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_sharded_weights(ranks):
    for first in ("shard", "tile"):
        on_ranks(ranks, _sharded, first)


def _zero(stage):
    deepspeed = launch_deepspeed()
    torch.manual_seed(0)
    reference = Layer()
    model = copy.deepcopy(reference)
    deepsp.tile(model.mlp, tokens=2)
    deepsp.tile(model.experts, tokens=3)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": 10**9,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0.0,
    }
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    optimizer = torch.optim.SGD(reference.parameters(), 0.1)
    for step in range(3):
        x = [leaf(1, n, 6, seed=step, dtype=torch.float32) for n in (9, 4)]
        (sum((reference(one) ** 2).sum() for one in x) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.backward((engine(x[dist.get_rank()]) ** 2).sum())
        engine.step()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("stage", [1, 2])
def test_zero(stage):
    on_ranks(2, _zero, stage, apart="deepspeed")
