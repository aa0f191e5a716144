"""Attention by pieces on a GPU: by which kernel, its values and gradients."""

import torch
import torch.distributed as dist
from common import draw, timed
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
            torch.nn.functional.scaled_dot_product_attention(
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
