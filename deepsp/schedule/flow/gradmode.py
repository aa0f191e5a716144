"""Where the model's own code turns gradients off, seen from inside of a no_grad region."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator

import torch
from torch.autograd import grad_mode

_CHECKPOINT = torch.utils.checkpoint.__file__
_TORCHS = {grad_mode.__file__, _CHECKPOINT, torch.utils.hooks.__file__}
"""They set it again, or wrap tensors for backward hooks."""


class GradMode:
    """Follows calls of ``torch._C._set_grad_enabled``.

    All of the dry run is under no_grad, so a context restores False when it ends, whatever stood
    before it in an ordinary run. Hence contexts are told apart by the object that entered them.
    """

    def __init__(self):
        self.enabled = True
        self._before: dict[int, bool] = {}

    def set(self, enabled: bool) -> None:
        """Called from within ``calls.follow``, that from ``__torch_function__``."""
        frame, context = sys._getframe(3), None
        while frame is not None and frame.f_code.co_filename == grad_mode.__file__:
            context, frame = frame, frame.f_back
        if frame is not None and frame.f_code.co_filename == _CHECKPOINT:
            return  # a checkpoint's own: its backward runs what is inside again, with gradients
        if context is None:
            self.enabled = enabled
            return
        owner = id(context.f_locals.get("self"))
        if context.f_code.co_name == "__exit__":
            self.enabled = self._before.pop(owner, self.enabled)
        else:
            self._before.setdefault(owner, self.enabled)
            self.enabled = enabled

    @contextlib.contextmanager
    def seen(self) -> Iterator[None]:
        """``torch.is_grad_enabled()`` says what it will say in an ordinary run: models ask, and go
        another way. Contexts, which restore it, have to know what it is."""
        really = torch.is_grad_enabled

        def is_grad_enabled() -> bool:
            caller = sys._getframe(1).f_code.co_filename
            if caller in _TORCHS or threading.get_ident() != here:
                return really()
            return self.enabled

        here = threading.get_ident()
        torch.is_grad_enabled = is_grad_enabled
        try:
            yield
        finally:
            torch.is_grad_enabled = really
