"""Attention and its layer on ranks, against plain PyTorch in one process: outputs, gradients."""

import functools

import torch
import torch.distributed as dist
from reference import attention, draw, lens_of
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import deepsp

TIGHT = {"rtol": 1e-10, "atol": 1e-11}


def draw_qkv(batch, total, heads, kv_heads, dim, v_dim, dtype=torch.float64):
    shapes = [(heads, dim), (kv_heads, dim), (kv_heads, v_dim)]
    return [draw(batch, total, h, d, seed=i).to(dtype) for i, (h, d) in enumerate(shapes)]


def compare_attention(whole, lens, ours, reference, extra=(), **tolerance):
    """Runs both, and compares outputs and the gradients of q, k, v and whatever is extra."""
    rank = dist.get_rank()
    full = [x.clone().requires_grad_() for x in whole]
    mine = [x.split(lens, 1)[rank].clone().requires_grad_() for x in whole]
    theirs, extra = list(extra), [x.detach().clone().requires_grad_() for x in extra]
    expected, out = reference(*full, *theirs), ours(*mine, *extra)
    if isinstance(expected, torch.Tensor):  # else with log-sum-exp
        expected, out = (expected,), (out,)
    grads = [draw(*x.shape, seed=99 + n).to(x.dtype) for n, x in enumerate(expected)]
    g_expected = torch.autograd.grad(expected, full + theirs, grads)
    g_out = torch.autograd.grad(out, mine + extra, [g.split(lens, 1)[rank] for g in grads])
    tolerance = tolerance or TIGHT
    for x, y in zip(out, expected, strict=True):
        torch.testing.assert_close(x, y.split(lens, 1)[rank], **tolerance)
    for n, (a, b) in enumerate(zip(g_out, g_expected, strict=True)):
        if n < len(whole):
            b = b.split(lens, 1)[rank]
        else:  # replicated: this rank has its share of the gradient
            a = a.clone()
            dist.all_reduce(a)
        torch.testing.assert_close(a, b, **tolerance, msg=lambda m, n=n: f"gradient {n}: {m}")


def compare_tokens(results, expected, index, leaves):
    """Compares results of this rank's tokens, ``index`` [S_r], with those of all, and the sums of
    the ranks' gradients."""
    grads = [draw(*x.shape, seed=9) for x in expected]
    for x, y in zip(results, expected, strict=True):
        torch.testing.assert_close(x, y[:, index])
    mine = torch.autograd.grad(results, leaves, [g[:, index] for g in grads])
    of_all = torch.autograd.grad(expected, leaves, grads)
    for x, y in zip(mine, of_all, strict=True):
        dist.all_reduce(x := x.contiguous())
        torch.testing.assert_close(x, y)


def check_attention(batch, total, heads, kv_heads, dims, causal, chunks, kind, scale):
    lens = lens_of(kind, total, dist.get_world_size())
    gqa = heads != kv_heads
    compare_attention(
        draw_qkv(batch, total, heads, kv_heads, *dims),
        lens,
        lambda q, k, v: deepsp.distributed_attention(
            q, k, v, is_causal=causal, scale=scale, enable_gqa=gqa, seq_lens=lens, chunks=chunks
        ),
        lambda q, k, v: attention(q, k, v, is_causal=causal, scale=scale),
    )


def check_shares(heads, kv_heads, kind, parts, chunks, more, dims, layout="bshd"):
    size = dist.get_world_size()
    total = 19
    lens = lens_of(kind, total, size)
    order = deepsp.sequence.attention.parts.ORDERS[layout]
    own, reference, extra = {}, {}, []
    if "mask" in more:
        mask = draw(2, heads, total, total, seed=7)
        own = reference = {"attn_mask": mask > -0.5 if "bool" in more else mask}
        if "bool" in more:
            own["attn_mask"][..., 0] = True
        else:
            extra = [mask.requires_grad_()]
    elif "causal" in more:
        own = reference = {"is_causal": True}

    def ours(q, k, v, mask=None):
        given = own if mask is None else {"attn_mask": mask}
        return deepsp.distributed_attention(
            *(x.permute(order).contiguous() for x in (q, k, v)),
            enable_gqa=True,
            seq_lens=lens,
            chunks=chunks,
            query_parts=parts,
            layout=layout,
            **given,
        ).permute(order)

    def theirs(q, k, v, mask=None):
        return attention(q, k, v, **(reference if mask is None else {"attn_mask": mask}))

    compare_attention(draw_qkv(2, total, heads, kv_heads, *dims), lens, ours, theirs, extra)


def rotate(x, positions, theta, interleaved):
    """Applies RoPE as a multiplication of complex numbers."""
    half = x.size(-1) // 2
    frequency = theta ** -(torch.arange(half, dtype=torch.float64) / half)
    turn = torch.exp(1j * positions.double()[..., None, None] * frequency)
    pairs = x.unflatten(-1, (half, 2)) if interleaved else x.unflatten(-1, (2, half)).mT
    turned = torch.view_as_real(torch.view_as_complex(pairs.double().contiguous()) * turn)
    return (turned.flatten(-2) if interleaved else turned.mT.flatten(-2)).to(x.dtype)


def run_plain(layer, x, position_ids=None, **kwargs):
    """Computes the layer in one process, from its parameters and nothing else of it."""
    q = layer.q_proj(x).unflatten(-1, (layer.num_heads, -1))
    k = layer.k_proj(x).unflatten(-1, (layer.num_kv_heads, -1))
    v = layer.v_proj(x).unflatten(-1, (layer.num_kv_heads, -1))
    q = q if layer.q_norm is None else layer.q_norm(q)
    k = k if layer.k_norm is None else layer.k_norm(k)
    if layer.rope_theta is not None:
        positions = torch.arange(x.size(1)) if position_ids is None else position_ids
        q, k = (rotate(t, positions, layer.rope_theta, layer.rope_interleaved) for t in (q, k))
    return layer.o_proj(attention(q, k, v, **kwargs).flatten(2))


