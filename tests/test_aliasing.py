"""Buffers under Inductor: what a wrong schema does to data, and that ours don't."""

import copy
import functools
import re
import time

import pytest
import torch
import torch.distributed as dist
from harness import on_ranks
from reference import draw
from torch import nn
from torch._inductor.utils import run_and_get_code
from torch.library import opcheck

import deepsp
from deepsp import patches

op = torch.ops.deepsp


def _lying_wait():
    """A wait that returns its buffer under another name and doesn't say so."""
    library = torch.library.Library("lying", "FRAGMENT")
    library.define("wait(Tensor buffer) -> Tensor")
    library.impl("wait", lambda buffer: buffer.view(buffer.shape), "CPU")
    torch.library.register_fake("lying::wait", torch.empty_like, lib=library)
    return library, torch.ops.lying.wait.default


def _graph(wait):
    """The buffer is dead for Inductor once it was waited for; what comes then takes its memory."""

    def graph(x, matrix):
        gathered = wait(x * 2)
        y = matrix @ x.sin()
        for _ in range(2):
            y = matrix @ y.cos()
        return gathered + y

    return graph


@pytest.mark.filterwarnings("ignore:.*may not alias any inputs")
def test_a_lying_schema_corrupts_data_and_is_caught():
    torch._dynamo.reset()
    library, wait = _lying_wait()
    graph = _graph(wait)
    x, matrix = draw(32, 32), draw(32, 32, seed=1) / 6
    compiled = torch.compile(graph, fullgraph=True)
    # Where the environment has CI in it, torch itself refuses the op before it does harm.
    with torch._functorch.config.patch(error_on_custom_op_aliasing=False):
        assert (compiled(x, matrix) - graph(x, matrix)).abs().max() > 0.1
    torch._dynamo.reset()
    with (
        torch._functorch.config.patch(error_on_custom_op_aliasing=True),
        pytest.raises(RuntimeError, match="may not alias any inputs"),
    ):
        torch.compile(graph, fullgraph=True)(x, matrix)
    with pytest.raises(Exception, match="not defined to alias output but was aliasing"):
        opcheck(wait, (x,))
    del library


def _ours(decomposed):
    torch._dynamo.reset()
    rank, size = dist.get_rank(), dist.get_world_size()
    name = dist.group.WORLD.group_name
    rows = [32 // size] * size

    def wait(x):
        buffer = op.gather_cast_start(x.split(rows)[rank], rows, torch.float64, rank, name)
        return op.gather_cast_wait(buffer, rows, [32], torch.float64, rank, name)

    def several(x):
        parts = [y.split(rows)[rank] for y in (x, x + 1)]
        first, second = op.gather_cast_coalesced(
            parts, [*rows, *rows], [torch.float64] * 2, rank, name
        )
        return first * second - x * x - x + first

    if not decomposed:
        patches.uninstall()
    try:
        for function in (wait, several):
            graph = _graph(function)
            x, matrix = draw(32, 32), draw(32, 32, seed=1) / 6
            expected = _graph(lambda x: x)(x, matrix)
            for call in (graph, torch.compile(graph, fullgraph=True)):
                torch.testing.assert_close(call(x, matrix), expected, rtol=1e-12, atol=1e-12)
    finally:
        patches.install()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("decomposed", [True, False])
def test_ours_under_the_same_graph(ranks, decomposed):
    on_ranks(ranks, _ours, decomposed)


def _steps(rows, dtype):
    """200 compiled steps: gathers combined, launched early, let go of, and made again in backward;
    against the module in one process."""
    from torch._inductor import config

    from deepsp.compile import FuseGatherCast, RegatherInBackward

    torch._dynamo.reset()
    rank, size = dist.get_rank(), dist.get_world_size()
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    torch.manual_seed(0)
    layers = [m for n in range(4) for m in (nn.Linear(rows, rows), nn.Tanh())]
    reference = nn.Sequential(*layers).to(wide)
    model = copy.deepcopy(reference)
    deepsp.shard_parameters(model, dtype=dtype, reduce_dtype=wide, gradient_reduction="mean")
    post = FuseGatherCast(config.post_grad_custom_post_pass, prefetch_bytes=1 << 20)
    with config.patch(post_grad_custom_post_pass=post, joint_custom_pre_pass=RegatherInBackward()):
        compiled = torch.compile(lambda x: model(x).square().mean(), fullgraph=True)
        data = [draw(4, rows, seed=r).to(dtype) for r in range(size)]
        ours = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)
        theirs = torch.optim.SGD(reference.parameters(), lr=0.3, momentum=0.5)
        for _ in range(200):
            loss = compiled(data[rank])
            loss.backward()
            expected = [reference(x.to(wide)).square().mean() for x in data]
            (sum(expected) / size).backward()
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
            assert loss.isfinite()
            exact = dtype == torch.float64
            torch.testing.assert_close(
                loss.to(wide),
                expected[rank],
                rtol=1e-9 if exact else 0.1,
                atol=1e-12 if exact else 1e-3,
            )
    assert expected[rank] < 1e-2  # it learnt


