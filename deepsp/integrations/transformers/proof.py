"""The proof of a Trainer over sharded sequences, on a cut of the user's first batch: its class's
loss with the model as one process has it, and the same as deepsp computes it."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from accelerate.data_loader import IterableDatasetShard
from accelerate.utils import find_batch_size
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.data import IterableDataset, Subset
from transformers import TrainingArguments
from transformers.trainer_utils import EvalLoopOutput, has_length

from deepsp.data.roles import leaves_of, name_of, table_of
from deepsp.integrations.door import replaced
from deepsp.integrations.proof.outcome import (
    Measure,
    Outcome,
    attributes_kept,
    precise,
    still,
    watched_autocast,
)
from deepsp.integrations.proof.report import raise_unless_alike
from deepsp.integrations.proof.seen import Seen
from deepsp.integrations.transformers.evaluation import Numbered
from deepsp.integrations.transformers.steps import Compute, FullStep
from deepsp.integrations.transformers.stock import CONTEXT, dtypes_of, mistakes
from deepsp.ranks.groups import device_of, member_of, on_all_ranks
from deepsp.ranks.randomness import draws_kept

_ROWS = 9
"""The most rows that are evaluated."""


class Proof:
    """Prove the batches of one trainer.

    Args:
        step: how the trainer runs its model.
        prove: False: nothing is proven. "always": each step is, not only the first with a set of
            entries.
    """

    def __init__(self, step: FullStep, prove: bool | str):
        self.step, self.run = step, step.run
        self.seen = Seen(prove, self.run.groups.number)
        self.has_padding = False

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
        entries = frozenset(n for n, x in inputs.items() if x is not None)
        if not self.seen.is_new(("step", torch.is_grad_enabled(), entries)):
            return
        run, inner = self.run, self.run.trainer.accelerator.unwrap_model(model)
        is_fsdp = run.trainer.is_fsdp_enabled
        dtypes: set[torch.dtype] = set()
        measure = Measure(inner, self.step.other_models(), run.groups.member, is_fsdp)

        def measured(loss: Callable, batch: Mapping[str, Any], context: Callable) -> Outcome:
            items, labels = count, batch.get("labels")
            if items is not None and isinstance(labels, Tensor):
                items = run.count(labels, False).clamp(min=1)
            if items is not None:
                items = items * run.groups.number
            copy = tree_map_only(Tensor, torch.clone, dict(batch))  # compute_loss may change it
            muted = replaced(run.trainer, "log", lambda *args, **kwargs: None)
            # TRL enters accelerator.autocast. A model that a loss prepares meanwhile keeps its own.
            accelerator = run.trainer.accelerator
            plain = replaced(accelerator, "autocast", lambda *_, **__: contextlib.nullcontext())
            with attributes_kept(run.trainer), muted, plain, watched_autocast(dtypes):
                return measure(lambda: loss(compute, inner, copy, False, items), context)

        def one_process(changed: Mapping[str, Any]) -> Outcome:
            return measured(self.step.reference, changed, self.step.one_process)

        alone, sharded, table, full, reason = None, None, "", {}, ""
        member = run.groups.member
        for batch, full, table in self._cuts(inputs):  # noqa: B007
            try:
                alone = one_process(full)
            except Exception as error:  # compute_loss needs what was cut
                alone, reason = None, f"{type(error).__name__}: {error}"
            if any(n for (n,) in on_all_ranks([int(alone is None)], member, device_of(member))):
                alone = None
                continue
            sharded = measured(self.step.loss, batch, contextlib.nullcontext)
            alone.counted, sharded.counted = self.step.counted(full)
            break
        else:
            warnings.warn(_UNPROVEN.format(reason), stacklevel=2)
        plugin = getattr(run.trainer.accelerator.state, "fsdp_plugin", None)
        raise_unless_alike(
            alone,
            sharded,
            dtypes | dtypes_of(inner, plugin, measure.is_wide),
            member,
            member_of(None),
            CONTEXT.format(f"{table}. {self.step.contract}".rstrip(". ")),
            [(text, partial(one_process, changed)) for text, changed in mistakes(full)],
        )

    def _cuts(self, inputs: Mapping[str, Any]) -> Iterator[tuple[dict, dict, str]]:
        """A cut of a batch, the same for one process, and a description of it; and then, for a loss
        of the user's own, the batch itself."""
        custom = self.run.has_own_loss or self.run.trainer.compute_loss_func is not None
        try:
            yield self.step.cuts(inputs)
        except ValueError:
            if not custom:
                raise
        if custom:
            yield dict(inputs), dict(inputs), table_of(inputs)

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
        run, trainer, groups = self.run, self.run.trainer, self.run.groups.number
        if not self.seen.prove or run.compares_rows:
            return
        rows = min(2, trainer.args.per_device_eval_batch_size)
        count = min(rows * groups + 1, _ROWS)
        batch = self._first_batch(loader, count)
        if not self.seen.is_new(("evaluation", loss_only, frozenset(batch or ()))) or batch is None:
            return
        if groups > 1 and find_batch_size(batch) == 1:
            count = rows * groups  # nothing tells rows that fill a last batch up from others
        data = first_rows(getattr(loader, "dataset", None), count)
        dtypes = _autocast(trainer.args)

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
                    (self.seen, "prove", False),
                ):
                    stack.enter_context(replaced(thing, name, value))
                inner = trainer.accelerator.unwrap_model(trainer.model)
                models = [inner, *self.step.other_models()]
                stack.enter_context(watched_autocast(dtypes))
                for x in (attributes_kept(trainer), precise(*models), still(models), context):
                    stack.enter_context(x)
                small = trainer.sequence_loader_of(data)
                output = evaluate(small, "Evaluation", loss_only, None, "eval")
            return self._outcome_of(output)

        together = groups if self.step.evaluates_all_groups else 1
        alone = outcome(rows * together, self._stock_evaluation())
        sharded = outcome(rows, contextlib.nullcontext())
        raise_unless_alike(
            alone,
            sharded,
            dtypes | dtypes_of(trainer.model),
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

    def _first_batch(self, loader: Any, count: int) -> Mapping[str, Any] | None:
        """The trainer's batch of the first samples; None: there is none, or it is drawn at random,
        or made otherwise."""
        trainer = self.run.trainer
        data = first_rows(getattr(loader, "dataset", None), count)
        collate = trainer._get_collator_with_removed_columns(trainer.data_collator, "evaluation")
        with draws_kept() as drawn:
            try:
                rows = [] if data is None else list(data)
                batch = collate(rows) if rows else None
            except Exception:  # the loader has another collator
                return None
            return batch if isinstance(batch, Mapping) and not drawn() else None

    def _collated(self, collate: Callable, rows: list) -> Any:
        """A batch of the user's collator, with a few tokens."""
        batch = collate(rows)
        if not isinstance(batch, Mapping):
            return batch
        mask = batch.get("attention_mask")
        self.has_padding |= isinstance(mask, Tensor) and not bool(mask.bool().all())
        try:
            return self.step.shortened(batch, self.run.is_alone)
        except ValueError:  # the loop itself says what is wrong with it
            return batch

    def _outcome_of(self, output: EvalLoopOutput) -> Outcome:
        loss, labels, logits = output.metrics.get("eval_loss"), output.label_ids, output.predictions
        results = {"predictions": logits, "labels": labels}
        arrays = {name_of(p)[5:]: torch.as_tensor(x) for p, x in leaves_of(results, np.ndarray)}
        if isinstance(labels, np.ndarray):  # those of padding may be anything
            counted = torch.as_tensor(labels != -100)
            of_tokens = {n: x.shape[: counted.dim()] == counted.shape for n, x in arrays.items()}
            arrays = {
                n: x[counted] if of_tokens[n] else x
                for n, x in arrays.items()
                if of_tokens[n] or not self.has_padding
            }
        elif self.has_padding:
            arrays = {}
        return Outcome(None if loss is None else torch.tensor(loss), results=arrays)


_EVALUATION = (
    "({} rows of your data were evaluated by one process, and sharded. prove=False leaves this "
    "check out)"
)


_UNPROVEN = (
    "The trainer couldn't prove a step: compute_loss in one process has failed on a cut of the "
    "batch, and on the batch ({}). prove=False leaves this check out"
)


def _autocast(args: TrainingArguments) -> set[torch.dtype]:
    """The dtypes of an evaluation's autocast, which accelerate puts around forward."""
    narrow = {torch.bfloat16} if args.bf16 or args.bf16_full_eval else set()
    return narrow | ({torch.float16} if args.fp16 or args.fp16_full_eval else set())


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
