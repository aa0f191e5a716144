"""What a local attention is given: the indices of its heads, and what describes the whole
sequence."""

import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import on_ranks, stop
from reference import attention, draw, flat, lens_of
from torch import nn

import deepsp

# -------------------------------------------------------------------------------- head indices


def _alibi(q, k, v, slopes, head_indices):
    bias = -slopes[head_indices].view(1, -1, 1, 1) * torch.arange(k.size(1)).to(q)
    return attention(q, k, v, attn_mask=bias.expand(-1, -1, q.size(1), -1))


class _Alibi(nn.Module):
    def __init__(self, slopes):
        super().__init__()
        self.slopes = nn.Parameter(slopes)

    def forward(self, q, k, v, head_indices):
        return _alibi(q, k, v, self.slopes, head_indices)


def _heads(heads, kv_heads, chunks):
    rank, size = dist.get_rank(), dist.get_world_size()
    lens = lens_of("skewed", 9, size)
    whole = [draw(2, 9, h, 8, seed=i) for i, h in enumerate((heads, kv_heads, kv_heads))]
    slopes = torch.linspace(0.1, 1, heads, dtype=torch.float64)

    full = [x.clone().requires_grad_() for x in (*whole, slopes)]
    expected = _alibi(*full, torch.arange(heads))
    grad = draw(*expected.shape, seed=4)
    expected_grads = torch.autograd.grad(expected, full, grad)

    local = _Alibi(slopes.clone())
    module = deepsp.DistributedAttention(local, chunks=chunks)
    mine = [x.split(lens, 1)[rank].clone().requires_grad_() for x in whole]
    out = module(*mine, seq_lens=lens)
    *grads, of_slopes = torch.autograd.grad(out, [*mine, local.slopes], grad.split(lens, 1)[rank])
    for a, b in zip((out, *grads), (expected, *expected_grads[:3]), strict=True):
        torch.testing.assert_close(a, b.split(lens, 1)[rank], rtol=1e-10, atol=1e-10)
    dist.all_reduce(of_slopes)
    torch.testing.assert_close(of_slopes, expected_grads[3], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("ranks", "heads", "kv_heads", "chunks"),
    [(2, 8, 4, 1), (3, 8, 2, 1), (2, 8, 2, 3), (3, 7, 7, 2)],
)
def test_head_indices(ranks, heads, kv_heads, chunks):
    on_ranks(ranks, _heads, heads, kv_heads, chunks)


class _Wants(nn.Module):
    """Works without the indices, too: whoever forgets them isn't told."""

    def forward(self, q, k, v, head_indices=None, scale=1.0):
        assert head_indices is not None
        return v * head_indices.view(-1, 1)


def _declared():
    rank, x = dist.get_rank(), torch.ones(1, 4, 4, 2)
    module = _Wants()

    class Called:
        def __call__(self, q, k, v, *, head_indices=None):
            return module(q, k, v, head_indices)

    @functools.wraps(module.forward)
    def wrapped(*args, **kwargs):
        return module(*args, **kwargs)

    for local in (
        module,
        module.forward,
        torch.compile(module, backend="eager"),
        Called(),
        wrapped,
        torch.compile(module.forward, backend="eager"),
        functools.partial(module, scale=2.0),
        functools.partial(torch.compile(module, backend="eager"), scale=2.0),
    ):
        torch._dynamo.reset()
        out = deepsp.DistributedAttention(local)(x, x, x)
        assert out[0, 0, :, 0].tolist() == [0, 1, 2, 3], (rank, local)
    deepsp.DistributedAttention(functools.partial(attention, is_causal=True))(x, x, x)  # without
    y = x.transpose(1, 2)
    deepsp.DistributedAttention(F.scaled_dot_product_attention, layout="bhsd")(y, y, y)


def test_whoever_declares_head_indices_gets_them():
    on_ranks(2, _declared)


