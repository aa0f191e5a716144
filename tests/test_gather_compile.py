"""Sharded weights' ops under torch.compile: the same numbers as eager, and Inductor's own graph."""

import pytest
import torch
import torch.distributed as dist
from harness import on_ranks
from reference import draw, flat
from torch._dynamo.testing import CompileCounterWithBackend

from deepsp.compile.lowering.overlap import wait_for_launches

op = torch.ops.deepsp
f64, f32, bf16, f16 = torch.float64, torch.float32, torch.bfloat16, torch.float16

# Shards: (rows of ranks 0, 1, 2, trailing shape, dtype, dtype on the wire).
_CASES = {
    "even": [((4, 4, 4), (6,), f32, bf16)],
    "uneven": [((4, 0, 3), (5,), f32, bf16)],
    "several": [((4, 1, 0), (5,), f32, bf16), ((2, 2, 2), (3, 3), f32, bf16)],
    "mixed": [
        ((3, 2, 4), (5,), f32, bf16),
        ((2, 2, 2), (), f64, f64),
        ((1, 0, 0), (7,), bf16, f32),
        ((0, 3, 1), (1, 3), f32, f16),
    ],
    "empty": [((4, 4, 4), (0,), f32, bf16), ((0, 0, 0), (3,), f32, bf16)],
    "nothing": [((4, 4, 4), (0,), f32, bf16)],
}


def _functions(rows, specs, within=None, by_backend=False):
    """Called on shards: gathered, in one go and in halves; summed."""
    sums = {"backend_sums" if by_backend else "reduce_dtype": within}
    also_in_wait = sums if by_backend else {}
    rank, group = dist.get_rank(), dist.group.WORLD.group_name
    where = (rank, group)
    sizes, wire = flat(rows), [spec[3] for spec in specs]
    shapes = [list(spec[1]) for spec in specs]

    def gather(*shards):
        shards = [x * 2 for x in shards]
        if len(shards) == 1:
            return (op.gather_cast(shards[0], sizes, wire[0], *where, **sums),)
        return op.gather_cast_coalesced(shards, sizes, wire, *where, **sums)

    def halves(*shards):
        buffer = op._gather_cast_coalesced_start(
            [x * 2 for x in shards], sizes, wire, *where, **sums
        )
        dims = [len(shape) for shape in shapes]
        return op._gather_cast_coalesced_wait(
            buffer, sizes, flat(shapes), dims, wire, *where, **also_in_wait
        )

    def scatter(*shards):
        whole = op.gather_cast_coalesced([x * 2 for x in shards], sizes, wire, *where)
        dtypes = [x.dtype for x in shards]
        return op._reduce_scatter_cast_coalesced(
            [y * 2 for y in whole], sizes, dtypes, *where, **sums
        )

    return gather, halves, scatter


def _equals_eager(backend, name, within, by_backend=False):
    rank, size = dist.get_rank(), dist.get_world_size()
    # Inductor leaves out roundings between fused steps, unless what is rounded travels.
    exact = backend != "inductor" or (size > 1 and within not in (bf16, f16))
    specs = _CASES[name]
    rows = [list(spec[0][:size]) for spec in specs]
    shards = [
        draw(lens[rank], *spec[1], seed=rank).to(spec[2]).requires_grad_()
        for lens, spec in zip(rows, specs, strict=True)
    ]
    functions = _functions(rows, specs, within, by_backend)
    for function in functions if backend == "aot_eager" or len(rows) == 1 else functions[1:]:
        torch._dynamo.reset()
        expected = function(*shards)
        grads = [draw(*y.shape, seed=rank + 5).to(y.dtype) for y in expected]
        g_expected = torch.autograd.grad(expected, shards, grads)
        ours = torch.compile(function, fullgraph=True, backend=backend)(*shards)
        g_ours = torch.autograd.grad(ours, shards, grads)
        for a, b in zip([*ours, *g_ours], [*expected, *g_expected], strict=True):
            assert a.dtype == b.dtype and a.is_contiguous()
            if exact:
                assert torch.equal(a, b), (function.__name__, (a - b).abs().max())
            else:
                torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", _CASES)
def test_equals_eager_under_aot_eager(name):
    on_ranks(2, _equals_eager, "aot_eager", name, None)
    on_ranks(2, _equals_eager, "aot_eager", name, f32, True)


@pytest.mark.parametrize(
    ("ranks", "name", "within", "by_backend"),
    [
        (2, "uneven", None, False),
        (2, "nothing", None, False),
        pytest.param(2, "several", None, False, marks=pytest.mark.nightly),
        pytest.param(3, "even", f64, False, marks=pytest.mark.nightly),
        (1, "mixed", None, False),
        (3, "even", bf16, False),
        (1, "uneven", f64, True),
        pytest.param(3, "mixed", None, False, marks=pytest.mark.nightly),
    ],
)
def test_equals_eager_under_inductor(ranks, name, within, by_backend):
    on_ranks(ranks, _equals_eager, "inductor", name, within, by_backend)


