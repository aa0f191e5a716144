"""Attention by pieces on a GPU: by which kernel, its values and gradients."""

import functools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import attention, draw, timed
from torch.nn.attention import SDPBackend, sdpa_kernel

import deepsp

op = torch.ops.deepsp


def _everything(q, k, v, documents, window, sinks):
    """Causal, by all scores, in float64."""
    length, heads = q.shape[1:3]
    k, v = (x.repeat_interleave(heads // k.size(2), 2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.size(3) ** -0.5
    i, j = torch.arange(length, device="cuda")[:, None], torch.arange(length, device="cuda")
    number = torch.full((length,), -1, device="cuda")
    for n, (begin, end) in enumerate(documents):
        number[begin:end] = n
    seen = (j <= i) & (number[:, None] == number) & (number >= 0)
    if window:
        seen &= j >= i - window[0]
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(1, heads, length, 1)], -1)
    nothing = scores.isneginf().all(-1, keepdim=True)
    weights = scores.masked_fill(nothing, 0).softmax(-1).masked_fill(nothing, 0)
    return torch.einsum("bhij,bjhd->bihd", weights[..., :length], v)


def flash_pieces():
    """Packed, padded, windowed, with sinks and split queries, by flash attention: every gradient
    against all scores in float64."""
    length = 1000
    cases = [
        ([(0, 1000)], (), []),
        ([(0, 300), (300, 301), (301, 1000)], (), []),
        ([(n, n + 1) for n in range(1000)], (), []),
        ([(0, 400), (450, 900)], (64, 0), []),
        ([(0, 1000)], (), [100, 400, 600, 900]),
        ([(0, 1000)], (100, 0), [100, 400, 600, 900]),
    ]
    for documents, window, queries in cases:
        for dim, sunk in ((128, False), (64, True)):
            q, k, v = (draw(1, length, h, dim, seed=h, dtype=torch.bfloat16) for h in (8, 2, 2))
            sinks = [draw(8, seed=9, dtype=torch.float32)] * sunk
            leaves = [x.requires_grad_() for x in (q, k, v, *sinks)]
            wide = [x.detach().double().requires_grad_() for x in leaves]
            ranges = zip(queries[::2], queries[1::2], strict=True)
            rows = [i for begin, end in ranges for i in range(begin, end)] or range(length)
            with torch.profiler.profile() as profile:
                out, _ = op._blockwise_attention(
                    q[:, rows],
                    k,
                    v,
                    torch.tensor(documents),
                    True,
                    window,
                    None,
                    None,
                    *(sinks or [None]),
                    queries,
                )
            calls = [e.name for e in profile.events() if e.name.startswith("aten::")]
            assert calls.count("aten::_flash_attention_forward") >= 1 and "aten::bmm" not in calls
            expected = _everything(*wide[:3], documents, window, *(wide[3:] or [None]))[:, rows]
            grad = draw(*out.shape, seed=3, dtype=torch.bfloat16)
            found = torch.autograd.grad(out, leaves, grad)
            wanted = torch.autograd.grad(expected, wide, grad.double())
            for x, y in zip((out, *found), (expected, *wanted), strict=True):
                error = (x.double() - y).abs().max() / max(1, y.abs().max())
                assert error < 2e-2, (documents[:3], window, queries, dim, sunk, float(error))


def dense_pieces():
    """Long documents by dense calls of cuDNN's, where SDPA takes it: a part of one, several of one
    length, queries that are cut; against SDPA of each document in float64."""
    cases = [
        ([(0, 4200), (4200, 4500)], []),
        ([(0, 30), (30, 2930), (2930, 5830)], []),
        ([(0, 8200)], [4100, 8200]),
    ]
    long = draw(1, 8, 4096, 128, dtype=torch.bfloat16)
    chosen = torch._fused_sdp_choice(long, long, long)
    name = "aten::_scaled_dot_product_cudnn_attention"
    for borders, queries in cases:
        length = borders[-1][1]
        q, k, v = (draw(1, length, h, 128, seed=h, dtype=torch.bfloat16) for h in (8, 2, 2))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        wide = [x.detach().double().requires_grad_() for x in leaves]
        mine = slice(*queries or (0, length))
        documents = None if queries else torch.tensor(borders)
        with torch.profiler.profile() as profile:
            out, _ = op._blockwise_attention(
                q[:, mine], k, v, documents, True, [], None, None, None, queries
            )
        calls = [e.name for e in profile.events()].count(name)
        assert (calls > 0) == (chosen == int(SDPBackend.CUDNN_ATTENTION)), (calls, chosen)
        parts = [
            attention(*(x[:, begin:end] for x in wide), is_causal=True) for begin, end in borders
        ]
        expected = torch.cat(parts, 1)[:, mine]
        grad = draw(*out.shape, seed=3, dtype=torch.bfloat16)
        gradients = torch.autograd.grad(out, leaves, grad)
        wanted = torch.autograd.grad(expected, wide, grad.double())
        for x, y in zip((out, *gradients), (expected, *wanted), strict=True):
            error = (x.double() - y).abs().max() / max(1, y.abs().max())
            assert error < 3e-2, (borders, queries, float(error))
    return [f"SDPA takes {SDPBackend(chosen).name if chosen >= 0 else 'nothing'}"]


