"""The loss of a Trainer subclass with its own ``compute_loss``: a sum over the local tokens,
divided by ``num_items_in_batch``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from deepsp.integrations.transformers.own_loss import LocalLoss, computing
from deepsp.ranks.groups import Group, on_all_ranks


def class_loss(
    compute: Callable[[Tensor], Any],
    count: int | Tensor,
    model: nn.Module,
    base: nn.Module,
    group: Group,
    name: str,
    device: torch.device,
) -> tuple[Tensor, Any]:
    """This rank's term of the loss, and the outputs.

    Args:
        compute: ``compute_loss`` of the class, called with ``num_items_in_batch``; returns the
            loss, or the loss and outputs.
        count: the number of items.
        model: the model that ``compute`` calls.
        base: the model of transformers in it.
        group: the sequence group.
        name: the class's name, for errors.
        device: the ranks' device.

    Raises:
        ValueError: on every rank: the loss isn't a sum divided by the count.
    """
    trains = torch.is_grad_enabled()
    # With a gradient, to see how the loss depends on it.
    items = torch.as_tensor(count, dtype=torch.float32, device=device).detach().requires_grad_()
    # In evaluation, a class may call its model only for the logits, and ignore its loss.
    with computing(base, LocalLoss(None if trains else items)), _gradients_around((model, base)):
        found = compute(items)
    loss, outputs = found if isinstance(found, tuple) else (found, None)
    if items > 0:
        _check(loss, items, group, name)
    return (loss if trains else loss.detach()), outputs


@contextlib.contextmanager
def _gradients_around(models: Iterable[nn.Module]) -> Iterator[None]:
    """In evaluation, enables gradients outside of calls of these models."""
    if torch.is_grad_enabled():
        yield
        return

    def leave(module, args):
        before.append(torch.is_grad_enabled())
        torch._C._set_grad_enabled(False)

    def enter(module, args, output):
        torch._C._set_grad_enabled(before.pop())

    before: list[bool] = []
    handles = []
    for model in set(models):
        handles.append(model.register_forward_pre_hook(leave, prepend=True))
        handles.append(model.register_forward_hook(enter, always_call=True))
    try:
        with torch.enable_grad():
            yield
    finally:
        for handle in handles:
            handle.remove()


def _check(loss: Tensor, count: Tensor, group: Group, name: str) -> None:
    """Raises unless ``loss`` is a sum / ``count``; the mean of a rank's own tokens isn't."""
    slope = None
    if loss.requires_grad:
        (slope,) = torch.autograd.grad(loss, count, retain_graph=True, allow_unused=True)
    wrong = slope is None or not torch.allclose(-slope * count, loss.float(), rtol=1e-5)
    if any(n for (n,) in on_all_ranks([int(wrong)], group, count.device)):
        raise ValueError(
            f"expected compute_loss of {name} to return a sum over tokens divided by "
            "num_items_in_batch, got a loss that isn't proportional to 1 / num_items_in_batch; "
            "each rank has other tokens, so a mean of means, or a term that isn't divided, would "
            "be wrong. (Under torch.no_grad() of its own, or of a Python number made of "
            "num_items_in_batch, that can't be seen: leave those out.)"
        )
