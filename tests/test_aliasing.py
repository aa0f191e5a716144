"""Buffers under Inductor: what a wrong schema does to data, and that ours don't."""

import pytest
import torch
import torch.distributed as dist
from harness import on_ranks
from reference import draw
from torch.library import opcheck

from deepsp.compile import decompositions

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
    assert (compiled(x, matrix) - graph(x, matrix)).abs().max() > 0.1
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
        decompositions.uninstall()
    try:
        for function in (wait, several):
            graph = _graph(function)
            x, matrix = draw(32, 32), draw(32, 32, seed=1) / 6
            expected = _graph(lambda x: x)(x, matrix)
            for call in (graph, torch.compile(graph, fullgraph=True)):
                torch.testing.assert_close(call(x, matrix), expected, rtol=1e-12, atol=1e-12)
    finally:
        decompositions.install()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("decomposed", [True, False])
def test_ours_under_the_same_graph(ranks, decomposed):
    on_ranks(ranks, _ours, decomposed)
