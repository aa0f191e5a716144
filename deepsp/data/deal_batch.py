"""Batches of documents of different lengths, each shared by as few ranks as it takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deepsp.data.documents import Deal, deal_documents
from deepsp.data.same_batch import ADVICE, compare_batches
from deepsp.data.sharding import full_batch, hand_out, leaves_of, name_of, named_values
from deepsp.ranks.groups import Group, Member, device_of, member_of

Cost = tuple[float, float]
COST: Cost = (1.0, 2e-5)


def deal_batch(
    batch: Mapping[str, Any],
    group: Group = None,
    *,
    max_tokens: int | None = None,
    cost: Cost = COST,
    ignore_index: int = -100,
    shift: Sequence[str] | None = None,
) -> tuple[dict[str, Any], Deal]:
    """Deals the documents of a batch, which every rank has in full, out over the ranks: in the
    place of :func:`deepsp.shard_batch` where lengths differ.

    A short document stays on one rank, and nothing of it is exchanged; a long one is shared by as
    many ranks as balance and ``max_tokens`` need (:func:`deal_documents`). Loss and gradients are
    those of one process, as with ``shard_batch``.

    Args:
        batch: as for ``shard_batch``, with the sequence in dimension 1. Each row is a document, or
            several, where ``position_ids`` restart, or ``cu_seq_lens_q`` or ``seq_idx`` say so;
            zeros of ``attention_mask`` [B, S] are padding, which is dropped.
        group: the sequence group.
        max_tokens: as in :func:`deal_documents`; ``cost``, too.
        cost: what tokens and documents cost.
        ignore_index: the label of tokens that don't count.
        shift: as in ``shard_batch``.

    Returns:
        The local batch, and the deal. In the batch each tensor is [1, S_r, ...], this rank's tokens
        in the order of :meth:`Deal.tokens`; ``shift_labels`` replaces ``labels``, the next token of
        each; ``position_ids`` count from 0 in each document; ``deal`` is the deal, which a model of
        transformers with deepsp's attention takes as an argument. Pass it on to
        :func:`deepsp.distributed_attention` in a model of your own.

    Raises:
        ValueError: as ``shard_batch``; a tensor has other rows or tokens than the others, padding
            is between tokens, or a label of padding isn't ``ignore_index``.
    """
    given = [(name_of(path), x) for path, x in leaves_of(named_values(batch, 1))]
    compare_batches(given, group, ADVICE)
    full = documents_of(batch, ignore_index, shift)
    member = member_of(group)
    deal = deal_documents(full.lengths, member[1], max_tokens, cost=cost)
    index = deal.tokens(member[0])
    own = {n: x[index.to(x.device)] for n, x in full.tokens.items()}
    return dealt_batch(own, full, deal, member), deal


@dataclass
class Documents:
    """The documents of a batch, one after another, without padding.

    Attributes:
        tokens: by name, [S, ...].
        lengths: of the documents.
        named: the name of the tokens.
        rest: values that aren't tensors.
    """

    tokens: dict[str, Tensor]
    lengths: list[int]
    named: str
    rest: dict[str, Any]


def documents_of(
    batch: Mapping[str, Any], ignore_index: int, shift: Sequence[str] | None
) -> Documents:
    """The documents of a full batch, with shifted labels. ValueError as in :func:`deal_batch`."""
    batch = named_values(batch, 1)
    batch.pop("deal", None)
    mask, labels = batch.pop("attention_mask", None), batch.get("labels")
    batch, named, _ = full_batch(batch, 1, None, ignore_index, shift)
    rows, length = batch[named].shape[:2]
    valid = torch.ones(rows, length, dtype=torch.bool, device=batch[named].device)
    if mask is not None:
        if mask.shape != valid.shape:
            raise ValueError(
                f"expected attention_mask of shape [{rows}, {length}], where zeros are padding, "
                f"got {tuple(mask.shape)}; use shard_batch for other masks"
            )
        valid = mask.bool()
        runs = (valid[:, 1:] & ~valid[:, :-1]).sum(1) + valid[:, :1].sum(1)
        if bool((runs > 1).any()):
            raise ValueError(
                "expected the zeros of attention_mask at the ends of rows, got some between "
                "tokens; use shard_batch"
            )
    for name, x in (("labels", labels), ("shift_labels", batch.get("shift_labels"))):
        if x is not None and bool((x[~valid] != ignore_index).any()):
            raise ValueError(
                f"expected batch[{name!r}] to be {ignore_index} (ignore_index) where "
                "attention_mask is 0, since padding is dropped, got other labels there; pad on the "
                "right, since a row's first token is predicted from padding before it"
            )
    lengths = _lengths(batch.pop("position_ids"), valid)
    tensors = {n: x for n, x in batch.items() if isinstance(x, Tensor)}
    for name, x in tensors.items():
        if x.shape[:2] != valid.shape:
            raise ValueError(
                f"expected batch[{name!r}] of shape [{rows}, {length}, ...], with an entry for "
                f"each token, got {tuple(x.shape)}; leave it out"
            )
    rest = {n: x for n, x in batch.items() if n not in tensors}
    return Documents({n: x[valid] for n, x in tensors.items()}, lengths, named, rest)


def _lengths(positions: Tensor, valid: Tensor) -> list[int]:
    """Of each document, the number of tokens that aren't padding."""
    begins = valid.clone()
    restarts = positions.reshape(-1, valid.size(1)).diff(dim=1).expand(valid.size(0), -1) != 1
    begins[:, 1:] &= restarts | ~valid[:, :-1]
    number = begins.flatten().cumsum(0)[valid.flatten()]
    return torch.bincount(number)[1:].tolist() if number.numel() else []