def activated_flash():
    """What the user activates in place of PyTorch's flash attention is called, forward and
    backward."""
    called = []

    def implement():
        library = torch.library.Library("aten", "IMPL", "CUDA")

        def forward(q, k, v, cum_q, cum_k, *args, **kwargs):
            called.append("forward")
            sums = torch.zeros(q.size(1), q.size(0), device="cuda")
            return torch.zeros_like(q), sums, sums, sums, sums

        def backward(grad, q, k, v, *args, **kwargs):
            called.append("backward")
            return torch.ones_like(q), torch.ones_like(k), torch.ones_like(v)

        library.impl("_flash_attention_forward", forward, "CUDA")
        library.impl("_flash_attention_backward", backward, "CUDA")
        libraries.append(library)

    libraries = []
    torch.nn.attention.register_flash_attention_impl("of a test", register_fn=implement)
    torch.nn.attention.activate_flash_attention_impl("of a test")
    try:
        q = draw(1, 300, 4, 64, dtype=torch.bfloat16).requires_grad_()
        documents = torch.tensor([[0, 100], [100, 300]])
        out, _ = op._blockwise_attention(q, q, q, documents, True, [], None, None, None)
        (gradient,) = torch.autograd.grad(out.sum(), q)
    finally:
        libraries[0]._destroy()
    assert called == ["forward", "backward"] and bool((gradient == 3).all()), called


