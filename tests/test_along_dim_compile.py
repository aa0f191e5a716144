"""Collectives along a dimension under torch.compile, in anomaly mode and in debug mode; what they
copy."""

import os

import pytest
import torch
import torch.distributed as dist
from harness import on_ranks
from reference import draw
from torch._dynamo.testing import CompileCounterWithBackend

import deepsp
from deepsp.compile.graphs import target_of
from deepsp.compile.lowering.overlap import keep_overlap
from deepsp.ranks.lengths import seq_lens


def _functions(dim, dtype):
    """Of a part and of a whole; every op, whole and in halves."""
    reduce = torch.bfloat16 if dtype == torch.float16 else None  # a dtype that isn't the default

    def whole_ops(part, whole, sizes):
        a = deepsp.collectives.all_gather(
            part * 2, dim, sizes=sizes, grad="partial", reduce_dtype=reduce
        )
        b = deepsp.collectives.all_gather(part.sin(), dim, sizes=sizes, grad="replicated")
        c = deepsp.collectives.reduce_scatter(whole * a, dim, sizes=sizes, reduce_dtype=reduce)
        d = deepsp.collectives.scatter(whole + b, dim, sizes=sizes)
        e = deepsp.collectives.scatter(whole - b, dim, sizes=sizes, grad="partial")
        f = deepsp.collectives.all_reduce(whole, grad="partial") + deepsp.collectives.all_reduce(
            whole, grad="replicated"
        )
        return a * b, c, d * e, f * deepsp.collectives.replicate(whole)

    def halves(part, whole, sizes):
        pending = [
            deepsp.collectives.all_gather_start(part * 2, dim, sizes=sizes, grad="partial"),
            deepsp.collectives.all_gather_start(part.sin(), dim, sizes=sizes, grad="replicated"),
            deepsp.collectives.reduce_scatter_start(whole * 3, dim, sizes=sizes),
            deepsp.collectives.scatter_start(whole * 4, dim, sizes=sizes),
            deepsp.collectives.all_reduce_start(whole, grad="partial"),
            deepsp.collectives.all_reduce_start(whole, grad="replicated"),
        ]
        y = whole.cos()
        return (*(p.wait() for p in pending), y)

    return whole_ops, halves


def _grads(ys, *inputs):
    loss = sum((y * torch.arange(y.numel()).view(y.shape)).sum() for y in ys)
    return torch.autograd.grad(loss, inputs)


def _compiled(backend, dim, dtype, batch=2):
    rank, size = dist.get_rank(), dist.get_world_size()
    # Compiling takes long: only the whole ops by Inductor, which decompose into the halves.
    functions = _functions(dim, dtype)[: 1 if backend == "inductor" else 2]
    for n, function in enumerate(functions):
        torch._dynamo.reset()
        graphs = CompileCounterWithBackend(backend)
        compiled = torch.compile(function, backend=graphs, fullgraph=True, dynamic=True)
        for length in (5, 2 * size):
            sizes = seq_lens(length)
            shape = [batch, 4, 3]
            shape[dim] = sizes[rank]
            part = draw(*shape, seed=rank).to(dtype).requires_grad_()
            shape[dim] = length
            whole = draw(*shape, seed=5 + rank).to(dtype).requires_grad_()
            got, want = (f(part, whole, sizes) for f in (compiled, function))
            close = dict(rtol=1e-9, atol=1e-9) if dtype.itemsize == 8 else dict(rtol=0.05, atol=0.1)
            for a, b in zip(got, want, strict=True):
                assert a.shape == b.shape and a.dtype == b.dtype
                torch.testing.assert_close(a, b, **close)

            for a, b in zip(*(_grads(ys, part, whole) for ys in (got, want)), strict=True):
                scale = b.abs().max().item()
                torch.testing.assert_close(a, b, rtol=close["rtol"], atol=close["atol"] * scale)
        assert n == 1 or graphs.frame_count <= 4


@pytest.mark.parametrize(("ranks", "dim"), [(1, 1), (3, 0), (3, 1), (3, -1)])
def test_aot_eager(ranks, dim):
    on_ranks(ranks, _compiled, "aot_eager", dim, torch.float64)


def test_a_batch_of_one():
    """Whole buffers are viewed then, and their sizes are symbols."""
    on_ranks(2, _compiled, "aot_eager", 1, torch.float64, 1)


@pytest.mark.parametrize(
    "apart", ["mapped", pytest.param("collectives", marks=pytest.mark.nightly)]
)
def test_inductor(apart):
    on_ranks(2, _compiled, "inductor", 0, torch.float16, apart=apart)


_LAUNCHES = ("all_to_all_single.default", "all_gather_into_tensor.default")


