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
import inspect
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.utils._pytree import tree_map_only

from deepsp.integrations.transformers.arguments import settle
from deepsp.integrations.transformers.forward import REGISTRATIONS, Registration, running
from deepsp.integrations.transformers.masks import Masks
from deepsp.integrations.transformers.mixers import Sequence
from deepsp.ranks.groups import Member, member_of

ENTRIES = 2**26
"""How many scores of an indexer, or entries of a mask, are computed at a time."""
CHOSEN = ("indices", "block_indices")
"""The arguments that an attention gets from its indexer: the tokens, or blocks of tokens, that each
query sees."""

_PREPARED = "_deepsp_keys_travel"
"""The attribute of attentions that have hooks."""
_ONE_DOCUMENT = (
    "expected one document in each row with {}, {}, got position_ids that start again; give each "
    "document a row of its own"
)
_FROM_THE_ROWS_BEGINNING = ("block_size", "compress_rate")
"""Attributes of indexers and compressors that count blocks of tokens from a row's beginning."""


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

    def part(self, queries: range) -> Tensor:
        mask = self.masks.rows(self.first + queries.start, len(queries), self.device)
        return mask if self.dims == 4 else mask[:, 0]


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
        self.ends_with_queries = hasattr(_indexer_of(module), "compress_ratio")

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
        if v is k:  # DeepSeek V4
            k = self._with_window(k)
            return k, k
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

    def positions_of_all(self, embeddings: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """[B or 1, S_r, D] each to [B, K, D]."""
        return tuple(self._gathered(x, 1).expand(self.batch_size, -1, -1) for x in embeddings)

    def _with_previous(self, x: Tensor, n: int, dim: int) -> Tensor:
        rank, _, name = self.member
        x = x.contiguous()
        before = torch.ops.deepsp.previous_tokens(x, n, dim, self.lens, rank, name)
        return torch.cat([before, x], dim)

    # ---- as DeepSeek V4's caches, whose compressors make one entry of a window of tokens

    @property
    def _compressor(self) -> nn.Module:
        return self.module.compressor

    @property
    def window(self) -> range:
        """The tokens of :meth:`update`'s keys that DeepSeek V4's queries see, besides entries."""
        first = max(0, self.first - self.module.sliding_window + 1)
        return range(first, self.first + self.count)

    def _with_window(self, k: Tensor) -> Tensor:
        if self.is_check:
            return k
        k = self._with_previous(k, self.module.sliding_window - 1, 2)
        return k[:, :, -len(self.window) :]

    def _entries(self) -> list[range]:
        """The windows whose last token each rank has."""
        rate, ends = self._compressor.compress_rate, [0]
        for count in self.lens:
            ends.append(ends[-1] + count)
        return [range(a // rate, b // rate) for a, b in itertools.pairwise(ends)]

    def store_compression_weights(
        self, name: str, kv: Tensor, gate: Tensor
    ) -> tuple[Tensor, Tensor, int]:
        """[B, S_r, D] each to the tokens of this rank's windows, and the place of the first.

        Where windows overlap, the window before them is the first; its entry is left out later.
        """
        if self.is_check or (name == "indexer" and self.indexed is not None):
            return kv[:, :0], gate[:, :0], 0
        rate, overlap = self._compressor.compress_rate, hasattr(self._compressor, "indexer")
        windows, n = self._entries()[self.member[0]], (2 * rate if overlap else rate) - 1
        self._before = int(overlap and windows.start > 0)
        both = self._with_previous(torch.cat([kv, gate], -1), n, 1)
        self._anchor = both
        if len(windows) == 0:
            return kv[:, :0], gate[:, :0], 0
        begin, end = (windows.start - self._before) * rate, windows.stop * rate
        both = both[:, n + begin - self.first : n + end - self.first]
        return *both.split([kv.size(-1), gate.size(-1)], -1), begin

    def update_overlap_state(self, *_) -> tuple[None, None]:
        return None, None

    def update_compressor_states(self, name: str, entries: Tensor) -> Tensor:
        """[B, n, D] to the entries of all ranks."""
        if self.is_check:
            return entries
        if name == "indexer" and self.indexed is not None:
            return self.indexed
        # Backward sends, so it runs on ranks without an entry, too.
        entries = entries[:, self._before :] if entries.size(1) > 0 else entries
        entries = torch.cat([self._anchor[:, :0, : entries.size(2)].to(entries.dtype), entries], 1)
        counts = [len(windows) for windows in self._entries()]
        if name == "indexer":
            return self._of_indexer(entries, 1, counts)
        return self._gathered(entries, 1, counts)

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
        if self.is_check or not hasattr(self.module, "compressor"):
            return rows
        # DeepSeek V4 appends that of its entries.
        seen = self.sequence.rows(self.first, self.count, hidden.device, self.window)
        mask = torch.zeros(seen.shape, dtype=hidden.dtype, device=hidden.device)
        return mask.masked_fill(~seen, torch.finfo(hidden.dtype).min)

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


# ------------------------------------------------------------------- in a model


def keys_travel(module: nn.Module) -> bool:
    """Whether a module is an attention that chooses among compressed keys, of its own or as the
    attention before did."""
    forward = inspect.unwrap(type(module).forward)
    names = set(getattr(getattr(forward, "__code__", None), "co_names", ()))
    if "update" not in names or names.isdisjoint({"indexer", "compressor"}):
        return False
    # Layers of some models choose as the layer before did, and DeepSeek V4's may have windows only.
    may_have_none = "prev_topk_indices" in inspect.signature(forward).parameters
    return may_have_none or "compressor" in names or module.indexer is not None


def prepare(model: nn.Module) -> None:
    """Gives those attentions of a model hooks, which do nothing with other attention than
    deepsp's."""
    for module in model.modules():
        if not hasattr(module, _PREPARED) and keys_travel(module):
            module.register_forward_pre_hook(_enter, with_kwargs=True)
            module.register_forward_hook(_leave, always_call=True)
            object.__setattr__(module, _PREPARED, True)


def keys_in(module: nn.Module) -> Keys | None:
    """What an attention that runs has as its cache, if its keys travel."""
    if running.keys and running.keys[-1].module is module:
        return running.keys[-1]
    return None


def _indexer_of(module: nn.Module) -> nn.Module | None:
    holder = getattr(module, "compressor", module)
    return getattr(holder, "indexer", None)


@_disable_dynamo
def _enter(module: nn.Module, args: tuple, kwargs: dict[str, Any]):
    registration, is_check = (
        REGISTRATIONS.get(module.config._attn_implementation),
        running.forward.is_check,
    )
    if registration is None:
        return None
    names = inspect.signature(inspect.unwrap(type(module).forward)).parameters
    kwargs |= zip([*names][1:], args, strict=False)
    hidden = kwargs["hidden_states"]
    given, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
    if isinstance(positions, Tensor) and positions.dim() != 2:
        positions = None  # of several axes: the mask knows the tokens' places
    member, lens = None, [hidden.size(1)]
    if not is_check:
        member = member_of(registration.member)
        if isinstance(given, Sequence):
            given.exchange(hidden)
            lens = given.lens
        else:
            given = settle(module, hidden[:, None], given, positions, member)
            positions, lens = given.of_call if positions is None else positions, given.seq_lens
    keys = Keys(module, given, lens, member, hidden, positions)
    if not is_check:
        _check(keys, registration)
    running.keys.append(keys)
    indexer = _indexer_of(module)
    if indexer is not None:
        # For this call only: a copy of the module must not keep it.
        vars(indexer)["forward"] = partial(keys.choose, indexer.forward)
    if keys.ends_with_queries:
        kwargs["position_embeddings"] = keys.positions_of_all(kwargs["position_embeddings"])
    return (), {**kwargs, "attention_mask": keys.mask(hidden), "cache": keys}


def _check(keys: Keys, registration: Registration) -> None:
    masks, cls = keys.sequence, type(keys.module).__name__
    if isinstance(masks, Sequence):
        if masks.documents is not None:
            raise ValueError(_ONE_DOCUMENT.format(cls, "which sees all of a row's tokens before"))
        return
    if masks.deal is not None or registration.kv_chunk is not None:
        name, advice = "deal", "use shard_batch"
        if masks.deal is None:
            name, advice = "kv_chunk", "leave it out: its attention runs for some queries at a time"
        raise ValueError(
            f"expected no {name} with {cls}, whose keys travel instead of heads, got one; {advice}"
        )
    blocks = getattr(keys.module, "compressor", None) or _indexer_of(keys.module)
    counts = next((n for n in _FROM_THE_ROWS_BEGINNING if hasattr(blocks, n)), None)
    if counts is not None and masks.is_packed:
        raise ValueError(_ONE_DOCUMENT.format(cls, f"whose {counts} counts tokens from its first"))
    if counts == "compress_rate" and min(keys.lens) < 2:
        raise ValueError(
            f"expected two tokens or more on each rank with {cls}, which takes one token for a "
            f"step of generation, got {keys.lens} by rank; pad the batch"
        )


def _leave(module: nn.Module, args: tuple, output: Any) -> None:
    if keys_in(module) is not None:
        running.keys.pop()
        indexer = _indexer_of(module)
        if indexer is not None:
            vars(indexer).pop("forward", None)
