"""Silent faults that doors once had, put back by taking out what mended them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch
import torch.nn.functional as F


def _weights_of_labels() -> Iterator[None]:
    """Positions that the model doesn't take are shifted, as if they weighed labels."""
    from deepsp.integrations.transformers import rows

    def wrong(batch, group, *, inputs, **how):
        if "position_ids" in batch and "position_ids" not in inputs:
            batch = {**batch, "position_ids": F.pad(batch["position_ids"], (0, 1))[..., 1:]}
        return right(batch, group, inputs=inputs, **how)

    right = rows.local_batch
    with mock.patch.object(rows, "local_batch", wrong):
        yield


def _positions_of_deals() -> Iterator[None]:
    """Each row's positions count from 0, whatever the batch says."""
    from deepsp.data import deal_batch
    from deepsp.integrations.transformers import rows

    def wrong(batch, *args, **how):
        documents = right(batch, *args, **how)
        counted = torch.cat([torch.arange(n) for n in documents.lengths])
        documents.tokens["position_ids"] = counted
        return documents

    right = deal_batch.documents_of
    with (
        mock.patch.object(deal_batch, "documents_of", wrong),
        mock.patch.object(rows, "documents_of", wrong),
    ):
        yield


def _imaginary_parts() -> Iterator[None]:
    """Complex inputs of a recurrence lose their imaginary part on the way."""
    from deepsp.sequence.recurrence import module

    def wrong(tokens, value, lens, member):
        if member[1] > 1:
            tokens = {n: torch.complex(x.real, 0 * x.imag) for n, x in tokens.items()}
        return right(tokens, value, lens, member)

    right = module._to_heads
    with mock.patch.object(module, "_to_heads", wrong):
        yield


def _gradients_of_losses() -> Iterator[None]:
    """Wrappers divide gradients by the ranks of a sequence, and nothing multiplies them."""
    from deepsp.integrations.door import Losses

    with mock.patch.object(Losses, "averaged", lambda self, loss: loss):
        yield


def _router_logits_with_smoothing() -> Iterator[None]:
    """Trainer's label smoothing leaves the balancing loss in."""
    from deepsp.integrations.transformers.rows import FullRows

    def wrong(self, *args):
        inputs, self.inputs = self.inputs, self.inputs - {"output_router_logits"}
        try:
            return right(self, *args)
        finally:
            self.inputs = inputs

    right = FullRows._entered
    with mock.patch.object(FullRows, "_entered", wrong):
        yield


def _balance_of_groups() -> Iterator[None]:
    """An evaluation adds up the balancing loss of its groups."""
    from deepsp.integrations.transformers import balance

    def wrong(*args, member, over, **how):
        return right(*args, member=member, over=over, **how) * (over[1] / member[1])

    right = balance.balancing_loss
    with mock.patch.object(balance, "balancing_loss", wrong):
        yield


def _router_logits_of_one_rank() -> Iterator[None]:
    """Predictions have the router logits of one rank's tokens."""
    from deepsp.integrations.transformers.rows import FullRows

    def wrong(self, name, x, share):
        return x if "router" in name else right(self, name, x, share)

    right = FullRows._full
    with mock.patch.object(FullRows, "_full", wrong):
        yield


def _rows_of_streams() -> Iterator[None]:
    """A stream's last packed batch counts as one row."""
    from accelerate.utils import find_batch_size

    from deepsp.integrations.transformers import trainer

    def wrong(run, inputs):
        result = right(run, inputs)
        state = run.trainer.accelerator.gradient_state
        if state.end_of_dataloader and state.remainder < 0 and not run.is_alone:
            state.active_dataloader.remainder = find_batch_size(result[0])
        return result

    right = trainer.real_rows
    with mock.patch.object(trainer, "real_rows", wrong):
        yield


def _adapters_of_dealt_experts() -> Iterator[None]:
    """Adapters on each rank's different experts are taken."""
    from deepsp.integrations.transformers import experts

    with mock.patch.object(experts, "_check_wrappers", lambda module, dealt: None):
        yield


def _noise_of_ranks() -> Iterator[None]:
    """compute_loss draws from each rank's own generator."""
    from deepsp.integrations.transformers.steps import FullStep
    from deepsp.ranks.randomness import own_randomness

    def wrong(self, *args):
        with own_randomness(self.run.groups.member):
            return right(self, *args)

    right = FullStep.loss
    with mock.patch.object(FullStep, "loss", wrong):
        yield


def _any_processor() -> Iterator[None]:
    """Attention processors of diffusers that nobody compared are taken."""
    from deepsp.integrations.diffusers import sharding

    with mock.patch.object(sharding, "PROCESSORS", {*sharding.PROCESSORS, *_UNCOMPARED}):
        yield


_UNCOMPARED = ("Flux2KVAttnProcessor", "Flux2KVParallelSelfAttnProcessor")

_FAULTS = {
    "weights of labels": _weights_of_labels,
    "positions of deals": _positions_of_deals,
    "imaginary parts": _imaginary_parts,
    "gradients of losses": _gradients_of_losses,
    "router logits with smoothing": _router_logits_with_smoothing,
    "balance of groups": _balance_of_groups,
    "router logits of one rank": _router_logits_of_one_rank,
    "rows of streams": _rows_of_streams,
    "adapters of dealt experts": _adapters_of_dealt_experts,
    "noise of ranks": _noise_of_ranks,
    "any processor": _any_processor,
}


def put_back(name: str) -> contextlib.AbstractContextManager[None]:
    """In this context, deepsp has a fault again; "": none."""
    if not name:
        return contextlib.nullcontext()
    return contextlib.contextmanager(_FAULTS[name])()
