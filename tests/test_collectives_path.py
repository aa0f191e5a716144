"""NCCL's way over gloo: blocks travel in collectives, and in a group of one rank, too
(DEEPSP_TEST_COLLECTIVES). The tests of point to point, against one process, once more."""

import os
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from attentions import LAYERS, check_attention, check_compiled_layer, check_layer, check_shares
from exchanges import EXCHANGES, check_along_dim, check_halo, check_modes
from graphs import marks_of
from harness import on_ranks
from reference import draw, events
from shards import GATHERS, check_float8_gather, check_gather, check_gradients_of_parameters

import deepsp

op = torch.ops.deepsp
bf16, f32, f64 = torch.bfloat16, torch.float32, torch.float64
RANKS = pytest.mark.parametrize("ranks", [1, 2, 3])


def _by_collectives(calls):
    os.environ["DEEPSP_TEST_COLLECTIVES"] = "1"
    try:
        for function, *args in calls:
            function(*args)
    finally:
        del os.environ["DEEPSP_TEST_COLLECTIVES"]


def run(ranks, *calls):
    on_ranks(ranks, _by_collectives, calls)


def _counted():
    """What is launched is a collective each time, and no message."""
    where = dist.get_rank(), dist.get_world_size(), dist.group.WORLD.group_name
    rank, size, name = where
    x = [draw(1, 4, 4, 8).requires_grad_() for _ in range(3)]
    shard = draw(3, 5).requires_grad_()
    out = {}

    def attend():
        out["y"] = deepsp.distributed_attention(*x, is_causal=True)

    def gather():
        out["y"] = op.gather_cast(shard, [3] * size, f32, rank, name)

    for forward, there, back in (
        (attend, {"all_to_all": 2}, {"all_to_all": 2}),
        (gather, {"all_gather": 1}, {"all_to_all": 1}),
        (lambda: op.all_reduce(shard.detach(), "partial", *where), {"all_reduce": 1}, {}),
    ):
        for call, expected in ((forward, there), (lambda: out["y"].sum().backward(), back)):
            if expected:
                found = Counter(e.name for e in events(call) if e.name.startswith("gloo:"))
                assert found == {f"gloo:{what}": n for what, n in expected.items()}


@pytest.mark.parametrize("ranks", [1, 2])
def test_collectives_are_launched(ranks):
    run(ranks, (_counted,))


def _copies():
    """What is even is gathered from where it is to where it is wanted; one list of copies packs or
    lands what isn't."""
    x = draw(2, 6, 4)
    for name, call, lists in (
        ("even", lambda: deepsp.collectives.all_gather(x, 0, grad="partial"), 0),
        ("rows", lambda: deepsp.collectives.all_gather(x, 1, grad="partial"), 2),
        ("even, summed", lambda: deepsp.collectives.reduce_scatter(x, 0), 0),
        ("rows, summed", lambda: deepsp.collectives.reduce_scatter(x, 1), 1),
    ):
        found = sum(e.name == "deepsp::copy" for e in events(call))
        assert found == lists, (name, found)


def test_what_is_even_is_not_copied():
    run(2, (_copies,))


@RANKS
def test_exchange_path(ranks):
    run(ranks, *EXCHANGES, (check_modes,))


@RANKS
def test_halo_path(ranks):
    run(ranks, (check_halo, f64, [1, -1]), (check_halo, bf16, [0]))


@RANKS
def test_attention_path(ranks):
    for chunks, kind in ((1, "skewed"), (2, "empty")):
        run(
            ranks,
            (check_attention, 2, 13, 8, 2, (8, 8), True, chunks, kind, None),
            (check_shares, 2, 1, kind, "auto", chunks, "causal", (8, 8)),
            (check_shares, 8, 2, kind, ranks, chunks, "mask", (4, 6)),
        )


@RANKS
def test_layer_path(ranks):
    for case in LAYERS:
        run(ranks, (check_layer, case))


def _products(kv_heads, chunks, forward, backward):
    """One product makes a chunk's blocks for all ranks; one reads what all have sent."""
    torch.manual_seed(0)
    layer = deepsp.SequenceParallelAttention(32, 4, kv_heads, chunks=chunks)
    x = torch.randn(1, 6, 32, requires_grad=True)
    out = {}

    def call():
        out["y"] = layer(x, is_causal=True)

    call()
    for run_, expected in ((call, forward), (lambda: out["y"].sum().backward(), backward)):
        found = Counter(e.name for e in events(run_) if e.name in ("aten::mm", "aten::bmm"))
        assert (found["aten::bmm"], found["aten::mm"]) == expected, found


def test_products():
    # Forward: q, k, v; the output. Backward: dO; dx, dW_q, dW_k, dW_v, dW_o.
    run(2, (_products, 2, 1, (1, 1), (1, 5)), (_products, 2, 2, (2, 1), (2, 5)))
    # Ranks with as many query heads but not as many columns: packed behind the product.
    run(3, (_products, 4, 1, (0, 2), (0, 6)))


def _decomposed(*case):
    """What Inductor is given, run as it is."""
    check_compiled_layer("aot_eager_decomp_partition", case, False, (20, 13))


