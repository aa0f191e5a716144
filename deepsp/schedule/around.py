"""Forwards that wrap a module's own: a checkpoint, random numbers."""

from __future__ import annotations

import torch
import torch.utils.checkpoint

from deepsp.schedule import flow
from deepsp.schedule.swap import Swapped


class Checkpointed(Swapped):
    """Recomputes its forward in backward."""

    def forward(self, *args, **kwargs):
        if not torch.is_grad_enabled() or flow.current() is not None:
            return super().forward(*args, **kwargs)
        return torch.utils.checkpoint.checkpoint(
            super().forward, *args, **self._deepsp_checkpoint, **kwargs
        )


class Drawing(Swapped):
    """Draws this rank's own random numbers, or those that all ranks share. It goes inside a
    checkpoint, so that a recomputation draws the same numbers."""

    def forward(self, *args, **kwargs):
        if flow.current() is not None:
            return super().forward(*args, **kwargs)
        with self._deepsp_running.randomness(self):
            return super().forward(*args, **kwargs)
