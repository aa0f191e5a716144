"""How a Trainer over sharded sequences runs its model: with full rows, by the compile pass, or, for
a loss of a class's own, with this rank's tokens. And its batches in turns."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers import Trainer

from deepsp.compile.sharding.inputs import prepare_inputs
from deepsp.data.deal_batch import packed_batch
from deepsp.data.roles import leaves_of, name_of
from deepsp.data.same_batch import compare_batches
from deepsp.integrations.door import ADVICE, Groups, local_batch
from deepsp.integrations.transformers.class_loss import class_loss
from deepsp.integrations.transformers.registration import base_of
from deepsp.integrations.transformers.rows import FullRows
from deepsp.integrations.transformers.trl import trl_class
from deepsp.ranks.groups import member_of, objects_on_all_ranks, on_all_ranks

if TYPE_CHECKING:
    from deepsp.integrations.transformers.trainer import Options

_HOOK = "_deepsp_only_the_loss"
"""The attribute of a compiled model with the handle of the hook that leaves out its outputs."""


class Run:
    """What a trainer over sharded sequences knows.

    Args:
        trainer: the trainer, to which it keeps a weak reference.
        options: the arguments that it takes besides Trainer's.
        groups: the groups of ranks.
        tensor_size: the number of ranks over which tensors of the model are sharded.
    """

    returns_outputs = False
    """Whether a step of an evaluation returns logits."""

    def __init__(self, trainer: Trainer, options: Options, groups: Groups, tensor_size: int):
        self._trainer = weakref.ref(trainer)
        self.options, self.groups, self.tensor_size = options, groups, tensor_size

    @property
    def trainer(self) -> Trainer:
        return self._trainer()

    @property
    def base(self) -> nn.Module:
        """The model of transformers."""
        return base_of(self.trainer.accelerator.unwrap_model(self.trainer.model))

    @property
    def loss_class(self) -> type[Trainer]:
        """The class whose ``compute_loss`` the trainer's own calls."""
        classes = type(self.trainer).__mro__
        own = next(i for i, c in enumerate(classes) if "sequence_run" in vars(c))
        return next(c for c in classes[own + 1 :] if "compute_loss" in vars(c))

    @property
    def has_own_loss(self) -> bool:
        return self.loss_class is not Trainer

    @property
    def is_of_trl(self) -> bool:
        return self.loss_class.__module__.split(".")[0] == "trl"

    @property
    def compares_rows(self) -> bool:
        """Whether it is one of TRL's preference and RL trainers."""
        return trl_class(type(self.trainer)) is not None

    def count(self, labels: Tensor) -> Tensor:
        """The number of valid labels of all groups. ``labels``: full rows."""
        return self.trainer.accelerator.gather((labels[..., 1:] != -100).sum()).sum()


Compute = Callable[..., Any]
"""A trainer's ``compute_loss`` without deepsp."""