def make_layer(*args, seed=0, dtype=torch.float64, **kwargs):
    """Makes a layer with the same parameters on every rank."""
    torch.manual_seed(seed)
    layer = deepsp.SequenceParallelAttention(*args, dtype=dtype, **kwargs)
    for norm in (layer.q_norm, layer.k_norm):
        if norm is not None:
            nn.init.uniform_(norm.weight, 0.5, 2.0)
            norm.to(dtype)
    return layer


def compare_layer(layer, x, lens, arguments=None):
    """Compares output and all gradients of this rank's part with those of the plain layer."""
    rank = dist.get_rank()
    arguments = arguments or {}
    full = x.clone().requires_grad_()
    mine = x.split(lens, 1)[rank].clone().requires_grad_()
    parameters = {n: p for n, p in layer.named_parameters() if p.requires_grad}
    expected = run_plain(layer, full, **arguments)
    grad = draw(*expected.shape, seed=99).to(expected.dtype)
    g_expected = torch.autograd.grad(expected, [full, *parameters.values()], grad)
    out = layer(mine, seq_lens=lens, **arguments)
    g_out = torch.autograd.grad(out, [mine, *parameters.values()], grad.split(lens, 1)[rank])
    close = {"rtol": 1e-10, "atol": 1e-10}
    torch.testing.assert_close(out, expected.split(lens, 1)[rank], **close)
    torch.testing.assert_close(g_out[0], g_expected[0].split(lens, 1)[rank], **close)
    for name, a, b in zip(parameters, g_out[1:], g_expected[1:], strict=True):
        a = a.clone()
        dist.all_reduce(a)
        torch.testing.assert_close(a, b, **close, msg=lambda m, n=name: f"gradient of {n}: {m}")


def check_layer(case):
    batch, total, heads, kv_heads, dim, hidden, *rest = case
    bias, norms, rope, ids, chunks, overlap, kind, causal = rest
    lens = lens_of(kind, total, dist.get_world_size())
    layer = make_layer(
        hidden,
        heads,
        kv_heads,
        head_dim=dim,
        bias=bias[0],
        out_bias=bias[1],
        q_norm=nn.RMSNorm(dim) if norms else None,
        k_norm=nn.RMSNorm(dim) if norms else None,
        rope_theta=100.0 if rope else None,
        rope_interleaved=rope == "interleaved",
        chunks=chunks,
        overlap=overlap,
    )
    arguments = {"is_causal": causal}
    if rope and ids:
        positions = torch.arange(total) % 5 + 3
        arguments["position_ids"] = positions if ids == 1 else torch.stack([positions] * batch)
        if ids == 2 and batch > 1:
            arguments["position_ids"][1] += 2
    compare_layer(layer, draw(batch, total, hidden), lens, arguments)


# Cases that every way of sending must pass.
LAYERS = [
    (2, 11, heads, kv_heads, 8, 16, (True, True), True, "half", 1, chunks, overlap, "skewed", True)
    for heads, kv_heads, chunks, overlap in ((8, 2, 2, True), (4, 4, 1, True), (6, 2, 1, False))
]


def check_compiled_layer(backend, case, norms, lengths):
    """Compares the whole layer, uneven, with dynamic lengths, with one process in float64."""
    heads, kv_heads, chunks, offsets = case
    size = dist.get_world_size()
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer = deepsp.SequenceParallelAttention(
        12, heads, kv_heads, head_dim=6, bias=True, rope_theta=100.0, rope_interleaved=True,
        q_norm=torch.nn.RMSNorm(6) if norms else None, chunks=chunks,
    ).double()  # fmt: skip
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(layer.forward, fullgraph=True, backend=counter)
    layer.forward = compiled
    for base in lengths:
        lens = [base + offset for offset in offsets[:size]]
        compare_layer(layer, draw(2, sum(lens), 12), lens, {"is_causal": True})
    assert counter.frame_count <= 2, counter.frame_count


STACK_DIM = 24


class Stack(nn.Module):
    """Two layers: by one of our forms, or "plain" in one process."""

    def __init__(self, kind, dtype=torch.float64):
        super().__init__()
        self.layers = nn.ModuleList(
            make_layer(STACK_DIM, 6, 3, bias=True, chunks=2, seed=n, dtype=dtype) for n in (1, 2)
        )
        self.kind = kind

    def attend(self, layer, x, lens):
        if self.kind == "plain":
            return run_plain(layer, x, is_causal=True)
        if self.kind == "layer":
            return layer(x, is_causal=True, seq_lens=lens)
        q, k, v = (p(x).unflatten(2, (-1, 4)) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
        if self.kind == "module":
            local = functools.partial(attention, is_causal=True)
            out = deepsp.DistributedAttention(local, chunks=2)(q, k, v, seq_lens=lens)
        else:
            out = deepsp.distributed_attention(
                q, k, v, is_causal=True, enable_gqa=True, seq_lens=lens, chunks=2
            )
        return layer.o_proj(out.flatten(2))

    def block(self, layer, x, lens):
        return x + torch.tanh(self.attend(layer, x, lens))

    def forward(self, x, lens=None, reentrant=None):
        for layer in self.layers:
            if reentrant is None:
                x = self.block(layer, x, lens)
            else:
                x = checkpoint(self.block, layer, x, lens, use_reentrant=reentrant)
        return x
