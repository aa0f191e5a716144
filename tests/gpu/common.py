"""What the GPU tests share."""

import torch

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
