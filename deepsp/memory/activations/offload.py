"""Keeps what backward needs in the host's memory, and copies both ways while the GPU computes."""

from __future__ import annotations

import collections
import weakref
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

IN_FLIGHT = 2
"""Copies to the host at a time: a copy's tensor stays on the GPU until the copy is done."""


class _Lane:
    """A stream that copies beside the one that computes."""

    def __init__(self, device: torch.device):
        self.module: ModuleType = torch.get_device_module(device)
        self.device, self.stream = device, self.module.Stream(device=device)

    def copy(self, to: Tensor, source: Tensor):
        """Starts a copy behind what the current stream has; returns the event of its end."""
        self.stream.wait_stream(self.module.current_stream(self.device))
        with self.module.stream(self.stream):
            to.copy_(source, non_blocking=True)
        return self.stream.record_event()

    def await_(self, event) -> None:
        """What the current stream is given from here on comes behind an event."""
        self.module.current_stream(self.device).wait_event(event)


class _Saved:
    """A tensor in the host's memory."""

    def __init__(self, x: Tensor, before: Callable[[], _Saved | None], there: _Lane):
        self.device, self.before = x.device, before
        # Pinned memory is dense: without gaps, strides stay.
        self.host = torch.empty_like(x, device="cpu", pin_memory=x.device.type != "cpu")
        self.left = there.copy(self.host, x)
        self.here: Tensor | None = None  # on its way back, or there
        self.ready = None  # when it is

    def fetch(self, back: _Lane) -> None:
        """Starts the copy back."""
        if self.here is None:
            self.here = torch.empty_like(self.host, device=self.device)
            self.ready = back.copy(self.here, self.host)
            self.here.record_stream(back.stream)  # if nobody waits for it


class offload(torch.autograd.graph.saved_tensors_hooks):
    """Keeps what is saved for backward inside of it in pinned memory of the host. ::

        with deepsp.offload():
            for layer in model.layers:
                x = checkpoint(layer, x, use_reentrant=False)
        x.sum().backward()  # outside

    Around checkpointed layers, that is the input of each layer. Copies to the host run on a stream
    of their own while the next layers compute. In backward, each tensor's copy back starts when
    the one that was saved after it is used, so that it arrives while a layer's backward runs.
    ``torch.autograd.graph.save_on_cpu`` makes the same copies on the stream that computes.

    The GPU holds at most two tensors that are on their way there, and two on their way back, beside
    what is computed. Parameters stay, and so do tensors of the CPU and those below ``min_bytes``.

    Args:
        min_bytes: smaller tensors stay where they are.

    Raises:
        ValueError: ``min_bytes`` is negative.
        RuntimeError: in forward or backward: a saved tensor was written to while it was copied.
    """

    def __init__(self, min_bytes: int = 1 << 20):
        if min_bytes < 0:
            raise ValueError(f"expected min_bytes >= 0, got {min_bytes}")
        self._min_bytes = min_bytes
        self._lanes: dict[torch.device, tuple[_Lane, _Lane]] = {}
        self._leaving: collections.deque[tuple[_Saved, Tensor, int]] = collections.deque()
        self._last: Callable[[], _Saved | None] = lambda: None
        super().__init__(self._pack, self._unpack)

    def _of(self, device: torch.device) -> tuple[_Lane, _Lane]:
        """There, and back: both at a time."""
        if device not in self._lanes:
            self._lanes[device] = _Lane(device), _Lane(device)
        return self._lanes[device]

    def _stays(self, x: Tensor) -> bool:
        return (
            not self._is_remote(x)
            or x.nbytes < self._min_bytes
            or (x.is_leaf and x.requires_grad)
            or x.layout != torch.strided
        )

    @staticmethod
    def _is_remote(x: Tensor) -> bool:
        return x.device.type != "cpu"

    def _pack(self, x: Tensor) -> Tensor | _Saved:
        if self._stays(x):
            return x
        there, _ = self._of(x.device)
        saved = _Saved(x, self._last, there)
        self._last = weakref.ref(saved)
        self._leaving.append((saved, x, x._version))
        while len(self._leaving) > IN_FLIGHT:
            self._arrive()
        return saved

    def _arrive(self) -> None:
        """Lets go of the oldest tensor: behind its copy, its memory may be written to."""
        saved, x, version = self._leaving.popleft()
        there, _ = self._of(saved.device)
        there.await_(saved.left)
        if x._version != version:
            raise RuntimeError(
                f"a tensor of shape {tuple(x.shape)} that was saved for backward was written to "
                "while deepsp.offload copied it; write out of place, or leave it on the GPU with "
                f"min_bytes > {x.nbytes}"
            )

    def _unpack(self, saved: Tensor | _Saved) -> Tensor:
        if not isinstance(saved, _Saved):
            return saved
        while self._leaving:
            self._arrive()
        _, back = self._of(saved.device)
        saved.fetch(back)
        before = saved.before()
        if before is not None:
            before.fetch(back)
        back.await_(saved.ready)
        tensor, saved.here = saved.here, None  # a second backward fetches it anew
        return tensor
