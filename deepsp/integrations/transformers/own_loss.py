"""The loss that a model of transformers computes itself, over a sharded sequence."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepsp.loss.cross_entropy import cross_entropy
from deepsp.ranks.groups import Group, Member


@dataclass(frozen=True)
class OwnLoss:
    """Replaces a causal language model's ``loss_function`` by the loss of the full sequence, on
    every rank. ``num_items_in_batch`` divides the sum; None: the group's number of valid tokens."""

    group: Group | Member
    average_gradients: bool = False
    label_smoothing: float = 0.0

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int | None = None,
        num_items_in_batch: int | Tensor | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **_,
    ) -> Tensor:
        if shift_labels is None:
            raise ValueError(
                "expected the model to pass shift_labels on to its loss function, got None; leave "
                "shift_labels out of its call, and use deepsp.cross_entropy on its logits"
            )
        loss = cross_entropy(
            logits,
            shift_labels,
            self.group,
            ignore_index=ignore_index,
            reduction="mean" if num_items_in_batch is None else "sum",
            label_smoothing=self.label_smoothing,
            average_gradients=self.average_gradients,
        )
        return loss if num_items_in_batch is None else loss / num_items_in_batch


@dataclass(frozen=True)
class LocalLoss:
    """The sum over this rank's tokens, divided by ``num_items_in_batch``; the caller reduces it
    over the ranks. ``count``: the divisor for calls without one."""

    count: Tensor | None = None

    def __call__(
        self, logits, labels, vocab_size=None, num_items_in_batch=None, shift_labels=None, **_
    ) -> Tensor:
        if num_items_in_batch is None:
            num_items_in_batch = self.count
        if shift_labels is None or num_items_in_batch is None:
            raise ValueError(
                "expected shift_labels and num_items_in_batch in the model's call, as the trainer "
                "passes them to compute_loss; pass them on"
            )
        wide = logits if logits.dtype == torch.float64 else logits.float()
        losses = F.cross_entropy(wide.flatten(0, -2), shift_labels.flatten(), reduction="sum")
        with torch.enable_grad():  # so that the divisor's gradient can be checked
            return losses / num_items_in_batch


class _Recorded:
    """A loss function that knows whether it was called."""

    def __init__(self, loss: OwnLoss | LocalLoss):
        self.loss, self.was_called = loss, False

    def __call__(self, *args, **kwargs) -> Tensor:
        self.was_called = True
        return self.loss(*args, **kwargs)


@contextlib.contextmanager
def computing(
    model: nn.Module, loss: OwnLoss | LocalLoss, is_expected: bool = False
) -> Iterator[None]:
    """In this context ``model`` returns ``loss``, unless an outer context has set one already.
    ``is_expected``: the model is called for its loss.

    Raises:
        ValueError: the model's loss isn't that of a causal language model of transformers.
    """
    from transformers.loss.loss_utils import ForCausalLMLoss

    replaced = vars(model).get("_loss_function")
    if isinstance(replaced, _Recorded):
        yield
        return
    if model.loss_function is not ForCausalLMLoss:
        raise ValueError(
            f"expected the loss function of {type(model).__name__} to be transformers' for causal "
            f"language models, got {model.loss_function!r}; leave shift_labels out of the call, "
            "and compute the loss from the logits with deepsp.cross_entropy"
        )
    model.loss_function = recorded = _Recorded(loss)
    try:
        yield
        if is_expected and not recorded.was_called:
            raise ValueError(
                f"expected {type(model).__name__} to compute its loss by its loss_function, but it "
                "has code of its own for that, whose loss would be that of this rank's tokens; "
                "leave shift_labels out of the call, and use deepsp.cross_entropy on the logits"
            )
    finally:
        if replaced is None:
            del model._loss_function
        else:
            model._loss_function = replaced