class FullStep:
    """The model takes full rows, and the class's own code computes the loss."""

    def __init__(self, run: Run):
        self.run = run
        self.rows: list[FullRows] = []

    def prepare(self, model: nn.Module) -> None:
        """Makes a model attend to full sequences, before the first step and any wrapper."""
        run, options = self.run, self.run.options
        how = {"query_parts": options.query_parts, "deal_images": options.deal_images}
        inner = run.trainer.accelerator.unwrap_model(model)
        rows = FullRows(inner, run.groups.group, options.without_logits, options.roles, **how)
        self.rows.append(rows)
        if run.trainer.label_smoother is not None and not run.is_of_trl:
            rows.label_smoothing = run.trainer.args.label_smoothing_factor

    def loss(self, compute: Compute, model, inputs, return_outputs: bool, count) -> Any:
        run, trainer = self.run, self.run.trainer
        own = run.loss_class is Trainer and trainer.compute_loss_func is None
        wants_outputs = run.returns_outputs or not own
        for rows in self.rows:
            rows.mixes_lengths = run.options.mix_lengths
            leaves_out = run.options.without_logits and not run.returns_outputs
            rows.outputs = "all" if wants_outputs and not leaves_out else "loss"
        with contextlib.ExitStack() as stack:
            if own:  # the model's loss has the smoothing
                stack.enter_context(_replaced(trainer, "label_smoother", None))
            if not run.base.training and not run.compares_rows:
                count = self._evaluated(stack, inputs, own)
            return compute(model, inputs, return_outputs, count)

    def _evaluated(self, stack: contextlib.ExitStack, inputs: Mapping[str, Any], own: bool) -> Any:
        """Contexts in which an evaluation's loss is that of one process with the batches of all
        groups, and the number of items to divide by."""
        run, trainer = self.run, self.run.trainer
        labels = inputs.get("labels")
        count = None if labels is None else run.count(labels)
        if own or run.is_of_trl:
            for rows in self.rows:
                stack.enter_context(_replaced(rows, "loss_over", run.groups.everyone))
        if own:
            stack.enter_context(trainer.accelerator.sequence_counting("one"))
        stack.enter_context(_replaced(trainer.args, "average_tokens_across_devices", True))
        stack.enter_context(_replaced(trainer, "current_gradient_accumulation_steps", 1))
        return count

    def without_repeats(self, inputs: dict[str, Any], real: Tensor | None) -> dict[str, Any]:
        """A batch of an evaluation in which repeated rows don't count. ``real``: [B]; None: all."""
        for rows in self.rows:
            rows.real_rows = real
        return mask_labels(inputs, real, self.run)

    def unlabelled(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """A batch without labels, as the model is called with it."""
        return inputs

    def step(self, step: Callable, model, inputs: Mapping[str, Any], count) -> Tensor:
        """A training step."""
        return step(model, inputs, count)


class LocalStep(FullStep):
    """A class's own ``compute_loss`` gets this rank's tokens."""

    def loss(self, compute: Compute, model, inputs, return_outputs: bool, count) -> Any:
        run, trainer, (rows,) = self.run, self.run.trainer, self.rows
        how = {"roles": run.options.roles, "shard_at": rows.shard_at, "inputs": rows.inputs}
        local, _ = local_batch(inputs, run.groups.group, **how)
        labels = local.get("shift_labels")
        if labels is None:
            raise ValueError(
                f"expected a batch with labels, got {sorted(inputs)}; a collator adds them, such "
                "as DataCollatorForLanguageModeling(tokenizer, mlm=False)"
            )
        training, averages = run.base.training, trainer.args.average_tokens_across_devices
        if count is None or not training:
            valid = int((labels != -100).sum())
            over = run.groups.everyone if averages or not training else run.groups.group
            count = labels.new_tensor(sum(n for (n,) in on_all_ranks([valid], over, labels.device)))

        def local_loss(items):
            with trainer.accelerator.sequence_counting("one"):
                return compute(model, local, return_outputs, items)

        name = run.loss_class.__name__
        with rows.off():
            loss, outputs = class_loss(
                local_loss, count, model, run.base, run.groups.group, name, trainer.args.device
            )
        rank, size, name = run.groups.member if training else member_of(run.groups.everyone)
        if training:
            if averages:
                loss = loss * run.groups.number  # DDP averages over the groups
            loss = torch.ops.deepsp._scale_gradient(loss, float(size))
        loss = torch.ops.deepsp.all_reduce(loss, "replicated", rank, size, name)
        return (loss, outputs) if return_outputs else loss


class CompiledStep(FullStep):
    """The compile pass runs the model, with full batches."""

    def prepare(self, model: nn.Module) -> None:
        run = self.run
        own = run.loss_class is not Trainer or run.trainer.compute_loss_func is not None
        own |= bool(run.trainer.args.label_smoothing_factor)

        def only_the_loss(module, args, output):
            # Where nothing reads the other outputs, they aren't gathered.
            needed = own or run.returns_outputs or not isinstance(output, Mapping)
            return output if needed or "loss" not in output else {"loss": output["loss"]}

        options = {n: x for n, x in run.options.compiled.items() if n != "seq_dim"}
        options |= {"group": run.groups.group, "gradients": "mean"}
        options["query_parts"] = run.options.query_parts
        if hasattr(model, _HOOK):  # an earlier trainer's
            getattr(model, _HOOK).remove()
        setattr(model, _HOOK, model.register_forward_hook(only_the_loss))
        model.compile(backend="deepsp", fullgraph=True, options=options)

    def loss(self, compute: Compute, model, inputs, return_outputs: bool, count) -> Any:
        # DDP would have Dynamo cut the graph at its buckets.
        with torch._dynamo.config.patch(optimize_ddp=False):
            return compute(model, self._marked(inputs), return_outputs, count)

    def without_repeats(self, inputs: dict[str, Any], real: Tensor | None) -> dict[str, Any]:
        return inputs

    def unlabelled(self, inputs: dict[str, Any]) -> dict[str, Any]:
        return self._marked(inputs)

    def _marked(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        # The pass compares what it shards only, and gives the advice for a loop of one's own.
        tensors = [(name_of(path), x) for path, x in leaves_of(inputs)]
        compare_batches(tensors, self.run.groups.group, ADVICE)
        return prepare_inputs(dict(inputs), seq_dim=self.run.options.compiled.get("seq_dim", 1))


class Turns:
    """A step whose ranks have each loaded rows of their own: the group trains on them in turns, or,
    if documents are dealt out, on all at once.

    Args:
        inner: the step that a batch of the group takes.
    """

    def __init__(self, inner: FullStep):
        self.inner, self.run = inner, inner.run

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def step(self, step: Callable, model, inputs: Mapping[str, Any], count) -> Tensor:
        trainer = self.run.trainer
        if count is None:
            raise ValueError(
                "expected batches with labels for own_batches, since the loss is divided by their "
                f"number over all ranks, got {sorted(inputs)}; make the collator return labels"
            )
        state, losses = trainer.accelerator.gradient_state, []
        syncs = state.sync_gradients
        batches = list(self._batches(inputs))
        for n, batch in enumerate(batches):
            last = n == len(batches) - 1
            state._set_sync_gradients(syncs and last)  # where it syncs, DeepSpeed takes a step
            alone = last or trainer.is_deepspeed_enabled
            with contextlib.nullcontext() if alone else trainer.accelerator.no_sync(model):
                losses.append(self.inner.step(step, model, batch, count))
        return sum(losses)

    def _batches(self, inputs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The full batches of the group's ranks, one after another, or all in one."""
        member, device = self.run.groups.member, self.run.trainer.args.device
        own = tree_map_only(Tensor, Tensor.cpu, dict(inputs))
        if not self.run.options.mix_lengths:
            for rank in range(member[1]):
                sent = own if rank == member[0] else None
                yield objects_on_all_ranks(sent, member, device)[rank]
            return
        every = objects_on_all_ranks(packed_batch(own, self.run.options.roles), member, device)
        yield {n: torch.cat([x[n] for x in every], 1) for n in every[0]}


def mask_labels(inputs: dict[str, Any], real: Tensor | None, run: Run) -> dict[str, Any]:
    """A batch with -100 for the labels of repeated rows."""
    rows = run.trainer.args.eval_batch_size
    for name in ("labels", "shift_labels"):
        labels = inputs.get(name)
        if real is not None and isinstance(labels, Tensor):
            if len(labels) != rows:
                raise ValueError(
                    f"expected as many rows of labels as samples, {rows}, in the last batch of an "
                    f"evaluation, got {len(labels)}: the collator packs them, and samples that "
                    "fill the batch up can't be told from others; evaluate a number of samples "
                    f"that {rows * run.groups.number} divides, or set dataloader_drop_last=True"
                )
            inputs[name] = labels.masked_fill(~real.to(labels.device)[:, None], -100)
    return inputs


@contextlib.contextmanager
def _replaced(thing: Any, name: str, value: Any) -> Iterator[None]:
    """In this context, an attribute has another value."""
    missing = object()
    before = getattr(thing, name, missing)
    setattr(thing, name, value)
    try:
        yield
    finally:
        if before is missing:
            delattr(thing, name)
        else:
            setattr(thing, name, before)
