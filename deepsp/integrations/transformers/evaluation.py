"""The evaluation of a Trainer on sharded sequences: each row counts once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from accelerate.utils import find_batch_size
from torch import Tensor
from torch.utils.data import IterableDataset
from transformers.trainer_utils import has_length

from deepsp.integrations.accelerate import once_per_group
from deepsp.ranks.groups import on_all_ranks
from deepsp.ranks.randomness import align

_NUMBERS = "deepsp_row_numbers"
"""The key of row numbers in the batches of a stream."""


class _Numbered(IterableDataset):
    """A stream of numbered samples."""

    def __init__(self, dataset: IterableDataset):
        self._dataset = dataset

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        return zip(itertools.count(), self._dataset, strict=False)

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(epoch)


class _CollateNumbered:
    def __init__(self, collate: Callable):
        self._collate = collate

    def __call__(self, samples: Sequence[tuple[int, Any]]) -> dict[str, Any]:
        numbers, rows = zip(*samples, strict=True)
        return {**self._collate(list(rows)), _NUMBERS: torch.tensor(numbers)}


class Evaluation:
    """The part of :func:`deepsp.integrations.transformers.sequence_parallel` that evaluates.

    accelerate fills the last batches of an epoch with rows from its beginning. For a data set with
    a length it knows how many. For a stream, the rows are numbered here to find the repeated ones.
    """

    _returns_outputs = False
    _numbers_rows = True
    """Whether rows of a stream are numbered."""

    def evaluation_loop(self, *args, **kwargs):
        if self._size > 1:
            align(self._alike())  # loader workers are seeded from the generators
        return super().evaluation_loop(*args, **kwargs)

    def _get_dataloader(self, dataset, description, *args, **kwargs):
        make = super()._get_dataloader
        evaluates = self._size > 1 and self._groups > 1 and not kwargs.get("is_training")
        evaluates = evaluates and self._numbers_rows
        if not evaluates or not isinstance(dataset, IterableDataset) or has_length(dataset):
            return make(dataset, description, *args, **kwargs)
        given = self.data_collator
        # Remove columns before the numbers are added.
        inner = self._get_collator_with_removed_columns(given, description=description)
        self.data_collator = _CollateNumbered(inner)
        try:
            return make(_Numbered(dataset), description, *args, **kwargs)
        finally:
            self.data_collator = given

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        if self._size == 1:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        labelled = any(inputs.get(name) is not None for name in self.label_names)
        inputs = self._without_repeats(inputs)
        if labelled:
            self._returns_outputs = not prediction_loss_only
            try:
                return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
            finally:
                self._returns_outputs = False
        with torch.no_grad(), self.compute_loss_context_manager():
            local, seq_lens = self._shard(self._prepare_inputs(inputs))
            outputs = model(**local, use_cache=False)
            if prediction_loss_only:
                return None, None, None
            return None, self._gathered(outputs, seq_lens)["logits"].detach(), None

    def _without_repeats(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Masks the labels of repeated rows, and sets the remainder that metrics keep."""
        inputs, real = self._real_rows(inputs)
        rows = self.args.eval_batch_size
        for name in ("labels", "shift_labels"):
            labels = inputs.get(name)
            if real is not None and isinstance(labels, Tensor):
                if len(labels) != rows:
                    raise ValueError(
                        f"expected as many rows of labels as samples, {rows}, in the last batch of "
                        f"an evaluation, got {len(labels)}: the collator packs them, and samples "
                        "that fill the batch up can't be told from others; evaluate a number of "
                        f"samples that {rows * self._groups} divides, or set "
                        "dataloader_drop_last=True"
                    )
                inputs[name] = labels.masked_fill(~real.to(labels.device)[:, None], -100)
        return inputs

    def _real_rows(self, inputs: Mapping[str, Any]) -> tuple[dict[str, Any], Tensor | None]:
        """A batch without its row numbers, and which of its rows aren't repeated ones (None: all).
        Sets the remainder that metrics keep."""
        inputs = dict(inputs)
        numbers = inputs.pop(_NUMBERS, None)
        state, rows = self.accelerator.gradient_state, self.args.eval_batch_size
        group, total = self.accelerator.process_index // self._shared, rows * self._groups
        places = torch.arange(rows) + group * rows
        if state.end_of_dataloader and state.remainder < 0:
            # accelerate knows the remainder of a stream only in one process.
            last = find_batch_size(inputs)
            if numbers is not None:
                # A repeated row has another number than its place.
                real = int((numbers.cpu() % total == places).sum())
                counts = on_all_ranks([real], None, self.args.device)
                last = sum(n for (n,) in counts[:: self._shared])
            state.active_dataloader.remainder = last
        repeats = state.end_of_dataloader and 0 < state.remainder < total and self._groups > 1
        return inputs, places < state.remainder if repeats else None

    @property
    def gather_function(self):
        """The function with which evaluation gathers losses, logits and labels: once per group,
        since its ranks have the same."""
        if getattr(self, "_size", 1) == 1:
            return self._gather_function
        return self._gather_once

    @gather_function.setter
    def gather_function(self, function) -> None:
        self._gather_function = function

    def _gather_once(self, tensors):
        accelerator = self.accelerator
        everyone, processes = accelerator.gather, accelerator.num_processes
        accelerator.gather = lambda x: once_per_group(everyone(x), self._shared, processes)
        try:
            return self._gather_function(tensors)
        finally:
            del accelerator.gather
