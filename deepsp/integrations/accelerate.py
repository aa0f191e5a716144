"""Training loops with accelerate over sharded sequences."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import find_batch_size
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import DataLoader

from deepsp.data.sharding import unshard
from deepsp.integrations.door import Losses, local_batch
from deepsp.integrations.grouped import GroupedAccelerator, group_processes
from deepsp.integrations.proof.seen import Seen
from deepsp.ranks.agreement import digest_of
from deepsp.ranks.groups import device_of, member_of, objects_on_all_ranks, on_all_ranks
from deepsp.ranks.randomness import align, around_forward


def prepare(
    accelerator: Accelerator,
    *objects: Any,
    sequence_parallel_size: int,
    chunks: int = 1,
    roles: Mapping[str, str] | None = None,
    query_parts: int | str = "auto",
    prove: bool | str = True,
) -> Any:
    """``accelerator.prepare(*objects)`` for sharded sequences.

    Consecutive ranks form groups of ``sequence_parallel_size``. A loader gives the ranks of a group
    the same batches, and yields the local ones, as from :func:`deepsp.shard_batch`. A causal
    language model of transformers attends to the full sequence, and returns its loss for them::

        model, optimizer, loader = prepare(
            accelerator, model, optimizer, loader, sequence_parallel_size=2
        )
        for batch in loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

    The loss is the mean over the valid tokens of the full batch, on every rank of the group.
    accelerate's wrappers (DDP, FSDP2, DeepSpeed) average gradients over all ranks;
    ``accelerator.backward`` multiplies those of a loss of your own by the group's size, so it needs
    no ``average_gradients=True``.

    After this call the accelerator counts groups: ``num_processes`` is their number,
    ``process_index`` that of this rank's, and schedulers take as many steps. ``gather``,
    ``gather_for_metrics``, ``pad_across_processes`` and ``reduce`` take a value that is the same on
    all ranks of a group once, and join values with an entry for each local token, [B, S_r, ...].
    They raise for other values that differ within a group, such as a sum over this rank's tokens.
    ``prepare`` and ``skip_first_batches`` of the accelerator wrap loaders, too.

    Args:
        accelerator: made without ``parallelism_config``.
        objects: models, optimizers, loaders, schedulers, as for ``accelerator.prepare``.
        sequence_parallel_size: the number of ranks that share each batch, a divisor of the number
            of processes. 1: ``accelerator.prepare`` alone.
        chunks: as in :func:`deepsp.distributed_attention`.
        roles: as in :func:`deepsp.shard_batch`.
        query_parts: as in :func:`deepsp.distributed_attention`.
        prove: whether the first batch of a loader with labels, and each with other entries, is
            proven: on a cut of it, the model's loss and gradients on full rows, with the attention
            that it had, are those on shards. "always": each batch is. For a loss of your own, call
            :func:`deepsp.prove`.

    Returns:
        The results of ``accelerator.prepare``, loaders wrapped.

    Raises:
        ValueError: the size isn't a divisor; the accelerator has a parallelism config, dispatches
            batches, or doesn't give data ranks equally many; a model isn't a causal language model
            of transformers, or mixes tokens other than by attention through deepsp
            (:func:`deepsp.integrations.transformers.check`). The loader raises the errors of
            :func:`deepsp.shard_batch`.
    """
    if not isinstance(accelerator, Accelerator):
        raise ValueError(
            f"expected accelerator to be an Accelerator, got {type(accelerator).__name__}; pass it "
            "first, prepare(accelerator, model, ...)"
        )
    if isinstance(accelerator, _Prepared):
        size = accelerator.sequence_groups.size
        if size != sequence_parallel_size:
            raise ValueError(
                f"expected sequence_parallel_size={size}, with which this accelerator has prepared "
                f"before, got {sequence_parallel_size}; pass that"
            )
    elif group_processes(accelerator, sequence_parallel_size, kind=_Prepared) is None:
        return accelerator.prepare(*objects)
    accelerator.sequence_attention, accelerator.sequence_roles = (chunks, query_parts), roles
    if accelerator.sequence_seen is None:
        accelerator.sequence_seen = Seen(prove, accelerator.sequence_groups.number)
    return accelerator.prepare(*objects)


class _Sharded:
    """A loader whose batches are local. All other attributes are the loader's."""

    def __init__(self, loader: DataLoader, accelerator: _Prepared):
        self._loader, self._accelerator = loader, accelerator

    def __iter__(self) -> Iterator[dict[str, Any]]:
        accelerator = self._accelerator
        align(member_of(None))  # so that samplers and workers draw the same on all ranks
        for batch in self._loader:
            local, accelerator.sequence_lens = local_batch(
                batch, accelerator.sequence_group, roles=accelerator.sequence_roles
            )
            accelerator.sequence_rows = find_batch_size(batch)
            accelerator.sequence_prove_batch(batch)
            yield local

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class _Scheduler(AcceleratedScheduler):
    """Takes a step for each group that has trained on a batch, not for each process."""

    def __init__(self, prepared: AcceleratedScheduler, groups: int):
        super().__init__(prepared.scheduler, prepared.optimizers, prepared.step_with_optimizer)
        self.groups = groups

    def step(self, *args, **kwargs):
        self.split_batches = True  # one step in each call
        trained = self.step_with_optimizer and self.gradient_state.sync_gradients
        for _ in range(self.groups if trained else 1):
            total = getattr(self.scheduler, "total_steps", None)
            if not trained or total is None or self.scheduler._step_count <= total:
                super().step(*args, **kwargs)


