"""What every door to a trainer needs: groups of ranks that share sequences, their local batches,
and the check of losses that it gets back."""

from __future__ import annotations

import atexit
import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree

from deepsp.data.sharding import split_batch
from deepsp.ranks.agreement import first_difference
from deepsp.ranks.groups import Member, member_of

ADVICE = (
    "leave DistributedSampler out, which deals rows to processes instead of groups that share a "
    "sequence; give samplers, data sets and collators generators that are seeded alike on all "
    "ranks of a group, and draw none on one rank alone, such as in a callback of rank 0"
)
"""Advice for different batches, if a trainer deals out the data."""

# ---- subclasses


def subclass(front: type, base: type, **attributes: Any) -> type:
    """A subclass of another library's class, in which ``front`` stands before it.

    Args:
        front: its methods replace those of ``base``. Names that it adds begin with ``sequence`` or
            ``_sequence``.
        base: the class.
        attributes: further ones of the subclass.

    Raises:
        RuntimeError: ``base`` lacks a method that ``front`` replaces, so nothing would call it.
    """
    added = ("__", "sequence_", "_sequence_")
    named = {n for c in front.__mro__[:-1] for n in (*vars(c), *c.__annotations__)}
    missing = sorted(n for n in named if not n.startswith(added) and not hasattr(base, n))
    if missing:
        library = base.__module__.split(".")[0]
        raise RuntimeError(
            f"expected {base.__name__} of {library} to have {missing}, by which deepsp makes it "
            f"work over sharded sequences, but this version doesn't; install the version of "
            f"{library} with which deepsp is tested, of its extra 'test'"
        )
    return type(f"SequenceParallel{base.__name__}", (front, base), attributes)


# ---- groups


@dataclass(frozen=True)
class Groups:
    """The groups of consecutive ranks that share each batch.

    Attributes:
        size: the number of ranks that share a sequence.
        shared: the number of ranks with the same batch: ``size`` times the ranks over which tensors
            of the model are sharded.
        number: the number of groups.
        index: this rank's.
        group: the ranks of this rank's sequence.
        everyone: one rank for each part of all groups' tokens, this one among them.
    """

    size: int
    shared: int
    number: int
    index: int
    group: dist.ProcessGroup
    everyone: dist.ProcessGroup

    @property
    def member(self) -> Member:
        return member_of(self.group)

    def make_data_group(self) -> Member:
        """This rank among those with the same tokens, one of each group. All processes call it."""
        ranks = [[i + g * self.shared for g in range(self.number)] for i in range(self.shared)]
        return member_of(dist.new_subgroups_by_enumeration(ranks)[0])


def check_size(size: Any, processes: int, tensor_size: int = 1, advice: str = "") -> None:
    """
    Raises:
        ValueError: ``size`` isn't a divisor of the number of processes.
    """
    if isinstance(size, int) and size >= 1 and processes % (size * tensor_size) == 0:
        return
    number = f"{processes}, the number of processes, "
    if tensor_size > 1:
        number = f"{processes // tensor_size}, {processes} processes / tp_size={tensor_size}, "
    raise ValueError(
        f"expected sequence_parallel_size to be a divisor of {number}got {size!r}; it is the "
        f"number of ranks that share each batch{advice}"
    )


def make_groups(size: int, tensor_size: int = 1) -> Groups:
    """The groups of all processes, of ``size * tensor_size`` consecutive ranks each; one in
    ``tensor_size`` of these ranks shares a sequence. The default group if it is the only one, since
    models with ``group=None`` use it. All processes call it."""
    world, shared = dist.get_world_size(), size * tensor_size
    group = everyone = dist.group.WORLD
    if size < world:
        firsts = [g + t for g in range(0, world, shared) for t in range(tensor_size)]
        ranks = [list(range(first, first + shared, tensor_size)) for first in firsts]
        group = dist.new_subgroups_by_enumeration(ranks)[0]
    if tensor_size > 1:
        ranks = [list(range(t, world, tensor_size)) for t in range(tensor_size)]
        everyone = dist.new_subgroups_by_enumeration(ranks)[0]
    number, index = world // shared, dist.get_rank() // shared
    _outlast_gloo()
    return Groups(size, shared, number, index, group, everyone)


@functools.cache
def _outlast_gloo() -> None:
    """Gives gloo's threads time to free the tensors of a trainer's last collectives, for which they
    need the interpreter's lock. Once Python shuts down, a thread that waits for it aborts the
    process (PyTorch issue 190489)."""
    atexit.register(time.sleep, 0.25)


# ---- attributes


@contextlib.contextmanager
def replaced(thing: Any, name: str, value: Any) -> Iterator[None]:
    """In this context, an attribute has another value."""
    had, before = name in vars(thing), vars(thing).get(name)
    setattr(thing, name, value)
    try:
        yield
    finally:
        if had:
            setattr(thing, name, before)
        else:
            delattr(thing, name)


# ---- batches


