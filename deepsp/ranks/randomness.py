"""Random numbers that differ by rank for sharded tensors, and agree for replicated ones.

The only state is that of the default generators, which all ranks of a group seed alike.
``torch.utils.checkpoint`` restores it, so a recomputation draws the same numbers again.
"""

from __future__ import annotations

import contextlib
import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch._C import _len_torch_dispatch_stack
from torch._ops import _len_torch_dispatch_stack_pre_dispatch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.hooks import RemovableHandle

from deepsp.ranks.agreement import first_difference
from deepsp.ranks.groups import Group, Member, device_of, member_of, objects_on_all_ranks

_local = threading.local()
_MASK = (1 << 64) - 1
# The upper half of the seeds of a rank's own numbers (the CPU's generator uses the lower half). It
# identifies a state that a checkpoint restores in backward.
_OWN = 0x5EED5D5E


@torch.library.register_fake("deepsp::_dropout_seed")
def _fake_seed(like, rank, draws=1):
    """C++ sees a fake tensor as a meta tensor, and can't return a seed on the CPU."""
    seed = torch.empty((), dtype=torch.int64, device="cpu")
    return seed, torch.empty(0, dtype=torch.int64, device=like.device)


def _generators(device: torch.device | None = None) -> list[torch.Generator]:
    """The default generators in use: the CPU's, then that of ``device``, which needn't be the
    current one."""
    generators = [torch.default_generator]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        index = device.index if device is not None and device.type == "cuda" else None
        generators.append(
            torch.cuda.default_generators[torch.cuda.current_device() if index is None else index]
        )
    return generators


def states(device: torch.device | None = None) -> list[torch.Tensor]:
    with torch._C.DisableTorchFunction():
        return [g.get_state() for g in _generators(device)]


def restore(saved: list[torch.Tensor], device: torch.device | None = None) -> None:
    with torch._C.DisableTorchFunction():
        for generator, state in zip(_generators(device), saved, strict=False):
            generator.set_state(state)


