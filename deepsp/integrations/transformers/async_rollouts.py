"""TRL's AsyncGRPOTrainer over sharded sequences: the first process draws rollouts, and each group
trains on one row, in which samples share prefixes. Attention is TRL's for such trees, by heads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from deepsp.data.roles import table_of
from deepsp.integrations.door import Groups, replaced
from deepsp.integrations.proof.cut import TOKENS
from deepsp.integrations.transformers import rollouts
from deepsp.integrations.transformers.rollouts import on_all_ranks
from deepsp.integrations.transformers.steps import FullStep
from deepsp.ranks.groups import member_of

if TYPE_CHECKING:
    from transformers import Trainer


class Rows:
    """A loader of the rows of this rank's group.

    Args:
        loader: TRL's, whose batches have a row for each group; on the first process only.
        groups: the groups of ranks.
        device: gets the rows.
    """

    def __init__(self, loader: Any, groups: Groups, device: torch.device):
        self.loader, self.groups, self.device = loader, groups, device

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        batches, everyone = iter(self.loader), member_of(None)
        draw: Callable = (lambda: next(batches, None)) if everyone[0] == 0 else (lambda: None)
        while (batch := on_all_ranks(draw, "rollouts", everyone)[0]) is not None:
            row = slice(self.groups.index, self.groups.index + 1)
            yield tree_map_only(Tensor, lambda x, row=row: x[row].to(self.device), batch)


class AsyncStep(FullStep):
    """A step of TRL's AsyncGRPOTrainer."""

    def cuts(self, inputs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], str]:
        """The last tokens of the first sample: a path of the tree, which begins the row."""
        positions = inputs["position_ids"][0]
        count = int(inputs["attention_mask"][0].sum())
        ends = (positions[1:count] != positions[: count - 1] + 1).nonzero().flatten().tolist()
        last = ends[0] + 1 if ends else count
        first = max(0, last - TOKENS)
        size = last - first
        batch = {}
        for name, x in inputs.items():
            of_tokens = name in ("input_ids", "position_ids", "shift_labels", "attention_mask")
            batch[name] = x[:, first:last] if of_tokens else x
        index = inputs["token_index"]
        # Only the first sample has its own terms there: a shared prefix has those of others, too.
        kept = (index >= first) & (index < last) & (inputs["segment_id"] == 0)
        for name in ("token_index", "old_log_probs", "advantages", "segment_id"):
            batch[name] = inputs[name][kept][None]
        batch["token_index"] = batch["token_index"] - first
        borders = index.new_tensor([[0, size]], dtype=torch.int32)
        batch["tree_kv_index"] = torch.arange(size, device=index.device)[None]
        batch["tree_cu_seqlens_q"] = batch["tree_cu_seqlens_k"] = borders
        batch["tree_max_seqlens"] = inputs["tree_max_seqlens"].new_tensor([[size, size]])
        return batch, batch, table_of(batch)


def hooks(cls: type[Trainer]) -> dict[str, Any]:
    """Attributes of a sequence-parallel subclass of ``cls``: those of ``cls``, for groups."""

    def get_train_dataloader(self) -> Any:
        if self.sequence_run is None:
            return cls.get_train_dataloader(self)
        loaders = []
        with replaced(self.accelerator, "prepare", loaders.append):
            make = lambda: cls.get_train_dataloader(self)  # noqa: E731
            on_all_ranks(make, "a loader of rollouts", member_of(None))
        return Rows(loaders[0], self.sequence_run.groups, self.args.device)

    def sync_weight(self) -> None:
        if self.sequence_run is None:
            cls._sync_weight(self)
            return
        self.sequence_weights = None
        # TRL's barriers would wait for a rank that has raised.
        with replaced(self.accelerator, "wait_for_everyone", lambda: None):
            rollouts.send_weights(
                lambda: cls._sync_weight(self),
                lambda: self.sequence_weights or self._streaming_iter(),
            )

    def streaming_iter(self) -> Iterator:
        self.sequence_weights = cls._streaming_iter(self)
        return self.sequence_weights

    return {
        "sequence_has_loader": True,
        "get_train_dataloader": get_train_dataloader,
        "_sync_weight": sync_weight,
        "_streaming_iter": streaming_iter,
    }
