"""Attention of transformers' models that choose keys by an indexer (DeepSeek's sparse attention and
its successors): keys travel instead of heads.

Such an attention writes its keys into a cache while they are compressed, and continues with the
keys that the cache returns, which may be more than its queries. While it runs in a model with
deepsp's attention, :class:`Keys` stands in for the cache: an update returns the keys of all ranks'
tokens. Queries stay on their ranks. Each rank computes scores, choice and attention of its queries
from the same numbers as one process. In backward, the rank that owns a key sums its gradients.

Indexers and attention run for some queries at a time, so that no mask and no scores [S_r, S] exist.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from deepsp.integrations.transformers.forward import Registration
from deepsp.integrations.transformers.masks import Masks
from deepsp.integrations.transformers.mixers import Sequence
from deepsp.integrations.transformers.patterns import pattern_of
from deepsp.integrations.transformers.stand_in import StandIn
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
    """The mask of this rank's queries, [B, 1, S_r, S] or [B, S_r, S], bool. Each part of it is made
    when it is read."""

    dtype = torch.bool

    def __init__(self, masks: Masks, first: int, count: int, device: torch.device, dims: int = 4):
        self.masks, self.first, self.count = masks, first, count
        self.device, self.dims = device, dims

    def __getitem__(self, index: tuple) -> Rows:
        """Drop the dimension of heads: ``mask[:, 0]`` or ``mask[:, 0, :, :]``.

        Raises:
            IndexError: another index.
        """
        whole = slice(None)
        if index not in ((whole, 0), (whole, 0, whole, whole)) or self.dims != 4:
            raise IndexError(
                f"expected a model with an indexer to read its mask as mask[:, 0], got {index}; "
                "deepsp's attention doesn't support this model"
            )
        return Rows(self.masks, self.first, self.count, self.device, 3)

    def part(self, queries: range, keys: range | None = None) -> Tensor:
        """Return the mask of some queries; ``keys``: for these only."""
        mask = self.masks.rows(self.first + queries.start, len(queries), self.device, keys)
        return mask if self.dims == 4 else mask[:, 0]

    @property
    def is_causal(self) -> bool:
        """Whether no query sees a later key: masks of models are checked to be causal."""
        return self.masks.user_mask is None


class _KeysKnown(Exception):
    """Ends a call of an indexer that was made for its keys."""


class Keys(StandIn):
    """Stands in for the cache of an attention that has an indexer.

    ``takes_user_masks``: whether the attention reads a mask [B, 1, S, S] of the user's.

    Args:
        module: as in :class:`StandIn`, as are ``lens`` and ``member``.
        lens: the number of tokens of each rank.
        member: the sequence group.
        sequence: the sequence, as the model's mask; in a hybrid's, that of recurrent layers.
        hidden: [B, S_r, D].
        positions: [B, S_r], of these tokens.
    """

    takes_user_masks = True

    def __init__(
        self,
        module: nn.Module,
        lens: list[int],
        member: Member | None,
        sequence: Masks | Sequence | Tensor,
        hidden: Tensor,
        positions: Tensor | None,
    ):
        super().__init__(module, lens, member)
        self.sequence, self.positions = sequence, positions
        self.is_check, self.device = member is None, hidden.device
        self.batch_size, self.count = hidden.shape[:2]
        self.queries = range(self.count)
        """The queries for which the indexer runs."""
        self.indexed: Tensor | None = None
        """The indexer's keys, once they are known and it runs for some queries at a time."""
        self.latents: tuple[Tensor, Tensor] | None = None
        """All tokens' latents and rotated parts, where attention reads them unexpanded."""
        self._wants_keys = False
        # Qwen4's indexer takes its last keys for those of its queries, and reads all positions.
        self.ends_with_queries = hasattr(self._indexer, "compress_ratio")

    @property
    def _indexer(self) -> nn.Module | None:
        return self.module.indexer

    def enter(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Run the module's indexer by :meth:`choose` during this call."""
        if self._indexer is not None:
            self.replace(self._indexer, "forward", partial(self.choose, self._indexer.forward))
        changed: dict[str, Any] = {"attention_mask": self.mask(arguments["hidden_states"])}
        if self.ends_with_queries:
            embeddings = arguments["position_embeddings"]
            changed["position_embeddings"] = tuple(
                self._gathered(x, 1).expand(self.batch_size, -1, -1) for x in embeddings
            )
        return changed

    def check(self, registration: Registration) -> None:
        """Raises for a sequence that the module can't work on."""
        masks, cls = self.sequence, type(self.module).__name__
        refused = f"with {cls}, whose keys travel instead of heads, got one"
        if registration.kv_chunk is not None:
            raise ValueError(
                f"expected no kv_chunk {refused}; leave it out: attention runs for some queries at "
                "a time"
            )
        if isinstance(masks, Sequence):
            if masks.documents is not None:
                raise ValueError(ONE_DOCUMENT.format(cls, "which sees all earlier tokens of a row"))
            return
        if masks.deal is not None:
            raise ValueError(f"expected no deal or fold {refused}; use shard_batch")
        self._check_mask(masks, cls)
        if hasattr(self._indexer, "block_size") and masks.is_packed:
            why = "whose indexer counts blocks from its beginning"
            raise ValueError(ONE_DOCUMENT.format(cls, why))

    def _check_mask(self, masks: Masks, cls: str) -> None:
        length, user = sum(self.lens), masks.user_mask
        if user is None:
            pattern = pattern_of(masks.pattern)
            if pattern is None or pattern.right != 0:
                raise ValueError(
                    f"expected causal attention in {cls}, whose indexer chooses among earlier "
                    "tokens, got a mask that shows later ones; leave config.is_causal at True"
                )
        elif not self.takes_user_masks or self.ends_with_queries:
            raise ValueError(
                f"expected no attention_mask [B, 1, S, S] with {cls}, whose indexer makes its own "
                f"from causality, got shape {tuple(user.shape)}; pass a padding mask [B, S]"
            )
        elif user.dim() != 4 or user.size(2) not in (1, length) or user.size(3) != length:
            raise ValueError(
                f"expected attention_mask of shape [B, 1, {length}, {length}] or [B, {length}] "
                f"with {cls}, got {tuple(user.shape)}"
            )

    # ---- as a cache of transformers

    # Models read cache.layers[layer_idx].
    @property
    def layers(self) -> Keys:
        return self

    def __getitem__(self, layer_idx: int) -> Keys:
        return self

    @property
    def keys(self) -> Tensor:
        """Has the shape of all keys, which some indexers read, and no data."""
        return torch.empty(0).expand(1, 1, sum(self.lens), 0)

    def get_seq_length(self, *_, **__) -> int:
        """Return the place after the last query."""
        return self.first + self.queries.stop

    def update(self, k: Tensor, v: Tensor, layer_idx: int, *_, **__) -> tuple[Tensor, Tensor]:
        k, v = super().update(k, v, layer_idx)
        return k[:, :, : self.length], v[:, :, : self.length]

    def update_indexer(self, k: Tensor, layer_idx: int) -> Tensor:
        """Gather an indexer's keys, [B, S_r, D] to [B, S, D]."""
        return self._index_keys(k, 1)

    def update_index(self, k: Tensor) -> Tensor:
        """Gather an indexer's keys, [B, H, S_r, D] to [B, H, S, D]."""
        return self._index_keys(k, 2)

    def _index_keys(self, k: Tensor, dim: int, lens: list[int] | None = None) -> Tensor:
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

    @property
    def length(self) -> int:
        """The number of keys that the attention must see."""
        return self.first + self.count if self.ends_with_queries else sum(self.lens)

    def by_token(self) -> Tensor | int:
        """In a check, return a number for each token, [B, 1, S, 1], that depends on the indexer's
        keys."""
        if self.indexed is None:
            return 0
        return self.indexed.view(self.batch_size, -1, self.count, self.indexed.size(-1)).mean(
            (1, 3), keepdim=True
        )

    # ---- the mask of this rank's queries

    def mask(self, hidden: Tensor) -> Rows | Tensor:
        """Return the mask that the model gets."""
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
        """Call an indexer's forward for some queries at a time."""
        parts = self.parts(_heads_of(self.module.config))
        if self.is_check:
            with contextlib.suppress(_KeysKnown):
                self._wants_keys = True
                return forward(*args, **kwargs)
            return torch.zeros(self.batch_size, self.count, 1, dtype=torch.long, device=self.device)
        if len(parts) == 1 or self.ends_with_queries:
            args, kwargs = self._for_queries((args, kwargs))
            return forward(*args, **kwargs)
        chosen, self._wants_keys = [], True
        try:
            with contextlib.suppress(_KeysKnown):
                forward(*args, **kwargs)
            for queries in parts:
                # Ranks call as often: a call may gather weights (ZeRO 3).
                self.queries = queries or range(self.count - 1, self.count)
                cut_args, cut_kwargs = self._for_queries((args, kwargs))
                result = forward(*cut_args, **cut_kwargs)
                chosen += [result] if queries else []
        finally:
            self.queries, self.indexed, self._wants_keys = range(self.count), None, False
        return torch.cat(chosen, chosen[0].dim() - 2)

    def parts(self, heads: int) -> list[range]:
        """Cut the queries in as many parts on every rank, so that :data:`ENTRIES` scores, of so
        many heads, exist at a time. Parts may be empty."""
        return self.cut(max(1, ENTRIES // (self.batch_size * heads * sum(self.lens))))

    def cut(self, step: int) -> list[range]:
        """Cut the queries in as many parts on every rank, of at most ``step``."""
        count = -(-max(self.lens) // step)
        ends = [self.count * n // count for n in range(count + 1)]
        return [range(a, b) for a, b in itertools.pairwise(ends)]

    def _for_queries(self, arguments: Any) -> Any:
        """Cut the arguments that have a row for each query, [B, S_r, ...]."""

        def part(x: Any) -> Any:
            if isinstance(x, Rows):
                return x.part(self.queries)
            if len(self.queries) < self.count and x.dim() > 1 and x.size(1) == self.count:
                return x[:, self.queries.start : self.queries.stop]
            return x

        return tree_map_only((Rows, Tensor), part, arguments)


def _heads_of(config: Any) -> int:
    return max(getattr(config, name, 1) or 1 for name in ("index_n_heads", "indexer_n_heads"))
