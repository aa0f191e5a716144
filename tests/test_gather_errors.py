"""Wrong calls of sharded weights' ops: ValueError on every rank, before anything is sent."""

import os

import pytest
import torch
import torch.distributed as dist
from calls import all_raise
from harness import on_ranks

op = torch.ops.deepsp
f32, bf16, e5m2 = torch.float32, torch.bfloat16, torch.float8_e5m2


def _here():
    return dist.get_rank(), dist.group.WORLD.group_name


def _still_usable():
    rank, group = _here()
    size = dist.get_world_size()
    full = op.gather_cast(torch.full((2, 3), float(rank)), [2] * size, bf16, rank, group)
    assert torch.equal(full[:, 0].float(), torch.arange(size).repeat_interleave(2).float())


def _gather_errors():
    rank, group = _here()
    x = torch.zeros(2, 3)
    ok = ([2, 2], f32, rank, group)

    def cast(x=x, sizes=(2, 2), dtype=f32, rank=rank, group=group, **sums):
        return op.gather_cast(x, list(sizes), dtype, rank, group, **sums)

    def many(shards, sizes=(2, 2, 2, 2), dtypes=(f32, f32), rank=rank, group=group):
        return op.gather_cast_coalesced(shards, list(sizes), list(dtypes), rank, group)

    other = torch.zeros(3, 3)
    all_raise([
        (lambda: cast(dtype=torch.int32),
         "dtype to be float64, float32, bfloat16 or float16, got int32"),
        (lambda: cast(dtype=torch.complex64), "dtype to be float64.*, got complex64"),
        (lambda: cast(dtype=e5m2), "dtype .*, got float8_e5m2; .*gather_cast_float8"),
        (lambda: cast(reduce_dtype=torch.int64), "reduce_dtype to be float64.*, got int64"),
        (lambda: cast(reduce_dtype=e5m2), "reduce_dtype .*, got float8_e5m2"),
        (lambda: cast(backend_sums=torch.int64), "backend_sums to be float64.*, got int64"),
        (lambda: cast(reduce_dtype=f32, backend_sums=f32),
         "reduce_dtype to be None with backend_sums=float32, .*, got float32"),
        (lambda: cast(rank=2), "0 <= rank < 2, .*, got 2"),
        (lambda: cast(rank=-1), "0 <= rank < 2, .*, got -1"),
        (lambda: cast(rank=1 - rank),
         f"rank to be {rank}, the rank of this process.*, got {1 - rank}"),
        (lambda: cast(group="nobody"), "group_name to be the name of a process gr.*, got 'nobody'"),
        (lambda: cast(sizes=()), "sizes to have one entry .* 1 shards, got 0"),
        (lambda: cast(sizes=(2,), rank=0), "one entry for each of the 2 ranks .*, got 1"),
        (lambda: cast(sizes=(2, 2, 2)), "one entry for each of the 2 ranks .*, got 3"),
        (lambda: cast(sizes=(3, 3)), rf"shard to have 3 rows, which is sizes\[{rank}\].*, got 2"),
        (lambda: cast(sizes=(2, -1) if rank == 0 else (-1, 2)), r"sizes\[\d\] >= 0, got -1"),
        (lambda: cast(x=torch.tensor(1.0)),
         r"shard to have at least one dimension.*view it as \[1\]"),
        (lambda: many([x]), "dtypes to have one entry .* 1 shards, got 2"),
        (lambda: many([x, x], dtypes=[f32]), "dtypes to have one entry .* 2 shards, got 1"),
        (lambda: many([x, x], dtypes=[f32, e5m2]), r"dtypes\[1\] to be .*, got float8_e5m2"),
        (lambda: many([x, x], sizes=(2, 2, 2)), "sizes to have one entry .* 2 shards, got 3"),
        (lambda: many([x, x], sizes=(2,) * 6), "one entry for each of the 2 ranks .*, got 3"),
        (lambda: many([x, other]),
         rf"shards\[1\] to have 2 rows, which is sizes\[{2 + rank}\].*, got 3"),
        (lambda: many([x, torch.tensor(1.0)]), r"shards\[1\] to have at least one dimension"),
        (lambda: many([x, x.to("meta")]),
         r"shards\[1\] to be on the device of .*\(cpu\), got meta"),
        (lambda: op.gather_cast_float8(x, [2, 2], bf16, rank, group),
         "dtype to be float8.*, got bfloat16"),
        (lambda: op.gather_cast_float8(x, [3, 3], e5m2, rank, group),
         r"to have 3 rows, which is sizes.*, got 2"),
        (lambda: op.gather_through_float8([x], [2, 2], f32, f32, rank, group),
         "dtype to be float8.*, got float32"),
        (lambda: op.gather_through_float8([x], [2, 2], e5m2, e5m2, rank, group),
         "dtype.* to be float64.*, got float8"),
        (lambda: op.reduce_scatter_cast(x, *ok),
         "input to have 4 rows, the sum of its sizes, got 2"),
        (lambda: op.reduce_scatter_cast(x.int(), [1, 1], *ok[1:]),
         "input to be float64.*, got int32"),
        (lambda: op.reduce_scatter_cast(x, [1, 1], torch.int8, *ok[2:]),
         "to be float64.*, got int8"),
        (lambda: op.reduce_scatter_cast(x, [2], f32, 0, group),
         "one entry for each of the 2 ranks .*, got 1"),
        (lambda: op.reduce_scatter_cast(x, [3, -1], *ok[1:]), r"sizes\[1\] >= 0, got -1"),
        (lambda: op._reduce_scatter_cast_coalesced([], [1, 1], [], rank, group),
         "inputs to have at least one tensor, got an empty|non-empty"),
        (lambda: op._reduce_scatter_cast_coalesced([x, x], [1, 1] * 2, [f32], rank, group),
         "dtypes to have one entry .* 2 inputs, got 1"),
        (lambda: op._reduce_scatter_cast_coalesced(
            [x, x[0, 0]], [1, 1] * 2, [f32] * 2, rank, group),
         r"inputs\[1\] to have at least one dimension"),
        (lambda: op.reduce_scatter_cast(x, [1, 1], f32, rank, group, reduce_dtype=torch.bool),
         "reduce_dtype to be .*, got bool"),
        (lambda: op.reduce_scatter_cast(x, [1, 1], f32, rank, group, backend_sums=torch.bool),
         "backend_sums to be .*, got bool"),
    ])  # fmt: skip
    for call in (  # an empty list is PyTorch's own affair
        lambda: many([], (), ()),
        lambda: op._gather_cast_float8_coalesced([], [2, 2], e5m2, rank, group),
    ):
        with pytest.raises((ValueError, NotImplementedError), match="empty"):
            call()
    _still_usable()


