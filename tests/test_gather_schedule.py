"""When graphs gather: early, within a limit, again in backward, in an order that Inductor keeps."""

import contextlib
import os
import subprocess
import sys
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from graphs import (
    BF16,
    E4M3,
    F16,
    F32,
    assert_same,
    c10d,
    draw_shard,
    fuse,
    gather_dtypes,
    gathered,
    group_of,
    scattered,
    targets_of,
)
from harness import on_ranks
from torch.fx.experimental.proxy_tensor import make_fx

from deepsp.compile import (
    FuseGatherCast,
    RegatherInBackward,
    fuse_gather_cast,
    regather_in_backward,
)
from deepsp.compile.graphs import computes
from deepsp.compile.lowering.overlap import KeepOverlap
from deepsp.compile.passes.recognize import find_gathers, uses_of

# ------------------------------------------------------------------------------------ schedule


def _mlp(h, *shards):
    for shard in shards:
        h = (h @ gathered(shard)).relu()
    return h


def _unused(graph):
    """The most bytes of gathers, launched and not yet used, while an anchor runs."""
    nodes = list(graph.nodes)
    most = 0
    for at, node in enumerate(nodes):
        if not computes(node):
            continue
        bytes_ = 0
        for gather in find_gathers(graph):
            first = min(nodes.index(u) for root in gather.outputs for u in uses_of(root))
            if nodes.index(gather.start) < at < first:
                bytes_ += gather.bytes
        most = max(most, bytes_)
    return most


def _marks(graph_or_lines):
    """g: a gather is launched; w: waited for; m: a product."""
    marks = {
        "functional.all_gather_into_tensor": "g",
        "functional.wait_tensor": "w",
        "aten.mm": "m",
        "extern_kernels.mm(": "m",
        "functional.reduce_scatter": "r",
        "functional.all_to_all_single": "x",
        "functional.all_reduce": "a",
        "deepsp.all_gather_start": "g",
        "deepsp.all_gather_wait": "w",
    }
    lines = graph_or_lines if isinstance(graph_or_lines, list) else targets_of(graph_or_lines)
    return "".join(next((m for part, m in marks.items() if part in line), "") for line in lines)


