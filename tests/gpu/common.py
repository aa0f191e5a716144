"""What the GPU tests share."""

import torch
import torch.nn.functional as F

import deepsp

TIGHT = {"rtol": 1e-9, "atol": 1e-9}


def draw(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, dtype=torch.float64, generator=generator).to("cuda", dtype)


def timed(call):
    """Median seconds on the GPU."""
    for _ in range(3):
        call()
    times = []
    for _ in range(20):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e-3)
    return sorted(times)[len(times) // 2]


def attention(q, k, v, **kwargs):
    readers = q.size(2) // k.size(2)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(readers, 1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, **kwargs).transpose(1, 2)


def uneven(total):
    lens = deepsp.ranks.seq_lens(total)
    if len(lens) > 1:
        lens[0] -= 2
        lens[-1] += 2
    return lens