def dealt_batch(
    own: Mapping[str, Tensor], of: Documents, deal: Deal, member: Member
) -> dict[str, Any]:
    """The batch of this rank's tokens, and the deal."""
    rank, device = member[0], own[of.named].device
    local = {**of.rest, **{n: x.unsqueeze(0) for n, x in own.items()}}
    local["position_ids"] = deal.positions(rank).to(device).unsqueeze(0)
    hand_out(local, of.named, 1, sum(of.lengths))
    return {**local, "deal": deal}


def exchange_documents(
    full: Sequence[Documents], deal: Deal, own: Documents, member: Member
) -> dict[str, Tensor]:
    """This rank's tokens of all ranks' documents, which :class:`Documents` by rank describe (their
    tensors have no elements): one all-to-all.

    Args:
        full: each rank's documents; ``deal`` deals out all of them, rank after rank.
        deal: for the ranks of the group.
        own: this rank's documents, with their tokens.
        member: rank, size and name of the group.
    """
    rank, size, name = member
    device = device_of(member)
    firsts = torch.tensor([0, *(sum(x.lengths) for x in full)]).cumsum(0)
    known = next(x for x in full if x.tokens).tokens
    width = {n: x[0:0].new_empty(1, *x.shape[1:]).nbytes for n, x in known.items()}

    def sources(p: int) -> tuple[Tensor, Tensor]:
        index = deal.tokens(p)
        return index, torch.searchsorted(firsts, index, right=True) - 1

    sent, counts = [torch.empty(0, dtype=torch.uint8, device=device)], []
    for p in range(size):
        index, source = sources(p)
        mine = index[source == rank] - firsts[rank]
        counts.append(len(mine) * sum(width.values()))
        for n in known if len(mine) else ():
            part = own.tokens[n].detach()[mine.to(own.tokens[n].device)].contiguous()
            sent.append(part.view(-1).view(torch.uint8).to(device))
    index, source = sources(rank)
    held = torch.bincount(source, minlength=size).tolist()
    received = sent[0].new_empty(sum(held) * sum(width.values()))
    group = dist.distributed_c10d._resolve_process_group(name)
    expected = [n * sum(width.values()) for n in held]
    dist.all_to_all_single(received, torch.cat(sent), expected, counts, group=group)
    order = source.argsort(stable=True).argsort()
    found: dict[str, list[Tensor]] = {n: [] for n in known}
    for count, block in zip(held, received.split(expected), strict=True):
        parts = block.split([count * width[n] for n in known])
        for (n, x), part in zip(known.items(), parts, strict=True):
            found[n].append(part.clone().view(x.dtype).view(count, *x.shape[1:]))
    return {
        n: torch.cat(parts).to(known[n].device)[order.to(known[n].device)]
        for n, parts in found.items()
    }