def mixed_lengths():
    """Documents that one rank has, and some that all share, one call of flash attention each;
    against each alone in float64."""
    rank, size = dist.get_rank(), dist.get_world_size()
    lengths = [300, 20, 1, 77, 600]
    deal = deepsp.deal_documents(lengths, size, -(-sum(lengths) // size) + 8)
    own = deal.tokens(rank).cuda()
    whole = [draw(1, sum(lengths), h, 64, seed=h, dtype=torch.bfloat16) for h in (8, 2)]
    whole = [x.requires_grad_() for x in (*whole, whole[1].clone())]
    mine = [x.detach()[:, own].requires_grad_() for x in whole]
    wide = [x.detach().double().requires_grad_() for x in whole]
    out = deepsp.distributed_attention(*mine, is_causal=True, enable_gqa=True, deal=deal)
    ends = torch.tensor(lengths).cumsum(0).tolist()
    documents = list(zip([0, *ends], ends, strict=False))
    expected = _everything(*wide, documents, (), None)
    grad = draw(*expected.shape, seed=3, dtype=torch.bfloat16)
    found = torch.autograd.grad(out, mine, grad[:, own])
    wanted = torch.autograd.grad(expected, wide, grad.double())
    for x, y in zip((out, *found), (expected, *wanted), strict=True):
        error = (x.double() - y[:, own]).abs().max() / max(1, y.abs().max())
        assert error < 2e-2, (size, float(error))
    return [f"of all tokens {deal.shared:.2f} are shared"]


def dense_border():
    """From how many tokens on a document is faster by a dense call of cuDNN's than by flash
    attention: to be compared with the length that deepsp takes."""
    lines = []
    for length in (1024, 2048, 4096, 8192, 16384):
        x = [draw(1, h, length, 128, seed=h, dtype=torch.bfloat16) for h in (8, 2, 2)]
        x = [t.requires_grad_() for t in x]
        times = []
        for kernel in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
            attend = functools.partial(F.scaled_dot_product_attention, *x, is_causal=True)
            with sdpa_kernel(kernel):
                out = attend(enable_gqa=True)
                times.append(timed(functools.partial(attend, enable_gqa=True)))
            grad = functools.partial(torch.autograd.grad, out, x, out.detach(), retain_graph=True)
            times.append(timed(grad))
        dense, dense_back, flash, flash_back = (f"{t * 1e3:.3f}" for t in times)
        lines.append(
            f"{length} tokens: forward {dense} ms, flash attention {flash} ms; backward "
            f"{dense_back} ms, {flash_back} ms"
        )
    return [*lines, f"deepsp: dense from {op._dense_tokens()} tokens on"]


def trees_and_log_sums():
    """Trees of segments, and gradients through log-sum-exps, by flash attention: against the mask
    of all pairs in float64. And a prompt of 16k tokens with 8 completions, folded and in rows."""
    tree = deepsp.Segments([300, 120, 77, 1, 202, 300], [-1, 0, 1, 1, 0, -1])
    length = sum(tree.lengths)
    position = tree.positions[0].to("cuda")
    within = torch.zeros(length, length, dtype=torch.bool, device="cuda")
    for begin, end, parent in tree.documents.tolist():
        within[begin:end, begin:end] = True
        while parent >= 0:
            first, last, parent = tree.documents[parent].tolist()
            within[begin:end, first:last] = True
    for window, dim in (((), 128), ((150, 0), 64)):
        q, k, v = (draw(1, length, h, dim, seed=h, dtype=torch.bfloat16) for h in (8, 2, 2))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        wide = [x.detach().double().requires_grad_() for x in leaves]
        with torch.profiler.profile() as profile:
            found = op._blockwise_attention(q, k, v, tree.documents, True, window, None, None, None)
            grads = [draw(*x.shape, seed=3, dtype=x.dtype) for x in found]
            gradients = torch.autograd.grad(found, leaves, grads)
        assert "aten::bmm" not in [e.name for e in profile.events()]
        seen = within & (position <= position[:, None])
        if window:
            seen &= position >= position[:, None] - window[0]
        heads = [x.repeat_interleave(8 // x.size(2), 2) for x in wide]
        scores = torch.einsum("bihd,bjhd->bhij", *heads[:2]) * dim**-0.5
        scores = scores.masked_fill(~seen, -torch.inf)
        out = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), heads[2])
        expected = out, scores.logsumexp(-1)
        wanted = torch.autograd.grad(expected, wide, [g.double() for g in grads])
        for x, y in zip((*found, *gradients), (*expected, *wanted), strict=True):
            error = (x.double() - y).abs().max() / max(1, y.abs().max())
            assert error < 3e-2, (window, dim, float(error))
    prompt, completion, count = 1 << 14, 1 << 12, 8
    tree = deepsp.Segments([prompt, *[completion] * count], [-1, *[0] * count])
    folded = [draw(1, sum(tree.lengths), h, 128, dtype=torch.bfloat16) for h in (8, 2, 2)]
    rows = [draw(count, prompt + completion, h, 128, dtype=torch.bfloat16) for h in (8, 2, 2)]

    def attend(qkv, documents):
        qkv = [x.requires_grad_() for x in qkv]
        out, _ = op._blockwise_attention(*qkv, documents, True, [], None, None, None)
        out.sum().backward()

    seconds = [timed(lambda: attend(folded, tree.documents)), timed(lambda: attend(rows, None))]
    return [
        f"a prompt of 16k tokens and 8 completions of 4k, forward and backward: folded "
        f"{seconds[0] * 1e3:.1f} ms, in rows {seconds[1] * 1e3:.1f} ms"
    ]


def flash_speed():
    """Documents of 16 k tokens among 64 k: all in one launch, against causal SDPA of each, by the
    same kernel and by the one that SDPA chooses."""
    length, each = 1 << 16, 1 << 14
    q, k, v = (draw(1, length, h, 128, seed=h, dtype=torch.bfloat16) for h in (4, 1, 1))
    borders = torch.arange(0, length + 1, each)

    def ours():
        op._blockwise_attention(
            q, k, v, torch.stack([borders[:-1], borders[1:]], 1), True, [], None, None, None
        )

    def theirs():
        for x, y, z in zip(*(x.split(each, 1) for x in (q, k, v)), strict=True):
            F.scaled_dot_product_attention(
                *(t.transpose(1, 2) for t in (x, y, z)), is_causal=True, enable_gqa=True
            )

    chosen = timed(theirs) * 1e3
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        flash = timed(theirs) * 1e3
    with torch.profiler.profile() as profile:
        theirs()
    kernels = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return [
        f"4 documents of 16k tokens: {timed(ours) * 1e3:.2f} ms, SDPA of each by flash attention "
        f"{flash:.2f} ms, as it chooses {chosen:.2f} ms ({max(kernels, key=len)[:80]})"
    ]