@pytest.mark.parametrize(
    ("dtype", "rows"),
    [(torch.float64, 9), pytest.param(torch.bfloat16, 8, marks=pytest.mark.nightly)],
)
def test_two_hundred_compiled_steps(rows, dtype):
    on_ranks(2, _steps, rows, dtype)


class _Layers(nn.Module):
    """Attention whose results' memory Inductor would like to reuse: products of their size follow,
    and kv heads are shared by all ranks, whose gradients are summed."""

    def __init__(self, chunks):
        super().__init__()
        self.attention = deepsp.DistributedAttention(chunks=chunks)
        self.projections = nn.ModuleList(nn.Linear(24, 24 + 2 * 8) for _ in range(2))
        self.outputs = nn.ModuleList(nn.Linear(24, 24) for _ in range(2))

    def forward(self, x, lens):
        for projection, output in zip(self.projections, self.outputs, strict=True):
            q, k, v = projection(x.sin()).split([24, 8, 8], -1)
            q, k, v = (y.unflatten(-1, (-1, 8)).cos() for y in (q, k, v))
            y = self.attention(q, k, v, is_causal=True, enable_gqa=True, seq_lens=lens)
            x = x + output(y.flatten(2)).cos() * output(x.cos())
        return x.square().mean()


def _exchanges(chunks):
    """200 compiled steps next to eager ones."""
    torch._dynamo.reset()
    rank = dist.get_rank()
    lens = [11, 3, 9][: dist.get_world_size()]
    torch.manual_seed(0)
    reference = _Layers(chunks).double()
    model = copy.deepcopy(reference)
    compiled = torch.compile(model, fullgraph=True)
    ours = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    theirs = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.5)
    for step in range(200):
        x = draw(2, lens[rank], 24, seed=3 * step + rank)
        for call, optimizer in ((compiled, ours), (reference, theirs)):
            optimizer.zero_grad()
            call(x, lens).backward()
            optimizer.step()
        for (n, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(
                p, q, rtol=1e-8, atol=1e-10, msg=lambda m, n=n, s=step: f"step {s}, {n}: {m}"
            )


@pytest.mark.parametrize(
    ("ranks", "chunks"), [(2, 2), pytest.param(3, 1, marks=pytest.mark.nightly)]
)
def test_compiled_exchanges(ranks, chunks):
    on_ranks(ranks, _exchanges, chunks)


def _reused():
    """What is dead for Inductor once a call has returned: the buffer of a wait, whose result is in
    it, and the inputs of a start, of which kv heads are summed later."""
    torch._dynamo.reset()
    rank, name = dist.get_rank(), dist.group.WORLD.group_name
    identity = deepsp.DistributedAttention(lambda q, k, v: q * 1)

    def there_and_back(x):
        x = x.view(1, 32, 4, 8)
        return identity(x, x, x).view(32, 32)

    def used_twice(x, matrix):
        given = there_and_back(x * 2)
        y = matrix @ given.sin()
        for _ in range(2):
            y = matrix @ y.cos()
        return given + y

    def summed(x):
        own = x.view(1, 64, 1, 16)
        given = ([own.cos(), own * 2, own * 3], [2, 1, 1], [32, 32], 0, 1, rank, name)
        return op.heads_to_seq_start(*given, tokens_first=False)

    def waited(buffer):
        rest = ([2, 1, 1], [16] * 3, 1, [32, 32], rank, name)
        return op.heads_to_seq_wait([buffer], *rest, tokens_first=False)

    def sums(x, matrix):
        buffer = summed(x)
        y = matrix @ x.sin()
        for _ in range(3):
            y = matrix @ y.cos()
        return [*waited(buffer), y]

    def shared(x, matrix, views=False):
        """Two starts in flight read one buffer: the first wait doesn't free it."""
        sent = matrix @ x
        parts = (sent[:16], sent[16:]) if views else (sent, sent)
        first, second = (deepsp.collectives.reduce_scatter_start(part, 0) for part in parts)
        early = first.wait()
        y = (matrix + early.sum()).cos()
        for _ in range(3):
            y = matrix @ y.cos()
        return early, second.wait(), y

    x, matrix = draw(32, 32), draw(32, 32, seed=1) / 6
    for graph in (used_twice, sums, shared, functools.partial(shared, views=True)):
        expected = graph(x, matrix)
        for _ in range(3):
            found = torch.compile(graph, fullgraph=True)(x, matrix)
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("apart", ["mapped", "messages"])
def test_reused_memory(apart):
    on_ranks(2, _reused, apart=apart)


def _written():
    """What a start sends, while the other rank is late: memory that is dead for Inductor, written
    in place, or an input of the graph that changes."""
    torch._dynamo.reset()
    rank, name = dist.get_rank(), dist.group.WORLD.group_name
    rows, width = 1 << 14, 64
    where = (0, [rows, rows], "replicated", rank, name)

    def start(x):
        return op.all_gather_start(x, *where[:2], *where[2:])

    def wait(buffer):
        (full,) = op.all_gather_wait(buffer, 0, where[1], [2 * rows, width], *where[2:])
        return full * 1

    def dead(x, rest):
        buffer = start(x * 2)
        for _ in range(3):
            rest = (rest @ rest).cos()
        return wait(buffer), rest

    def in_place(x, rest):
        sent = x * 2
        buffer = start(sent)
        written = sent.index_put((torch.arange(8),), torch.full((8, width), 7.0))
        for _ in range(3):
            rest = (rest @ rest).cos() + written.sum()
        return wait(buffer) + 0 * rest.mean(), written

    def mutated(x, rest):
        buffer = start(x)
        x.mul_(2)
        for _ in range(3):
            rest = (rest @ rest).cos() + x.sum()
        return wait(buffer) * 2 + 0 * rest.mean(), x * 1

    full = draw(2 * rows, width, dtype=torch.float32)
    square = draw(1024, 1024, dtype=torch.float32) / 40
    for function in (dead, in_place, mutated):
        compiled = torch.compile(function, fullgraph=True)
        for late in (0, 1, 0, 1):
            x = full.split(rows)[rank].clone()
            dist.barrier()
            time.sleep(0.2 * (rank == late))
            y, other = compiled(x, square)
            assert torch.equal(y, full * 2), function.__name__
            if function is not dead:
                assert torch.equal(other[8:], full.split(rows)[rank][8:] * 2), function.__name__


@pytest.mark.parametrize("apart", ["mapped", "messages"])
def test_what_a_start_sends_stays(apart):
    on_ranks(2, _written, apart=apart)


def _freed():
    """Without gradients, the memory of one layer's exchanges serves the next, though Inductor may
    not reuse it: compiled code lets go of the buffers and results of each."""
    torch._dynamo.reset()
    attention = deepsp.DistributedAttention()

    def layers(x):
        for _ in range(4):
            x = x + attention(*(y.unflatten(-1, (4, 8)) for y in (x, x.cos(), x.sin()))).flatten(2)
        return x * 1

    x = draw(1, 16, 32)
    out, (code,) = run_and_get_code(torch.compile(layers, fullgraph=True), x)
    torch.testing.assert_close(out, layers(x), rtol=1e-12, atol=1e-12)
    calls = set(re.findall(r"^ *(buf\d+) = torch\.ops\.deepsp", code, re.MULTILINE))
    results = re.findall(r"^ *(buf\d+) = (buf\d+)\[\d+\]", code, re.MULTILINE)
    results = {result for result, call in results if call in calls}
    assert len(calls) == 4 * 3 and len(results) == 4 * 5, code
    freed = re.findall(r"^ *del (.*)", code, re.MULTILINE)
    kept = results - {name for line in freed for name in line.split(", ")}
    assert len(kept) <= 1, kept  # of the last layer, which ends with the call


def test_results_are_freed():
    on_ranks(2, _freed)