@pytest.mark.parametrize(
    "case",
    [
        (8, 4, 2, (0, 3, 1)),
        (9, 3, 1, (0, 0, 0)),
        *(
            pytest.param(x, marks=pytest.mark.nightly)
            for x in ((8, 4, 1, (0, 0, 0)), (7, 1, 2, (0, 3, 1)))
        ),
    ],
)
@RANKS
def test_the_layer_compiles(ranks, case):
    run(ranks, (_decomposed, *case))


def _frozen():
    """Only what is wanted, and each where it belongs."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer = deepsp.SequenceParallelAttention(16, 4, 2, bias=True, chunks=2, dtype=f64)
    for frozen in (layer.q_proj.weight, layer.k_proj.bias, layer.v_proj.bias):
        frozen.requires_grad_(False)
    trained = [p for p in layer.parameters() if p.requires_grad]
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager_decomp_partition")
    x = draw(1, 6, 16, seed=dist.get_rank())
    grad = draw(1, 6, 16, seed=9)
    found = [torch.autograd.grad(f(x, is_causal=True), trained, grad) for f in (compiled, layer)]
    torch.testing.assert_close(*found, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_layer_compiles_with_frozen_weights(ranks):
    run(ranks, (_frozen,))
    on_ranks(ranks, _frozen)


def _order():
    """As in eager mode, a product makes a chunk, and one takes what all chunks bring."""
    from deepsp.compile.graphs import target_of
    from deepsp.compile.lowering.overlap import keep_overlap

    torch._dynamo.reset()
    torch.manual_seed(0)
    layer = deepsp.SequenceParallelAttention(32, 8, 4, bias=True, rope_theta=1e4, chunks=2)
    x = torch.randn(1, 16, 32, requires_grad=True)
    orders = []

    def note(graph):
        keep_overlap(graph)
        calls = [n for n in graph.nodes if n.op == "call_function"]
        orders.append(marks_of(str(target_of(n)) for n in calls))

    compiled = torch.compile(layer, fullgraph=True)
    # Graphs are cached by what they are before decomposition, which doesn't show the switch.
    patch = {"post_grad_custom_post_pass": note, "force_disable_caches": True}
    with torch._inductor.config.patch(patch):
        ours = torch.autograd.grad(compiled(x, is_causal=True).sum(), [x, *layer.parameters()])
    expected = torch.autograd.grad(layer(x, is_causal=True).sum(), [x, *layer.parameters()])
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
    # Each chunk's attention while the other travels; dW_o while dO does; dX, dW_q, dW_k, dW_v.
    assert orders == ["mxmxwAxwAxwwm", "mxmxmwAxwAxwwmmmm"], orders


def test_order_in_compiled_code():
    run(2, (_order,))


@RANKS
def test_gather_path(ranks):
    uneven = (3, 0, 5, 1)
    specs = [*GATHERS, (uneven, (5, 2), bf16, bf16, "expanded")]
    alone = [(check_gather, [spec], f64, False) for spec in specs]
    run(ranks, (check_gather, specs, None, False), *alone)
    run(
        ranks,
        (check_float8_gather, [(uneven, (7,), f32, 1.0)], torch.float8_e4m3fn),
        (check_along_dim, f64, [0, 1, -1], ["even", "split"]),
        *([(check_gradients_of_parameters,)] if ranks > 1 else []),
    )


def _dropped():
    """Nobody waits for what was started: its memory returns."""
    rank, size, name = dist.get_rank(), dist.get_world_size(), dist.group.WORLD.group_name
    x = torch.zeros(1 << 20)  # 4 MiB
    q = x.view(1, -1, 4, 256)

    def start(times):
        for _ in range(times):
            op.all_reduce_start([x], "partial", rank, size, name)
            op.gather_cast_start(x.view(1, -1), [1] * size, f32, rank, name)
            op.seq_to_heads_start([q], [q.size(1)] * size, 1, False, rank, name)
            dist.barrier()
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    start(4)
    before = start(1)
    # A backend's threads may let go of some later.
    assert start(60) - before < 25 * x.nbytes


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_start_without_a_wait_path(ranks):
    run(ranks, (_dropped,))
    on_ranks(ranks, _dropped)  # a sum is a collective, anyway


class _OneAtATime(dist.ProcessGroup):
    """Like NCCL's communicators: no two threads may launch at once."""

    def __init__(self):
        super().__init__(0, 1)
        self.inside = self.most = 0

    def getBackendName(self):
        return "one at a time"

    def all_to_all_single(self, out, given, *_):
        self.inside += 1
        self.most = max(self.most, self.inside)
        time.sleep(0.01)
        out.copy_(given)
        self.inside -= 1
        done = torch.futures.Future()
        done.set_result([out])
        return torch._C._distributed_c10d._create_work_from_future(done)

    alltoall_base = all_to_all_single  # before torch 2.13


def test_threads_launch_one_at_a_time(monkeypatch):
    monkeypatch.setenv("DEEPSP_TEST_COLLECTIVES", "1")
    group = _OneAtATime()
    c10d = torch._C._distributed_c10d
    c10d._register_process_group("one at a time", group)
    try:
        x = draw(1, 4, 4, 8)

        def exchange(_):
            return op.seq_to_heads([x], [4], 0, "one at a time")[0]

        with ThreadPoolExecutor(4) as threads:
            assert all(torch.equal(y, x) for y in threads.map(exchange, range(8)))
    finally:
        c10d._unregister_process_group("one at a time")
    assert group.most == 1