class LocalBatch(dict):
    """A local batch. Reading its labels raises, and names shift_labels.

    Attributes:
        full: the batch that was sharded.
        sharded: shards another one alike. Copies of a local batch have neither, and can't be
            proven.
    """

    full: Mapping[str, Any]
    sharded: Callable[[Mapping[str, Any]], LocalBatch]

    def __missing__(self, key: str) -> Any:
        if key == "labels" and "shift_labels" in self:
            key = (
                "labels: a local batch has 'shift_labels' in their place, the token that each "
                "token is to predict; read those, and don't shift them again"
            )
        raise KeyError(key)

    def pop(self, key: str, *default: Any) -> Any:
        return self[key] if key not in self and not default else super().pop(key, *default)


# Lets functions that map over nested values, such as accelerate's gathers, see its tensors.
_pytree.register_pytree_node(
    LocalBatch,
    lambda batch: (list(batch.values()), list(batch)),
    lambda values, names: LocalBatch(zip(names, values, strict=True)),
)


def local_batch(
    batch: Mapping[str, Any], group: dist.ProcessGroup | Member, **how: Any
) -> tuple[LocalBatch, list[int]]:
    """This rank's part of a batch, and the tokens of each rank: at least one. ``how``: as in
    :func:`deepsp.data.roles.describe`."""
    local, lens = split_batch(batch, group, ADVICE, **how)
    check_lens(lens)
    local = LocalBatch(local)
    local.full, local.sharded = batch, lambda other: local_batch(other, group, **how)[0]
    return local, lens


def check_lens(lens: Sequence[int]) -> None:
    """Raises unless each rank of a group has a token of a batch."""
    if 0 in lens:
        raise ValueError(
            f"expected batches of at least {len(lens)} tokens, one for each rank of a group, got "
            f"{sum(lens)}; pad them, or drop such samples"
        )


# ---- losses


class Losses:
    """What backward gets under a wrapper that averages gradients over all ranks (DDP, FSDP,
    DeepSpeed), which divides by the number of ranks of a sequence, too.

    Args:
        group: the ranks that share a sequence.
        advice: which loss to take.
    """

    def __init__(self, group: dist.ProcessGroup | Member, advice: str):
        self.group, self.advice = group, advice
        self.compared = 0

    def averaged(self, loss: Tensor) -> Tensor:
        """The loss, with gradients times the number of ranks of a sequence unless they are already:
        by ``average_gradients=True``.

        Raises:
            ValueError: on every rank: it is the loss of this rank's tokens, or some of its terms
                have gradients times that number, and others not.
        """
        member = member_of(self.group)
        if member[1] == 1:  # in a proof
            return loss
        if self.compared < 2:  # a wrong one is wrong from the start; comparing costs a collective
            self.compared += 1
            if first_difference([("", loss.detach())], member) is not None:
                raise ValueError(
                    "expected the loss of the full sequence in backward, the same number on all "
                    "ranks of a group, got different ones: it is that of this rank's tokens; "
                    f"{self.advice}"
                )
        terms = _terms(loss)
        if terms <= {"summed", "unknown"} and "summed" in terms:
            return torch.ops.deepsp._scale_gradient(loss, float(member[1]))
        if "summed" in terms:
            other = "scaled" if "scaled" in terms else "computed from weights alone"
            raise ValueError(
                "expected all terms of a loss to be for wrappers that average gradients over the "
                f"ranks of a sequence, or none, got one that is {other} beside one that isn't; "
                "pass average_gradients=True to the losses of deepsp, and to deepsp.token_mean or "
                "token_sum for terms of your own"
            )
        return loss


_OURS = "torch::autograd::CppNode<deepsp::"
_LEAF = "torch::autograd::AccumulateGrad"


def _terms(loss: Tensor) -> set[str]:
    """What the terms of a loss are, by its graph from the loss to the sums over ranks: "summed",
    "scaled" (for wrappers that average), "replicated" (computed from weights, without a sum), or
    "unknown" (compiled)."""
    terms, seen = set(), set()
    stack = [(loss.grad_fn, False)]
    while stack:
        node, scaled = stack.pop()
        if node is None or (node, scaled) in seen:
            continue
        seen.add((node, scaled))
        name = node.name()
        if name.startswith(_OURS) and "ScaleGradient" not in name:
            scaled |= any(_is_scaled(n) for n, _ in node.next_functions)
            terms.add("scaled" if scaled else "summed")
        elif name == _LEAF:
            terms.add("replicated")
        elif "CompiledFunction" in name:
            terms.add("unknown")
        else:
            scaled |= "ScaleGradient" in name
            stack += [(n, scaled) for n, _ in node.next_functions]
    return terms


def _is_scaled(node) -> bool:
    """Whether a node before a sum scales gradients. A sum may be two nodes, its start and wait."""
    while node is not None and node.name().startswith(_OURS):
        if "ScaleGradient" in node.name():
            return True
        node = node.next_functions[0][0] if node.next_functions else None
    return False
