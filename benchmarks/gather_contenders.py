"""What benchmarks/gather_cast.py compares on single tensors and lists of them, as its ranks run it.

A contender is a call that returns what it gathered (or reduced), so that it is alive while memory
is counted and can be checked, and is freed outside the clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import bench
import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepsp  # noqa: F401  (registers the ops)

# torch 2.13 renames them.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

FLOAT, HALF = torch.float32, torch.bfloat16
ALONE = "cast and copy alone"
FIRST = {"gather": "gather, then cast", "reduce": "upcast, then reduce-scatter"}

# 100 parameters: 70 biases and 30 small matrices, one in five of them gathered as float32.
BIASES = [(64,), (128,), (256,), (512,), (1024,), (2048,), (4096,)]
MATRICES = [(64, 64), (128, 64), (64, 256), (16, 512), (128, 128)] * 6
SHAPES = [shape for i in range(10) for shape in BIASES + MATRICES[3 * i : 3 * i + 3]]
MIXED_PARAMETERS = [(shape, FLOAT if i % 5 == 4 else HALF) for i, shape in enumerate(SHAPES)]


def single(mib: float) -> list:
    """Return one matrix of so many MiB in float32."""
    return [((int(mib * 2**18) // 1024, 1024), HALF)]


# ------------------------------------------------------------------ what a call has used


def sent_bytes(interface: str | None) -> int:
    """Return what an interface of this rank's namespace has sent, headers included; 0 without
    one."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, fields = line.partition(":")
        if name.strip() == interface:
            return int(fields.split()[8])
    return 0


def account(call: Callable[[], object], interface: str | None) -> tuple[object, dict]:
    """Return a call's result; the bytes that it put on the wire, and by how much memory grew at
    most."""
    before = []

    def counted() -> object:
        before.append(sent_bytes(interface))
        return call()

    result, mib = bench.growth(counted)
    dist.barrier()  # the peers have received
    wire, mib = bench.largest(sent_bytes(interface) - before[0], mib)
    return result, {"wire": int(wire), "peak": int(mib * 2**20)}


# ------------------------------------------------------------------------------ contenders


class Holder(nn.Module):
    def __init__(self, wholes: list[Tensor]):
        super().__init__()
        self.wholes = nn.ParameterList(wholes)


def fsdp(wholes: list[Tensor], dtypes: list[torch.dtype]) -> tuple[Callable, Callable]:
    """Return FSDP2's unshard and reshard: a group of parameters for each dtype."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    holders, where = {}, []
    for dtype in dict.fromkeys(dtypes):
        of_dtype = [w for w, d in zip(wholes, dtypes, strict=True) if d == dtype]
        holders[dtype] = Holder([w.clone() for w in of_dtype])
        fully_shard(holders[dtype], mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
    seen = dict.fromkeys(dtypes, 0)
    for dtype in dtypes:
        where.append((dtype, seen[dtype]))
        seen[dtype] += 1

    def unshard() -> list[Tensor]:
        for holder in holders.values():
            holder.unshard()
        return [holders[dtype].wholes[i] for dtype, i in where]

    def reshard() -> None:
        for holder in holders.values():
            holder.reshard()

    return unshard, reshard


def cast_and_copy(pairs: list) -> Callable[[], list]:
    """Return a gather's cast and a copy for every other rank, without these, on warm buffers."""
    casts = [torch.ones(s.shape, dtype=d) for s, d in pairs]
    copies = [[torch.ones_like(x) for x in casts] for _ in range(dist.get_world_size() - 1)]

    def run() -> list:
        for (shard, _), cast in zip(pairs, casts, strict=True):
            cast.copy_(shard)
        for of_rank in copies:
            for cast, copy in zip(casts, of_rank, strict=True):
                copy.copy_(cast)
        return []

    return run


def nothing() -> None: ...


def shards_of(parameters: list) -> tuple[list[Tensor], list[Tensor]]:
    """Return float32 parameters, the same on every rank, and this rank's shards of them."""
    generator = torch.Generator().manual_seed(0)
    wholes = [torch.randn(shape, generator=generator) for shape, _ in parameters]
    rank, size = dist.get_rank(), dist.get_world_size()
    return wholes, [w.chunk(size)[rank].clone() for w in wholes]