class _Prepared(GroupedAccelerator):
    """:func:`prepare` puts this class before an accelerator's."""

    sequence_attention: tuple[int, int | str]  # chunks and query_parts
    sequence_roles: Mapping[str, str] | None
    sequence_lens: Sequence[int] = ()
    """The tokens of each rank in the last batch of a loader."""
    sequence_rows: int | None = None
    """The rows of that batch."""
    sequence_losses: Losses | None = None
    sequence_models: tuple[tuple[weakref.ref, dict[str, str]], ...] = ()
    """The models of transformers, and the attention that they had."""
    sequence_seen: Seen | None = None

    @property
    def sequence_group(self):
        """The ranks that share this rank's sequence."""
        return self.sequence_groups.group

    # ---- preparing

    def prepare(self, *objects: Any, **kwargs: Any) -> Any:
        from deepsp.integrations.transformers.experts import refuse_dealt
        from deepsp.integrations.transformers.forward import take_local_rows
        from deepsp.integrations.transformers.registration import base_of, use_in

        before = []
        for model in objects:
            if isinstance(model, nn.Module):
                if hasattr(model, "module"):
                    raise ValueError(
                        f"expected a model that isn't prepared yet, got {type(model).__name__}; "
                        "pass it to this prepare() in place of accelerator.prepare()"
                    )
                if (getattr(base_of(model), "tp_size", None) or 1) > 1:
                    raise ValueError(
                        "expected a model without tensor parallelism, got tp_size="
                        f"{base_of(model).tp_size}; use SequenceParallelTrainer, which takes it"
                    )
                advice = "use SequenceParallelTrainer, or a loop with deepsp.sync_gradients"
                refuse_dealt(model, "in prepare", advice)
                take_local_rows(model)
                attention = use_in(base_of(model), self.sequence_group, *self.sequence_attention)
                before.append(attention)
        prepared = super().prepare(*objects, **kwargs)
        every = prepared if len(objects) > 1 else [prepared]
        models = [x for x in every if isinstance(x, nn.Module)]
        for model in models:
            around_forward(model)
        self.sequence_models += tuple(zip(map(weakref.ref, models), before, strict=True))
        return prepared

    def sequence_prove_batch(self, batch: Mapping[str, Any]) -> None:
        """Proves the models on a full batch, unless one with the same entries has been."""
        from deepsp.integrations.transformers.stock import prove_model

        groups, roles = self.sequence_groups, self.sequence_roles
        if self.sequence_seen.is_new((torch.is_grad_enabled(), frozenset(batch))):
            plugin = getattr(self.state, "fsdp_plugin", None)
            for model, before in self.sequence_models:
                if (prepared_model := model()) is not None:
                    prove_model(
                        self.unwrap_model(prepared_model), before, batch, groups, roles, plugin
                    )

    def prepare_data_loader(self, *args: Any, **kwargs: Any) -> Any:
        return _Sharded(super().prepare_data_loader(*args, **kwargs), self)

    def prepare_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        prepared = super().prepare_scheduler(scheduler)
        if type(prepared) is not AcceleratedScheduler or prepared.split_batches:
            return prepared
        self._schedulers[-1] = _Scheduler(prepared, self.sequence_groups.number)
        return self._schedulers[-1]

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        loader = dataloader._loader if isinstance(dataloader, _Sharded) else dataloader
        return _Sharded(super().skip_first_batches(loader, num_batches), self)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        if self.sequence_losses is None:
            advice = (
                "use model(**batch).loss, or deepsp.cross_entropy(logits, batch['shift_labels'], "
                "accelerator.sequence_group)"
            )
            self.sequence_losses = Losses(self.sequence_group, advice)
        super().backward(self.sequence_losses.averaged(loss), **kwargs)

    # ---- gathering

    def gather(self, tensor: Any) -> Any:
        return super().gather(self._sequence_values(tensor, "gather"))

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        if use_gather_object or not all(isinstance(x, Tensor) for x in tree_leaves(input_data)):
            raise ValueError(
                "expected gather_for_metrics of tensors, since ranks of a group have the same "
                "objects, got objects; gather tensors"
            )
        return super().gather_for_metrics(input_data)

    def pad_across_processes(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        full = self._sequence_values(tensor, "pad_across_processes")
        return super().pad_across_processes(full, *args, **kwargs)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        alike = self._sequence_values(tensor, "reduce", by_token=False)
        return super().reduce(alike, reduction, scale)

    def check_trigger(self) -> bool:
        # Each rank has its own flag, unlike other values.
        flag = 0 if self.flag_tensor is None else int(self.flag_tensor)
        self.flag_tensor = None
        return any(n for (n,) in on_all_ranks([flag], None, self.device))

    def split_between_processes(self, *args: Any, **kwargs: Any) -> Any:
        raise ValueError(
            "expected no split_between_processes after prepare, since the ranks of a group need "
            "the same inputs; split them by accelerator.process_index, the group's"
        )

    def _sequence_values(self, tensors: Any, name: str, by_token: bool = True) -> Any:
        """Values that all ranks of a group have alike, and full tensors of local ones."""
        rank, _, _ = member = member_of(self.sequence_group)
        lens, rows = self.sequence_lens, self.sequence_rows

        def has_tokens(x: Tensor) -> bool:
            is_candidate = by_token and rows is not None and x.dim() > 1
            return is_candidate and tuple(x.shape[:2]) == (rows, lens[rank])

        def counts_tokens(x: Tensor) -> bool:
            return not x.is_floating_point() and (
                x.numel() == 1 or (x.dim() == 1 and rows is not None and len(x) != rows)
            )

        leaves = [x for x in tree_leaves(tensors) if isinstance(x, Tensor)]
        items = [(has_tokens(x), digest_of("", x), counts_tokens(x)) for x in leaves]
        every = objects_on_all_ranks(items, member, device_of(member))
        if any(len(values) != len(items) for values in every):
            raise ValueError(f"expected {name} of equally many tensors on all ranks of a group")
        full = {}
        for x, by_rank in zip(leaves, zip(*every, strict=True), strict=True):
            by_token, numbers, counts = zip(*by_rank, strict=True)
            if all(by_token):
                full[x] = unshard(x, 1, self.sequence_group, lens)
            elif any(counts) or len(set(numbers)) > 1:
                raise ValueError(
                    f"expected {name} of what all ranks of a group have alike, or of [B, S_r, ...] "
                    f"with an entry for each local token, got {x.dtype} of shape {tuple(x.shape)}, "
                    "which is of this rank's tokens; sum it over all ranks by "
                    "deepsp.collectives.all_reduce(x, grad='replicated'). (An integer that all "
                    "have alike: pass it as a float)"
                )
        return tree_map_only(Tensor, lambda x: full.get(x, x), tensors)
