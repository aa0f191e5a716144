"""Linear layers fused with their collectives, against one process that has everything."""

import pytest
import torch
import torch.distributed as dist
from exchanges import check_matmuls
from harness import on_ranks
from reference import draw
from torch import nn

import deepsp
from deepsp.ranks.lengths import seq_lens

K, M = 4, 5


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_against_one_process(ranks, dtype):
    on_ranks(ranks, check_matmuls, dtype)


def _aot_eager():
    check_matmuls(
        torch.float64, lambda f: torch.compile(f, backend="aot_eager", fullgraph=True, dynamic=True)
    )


def test_under_aot_eager():
    on_ranks(2, _aot_eager)


def _inductor():
    rank, size = dist.get_rank(), dist.get_world_size()
    lens = seq_lens(2 * size + 1)
    x, weight, bias = (
        draw(*shape, seed=s).requires_grad_()
        for s, shape in enumerate([(2, lens[rank], K), (K, K), (K,)])
    )

    def mlp(x, weight, bias):
        h = deepsp.collectives.all_gather_matmul(x, weight, bias, 1, sizes=lens).relu()
        return deepsp.collectives.matmul_reduce_scatter(h, weight, bias, 1, sizes=lens)

    torch._dynamo.reset()
    ys = [f(x, weight, bias) for f in (mlp, torch.compile(mlp, fullgraph=True))]
    grads = [torch.autograd.grad((y**2).sum(), (x, weight, bias)) for y in ys]
    torch.testing.assert_close(ys[1], ys[0])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


def test_under_inductor():
    on_ranks(2, _inductor)


def _frozen_and_autocast():
    rank, size = dist.get_rank(), dist.get_world_size()
    x = draw(2, 3, K, seed=rank, dtype=torch.float32)
    linear = nn.Linear(K, M)
    for frozen in ("weight", "bias", "both"):
        linear.weight.requires_grad_(frozen == "bias")
        linear.bias.requires_grad_(frozen == "weight")
        for op in (deepsp.collectives.all_gather_matmul, deepsp.collectives.matmul_reduce_scatter):
            leaf = x.detach().requires_grad_(frozen == "both")
            y = op(leaf, linear.weight, linear.bias, 0)
            y.sum().backward()
            assert (leaf.grad is not None) == (frozen == "both")
    assert linear.weight.grad is not None and linear.bias.grad is not None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = deepsp.collectives.all_gather_matmul(x.requires_grad_(), linear.weight, linear.bias, 1)
        assert y.dtype == torch.bfloat16 and y.shape == (2, 3 * size, M)
        assert (
            deepsp.collectives.matmul_reduce_scatter(x, linear.weight, None, 1).dtype
            == torch.bfloat16
        )
    y.sum().backward()
    assert x.grad.dtype == torch.float32
    g = torch.autograd.grad(
        deepsp.collectives.all_gather_matmul(x, linear.weight, None, 1).sum(), x, create_graph=True
    )[0]
    with pytest.raises(RuntimeError, match="not implemented"):
        g.sum().backward()


def test_frozen_parameters_and_autocast():
    on_ranks(2, _frozen_and_autocast)


def _errors():
    x, w = torch.ones(2, 3, K), torch.ones(M, K)
    for op in (deepsp.collectives.all_gather_matmul, deepsp.collectives.matmul_reduce_scatter):
        for call, message in [
            (lambda op=op: op(x, w, None, 2), "dim to be before the last dimension.*, got 2"),
            (lambda op=op: op(x, w.t(), None, 1), r"weight to have shape \[M, 4\].*, got \[4, 5\]"),
            (lambda op=op: op(x, w, torch.ones(2), 1), r"bias to have shape \[5\].*, got \[2\]"),
            (
                lambda op=op: op(x, w.double(), None, 1),
                "weight to have the dtype of input .*, got float64",
            ),
            (lambda op=op: op(x, w, None, 1, sizes=[9, 9]), "input to have size .*, got 3"),
            (lambda op=op: op(x.int(), w.int(), None, 1), "input to be float64.*, got int32"),
        ]:
            with pytest.raises(ValueError, match=message):
                call()


def test_errors():
    on_ranks(2, _errors)


def _pipelined():
    """A rank's product is computed before all parts are there, and before all have left."""
    x, w = torch.ones(2, 4, K).requires_grad_(), torch.ones(K, K).requires_grad_()
    with torch.profiler.profile() as profile:
        y = deepsp.collectives.matmul_reduce_scatter(
            deepsp.collectives.all_gather_matmul(x, w, None, 0), w, None, 0
        )
        y.sum().backward()
    names = {e.name for e in profile.events()}
    # Nothing is packed, copied out or put together.
    assert not names & {"deepsp::pack", "deepsp::land", "aten::cat"}, names


def test_nothing_is_copied():
    on_ranks(2, _pipelined)
