"""Models that a Trainer runs by the compile pass, with full batches.

To Trainer, ranks that share a batch are like those of tensor parallelism: each gets the full batch,
and returns its loss and outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from deepsp.compile.sharding.inputs import prepare_inputs
from deepsp.data.same_batch import compare_batches
from deepsp.data.sharding import leaves_of, name_of
from deepsp.integrations.local_batch import ADVICE
from deepsp.integrations.transformers.dealt_experts import DDP
from deepsp.integrations.transformers.evaluation import Evaluation
from deepsp.integrations.transformers.experts import refuse_dealt

_OURS = ("group", "gradients", "outputs", "query_parts")
"""Options of the compile pass that the trainer sets itself."""

_HOOK = "_deepsp_only_the_loss"
"""The attribute of a compiled model with the handle of the hook that leaves out its outputs."""


class Compiled(Evaluation):
    """The part of :func:`deepsp.integrations.transformers.sequence_parallel` for ``compiled``."""

    _compiled: dict[str, Any] | None = None
    """Options of the compile pass; None: attention is replaced, and nothing is compiled."""

    def _check_compiled(self) -> None:
        refuse_dealt(self.model, "with compiled", "leave one of them out")
        for name in ("without_logits", "mix_lengths"):
            if getattr(self, f"_{name}"):
                raise ValueError(
                    f"expected {name}=False with compiled, which computes the loss as the model "
                    "does, from full batches, got True; leave one of them out"
                )
        if wrong := sorted(set(_OURS) & set(self._compiled)):
            raise ValueError(
                f"expected options of the compile pass other than {', '.join(_OURS)}, which the "
                f"trainer sets, got {wrong[0]}; leave it out"
            )
        for cls in type(self).__mro__:
            if cls.__module__.split(".")[0] == "trl":
                raise ValueError(
                    f"expected compiled=False with {cls.__name__} of TRL, whose models compute "
                    "their loss in ways that can't be captured in one graph, got "
                    f"{self._compiled or True}; leave it out"
                )
        if self.accelerator.distributed_type not in DDP:
            raise ValueError(
                "expected DDP, without FSDP and DeepSpeed, with compiled, since their hooks break "
                f"the graph, got {self.accelerator.distributed_type}; leave them out, or shard "
                "weights with deepsp.shard_parameters in a loop of your own"
            )

    def _compile(self, model: nn.Module, group: ProcessGroup, query_parts: int | str) -> None:
        """Compiles a model in place."""
        own = self._has_own_loss() or self.compute_loss_func or self.args.label_smoothing_factor

        def only_the_loss(module, args, output):
            # Where nothing reads the other outputs, they aren't gathered.
            needed = own or self._returns_outputs or not isinstance(output, Mapping)
            return output if needed or "loss" not in output else {"loss": output["loss"]}

        options = {n: x for n, x in self._compiled.items() if n != "seq_dim"}
        options |= {"group": group, "gradients": "mean", "query_parts": query_parts}
        if hasattr(model, _HOOK):  # an earlier trainer's
            getattr(model, _HOOK).remove()
        setattr(model, _HOOK, model.register_forward_hook(only_the_loss))
        model.compile(backend="deepsp", fullgraph=True, options=options)

    def get_tp_size(self) -> int:
        return super().get_tp_size() if self._compiled is None else self._size

    def _prepare_inputs(self, inputs):
        inputs = super()._prepare_inputs(inputs)
        if self._compiled is None or self._size == 1:
            return inputs
        # The pass compares what it shards only, and gives the advice for a loop of one's own.
        found = [(name_of(path), x) for path, x in leaves_of(inputs)]
        compare_batches(found, self._group, ADVICE)
        return prepare_inputs(dict(inputs), seq_dim=self._compiled.get("seq_dim", 1))

    def compute_loss_context_manager(self):
        stack = super().compute_loss_context_manager()
        if self._compiled is not None:
            # DDP would have Dynamo cut the graph at its buckets.
            stack.enter_context(torch._dynamo.config.patch(optimize_ddp=False))
        return stack

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        step = super().prediction_step
        if self._compiled is None or self._size == 1:
            return step(model, inputs, prediction_loss_only, ignore_keys)
        inputs, _ = self._real_rows(inputs)
        self._returns_outputs = not prediction_loss_only
        try:
            step = super(Evaluation, self).prediction_step
            return step(model, inputs, prediction_loss_only, ignore_keys)
        finally:
            self._returns_outputs = False
