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
from deepsp.data.roles import leaves_of, name_of, table_of
from deepsp.data.same_batch import compare_batches
from deepsp.integrations.door import ADVICE, Groups, local_batch, replaced
from deepsp.integrations.proof.alone import alone
from deepsp.integrations.proof.cut import cut_along
from deepsp.integrations.transformers.own_loss import LocalLoss, computing
from deepsp.integrations.transformers.registration import base_of
from deepsp.integrations.transformers.rows import FullRows
from deepsp.integrations.transformers.stock import Stock
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
        compares_rows: whether it is one of TRL's preference and RL trainers.
    """

    is_alone = False
    """Whether the trainer works as in one process, for a proof."""
    returns_outputs = False
    """Whether a step of an evaluation returns logits."""

    def __init__(
        self,
        trainer: Trainer,
        options: Options,
        groups: Groups,
        tensor_size: int,
        compares_rows: bool,
    ):
        self._trainer = weakref.ref(trainer)
        self.options, self.groups, self.tensor_size = options, groups, tensor_size
        self.compares_rows = compares_rows

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
        ours = next(i for i, c in enumerate(classes) if "sequence_run" in vars(c))
        return next(c for c in classes[ours + 1 :] if "compute_loss" in vars(c))

    @property
    def has_own_loss(self) -> bool:
        return self.loss_class is not Trainer

    @property
    def is_of_trl(self) -> bool:
        return self.loss_class.__module__.split(".")[0] == "trl"

    def count(self, labels: Tensor, over_groups: bool = True) -> Tensor:
        """The number of labels that count, as Trainer has it, of all groups or of this one.
        ``labels``: full rows."""
        count = ((labels[..., 1:] if self.trainer._loss_shifts_labels else labels) != -100).sum()
        return self.trainer.accelerator.gather(count).sum() if over_groups else count


Compute = Callable[..., Any]
"""A trainer's ``compute_loss`` without deepsp."""