def gathers(parameters: list) -> tuple[dict[str, tuple[Callable, Callable]], Callable]:
    """Return contenders by name, each with what cleans up after it; and the check of a result."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD.group_name
    dtypes = [dtype for _, dtype in parameters]
    wholes, shards = shards_of(parameters)
    rows = [[s.size(0)] * size for s in shards]
    flat = [n for each in rows for n in each]

    def gathered(shard: Tensor) -> Tensor:
        whole = shard.new_empty(size * shard.size(0), *shard.shape[1:])
        all_gather(whole, shard)
        return whole

    pairs = list(zip(shards, dtypes, strict=True))
    calls = {
        FIRST["gather"]: (lambda: [gathered(s).to(d) for s, d in pairs], nothing),
        "cast, then gather": (lambda: [gathered(s.to(d)) for s, d in pairs], nothing),
        "FSDP2 unshard": fsdp(wholes, dtypes),
    }
    one, coalesced = torch.ops.deepsp.gather_cast, torch.ops.deepsp.gather_cast_coalesced
    calls["ours, one by one" if len(shards) > 1 else "ours"] = (
        lambda: [one(s, n, d, rank, group) for (s, d), n in zip(pairs, rows, strict=True)],
        nothing,
    )
    if len(shards) > 1:
        calls["ours, coalesced"] = (lambda: coalesced(shards, flat, dtypes, rank, group), nothing)
    calls[ALONE] = (cast_and_copy(pairs), nothing)
    calls["floor"] = (bench.bare_messages(sum(s.numel() * d.itemsize for s, d in pairs)), nothing)
    expected = [w.to(d) for w, d in zip(wholes, dtypes, strict=True)]

    def check(result: list[Tensor]) -> None:
        for got, want in zip(result, expected, strict=True):
            torch.testing.assert_close(got.detach(), want, rtol=0, atol=0)

    return calls, check


def reductions(parameters: list) -> tuple[dict[str, tuple[Callable, Callable]], Callable]:
    """Return the same for the way back: gradients in the gathered dtypes, summed in float32."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD.group_name
    of_ranks = []
    for p in range(size):
        generator = torch.Generator().manual_seed(p)
        drawn = [torch.randn(shape, generator=generator).to(d) for shape, d in parameters]
        # Only its own gradients are kept whole.
        if p == rank:
            grads = drawn
        of_ranks.append([g.chunk(size)[rank].float() for g in drawn])
    expected = [sum(parts) for parts in zip(*of_ranks, strict=True)]
    rows = [[g.size(0) // size] * size for g in grads]
    flat = [n for each in rows for n in each]

    def scattered(grad: Tensor) -> Tensor:
        shard = grad.new_empty(grad.size(0) // size, *grad.shape[1:])
        reduce_scatter(shard, grad)
        return shard

    def exchanged(grad: Tensor) -> Tensor:
        received = torch.empty_like(grad)
        dist.all_to_all_single(received, grad)
        return received.unflatten(0, (size, -1)).sum(0, dtype=FLOAT)

    calls = {
        FIRST["reduce"]: (lambda: [scattered(g.float()) for g in grads], nothing),
        "all-to-all, then sum": (lambda: [exchanged(g) for g in grads], nothing),
    }
    one = torch.ops.deepsp.reduce_scatter_cast
    coalesced = torch.ops.deepsp._reduce_scatter_cast_coalesced
    calls["ours, one by one" if len(grads) > 1 else "ours"] = (
        lambda: [one(g, n, FLOAT, rank, group) for g, n in zip(grads, rows, strict=True)],
        nothing,
    )
    if len(grads) > 1:
        calls["ours, coalesced"] = (
            lambda: coalesced(grads, flat, [FLOAT] * len(grads), rank, group),
            nothing,
        )
    calls["floor"] = (bench.bare_messages(sum(g.nbytes // size for g in grads)), nothing)

    def check(result: list[Tensor]) -> None:
        for got, want in zip(result, expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-5)  # another order of sums

    return calls, check


# ------------------------------------------------------------------------- tasks of the ranks


def calls_in_a_row(parameters: list, interface: str | None) -> int:
    """Return as many calls as make the time the link's: after a pause it lets 256 KiB pass at
    once."""
    if interface is None:
        return 1
    if len(parameters) > 1:
        return 4
    ((rows, columns), _), *_ = parameters
    return max(1, (16 << 20) // (4 * rows * columns))


@torch.no_grad()
def measure(
    interface: str | None, direction: str, parameters: list, seconds: float, repeats: tuple
) -> dict[str, dict]:
    """Return ms of the slowest rank, bytes on the wire and peak of memory, by contender."""
    contenders, check = (gathers if direction == "gather" else reductions)(parameters)
    results = {}
    for name, (call, after) in contenders.items():
        result, results[name] = account(call, interface)
        if name not in ("floor", ALONE):
            check(result)
        del result
        after()
    in_a_row = calls_in_a_row(parameters, interface)

    def clock(contender: tuple) -> float:
        """Return the mean seconds of the calls, without what cleans up after each."""
        call, after = contender
        took = 0.0
        dist.barrier()
        for _ in range(in_a_row):
            start = time.perf_counter()
            result = call()
            took += time.perf_counter() - start
            del result
            after()
        return took / in_a_row

    ms = bench.timed(contenders, repeats[1], seconds=seconds, least=repeats[0], clock=clock)
    for name in contenders:
        results[name]["ms"] = ms[name]
    return results
