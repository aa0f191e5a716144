"""The proof of a training step of the user's own."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from deepsp.data.roles import NAMED, TOKENS, describe, leaves_of, table_of
from deepsp.integrations.proof.alone import alone
from deepsp.integrations.proof.cut import cut
from deepsp.integrations.proof.outcome import (
    Outcome,
    buffers_of,
    few_parameters,
    gradients_kept,
    precise,
    still,
)
from deepsp.integrations.proof.report import raise_unless_alike
from deepsp.ranks.groups import Group, Member, is_dtensor, member_of
from deepsp.ranks.randomness import draws_kept
from deepsp.weights.shard_gradient import is_sum, plain

_LARGE = 1 << 27
"""Weights of a model whose gradients are all compared."""


def prove(step: Callable[[Any], Any], batch: Any, group: Group = None) -> None:
    """Raises unless a training step over sharded sequences is that of one process. ::

        def step(batch):
            local, _ = deepsp.shard_batch(batch, group)
            loss = model(**local).loss
            loss.backward()
            deepsp.sync_gradients(model, group)
            return loss

        deepsp.prove(step, batch, group)  # once, before training

    Runs the step twice on a cut of the batch (4 rows of at most 127 tokens, where most labels
    count; parts of 3 documents or more if they are packed): first with ``group`` as a group of this
    process alone, so that each rank computes everything itself, then as it is. Compares the losses,
    the gradients that the step leaves in the models' parameters (of a large model, in 8 of them),
    and buffers that the models write. Random draws of modules are off, and compiled code runs as it
    was written in the first run. Afterwards gradients, buffers, numbers in modules' attributes, and
    random number generators are as before.

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
    step: Callable[[Any], Any],
    batch: Any,
    member: Member,
    everyone: Member,
    advice: str = "",
    draws_alike: bool = True,
) -> None:
    """:func:`prove` for a group, among all ranks that call it at the same time. ``draws_alike``:
    ranks of a group draw the same numbers outside of models; else a step that draws some isn't
    compared."""
    full = getattr(batch, "full", batch)
    part = _cut(full)
    has_drawn = False

    def run() -> Any:
        nonlocal has_drawn
        with draws_kept() as drawn:
            result = step(part if full is batch else batch.sharded(part))
            has_drawn |= drawn()
        return result

    with contextlib.ExitStack() as stack:
        stack.enter_context(draws_kept())
        stack.enter_context(precise())
        models = _Models(stack)
        with models.passed_on(), alone(member):
            first = models.outcome(run(), member)
        with draws_kept():
            models.restore()
        second = models.outcome(run())
    if has_drawn and not draws_alike:
        first = second = None
    tensors = table_of(part) if isinstance(part, Mapping) else type(part).__name__
    context = f"(The step ran on a cut of the batch, in full and sharded: {tensors}{advice})"
    raise_unless_alike(first, second, models.dtypes, member, everyone, context)


def _cut(batch: Any) -> Any:
    """A part of a batch that has ids, and no images."""
    if not isinstance(batch, Mapping) or not any(batch.get(name) is not None for name in TOKENS):
        return batch
    named = {name: x for name, x in batch.items() if name in NAMED and x is not None}
    roles = describe(named)
    others = [x for path, x in leaves_of(batch) if path[0] not in NAMED and x.dim() > 1]
    if any(tuple(x.shape[:2]) != (roles.rows, roles.length) for x in others):
        return batch  # pixels, say
    return cut(batch, roles)[0]


class _Models:
    """The models that a step runs, and those that contain them. They are found when they are called
    first, and restored in between and in the end.

    Args:
        stack: keeps what restores them.
    """

    def __init__(self, stack: contextlib.ExitStack):
        self.stack, self.models = stack, []
        self.parts: set[nn.Module] = set()
        self.dtypes: set[torch.dtype] = set()
        self.between = stack.enter_context(contextlib.ExitStack())

    @contextlib.contextmanager
    def passed_on(self) -> Iterator[None]:
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
            model = _outermost(module)
            self.models.append(model)
            self.parts |= set(model.modules())
            self.dtypes |= {p.dtype for p in model.parameters() if p.is_floating_point()}
            self._keep(model)

    def _keep(self, model: nn.Module) -> None:
        self.between.enter_context(still([model]))
        self.between.enter_context(gradients_kept(list(model.parameters())))

    def restore(self) -> None:
        """Makes all as before the first run, for the second."""
        self.between.close()
        for model in self.models:
            self._keep(model)

    def outcome(self, loss: Any, of_copies: Member | None = None) -> Outcome:
        """Return the outcome of the run that has just ended. ``of_copies``: the group whose ranks
        have all run on the full batch, so that gradients of shards over it are sums of as many
        equal ones."""
        gradients = {}
        for n, model in enumerate(self.models):
            trained = {x: p for x, p in model.named_parameters() if p.requires_grad}
            if sum(p.numel() for p in trained.values()) > _LARGE:
                trained = few_parameters(model)
            of = "" if len(self.models) == 1 else f"{type(model).__name__} {n}: "
            gradients |= {f"{of}{x}": _gradient(p, of_copies) for x, p in trained.items()}
        loss = loss.detach().clone() if isinstance(loss, Tensor) and loss.numel() == 1 else None
        return Outcome(loss, None, gradients, buffers_of(self.models))


def _outermost(module: nn.Module) -> nn.Module:
    """The module that contains one, and is in no other: a step may call parts of a model, whose
    other weights it reads."""
    modules = [x for x in gc.get_objects() if issubclass(type(x), nn.Module)]
    inside: dict[nn.Module, list[nn.Module]] = {}
    for x in modules:
        for child in x.children():
            inside.setdefault(child, []).append(x)
    seen = {module}
    while outer := next((x for x in inside.get(module, ()) if x not in seen), None):
        module = outer
        seen.add(module)
    return module


def _gradient(parameter: Tensor, of_copies: Member | None) -> Tensor | None:
    gradient = parameter.grad
    if gradient is None:
        return None
    gradient = gradient.to_local() if is_dtensor(gradient) else plain(gradient)
    sharded = of_copies is not None and is_sum(parameter)
    return gradient.clone() if not sharded else gradient / of_copies[1]
