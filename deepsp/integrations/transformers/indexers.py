"""Attention of transformers' models that choose keys by an indexer (DeepSeek's sparse attention and
what was made after it): keys travel instead of heads.

Such an attention writes keys into the cache that it is given, while they are compressed, and goes
on with what the cache returns, which may have more tokens than its queries. So while one runs in a
model with deepsp's attention, it gets :class:`Keys` in the place of a cache: an update returns the
keys of all ranks' tokens. Queries stay where they are; the scores of a query, the choice of its
keys and its attention are computed on its rank, from the numbers that one process has. In backward,
the gradients of a key are added on its rank.

No mask or scores [S_r, S] are made in full: indexers and attention run for some queries at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from deepsp.integrations.transformers.forward import Registration
from deepsp.integrations.transformers.masks import Masks
from deepsp.integrations.transformers.mixers import Sequence
from deepsp.ranks.groups import Member

ENTRIES = 2**26
"""How many scores of an indexer, or entries of a mask, are computed at a time."""
CHOSEN = ("indices", "block_indices")
"""The arguments that an attention gets from its indexer: the tokens, or blocks of tokens, that each
query sees."""

ONE_DOCUMENT = (
    "expected one document in each row with {}, {}, got position_ids that start again; give each "
    "document a row of its own"
)


class Rows:
    """The mask of this rank's queries, [B, 1, S_r, S] of bools, or [B, S_r, S], made where it is
    read."""

    dtype = torch.bool

    def __init__(self, masks: Masks, first: int, count: int, device: torch.device, dims: int = 4):
        self.masks, self.first, self.count = masks, first, count
        self.device, self.dims = device, dims

    def __getitem__(self, index: tuple) -> Rows:
        """As ``mask[:, 0]``, which models write to take the dimension of heads away."""
        return Rows(self.masks, self.first, self.count, self.device, 3)

    def part(self, queries: range, keys: range | None = None) -> Tensor:
        """That of some queries; ``keys``: of these only."""
        mask = self.masks.rows(self.first + queries.start, len(queries), self.device, keys)
        return mask if self.dims == 4 else mask[:, 0]

    @property
    def is_causal(self) -> bool:
        return self.masks.user_mask is None  # other models with indexers aren't known


class _KeysKnown(Exception):
    """Ends a call of an indexer that was made for its keys."""


class Keys:
    """What an attention gets in the place of a cache, in one call.

    Args:
        module: the attention.
        sequence: the sequence, as the model's mask; in a hybrid's, that of recurrent layers.
        lens: the number of tokens of each rank.
        member: the sequence group; None: in a check's dry run, in which nothing is sent.
        hidden: [B, S_r, D].
        positions: [B, S_r], of these tokens.
    """

    def __init__(
        self,
        module: nn.Module,
        sequence: Masks | Sequence | Tensor,
        lens: list[int],
        member: Member | None,
        hidden: Tensor,
        positions: Tensor | None,
    ):
        self.module, self.sequence, self.lens, self.member = module, sequence, lens, member
        self.positions = positions
        self.is_check, self.device = member is None, hidden.device
        self.batch_size, self.count = hidden.shape[:2]
        self.first = 0 if self.is_check else sum(lens[: member[0]])
        self.queries = range(self.count)
        """Those for which an indexer runs."""
        self.indexed: Tensor | None = None
        """The indexer's keys, once they are known and it runs for some queries at a time."""
        self._wants_keys = False
        # Qwen4's indexer takes its last keys for those of its queries, and reads all positions.
        self.ends_with_queries = hasattr(self._indexer, "compress_ratio")

    @property
    def _indexer(self) -> nn.Module | None:
        return self.module.indexer

    def enter(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Makes the module's indexer run as it does here, for this call. ``arguments``: of the
        call. Returns those that change."""
        if self._indexer is not None:
            # Not for longer: a copy of the module must not keep it.
            vars(self._indexer)["forward"] = partial(self.choose, self._indexer.forward)
        changed: dict[str, Any] = {"attention_mask": self.mask(arguments["hidden_states"])}
        if self.ends_with_queries:
            embeddings = arguments["position_embeddings"]
            changed["position_embeddings"] = tuple(
                self._gathered(x, 1).expand(self.batch_size, -1, -1) for x in embeddings
            )
        return {**changed, "cache": self}

    def leave(self) -> None:
        if self._indexer is not None:
            vars(self._indexer).pop("forward", None)

    def check(self, registration: Registration) -> None:
        """Raises for a sequence that the module can't work on."""
        masks, cls = self.sequence, type(self.module).__name__
        if isinstance(masks, Sequence):
            if masks.documents is not None:
                raise ValueError(ONE_DOCUMENT.format(cls, "which sees a row's tokens before"))
            return
        if masks.deal is not None or registration.kv_chunk is not None:
            name, advice = "deal", "use shard_batch"
            if masks.deal is None:
                name, advice = "kv_chunk", "leave it out: attention runs for some queries at a time"
            raise ValueError(
                f"expected no {name} with {cls}, whose keys travel instead of heads, got one; "
                f"{advice}"
            )
        if hasattr(self._indexer, "block_size") and masks.is_packed:
            why = "whose indexer counts blocks from its beginning"
            raise ValueError(ONE_DOCUMENT.format(cls, why))

    # ---- as a cache of transformers

    @property
    def layers(self) -> Keys:
        return self

    def __getitem__(self, layer_idx: int) -> Keys:
        return self

    @property
    def keys(self) -> Tensor:
        """Of the size of all keys, which some indexers read."""
        return torch.empty(0).expand(1, 1, sum(self.lens), 0)

    def get_seq_length(self, *_, **__) -> int:
        """The place after the last query."""
        return self.first + self.queries.stop

    def update(self, k: Tensor, v: Tensor, layer_idx: int, *_, **__) -> tuple[Tensor, Tensor]:
        """[B, H, S_r, D] to [B, H, S, D], in one message."""
        if k.shape[:-1] != v.shape[:-1] or k.dtype != v.dtype:
            return self._gathered(k, 2), self._gathered(v, 2)
        both = self._gathered(torch.cat([k, v], -1), 2)
        k, v = both.split([k.size(-1), v.size(-1)], -1)
        return k, v

    def update_indexer(self, k: Tensor, layer_idx: int) -> Tensor:
        """[B, S_r, D] to [B, S, D]."""
        return self._of_indexer(k, 1)

    def update_index(self, k: Tensor) -> Tensor:
        """[B, H, S_r, D] to [B, H, S, D]."""
        return self._of_indexer(k, 2)

    def _of_indexer(self, k: Tensor, dim: int, lens: list[int] | None = None) -> Tensor:
        if self.indexed is not None:
            return self.indexed
        k = self._gathered(k, dim, lens)
        if self._wants_keys:
            self.indexed = k
            raise _KeysKnown
        return k

    def _gathered(self, x: Tensor, dim: int, lens: list[int] | None = None) -> Tensor:
        if self.is_check:
            return x
        rank, _, name = self.member
        lens = self.lens if lens is None else lens
        x = torch.ops.deepsp.all_gather(x.contiguous(), dim, lens, "partial", rank, name)
        return x.narrow(dim, 0, self.first + self.count) if self.ends_with_queries else x

    def by_token(self) -> Tensor | int:
        """In a check: a number for each token, [B, 1, S, 1], that depends on the indexer's keys."""
        if self.indexed is None:
            return 0
        return self.indexed.view(self.batch_size, -1, self.count, self.indexed.size(-1)).mean(
            (1, 3), keepdim=True
        )

    # ---- the mask of this rank's queries

    def mask(self, hidden: Tensor) -> Rows | Tensor:
        """What the model gets as its mask."""
        if isinstance(self.sequence, Sequence):  # [B, S_r]
            padding = self.sequence.mask(hidden)
            shape, device = hidden.shape[:2], hidden.device
            return torch.ones(shape, device=device).bool() if padding is None else padding.bool()
        if isinstance(self.sequence, Tensor):
            return self.sequence
        rows = Rows(self.sequence, self.first, self.count, hidden.device)
        if self.ends_with_queries:
            last = self.first + self.count
            if self.is_check:
                return torch.ones(last, last, device=hidden.device).tril().bool()[None, None]
            return self.sequence.rows(self.first, self.count, hidden.device, range(last))
        return rows

    # ---- some queries at a time

    def choose(self, forward: Callable, *args, **kwargs) -> Any:
        """Calls an indexer's forward."""
        step = self.step(_heads_of(self.module.config))
        if self.is_check:
            with contextlib.suppress(_KeysKnown):
                self._wants_keys = True
                return forward(*args, **kwargs)
            return torch.zeros(self.batch_size, self.count, 1, dtype=torch.long, device=self.device)
        if step >= self.count or self.ends_with_queries:
            args, kwargs = self._for_queries((args, kwargs))
            return forward(*args, **kwargs)
        parts, self._wants_keys = [], True
        try:
            with contextlib.suppress(_KeysKnown):
                forward(*args, **kwargs)
            for queries in self.parts(step):
                self.queries = queries
                cut_args, cut_kwargs = self._for_queries((args, kwargs))
                parts.append(forward(*cut_args, **cut_kwargs))
        finally:
            self.queries, self.indexed, self._wants_keys = range(self.count), None, False
        return torch.cat(parts, parts[0].dim() - 2)

    def step(self, heads: int) -> int:
        """For how many queries as many heads have scores at a time."""
        return max(1, ENTRIES // (self.batch_size * heads * sum(self.lens)))

    def parts(self, step: int) -> Iterator[range]:
        for begin in range(0, self.count, step):
            yield range(begin, min(begin + step, self.count))

    def _for_queries(self, arguments: Any) -> Any:
        """Arguments, [B, S_r, ...] each, for those queries."""

        def part(x: Any) -> Any:
            if isinstance(x, Rows):
                return x.part(self.queries)
            if len(self.queries) < self.count and x.dim() > 1 and x.size(1) == self.count:
                return x[:, self.queries.start : self.queries.stop]
            return x

        return tree_map_only((Rows, Tensor), part, arguments)


def _heads_of(config: Any) -> int:
    return max(getattr(config, name, 1) or 1 for name in ("index_n_heads", "indexer_n_heads"))
