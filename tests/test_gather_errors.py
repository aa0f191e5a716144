"""Wrong calls of sharded weights' ops: ValueError on every rank, before anything is sent."""

import os

import pytest
import torch
import torch.distributed as dist
from harness import on_ranks
from test_errors import _all_raise

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

    def cast(x=x, sizes=(2, 2), dtype=f32, rank=rank, group=group, reduce_dtype=None):
        return op.gather_cast(x, list(sizes), dtype, rank, group, reduce_dtype=reduce_dtype)

    def many(shards, sizes=(2, 2, 2, 2), dtypes=(f32, f32), rank=rank, group=group):
        return op.gather_cast_coalesced(shards, list(sizes), list(dtypes), rank, group)

    other = torch.zeros(3, 3)
    _all_raise([
        (lambda: cast(dtype=torch.int32), "dtype is Int; float64, float32, bfloat16 or float16"),
        (lambda: cast(dtype=torch.complex64), "dtype is ComplexFloat; float64"),
        (lambda: cast(dtype=e5m2), "dtype is Float8_e5m2.*gather_cast_float8"),
        (lambda: cast(reduce_dtype=torch.int64), "reduce_dtype is Long; float64"),
        (lambda: cast(reduce_dtype=e5m2), "reduce_dtype is Float8_e5m2"),
        (lambda: cast(rank=2), "rank is 2.*0 to 1 is right"),
        (lambda: cast(rank=-1), "rank is -1.*0 to 1 is right"),
        (lambda: cast(rank=1 - rank), f"rank is {1 - rank}, but this process is rank {rank}"),
        (lambda: cast(group="nobody"), "no process group is named 'nobody'"),
        (lambda: cast(sizes=()), "sizes has 0 entries for 1 shard"),
        (lambda: cast(sizes=(2,), rank=0), "has 1 entries, but the group.*2 ranks"),
        (lambda: cast(sizes=(2, 2, 2)), "has 3 entries, but the group.*2 ranks"),
        (lambda: cast(sizes=(3, 3)), rf"shard has 2 rows, but sizes\[{rank}\].* is 3"),
        (lambda: cast(sizes=(2, -1) if rank == 0 else (-1, 2)), r"sizes\[\d\] is -1.*negative"),
        (lambda: cast(x=torch.tensor(1.0)), r"shard has no dimensions.*view it as \[1\]"),
        (lambda: many([x]), "dtypes has 2 entries for 1 shards"),
        (lambda: many([x, x], dtypes=[f32]), "dtypes has 1 entries for 2 shards"),
        (lambda: many([x, x], dtypes=[f32, e5m2]), r"dtypes\[1\] is Float8_e5m2"),
        (lambda: many([x, x], sizes=(2, 2, 2)), "sizes has 3 entries for 2 shards"),
        (lambda: many([x, x], sizes=(2,) * 6), "has 3 entries, but the group.*2 ranks"),
        (lambda: many([x, other]), rf"shards\[1\] has 3 rows, but sizes\[{2 + rank}\].* is 2"),
        (lambda: many([x, torch.tensor(1.0)]), r"shards\[1\] has no dimensions"),
        (lambda: many([x, x.to("meta")]), r"shards\[1\] is on meta, but the first is on cpu"),
        (lambda: op.gather_cast_float8(x, [2, 2], bf16, rank, group), "dtype is BFloat16; float8"),
        (lambda: op.gather_cast_float8(x, [3, 3], e5m2, rank, group), "has 2 rows, but sizes"),
        (lambda: op.gather_through_float8([x], [2, 2], f32, f32, rank, group), "dtype is Float;"),
        (lambda: op.gather_through_float8([x], [2, 2], e5m2, e5m2, rank, group), "dtype is Float8"),
        (lambda: op.reduce_scatter_cast(x, *ok), r"input has 2 rows, but its sizes add up to 4"),
        (lambda: op.reduce_scatter_cast(x.int(), [1, 1], *ok[1:]), "input is Int; float64"),
        (lambda: op.reduce_scatter_cast(x, [1, 1], torch.int8, *ok[2:]), "is Char; float64"),
        (lambda: op.reduce_scatter_cast(x, [2], f32, 0, group), "has 1 entries, but the group"),
        (lambda: op.reduce_scatter_cast(x, [3, -1], *ok[1:]), r"sizes\[1\] is -1"),
        (lambda: op.reduce_scatter_cast_coalesced([], [1, 1], [], rank, group), "inputs? is empty"),
        (lambda: op.reduce_scatter_cast_coalesced([x, x], [1, 1] * 2, [f32], rank, group),
         "dtypes has 1 entries for 2 inputs"),
        (lambda: op.reduce_scatter_cast_coalesced([x, x[0, 0]], [1, 1] * 2, [f32] * 2, rank, group),
         r"inputs\[1\] has no dimensions"),
        (lambda: op.reduce_scatter_cast(x, [1, 1], f32, rank, group, reduce_dtype=torch.bool),
         "reduce_dtype is Bool"),
    ])  # fmt: skip
    for call in (  # an empty list is PyTorch's own affair
        lambda: many([], (), ()),
        lambda: op.gather_cast_float8_coalesced([], [2, 2], e5m2, rank, group),
    ):
        with pytest.raises((ValueError, NotImplementedError), match="empty"):
            call()
    _still_usable()


def test_gather():
    on_ranks(2, _gather_errors)


