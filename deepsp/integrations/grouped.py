"""An accelerator of accelerate's to which a group of ranks that share each batch is one process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from deepsp.integrations.door import Groups, check_size, make_groups, subclass


class GroupedAccelerator:
    """:func:`group_processes` puts this class before an accelerator's.

    ``num_processes`` and ``process_index`` count groups, loaders give the ranks of a group the same
    batches, and ``gather``, ``gather_for_metrics`` and ``reduce`` take one rank's value in each
    group. ``is_main_process`` is still that of one process. Wrappers (DDP, FSDP, DeepSpeed) are
    prepared by processes.
    """

    sequence_groups: Groups
    sequence_counts = "groups"
    sequence_loads = "groups"
    """What gets batches of its own from a loader: "groups", or "processes"."""

    @contextlib.contextmanager
    def sequence_counting(self, what: str) -> Iterator[None]:
        """In this context it counts "processes", as it did; or all as "one": ``num_processes`` is
        1, and values are those of each rank's tokens, which ``gather`` collects from every rank,
        and ``gather_for_metrics``, too, without dropping any; or "alone":
        this one, and ``gather`` gathers nothing."""
        before, self.sequence_counts = self.sequence_counts, what
        try:
            yield
        finally:
            self.sequence_counts = before

    @property
    def num_processes(self) -> int:
        counts = {"processes": self.state.num_processes, "one": 1, "alone": 1}
        return counts.get(self.sequence_counts, self.sequence_groups.number)

    @property
    def process_index(self) -> int:
        counts = {"processes": self.state.process_index, "one": 0, "alone": 0}
        return counts.get(self.sequence_counts, self.sequence_groups.index)

    @property
    def is_last_process(self) -> bool:
        return self.state.is_last_process

    # ---- preparing

    def prepare(self, *objects: Any, **kwargs: Any) -> Any:
        with self.sequence_counting("processes"):
            return super().prepare(*objects, **kwargs)

    def prepare_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        prepared = super().prepare_model(model, *args, **kwargs)
        if kwargs.get("evaluation_mode"):
            # accelerate prepares no model twice: DDP would be left out of a later training, and no
            # gradient reduced.
            vars(prepared).pop("_is_accelerate_prepared", None)
        return prepared

    def prepare_data_loader(self, *args: Any, **kwargs: Any) -> Any:
        with self.sequence_counting(self.sequence_loads):
            return super().prepare_data_loader(*args, **kwargs)

    # ---- gathering

    def gather(self, tensor: Any) -> Any:
        if self.sequence_counts == "alone":
            return tensor
        every = super().gather(tensor)
        if self.sequence_counts != "groups":
            return every
        once = self.sequence_once(every)
        if self.sequence_groups.number > 1:
            return once
        # One process gathers nothing: numbers stay without a dimension.
        leaves, tree = tree_flatten(tensor)
        pairs = zip(leaves, tree_flatten(once)[0], strict=True)
        return tree_unflatten(
            [x.view_as(before) if isinstance(before, Tensor) else before for before, x in pairs],
            tree,
        )

    def sequence_once(self, gathered: Any) -> Any:
        """The tensors of one rank in each group, among those of all processes."""
        shared, processes = self.sequence_groups.shared, self.state.num_processes

        def first(x: Tensor) -> Tensor:
            return x.unflatten(0, (processes, -1))[::shared].flatten(0, 1)

        return tree_map_only(Tensor, first, gathered)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        if self.sequence_counts == "one":
            return self.gather(input_data)
        return super().gather_for_metrics(input_data, use_gather_object)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        kinds = {"sum": torch.sum, "mean": torch.mean, "max": torch.amax}
        if reduction not in kinds or self.sequence_counts != "groups":
            return super().reduce(tensor, reduction, scale)
        every = self.gather(tree_map_only(Tensor, lambda x: x[None], tensor))
        return tree_map_only(Tensor, lambda x: kinds[reduction](x, 0), every)


def group_processes(
    accelerator: Accelerator,
    size: int | None,
    tensor_size: int = 1,
    kind: type = GroupedAccelerator,
) -> Groups | None:
    """Makes ``accelerator`` a ``kind`` of grouped accelerator, with groups of
    ``size * tensor_size`` consecutive ranks. Nothing happens for a size of 1.

    Args:
        accelerator: made without ``parallelism_config``; its class is changed.
        size: the number of ranks that share a sequence.
        tensor_size: the number of ranks over which tensors of the model are sharded.
        kind: the class to put before that of ``accelerator``.

    Returns:
        The groups; None for a size of 1.

    Raises:
        ValueError: the size isn't a divisor of the number of processes; the accelerator has a
            parallelism config, dispatches batches, or doesn't give data ranks equally many.
    """
    if getattr(accelerator.parallelism_config, "total_size", 1) > 1:
        raise ValueError(
            "expected no parallelism config in the accelerator or its launcher, by which "
            f"accelerate would shard attention itself, got {accelerator.parallelism_config}; pass "
            "sequence_parallel_size only"
        )
    world = accelerator.state.num_processes
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1 < launched:
        raise ValueError(
            f"expected {launched} processes, as many as were launched, but accelerate has made no "
            "process group, since there is no GPU and it wasn't told to use the CPU; pass "
            "Accelerator(cpu=True), or use_cpu=True in TrainingArguments"
        )
    advice = " (for a trainer, also cp_size of TrainingArguments.parallelism_config)"
    if world == 1:
        advice += "; start the script with torchrun --nproc-per-node N"
    check_size(size, world, tensor_size, advice)
    if size == 1:
        return None
    if accelerator.dispatch_batches:
        raise ValueError(
            "expected dispatch_batches=False, got True, with which accelerate deals batches to "
            "processes instead of groups that share a sequence; leave it out: each rank of a group "
            "reads the same rows itself"
        )
    if not accelerator.even_batches and world > size:
        raise ValueError(
            "expected even_batches=True with several groups, got False: groups with fewer batches "
            "would leave the others waiting; leave it out"
        )
    if accelerator.dispatch_batches is None:
        accelerator.dataloader_config.dispatch_batches = False
    accelerator.__class__ = subclass(kind, type(accelerator))
    accelerator.sequence_groups = make_groups(size, tensor_size)
    return accelerator.sequence_groups
