"""Parameter gradients over the sequence group."""

from __future__ import annotations

import torch
from torch import nn

from deepsp.groups import Group, member_of


def sync_gradients(module: nn.Module, group: Group = None) -> None:
    """Makes every parameter's ``.grad`` its sum over ``group``: the full gradient, on every rank.

    For people without DDP, FSDP or DeepSpeed, which do it themselves. All-reduces flat buckets; a
    parameter without a gradient on some ranks only counts as zero there, one without a gradient on
    any rank keeps none.

    Raises:
        ValueError: a gradient is sparse.
    """
    rank, size, name = member_of(group)
    parameters = [p for p in module.parameters() if p.requires_grad]
    if size == 1 or not parameters:
        return
    for n, p in module.named_parameters():
        if p.grad is not None and p.grad.layout != torch.strided:
            raise ValueError(
                f"module: the gradient of {n} is {p.grad.layout}; only dense ones can be summed"
            )
    present = torch.tensor(
        [p.grad is not None for p in parameters], dtype=torch.int32, device=parameters[0].device
    )
    somewhere = torch.ops.deepsp.all_reduce(present, 1.0, rank, size, name).tolist()
    gradients = []
    for p, ranks in zip(parameters, somewhere, strict=True):
        if ranks > 0:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            gradients.append(p.grad)
    with torch.no_grad():
        torch.ops.deepsp.sum_gradients_(gradients, rank, size, name)
