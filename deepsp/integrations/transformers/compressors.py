"""DeepSeek V4's attention, which sees a window of tokens, and entries that a compressor makes of
some consecutive tokens each."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn

from deepsp.integrations.transformers.forward import Registration
from deepsp.integrations.transformers.indexers import ONE_DOCUMENT, Keys, Rows


class Entries(Keys):
    """Stands in for the cache. A rank makes the entries whose last token it has, from its tokens
    and those before them; all ranks get all entries."""

    takes_user_masks = False

    @property
    def _indexer(self) -> nn.Module | None:
        return getattr(self._compressor, "indexer", None)

    def check(self, registration: Registration) -> None:
        super().check(registration)
        if self._compressor is None:
            return
        cls = type(self.module).__name__
        if self.sequence.is_packed:
            raise ValueError(ONE_DOCUMENT.format(cls, "whose compressor starts at its beginning"))
        if min(self.lens) < 2:
            raise ValueError(
                f"expected two tokens or more on each rank with {cls}, which takes one token for a "
                f"step of generation, got {self.lens} by rank; pad the batch"
            )

    def mask(self, hidden: Tensor) -> Rows | Tensor:
        """Return the mask of :attr:`window`, [B, 1, S_r, W], to which the module appends that of
        entries."""
        if self.is_check:
            return super().mask(hidden)
        seen = self.sequence.rows(self.first, self.count, hidden.device, self.window)
        mask = torch.zeros(seen.shape, dtype=hidden.dtype, device=hidden.device)
        return mask.masked_fill(~seen, torch.finfo(hidden.dtype).min)

    @property
    def length(self) -> int:
        entries = (
            0 if self._compressor is None else sum(self.lens) // self._compressor.compress_rate
        )
        return len(self.window) + entries

    def update(self, k: Tensor, v: Tensor, layer_idx: int, *_, **__) -> tuple[Tensor, Tensor]:
        """Add the keys of the window before this rank's, [B, 1, S_r, D] to [B, 1, W, D]. k is v."""
        if not self.is_check:
            k = self._with_previous(k, self.module.sliding_window - 1, 2)
            k = k[:, :, -len(self.window) :]
        return k, k

    @property
    def _compressor(self) -> nn.Module:
        return self.module.compressor

    @property
    def window(self) -> range:
        """The tokens of :meth:`update`'s keys that DeepSeek V4's queries see, besides entries."""
        first = max(0, self.first - self.module.sliding_window + 1)
        return range(first, self.first + self.count)

    def _with_previous(self, x: Tensor, n: int, dim: int) -> Tensor:
        rank, _, name = self.member
        x = x.contiguous()
        return torch.cat(
            [torch.ops.deepsp.previous_tokens(x, n, dim, self.lens, rank, name), x], dim
        )

    def _entries(self) -> list[range]:
        """Return each rank's entries: those whose last token it has."""
        rate, ends = self._compressor.compress_rate, itertools.accumulate(self.lens, initial=0)
        return [range(a // rate, b // rate) for a, b in itertools.pairwise(ends)]

    def store_compression_weights(
        self, name: str, kv: Tensor, gate: Tensor
    ) -> tuple[Tensor, Tensor, int]:
        """Return kv and gate of the tokens that this rank's entries are made of, and the place of
        the first token.

        Where an entry also reads the tokens of the one before, these come first, and make an entry
        that :meth:`update_compressor_states` drops.
        """
        if self.is_check or (name == "indexer" and self.indexed is not None):
            return kv[:, :0], gate[:, :0], 0
        rate, overlap = self._compressor.compress_rate, hasattr(self._compressor, "indexer")
        entries, n = self._entries()[self.member[0]], (2 * rate if overlap else rate) - 1
        both = self._with_previous(torch.cat([kv, gate], -1), n, 1)
        # A rank without an entry makes one, too, so that its weights have gradients.
        self._dropped = int(len(entries) == 0 or (overlap and entries.start > 0))
        begin, end = (entries.start - self._dropped) * rate, entries.stop * rate
        if len(entries) == 0:
            end = self.first + self.count
            begin = end - rate
        both = both[:, n + begin - self.first : n + end - self.first]
        return *both.split([kv.size(-1), gate.size(-1)], -1), max(begin, 0)

    def update_overlap_state(self, *_) -> tuple[None, None]:
        return None, None

    def update_compressor_states(self, name: str, entries: Tensor) -> Tensor:
        """Gather the ranks' entries, [B, n, D] to [B, N, D]."""
        if self.is_check:
            return entries
        if name == "indexer" and self.indexed is not None:
            return self.indexed
        entries = entries[:, self._dropped :]
        counts = [len(x) for x in self._entries()]
        if name == "indexer":
            return self._index_keys(entries, 1, counts)
        return self._gathered(entries, 1, counts)
