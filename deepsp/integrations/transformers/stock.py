"""What one process does with a batch, for a proof: with transformers' own attention and layers."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepsp.data.roles import DOCUMENTS, NAMED, describe, named_values
from deepsp.data.sharding import as_positions
from deepsp.integrations.door import Groups, local_batch
from deepsp.integrations.proof.cut import cut, unpacked
from deepsp.integrations.proof.outcome import Measure, Outcome
from deepsp.integrations.proof.report import raise_unless_alike
from deepsp.integrations.transformers import mixers, multimodal
from deepsp.integrations.transformers.registration import attending_by, base_of
from deepsp.ranks.groups import device_of, member_of, on_all_ranks


class Stock:
    """Batches of a model of transformers.

    Args:
        model: the model.
        roles: as in :func:`deepsp.shard_batch`.
        needs_roles: whether each entry of a batch is sharded, also those that the model doesn't
            get.
    """

    def __init__(self, model: nn.Module, roles: Mapping[str, str] | None, needs_roles: bool):
        self.model, self.roles, self.needs_roles = model, roles, needs_roles

    def cuts(
        self, batch: Mapping[str, Any], every_token: bool = False
    ) -> tuple[dict[str, Any], dict[str, Any], str]:
        """A cut of a full batch, the same as one process reads it, and what its entries are.
        ``whole``: as in :func:`cut`."""
        batch = named_values(batch, 1)
        inputs = set(inspect.signature(self.model.forward).parameters)
        named = {n: x for n, x in batch.items() if self.needs_roles or n in NAMED or n in inputs}
        at = multimodal.shard_at(self.model)
        roles = describe(named, self.roles, shard_at=at, inputs=inputs)
        part, lens = cut(batch, roles, multimodal.text_tokens(self.model, batch), every_token)
        ids = part[roles.tokens]
        if (lens or not set(DOCUMENTS).isdisjoint(part)) and any(mixers.mixers_in(self.model)):
            # State leaks from one document to the next in transformers' own recurrent layers.
            return part, unpacked(part, roles, lens or [ids.size(1)]), roles.table()
        full = as_positions(dict(part), tuple(ids.shape[:2]), ids.device) if lens else part
        return part, full, roles.table()


CONTEXT = (
    "(A cut of your batch was run in full, as by one process, and sharded, without random draws: "
    "{}. prove=False leaves this check out)"
)


def dtypes_of(model: nn.Module, fsdp_plugin: Any = None, is_wide: bool = False) -> set[torch.dtype]:
    """Those in which a model computes without autocast. transformers computes losses in float32,
    also of models in float64. ``is_wide``: as in :class:`Measure`."""
    if is_wide:
        return {torch.float32}
    policy = getattr(fsdp_plugin, "mixed_precision_policy", None)
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    return {torch.float32, getattr(policy, "param_dtype", None)} | dtypes


def mistakes(batch: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Usual ones, and the batch that one process would have with each."""
    labels = batch.get("labels")
    for name, text in (
        ("position_ids", "positions: they don't reach the model, or restart where they shouldn't"),
        ("attention_mask", "mask: attention_mask doesn't reach the model"),
    ):
        if batch.get(name) is not None:
            yield text, {n: x for n, x in batch.items() if n != name}
    if isinstance(labels, Tensor) and labels.dim() == 2:
        twice, none = F.pad(labels, (0, 1), value=-100)[:, 1:], F.pad(labels, (1, 0))[:, :-1]
        yield "shift: labels are shifted twice", {**batch, "labels": twice}
        yield "shift: labels aren't shifted", {**batch, "labels": none}
    yield "aux loss: it is left out, or counts twice", {**batch, "output_router_logits": False}


def prove_model(
    model: nn.Module,
    before: dict[str, str],
    batch: Mapping[str, Any],
    groups: Groups,
    roles: Mapping[str, str] | None,
    fsdp_plugin: Any = None,
) -> None:
    """Raises on all ranks unless a model's loss and gradients on a cut of a batch are those of one
    process.

    Args:
        model: as accelerate has prepared it, without DDP or an engine.
        before: the attention that it had, as ``set_attn_implementation`` takes it.
        batch: full, with labels.
        groups: the groups of ranks.
        roles: as in :func:`deepsp.shard_batch`.
        fsdp_plugin: accelerate's, if it shards the model.
    """
    base, member = base_of(model), groups.member
    if not _are_classes(batch.get("labels"), base.config.get_text_config().vocab_size):
        raise_unless_alike(None, None, (), member, member_of(None), "")
        return
    part, full, table = Stock(base, roles, needs_roles=True).cuts(batch)
    local = {}

    def sharded() -> Tensor:
        local.update(local_batch(part, member, roles=roles)[0])
        arguments = _taken(base, local) | {n: x for n, x in local.items() if n in NAMED}
        return model(**arguments).loss

    def one_process(changed: Mapping[str, Any] = full) -> Outcome:
        return measure(
            lambda: model(**_taken(base, {**changed, "use_cache": False})).loss,
            lambda: attending_by(base, before),
        )

    measure = Measure(model, [], member, fsdp_plugin is not None)
    alone, other = one_process(), measure(sharded)
    counts = on_all_ranks([int((local["shift_labels"] != -100).sum())], member, device_of(member))
    other.counted = sum(n for (n,) in counts)
    alone.counted = int((full["labels"][..., 1:] != -100).sum())
    raise_unless_alike(
        alone,
        other,
        dtypes_of(model, fsdp_plugin, measure.is_wide),
        member,
        member_of(None),
        CONTEXT.format(table),
        [(text, partial(one_process, changed)) for text, changed in mistakes(full)],
    )


def _are_classes(labels: Any, words: int) -> bool:
    """Whether a model of transformers has a loss for labels."""
    if not isinstance(labels, Tensor) or labels.is_floating_point():
        return False
    return bool(((labels == -100) | ((labels >= 0) & (labels < words))).all())


def _taken(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a batch that a model takes."""
    declared = inspect.signature(model.forward).parameters
    if any(p.kind == p.VAR_KEYWORD for p in declared.values()):
        declared = {*declared, *NAMED}
    return {n: x for n, x in batch.items() if n in declared}
