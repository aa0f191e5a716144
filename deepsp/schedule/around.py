"""What goes on around a module's own computation."""

from __future__ import annotations

import torch
import torch.utils.checkpoint

from deepsp.schedule import flow
from deepsp.schedule.swap import Swapped


class Checkpointed(Swapped):
    """Its forward is computed again in backward."""

    def forward(self, *args, **kwargs):
        if not torch.is_grad_enabled() or flow.current() is not None:
            return super().forward(*args, **kwargs)
        return torch.utils.checkpoint.checkpoint(
            super().forward, *args, **self._deepsp_checkpoint, **kwargs
        )


class Drawing(Swapped):
    """It draws random numbers: this rank's own, or those that all ranks share. Inside of what is
    checkpointed, so that they are the same when it is computed again."""

    def forward(self, *args, **kwargs):
        if flow.current() is not None:
            return super().forward(*args, **kwargs)
        with self._deepsp_running.randomness(self):
            return super().forward(*args, **kwargs)