def test_gather():
    on_ranks(2, _gather_errors)


_KINDS = {
    "int32": lambda: torch.ones(2, 2, dtype=torch.int32),
    "bool": lambda: torch.ones(2, 2).bool(),
    "complex64": lambda: torch.ones(2, 2).cfloat(),
    "float8_e4m3fn": lambda: torch.ones(2, 2).to(torch.float8_e4m3fn),
    "qint8": lambda: torch.quantize_per_tensor(torch.ones(2, 2), 0.1, 0, torch.qint8),
    "Sparse": lambda: torch.eye(2).to_sparse(),
    "SparseCsr": lambda: torch.eye(2).to_sparse_csr(),
}


def _kind(name):
    rank, group = _here()
    x, y = _KINDS[name](), torch.zeros(2, 2)
    where = (rank, group)
    sizes, two = [2, 2], [2, 2, 2, 2]
    all_raise([
        (lambda: op.gather_cast(x, sizes, f32, *where), f"expected shard to be .*{name}"),
        (lambda: op.gather_cast_start(x, sizes, f32, *where), f"expected shard to be .*{name}"),
        (lambda: op.gather_cast_coalesced([y, x], two, [f32] * 2, *where),
         rf"expected shards\[1\] to be .*{name}"),
        (lambda: op.gather_cast_float8(x, sizes, e5m2, *where), f"expected .* to be .*{name}"),
        (lambda: op.gather_through_float8([y, x], two, e5m2, f32, *where),
         rf"expected shards\[1\] to be .*{name}"),
        (lambda: op.reduce_scatter_cast(x, [1, 1], f32, *where), f"expected input to be .*{name}"),
        (lambda: op._reduce_scatter_cast_coalesced([y, x], [1] * 4, [f32] * 2, *where),
         rf"expected inputs\[1\] to be .*{name}"),
    ])  # fmt: skip
    _still_usable()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", _KINDS)
