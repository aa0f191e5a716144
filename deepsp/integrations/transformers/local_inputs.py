"""The local inputs of a Trainer's step, from a full batch."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from deepsp.data.deal_batch import deal_batch
from deepsp.integrations.local_batch import LocalBatch, local_batch
from deepsp.integrations.transformers import multimodal


class LocalInputs:
    """The part of :func:`deepsp.integrations.transformers.sequence_parallel` that shards
    batches."""

    @functools.cached_property
    def _shard_at(self) -> str:
        """Where the model shards its sequence, as in :func:`deepsp.shard_batch`."""
        return multimodal.shard_at(self._base_model())

    @functools.cached_property
    def _inputs(self) -> set[str]:
        """The names of inputs in a batch, as opposed to tensors that belong to labels."""
        return {"shift_labels", *inspect.signature(self._base_model().forward).parameters}

    def _shard(self, inputs: Mapping[str, Any]) -> tuple[dict[str, Any], list[int]]:
        if self._turn is not None:
            return LocalBatch(inputs), self._turn[1]
        batch, beside = self._shifted(inputs)
        if self._mix_lengths and self._base_model().training:
            local, deal = deal_batch(batch, self._group)
            return LocalBatch(local), deal.seq_lens
        return local_batch(batch, self._group, beside, self._shard_at)

    def _shifted(self, inputs: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """A full batch with shift_labels in place of labels, and the names of what was shifted with
        them (a weight of each label, say)."""
        batch, beside = dict(inputs), []
        labels = batch.pop("labels", None)
        if labels is not None and batch.get("shift_labels") is None:
            # transformers' shift: its collators mark the ends of documents in a row.
            batch["shift_labels"] = F.pad(labels, (0, 1), value=-100)[..., 1:]
            for name, x in batch.items():
                if name not in self._inputs and isinstance(x, Tensor) and x.shape == labels.shape:
                    batch[name] = F.pad(x, (0, 1))[..., 1:]
                    beside.append(name)
        return batch, beside