def mix(seed: int, rank: int) -> int:
    """A different seed for each rank (splitmix64's finalizer: neighbours are unrelated)."""
    x = (seed + (rank + 1) * 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return (x ^ (x >> 31)) & (_MASK >> 1)


def _stack() -> list:
    if not hasattr(_local, "stack"):
        _local.stack = []
    return _local.stack


def inside() -> bool:
    """Whether random numbers differ by rank here."""
    return bool(_stack()) and _stack()[-1] is not None


def _is_own() -> bool:
    """Whether random numbers differ by rank here: in a fork, or where a checkpoint recomputes code
    of one."""
    return inside() or torch.initial_seed() >> 32 == _OWN


def _not_traced() -> contextlib.AbstractContextManager:
    """A context without dispatch modes; where there are none, it costs nothing."""
    modes = _len_torch_dispatch_stack() + _len_torch_dispatch_stack_pre_dispatch()
    return _disable_current_modes() if modes else contextlib.nullcontext()


class _Fork:
    """A context in which random numbers are this rank's own. ``lazy``: if none are drawn, the
    default generators keep their states."""

    def __init__(self, rank: int, device: torch.device | None = None, lazy: bool = False):
        self.rank, self.device, self.lazy = rank, device, lazy

    def __enter__(self) -> None:
        with torch._C.DisableTorchFunction():
            self.before = states(self.device) if self.lazy else []
            # Every rank draws the same seed. The draw advances the default generator, so that the
            # next context gets other numbers.
            with _not_traced():
                seed = int(torch.empty((), dtype=torch.int64).random_())
            self.outer = states(self.device)
            for generator in _generators(self.device):
                generator.manual_seed(_OWN << 32 | mix(seed, self.rank) & 0xFFFFFFFF)
            self.drawn = self.outer  # common_randomness replaces ``outer`` when it has drawn
            self.seeded = states(self.device) if self.lazy else []
        _stack().append(self)

    def __exit__(self, *_) -> None:
        _stack().remove(self)
        unused = self.lazy and self.outer is self.drawn
        unused = unused and all(map(torch.equal, self.seeded, states(self.device)))
        restore(self.before if unused else self.outer, self.device)


@contextlib.contextmanager
def sharded_randomness(group: Group = None, device: torch.device | None = None) -> Iterator[None]:
    """Random numbers in this context differ by rank: for ops on sharded tensors.

    They depend on the rank and on ``torch.manual_seed``, which all ranks of the group must call
    with the same seed. Afterwards the default generators continue as if one number had been drawn,
    the same on every rank. Both kinds of ``torch.utils.checkpoint`` draw the same numbers again.

    Args:
        group: the group over which tensors are sharded.
        device: where numbers are drawn, besides the CPU; None: the current device.

    Raises:
        ValueError: this process isn't in the group.
    """
    with own_randomness(member_of(group), device):
        yield


def own_randomness(
    member: Member, device: torch.device | None = None
) -> contextlib.AbstractContextManager[None]:
    """:func:`sharded_randomness` for one use."""
    return _Fork(member[0], device)


def randomness_of_a_model(
    member: Member, device: torch.device | None = None
) -> contextlib.AbstractContextManager[None]:
    """:func:`sharded_randomness` around a model's forward in which every rank has tokens. If the
    model draws nothing, the default generators keep their states, so that samplers draw the same as
    in one process. Data ranks draw different numbers, too. Inside another such context it does
    nothing."""
    if member[1] == 1 or _is_own():
        return contextlib.nullcontext()
    return _Fork(dist.get_rank(), device, lazy=True)


def align(member: Member) -> None:
    """Copies the states of the default generators of torch (on the CPU), Python and numpy from the
    group's first rank to all others, so that samplers and loader workers, which are seeded from
    them, draw the same on every rank. If accelerate deals out the data, align all ranks: each takes
    its rows from the same order. All ranks make this call."""
    if member[1] == 1:
        return
    numpy = sys.modules.get("numpy")
    state = torch.get_rng_state(), random.getstate(), numpy and numpy.random.get_state()
    first = objects_on_all_ranks(state if member[0] == 0 else None, member, device_of(member))[0]
    torch.set_rng_state(first[0])
    random.setstate(first[1])
    if numpy and first[2]:
        numpy.random.set_state(first[2])


@contextlib.contextmanager
def draws_kept(devices: Sequence[torch.device] | None = None) -> Iterator[Callable[[], bool]]:
    """Restores the default generators of torch, Python and numpy. Gives a function that tells
    whether torch's on the CPU, or Python's, have drawn in the context.

    Args:
        devices: CUDA devices whose generators are restored. None: the current one.
    """
    if devices is None:
        in_use = torch.cuda.is_available() and torch.cuda.is_initialized()
        devices = [torch.cuda.current_device()] if in_use else []
    numpy = sys.modules.get("numpy")
    before = torch.get_rng_state(), random.getstate(), numpy and numpy.random.get_state()

    def drawn() -> bool:
        return random.getstate() != before[1] or not torch.equal(before[0], torch.get_rng_state())

    try:
        with torch.random.fork_rng(devices):
            yield drawn
    finally:
        random.setstate(before[1])
        if numpy:
            numpy.random.set_state(before[2])


@contextlib.contextmanager
def common_randomness(name: str) -> Iterator[None]:
    """A context inside :func:`sharded_randomness` in which random numbers are the same on all ranks
    again. ``name``: the module's, for errors.

    Raises:
        ValueError: it isn't inside: a checkpoint recomputes the module without the outer context.
    """
    if not inside():
        raise ValueError(
            f"{name} draws the same random numbers on all ranks, inside a module whose random "
            "numbers differ by rank. A checkpoint between the two would draw other numbers when it "
            "runs again; checkpoint the outer module"
        )
    fork = _stack()[-1]
    before = states(fork.device)
    restore(fork.outer, fork.device)
    _stack().append(None)
    try:
        yield
    finally:
        _stack().pop()
        fork.outer = states(fork.device)
        restore(before, fork.device)


def around_forward(module: nn.Module) -> list[RemovableHandle]:
    """:func:`randomness_of_a_model` around each forward of ``module``, by hooks, which run outside
    of compiled code. Returns their handles."""
    entered = threading.local()

    def enter(module, args):
        if not hasattr(entered, "contexts"):
            entered.contexts = []
        is_own = _is_own()
        entered.contexts.append(
            contextlib.nullcontext() if is_own else _Fork(dist.get_rank(), lazy=True)
        )
        entered.contexts[-1].__enter__()

    def leave(module, args, output):
        if getattr(entered, "contexts", None):
            entered.contexts.pop().__exit__(None, None, None)

    return [
        module.register_forward_pre_hook(enter),
        module.register_forward_hook(leave, always_call=True),
    ]


def compare(saved: list[torch.Tensor], member: Member) -> None:
    """Compares the ranks' default generators. All ranks make this call.

    Raises:
        ValueError: their states differ.
    """
    differs = first_difference([(str(n), state) for n, state in enumerate(saved)], member)
    if differs is not None:
        raise differs.error(
            "the state of the random number generators",
            "the model draws the same numbers on every rank for replicated tensors, and seeds for "
            "sharded ones: call torch.manual_seed with the same seed on every rank of the group "
            "before the first step",
        )
