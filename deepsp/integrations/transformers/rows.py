"""Models that take full rows, as in one process: each rank of a group passes the same, and gets the
results for all tokens. The model shards the rows when it is called, by hooks, so whatever calls it
(a trainer, a loss of a user's, TRL) stays as it is."""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._compile import _disable_dynamo  # torch.compiler.disable would import Dynamo now
from torch.utils._pytree import tree_map_only

from deepsp.data.deal_batch import dealt_batch, documents_of, padded
from deepsp.data.documents import Deal, deal_documents
from deepsp.data.fold import Fold, fold_documents, folded_batch
from deepsp.data.roles import TOKENS, leaves_of, name_of
from deepsp.data.same_batch import compare_batches
from deepsp.data.sharding import unshard
from deepsp.integrations.door import ADVICE, local_batch
from deepsp.integrations.transformers import calls, mixers, multimodal
from deepsp.integrations.transformers.causal_lm import LossInHead
from deepsp.integrations.transformers.forward import (
    FULL_ROWS,
    Registration,
    running,
    take_local_rows,
)
from deepsp.integrations.transformers.own_loss import OwnLoss
from deepsp.integrations.transformers.registration import (
    attending_by,
    base_of,
    is_classifier,
    use_in,
)
from deepsp.loss.cross_entropy import linear_cross_entropy
from deepsp.ranks.groups import Group, Member, member_of
from deepsp.ranks.randomness import around_forward

_WHOLE = ("loss", "aux_loss", "rope_deltas")
"""Results that aren't by token."""
_BY_TOKEN = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
"""What TRL's fused head computes for each token."""


@dataclass
class _Share:
    """This rank's part of full rows, and the way back."""

    member: Member
    rows: int
    """The rows of this rank's part."""
    lens: list[int]
    deal: Deal | Fold | None = None
    valid: Tensor | None = None
    """[B, S]: the tokens that were dealt out."""

    @property
    def local(self) -> int:
        return self.lens[self.member[0]]

    def full(self, x: Tensor) -> Tensor:
        """[B, S, ...] from this rank's part, for uses that are alike on all ranks, under a wrapper
        that averages gradients."""
        if self.deal is None:
            full = unshard(x, 1, self.member, self.lens)
        elif isinstance(self.deal, Fold):
            full = self.deal.unfold(x, self.member)
        else:
            full = padded(self.deal.unshard(x, self.member)[0], self.valid)
        return torch.ops.deepsp._scale_gradient(full, float(self.member[1]))


@dataclass
class _Call:
    """A call with full rows that runs."""

    share: _Share
    labels: Tensor | None
    items: int | Tensor | None
    fused: bool
    shift_labels: Tensor | None = None
    in_head: LossInHead | None = None
    stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)


