"""A batch of tokens with labels."""

import torch

VOCAB = 64


def language_batch(length: int) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCAB, (2, length), generator=generator)
    labels = ids.clone()
    labels[0, : length // 2] = -100  # a rank without a valid token in a row
    labels[1, -2:] = -100
    return {"ids": ids, "labels": labels}, {"ids": 1, "labels": 1}
