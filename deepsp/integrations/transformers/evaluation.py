"""Each row of an evaluation counts once.

accelerate fills the last batches of an epoch with rows from its beginning. For a data set with a
length it knows how many. For a stream, the rows are numbered here to find the repeated ones."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from accelerate.utils import find_batch_size
from torch import Tensor
from torch.utils.data import IterableDataset
from transformers.trainer_utils import has_length

from deepsp.integrations.transformers.steps import Run
from deepsp.ranks.groups import on_all_ranks

_NUMBERS = "deepsp_row_numbers"
"""The key of row numbers in the batches of a stream."""


class Numbered(IterableDataset):
    """A stream of numbered samples."""

    def __init__(self, dataset: IterableDataset):
        self.dataset = dataset

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        return zip(itertools.count(), self.dataset, strict=False)

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)


class _CollateNumbered:
    def __init__(self, collate: Callable):
        self._collate = collate

    def __call__(self, samples: Sequence[tuple[int, Any]]) -> dict[str, Any]:
        numbers, rows = zip(*samples, strict=True)
        return {**self._collate(list(rows)), _NUMBERS: torch.tensor(numbers)}


@contextlib.contextmanager
def numbered(run: Run, dataset: Any, description: str) -> Iterator[Any]:
    """The data set of an evaluation, in which a stream's rows are numbered by the trainer's
    collator."""
    trainer, groups = run.trainer, run.groups.number
    is_stream = isinstance(dataset, IterableDataset) and not has_length(dataset)
    if groups == 1 or run.compares_rows or not is_stream:
        yield dataset
        return
    before = trainer.data_collator
    # Remove columns before the numbers are added.
    inner = trainer._get_collator_with_removed_columns(before, description=description)
    trainer.data_collator = _CollateNumbered(inner)
    try:
        yield Numbered(dataset)
    finally:
        trainer.data_collator = before


def real_rows(run: Run, inputs: Mapping[str, Any]) -> tuple[dict[str, Any], Tensor | None]:
    """A batch without its row numbers, and which of its rows aren't repeated ones (None: all). Sets
    the remainder that metrics keep."""
    trainer, groups = run.trainer, run.groups
    inputs = dict(inputs)
    numbers = inputs.pop(_NUMBERS, None)
    state, rows = trainer.accelerator.gradient_state, trainer.args.eval_batch_size
    total = rows * groups.number
    places = torch.arange(rows) + groups.index * rows
    is_stream = not trainer.args.dataloader_drop_last  # which has no remainder, either
    if state.end_of_dataloader and state.remainder < 0 and is_stream:
        size = real = find_batch_size(inputs)
        if numbers is not None:  # a repeated row has another number than its place
            count = int((numbers.cpu() % total == places).sum())
            counts = on_all_ranks([count], None, trainer.args.device)
            real = sum(n for (n,) in counts[:: groups.shared])
        # In one process, accelerate dispatches a stream's batches, and knows the size of the last
        # one, unless it is told not to.
        if trainer.args.accelerator_config.dispatch_batches is not False:
            state.active_dataloader.remainder = real if size == rows else size
        return inputs, places < real if numbers is not None and real < total else None
    repeats = state.end_of_dataloader and 0 < state.remainder < total and groups.number > 1
    repeats &= not run.is_alone  # then it has all rows
    return inputs, places < state.remainder if repeats else None
