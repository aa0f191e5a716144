"""Attention for which keys travel and queries stay: against all scores in one process, float64."""

import contextlib
import itertools
import random

import pytest
import torch
import torch.distributed as dist
from harness import on_ranks
from reference import draw, everything, lens_of
from torch.utils._python_dispatch import TorchDispatchMode

import deepsp

CAUSAL = {"is_causal": True}


class _Sent(TorchDispatchMode):
    """How many tokens each rank sends to each, and the numbers of each."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.deepsp._rows_start.default:
            size = dist.get_world_size()
            self.counts = [args[1][r * size : (r + 1) * size] for r in range(size)]
            self.numbers = args[0].size(1)
        return func(*args, **(kwargs or {}))


def _compare(shape, lens, documents, options, *, sunk=False, layout="bshd", attend=None):
    """shape: B, S, Hq, Hkv, D, Dv. Returns what was sent."""
    rank = dist.get_rank()
    batch, length, heads, kv_heads, dim, dim_v = shape
    sizes = [(heads, dim), (kv_heads, dim), (kv_heads, dim_v)]
    q, k, v = (draw(batch, length, *s, seed=n) for n, s in enumerate(sizes))
    sinks = [draw(heads, seed=7)] * sunk
    leaves = [x.requires_grad_() for x in (q, k, v, *sinks)]
    here = slice(sum(lens[:rank]), sum(lens[: rank + 1]))
    order = {"bshd": (0, 1, 2, 3), "sbhd": (1, 0, 2, 3), "bhsd": (0, 2, 1, 3)}[layout]
    sent = _Sent()
    with contextlib.nullcontext() if attend else sent:
        out = (attend or deepsp.distributed_attention)(
            *(x[:, here].permute(order) for x in (q, k, v)),
            enable_gqa=True,
            seq_lens=lens,
            documents=documents,
            sinks=sinks[0] if sunk else None,
            layout=layout,
            exchange="keys",
            **options,
        ).permute(order)
        window, cap = options.get("window_size"), options.get("softcap")
        expected = everything(
            q, k, v, documents, options.get("is_causal", False), window, cap, *(sinks or [None])
        )
        grad = draw(*expected.shape, seed=9)
        torch.testing.assert_close(out, expected[:, here], rtol=0, atol=1e-12)
        gradients = torch.autograd.grad(out, leaves, grad[:, here])
        expected_gradients = torch.autograd.grad(expected, leaves, grad)
        for x, y in zip(gradients, expected_gradients, strict=True):
            x = x.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(x)
            torch.testing.assert_close(x, y, rtol=0, atol=1e-12)
    return sent


def _random(seed, count):
    """Uneven lengths, also of 0; documents with padding, of one token, across any border."""
    draws = random.Random(seed)
    for _ in range(count):
        size, kv_heads = dist.get_world_size(), draws.choice([1, 2])
        lens = [draws.choice([0, 1, 2, 5, 9]) for _ in range(size)]
        lens[draws.randrange(size)] += 3
        length, batch = sum(lens), draws.choice([1, 2])
        documents = None
        if draws.random() < 0.6:
            cuts = sorted(draws.sample(range(batch * length + 1), min(5, length)))
            cuts = sorted({*cuts, *(row * length for row in range(batch + 1))})
            ranges = [list(x) for x in itertools.pairwise(cuts) if draws.random() < 0.8]
            documents = torch.tensor(ranges or [[0, 1]])
        options = dict(draws.choice([CAUSAL, {}]))
        if draws.random() < 0.5:
            right = 0 if options else draws.choice([-1, 0, 3])
            options["window_size"] = (draws.choice([-1, 0, 1, 4, 30]), right)
        if draws.random() < 0.3:
            options["softcap"] = 3.0
        shape = batch, length, kv_heads * draws.choice([1, 3]), kv_heads, 8, draws.choice([8, 4])
        sunk, layout = draws.random() < 0.3, draws.choice(["bshd", "sbhd", "bhsd"])
        _compare(shape, lens, documents, options, sunk=sunk, layout=layout)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_equals_one_process(ranks):
    on_ranks(ranks, _random, ranks, 25)


def _bytes():
    """A rank receives the tokens that its queries see, and no others."""
    rank, size = dist.get_rank(), dist.get_world_size()
    lens = lens_of("skewed", 40, size)
    first = sum(lens[:rank])
    shape = 2, 40, 4, 2, 8, 4

    def received(documents, options):
        sent = _compare(shape, lens, documents, options)
        assert sent.numbers == 2 * 2 * (8 + 4)  # rows, kv heads, features
        return sum(counts[rank] for r, counts in enumerate(sent.counts) if r != rank)

    assert received(None, CAUSAL) == first
    assert received(None, {}) == 40 - lens[rank]
    assert received(None, CAUSAL | {"window_size": (6, 0)}) == min(6, first)
    last = first + lens[rank]
    both = min(4, first) + min(3, 40 - last)
    assert received(None, {"window_size": (4, 3)}) == both
    # In both rows there are documents of ten tokens.
    documents = torch.tensor([[n, n + 10] for n in range(0, 80, 10)])
    assert received(documents, CAUSAL) == first % 10


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_travels(ranks):
    on_ranks(ranks, _bytes)


def _module():
    size = dist.get_world_size()
    for chunks in (1, "auto"):

        def attend(*x, layout, exchange, chunks=chunks, **options):
            module = deepsp.DistributedAttention(None, None, chunks, layout, exchange=exchange)
            return module(*x, **options)

        options = CAUSAL | {"window_size": (5, 0)}
        lens = lens_of("skewed", 23, size)
        _compare((2, 23, 4, 2, 8, 8), lens, None, options, layout="bhsd", attend=attend)


@pytest.mark.parametrize("ranks", [2, 3])
def test_module(ranks):
    on_ranks(ranks, _module)


def _compiled():
    torch._dynamo.reset()
    size = dist.get_world_size()
    documents = torch.tensor([[0, 7], [7, 30], [33, 40]])
    for backend, totals in (("aot_eager", (40, 44)), ("inductor", (40,))):
        attend = torch.compile(deepsp.distributed_attention, fullgraph=True, backend=backend)
        for total in totals:
            options = CAUSAL | {"window_size": (9, 0)}
            shape = 1, total, 4, 2, 8, 8
            _compare(shape, lens_of("skewed", total, size), documents, options, attend=attend)
    q = draw(2, 20 // size, 2, 4)
    attend = torch.compile(deepsp.distributed_attention, fullgraph=True, backend="aot_eager")
    with pytest.raises(ValueError, match="each in one row"):
        attend(q, q, q, documents=torch.tensor([0, 30, 40]), exchange="keys")


def test_compiled_code():
    on_ranks(2, _compiled)


def _sixteen_bits():
    """Gradients from several ranks are added in float32: in bfloat16, 256 + 1 is 256."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.zeros(1, 1, 1, 8, dtype=torch.bfloat16)
    for large in range(size):
        v = x.clone().requires_grad_()
        out = deepsp.distributed_attention(x, x, v, exchange="keys")  # the mean of all tokens
        (gradient,) = torch.autograd.grad(
            out, v, torch.full_like(out, 1024 if rank == large else 4)
        )
        assert bool((gradient == 260).all()), (large, gradient)


