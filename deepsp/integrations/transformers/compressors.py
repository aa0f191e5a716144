"""DeepSeek V4's attention: a window of tokens, and entries, each made of a window of tokens by a
compressor (arXiv of its report, section 2.3)."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn

from deepsp.integrations.transformers.forward import Registration
from deepsp.integrations.transformers.indexers import ONE_DOCUMENT, Keys, Rows


class Entries(Keys):
    """What such an attention gets in the place of a cache. A rank makes the entries whose last
    token it has, from its tokens and those before them; all ranks get all entries."""

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
        """[B, 1, S_r, window]; the module appends that of its entries."""
        if self.is_check:
            return super().mask(hidden)
        seen = self.sequence.rows(self.first, self.count, hidden.device, self.window)
        mask = torch.zeros(seen.shape, dtype=hidden.dtype, device=hidden.device)
        return mask.masked_fill(~seen, torch.finfo(hidden.dtype).min)

    def update(self, k: Tensor, v: Tensor, layer_idx: int, *_, **__) -> tuple[Tensor, Tensor]:
        """[B, 1, S_r, D], which is both, to [B, 1, window, D]."""
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
