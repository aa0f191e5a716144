"""DeepSpeed in processes of a test, and the batches of its trainings."""

import os

import torch
import torch.distributed as dist

VOCAB, DIM, HEADS = 64, 32, 4


def launch_deepspeed():
    """Imports DeepSpeed into a process that looks to it as if a launcher had started it."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, DS_ACCELERATOR="cpu")
    import deepspeed
    from deepspeed.utils import logger

    logger.setLevel("ERROR")
    # An all-reduce for inference, which takes a minute to build.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # ZeRO 3 refuses models in float64, but only where the CPU computes in float16.
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: False
    torch._dynamo.reset()
    return deepspeed


def draw_batch(step, sequence=0):
    """Draws a sequence, half of its labels masked, but in step 2 those of rank 0's tokens."""
    generator = torch.Generator().manual_seed(100 * sequence + step)
    length = 23 - 2 * (step % 2)  # shards of unequal length
    ids = torch.randint(VOCAB, (1, length), generator=generator)
    labels = ids.clone()
    if step == 2:
        labels[:, : length // 2 + 1] = -100  # token i learns label i + 1
    else:
        labels[torch.rand(1, length, generator=generator) < 0.5] = -100
    return ids, labels
