"""A schedule by hand, for tests of the dry run: shards and syncs with their plainest hooks."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from deepsp import collectives
from deepsp.ranks.groups import member_of, on_all_ranks
from deepsp.schedule.flow import Flow, current
from deepsp.schedule.placement import PARTIAL, REPLICATE, Partial, Replicate, Shard


@dataclass(frozen=True, eq=False)
class HeldPart:
    """A parameter of several parts, each split like tensor_split in units."""

    axis: int
    parts: tuple[int, ...]
    unit: int = 1

    def pieces(self, rank, size):
        found, begin = [], 0
        for part in self.parts:
            counts = [len(c) for c in torch.arange(part // self.unit).tensor_split(size)]
            found.append((begin + sum(counts[:rank]) * self.unit, counts[rank] * self.unit))
            begin += part
        return found

    def part_sizes(self, rank):
        return [n for _, n in self.pieces(rank, member_of(None)[1])]

    def take(self, whole, rank, size):
        pieces = [whole.narrow(self.axis, at, n) for at, n in self.pieces(rank, size)]
        return torch.cat(pieces, self.axis)


@dataclass(eq=False)
class Sync:
    module_name: str
    mode: str
    op: str
    axis: int | None = None
    grad: str | None = None

    @property
    def where(self):
        return f"{self.module_name} ({self.mode} {self.op})"

    def result(self, placement, ndim):
        def wrong(what):
            raise ValueError(f"{self.module_name} ({self.mode} {self.op}): {placement}: {what}")

        axis = None if self.axis is None else self.axis % ndim
        if self.mode == "bwd_post":
            return placement if isinstance(placement, Replicate) else wrong("Replicate expected")
        if self.op == "all_gather":
            if not isinstance(placement, Shard) or placement.axis != axis:
                wrong(f"sharded along axis {axis} is right")
            return REPLICATE
        if self.op == "scatter":
            return (
                Shard(axis, self)
                if isinstance(placement, Replicate)
                else wrong("Replicate expected")
            )
        if not isinstance(placement, Partial):
            wrong("partial is right")
        return Shard(axis, self) if self.op == "reduce_scatter" else REPLICATE

    def run(self, x, grad):
        grad = self.grad or grad
        if self.mode == "bwd_post":
            return collectives.replicate(x)
        if self.op == "all_gather":
            sizes = [n for (n,) in on_all_ranks([x.size(self.axis)], None, x.device)]
            return collectives.all_gather(x, self.axis, None, sizes, grad=grad)
        if self.op == "reduce_scatter":
            return collectives.reduce_scatter(x, self.axis)
        if self.op == "all_reduce":
            return collectives.all_reduce(x, grad=grad)
        return collectives.scatter(x, self.axis, grad=grad)


class Placed:
    """A copy of ``model`` with shards and syncs: ``shards`` by parameter name, each an axis or
    (axis, parts) or a HeldPart."""

    def __init__(self, model, shards=None, syncs=(), outputs="full"):
        self.rank, self.size, _ = self.member = member_of(None)
        self.whole = model
        self.model = copy.deepcopy(model)
        self.outputs = outputs
        self.shards = {}
        self.placements = {}
        for name, how in (shards or {}).items():
            parameter = self.model.get_parameter(name)
            if isinstance(how, int):
                how = HeldPart(how, (parameter.size(how),))
            self.shards[name] = how
            parameter.data = how.take(parameter.data, self.rank, self.size).clone()
            self.placements[id(parameter)] = Shard(how.axis, how)
            module = self.model.get_submodule(name.rpartition(".")[0])
            if isinstance(module, nn.Linear):
                module.out_features, module.in_features = module.weight.shape
            if hasattr(module, "nf"):
                module.nf = module.weight.size(1)
        self.findings = None
        for sync in syncs:
            module = self.model.get_submodule(sync.module_name)
            if sync.mode == "fwd_post":
                module.register_forward_hook(lambda m, args, out, s=sync: self._post(s, out))
            else:
                module.register_forward_pre_hook(
                    lambda m, args, s=sync: (self._at(s, args[0]), *args[1:])
                )

    def _post(self, sync, out):
        if isinstance(out, tuple):
            return (self._at(sync, out[0]), *out[1:])
        return self._at(sync, out)

    def _at(self, sync, x):
        flow = current()
        if flow is not None:
            return flow.sync(sync, x, lambda: sync.run(x, "replicated"))
        return sync.run(x, self.findings.grads.get(sync, "replicated"))

    def check(self, *args, **kwargs):
        flow = Flow(self.model, self.placements, self.member, self.outputs)
        self.findings = flow.run(args, kwargs)
        return self.findings

    def gradients(self):
        """By parameter name, as they are after the sums that were found necessary."""
        found = {}
        for name, p in self.model.named_parameters():
            if p.grad is not None and name in self.findings.partial:
                dist.all_reduce(p.grad)
            found[name] = p.grad
        return found

    def compare(self, reference):
        """This rank's gradients with those of the model in one process."""
        expected = dict(reference.named_parameters())
        for name, grad in self.gradients().items():
            whole = expected[name].grad
            if name in self.shards and whole is not None:
                whole = self.shards[name].take(whole, self.rank, self.size)
            if grad is None or whole is None:
                assert grad is None or not grad.any(), name
                assert whole is None or not whole.any(), name
                continue
            torch.testing.assert_close(grad, whole, msg=lambda m, n=name: f"{n}: {m}")


def partial_of(placed):
    return placed.findings.partial


__all__ = ["PARTIAL", "REPLICATE", "HeldPart", "Placed", "Sync", "partial_of"]
