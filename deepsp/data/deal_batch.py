"""Batches of documents of different lengths, each shared by as few ranks as it takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from deepsp.data import last_batch
from deepsp.data.documents import Deal, deal_documents
from deepsp.data.roles import DOCUMENTS, Roles, leaves_of, name_of, named_values
from deepsp.data.same_batch import ADVICE, compare_batches
from deepsp.data.sharding import full_batch
from deepsp.ranks.groups import Group, Member, device_of, member_of

if TYPE_CHECKING:
    from deepsp.data.fold import Fold

Cost = tuple[float, float]
COST: Cost = (1.0, 2e-5)


def deal_batch(
    batch: Mapping[str, Any],
    group: Group = None,
    *,
    max_tokens: int | None = None,
    cost: Cost = COST,
    ignore_index: int = -100,
    roles: Mapping[str, str] | None = None,
) -> tuple[dict[str, Any], Deal]:
    """Deals the documents of a batch, which every rank has in full, out over the ranks: in the
    place of :func:`deepsp.shard_batch` where lengths differ.

    A short document stays on one rank, and nothing of it is exchanged; a long one is shared by as
    many ranks as balance and ``max_tokens`` need (:func:`deal_documents`). Loss and gradients are
    those of one process, as with ``shard_batch``.

    Args:
        batch: as for ``shard_batch``, with the sequence in dimension 1. Each row is a document, or
            several, where ``cu_seq_lens_q`` or ``seq_idx`` say so, or, without ``attention_mask``,
            where ``position_ids`` restart (as in transformers); zeros of ``attention_mask`` [B, S]
            are padding, which is dropped.
        group: the sequence group.
        max_tokens: as in :func:`deal_documents`; ``cost``, too.
        cost: what tokens and documents cost.
        ignore_index: the label of tokens that don't count.
        roles: as in ``shard_batch``.

    Returns:
        The local batch, and the deal. In the batch each tensor is [1, S_r, ...], this rank's tokens
        in the order of :meth:`Deal.tokens`; ``shift_labels`` replaces ``labels``, the next token of
        each; ``position_ids`` are those of the batch, or count from 0 in each row; ``deal`` is the
        deal, which a model of transformers with deepsp's attention takes as an argument. Pass it
        on to :func:`deepsp.distributed_attention` in a model of your own.

    Raises:
        ValueError: as ``shard_batch``; a tensor has other rows or tokens than the others, padding
            is between tokens, or a label of padding isn't ``ignore_index``.
    """
    values = named_values(batch, 1)
    compare_batches([(name_of(path), x) for path, x in leaves_of(values)], group, ADVICE)
    full = documents_of(batch, ignore_index, roles=roles)
    member = member_of(group)
    deal = deal_documents(full.lengths, member[1], max_tokens, cost=cost)
    return dealt_batch(full.at(deal.tokens(member[0])), full, deal), deal


@dataclass
class Documents:
    """The documents of a batch, one after another, without padding.

    Attributes:
        tokens: by name, [S, ...].
        lengths: of the documents.
        roles: of the batch.
        rest: values without an entry for each token.
        valid: [B, S], which tokens of the rows aren't padding.
        makes_positions: whether the batch had no positions of its own.
    """

    tokens: dict[str, Tensor]
    lengths: list[int]
    roles: Roles | None
    rest: dict[str, Any]
    valid: Tensor
    makes_positions: bool

    def at(self, index: Tensor) -> dict[str, Tensor]:
        """Return some of the tokens, int64 [n]."""
        return {n: x[index.to(x.device)] for n, x in self.tokens.items()}


def padded(tokens: Tensor, valid: Tensor) -> Tensor:
    """Return the rows [B, S, ...] whose ``valid`` [B, S] tokens, row after row, are [N, ...]; 0 in
    padding."""
    where = valid.to(tokens.device).view(*valid.shape, *[1] * (tokens.dim() - 1))
    return tokens.new_zeros(*valid.shape, *tokens.shape[1:]).masked_scatter(where, tokens)


def documents_of(batch: Mapping[str, Any], ignore_index: int, **how: Any) -> Documents:
    """The documents of a full batch, with shifted labels. ``how``: arguments of
    :func:`deepsp.data.roles.describe`. ValueError as in :func:`deal_batch`."""
    batch = named_values(batch, 1)
    batch.pop("deal", None)
    mask, labels = batch.get("attention_mask"), batch.get("labels")
    # A mask hides where positions restart, as in transformers.
    packed = mask is None or any(batch.get(name) is not None for name in DOCUMENTS)
    makes_positions = batch.get("position_ids") is None
    batch, described = full_batch(batch, None, ignore_index, **how)
    batch.pop("attention_mask", None)
    valid = _valid(mask, described, batch[described.tokens].device)
    advice = f"pass labels.masked_fill(attention_mask == 0, {ignore_index})"
    before = "pad on the right, since padding before a row predicts its first token"
    for name, x, what in (
        ("labels", labels, advice),
        ("shift_labels", batch.get("shift_labels"), before),
    ):
        if x is not None and bool((x[~valid] != ignore_index).any()):
            raise ValueError(
                f"expected batch[{name!r}] to be {ignore_index} (ignore_index) where "
                f"attention_mask is 0, since padding is dropped, got other labels there; {what}"
            )
    for path, (_, shape) in described.of.items():
        if len(path) > 1 and described.dim_of(path) is not None:
            raise ValueError(
                f"expected tensors with an entry for each token by name, got {name_of(path)} of "
                f"shape {shape} within another value; put it into the batch itself"
            )
    positions = batch["position_ids"]
    if positions.dim() > 2 or positions.shape[:-1].numel() not in (1, described.rows):
        raise ValueError(
            f"expected batch['position_ids'] of shape [{described.length}] or [{described.rows}, "
            f"{described.length}], got {tuple(positions.shape)}"
        )
    positions = (positions if positions.dim() == 2 else positions[None]).expand(described.rows, -1)
    batch["position_ids"] = positions
    tokens, rest = {}, {}
    for name, x in batch.items():
        full = not isinstance(x, Tensor) or described.dim_of((name,)) is None
        (rest if full else tokens)[name] = x
    for name, x in tokens.items():
        if x.shape[:2] != valid.shape:
            raise ValueError(
                f"expected batch[{name!r}] of shape [{described.rows}, {described.length}, ...], "
                f"with an entry for each token, got {tuple(x.shape)}; leave it out"
            )
    tokens = {n: x[valid.to(x.device)] for n, x in tokens.items()}
    lengths = _lengths(positions if packed else None, valid)
    return Documents(tokens, lengths, described, rest, valid, makes_positions)


def packed_batch(
    batch: Mapping[str, Any], roles: Mapping[str, str] | None = None
) -> dict[str, Tensor]:
    """A batch's tokens in one row, [1, S, ...], with ``labels`` and ``position_ids`` that restart
    with each document. ValueError as in :func:`deal_batch`, and for positions that restart within a
    document."""
    documents = documents_of(batch, -100, roles=roles)
    packed = {name: x.unsqueeze(0) for name, x in documents.tokens.items()}
    labels, lengths = packed.pop("shift_labels", None), documents.lengths
    if labels is not None:
        begins = torch.tensor([0, *lengths], device=labels.device).cumsum(0)[:-1]
        packed["labels"] = F.pad(labels, (1, 0), value=-100)[:, :-1]
        packed["labels"][:, begins] = -100
    restarts = int((packed["position_ids"][0].diff() != 1).sum())
    if restarts > max(0, len(lengths) - 1):
        raise ValueError(
            "expected position_ids that restart where a document begins, got more; leave "
            "attention_mask or position_ids out"
        )
    return packed


def _valid(mask: Tensor | None, batch: Roles, device: torch.device) -> Tensor:
    """Which tokens aren't padding, [B, S]."""
    shape = (batch.rows, batch.length)
    if mask is None:
        return torch.ones(shape, dtype=torch.bool, device=device)
    if tuple(mask.shape) != shape:
        raise ValueError(
            f"expected attention_mask of shape {list(shape)}, where zeros are padding, got "
            f"{tuple(mask.shape)}; use shard_batch for other masks"
        )
    valid = mask.bool()
    runs = (valid[:, 1:] & ~valid[:, :-1]).sum(1) + valid[:, :1].sum(1)
    if bool((runs > 1).any()):
        raise ValueError(
            "expected the zeros of attention_mask at the ends of rows, got some between tokens; "
            "use shard_batch"
        )
    return valid