def _prefetched():
    size = dist.get_world_size()
    layers, dim = 4, 12
    inputs = [draw_shard(5, dim), *(draw_shard(dim // size, dim, seed=i) for i in range(layers))]
    one = dim * dim * 4
    wanted = {
        0: "gwm" * 4,
        one - 1: "gwm" * 4,
        one: "gwgm" + "wgm" * 2 + "wm",
        2 * one: "gwggm" + "wgm" + "wm" * 2,
        100 * one: "gwgggm" + "wm" * 3,
    }
    for limit, marks in wanted.items():
        old, new, report = fuse(_mlp, *inputs, prefetch_bytes=limit)
        assert _marks(old) == "gwm" * 4
        assert _marks(new) == marks, (limit, _marks(new))
        assert _unused(new) <= limit
        assert report.early == sum(a == "g" for a in marks.split("m", 1)[0][1:]) + (
            marks.split("m", 1)[1].count("g") if limit >= one else 0
        )
        assert report.peak_before == one and report.peak_after <= one + limit

    def greedy(h, *shards):  # all at once, as somebody wrote it
        weights = [gathered(shard) for shard in shards]
        for weight in weights:
            h = h @ weight
        return h

    old, new, report = fuse(greedy, *inputs, prefetch_bytes=one)
    assert _marks(old) == "gw" * 4 + "m" * 4 and _marks(new) == wanted[one]
    assert report.peak_before == 4 * one and report.peak_after == 2 * one

    def late(h, a, b):  # what the second gathers is computed
        reduced = c10d.all_reduce(h, "sum", group_of()[1])
        h = h @ gathered(a)
        c = h @ h.t()
        b = b + c.sum()
        return c @ (h @ gathered(b)) + c10d.wait_tensor(reduced)

    old, new, report = fuse(late, *inputs[:3], prefetch_bytes=100 * one)
    assert _marks(new) == "gawmmgwmmw"

    def again(h, a, b, c, d):  # used, and used again: what counts is the first use
        w = gathered(a)
        return h @ w @ gathered(b) @ gathered(c) @ w @ gathered(d)

    old, new, report = fuse(again, *inputs, prefetch_bytes=one)
    assert _marks(new) == "gwgmwgmwgmmwm"


@pytest.mark.parametrize("ranks", [2, 3])
def test_gathers_are_early_within_the_limit(ranks):
    on_ranks(ranks, _prefetched)


def _written():
    """A shard is gathered before or after it is written, as it was."""

    def function(h, a, b):
        x = h @ gathered(a)
        b.view(-1).add_(1)
        y = x @ gathered(b)
        a.mul_(2)
        return y

    def copied(h, a, b):  # what is read before a write is read before it
        w = gathered(a)
        kept, x = w.clone(), b * 2
        w.add_(1)
        y = h @ h
        b.mul_(3)
        return y @ kept @ w @ gathered(x)

    size = dist.get_world_size()

    def inputs():
        return draw_shard(6, 6), draw_shard(6 // size, 6), draw_shard(6 // size, 6, seed=1)

    for f in (function, copied):
        gm = make_fx(f, tracing_mode="fake")(*inputs())
        expected = gm(*inputs())
        fuse_gather_cast(gm.graph, combine_bytes=1 << 20)
        gm.recompile()
        assert_same(gm(*inputs()), expected)


def test_a_write_is_not_passed():
    on_ranks(2, _written)


def _in_turn():
    """Other collectives keep their order, and every rank's graph says the same although ranks
    with uneven shares pad differently."""
    size, group = group_of()
    rank = dist.get_rank()

    def function(h, *shards):
        for i, shard in enumerate(shards):
            if rank == 0:
                shard = torch.cat([shard, shard.new_zeros(1, shard.size(1))])[:-1]
                h = h * 1 + 0
            h = h @ gathered(shard)
            h = h + c10d.wait_tensor(c10d.all_reduce(h, "sum", group))
            if i % 2:
                h = h + scattered(torch.cat([h] * size)).to(BF16).float()
        return h

    inputs = [draw_shard(6, 12), *(draw_shard(12 // size, 12, seed=i) for i in range(4))]
    for limit in (0, 12 * 12 * 4, 1 << 20):
        for combine in (0, 1 << 20):
            _, new, _ = fuse(function, *inputs, prefetch_bytes=limit, combine_bytes=combine)
            others = [t for t in targets_of(new) if "all_reduce" in t or "scatter" in t]
            assert ["reduce_scatter" in t for t in others] == [False, False, True] * 2


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_ranks_have_one_order(ranks):
    on_ranks(ranks, _in_turn)


# ----------------------------------------------------------------------------------- our ops


def _ours_gather(shards, dtypes, sizes, **sums):
    rank, where = dist.get_rank(), (dist.get_rank(), dist.group.WORLD.group_name)
    op, flat = torch.ops.deepsp, [s for of_shard in sizes for s in of_shard]
    assert all(s.size(0) == of_shard[rank] for s, of_shard in zip(shards, sizes, strict=True))
    if len(shards) == 1:
        buffer, shape = (
            op.gather_cast_start(shards[0], flat, dtypes[0], *where, **sums),
            list(shards[0].shape[1:]),
        )
        return [op.gather_cast_wait(buffer, flat, shape, dtypes[0], *where, **sums)]
    buffer = op._gather_cast_coalesced_start(shards, flat, dtypes, *where, **sums)
    shapes = [n for s in shards for n in s.shape[1:]]
    dims = [s.dim() - 1 for s in shards]
    return op._gather_cast_coalesced_wait(buffer, flat, shapes, dims, dtypes, *where, **sums)


def _ours():
    size, rank = dist.get_world_size(), dist.get_rank()
    rows, others = [p + 1 for p in range(size)], [2] * size
    x, y = draw_shard(rows[rank], 4), draw_shard(2, 3, 2, seed=1)

    def retyped(x, y):
        a, b = _ours_gather([x, y], [F32, F32], [rows, others])
        tie = x.double() * 0 + (1 + 2**-11 + 2**-30)
        (c,) = _ours_gather([tie], [F32], [rows])  # rounded twice: down, not up
        return a.t().to(BF16) + 1, b.sum(), c.to(F16) * 2, c.view(-1).to(F16)

    old, new, report = fuse(retyped, x, y)
    dtypes = sorted(dtype for dtype, _ in gather_dtypes(new))
    assert dtypes == ["bfloat16", "float16", "float32"] and report.bytes_saved > 0
    assert len(report.rewrites) == 2

    def alone(x, y):
        a, b = _ours_gather([x, y], [F32, BF16], [rows, others])
        return a.to(BF16) + 1, a + 1, b.to(F32), _ours_gather([x], [F32], [rows])[0].to(E4M3)

    old, new, report = fuse(alone, x, y)
    assert gather_dtypes(new) == gather_dtypes(old) and not report.rewrites

    def apart(first, second):
        def function(x, y, h):
            a, b = _ours_gather([x, y], [BF16, F32], [rows, others], **first)
            h = h @ a.float()
            (c,) = _ours_gather([y * 2], [F16], [others], **second)
            return h + c.sum(), b

        return function

    h, by_backend = draw_shard(4, sum(rows)), {"backend_sums": F32}
    for sums in ({}, by_backend):
        old, new, report = fuse(apart(sums, sums), x, y, h, combine_bytes=1 << 20)
        (gather,) = find_gathers(new)
        assert report.combined == 1 and len(gather.outputs) == 3 and gather.ours
        assert [dtype for dtype, _ in gather_dtypes(new)] == ["bfloat16", "float32", "float16"]
        assert all(node.kwargs == sums for node in gather.nodes[:2])
    for sums in ({}, {"backend_sums": torch.float64}):  # in other reduce-scatters
        old, new, report = fuse(apart(by_backend, sums), x, y, h, combine_bytes=1 << 20)
        assert report.combined == 0 and len(find_gathers(new)) == 2

    layers = [draw_shard(12 // size, 12, seed=i) for i in range(4)]

    def mlp(h, *shards):
        for shard in shards:
            h = h @ _ours_gather([shard], [F32], [[12 // size] * size])[0].to(BF16).float()
        return h

    one = 12 * 12 * 2
    old, new, report = fuse(mlp, draw_shard(6, 12), *layers, prefetch_bytes=one)
    marks = [
        "gwm"[["start", "wait", "aten.mm"].index(part)]
        for target in targets_of(new)
        for part in ("start", "wait", "aten.mm")
        if part in target
    ]
    assert "".join(marks) == "gwgm" + "wgm" * 2 + "wm"

    op, where = torch.ops.deepsp, (rank, dist.group.WORLD.group_name)
    grads = draw_shard(sum(rows), 4).to(BF16), draw_shard(2 * size, 6).to(BF16)

    def scatter(sums, a, b):
        sizes = [*rows, *others]
        inputs = [a.to(F32), b.view(-1, 3, 2).to(F32).mul(1)]
        buffer = op._reduce_scatter_cast_coalesced_start(inputs, sizes, *where, **sums)
        return op._reduce_scatter_cast_coalesced_wait(
            buffer, sizes, [4, 3, 2], [1, 2], [F32, F32], [F32, BF16], None, *where, **sums
        )

    # The backend's sums travel in one dtype, whatever their terms were.
    old, new, report = fuse(lambda a, b: scatter(by_backend, a, b), *grads)
    assert not report.rewrites
    old, new, report = fuse(lambda a, b: scatter({}, a, b), *grads)
    (wait,) = [n for n in new.nodes if "scatter" in str(n.target) and "wait" in str(n.target)]
    assert wait.args[4] == [BF16, F32] and len(report.rewrites) == 1 and report.bytes_saved > 0


@pytest.mark.parametrize("ranks", [2, 3])
def test_our_own_gathers(ranks):
    on_ranks(ranks, _ours)


# ---------------------------------------------------------------------------------- Inductor


class _Weight(torch.autograd.Function):
    """Gathers wide and casts, as a wrapper that knows nothing of casts does."""

    @staticmethod
    def forward(ctx, shard):
        return gathered(shard).to(BF16)

    @staticmethod
    def backward(ctx, grad):
        return scattered(grad.float())


class _OurWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shard):
        rows = [shard.size(0)] * dist.get_world_size()
        return _ours_gather([shard], [BF16], [rows])[0].clone()

    @staticmethod
    def backward(ctx, grad):
        return scattered(grad.float())


def _net(weight):
    def net(x, *shards):
        for shard in shards:
            x = (x @ weight.apply(shard)).sin()
        return x.float().sum()

    return net


def _marks_of_code(code):
    lines = code[code.index("def call") :].splitlines()
    return _marks([x for x in lines if "(" in x.split("#")[0] and "assert_" not in x])


@contextlib.contextmanager
def _patched(passes, joint, gloo=False):
    """``gloo``: all-gathers are replaced as over gloo; else they are seen as on other backends."""
    options = dict(post_grad_custom_post_pass=passes, joint_custom_pre_pass=joint)
    keep = (
        contextlib.nullcontext()
        if gloo
        else mock.patch("deepsp.compile.lowering.overlap.avoid_gathers")
    )
    with torch._inductor.config.patch(**options), keep:
        yield


def _inductor(order):
    """The code that Inductor writes keeps what the pass has scheduled, forward and backward, and
    keeps no gathered weight in between."""
    from torch._inductor.utils import run_fw_bw_and_get_code

    torch._dynamo.reset()
    size, dim = dist.get_world_size(), 24
    one = dim * dim * 2
    x = draw_shard(4, dim).to(BF16)
    shards = [(draw_shard(dim // size, dim, seed=i) / 4).requires_grad_() for i in range(4)]
    net, graphs = _net(_Weight), []
    with _patched(None, None):
        expected = torch.autograd.grad(torch.compile(net)(x, *shards), shards)
    torch._dynamo.reset()
    fuse = {"prefetch_bytes": one, "combine_bytes": 0}
    before = KeepOverlap(None) if order == "after" else None
    post = FuseGatherCast(before, **fuse)
    if order == "before":
        post = KeepOverlap(post)
    assert post.uuid() and RegatherInBackward().uuid()
    assert FuseGatherCast(lambda graph: None).uuid() is None
    assert FuseGatherCast().uuid() != FuseGatherCast(prefetch_bytes=1).uuid()

    def spy(graph):
        graphs.append(graph)
        post(graph)

    compiled = torch.compile(net, fullgraph=True)
    with _patched(spy, RegatherInBackward()):
        _, codes = run_fw_bw_and_get_code(lambda: compiled(x, *shards))
    gradients = torch.autograd.grad(compiled(x, *shards), shards)
    for a, b in zip(gradients, expected, strict=True):
        assert_same(a, b)
    (output,) = graphs[0].find_nodes(op="output")
    saved = [n.meta["val"] for n in output.all_input_nodes]
    assert not any(v.shape == (dim, dim) for v in saved), saved
    forward, backward = map(_marks_of_code, codes)
    assert forward == "gwgm" + "wgm" * 2 + "wm", forward
    # Three weights again, each behind dX of the layer after it; gradients leave as bf16.
    assert backward.count("g") == 3 and backward.count("x") == 4, backward
    assert "r" not in backward, backward
    assert backward.count("gw") <= 1, backward


def _over_gloo(calls):
    """No two of PyTorch's all-gathers in flight, whose numbers would be wrong: none at all."""
    from torch._inductor.utils import run_fw_bw_and_get_code

    torch._dynamo.reset()
    size, dim = dist.get_world_size(), 24
    x = draw_shard(4, dim).to(BF16)
    shards = [(draw_shard(dim // size, dim, seed=i) / 4).requires_grad_() for i in range(4)]
    net = _net(_Weight)
    expected = torch.autograd.grad(net(x, *shards), shards)
    post = FuseGatherCast(None, prefetch_bytes=8 * dim * dim, combine_bytes=0)
    compiled = torch.compile(net, fullgraph=True)
    collectives = mock.patch("deepsp.compile.lowering.gloo.calls_kernels", lambda: calls)
    with _patched(post, RegatherInBackward(), gloo=True), collectives:
        _, codes = run_fw_bw_and_get_code(lambda: compiled(x, *shards))
    for a, b in zip(torch.autograd.grad(compiled(x, *shards), shards), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.05)
    forward, backward = map(_marks_of_code, codes)
    assert forward == ("gwgggmwmwmwm" if calls else "xwxxxmwmwmwm"), forward
    # Three weights again; four gradients leave by all-to-all.
    assert backward.count("x") + backward.count("g") == 7, backward
    assert backward.count("g") == (3 if calls else 0), backward


@pytest.mark.parametrize("calls", [True, False])
def test_inductors_gathers_over_gloo(calls):
    on_ranks(2, _over_gloo, calls)


@pytest.mark.parametrize("order", ["alone", "before", "after"])
def test_inductor_keeps_the_schedule(order):
    on_ranks(2, _inductor, order)


def _not_regathered():
    """Without the joint pass, gathered weights are kept: what the test above would miss."""
    torch._dynamo.reset()
    saved = []
    dim = 24
    x = draw_shard(4, dim).to(BF16)
    shards = [(draw_shard(dim // 2, dim, seed=i) / 4).requires_grad_() for i in range(2)]

    def note(graph):
        (output,) = graph.find_nodes(op="output")
        saved.append([n.meta["val"].shape for n in output.all_input_nodes])

    with _patched(note, None):
        torch.compile(_net(_Weight), fullgraph=True)(x, *shards).backward()
    assert (dim, dim) in saved[0], saved[0]


def test_without_the_joint_pass_weights_are_kept():
    on_ranks(2, _not_regathered)


def _joint(weight):
    """The marks lead another backend's partitioner, too."""
    from torch._functorch.aot_autograd import aot_function
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    dim = 24
    x = draw_shard(4, dim).to(BF16)
    shards = [(draw_shard(dim // 2, dim, seed=i) / 4).requires_grad_() for i in range(3)]
    activation = draw_shard(2, 2).requires_grad_()
    inner, graphs, marked = _net(weight), [], []

    def net(x, a, *shards):
        return inner(x, *shards) + _Weight.apply(a.sin()).float().sin().sum()

    def partition(joint, args, **kwargs):
        marked.append(regather_in_backward(joint.graph))
        return min_cut_rematerialization_partition(joint, args, **kwargs)

    def compiler(gm, args):
        fuse_gather_cast(gm.graph)
        gm.recompile()
        graphs.append(gm)
        return gm

    expected = torch.autograd.grad(net(x, activation, *shards), [activation, *shards])
    compiled = aot_function(net, compiler, compiler, partition)
    gradients = torch.autograd.grad(compiled(x, activation, *shards), [activation, *shards])
    for a, b in zip(gradients, expected, strict=True):
        assert_same(a, b)
    assert marked == [3]  # not what is computed
    forward, backward = graphs
    (output,) = forward.graph.find_nodes(op="output")
    assert not any(n.meta["val"].shape == (dim, dim) for n in output.all_input_nodes)
    gathered = sum(len(g.outputs) for g in find_gathers(backward.graph))
    assert gathered == 2  # the first layer has no dX


@pytest.mark.parametrize("weight", [_Weight, _OurWeight])
def test_gathers_again_in_backward(weight):
    on_ranks(2, _joint, weight)


# -------------------------------------------------------------------------- import, exchanges

_LOGS = """
import torch, torch.distributed as dist
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore
import sys
import deepsp
assert "torch._inductor.decomposition" not in sys.modules, "import deepsp drags Inductor in"
assert deepsp.compile.fuse_gather_cast is deepsp.compile.passes.fuse_gather_cast.fuse_gather_cast
dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
c10d = torch.ops._c10d_functional
f = lambda x: c10d.wait_tensor(c10d.all_gather_into_tensor(x, 4, "0")).to(torch.bfloat16)
deepsp.compile.fuse_gather_cast(make_fx(f, tracing_mode="fake")(torch.ones(8)).graph)
try:
    deepsp.compile.nothing
except AttributeError:
    print("done")
"""


@pytest.mark.parametrize("setting", ["", "deepsp.compile.passes.fuse_gather_cast", "+deepsp"])
def test_logs(setting):
    environment = {**os.environ, "TORCH_LOGS": setting} if setting else None
    done = subprocess.run(
        [sys.executable, "-c", _LOGS], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0 and "done" in done.stdout, done.stderr[-3000:]
    assert ("1 rewritten, 48 bytes less received" in done.stderr) == bool(setting)
    assert ("peak, estimated: 128 before, 64 now" in done.stderr) == bool(setting)
    assert ("gathered as bfloat16 instead of float32" in done.stderr) == (setting[:1] == "+")
