"""Compares values across the ranks of a group: tensors by a digest, other values as text.

Every rank calls :func:`first_difference` with its items. If they differ, the caller raises
:meth:`Difference.error`, with the name of the value and advice. :func:`compare_calls` does both for
the arguments of a call, as C++ does with ``DEEPSP_DEBUG=1``.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from deepsp.ranks.groups import (
    Group,
    Member,
    device_of,
    member_of,
    objects_on_all_ranks,
    on_all_ranks,
)

# 32-bit words per weighted sum: few enough that the temporaries stay in a cache.
_WORDS = 1 << 18


@torch.no_grad()
def digest_of(name: str, tensor: Tensor) -> int:
    """A digest of a tensor, from 0 to 2^62 - 1. It depends on the name, the shape, the dtype and
    every bit of the contents, but not on strides or the device. Equal tensors have equal digests on
    every rank; different ones have different digests, except with a probability of at most 2^-33.

    One pass over memory; a tensor that isn't contiguous is copied. For meta and fake tensors only
    name, shape and dtype count.
    """
    with torch._C.DisableTorchFunction():
        text = repr((name, str(tensor.dtype), list(tensor.shape)))
        digest = hashlib.blake2b(text.encode(), digest_size=8)
        if not (tensor.is_meta or isinstance(tensor, FakeTensor)):
            digest.update(repr(_sums(tensor)).encode())
        return _number(digest)


@functools.cache
def _weights(device: torch.device) -> Tensor:
    """A table of random numbers, the same in every process."""
    with _disable_current_modes():  # the first call may be inside a trace
        generator = torch.Generator(device="cpu").manual_seed(0)
        table = torch.empty(_WORDS, dtype=torch.int64, device="cpu").random_(generator=generator)
        return table.to(device)


def _number(digest) -> int:
    return int.from_bytes(digest.digest(), "little") >> 2


def digests(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, int]:
    """The :func:`digest_of` of each tensor, by name."""
    return {name: digest_of(name, tensor) for name, tensor in tensors}


def _sums(tensor: Tensor) -> list[int]:
    """Weighted sums, modulo 2^64, of the words of each part of a tensor.

    Words have half as many bits as weights: a difference in a word's highest bit alone (a sign)
    still changes 33 bits of the sum, and two of them don't cancel."""
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if tensor.numel() == 0:
        return []
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    if flat.stride(0) != 1:  # expanded
        flat = flat.clone(memory_format=torch.contiguous_format)
    data = flat.view(torch.uint8)
    sums, weights = [], _weights(flat.device)
    for part in data.split(4 * _WORDS):
        left = part.numel() % 4
        if left:
            part = torch.nn.functional.pad(part, (0, 4 - left))
        elif part.storage_offset() % 4:
            part = part.clone()
        words, weight = part.view(torch.int32), weights[: part.numel() // 4]
        # On the CPU dot is three times as fast; CUDA has no integer dot.
        sums.append(words.long().dot(weight) if words.is_cpu else (words * weight).sum())
    return torch.stack(sums).tolist()


class Difference(NamedTuple):
    """The first item in which ranks of a group differ; the same on every rank."""

    name: str
    """The name of the first item that differs, on ``rank``, or on ``other`` if ``rank`` has
    none."""
    rank: int
    other: int
    values: tuple[Any, Any]
    """The two ranks' values: digests of tensors, the text of other values, None for no item."""

    def error(self, what: str, advice: str) -> ValueError:
        """The error to raise. ``what`` should be the same; ``advice`` says what to do."""
        got = f"different values on ranks {self.rank} and {self.other}"
        if not any(isinstance(value, int) for value in self.values):
            one, two = ("nothing" if value is None else value for value in self.values)
            got = f"{one} on rank {self.rank} and {two} on rank {self.other}"
        return ValueError(
            f"expected {what} to be the same on every rank of the group, got {got}; {advice}"
        )


def first_difference(
    items: Iterable[tuple[str, Tensor | Any]], group: Group = None
) -> Difference | None:
    """Compares items across the group: tensors, and other values as text. All ranks make this call.
    One small collective, and another one if there is a difference.

    Returns:
        The first item in which ranks differ (in name, shape, dtype or contents, or because one has
        no more), and the first two ranks that differ in it; None: all are the same.
    """
    numbers = [(n, digest_of(n, x) if isinstance(x, Tensor) else str(x)) for n, x in items]
    return difference(numbers, group)


def number_of(numbers: Sequence[tuple[str, Any]]) -> int:
    """A digest of names and digests, from 0 to 2^62 - 1."""
    return _number(hashlib.blake2b(repr(numbers).encode(), digest_size=8))


def difference(items: Sequence[tuple[str, Any]], group: Group = None) -> Difference | None:
    """:func:`first_difference` for names and digests."""
    member = member_of(group)
    if member[1] == 1:
        return None
    device = device_of(member)
    totals = on_all_ranks([number_of(items)], member, device)
    if all(total == totals[0] for total in totals):
        return None
    every = objects_on_all_ranks(list(items), member, device)
    for n in range(max(map(len, every))):
        of_ranks = [of_rank[n] if n < len(of_rank) else None for of_rank in every]
        other = next((r for r, item in enumerate(of_ranks) if item != of_ranks[0]), None)
        if other is not None:
            one, two = of_ranks[0], of_ranks[other]
            return Difference((one or two)[0], 0, other, (one and one[1], two and two[1]))
    raise AssertionError("the digests of the items differ, but the items don't")


def compare_calls(op: str, member: Member, like: Tensor, **arguments) -> bool:
    """Compares the arguments of ``op`` across the group. All ranks make this call (a small
    collective, and another one if they differ, on the device of ``like``).

    Returns:
        Whether they were compared; False if ``like`` has no data: then nothing is sent.

    Raises:
        ValueError: on every rank, naming the first argument that differs, and each rank's value.
    """
    if like.is_meta or isinstance(like, FakeTensor):
        return False
    texts = [f"{name} {value}" for name, value in arguments.items()]
    try:
        with torch._C.DisableTorchFunction():
            torch.ops.deepsp._check_agreement(op, texts, like, *member)
    except ValueError as error:
        if "passes seq_lens" not in str(error):
            raise
        raise ValueError(
            f"{error}. seq_lens lists the number of tokens of each rank; None means that all ranks "
            "have the same number"
        ) from None
    return True
