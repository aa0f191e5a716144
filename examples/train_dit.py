"""Train a small video transformer of diffusers (Wan) on one process, then on sharded tokens.

It learns by flow matching to make latents of waves that run in the direction which the prompt's
embedding says. The second training differs in two places: `enable(transformer)`, and
`deepsp.sync_gradients` before the step. Losses must agree at every step, or the script exits with
an error. The frame size of 9 x 5 patches divides by no number of ranks.

    python examples/train_dit.py              # two ranks on the CPU
    python examples/train_dit.py --ranks 3    # more ranks than heads: a head's queries are split
"""

import argparse
import json
import math
import os
from pathlib import Path

import side_by_side
import torch
import torch.distributed as dist

LOSS_TOLERANCE = 1e-4  # what rounding explains in float32
FRAMES, HEIGHT, WIDTH = 5, 18, 10  # of latents; patches are 1 x 2 x 2


def batch_of(step: int, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Latents, noise, prompts and timesteps: the same on every rank."""
    generator = torch.Generator().manual_seed(step)
    angle = 2 * math.pi * torch.randint(8, (rows,), generator=generator) / 8
    axes = [torch.arange(n) / n for n in (FRAMES, HEIGHT, WIDTH)]
    t, y, x = torch.meshgrid(*axes, indexing="ij")
    along = x * angle.cos().view(-1, 1, 1, 1) + y * angle.sin().view(-1, 1, 1, 1)
    waves = [(2 * math.pi * (k * along - t)).sin() for k in range(1, 5)]
    latents = torch.stack(waves, 1)
    noise = torch.randn(latents.shape, generator=generator)
    harmonics = torch.arange(1, 9) * angle[:, None]
    prompts = torch.cat([harmonics.cos(), harmonics.sin()], -1)[:, None].expand(-1, 3, -1)
    return latents, noise, prompts, torch.rand(rows, generator=generator)


def train(options: argparse.Namespace) -> None:
    """One process of a training. The first writes the losses."""
    from diffusers import WanTransformer3DModel

    import deepsp
    from deepsp.integrations.diffusers import enable

    torch.set_num_threads(1)
    sharded = "RANK" in os.environ
    if sharded:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    transformer = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=32,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=32,
        ffn_dim=128,
        num_layers=2,
        rope_max_seq_len=64,
    )
    if sharded:
        enable(transformer)
    optimizer = torch.optim.AdamW(transformer.parameters(), lr=3e-3)
    losses = []
    for step in range(options.steps):
        latents, noise, prompts, t = batch_of(step, options.rows)
        mixed = torch.lerp(latents, noise, t.view(-1, 1, 1, 1, 1))
        out = transformer(mixed, 1000 * t, prompts).sample
        loss = (out - (noise - latents)).square().mean()  # of the full video, on every rank
        optimizer.zero_grad()
        loss.backward()
        if sharded:
            deepsp.sync_gradients(transformer)
        optimizer.step()
        losses.append(loss.item())
        if not sharded or dist.get_rank() == 0:
            print(f"step {step + 1}: loss {loss:.4f}", flush=True)
    if not sharded or dist.get_rank() == 0:
        Path(options.output, side_by_side.LOGS).write_text(json.dumps(losses))
    side_by_side.leave()


if __name__ == "__main__":
    side_by_side.main(__file__, __doc__, train, LOSS_TOLERANCE, steps=12, rows=4)