class FullStep:
    """The model takes full rows, and the class's own code computes the loss."""

    needs_roles = False
    """Whether each entry of a batch is sharded, also those that the model doesn't get."""
    contract = ""
    """What ``compute_loss`` must do."""

    def __init__(self, run: Run):
        self.run = run
        self.rows: list[FullRows] = []

    def prepare(self, model: nn.Module) -> None:
        """Makes a model attend to full sequences, before the first step and any wrapper."""
        run, options = self.run, self.run.options
        how = {"query_parts": options.query_parts, "deal_images": options.deal_images}
        inner = run.trainer.accelerator.unwrap_model(model, keep_torch_compile=False)
        rows = FullRows(inner, run.groups.group, options.without_logits, options.roles, **how)
        rows.folds_prefixes = options.fold_prefixes
        self.rows.append(rows)
        if run.trainer.label_smoother is not None and not run.is_of_trl:
            rows.label_smoothing = run.trainer.args.label_smoothing_factor

    def loss(self, compute: Compute, model, inputs, return_outputs: bool, count) -> Any:
        run, trainer = self.run, self.run.trainer
        stock = run.loss_class is Trainer and trainer.compute_loss_func is None
        wants_outputs = run.returns_outputs or not stock
        for rows in self.rows:
            rows.mixes_lengths = run.options.mix_lengths
            leaves_out = run.options.without_logits and not run.returns_outputs
            rows.outputs = "all" if wants_outputs and not leaves_out else "loss"
        with contextlib.ExitStack() as stack:
            if stock:  # the model's loss has the smoothing
                stack.enter_context(replaced(trainer, "label_smoother", None))
            if run.base.training or not self.evaluates_all_groups:
                return compute(model, inputs, return_outputs, count)
            labels = inputs.get("labels")
            count = None if labels is None else run.count(labels)
            for rows in self.rows:
                stack.enter_context(replaced(rows, "loss_over", run.groups.everyone))
            if stock:
                stack.enter_context(trainer.accelerator.sequence_counting("one"))
            stack.enter_context(replaced(trainer.args, "average_tokens_across_devices", True))
            stack.enter_context(replaced(trainer, "current_gradient_accumulation_steps", 1))
            result = compute(model, inputs, return_outputs, count)
        if stock:
            return result
        loss, *outputs = result if return_outputs else (result,)
        loss = trainer.accelerator.gather(loss.reshape(1)).mean()  # each group has its part
        return (loss, *outputs) if return_outputs else loss

    @property
    def evaluates_all_groups(self) -> bool:
        """Whether an evaluation's loss is that of one process with the batches of all groups. Else
        it is that of the group's own, by code that isn't known."""
        run = self.run
        has_stock_loss = run.loss_class is Trainer or run.is_of_trl
        return has_stock_loss and not run.compares_rows and run.trainer.compute_loss_func is None

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

    # ---- for a proof

    def other_models(self) -> list[nn.Module]:
        """Those that a step runs besides the trained one."""
        return [m for rows in self.rows if (m := rows.model()) not in (None, self.run.base)]

    def cuts(self, inputs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], str]:
        """A cut of a batch, the same for one process, and what its entries are."""
        return self._stock.cuts(inputs)

    def counted(self, inputs: Mapping[str, Any]) -> tuple[int | None, int | None]:
        """The labels of a batch that count for one process, and that counted in the ranks' shards
        of the last one; None: not known."""
        labels, local, run = inputs.get("labels"), self.rows[-1].labels, self.run
        is_stock = not run.has_own_loss or (run.is_of_trl and not run.compares_rows)
        if not is_stock or not isinstance(labels, Tensor) or local is None:
            return None, None
        count, member = int((local != -100).sum()), self.run.groups.member
        ranks = on_all_ranks([count], member, labels.device)
        return int((labels[..., 1:] != -100).sum()), sum(n for (n,) in ranks)

    def shortened(self, inputs: Mapping[str, Any], is_alone: bool) -> dict[str, Any]:
        """A batch with few tokens of all rows, maybe for one process."""
        return self._stock.cuts(inputs, every_token=True)[int(is_alone)]

    @property
    def _stock(self) -> Stock:
        return Stock(self.run.base, self.run.options.roles, self.needs_roles)

    @contextlib.contextmanager
    def one_process(self) -> Iterator[None]:
        """A context in which :meth:`reference` and its backward are those of one process."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(alone(self.run.groups.group))
            for rows in (r for r in self.rows if r.model() is not None):
                stack.enter_context(rows.stock())
            yield

    def reference(self, compute: Compute, model, inputs, return_outputs: bool, count) -> Any:
        """The loss of a batch as one process has it."""
        return compute(model, inputs, return_outputs, count)


class LocalStep(FullStep):
    """A class's own ``compute_loss`` gets this rank's tokens."""

    evaluates_all_groups = True
    needs_roles = True
    contract = (
        "With local_loss=True, compute_loss returns a sum over its tokens, those of this rank, "
        "divided by num_items_in_batch"
    )

    def loss(self, compute: Compute, model, inputs, return_outputs: bool, count) -> Any:
        run, trainer, rows = self.run, self.run.trainer, self.rows[0]
        how = {"roles": run.options.roles, "shard_at": rows.shard_at, "inputs": rows.inputs}
        local, _ = local_batch(inputs, run.groups.group, **how)
        labels = local.get("shift_labels")
        rows.labels = labels
        if labels is None or run.returns_outputs:
            got = f"a batch with {sorted(inputs)}" if labels is None else "compute_metrics"
            raise ValueError(
                f"expected labels, and no logits, with local_loss=True, got {got}; a collator adds "
                "labels, such as DataCollatorForLanguageModeling(tokenizer, mlm=False); leave "
                "compute_metrics out, or local_loss"
            )
        training, averages = run.base.training, trainer.args.average_tokens_across_devices
        if count is None or not training:
            count = run.count(inputs["labels"], over_groups=averages or not training)
        with contextlib.ExitStack() as stack:
            for each in self.rows:
                stack.enter_context(each.off())
            stack.enter_context(computing(run.base, LocalLoss(count)))
            stack.enter_context(trainer.accelerator.sequence_counting("one"))
            loss = compute(model, local, False, count)
        of_group = training or run.is_alone
        rank, size, name = member_of(run.groups.group if of_group else run.groups.everyone)
        if training:
            if averages:
                loss = loss * run.groups.number  # DDP averages over the groups
            loss = torch.ops.deepsp._scale_gradient(loss, float(size))
        loss = torch.ops.deepsp.all_reduce(loss, "replicated", rank, size, name)
        return (loss, {}) if return_outputs else loss

    def one_process(self) -> contextlib.AbstractContextManager:
        return alone(self.run.groups.group)

    def reference(self, compute: Compute, model, inputs, return_outputs: bool, count) -> Any:
        return self.loss(compute, model, inputs, return_outputs, count)


class CompiledStep(FullStep):
    """The compile pass runs the model, with full batches."""

    evaluates_all_groups = False

    def prepare(self, model: nn.Module) -> None:
        run = self.run
        custom = run.loss_class is not Trainer or run.trainer.compute_loss_func is not None
        custom |= bool(run.trainer.args.label_smoothing_factor)

        def only_the_loss(module, args, output):
            # Where nothing reads the other outputs, they aren't gathered.
            needed = custom or run.returns_outputs or not isinstance(output, Mapping)
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

    def shortened(self, inputs: Mapping[str, Any], is_alone: bool) -> dict[str, Any]:
        return cut_along(inputs, self.run.options.compiled.get("seq_dim", 1))

    def counted(self, inputs: Mapping[str, Any]) -> tuple[int | None, int | None]:
        return None, None

    def cuts(self, inputs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], str]:
        dim = self.run.options.compiled.get("seq_dim", 1)
        batch = cut_along(inputs, dim)
        return batch, batch, table_of(batch)

    def one_process(self) -> contextlib.AbstractContextManager:
        trainer = self.run.trainer
        model = trainer.accelerator.unwrap_model(trainer.model)
        return replaced(model, "_compiled_call_impl", None)

    def unlabelled(self, inputs: dict[str, Any]) -> dict[str, Any]:
        return self._marked(inputs)

    def _marked(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        # The pass compares what it shards only, and gives the advice for a loop of one's own.
        tensors = [(name_of(path), x) for path, x in leaves_of(inputs)]
        compare_batches(tensors, self.run.groups.group, ADVICE, may_wait=False)
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
        mine = tree_map_only(Tensor, Tensor.cpu, dict(inputs))
        if not self.run.options.mix_lengths:
            for rank in range(member[1]):
                sent = mine if rank == member[0] else None
                yield objects_on_all_ranks(sent, member, device)[rank]
            return
        every = objects_on_all_ranks(packed_batch(mine, self.run.options.roles), member, device)
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
