"""Batches of documents of different lengths, each shared by as few ranks as it takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deepsp.data.documents import Deal, deal_documents
from deepsp.data.same_batch import ADVICE, compare_batches
from deepsp.data.sharding import full_batch, hand_out, leaves_of, name_of, named_values
from deepsp.ranks.groups import Group, member_of


def deal_batch(
    batch: Mapping[str, Any],
    group: Group = None,
    *,
    max_tokens: int | None = None,
    cost: tuple[float, float] = (1.0, 2e-5),
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
        ValueError: as ``shard_batch``; a tensor has other rows or tokens than the others, or a
            label of padding isn't ``ignore_index``.
    """
    batch = named_values(batch, 1)
    batch.pop("deal", None)
    tensors = [(name_of(path), x) for path, x in leaves_of(batch)]
    compare_batches(tensors, group, ADVICE)
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
                "expected the zeros of attention_mask at the ends of rows, got some between tokens; "
                "use shard_batch"
            )
    for name, x in (("labels", labels), ("shift_labels", batch.get("shift_labels"))):
        if x is not None and bool((x[~valid] != ignore_index).any()):
            raise ValueError(
                f"expected batch[{name!r}] to be {ignore_index} (ignore_index) where "
                "attention_mask is 0, since padding is dropped, got other labels there"
            )
    rank, size, _ = member_of(group)
    lengths = _lengths(batch.pop("position_ids"), valid)
    deal = deal_documents(lengths, size, max_tokens, cost=cost)
    index = deal.tokens(rank).to(valid.device)

    def own(name: str, x: Tensor) -> Tensor:
        if x.shape[:2] != valid.shape:
            raise ValueError(
                f"expected batch[{name!r}] of shape [{rows}, {length}, ...], with an entry for "
                f"each token, got {tuple(x.shape)}; leave it out"
            )
        return x[valid][index].unsqueeze(0)

    local = {n: own(n, x) if isinstance(x, Tensor) else x for n, x in batch.items()}
    local["position_ids"] = deal.positions(rank).to(valid.device).unsqueeze(0)
    local["deal"] = deal
    hand_out(local, named, 1, sum(lengths))
    return local, deal


def _lengths(positions: Tensor, valid: Tensor) -> list[int]:
    """Of each document, the number of tokens that aren't padding."""
    begins = valid.clone()
    restarts = positions.reshape(-1, valid.size(1)).diff(dim=1).expand(valid.size(0), -1) != 1
    begins[:, 1:] &= restarts | ~valid[:, :-1]
    number = begins.flatten().cumsum(0)[valid.flatten()]
    return torch.bincount(number)[1:].tolist() if number.numel() else []