class FullRows:
    """Gives a model deepsp's attention, and makes it take full rows.

    Args:
        model: a causal language model of transformers, a classifier of sequences or tokens that has
            a decoder, or PEFT around one.
        group: the sequence group.
        without_logits: computes the loss by :class:`LossInHead`.
        roles: as in :func:`deepsp.shard_batch`.
        how: further arguments of :func:`use_in`.
    """

    mixes_lengths = False
    """Whether documents are dealt out, in training."""
    folds_prefixes = False
    """Whether what rows begin with alike goes through the model once."""
    folded: tuple[int, int] = (0, 0)
    """The tokens of all calls' rows so far, and those that went through the model."""
    outputs = "all"
    """What a call that asks for a loss returns besides: "all" results, or the "loss" only. Logits
    of all tokens take [B, S, V] on every rank."""
    label_smoothing = 0.0
    """Trainer's, which leaves the loss that balances experts out."""
    loss_over: Group | Member | None = None
    """The ranks whose tokens a loss is of, if not the sequence group's."""
    real_rows: Tensor | None = None
    """[B]: the rows whose tokens count in the loss that balances experts; None: all."""
    labels: Tensor | None = None
    """This rank's of the last call, shifted."""
    in_head: Callable = staticmethod(linear_cross_entropy)
    """What a head computes in place of logits, with ``without_logits``."""
    decoder: weakref.ref | None = None
    """The part of a classifier that is called with this rank's tokens; None: all of the model."""
    share: _Share | None = None
    """That of the decoder's last call."""
    is_off = False
    """Whether calls have this rank's tokens, or full rows for the model as it is."""

    def __init__(
        self,
        model: nn.Module,
        group: Group,
        without_logits: bool = False,
        roles: Mapping[str, str] | None = None,
        **how: Any,
    ):
        self.member, self.without_logits, self.roles = member_of(group), without_logits, roles
        base = base_of(model)
        decoder = base.base_model if is_classifier(base) else None
        at = model if decoder is None else decoder
        self.inputs = set(inspect.signature(base_of(at).forward).parameters)
        self.shard_at = multimodal.shard_at(base)
        self.before, self.model = use_in(base, group, decoder=decoder, **how), weakref.ref(base)
        self._running = threading.local()
        take_local_rows(model)  # of an earlier trainer's
        self.handles = [  # they hold no reference to the model: no cycle
            at.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True),
            at.register_forward_hook(self._leave, with_kwargs=True, always_call=True),
        ]
        if decoder is not None:
            self.decoder = weakref.ref(decoder)
            self.handles.append(base.score.register_forward_hook(self._gather_head))
            if hasattr(base, "dropout"):
                self.handles += around_forward(base.dropout)
        for module in (model,) if decoder is None else (model, base, decoder):
            setattr(module, FULL_ROWS, self)

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """In this context, the model gets what it is called with."""
        before, self.is_off = self.is_off, True
        try:
            yield
        finally:
            self.is_off = before

    @property
    def _calls(self) -> list[_Call | None]:
        if not hasattr(self._running, "calls"):
            self._running.calls = []
        return self._running.calls

    def stock(self) -> contextlib.AbstractContextManager:
        """In this context, the model runs as in one process, with the attention that it had."""
        return attending_by(self.model(), self.before)

    def takes_calls(self) -> bool:
        """Whether calls have full rows now."""
        return not (self.is_off or running.forward.is_check)

    # ---- a call

    @_disable_dynamo
    def _enter(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]):
        base = base_of(model)
        registration = calls.registration_of(base)
        if registration is None or not self.takes_calls():
            self._calls.append(None)
            self.share = None
            return None
        batch = calls.named_arguments(model, args, kwargs)
        batch = {name: x for name, x in batch.items() if x is not None}
        labels, items = batch.pop("labels", None), batch.pop("num_items_in_batch", None)
        if labels is not None and "shift_labels" not in batch:
            # transformers' shift: its collators mark the ends of documents in a row.
            batch["shift_labels"] = F.pad(labels, (0, 1), value=-100)[..., 1:]
        if self.decoder is not None:  # its model passes on what it doesn't know, such as margins
            taken = self.inputs
            batch = {n: x for n, x in batch.items() if n in taken or not isinstance(x, Tensor)}
        of_core = {n: batch.pop(n) for n in registration.required if n in batch}
        local, share = self._sharded(base, batch)
        local |= of_core
        call = _Call(share, labels, items, bool(batch.get("fused_lm_head")))
        call.shift_labels = batch.get("shift_labels")
        self._calls.append(call)
        try:
            return (), self._entered(base, call, registration, local)
        except BaseException:
            self._calls.pop()
            call.stack.close()
            raise

    def _entered(
        self, base: nn.Module, call: _Call, registration: Registration, local: dict[str, Any]
    ) -> dict[str, Any]:
        """The model's arguments for this rank's tokens."""
        over, smoothing = self.loss_over or self.member, self.label_smoothing
        loss = OwnLoss(over, average_gradients=True, label_smoothing=smoothing)
        labels = local.get("shift_labels")
        self.labels = labels
        if smoothing > 0 and labels is not None and "output_router_logits" in self.inputs:
            local["output_router_logits"] = False
        if call.fused:
            if local.get("output_router_logits"):
                mixers.balance_of_mixtral()  # by which TRL computes it for all mixtures
        elif labels is not None and self.without_logits and self.outputs == "loss":
            call.in_head = LossInHead(
                base,
                local.pop("shift_labels"),
                group=over,
                loss=self.in_head,
                reduction="mean" if call.items is None else "sum",
                average_gradients=True,
                label_smoothing=smoothing,
            )
            call.stack.enter_context(call.in_head)
        elif call.items is not None:
            local["num_items_in_batch"] = call.items
        changes = {"registration": registration, "loss": loss, "real_rows": self.real_rows}
        return calls.enter(base, local, call.stack, **changes)

    def _sharded(self, base: nn.Module, batch: dict[str, Any]) -> tuple[dict[str, Any], _Share]:
        how = {"roles": self.roles, "inputs": self.inputs}
        if self.folds_prefixes and "shift_labels" in batch and not batch.get("fused_lm_head"):
            raise ValueError(
                f"expected no labels in the call of {type(base).__name__} with fold_prefixes, "
                "since its loss would count shared tokens once, got some; leave fold_prefixes out"
            )
        if not self.folds_prefixes and not (self.mixes_lengths and base.training):
            local, lens = local_batch(batch, self.member, shard_at=self.shard_at, **how)
            rows = next(len(local[n]) for n in TOKENS if n in local)
            return dict(local), _Share(self.member, rows, lens)
        compare_batches([(name_of(p), x) for p, x in leaves_of(batch)], self.member, ADVICE)
        documents = documents_of(batch, -100, **how)
        if self.folds_prefixes:
            fold = fold_documents(documents, self.member[1], self.mixes_lengths)
            of_rows, through = self.folded
            self.folded = (of_rows + len(fold.places), through + len(fold.sources))
            share = _Share(self.member, 1, fold.seq_lens, fold)
            return folded_batch(documents, fold, self.member[0]), share
        deal = deal_documents(documents.lengths, self.member[1])
        share = _Share(self.member, 1, deal.seq_lens, deal, documents.valid)
        return dealt_batch(documents.at(deal.tokens(self.member[0])), documents, deal), share

    @_disable_dynamo
    def _leave(self, model: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any):
        call = self._calls.pop() if self._calls else None
        if call is None:
            return None
        if output is None:  # an error is on its way
            call.stack.__exit__(*sys.exc_info())
            return None
        call.stack.close()
        if self.decoder is not None:
            self.share = call.share
            if output.get("hidden_states") is not None:
                output["hidden_states"] = self._full(
                    "hidden_states", output["hidden_states"], call.share
                )
            return output
        return self._results(base_of(model), call, output)

    def _gather_head(self, head: nn.Module, args: tuple, output: Tensor) -> Tensor:
        return output if self.share is None else self.share.full(output)

    # ---- results

    def _results(self, base: nn.Module, call: _Call, output: Any) -> Any:
        if call.in_head is not None:
            loss = call.in_head.of(output)
            return type(output)(loss=loss if call.items is None else loss / call.items)
        if call.fused:
            return self._results_of_trl(base, call, output)
        if call.labels is not None and self.outputs == "loss":
            return type(output)(loss=output["loss"])
        results = {}
        for name, x in output.items():
            results[name] = x if name in _WHOLE else self._full(name, x, call.share)
        return type(output)(**{n: x for n, x in results.items() if x is not None})

    def _full(self, name: str, x: Any, share: _Share) -> Any:
        """A result for all tokens; None: one of images."""
        if any(word in name for word in ("image", "video", "audio")):
            return None  # their features have no tokens
        local = share.local

        def full(x: Tensor) -> Tensor:
            if x.dim() >= 2 and x.size(1) == local:
                return share.full(x)
            if x.dim() >= 2 and x.size(0) == share.rows * local:  # of routers: [B * S_r, E]
                return share.full(x.unflatten(0, (share.rows, local))).flatten(0, 1)
            raise ValueError(
                f"expected {name} of the model to have an entry for each token, "
                f"[B, S_r, ...] or [B * S_r, ...] with S_r={local}, got shape {tuple(x.shape)}; "
                f"add {name!r} to ignore_keys, or leave it out of the model's outputs"
            )

        return tree_map_only(Tensor, full, x)

    def _results_of_trl(self, base: nn.Module, call: _Call, output: Any) -> Any:
        names = [name for name in _BY_TOKEN if getattr(output, name) is not None]
        dtype = output.log_probs.dtype
        # One message for all, stacked in a last dimension.
        stacked = torch.stack([getattr(output, name).to(dtype) for name in names], -1)
        full = call.share.full(stacked)
        if call.labels is not None:  # without shift_labels, the head has nothing for the last token
            full = full[:, :-1]
        by_name = dict(zip(names, full.unbind(-1), strict=True))
        if "is_top1" in by_name:
            by_name["is_top1"] = by_name["is_top1"].bool()
        mask = (call.shift_labels if call.labels is None else call.labels[:, 1:]) != -100
        count = mask.sum().clamp(min=1) if call.items is None else call.items
        loss = -by_name["log_probs"].sum() / count
        if output.aux_loss is not None:
            config = base.config.get_text_config()
            loss = loss + getattr(config, "router_aux_loss_coef", 0.0) * output.aux_loss
        return type(output)(loss=loss, label_mask=mask, aux_loss=output.aux_loss, **by_name)
