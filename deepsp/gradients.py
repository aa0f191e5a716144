"""Parameter gradients over the sequence group."""

from __future__ import annotations

import torch
from torch import nn

from deepsp.groups import Group, member_of
from deepsp.sharding import sharded_parameters


def sync_gradients(module: nn.Module, group: Group = None) -> None:
    """Makes every parameter's ``.grad`` its sum over ``group``: the full gradient, on every rank.

    For people without DDP, FSDP or DeepSpeed, which do it themselves. All-reduces flat buckets; a
    parameter without a gradient on some ranks only counts as zero there, one without a gradient on
    any rank keeps none. Parameters of :func:`deepsp.shard_parameters` are left alone: their
    gradients are sums already.

    Raises:
        ValueError: a gradient is sparse.
    """
    rank, size, name = member_of(group)
    sharded = {p for _, p, _, _ in sharded_parameters(module)}
    parameters = [p for p in module.parameters() if p.requires_grad and p not in sharded]
    if size == 1 or not parameters:
        return
    sparse = size + 1  # no sum of ones reaches it
    present = torch.tensor(
        [
            0 if p.grad is None else 1 if p.grad.layout == torch.strided else sparse
            for p in parameters
        ],
        dtype=torch.int64,
        device=parameters[0].device,
    )
    somewhere = torch.ops.deepsp.all_reduce(present, 1.0, rank, size, name).tolist()
    names = {id(p): n for n, p in module.named_parameters()}
    for p, ranks in zip(parameters, somewhere, strict=True):
        if ranks >= sparse:  # known to every rank by now
            raise ValueError(
                f"module: the gradient of {names[id(p)]} is sparse; only dense ones can be summed"
            )
    gradients = []
    for p, ranks in zip(parameters, somewhere, strict=True):
        if ranks > 0:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            gradients.append(p.grad)
    with torch.no_grad():
        torch.ops.deepsp.sum_gradients_(gradients, rank, size, name)
