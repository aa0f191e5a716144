"""A loader that deals out the batches of a sequence group's ranks, one after another."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from deepsp.data import last_batch
from deepsp.data.deal import exchange, local_batch, parts_of
from deepsp.data.deal_batch import (
    COST,
    Cost,
    Documents,
    deal_batch,
    dealt_batch,
    documents_of,
    exchange_documents,
)
from deepsp.data.documents import deal_documents
from deepsp.data.roles import Path, check_dim, check_shard_at, name_of
from deepsp.data.sharding import shard_batch
from deepsp.ranks.agreement import compare_calls, first_difference
from deepsp.ranks.groups import Group, device_of, member_of, objects_on_all_ranks, on_all_ranks
from deepsp.ranks.randomness import align

Sharded = tuple[dict[str, Any], list[int]]
"""The result of :func:`deepsp.shard_batch`: the local batch and ``seq_lens``."""


class SequenceLoader:
    """Batches of each rank's own loader, sharded over the sequence group one after another.

    Each rank of a group loads its own samples, and the group trains on them in turns: in each
    round, on the batch of rank 0, then on that of rank 1, and so on. (Taking turns is the idea of
    DeepSpeed's ``UlyssesSPDataLoaderAdapter``.) A rank loads 1/P of the group's data, and sends
    each other rank only that rank's part. With ``replicated=True`` all ranks of a group load the
    same batches, as for :func:`deepsp.shard_batch`.

    With ``mix=True`` the group trains on all ranks' batches of a round at once: their documents are
    dealt out, as by :func:`deepsp.deal_batch`, and only documents that are long are shared.
    Iterating yields the local batch and the :class:`deepsp.Deal`, one pair a round.

    Iterating yields the results of ``shard_batch`` for the full batches, bit for bit: the local
    batch and ``seq_lens``, P pairs a round. Lengths may differ from batch to batch. If a rank's
    loader ends before the others', the group goes on without it; the epoch ends when all have
    ended. Tensors come on the kind of device that their owner's loader put them on, in pinned
    memory if the loader pins.

    All ranks make it, iterate, and save alike, in the thread that trains. A round is one small
    gather of names, shapes and values that aren't tensors, and one all-to-all of bytes, in which a
    rank sends (P - 1) / P of its batch, and ``attention_mask`` P - 1 times. The received parts,
    together as large as one full batch, are kept until their turns. ``len()`` is the group's: the
    sum over ranks, or the loader's own if replicated; TypeError if a rank's loader has none.

    Args:
        loader: yields batches as ``shard_batch`` takes them: a ``DataLoader``, torchdata's
            ``StatefulDataLoader``, a loader of ``accelerate.prepare``, or any iterable.
        group: the sequence group.
        replicated: every rank's loader yields the same full batches.
        mix: deals documents out, in the place of tokens. ``dim`` is 1 then, and there is no
            ``pad_to``.
        max_tokens: with ``mix``, as in :func:`deepsp.deal_documents`; ``cost``, too.
        cost: what tokens and documents cost.
        dim: the sequence dimension, counted from the front.
        pad_to: pads each full sequence at its end to this many tokens; None: no padding.
        ignore_index: the label of tokens that don't count.
        roles: as in :func:`deepsp.shard_batch`; ``shard_at``, too, but not with ``mix``.
        shard_at: where the model shards its sequence.

    Raises:
        ValueError: the loader isn't iterable, ``dim`` is negative, or the ranks pass different
            arguments. While iterating, on every rank: the first batch is the same on all ranks, but
            ``replicated`` isn't set; ``shard_batch`` refuses a batch of any rank; with
            ``replicated=True``, the ranks' batches, or their numbers of batches, differ.
        RuntimeError: while iterating, on every rank: a rank's loader failed. The error names it.
    """

    def __init__(
        self,
        loader: Iterable[Mapping[str, Any]],
        group: Group = None,
        *,
        replicated: bool = False,
        dim: int = 1,
        pad_to: int | None = None,
        ignore_index: int = -100,
        roles: Mapping[str, str] | None = None,
        shard_at: str = "inputs",
        mix: bool = False,
        max_tokens: int | None = None,
        cost: Cost = COST,
    ):
        if not isinstance(loader, Iterable):
            raise ValueError(
                "expected loader to be iterable, such as a DataLoader, got "
                f"{type(loader).__name__}; pass what yields batches"
            )
        check_dim(dim)
        check_shard_at(shard_at)
        self.loader = loader
        self._member = member_of(group)
        self._device = device_of(self._member)
        self._replicated = replicated or self._member[1] == 1
        self._options = {"dim": dim, "pad_to": pad_to, "ignore_index": ignore_index, "roles": roles}
        self._options["shard_at"] = shard_at
        self._mix, self._limits = mix, {"max_tokens": max_tokens, "cost": cost}
        if mix and (dim != 1 or pad_to is not None or shard_at != "inputs"):
            raise ValueError(
                f"expected dim=1, no pad_to and shard_at='inputs' with mix=True, got dim={dim}, "
                f"pad_to={pad_to} and shard_at={shard_at!r}; leave them out"
            )
        if not mix and (max_tokens is not None or cost != COST):
            raise ValueError(
                f"expected max_tokens and cost with mix=True only, got {max_tokens} and {cost}; "
                "pass mix=True, or leave them out"
            )
        passed = {"replicated": replicated, **self._options, "mix": mix, **self._limits}
        compare_calls("SequenceLoader", self._member, torch.empty(0, device=self._device), **passed)
        # Exchange lengths now, while all ranks are here: a progress bar may ask one rank alone.
        try:
            batches = len(loader)
        except (TypeError, NotImplementedError):
            batches = -1
        lengths = [n for (n,) in on_all_ranks([batches], self._member, self._device)]
        total = max(lengths) if mix else sum(lengths)
        self._length = -1 if min(lengths) < 0 else batches if replicated else total
        # accelerate's loaders always have the method, but a state only if this attribute says so.
        self._stateful = getattr(loader, "use_stateful_dataloader", hasattr(loader, "state_dict"))
        self._pins = bool(getattr(loader, "pin_memory", False)) and torch.cuda.is_available()
        self._position: dict[str, Any] | None = None
        self._resumes = False
        self._compared = False

    def __len__(self) -> int:
        if self._length < 0:
            raise TypeError("the loader of some rank of the group has no len()")
        return self._length

    def set_epoch(self, epoch: int) -> None:
        """Forwards to the ``set_epoch`` of the loader, its samplers and its data set, if they have
        one, so that a ``DistributedSampler`` shuffles again.

        Args:
            epoch: the number of the epoch.
        """
        batches = getattr(self.loader, "batch_sampler", None)
        inner = [getattr(self.loader, name, None) for name in ("sampler", "dataset")]
        things = [self.loader, batches, getattr(batches, "sampler", None), *inner]
        for thing in {id(x): x for x in things if hasattr(x, "set_epoch")}.values():
            thing.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """This rank's position in the epoch: the state of its loader before the round, if it has
        one, and the number of yielded batches of the round. Every rank saves its own.

        Returns:
            A dict for ``torch.save``. It differs by rank, so ``torch.distributed.checkpoint`` needs
            a key for each rank.
        """
        start = {"loader": None, "rounds": 0, "turn": 0, "ended": False}
        if self._position is None:
            start["loader"] = self._state_of_loader()
        return {**start, **(self._position or {}), "ranks": self._member[1]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Makes the next iteration continue after the last batch that was yielded before
        ``state_dict()``, with bit-identical batches. A loader without ``load_state_dict`` reads the
        earlier batches again and drops them. Its order must then follow from the epoch alone, as a
        ``DistributedSampler``'s does: call ``set_epoch`` first.

        Args:
            state_dict: saved by the same rank of a group with equally many ranks.

        Raises:
            ValueError: it was saved by a group with another number of ranks.
        """
        state, size = dict(state_dict), self._member[1]
        if state.pop("ranks", None) != size:
            raise ValueError(
                f"expected a state that a SequenceLoader of {size} ranks has saved, got one of "
                f"{state_dict.get('ranks')} ranks; resume on as many ranks"
            )
        if self._stateful and state["loader"] is not None:
            # A copy: the loader may change its state in place.
            self.loader.load_state_dict(copy.deepcopy(state["loader"]))
        self._position, self._resumes = state, True

    def __iter__(self) -> Iterator[Sharded]:
        before = self._position if self._resumes else None
        self._resumes = False
        dropped = before["turn"] if before else 0
        if self._replicated:
            align(self._member)  # samplers and workers draw the same on all ranks
        loader = self._batches(before)
        for rounds in itertools.count(before["rounds"] if before else 0):
            start, batches = self._round(loader)
            if batches is None:
                break
            # Only after the round was read, so that an error leaves the state of a full round.
            self._position = {**start, "rounds": rounds, "turn": 0}
            for batch in batches:
                self._position["turn"] += 1
                if self._position["turn"] > dropped:
                    yield batch
            dropped = 0
        self._position = None

    def _batches(self, before: Mapping[str, Any] | None) -> Iterator[tuple[dict[str, Any], Any]]:
        """This rank's batches, each with the loader's state before it, and then None forever."""
        start, ended = None, False
        if before:
            start, ended = before["loader"], before["ended"]
        if not ended:
            batches = iter(self.loader)
            if before and not (self._stateful and start is not None):
                batches = itertools.islice(batches, before["rounds"], None)
            while True:
                # accelerate's loaders don't return a loaded state at first.
                start = self._state_of_loader() if start is None else start
                try:
                    batch = next(batches)
                except StopIteration:
                    break
                yield {"loader": start, "ended": False}, batch
                start = None
            start = self._state_of_loader()
        while True:
            yield {"loader": start, "ended": True}, None

    def _state_of_loader(self) -> Any:
        # A copy: data sets may change the returned state in place.
        return copy.deepcopy(self.loader.state_dict()) if self._stateful else None

    def _round(self, batches: Iterator) -> tuple[dict[str, Any] | None, Iterator[Sharded] | None]:
        """The loader's state before a round, and its batches; None: all loaders have ended."""
        rank, size, _ = self._member
        start, content, status = self._read(batches)
        every = objects_on_all_ranks(status, self._member, self._device)
        for r, (kind, value) in enumerate(every):
            cause = content if r == rank else None
            if kind == "failed":
                raise RuntimeError(
                    f"the loader of rank {r} of the group failed: {value}"
                ) from cause
            if kind == "refused":
                raise ValueError(f"rank {r}'s batch can't be sharded: {value}") from cause
        ended = [r for r, (kind, _) in enumerate(every) if kind == "ended"]
        if len(ended) == size:
            return start, None
        if self._replicated:
            if ended:
                raise ValueError(
                    "expected the loaders of all ranks to have equally many batches, since "
                    f"replicated=True, but those of ranks {ended} have ended before the others'; "
                    "make their samplers count groups, or pass replicated=False"
                )
            if self._mix:
                how = {n: self._options[n] for n in ("ignore_index", "roles")}
                return start, iter([deal_batch(content, self._member, **how, **self._limits)])
            return start, iter([shard_batch(content, self._member, **self._options)])
        described = [None if r in ended else pickle.loads(every[r][1]) for r in range(size)]
        if not ended and not self._compared:
            tensors = [((n,), x) for n, x in content.tokens.items()] if self._mix else content
            self._compare(described, tensors)
        if self._mix:
            return start, iter([self._mixed(described, content)])
        parts = exchange(described, content or [], self._member)
        return start, self._local(described, parts)

    def _compare(self, every: list, tensors: list[tuple[Path, torch.Tensor]]) -> None:
        """Raises if the first batches of all ranks are the same."""
        self._compared = True
        named = [(name_of(path), x) for path, x in tensors]
        if first_difference(named, self._member) is None:
            raise ValueError(
                f"expected the loader of each rank to load batches of its own, got the same one on "
                f"all {len(every)} ranks, on which the group would train {len(every)} times; give "
                "the DataLoader a sampler that counts processes, DistributedSampler(data), or pass "
                "replicated=True"
            )

    def _mixed(self, described: list[Documents | None], documents: Documents | None) -> tuple:
        """This rank's tokens of all ranks' documents, and the deal."""
        nothing = Documents({}, [], None, {}, torch.empty(0), False)
        everyone = [nothing if x is None else x for x in described]
        full = next(x for x in everyone if x.tokens)
        for r, x in enumerate(everyone):
            same = {n: (t.dtype, t.shape[1:]) for n, t in x.tokens.items()}
            first = {n: (t.dtype, t.shape[1:]) for n, t in full.tokens.items()}
            if x.tokens and same != first:
                raise ValueError(
                    f"expected the batches of all ranks to have the same tensors, got {first} and, "
                    f"on rank {r}, {same}"
                )
        lengths = [n for x in everyone for n in x.lengths]
        deal = deal_documents(lengths, self._member[1], **self._limits)
        tokens = exchange_documents(everyone, deal, documents or nothing, self._member)
        if rows := [n for n, x in full.rest.items() if isinstance(x, torch.Tensor)]:
            raise ValueError(
                f"expected batches of documents without values for rows, got batch[{rows[0]!r}]: "
                "the rows of several ranks are mixed; leave it out"
            )
        positions = any(x.makes_positions for x in everyone)
        full = replace(full, lengths=lengths, makes_positions=positions)
        return dealt_batch(tokens, full, deal), deal

    def _local(self, described: list, parts: list) -> Iterator[Sharded]:
        """The received batches, each in its turn."""
        for each, part in zip(described, parts, strict=True):
            if each is not None:
                batch, lens = local_batch(each, part, self._member, self._pins)
                last_batch.remember(batch, each.roles, lens)
                yield batch, lens

    def _read(self, batches: Iterator) -> tuple[dict[str, Any] | None, Any, tuple[str, Any]]:
        """The loader's state, its next batch, and the status for the other ranks. Returns an error
        in place of the batch: the others wait for this rank, so it can't raise yet."""
        try:
            start, batch = next(batches)
        except Exception as error:
            return None, error, ("failed", f"{type(error).__name__}: {error}")
        if start["ended"] or self._replicated:
            return start, batch, ("ended" if start["ended"] else "batch", None)
        try:
            if self._mix:
                how = {n: self._options[n] for n in ("ignore_index", "roles")}
                documents = documents_of(batch, **how)
                empty = {n: x[:0].clone() for n, x in documents.tokens.items()}
                described = replace(documents, tokens=empty, valid=torch.empty(0))
                return start, documents, ("batch", pickle.dumps(described))
            tensors, described = parts_of(batch, **self._options)
            return start, tensors, ("batch", described)
        except Exception as error:
            return None, error, ("refused", str(error))
