"""Training loops with accelerate over sharded sequences."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

from deepsp.data import shard_batch


def prepare(
    accelerator: Accelerator, *objects: Any, sequence_parallel_size: int, chunks: int = 1
) -> Any:
    """``accelerator.prepare(*objects)`` for sharded sequences.

    Ranks that follow each other in number form groups of ``sequence_parallel_size``. A loader gives
    the ranks of a group the same batches, and yields the local ones, as
    :func:`deepsp.shard_batch` returns them. A causal language model of transformers attends to the
    full sequence, and returns its loss for them::

        model, optimizer, loader = prepare(
            accelerator, model, optimizer, loader, sequence_parallel_size=2
        )
        for batch in loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

    The loss is the mean over the valid tokens of the full batch, on every rank of the group, and
    its gradients are scaled for wrappers that average over all ranks, as accelerate's do (DDP,
    FSDP2, DeepSpeed).

    Args:
        accelerator: made without a ``parallelism_config`` of its own.
        objects: models, optimizers, loaders, schedulers, as ``accelerator.prepare`` takes them.
        sequence_parallel_size: the number of ranks that share each batch, a divisor of the number
            of processes. 1: ``accelerator.prepare`` alone.
        chunks: as in :func:`deepsp.distributed_attention`.

    Returns:
        What ``accelerator.prepare`` returns, loaders wrapped.

    Raises:
        ValueError: the size isn't a divisor; the accelerator has a parallelism config; a model
            isn't one of transformers for causal language modeling, or computes something over
            tokens that isn't attention through deepsp
            (:func:`deepsp.integrations.transformers.check`). The loader raises what
            :func:`deepsp.shard_batch` does.
    """
    if not isinstance(accelerator, Accelerator):
        raise ValueError(
            f"expected accelerator to be an Accelerator, got {type(accelerator).__name__}; pass it "
            "first, prepare(accelerator, model, ...)"
        )
    group = share_batches(accelerator, sequence_parallel_size)
    if group is None:
        return accelerator.prepare(*objects)
    for model in objects:
        if isinstance(model, nn.Module):
            from deepsp.integrations.transformers import use_in

            if hasattr(model, "module"):
                raise ValueError(
                    f"expected a model that isn't prepared yet, got {type(model).__name__}; pass "
                    "it to this prepare() in place of accelerator.prepare()"
                )
            base = model.get_base_model() if hasattr(model, "get_base_model") else model
            use_in(base, group, chunks)
    prepared = accelerator.prepare(*objects)
    several = len(objects) > 1
    found = [
        _Sharded(x, group) if isinstance(x, DataLoader) else x
        for x in (prepared if several else [prepared])
    ]
    return tuple(found) if several else found[0]


def share_batches(accelerator: Accelerator, size: int | None) -> dist.ProcessGroup | None:
    """Has the loaders that ``accelerator`` prepares give ``size`` ranks that follow each other the
    same batches. Returns their group; None for a size of 1.

    Raises:
        ValueError: as :func:`prepare`.
    """
    if getattr(accelerator.parallelism_config, "total_size", 1) > 1:
        raise ValueError(
            "expected no parallelism config in the accelerator or its launcher, by which "
            f"accelerate would shard attention itself, got {accelerator.parallelism_config}; pass "
            "sequence_parallel_size only"
        )
    world = accelerator.num_processes
    if not isinstance(size, int) or size < 1 or world % size:
        raise ValueError(
            f"expected sequence_parallel_size to be a divisor of {world}, the number of processes, "
            f"got {size!r}; it is the number of ranks that share each batch (for a trainer, also "
            "cp_size of TrainingArguments.parallelism_config)"
            + ("" if world > 1 else "; start the script with torchrun --nproc-per-node N")
        )
    if size == 1:
        return None
    # By these names accelerate's loaders know ranks that get the same batches, under DDP, FSDP and
    # DeepSpeed alike.
    mesh = dist.init_device_mesh(
        accelerator.device.type, (world // size, size), mesh_dim_names=("dp_shard", "tp")
    )
    accelerator._prepare_device_mesh = lambda: mesh
    if accelerator.dispatch_batches is None:
        accelerator.dataloader_config.dispatch_batches = False
    return mesh["tp"].get_group()


class _Sharded:
    """A loader whose batches are local. All else is the loader's."""

    def __init__(self, loader: DataLoader, group: dist.ProcessGroup):
        self._loader, self._group = loader, group

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in self._loader:
            yield shard_batch(batch, self._group)[0]

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
