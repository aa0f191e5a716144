"""Local batches, as integrations with trainers hand them out, and the losses that they get back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree

from deepsp.data.sharding import split_batch
from deepsp.ranks.agreement import first_difference
from deepsp.ranks.groups import Member

BACKWARDS = 2
"""The number of a trainer's first calls of backward whose losses are checked."""

ADVICE = (
    "leave DistributedSampler out, which deals rows to processes instead of groups that share a "
    "sequence; give samplers, data sets and collators generators that are seeded alike on all "
    "ranks of a group, and draw none on one rank alone, such as in a callback of rank 0"
)
"""Advice for different batches, if a trainer deals out the data."""


class LocalBatch(dict):
    """A local batch. Reading its labels raises, and names shift_labels."""

    def __missing__(self, key: str) -> Any:
        if key == "labels" and "shift_labels" in self:
            key = (
                "labels: a local batch has 'shift_labels' in their place, the token that each "
                "token is to predict; read those, and don't shift them again"
            )
        raise KeyError(key)

    def pop(self, key: str, *default: Any) -> Any:
        return self[key] if key not in self and not default else super().pop(key, *default)


# Lets functions that map over nested values, such as accelerate's gathers, see its tensors.
_pytree.register_pytree_node(
    LocalBatch,
    lambda batch: (list(batch.values()), list(batch)),
    lambda values, names: LocalBatch(zip(names, values, strict=True)),
)


def local_batch(
    batch: Mapping[str, Any],
    group: dist.ProcessGroup,
    shift: Sequence[str] | None = None,
    shard_at: str = "inputs",
) -> tuple[LocalBatch, list[int]]:
    """This rank's part of a batch, and the tokens of each rank: at least one."""
    local, lens = split_batch(batch, group, ADVICE, shift=shift, shard_at=shard_at)
    check_lens(lens)
    return LocalBatch(local), lens


def check_lens(lens: Sequence[int]) -> None:
    """Raises unless each rank of a group has a token of a batch."""
    if 0 in lens:
        raise ValueError(
            f"expected batches of at least {len(lens)} tokens, one for each rank of a group, got "
            f"{sum(lens)}; pad them, or drop such samples"
        )


def check_loss(loss: Tensor, member: Member, advice: str) -> None:
    """Raises on every rank if backward gets the loss of a rank's tokens. ``advice``: which loss to
    take."""
    if first_difference([("", loss.detach())], member) is not None:
        raise ValueError(
            "expected the loss of the full sequence in backward, the same number on all ranks of a "
            f"group, got different ones: it is that of this rank's tokens; {advice}"
        )