def _attends_over_heads():
    """What takes [B, H, S, D] attends over heads in any other layout: refused, however it is
    wrapped, where that can be seen."""
    from torch.nn.attention.flex_attention import flex_attention

    from deepsp.integrations.deepspeed.attention import DistributedAttention as OfDeepSpeed

    sdpa, group = F.scaled_dot_product_attention, dist.group.WORLD
    raw = [
        sdpa,
        functools.partial(sdpa, is_causal=True),
        torch.compile(sdpa),
        functools.partial(torch.compile(functools.partial(flex_attention)), enable_gqa=True),
        flex_attention,
        torch.ops.aten.scaled_dot_product_attention.default,
    ]
    for function in raw:
        for layout, shape in (("bshd", r"\[B, S, H, D\]"), ("sbhd", r"\[S, B, H, D\]")):
            says = rf"to take {shape}, but .*attention takes \[B, H, S, D\] .*layout='bhsd', or no"
            with pytest.raises(ValueError, match=says):
                deepsp.DistributedAttention(function, layout=layout)
        deepsp.DistributedAttention(function, layout="bhsd")
        with pytest.raises(ValueError, match="would attend over heads; pass no local_attention"):
            deepsp.SequenceParallelAttention(8, 4, local_attention=function)
        with pytest.raises(ValueError, match="pass a function that transposes"):
            OfDeepSpeed(function, group)

    def as_it_is(q, k, v):
        return F.scaled_dot_product_attention(q, k, v)

    def transposed(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return sdpa(q, k, v).transpose(1, 2)

    class Wraps(nn.Module):
        def forward(self, q, k, v):
            return sdpa(q, k, v)

    x = draw(2, 3, 4, 8)
    lens = [3] * dist.get_world_size()
    for function in (as_it_is, functools.partial(as_it_is), lambda *qkv: sdpa(*qkv), Wraps()):
        for layout in ("bshd", "sbhd"):
            module = deepsp.DistributedAttention(function, layout=layout)
            with pytest.raises(
                ValueError, match="transpose q, k, v and the output in it, or leave"
            ):
                module(x, x, x, seq_lens=None if layout == "sbhd" else lens)
        y = x.transpose(1, 2)
        deepsp.DistributedAttention(function, layout="bhsd")(y, y, y)
    expected = deepsp.distributed_attention(x, x, x)
    torch.testing.assert_close(deepsp.DistributedAttention(transposed)(x, x, x), expected)

    # [B, H, S, D] where it can be told apart: other numbers of kv heads, or seq_lens.
    q, k = draw(2, 8, 3, 4), draw(2, 2, 3, 4)
    for attend in (deepsp.DistributedAttention(), deepsp.distributed_attention):
        for call in (
            lambda attend=attend: attend(q, k, k, enable_gqa=True),
            lambda attend=attend: attend(q, q, q, seq_lens=lens),
        ):
            with pytest.raises(ValueError, match=r"head_dim\], pass layout='bhsd'"):
                call()


def test_attention_over_heads_is_refused():
    on_ranks(2, _attends_over_heads)


def _passed_by_the_caller():
    x = torch.ones(1, 4, 4, 2)
    layer = deepsp.SequenceParallelAttention(8, 4, local_attention=_alibi)
    for call in (
        lambda: deepsp.DistributedAttention(_alibi)(x, x, x, head_indices=torch.arange(2)),
        lambda: layer(x.flatten(2), head_indices=torch.arange(2)),
    ):
        with pytest.raises(ValueError, match=r"expected no head_indices, .* leave it out"):
            call()


def test_head_indices_of_the_caller():
    on_ranks(2, _passed_by_the_caller)


def _not_a_tensor():
    x = torch.ones(1, 4, 4, 2)
    for layout, shape in (("bshd", r"\(1, 8, 2\)"), ("bhsd", r"\(1, 2, 8\)")):
        module = deepsp.DistributedAttention(lambda q, k, v: [], layout=layout)
        with pytest.raises(ValueError, match=f"to return a tensor of shape {shape}.*, got list"):
            module(x, x, x)


def test_no_tensor():
    on_ranks(2, _not_a_tensor)


def _layers_heads(chunks):
    seen = []

    def local(q, k, v, head_indices):
        seen.append(head_indices.tolist())
        return attention(q, k, v)

    layer = deepsp.SequenceParallelAttention(16, 8, local_attention=local, chunks=chunks)
    layer(torch.ones(1, 4, 16))
    assert [len(indices) for indices in seen] == [4 // chunks] * chunks
    assert flat(seen) == list(deepsp.sequence.attention.local_heads(8))


def test_head_indices_of_the_layer():
    on_ranks(2, _layers_heads, 1)
    on_ranks(2, _layers_heads, 2)


# ------------------------------------------------------------------------------ packed samples


def _by_document(q, k, v, cu_seqlens):
    """Each document by itself, as variable-length kernels do it."""
    lengths = cu_seqlens.diff().tolist()
    parts = zip(*(x.split(lengths, 1) for x in (q, k, v)), strict=True)
    return torch.cat([attention(*part, is_causal=True) for part in parts], 1)


def _of_positions(q, k, v, position_ids):
    """The same of position ids that restart with each document."""
    begins = (position_ids == 0).nonzero().flatten()
    return _by_document(q, k, v, F.pad(begins, (0, 1), value=position_ids.numel()))


def _packed(chunks):
    rank, size = dist.get_rank(), dist.get_world_size()
    documents = [3, 7, 1, 4]  # across the ranks' borders
    total = sum(documents)
    lens = lens_of("skewed", total, size)
    cu_seqlens = torch.tensor([0, *torch.tensor(documents).cumsum(0)])
    positions = torch.cat([torch.arange(n) for n in documents])
    whole = [draw(1, total, h, 8, seed=i) for i, h in enumerate((8, 4, 4))]
    full = [x.clone().requires_grad_() for x in whole]
    same = torch.arange(4).repeat_interleave(torch.tensor(documents))
    mask = (same[:, None] == same) & torch.ones(total, total, dtype=torch.bool).tril()
    expected = attention(*full, attn_mask=mask)
    grad = draw(*expected.shape, seed=4)
    expected_grads = torch.autograd.grad(expected, full, grad)
    for local, argument in (
        (_by_document, {"cu_seqlens": cu_seqlens}),
        (_of_positions, {"position_ids": positions}),
    ):
        mine = [x.split(lens, 1)[rank].clone().requires_grad_() for x in whole]
        out = deepsp.DistributedAttention(local, chunks=chunks)(*mine, seq_lens=lens, **argument)
        grads = torch.autograd.grad(out, mine, grad.split(lens, 1)[rank])
        for a, b in zip((out, *grads), (expected, *expected_grads), strict=True):
            torch.testing.assert_close(a, b.split(lens, 1)[rank], rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize(("ranks", "chunks"), [(1, 1), (2, 2), (3, 1)])
def test_packed_samples(ranks, chunks):
    on_ranks(ranks, _packed, chunks)


# ------------------------------------------------------------------------------- FlexAttention


def _flex(compiled, chunks):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()
    size, rank, total = dist.get_world_size(), dist.get_rank(), 256
    slopes = torch.linspace(0.1, 1, 4)
    mask = create_block_mask(
        lambda b, h, i, j: (i >= j) & (i - j < 50), None, None, total, total, device="cpu"
    )

    def local(q, k, v, head_indices):
        def score_mod(score, b, h, i, j):
            return score - slopes[head_indices[h]] * (i - j)

        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = flex_attention(q, k, v, score_mod=score_mod, block_mask=mask, enable_gqa=True)
        return out.transpose(1, 2)

    whole = [draw(1, total, h, 16, seed=n, dtype=torch.float32) for n, h in enumerate((4, 2, 2))]
    i, j = torch.arange(total)[:, None], torch.arange(total)
    bias = (-slopes.view(1, -1, 1, 1) * (i - j)).masked_fill(~((i >= j) & (i - j < 50)), -torch.inf)
    expected = attention(*whole, attn_mask=bias)
    lens = [total // size] * size
    mine = [x.split(lens, 1)[rank] for x in whole]
    module = deepsp.DistributedAttention(local, chunks=chunks)
    if compiled:
        # The CPU's FlexAttention needs vector instructions, which conftest.py turns off.
        torch._inductor.config.cpp.vec_isa_ok = None
        module = torch.compile(module, fullgraph=True)
    with torch.no_grad():  # PyTorch trains FlexAttention on GPUs only
        out = module(*mine)
    torch.testing.assert_close(out, expected.split(lens, 1)[rank], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("chunks", [1, 2])
def test_flex_attention(chunks):
    on_ranks(2, _flex, False, chunks)


@pytest.mark.nightly  # more than a minute, most of it to parse the headers of vector instructions
def test_flex_attention_compiled():
    on_ranks(2, _flex, True, 1, apart="vectorized")
    stop("vectorized")
