"""Where the model's own code turns gradients off."""

from __future__ import annotations

import torch


class GradMode:
    """Follows calls of ``torch._C._set_grad_enabled``, for which gradients are on but where the
    model has turned them off. They also are off, without such a call, in the forward of a
    ``torch.autograd.Function``, a reentrant checkpoint's too: what is made in there has gradients
    all the same."""

    def __init__(self):
        self._off = False

    def set(self, enabled: bool) -> None:
        """Before the call is made."""
        if enabled:
            self._off = False
        elif torch.is_grad_enabled():
            self._off = True

    @property
    def enabled(self) -> bool:
        self._off = self._off and not torch.is_grad_enabled()
        return not self._off