def _lengths(positions: Tensor | None, valid: Tensor) -> list[int]:
    """Return the number of tokens of each document that aren't padding. ``positions``: [B, S],
    which restart where a document begins; None: each row is one."""
    begins = valid.clone()
    begins[:, 1:] &= ~valid[:, :-1]
    if positions is not None:
        begins[:, 1:] |= valid[:, 1:] & (positions.diff(dim=1) != 1)
    number = begins.flatten().cumsum(0)[valid.flatten()]
    return torch.bincount(number)[1:].tolist() if number.numel() else []


def dealt_batch(tokens: Mapping[str, Tensor], of: Documents, deal: Deal | Fold) -> dict[str, Any]:
    """The batch of this rank's tokens, and the deal or fold."""
    local = {**of.rest, **{n: x.unsqueeze(0) for n, x in tokens.items()}}
    last_batch.remember(local, replace(of.roles, length=sum(deal.seq_lens)), deal.seq_lens)
    deal.makes_positions = of.makes_positions
    return {**local, "deal": deal}


def exchange_documents(
    full: Sequence[Documents], deal: Deal, documents: Documents, member: Member
) -> dict[str, Tensor]:
    """This rank's tokens of all ranks' documents, which :class:`Documents` by rank describe (their
    tensors have no elements): one all-to-all.

    Args:
        full: each rank's documents; ``deal`` deals out all of them, rank after rank.
        deal: for the ranks of the group.
        documents: this rank's documents, with their tokens.
        member: rank, size and name of the group.
    """
    rank, size, name = member
    device = device_of(member)
    firsts = torch.tensor([0, *(sum(x.lengths) for x in full)]).cumsum(0)
    tensors = next(x for x in full if x.tokens).tokens
    width = {n: x[0:0].new_empty(1, *x.shape[1:]).nbytes for n, x in tensors.items()}

    def sources(p: int) -> tuple[Tensor, Tensor]:
        index = deal.tokens(p)
        return index, torch.searchsorted(firsts, index, right=True) - 1

    sent, counts = [torch.empty(0, dtype=torch.uint8, device=device)], []
    for p in range(size):
        index, source = sources(p)
        mine = index[source == rank] - firsts[rank]
        counts.append(len(mine) * sum(width.values()))
        for n in tensors if len(mine) else ():
            part = documents.tokens[n].detach()[mine.to(documents.tokens[n].device)].contiguous()
            sent.append(part.view(-1).view(torch.uint8).to(device))
    index, source = sources(rank)
    received_counts = torch.bincount(source, minlength=size).tolist()
    received = sent[0].new_empty(sum(received_counts) * sum(width.values()))
    group = dist.distributed_c10d._resolve_process_group(name)
    expected = [n * sum(width.values()) for n in received_counts]
    dist.all_to_all_single(received, torch.cat(sent), expected, counts, group=group)
    order = source.argsort(stable=True).argsort()
    columns: dict[str, list[Tensor]] = {n: [] for n in tensors}
    for count, block in zip(received_counts, received.split(expected), strict=True):
        parts = block.split([count * width[n] for n in tensors])
        for (n, x), part in zip(tensors.items(), parts, strict=True):
            columns[n].append(part.clone().view(x.dtype).view(count, *x.shape[1:]))
    return {
        n: torch.cat(parts).to(tensors[n].device)[order.to(tensors[n].device)]
        for n, parts in columns.items()
    }