def test_sixteen_bits():
    on_ranks(4, _sixteen_bits)


def _latent(q, latents, rotated, up, query_indices):
    """Multi-head latent attention: all heads' keys and values are made from a latent."""
    k, v = (latents[:, :, 0] @ up).unflatten(-1, (q.size(2), -1)).split([6, 4], -1)
    k = torch.cat([k, rotated.expand(-1, -1, q.size(2), -1)], -1)
    seen = query_indices[:, None] >= torch.arange(k.size(1))
    out = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), seen
    )
    return out.transpose(1, 2)


def _function():
    """A function of one's own gets this rank's queries, and what all tokens' keys are made from."""
    rank, size = dist.get_rank(), dist.get_world_size()
    lens = lens_of("skewed", 23, size)
    here = slice(sum(lens[:rank]), sum(lens[: rank + 1]))
    inputs = [draw(2, 23, *s, seed=n) for n, s in enumerate([(3, 8), (1, 5), (1, 2)])]
    up = draw(5, 3 * 10, seed=4)
    leaves = [x.requires_grad_() for x in (*inputs, up)]
    expected = _latent(*inputs, up, torch.arange(23))
    grad = draw(*expected.shape, seed=9)
    expected_gradients = torch.autograd.grad(expected, leaves, grad)
    for compiled in (False, True):
        module = deepsp.DistributedAttention(_latent, exchange="keys")
        call = torch.compile(module, backend="aot_eager", fullgraph=True) if compiled else module
        out = call(*(x[:, here] for x in inputs), up, seq_lens=lens)
        torch.testing.assert_close(out, expected[:, here], rtol=0, atol=1e-12)
        for x, y in zip(
            torch.autograd.grad(out, leaves, grad[:, here]), expected_gradients, strict=True
        ):
            x = x.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(x)
            torch.testing.assert_close(x, y, rtol=0, atol=1e-12)

    # Tensors of different dtypes go in messages of their own.
    ids = torch.arange(1000, 1000 + 23).expand(2, -1)[..., None, None]

    def same(q, ids, latents, query_indices):
        assert ids.dtype == torch.int64 and latents.dtype == torch.bfloat16
        assert torch.equal(ids[:, query_indices, 0, 0], ids[:, here, 0, 0])
        assert torch.equal(ids[0, :, 0, 0], torch.arange(1000, 1000 + 23))
        return q

    module = deepsp.DistributedAttention(same, exchange="keys")
    module(inputs[0][:, here], ids[:, here], inputs[1][:, here].bfloat16(), seq_lens=lens)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_function_of_ones_own(ranks):
    on_ranks(ranks, _function)