def test_kinds_of_tensors(name):
    on_ranks(2, _kind, name)


def _wait_errors():
    """What a wait is told wrongly costs nothing: the right one goes through after it."""
    rank, group = _here()
    size = dist.get_world_size()
    x, sizes, where = torch.full((2, 2, 3), float(rank)), [2] * size, (rank, group)
    buffer = op.gather_cast_start(x, sizes, f32, *where)
    wait = op.gather_cast_wait
    many = op._gather_cast_coalesced_wait
    cases = [
        (
            lambda: wait(buffer, sizes, [2, 4], f32, *where),
            r"the buffer .* float32 of shape \[\d+\], got .*; pass",
        ),
        (
            lambda: wait(buffer, sizes, [2], f32, *where),
            r"the buffer .* float32 of shape \[\d+\], got float32 of shape",
        ),
        (
            lambda: wait(buffer, sizes, [2, 3], bf16, *where),
            "the buffer .* bfloat16 of shape.*, got float32",
        ),
        (
            lambda: wait(buffer, sizes, [2, 3], torch.int32, *where),
            "dtypes?.* to be float64.*, got int32",
        ),
        (
            lambda: wait(buffer, [3] * size, [2, 3], f32, *where),
            r"the buffer .* float32 of shape \[\d+\], got float32 of shape",
        ),
        (lambda: wait(buffer, [], [2, 3], f32, *where), "sizes to have one entry .*, got 0"),
        (
            lambda: wait(buffer, sizes, [2, 3], f32, size, group),
            f"0 <= rank < {size}, .*, got {size}",
        ),
        (lambda: wait(buffer, sizes, [2, 3], f32, rank, "nobody"), "'nobody'"),
        (lambda: wait(buffer.view(2, -1), sizes, [2, 3], f32, *where), "expected the buffer"),
        (lambda: wait(buffer, sizes, [-2, -3], f32, *where), "row_shapes? >= 0, got -2"),
        (
            lambda: many(buffer, sizes, [2, 3], [1], [f32], *where),
            "row_shapes to have 1 entries, .*, got 2",
        ),
        (
            lambda: many(buffer, sizes, [2, 3], [-1, 3], [f32] * 2, *where),
            r"row_dims\[0\] .*, got -1|expected sizes|in sizes",
        ),
        (
            lambda: many(buffer, sizes, [2, 3], [2], [], *where),
            "dtypes to have one entry .* 1 .*, got 0",
        ),
    ]
    all_raise(cases)
    full = wait(buffer, sizes, [2, 3], f32, *where)
    assert torch.equal(full[::2, 0, 0], torch.arange(float(size)))
    all_raise([(lambda: wait(buffer, sizes, [2, 3], f32, *where), "waited for already")])
    buffer = op._reduce_scatter_cast_coalesced_start([full], sizes, *where)
    wait = op._reduce_scatter_cast_coalesced_wait
    rest = (None, *where)
    all_raise([
        (lambda: wait(buffer, sizes, [2, 4], [2], [f32], [f32], *rest),
         "the buffer .*, got float32"),
        (lambda: wait(buffer, sizes, [2, 3], [2], [bf16], [f32], *rest),
         "the buffer .*, got float32"),
        (lambda: wait(buffer, sizes, [2, 3], [2], [f32], [f32, f32], *rest),
         "dtypes to have one entry .*, got 2"),
        (lambda: wait(buffer, sizes, [2, 3], [2], [f32], [torch.int32], *rest), ", got int32"),
        (lambda: wait(buffer, sizes, [2, 3], [2], [f32], [f32], torch.int32, *where),
         ", got int32"),
        (lambda: wait(buffer, sizes, [-2, -3], [2], [f32], [f32], *rest),
         "row_shapes? >= 0, got -2"),
    ])  # fmt: skip
    (sums,) = wait(buffer, sizes, [2, 3], [2], [f32], [f32], *rest)
    assert torch.equal(sums, x * size)
    with pytest.raises(ValueError, match="waited for already"):
        wait(buffer, sizes, [2, 3], [2], [f32], [f32], *rest)
    # One of the backend's sums and one of deepsp's.
    rest = ([2, 3], [2], [f32], [f32], *rest)
    for sums, others in (({"backend_sums": f32}, {}), ({}, {"backend_sums": f32})):
        buffer = op._reduce_scatter_cast_coalesced_start([full], sizes, *where, **sums)
        all_raise([(lambda: wait(buffer, sizes, *rest, **others), "the start returned.*strides")])  # noqa: B023
        assert torch.equal(wait(buffer, sizes, *rest, **sums)[0], x * size)
    _still_usable()


