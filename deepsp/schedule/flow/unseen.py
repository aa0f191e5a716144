"""What torch functions don't show: extensions, compiled functions, whatever turns them off."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from deepsp.schedule.flow.values import tensors_in

if TYPE_CHECKING:
    from deepsp.schedule.flow.flow import Flow


class Unseen(TorchDispatchMode):
    """Sees every aten op. One that no torch function has called is called as a torch function
    itself, and so followed: scripted functions are. Where these are turned off it notes what is
    made of followed tensors. Nothing is known of its placement: who uses it is told."""

    def __init__(self, flow: Flow):
        super().__init__()
        self.flow = flow
        self.made = WeakTensorKeyDictionary()  # tensor -> the op's name
        self.seen = 0  # a torch function is being called

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if self.seen or self.flow.is_paused:
            return out
        if any(self._matters(t) for t in tensors_in((args, kwargs or {}))):
            for tensor in tensors_in(out):
                if tensor not in self.flow.values:
                    self.made[tensor] = str(func)
        return out

    def _matters(self, tensor: Tensor) -> bool:
        if tensor in self.made or id(tensor) in self.flow.parameters:
            return True
        known = self.flow.values.get(tensor)
        return known is not None and (not known.replicated or known.carries)
