"""A Trainer whose ranks each load batches of their own, which their group trains on."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from deepsp.data.loader import SequenceLoader
from deepsp.integrations.local_batch import LocalBatch, check_lens
from deepsp.integrations.transformers.evaluation import Evaluation


class OwnBatches(Evaluation):
    """The part of :func:`deepsp.integrations.transformers.sequence_parallel` for ``own_batches``.

    A step's batch of each rank goes through a :class:`deepsp.SequenceLoader`, so the rest of
    Trainer (samplers, counts of steps, resuming) is as in a training without groups."""

    _own_batches = False
    _loader: SequenceLoader | None = None
    _given: list[Mapping[str, Any]]
    """This rank's batch of the current step, which the loader takes out."""
    _turn: tuple[LocalBatch, list[int]] | None = None
    """The local batch that is trained on, and the tokens of each rank."""

    def _check_own_batches(self) -> None:
        refused = {
            "compiled": self._compiled is not None,
            "compute_loss_func": self.compute_loss_func is not None,
            "average_tokens_across_devices=False": not self.args.average_tokens_across_devices,
            "accepts_loss_kwargs=False of the model": not self.model_accepts_loss_kwargs,
        }
        for name in (n for n, given in refused.items() if given):
            raise ValueError(
                f"expected own_batches without {name}, since no rank has the full batch that its "
                "group trains on, got both; leave one of them out"
            )
        if not self.accelerator.even_batches:
            raise ValueError(
                "expected even_batches=True with own_batches, got False: ranks with fewer batches "
                "would leave the others waiting; leave it out"
            )

    def _get_dataloader(self, *args, is_training: bool = False, **kwargs):
        make = super()._get_dataloader
        if not (is_training and self._own_batches):
            return make(*args, is_training=is_training, **kwargs)
        mesh, self.accelerator._prepare_device_mesh = (
            self.accelerator._prepare_device_mesh,
            lambda: None,  # each process reads other rows
        )
        try:
            return make(*args, is_training=True, **kwargs)
        finally:
            self.accelerator._prepare_device_mesh = mesh

    def training_step(self, model, inputs, num_items_in_batch=None) -> Tensor:
        step = super().training_step
        if not self._own_batches:
            return step(model, inputs, num_items_in_batch)
        if num_items_in_batch is None:
            raise ValueError(
                "expected batches with labels for own_batches, since the loss is divided by their "
                f"number over all ranks, got {sorted(inputs)}; make the collator return labels"
            )
        if self._loader is None:
            self._given = []
            read = iter(self._given.pop, None)  # holds no reference to the trainer: no cycle
            options = {"shift": (), "mix": self._mix_lengths, "shard_at": self._shard_at}
            self._loader = SequenceLoader(read, self._group, **options)
        self._given[:] = [self._shifted(self._prepare_inputs(inputs))[0]]
        turns = 1 if self._mix_lengths else self._size
        state, losses = self.accelerator.gradient_state, []
        syncs = state.sync_gradients
        for n, (local, lens) in enumerate(itertools.islice(self._loader, turns)):
            if not self._mix_lengths:
                check_lens(lens)
            self._turn = LocalBatch(local), getattr(lens, "seq_lens", lens)
            last = n == turns - 1
            state._set_sync_gradients(syncs and last)  # where it syncs, DeepSpeed takes a step
            alone = last or self.is_deepspeed_enabled
            try:
                with contextlib.nullcontext() if alone else self.accelerator.no_sync(model):
                    losses.append(step(model, self._turn[0], num_items_in_batch))
            finally:
                self._turn = None
        return sum(losses)

    def get_batch_samples(self, *args, **kwargs):
        # Of training only: an evaluation counts the items of each batch itself.
        batches, count = super().get_batch_samples(*args, **kwargs)
        own = self._own_batches and count is not None
        return batches, count * self._size if own else count  # divided, as if ranks had the same

    def get_total_train_batch_size(self, args) -> int:
        total = super().get_total_train_batch_size(args)
        return total * self._size if self._own_batches else total
