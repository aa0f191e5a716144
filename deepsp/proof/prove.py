"""The proof of a training step of the user's own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from deepsp.data.roles import NAMED, TOKENS, describe, table_of
from deepsp.proof.alone import alone
from deepsp.proof.cut import cut
from deepsp.proof.outcome import Outcome, buffers_of, gradients_kept, precise, still
from deepsp.proof.report import raise_unless_alike
from deepsp.ranks.groups import Group, Member, is_dtensor, member_of
from deepsp.weights.shard_gradient import is_sum, plain


def prove(step: Callable[[Any], Any], batch: Any, group: Group = None) -> None:
    """Raises unless a training step over sharded sequences is that of one process. ::

        def step(batch):
            local, _ = deepsp.shard_batch(batch, group)
            loss = model(**local).loss
            loss.backward()
            deepsp.sync_gradients(model, group)
            return loss

        deepsp.prove(step, batch, group)  # once, before training

    Runs the step twice on a cut of the batch (4 rows of at most 127 tokens; the beginnings of 3
    documents if they are packed): first with ``group`` as a group of this process alone, so that
    each rank computes everything itself, then as it is. Compares the losses, all gradients that the
    step leaves in parameters, and buffers that the models write. Random draws of modules are off,
    and compiled code runs as it was written in the first run. Afterwards gradients, buffers,
    numbers in modules' attributes, and random number generators are as before.

    Every rank calls it. The step's own collectives, other than deepsp's, run in both.

    Args:
        step: forward and backward, up to the optimizer's step, which it must not take. It gets the
            full batch, and shards it; or what a loader of
            :func:`deepsp.integrations.accelerate.prepare` yields, if ``batch`` is that. It may
            return its loss.
        batch: a full batch, the same on every rank of the group; any value. One without
            ``input_ids`` or ``inputs_embeds`` isn't cut.
        group: the sequence group.

    Raises:
        ValueError: on every rank: something differs by more than rounding. Names it, both values,
            and the likely mistake.
    """
    prove_step(step, batch, member_of(group), member_of(group))


def prove_step(
    step: Callable[[Any], Any], batch: Any, member: Member, everyone: Member, advice: str = ""
) -> None:
    """:func:`prove` for a group, among all ranks that call it at the same time."""
    full = getattr(batch, "full", batch)
    part = _cut(full)

    def given() -> Any:
        return part if full is batch else batch.sharded(part)

    with contextlib.ExitStack() as stack:
        stack.enter_context(precise())
        models = _Models(stack)
        with models.found(), alone(member):
            first = models.outcome(step(given()), member)
        models.restore()
        second = models.outcome(step(given()))
    tensors = table_of(part) if isinstance(part, Mapping) else type(part).__name__
    context = f"(The step ran on a cut of the batch, in full and sharded: {tensors}{advice})"
    raise_unless_alike(first, second, models.dtypes, member, everyone, context)


def _cut(batch: Any) -> Any:
    """A part of a batch that has ids."""
    if not isinstance(batch, Mapping) or not any(batch.get(name) is not None for name in TOKENS):
        return batch
    known = {name: x for name, x in batch.items() if name in NAMED and x is not None}
    return cut(batch, describe(known))[0]


class _Models:
    """The models that a step runs. They are found when they are called first, and restored in
    between and in the end.

    Args:
        stack: keeps what restores them.
    """

    def __init__(self, stack: contextlib.ExitStack):
        self.stack, self.models = stack, []
        self.parts: set[nn.Module] = set()
        self.dtypes: set[torch.dtype] = set()
        self.between = stack.enter_context(contextlib.ExitStack())

    @contextlib.contextmanager
    def found(self) -> Iterator[None]:
        """In this context, models that are called are found."""
        handle = register_module_forward_pre_hook(self._enter)
        try:
            yield
        finally:
            handle.remove()

    def _enter(self, module: nn.Module, args: tuple) -> None:
        # Those of activations, too, of autocast or of weights that are gathered in another dtype.
        self.dtypes |= {x.dtype for x in args if isinstance(x, Tensor) and x.is_floating_point()}
        if module not in self.parts:
            self.models.append(module)
            self.parts |= set(module.modules())
            self.dtypes |= {p.dtype for p in module.parameters() if p.is_floating_point()}
            self._keep(module)

    def _keep(self, model: nn.Module) -> None:
        self.between.enter_context(still([model]))
        self.between.enter_context(gradients_kept(list(model.parameters())))

    def restore(self) -> None:
        """Makes all as before the first run, for the second."""
        self.between.close()
        for model in self.models:
            self._keep(model)

    def outcome(self, loss: Any, of_copies: Member | None = None) -> Outcome:
        """Of a run that has just ended. ``of_copies``: of the group whose ranks have all run on the
        full batch, so that gradients of shards over it are sums of as many equal ones."""
        gradients = {}
        for model in self.models:
            for name, p in model.named_parameters():
                if p.requires_grad:
                    gradients[name] = _gradient(p, of_copies)
        loss = loss.detach().clone() if isinstance(loss, Tensor) and loss.numel() == 1 else None
        return Outcome(loss, None, gradients, buffers_of(self.models))


def _gradient(parameter: Tensor, of_copies: Member | None) -> Tensor | None:
    gradient = parameter.grad
    if gradient is None:
        return None
    gradient = gradient.to_local() if is_dtensor(gradient) else plain(gradient)
    sharded = of_copies is not None and is_sum(parameter)
    return gradient.clone() if not sharded else gradient / of_copies[1]