def _dynamic(backend, offsets, sums):
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD.group_name
    torch._dynamo.reset()

    def function(x, y):
        sizes = [x.size(0) + offsets[p] - offsets[rank] for p in range(size)]
        a = op.gather_cast(x * 2, sizes, bf16, rank, group, **sums)
        both = [*sizes, *[3] * size]
        b, c = op.gather_cast_coalesced([x, y], both, [f32, bf16], rank, group, **sums)
        return a, b, c

    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(function, fullgraph=True, backend=counter)
    for base in (5, 12, 9):
        rows = base + offsets[rank]
        x = draw(rows, 6, seed=rank).float().requires_grad_()
        y = draw(3, 2).float().requires_grad_()
        torch._dynamo.mark_dynamic(x, 0)
        expected, ours = function(x, y), compiled(x, y)
        grads = [draw(*t.shape, seed=rank).to(t.dtype) for t in expected]
        for a, b in zip(ours, expected, strict=True):
            assert torch.equal(a, b)
        pairs = [torch.autograd.grad(out, (x, y), grads) for out in (ours, expected)]
        for a, b in zip(*pairs, strict=True):
            torch.testing.assert_close(a, b)
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    ("backend", "offsets"), [("aot_eager", (0, 0)), ("aot_eager", (0, 3)), ("inductor", (0, 3))]
)
@pytest.mark.parametrize("sums", [{}, {"backend_sums": f32}])
def test_dynamic_rows(backend, offsets, sums):
    on_ranks(2, _dynamic, backend, offsets, sums)


def _float8(backend):
    rank, group = dist.get_rank(), dist.group.WORLD.group_name
    torch._dynamo.reset()
    x = draw(4, 3, seed=rank).float().requires_grad_()

    def through(x):
        (y,) = op.gather_through_float8([x * 2], [4, 4], torch.float8_e4m3fn, bf16, rank, group)
        return y

    def raw(x):
        data, inv = op.gather_cast_float8(x * 2, [4, 4], torch.float8_e5m2, rank, group)
        return data.float() * inv

    expected, ours = through(x), torch.compile(through, fullgraph=True, backend=backend)(x)
    assert torch.equal(ours, expected)
    grad = draw(8, 3, seed=rank).to(bf16)
    assert torch.equal(*(torch.autograd.grad(y, x, grad)[0] for y in (ours, expected)))
    with torch.no_grad():
        assert torch.equal(torch.compile(raw, fullgraph=True, backend=backend)(x), raw(x))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_float8(backend):
    on_ranks(2, _float8, backend)


def _post_grad(dtypes, back, sums):
    """Inductor's own graphs: `dtypes` on the wire, compute between launch and wait in both, and a
    wait for what was launched: with one for a view, Inductor reuses memory that is being sent."""
    rank, group = dist.get_rank(), dist.group.WORLD.group_name
    torch._dynamo.reset()
    graphs = []
    w, a, x = (draw(*shape).float().requires_grad_() for shape in ((8, 16), (8, 16), (4, 8)))
    n = len(dtypes)
    rest = (dtypes, rank, group)

    def layer(w, a, x):
        buffer = op._gather_cast_coalesced_start([w] * n, [8, 8] * n, *rest, **sums)
        h = x @ a
        full = op._gather_cast_coalesced_wait(buffer, [8, 8] * n, [16] * n, [1] * n, *rest, **sums)
        return h @ sum(y.float() for y in full)

    def note(graph):
        wait_for_launches(graph)
        graphs.append([n for n in graph.nodes if n.op == "call_function"])

    with torch._inductor.config.patch(post_grad_custom_post_pass=note):
        torch.compile(layer, fullgraph=True)(w, a, x).sum().backward()
    travels = torch.uint8 if n > 1 else dtypes[0]
    for graph, collective, dtype in (
        (graphs[0], "all_gather_into_tensor", travels),
        (graphs[1], back, sums.get("backend_sums", travels)),
    ):
        targets = [str(n.target) for n in graph]
        (launch,) = (n for n, target in enumerate(targets) if collective in target)
        called = "deepsp" in collective
        assert called == any("deepsp" in target for target in targets), targets
        end = "coalesced_wait" if called else "wait_tensor"
        (wait,) = (n for n, target in enumerate(targets) if end in target)
        assert called or graph[launch].meta["val"].dtype == dtype
        assert graph[wait].args[0] is graph[launch]
        assert any(".mm." in target for target in targets[launch:wait]), targets


@pytest.mark.parametrize(
    ("dtypes", "back", "sums", "apart"),
    [
        ([bf16], "all_to_all_single", {}, "collectives"),
        ([bf16, f32], "all_to_all_single", {}, "collectives"),
        ([bf16, f32], "reduce_scatter_tensor", {"backend_sums": f64}, "collectives"),
        ([bf16, f32], "deepsp._reduce_scatter_cast_coalesced_start", {}, "mapped"),
    ],
)
def test_inductors_graph(dtypes, back, sums, apart):
    on_ranks(2, _post_grad, dtypes, back, sums, apart=apart)
