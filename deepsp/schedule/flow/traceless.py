"""A forward that leaves no trace: nothing is kept for backward, and buffers are restored."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import NoReturn

import torch
from torch import nn

from deepsp.ranks import randomness


@contextlib.contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Turns gradients on, without memory for backward, and restores the model's buffers and the
    default generators."""
    generators = randomness.states()
    buffers = [
        (module, name, b, b.detach().clone(), b.grad_fn is not None)
        for module in model.modules()
        for name, b in module._buffers.items()
        if b is not None
    ]
    nothing = torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, _no_backward)
    try:
        with torch.enable_grad(), nothing:
            yield
    finally:
        randomness.restore(generators)
        with torch.no_grad():
            for module, name, buffer, before, computed in buffers:
                module._buffers[name] = buffer  # the model may have replaced it
                if buffer.shape == before.shape:
                    buffer.copy_(before)
                if buffer.grad_fn is None or computed:
                    continue
                if buffer._is_view():  # can't be detached in place
                    module._buffers[name] = buffer.detach()
                else:
                    buffer.detach_()


def noted(model: nn.Module, args: tuple, kwargs: Mapping):
    """Calls the model; a note on its errors says that this was the dry run."""
    try:
        return model(*args, **kwargs)
    except ValueError as error:
        if "values to unpack" in str(error):
            error.add_note(
                "In the schedule's dry run, a list of a sharded tensor's heads (split, unbind) has "
                "those of all ranks. For a fused weight of q, k and v, pass parts= to shard."
            )
        raise
    except RuntimeError as error:
        error.add_note(
            "In the schedule's dry run, which calls the model's forward once with gradients on, "
            "also under torch.no_grad, and with saved tensors replaced. A forward that uses "
            "torch.func.grad or vjp, or writes to a parameter in place outside of its own "
            "torch.no_grad, can't be followed: register a method for that module "
            "(deepsp.register_shard_method)."
        )
        raise


def _no_backward(_) -> NoReturn:
    raise RuntimeError(
        "expected no backward through tensors of the schedule's dry run: call backward outside of "
        "the model's forward, and detach tensors that the model keeps from one call to the next"
    )


class GradMode:
    """Follows ``torch._C._set_grad_enabled``: gradients are off only where the model turned them
    off. The forward of a ``torch.autograd.Function``, also a reentrant checkpoint's, runs without
    gradients too, but its results have some."""

    def __init__(self):
        self._off = False

    def set(self, enabled: bool) -> None:
        """Call it before ``_set_grad_enabled``."""
        if enabled:
            self._off = False
        elif torch.is_grad_enabled():
            self._off = True

    @property
    def enabled(self) -> bool:
        self._off = self._off and not torch.is_grad_enabled()
        return not self._off