_KINDS = {
    "Int": lambda: torch.ones(2, 2, dtype=torch.int32),
    "Bool": lambda: torch.ones(2, 2).bool(),
    "ComplexFloat": lambda: torch.ones(2, 2).cfloat(),
    "Float8_e4m3fn": lambda: torch.ones(2, 2).to(torch.float8_e4m3fn),
    "QInt8": lambda: torch.quantize_per_tensor(torch.ones(2, 2), 0.1, 0, torch.qint8),
    "Sparse": lambda: torch.eye(2).to_sparse(),
    "SparseCsr": lambda: torch.eye(2).to_sparse_csr(),
}


def _kind(name):
    rank, group = _here()
    x, y = _KINDS[name](), torch.zeros(2, 2)
    where = (rank, group)
    sizes, two = [2, 2], [2, 2, 2, 2]
    _all_raise([
        (lambda: op.gather_cast(x, sizes, f32, *where), f"shard is {name};.*is right"),
        (lambda: op.gather_cast_start(x, sizes, f32, *where), f"shard is {name};.*is right"),
        (lambda: op.gather_cast_coalesced([y, x], two, [f32] * 2, *where),
         rf"shards\[1\] is {name};.*is right"),
        (lambda: op.gather_cast_float8(x, sizes, e5m2, *where), rf"is {name};.*is right"),
        (lambda: op.gather_through_float8([y, x], two, e5m2, f32, *where),
         rf"shards\[1\] is {name};.*is right"),
        (lambda: op.reduce_scatter_cast(x, [1, 1], f32, *where), f"input is {name};.*is right"),
        (lambda: op.reduce_scatter_cast_coalesced([y, x], [1] * 4, [f32] * 2, *where),
         rf"inputs\[1\] is {name};.*is right"),
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
    many = op.gather_cast_coalesced_wait
    cases = [
        (lambda: wait(buffer, sizes, [2, 4], f32, *where), "the buffer is Float of shape.*pass"),
        (lambda: wait(buffer, sizes, [2], f32, *where), "the buffer is Float of shape"),
        (lambda: wait(buffer, sizes, [2, 3], bf16, *where), "the buffer is Float .*BFloat16"),
        (lambda: wait(buffer, sizes, [2, 3], torch.int32, *where), "dtypes?.* is Int"),
        (lambda: wait(buffer, [3] * size, [2, 3], f32, *where), "the buffer is Float of shape"),
        (lambda: wait(buffer, [], [2, 3], f32, *where), "sizes has 0 entries"),
        (lambda: wait(buffer, sizes, [2, 3], f32, size, group), f"rank is {size}"),
        (lambda: wait(buffer, sizes, [2, 3], f32, rank, "nobody"), "'nobody'"),
        (lambda: wait(buffer.view(2, -1), sizes, [2, 3], f32, *where), "the buffer is"),
        (lambda: wait(buffer, sizes, [-2, -3], f32, *where), "row_shape.*-2|negative"),
        (lambda: many(buffer, sizes, [2, 3], [1], [f32], *where), "row_shapes has 2 entries"),
        (lambda: many(buffer, sizes, [2, 3], [-1, 3], [f32] * 2, *where), "row_dims holds -1|size"),
        (lambda: many(buffer, sizes, [2, 3], [2], [], *where), "dtypes has 0 entries for 1"),
    ]
    _all_raise(cases)
    full = wait(buffer, sizes, [2, 3], f32, *where)
    assert torch.equal(full[::2, 0, 0], torch.arange(float(size)))
    _all_raise([(lambda: wait(buffer, sizes, [2, 3], f32, *where), "waited for already")])
    buffer = op.reduce_scatter_cast_coalesced_start([full], sizes, *where)
    wait = op.reduce_scatter_cast_coalesced_wait
    rest = (None, *where)
    _all_raise([
        (lambda: wait(buffer, sizes, [2, 4], [2], [f32], [f32], *rest), "the buffer is Float"),
        (lambda: wait(buffer, sizes, [2, 3], [2], [bf16], [f32], *rest), "the buffer is Float"),
        (lambda: wait(buffer, sizes, [2, 3], [2], [f32], [f32, f32], *rest), "dtypes has 2"),
        (lambda: wait(buffer, sizes, [2, 3], [2], [f32], [torch.int32], *rest), "is Int"),
        (lambda: wait(buffer, sizes, [2, 3], [2], [f32], [f32], torch.int32, *where), "is Int"),
        (lambda: wait(buffer, sizes, [-2, -3], [2], [f32], [f32], *rest), "row_shape.*-2|negative"),
    ])  # fmt: skip
    (sums,) = wait(buffer, sizes, [2, 3], [2], [f32], [f32], *rest)
    assert torch.equal(sums, x * size)
    with pytest.raises(ValueError, match="waited for already"):
        wait(buffer, sizes, [2, 3], [2], [f32], [f32], *rest)
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
    _all_raise([
        (lambda: gather(x.double() if last else x), "ranks 0 and 1 .*Float.*rank 2 .*Double"),
        (lambda: gather(dtype=bf16 if last else f32), "ranks 0 and 1 .*Float.*rank 2 .*BFloat16"),
        (lambda: gather(x.view(2, 3, 2) if last else x), r"\[6\].*rank 2 .*\[3, 2\]"),
        (lambda: gather(wide, [2, 2, 3] if last else ok), r"\[2, 2, 2\].*\[2, 2, 3\]"),
        (lambda: op.gather_cast_coalesced(
            [x] * (2 if last else 1), ok * (2 if last else 1), [f32] * (2 if last else 1),
            rank, group), r"ranks 0 and 1 pass nothing, rank 2 passes shards\[1\]"),
        (lambda: op.reduce_scatter_cast(whole.to(bf16 if last else f32), ok, f32, rank, group),
         "ranks 0 and 1 .*Float.*rank 2 .*BFloat16"),
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