def _graph():
    """The graph that Inductor schedules: what is computed while its collectives travel."""
    names = []

    def note(graph):
        keep_overlap(graph)  # what Inductor's passes moved goes back
        names.append([target_of(n).__name__ for n in graph.nodes if n.op == "call_function"])

    def function(x, w, part):
        scattered, gathered = (
            deepsp.collectives.reduce_scatter_start(x @ w, 1),
            deepsp.collectives.all_gather_start(part.sin(), 1, grad="replicated"),
        )
        between = (w @ w).sum()
        return scattered.wait() * between, gathered.wait() * between

    torch._dynamo.reset()
    config = torch._inductor.config
    with config.patch(post_grad_custom_post_pass=note):
        compiled = torch.compile(function, fullgraph=True)
        compiled(torch.ones(2, 4, 4), torch.ones(4, 4), torch.ones(2, 2, 4))
    (graph,) = names
    launches = [i for i, n in enumerate(graph) if n in _LAUNCHES]
    waits = [i for i, n in enumerate(graph) if n == "wait_tensor.default"]
    assert len(launches) == len(waits) == 2 and launches[1] < waits[0], graph
    assert "mm.default" in graph[launches[1] : waits[0]], graph


def test_inductors_graph():
    on_ranks(2, _graph, apart="collectives")


def _watched(lens):
    """Nothing that nobody wrote shows, in buffers neither; what is on its way has arrived."""
    rank = dist.get_rank()
    part = draw(2, lens[rank], 3, seed=rank).requires_grad_()
    whole = draw(2, sum(lens), 3, seed=9).requires_grad_()
    deepsp.ranks.buffers.clear()
    nan = torch.full((4000,), torch.nan)  # what the pool hands out again
    deepsp.collectives.all_gather(nan, 0, grad="partial")
    results = []
    for watch in (False, True):
        with torch.autograd.set_detect_anomaly(watch):
            for function in _functions(1, torch.float64):
                ys = function(part, whole, lens)
                grads = torch.autograd.grad(sum(y.sum() for y in ys), (part, whole))
                results.append([*ys, *grads])
    for a, b in zip(results[:2], results[2:], strict=True):
        for x, y in zip(a, b, strict=True):
            torch.testing.assert_close(x, y)


@pytest.mark.parametrize("lens", [[3, 3], [4, 0, 2]])
def test_anomaly_mode(lens):
    on_ranks(len(lens), _watched, lens)


def _copies():
    """None of what travels where the dimension is the outermost; else one."""
    rank, size = dist.get_rank(), dist.get_world_size()

    def events(f, *args, **kwargs):
        with torch.profiler.profile() as profile:
            f(*args, **kwargs)
        names = [e.name for e in profile.events()]
        copies = {"deepsp::pack", "deepsp::land", "aten::contiguous", "aten::cat", "aten::clone"}
        return copies & set(names)

    for shape, dim, copied in [
        ([4, 6, 5], 0, set()),
        ([1, 6, 5], 1, set()),
        ([1, 1, 6], -1, set()),
        ([2, 4, 40000], 1, set()),  # long rows
        ([2, 6, 5], 1, {"one"}),
        ([3, 6, 4], 2, {"one"}),
    ]:
        whole = torch.ones(shape)
        part = whole.chunk(size, dim)[rank].contiguous()
        gather = events(deepsp.collectives.all_gather, part, dim, grad="partial")
        scatter = events(deepsp.collectives.reduce_scatter, whole, dim)
        assert gather == ({"deepsp::land"} if copied else set()), (shape, gather)
        assert scatter == ({"deepsp::pack"} if copied else set()), (shape, scatter)


def test_copies():
    on_ranks(2, _copies, apart="messages")


def _disagree():
    rank = dist.get_rank()
    os.environ["DEEPSP_DEBUG"] = "1"
    try:
        x = torch.ones(2, 4)
        assert deepsp.collectives.all_gather(x, 1, grad="partial").shape == (2, 8)
        with pytest.raises(ValueError, match="ranks disagree: rank 0 passes input float32 of full"):
            deepsp.collectives.all_gather(x.double() if rank else x, 1, grad="partial")
        with pytest.raises(ValueError, match=r"ranks disagree.*sizes"):
            deepsp.collectives.reduce_scatter(x, 1, sizes=[1, 3] if rank else [3, 1])
        with pytest.raises(ValueError, match="ranks disagree"):
            if rank:
                deepsp.collectives.all_gather(x, 1, grad="partial")
            else:
                deepsp.collectives.reduce_scatter(x, 1)
        with pytest.raises(ValueError, match="ranks disagree"):
            deepsp.collectives.all_reduce(torch.ones(2 + rank), grad="partial")
    finally:
        del os.environ["DEEPSP_DEBUG"]


def test_ranks_that_disagree():
    on_ranks(2, _disagree)
