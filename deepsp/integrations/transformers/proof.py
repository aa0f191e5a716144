"""The proof of a Trainer over sharded sequences, on a cut of the user's first batch: its class's
loss with the model as one process has it, and the same as deepsp computes it."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from accelerate.data_loader import IterableDatasetShard
from accelerate.utils import find_batch_size
from torch import Tensor, nn
from torch.utils.data import IterableDataset, Subset
from transformers.trainer_utils import EvalLoopOutput, has_length

from deepsp.data.roles import leaves_of, name_of
from deepsp.integrations.door import replaced
from deepsp.integrations.transformers.evaluation import Numbered
from deepsp.integrations.transformers.steps import Compute, FullStep
from deepsp.integrations.transformers.stock import CONTEXT, dtypes_of, mistakes
from deepsp.proof.cut import densest
from deepsp.proof.outcome import Measure, Outcome, attributes_kept, precise, still
from deepsp.proof.report import raise_unless_alike
from deepsp.ranks.groups import member_of

_ROWS = 9
"""The most rows that are evaluated."""


class Proof:
    """Of one trainer.

    Args:
        step: how the trainer runs its model.
        prove: False: nothing is proven. "always": each step is, not only the first with a set of
            entries.
    """

    def __init__(self, step: FullStep, prove: bool | str):
        self.step, self.run, self.prove = step, step.run, prove
        self.proven: set[tuple[bool, frozenset[str]]] = set()
        self.has_padding, self.first = False, 0

    def of_step(self, compute: Compute, model: nn.Module, inputs: Mapping[str, Any], count) -> None:
        """Proves a step, unless one with the same entries has been.

        Args:
            compute: ``compute_loss`` of the class.
            model: as the trainer calls it.
            inputs: the full batch.
            count: ``num_items_in_batch``.

        Raises:
            ValueError: on all ranks: the sharded step has another loss, or other gradients.
        """
        key = torch.is_grad_enabled(), frozenset(n for n, x in inputs.items() if x is not None)
        if not self.prove or (key in self.proven and self.prove != "always"):
            return
        self.proven.add(key)
        run, inner = self.run, self.run.trainer.accelerator.unwrap_model(model)
        batch, full, table = self.step.cuts(inputs)
        if count is not None:
            labels = batch.get("labels")
            number = count if labels is None else run.count(labels, False).clamp(min=1)
            count = number * run.groups.number

        plugin = getattr(run.trainer.accelerator.state, "fsdp_plugin", None)
        measure = Measure(
            inner, self.step.other_models(), run.groups.member, run.trainer.is_fsdp_enabled
        )

        def one_process(changed: Mapping[str, Any] = full) -> Outcome:
            def loss() -> Tensor:
                return self.step.reference(compute, inner, dict(changed), False, count)

            with attributes_kept(run.trainer):
                return measure(loss, self.step.one_process)

        alone = one_process()
        with attributes_kept(run.trainer):
            sharded = measure(lambda: self.step.loss(compute, inner, dict(batch), False, count))
        alone.counted, sharded.counted = self.step.counted(full)
        raise_unless_alike(
            alone,
            sharded,
            dtypes_of(inner, plugin),
            run.groups.member,
            member_of(None),
            CONTEXT.format(f"{table}. {self.step.contract}".rstrip(". ")),
            [(text, partial(one_process, changed)) for text, changed in mistakes(full)],
        )

    # ---- evaluation

    def of_evaluation(self, evaluate: Callable, loader: Any, loss_only: bool | None) -> None:
        """Proves an evaluation of the first rows of a loader's data, unless one has been.

        Args:
            evaluate: ``evaluation_loop`` of the class.
            loader: that of the evaluation.
            loss_only: ``prediction_loss_only``.

        Raises:
            ValueError: on all ranks: it has another loss, or other predictions.
        """
        run, key = self.run, (False, frozenset([str(loss_only)]))
        if not self.prove or run.compares_rows or (key in self.proven and self.prove != "always"):
            return
        self.proven.add(key)
        trainer, groups = run.trainer, run.groups.number
        rows = min(2, trainer.args.per_device_eval_batch_size)
        count, packs = self._look(loader, min(rows * groups + 1, _ROWS))
        if packs and groups > 1:
            count = rows * groups  # nothing tells rows that fill a last batch up from others
        data = first_rows(getattr(loader, "dataset", None), count)
        if data is None:
            return

        def outcome(rows: int, context: contextlib.AbstractContextManager) -> Outcome:
            with contextlib.ExitStack() as stack:
                for thing, name, value in (
                    (trainer.args, "per_device_eval_batch_size", rows),
                    (trainer.args, "dataloader_num_workers", 0),
                    (trainer.args, "dataloader_persistent_workers", False),
                    (trainer.args, "dataloader_prefetch_factor", None),
                    (trainer.args, "batch_eval_metrics", False),
                    (trainer, "compute_metrics", None),
                    (trainer, "data_collator", partial(self._collated, trainer.data_collator)),
                    (trainer.callback_handler, "callbacks", []),
                    (self, "prove", False),
                ):
                    stack.enter_context(replaced(thing, name, value))
                models = [trainer.model, *self.step.other_models()]
                inner = trainer.accelerator.unwrap_model(trainer.model)
                for x in (attributes_kept(trainer), precise(inner), still(models), context):
                    stack.enter_context(x)
                small = trainer.sequence_loader_of(data)
                found = evaluate(small, "Evaluation", loss_only, None, "eval")
            return self._outcome_of(found)

        together = groups if self.step.evaluates_all_groups else 1
        alone = outcome(rows * together, self._stock_evaluation())
        sharded = outcome(rows, contextlib.nullcontext())
        raise_unless_alike(
            alone,
            sharded,
            dtypes_of(trainer.model),
            run.groups.member,
            member_of(None),
            _EVALUATION.format(len(alone.results.get("labels", ())) or "some"),
        )

    @contextlib.contextmanager
    def _stock_evaluation(self) -> Iterator[None]:
        """A context in which the trainer evaluates as in one process, or, if its loss isn't known,
        as on as many processes as there are groups."""
        accelerator = self.run.trainer.accelerator
        with contextlib.ExitStack() as stack:
            if self.step.evaluates_all_groups:
                stack.enter_context(accelerator.sequence_counting("alone"))
                stack.enter_context(replaced(accelerator, "sequence_loads", "one"))
            stack.enter_context(replaced(self.run, "is_alone", True))
            stack.enter_context(self.step.one_process())
            yield

    def _look(self, loader: Any, count: int) -> tuple[int, bool]:
        """The number of samples that there are, of ``count``, and whether the collator makes one
        row of them. Sets which tokens of rows are taken."""
        data = first_rows(getattr(loader, "dataset", None), count)
        rows = [] if data is None else list(data)
        trainer = self.run.trainer
        collate = trainer._get_collator_with_removed_columns(trainer.data_collator, "evaluation")
        batch = collate(rows) if rows else {}
        if not isinstance(batch, Mapping):
            return len(rows), False
        labels, mask = (batch.get(n) for n in ("labels", "attention_mask"))
        if isinstance(labels, Tensor) and labels.dim() == 2:
            self.first = densest(labels != -100)
            if isinstance(mask, Tensor) and not bool(mask[:, 0].all()):
                self.first -= labels.size(1)  # padding on the left
        return len(rows), len(rows) > 1 and find_batch_size(batch) == 1

    def _collated(self, collate: Callable, rows: list) -> Any:
        """A batch of the user's collator, with a few tokens."""
        batch = collate(rows)
        if not isinstance(batch, Mapping):
            return batch
        mask = batch.get("attention_mask")
        self.has_padding |= isinstance(mask, Tensor) and not bool(mask.bool().all())
        try:
            return self.step.shortened(batch, self.run.is_alone, self.first)
        except ValueError:  # the loop itself says what is wrong with it
            return batch

    def _outcome_of(self, found: EvalLoopOutput) -> Outcome:
        loss, labels, logits = found.metrics.get("eval_loss"), found.label_ids, found.predictions
        results = {"predictions": logits, "labels": labels}
        arrays = {name_of(p)[5:]: torch.as_tensor(x) for p, x in leaves_of(results, np.ndarray)}
        if isinstance(labels, np.ndarray):  # those of padding may be anything
            counted = torch.as_tensor(labels != -100)
            arrays = {
                n: x[counted] if x.shape[: counted.dim()] == counted.shape else x
                for n, x in arrays.items()
            }
        elif self.has_padding:
            arrays = {}
        return Outcome(None if loss is None else torch.tensor(loss), results=arrays)


_EVALUATION = (
    "({} rows of your data were evaluated by one process, and sharded. prove=False leaves this "
    "check out)"
)


def first_rows(data: Any, count: int) -> Any:
    """The first rows of a data set; None: it has none."""
    while isinstance(data, (Numbered, IterableDatasetShard)):
        data = data.dataset
    if isinstance(data, IterableDataset):
        return data.take(count) if hasattr(data, "take") else _First(data, count)
    if not has_length(data) or len(data) == 0:
        return None
    index = range(min(count, len(data)))
    return data.select(index) if hasattr(data, "select") else Subset(data, index)


class _First(IterableDataset):
    """The first rows of a stream."""

    def __init__(self, stream: IterableDataset, count: int):
        self.stream, self.count = stream, count

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(self.stream, self.count)