def _auto():
    size = dist.get_world_size()
    for window, expected in (((5, 0), "keys"), ((-1, 0), "heads")):
        lens = [40 // size] * size
        options = {"is_causal": True, "window_size": window}
        shape, sent = (1, 40, 8, 2, 4, 4), _Sent()

        def attend(*x, exchange, sent=sent, **options):
            with sent:
                return deepsp.distributed_attention(*x, exchange="auto", **options)

        _compare(shape, lens, None, options, attend=attend)
        plan = deepsp.plan_attention(
            8,
            2,
            seq_len=40,
            ranks=size,
            seq_lens=lens,
            head_dim=4,
            exchange="auto",
            dtype=torch.float64,
            **options,
        )
        assert plan.exchange == expected == ("keys" if hasattr(sent, "counts") else "heads")
        if expected == "keys":
            for rank, share in enumerate(plan.ranks):
                counts = (c[rank] for r, c in enumerate(sent.counts) if r != rank)
                assert share.received == sum(counts) * sent.numbers * 8


@pytest.mark.parametrize("ranks", [2, 4])
def test_auto(ranks):
    on_ranks(ranks, _auto)


def _errors():
    q = draw(1, 6, 2, 4)
    total = 6 * dist.get_world_size()
    mask = torch.ones(total, total, dtype=torch.bool)
    wrong = [
        ({"attn_mask": mask}, "no attn_mask with exchange 'keys', got one; leave it out"),
        ({"dropout_p": 0.5}, r"no dropout_p with exchange 'keys', got 0.5"),
        ({"chunks": 2}, "no chunks with exchange 'keys', got 2"),
        ({"kv_chunk": 4}, "no kv_chunk with exchange 'keys'"),
        ({"exchange": "values"}, "expected exchange to be 'heads' or 'keys', got 'values'"),
    ]
    for arguments, match in wrong:
        with pytest.raises(ValueError, match=match):
            deepsp.distributed_attention(q, q, q, **{"exchange": "keys"} | arguments)
    deal = deepsp.deal_documents([6] * dist.get_world_size(), dist.get_world_size(), 6)
    with pytest.raises(ValueError, match="expected no deal with exchange 'keys', got one"):
        deepsp.DistributedAttention(exchange="keys")(q, q, q, deal=deal)
    for arguments, match in (
        ({"exchange": "values"}, r"expected exchange to be one of \['heads', 'keys', 'auto'\]"),
        ({"exchange": "keys", "chunks": 2}, "expected chunks=1 with exchange 'keys', got 2"),
        (
            {"exchange": "keys", "local_attention": lambda q, k, v: q},
            "expected a local_attention that declares an argument query_indices",
        ),
        (
            {"exchange": "auto", "local_attention": lambda q, k, v: q},
            r"expected exchange to be one of \['heads', 'keys'\], got 'auto'",
        ),
    ):
        with pytest.raises(ValueError, match=match):
            deepsp.DistributedAttention(**arguments)


@pytest.mark.parametrize("ranks", [1, 2])
def test_errors(ranks):
    on_ranks(ranks, _errors)
