"""Where q, k, v and the output have their dimensions: the same results, and no copy more."""

import pytest
import torch
import torch.distributed as dist
from harness import on_ranks
from reference import attention, draw, lens_of, names

import deepsp

ORDERS = {"bshd": (0, 1, 2, 3), "sbhd": (1, 0, 2, 3), "bhsd": (0, 2, 1, 3)}


def _local(layout):
    """A local attention that works in a layout."""
    order = ORDERS[layout]

    def local(q, k, v, **kwargs):
        return attention(*(x.permute(order) for x in (q, k, v)), **kwargs).permute(order)

    return local


def _memory(x, order):
    """Dimensions of [B, S, H, D] from the outermost in memory on."""
    x = x.permute(order)
    dims = [d for d in range(4) if x.size(d) > 1]
    return sorted(dims, key=lambda d: -x.stride(d))


def _check(layout, kind, chunks, module):
    rank, size = dist.get_rank(), dist.get_world_size()
    order, s, total = ORDERS[layout], layout.index("s"), 12 if kind == "equal" else 11
    lens = [total // size] * size if kind == "equal" else lens_of(kind, total, size)
    said = None if kind == "equal" else lens
    whole = [draw(3, total, h, d, seed=i) for i, (h, d) in enumerate([(6, 8), (2, 8), (2, 4)])]
    full = [x.clone().requires_grad_() for x in whole]
    expected = attention(*full, is_causal=True)
    grad = draw(*expected.shape, seed=9)
    expected_grads = torch.autograd.grad(expected, full, grad)

    mine = [x.split(lens, 1)[rank].permute(order).contiguous().requires_grad_() for x in whole]
    ours = {
        "function": lambda *x: deepsp.distributed_attention(
            *x, is_causal=True, enable_gqa=True, seq_lens=said, chunks=chunks, layout=layout
        ),
        "sdpa": lambda *x: deepsp.DistributedAttention(chunks=chunks, layout=layout)(
            *x, is_causal=True, enable_gqa=True, seq_lens=said
        ),
        "local": lambda *x: deepsp.DistributedAttention(
            _local(layout), chunks=chunks, layout=layout
        )(*x, is_causal=True, seq_lens=said),
    }[module]
    out = ours(*mine)
    grads = torch.autograd.grad(out, mine, grad.split(lens, 1)[rank].permute(order).contiguous())
    for a, b in zip((out, *grads), (expected, *expected_grads), strict=True):
        torch.testing.assert_close(a.permute(order), b.split(lens, 1)[rank], rtol=1e-10, atol=1e-11)
        assert a.size(s) == lens[rank]
        of_sdpa = size == 1 and module != "local" and a is not out  # nothing merges them
        if lens[rank] > 1 and a.size(layout.index("h")) > 1 and not of_sdpa:
            assert _memory(a, order)[:2] == ([1, 0] if layout == "sbhd" else [0, 1])


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("layout", list(ORDERS))
def test_equals_one_process(ranks, layout):
    cases = [("split", 1, "function"), ("skewed", 2, "sdpa"), ("equal", 1, "function")]
    cases += [("equal", 2, "local"), ("empty", 1, "local"), ("skewed", 2, "local")]
    for kind, chunks, module in cases:
        on_ranks(ranks, _check, layout, kind, chunks, module)


class _Nothing(torch.autograd.Function):
    """Attention that costs nothing, in the layout in which the exchange wants it."""

    @staticmethod
    def forward(ctx, q, k, v):
        ctx.shapes = q.shape, k.shape, v.shape
        return torch.ones(q.size(1), q.size(0), *q.shape[2:]).transpose(0, 1)

    @staticmethod
    def backward(ctx, grad):
        return tuple(torch.ones(shape) for shape in ctx.shapes)


def _copies():
    """As many packs and merges in each layout, and nothing else copies, also not what follows."""
    counts = {}
    for layout, order in ORDERS.items():
        x = [torch.ones(2, 64, h, 32).permute(order).contiguous() for h in (8, 4, 4)]
        if layout == "bhsd":  # as models have it: a view of what a linear layer returned
            x = [torch.ones(2, 64, h, 32).transpose(1, 2) for h in (8, 4, 4)]
        x = [y.requires_grad_() for y in x]
        back = [order.index(d) for d in range(4)]

        def local(q, k, v, back=back, order=order):
            q, k, v = (y.permute(order) for y in (q, k, v))
            return _Nothing.apply(q, k, v).permute(back)

        module = deepsp.DistributedAttention(local, layout=layout)
        module(*x)

        def train(module=module, x=x, layout=layout):
            out = module(*x)
            flat = (out.transpose(1, 2) if layout == "bhsd" else out).flatten(2)
            torch.autograd.grad(flat, x, torch.ones_like(flat))

        seen = names(train)
        assert not any(seen[f"aten::{n}"] for n in ("copy_", "clone", "contiguous", "cat")), seen
        counts[layout] = [seen[f"deepsp::{n}"] for n in ("exchange", "pack", "merge")]
    assert counts["bshd"] == counts["sbhd"] == counts["bhsd"], counts


def test_no_copy_more():
    on_ranks(2, _copies)


def _errors():
    x = torch.zeros(2, 4, 4, 8)
    for call in (
        lambda: deepsp.distributed_attention(x, x, x, layout="hbsd"),
        lambda: deepsp.DistributedAttention(layout="hbsd"),
        lambda: torch.ops.deepsp.distributed_attention(
            x, x, x, None, 0.0, False, None, False, 1, [4, 4], 0, "", layout="hbsd"
        ),
    ):
        with pytest.raises(ValueError, match="layout to be 'bshd', 'sbhd' or 'bhsd', got 'hbsd'"):
            call()
    with pytest.raises(
        ValueError, match=r"q to have 4 dim.*\[sequence, batch, heads, head_dim\], got 3"
    ):
        deepsp.distributed_attention(x[0], x, x, layout="sbhd")
    with pytest.raises(
        ValueError, match=r"k to have 4 dim.*\[batch, heads, sequence, head_dim\], got 3"
    ):
        deepsp.distributed_attention(x, x[0], x, layout="bhsd")


def test_errors():
    on_ranks(2, _errors)


def _compiled(layout, backend):
    torch._dynamo.reset()
    x = [torch.ones(2, 4, 4, 4, requires_grad=True) * (i + 1) for i in range(3)]

    def layer(*x):
        return deepsp.distributed_attention(*x, is_causal=True, layout=layout, chunks=2)

    grads = []
    for function in (layer, torch.compile(layer, backend=backend, fullgraph=True)):
        out = function(*x)
        grads.append((out, *torch.autograd.grad(out.sin().sum(), x)))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)
        assert a.stride() == b.stride()


@pytest.mark.parametrize(
    ("layout", "backend"), [("sbhd", "aot_eager"), ("bhsd", "aot_eager"), ("sbhd", "inductor")]
)
def test_compiled(layout, backend):
    on_ranks(2, _compiled, layout, backend)
