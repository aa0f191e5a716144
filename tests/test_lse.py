"""Attention with the log-sum-exp of its scores, and what is merged by it: values and gradients,
through both, against one process in float64."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from attentions import compare_attention, compare_tokens, draw_qkv
from harness import on_ranks
from reference import draw, everything, lens_of
from torch._dynamo.testing import CompileCounterWithBackend

import deepsp

INF = math.inf
S = 17
ORDERS = deepsp.sequence.attention.parts.ORDERS
BORDERS = torch.tensor([[0, 1], [1, 7], [8, 15]])  # and tokens outside

# By name: arguments of attention; heads and kv heads, batch.
CASES = {
    "plain": ({}, (4, 2, 2)),
    "causal": ({"is_causal": True}, (4, 4, 2)),
    "documents": ({"is_causal": True, "documents": BORDERS}, (4, 2, 1)),
    "window": ({"is_causal": True, "window_size": (3, 0)}, (4, 2, 2)),
    "softcap": ({"softcap": 2.0, "scale": 0.7}, (4, 2, 1)),
    "sinks": ({"is_causal": True, "sinks": True, "documents": BORDERS}, (4, 1, 1)),
    "two chunks": ({"is_causal": True, "chunks": 2}, (8, 4, 2)),
    "cut queries": ({"is_causal": True, "query_parts": "auto"}, (1, 1, 2)),
    "cut, documents": ({"documents": BORDERS, "query_parts": "auto", "chunks": 2}, (3, 3, 1)),
    "parts of keys": ({"is_causal": True, "kv_chunk": 4}, (4, 2, 2)),
    "parts, sinks": ({"sinks": True, "kv_chunk": 5, "window_size": (4, 2)}, (4, 2, 1)),
    "by keys": ({"is_causal": True, "exchange": "keys", "window_size": (4, 0)}, (2, 1, 1)),
    "tokens first": ({"is_causal": True, "layout": "sbhd"}, (4, 2, 2)),
    "heads first": ({"is_causal": True, "layout": "bhsd", "kv_chunk": 6}, (4, 2, 2)),
}


def _asked(options, sinks):
    """The same for `everything`."""
    names = {"window_size": "window"}
    asked = ("documents", "is_causal", "window_size", "softcap", "scale")
    found = {names.get(name, name): options[name] for name in asked if name in options}
    return found | ({"sinks": sinks[0]} if sinks else {})


def _equal(name, kind, calls):
    options, (heads, kv_heads, batch) = CASES[name]
    lens = lens_of(kind, S, dist.get_world_size())
    order = ORDERS[options.get("layout", "bshd")]
    sinks = [draw(heads, seed=7).requires_grad_()] if "sinks" in options else []

    def ours(*leaves):
        qkv = (x.permute(order) for x in leaves[:3])
        how = {**options, "enable_gqa": True, "seq_lens": lens, "return_lse": True}
        if sinks:
            how["sinks"] = leaves[3]
        out, lse = calls(*qkv, **how)
        assert lse.is_contiguous() and lse.shape == out.shape[:-1]
        return out.permute(order), lse.permute(order[:3])

    def reference(*leaves):
        return everything(*leaves[:3], return_lse=True, **_asked(options, leaves[3:]))

    compare_attention(draw_qkv(batch, S, heads, kv_heads, 6, 5), lens, ours, reference, sinks)


def _cases(kind):
    for name in CASES:
        size, (heads, _, _) = dist.get_world_size(), CASES[name][1]
        if heads % size and "query_parts" not in CASES[name][0]:
            continue
        _equal(name, kind, deepsp.distributed_attention)


@pytest.mark.parametrize("kind", ["split", "skewed", "empty"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_cases(size, kind):
    on_ranks(size, _cases, kind)


def _own(q, k, v, query_indices, return_lse, slopes=None, head_indices=None):
    """A function of a user's: [B, n, h, D]; the log-sum-exp is [B, h, n]."""
    assert return_lse
    k, v = (x.repeat_interleave(q.size(2) // k.size(2), 2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k)
    if slopes is not None:
        scores = scores * slopes[head_indices][:, None, None]
    seen = torch.arange(k.size(1)) <= query_indices[:, None]
    scores = scores.masked_fill(~seen, -INF)
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v), scores.logsumexp(-1)


def _by_function(kind):
    size = dist.get_world_size()
    lens = lens_of(kind, S, size)
    slopes = draw(4).abs() + 0.1
    whole = torch.arange(S)

    for exchange, more in (
        ("heads", {"chunks": 2}),
        ("heads", {"query_parts": "auto", "chunks": "auto"}),
        ("keys", {}),
    ):
        module = deepsp.DistributedAttention(_own, exchange=exchange, **more)

        def ours(*leaves, module=module):
            out, lse = module(*leaves, seq_lens=lens, return_lse=True, slopes=slopes)
            assert lse.is_contiguous()
            return out, lse

        def reference(*leaves):
            out, lse = _own(*leaves, whole, True, slopes, torch.arange(4))
            return out, lse.transpose(1, 2)

        compare_attention(draw_qkv(2, S, 4, 2, 6, 5), lens, ours, reference)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_functions_of_users(size):
    on_ranks(size, _auto_and_not, "skewed")


def _auto_and_not(kind):
    lens = lens_of(kind, S, dist.get_world_size())
    _by_function(kind)
    module = deepsp.DistributedAttention(lambda q, k, v: q)
    with pytest.raises(ValueError, match=r"return its output and the log-sum-exp of shape \(1, "):
        module(*draw_qkv(1, lens[dist.get_rank()], 4, 4, 2, 2), return_lse=True, seq_lens=lens)


def _flex(q, k, v, causal):
    from torch.nn.attention import flex_attention as flex

    aux = flex.AuxRequest(lse=True)
    return flex.flex_attention(q, k, v, block_mask=causal, return_aux=aux)


def _flex_lse():
    from torch.nn.attention.flex_attention import create_block_mask

    rank, lens = dist.get_rank(), lens_of("split", S, dist.get_world_size())
    causal = create_block_mask(lambda b, h, i, j: j <= i, None, None, S, S, device="cpu")
    module = deepsp.DistributedAttention(_flex, layout="bhsd")
    whole = draw_qkv(1, S, 4, 4, 16, 16, torch.float32)
    mine = [x.split(lens, 1)[rank].transpose(1, 2) for x in whole]
    with torch.no_grad():  # which gives none on a CPU
        out, lse = module(*mine, causal, seq_lens=lens, return_lse=True)
    expected = everything(*whole, None, True, return_lse=True)
    for x, y in zip((out, lse), expected, strict=True):
        torch.testing.assert_close(x.transpose(1, 2), y.split(lens, 1)[rank])


def test_flex_attention():
    on_ranks(2, _flex_lse)


def _one_loss(through):
    """The gradient comes through one of the two, on some ranks only."""
    lens = lens_of("split", S, dist.get_world_size())
    rank = dist.get_rank()
    for options in ({}, {"kv_chunk": 5}, {"exchange": "keys"}):
        whole = [x.requires_grad_() for x in draw_qkv(1, S, 4, 2, 6, 5)]
        mine = [x.split(lens, 1)[rank] for x in whole]
        found = deepsp.distributed_attention(
            *mine, is_causal=True, enable_gqa=True, return_lse=True, seq_lens=lens, **options
        )[through]
        expected = everything(*whole, None, True, return_lse=True)[through]
        weights = draw(*expected.shape, seed=9)
        weights[:, : lens[0]] = 0
        loss = (found * weights.split(lens, 1)[rank]).sum() if rank > 0 else found.sum() * 0
        grads = torch.autograd.grad(loss, whole)
        expected = torch.autograd.grad((expected * weights).sum(), whole, materialize_grads=True)
        for x, y in zip(grads, expected, strict=True):
            dist.all_reduce(x := x.contiguous())
            torch.testing.assert_close(x, y, rtol=0, atol=1e-12)


@pytest.mark.parametrize("through", [0, 1])
def test_gradient_through_one_of_both(through):
    on_ranks(2, _one_loss, through)


def _of_a_deal():
    size, rank = dist.get_world_size(), dist.get_rank()
    deal = deepsp.deal_documents([1, 1, 2, 5, 9, 17, 30], size)
    borders = torch.tensor(deal.lengths).cumsum(0)
    documents = torch.stack([borders - torch.tensor(deal.lengths), borders], 1)
    for heads in (4, 1):
        whole = [x.requires_grad_() for x in draw_qkv(1, sum(deal.lengths), heads, 1, 6, 5)]
        expected = everything(*whole, documents, True, return_lse=True)
        index = deal.tokens(rank)
        found = deepsp.distributed_attention(
            *(x[:, index] for x in whole), is_causal=True, enable_gqa=True, deal=deal,
            return_lse=True,
        )  # fmt: skip
        compare_tokens(found, expected, index, whole)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_deal(size):
    on_ranks(size, _of_a_deal)


def _narrow(dtype):
    """bfloat16 and float16: log-sum-exp and its gradient stay float32."""
    rank, lens = dist.get_rank(), lens_of("skewed", S, dist.get_world_size())
    whole = draw_qkv(1, S, 4, 2, 8, 8)
    for options in ({"is_causal": True}, {"kv_chunk": 5}, {"softcap": 3.0}):
        leaves = [x.to(dtype).requires_grad_() for x in whole]
        wide = [x.detach().double().requires_grad_() for x in leaves]
        mine = [x.split(lens, 1)[rank] for x in leaves]
        out, lse = deepsp.distributed_attention(
            *mine, enable_gqa=True, return_lse=True, seq_lens=lens, **options
        )
        assert out.dtype == dtype and lse.dtype == torch.float32
        _, sums = everything(*wide, return_lse=True, **_asked(options, ()))
        torch.testing.assert_close(lse.double(), sums.split(lens, 1)[rank], rtol=0, atol=5e-4)
        grad = torch.full_like(sums, 1 + torch.finfo(dtype).eps / 2)  # none of this dtype's numbers
        mine = torch.autograd.grad(lse, leaves[:2], grad.split(lens, 1)[rank].float())
        theirs = torch.autograd.grad(sums, wide[:2], grad)
        for x, y in zip(mine, theirs, strict=True):
            dist.all_reduce(x := x.double().contiguous())
            assert (x - y).abs().max() <= 2e-2 * y.abs().max()
            # What each element is rounded by averages out, and the gradient wasn't rounded.
            assert abs((x * y).sum() / y.square().sum() - 1) < torch.finfo(dtype).eps / 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes(dtype):
    on_ranks(2, _narrow, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_joined_and_split(dtype):
    op = torch.ops.deepsp
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    lse = torch.tensor([0.1, -INF, INF, math.nan, 1e-41, -1e38, 70000.1, 3.0], dtype=wide)
    lse = lse.repeat(6).view(2, 3, 8)
    out = draw(2, 3, 8, 5).to(dtype)
    x = op._join_log_sum(out, lse)
    found = op._split_log_sum(x)
    assert torch.equal(found[0], out)
    torch.testing.assert_close(found[1], lse, rtol=0, atol=0, equal_nan=True)
    assert x.transpose(0, 1).is_contiguous()


# ------------------------------------------------------------------- merging


def _parts(shape, count, seed=0):
    outs = [draw(*shape, 4, seed=seed + n).requires_grad_() for n in range(count)]
    return outs, [draw(*shape, seed=seed + 9 + n).requires_grad_() for n in range(count)]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_merge_equals_attention_to_all_keys(count):
    q, k, v = draw_qkv(2, 11, 4, 4, 6, 5)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    expected = everything(*leaves, return_lse=True)
    scores = torch.einsum("bihd,bjhd->bihj", q, k) / math.sqrt(6)
    parts = []
    for keys in torch.arange(11).tensor_split(count):
        some = scores[..., keys]
        out = torch.einsum("bihj,bjhd->bihd", some.softmax(-1), v[:, keys])
        parts.append((out, some.logsumexp(-1)))
    merged = deepsp.merge_attention(parts)
    grads = [draw(*x.shape, seed=3) for x in expected]
    for x, y in zip(merged, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-13)
    mine, theirs = (torch.autograd.grad(x, leaves, grads) for x in (merged, expected))
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-13)


def test_merge_gradients():
    outs, lses = _parts((2, 3), 3)

    def merge(*parts):
        return deepsp.merge_attention(list(zip(parts[:3], parts[3:], strict=True)))

    assert torch.autograd.gradcheck(merge, (*outs, *lses))
    assert torch.autograd.gradgradcheck(merge, (*outs, *lses))


def test_merge_of_nothing():
    outs, lses = _parts((3,), 2)
    full = [x.detach().clone().requires_grad_() for x in (*outs, *lses)]
    empty = torch.tensor([False, True, False])
    with torch.no_grad():
        outs[0][1:] = math.nan  # as kernels leave queries without keys
        lses[0][1:] = -INF
        outs[1][1:2] = INF
        lses[1][1:2] = -INF
    out, lse = deepsp.merge_attention(zip(outs, lses, strict=True))
    torch.testing.assert_close(out[1], torch.zeros(4, dtype=out.dtype))
    assert torch.equal(lse.isneginf(), empty)
    torch.testing.assert_close((out[2], lse[2]), (outs[1][2], lses[1][2]))
    expected = deepsp.merge_attention([(full[0][:1], full[2][:1]), (full[1][:1], full[3][:1])])
    torch.testing.assert_close((out[:1], lse[:1]), expected)
    grads = torch.autograd.grad((out, lse), (*outs, *lses), [draw(3, 4), draw(3)])
    assert not any(g.isnan().any() for g in grads)
    assert not any(g[1].any() for g in grads) and not grads[0][2].any()


def test_merge_refuses():
    (a, b), (x, y) = (list(map(torch.Tensor.detach, p)) for p in _parts((2, 3), 2))
    merge = deepsp.merge_attention
    for parts, words in (
        ([], r"expected parts to be pairs, at least one, .*, got NoneType"),
        ([a, b], r"expected parts to be pairs, .*, got Tensor"),
        ([(a, None)], r"expected parts to be pairs, .*, got \['Tensor', 'NoneType'\]"),
        ([(a.long(), x)], r"expected outs to be floating point, .*, got int64"),
        ([(a, x), (b[:1], y[:1])], r"\[2, 3, 4\] as number 0 and float64 \[1, 3, 4\] as number 1"),
        ([(a, x[:1])], r"expected log_sums\[0\] .*, got float64 \[1, 3\]"),
    ):
        with pytest.raises(ValueError, match=words):
            merge(parts)
    with pytest.raises(ValueError, match="expected a log-sum-exp for each of the 2 outputs, got 1"):
        torch.ops.deepsp.merge_attention([a, b], [x])
    with pytest.raises(ValueError, match=r"to have shape \[2, 3\].* float64, got float32"):
        torch.ops.deepsp.merge_attention([a], [x.float()])


def test_merge_promotes():
    """What autocast gives is narrower than a part of a user's own."""
    outs, lses = _parts((2, 3), 2)
    parts = [(outs[0].bfloat16(), lses[0].float()), (outs[1].float(), lses[1].bfloat16())]
    out, lse = deepsp.merge_attention(parts)
    assert out.dtype == lse.dtype == torch.float32
    expected = deepsp.merge_attention([(x.double(), y.double()) for x, y in parts])
    torch.testing.assert_close((out.double(), lse.double()), expected, rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------- compilers


class Draft(torch.nn.Module):
    """A key of each token's own beside the sequence's."""

    def __init__(self, **how):
        super().__init__()
        self.attention, self.how = deepsp.DistributedAttention(), how

    def forward(self, q, k, v, lens):
        trunk = self.attention(q, k, v, seq_lens=lens, return_lse=True, **self.how)
        own = (v * 0.5, (q * k).sum(-1))
        return deepsp.merge_attention([trunk, own])


def _draft_reference(q, k, v, **how):
    out, lse = everything(q, k, v, return_lse=True, **_asked(how, ()))
    score = (q * k).sum(-1)
    both = torch.logaddexp(lse, score)
    weights = [(x - both).exp()[..., None] for x in (lse, score)]
    return weights[0] * out + weights[1] * v * 0.5, both


def _compiled(backend):
    size = dist.get_world_size()
    documents = torch.tensor([[0, 9], [9, 15]])
    for how in ({"is_causal": True}, {"documents": documents}, {"kv_chunk": 6}):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend(backend)
        module = torch.compile(Draft(**how), fullgraph=True, backend=counter)
        for more in (0, 3):
            lens = [8 + more + n for n in range(size)]
            compare_attention(
                draw_qkv(1, sum(lens), 4, 4, 6, 6),
                lens,
                lambda q, k, v, lens=lens, module=module: module(q, k, v, lens),
                lambda q, k, v, how=how: _draft_reference(q, k, v, **how),
            )
        assert counter.frame_count <= 2


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(backend):
    on_ranks(2, _compiled, backend)


def _bits(dtype):
    """Compilers compute copies of 16-bit numbers in float32: the bytes stay what they are."""
    torch._dynamo.reset()
    lens = [8, 9]
    mine = [x.split(lens, 1)[dist.get_rank()] for x in draw_qkv(1, 17, 4, 4, 8, 8, dtype)]

    def attend(q, k, v):
        return deepsp.distributed_attention(q, k, v, seq_lens=lens, return_lse=True)

    found = torch.compile(attend, fullgraph=True)(*mine)
    torch.testing.assert_close(found, attend(*mine), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_compiled_in_16_bits(dtype):
    on_ranks(2, _bits, dtype)


def _refusals():
    x = draw(1, 4, 2, 4)
    mask = torch.ones(8, 8, dtype=torch.bool)
    for options, words in (
        ({"attn_mask": mask}, "expected no attn_mask with .* or return_lse, got one"),
        ({"dropout_p": 0.1}, "expected dropout_p to be 0 with .* or return_lse, got 0.1"),
    ):
        with pytest.raises(ValueError, match=words):
            deepsp.distributed_attention(x, x, x, return_lse=True, **options)
    with pytest.raises(ValueError, match="rank 0 passes return_lse True, rank 1 pas"):
        deepsp.DistributedAttention()(x, x, x, return_lse=dist.get_rank() == 0)


def test_the_example_equals_one_process():
    """examples/draft.py, three steps of a draft."""
    path = Path(__file__).parents[1] / "examples/draft.py"
    printed = []
    for ranks, *options in (["1", "--dense"], ["2"]):
        run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        done = subprocess.run([*run, ranks, path, *options], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout)
    assert printed[0].count("update") == 3 and printed[1] == printed[0]


def test_refuses():
    on_ranks(2, _refusals)