@pytest.mark.parametrize("ranks", [1, 2])
def test_waits(ranks):
    on_ranks(ranks, _wait_errors)


def _disagreements():
    rank, group = _here()
    last = rank == dist.get_world_size() - 1
    x = torch.zeros(2, 6)
    ok = [2, 2, 2]

    def gather(x=x, sizes=ok, dtype=f32):
        return op.gather_cast(x, sizes, dtype, rank, group)

    wide = torch.zeros(2 + last, 6)
    whole = torch.zeros(6, 4)
    all_raise([
        (lambda: gather(x.double() if last else x), "ranks 0 and 1 .*float32.*rank 2 .*float64"),
        (lambda: gather(dtype=bf16 if last else f32), "ranks 0 and 1 .*float32.*rank 2 .*bfloat16"),
        (lambda: gather(x.view(2, 3, 2) if last else x), r"\[6\].*rank 2 .*\[3, 2\]"),
        (lambda: gather(wide, [2, 2, 3] if last else ok), r"\[2, 2, 2\].*\[2, 2, 3\]"),
        (lambda: op.gather_cast_coalesced(
            [x] * (2 if last else 1), ok * (2 if last else 1), [f32] * (2 if last else 1),
            rank, group), r"ranks 0 and 1 pass nothing, rank 2 passes shards\[1\]"),
        (lambda: op.reduce_scatter_cast(whole.to(bf16 if last else f32), ok, f32, rank, group),
         "ranks 0 and 1 .*float32.*rank 2 .*bfloat16"),
        (lambda: op.reduce_scatter_cast(
            whole, ok, f32, rank, group, backend_sums=f32 if last else bf16),
         "ranks 0 and 1 pass backend_sums bfloat16, rank 2 passes backend_sums float32"),
        (lambda: gather() if last else op.reduce_scatter_cast(whole, ok, f32, rank, group),
         "disagree"),
        (lambda: op.gather_cast_float8(
            x, ok, e5m2 if last else torch.float8_e4m3fn, rank, group), "e4m3fn.*e5m2"),
        (lambda: op.gather_through_float8(
            [x.view(2, 3, 2) if last else x], ok, e5m2, f32, rank, group), r"\[6\].*\[3, 2\]"),
    ])  # fmt: skip
    _still_usable()


def _debugging():
    os.environ["DEEPSP_DEBUG"] = "1"
    try:
        _disagreements()
    finally:
        del os.environ["DEEPSP_DEBUG"]


def test_ranks_that_disagree():
    on_ranks(3, _debugging)
