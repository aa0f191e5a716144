"""Compares tensors that should be replicated across the group, once in each dry run.

Placements can't show that a model's or a hook's code depends on the rank (a mask by rank,
``x.chunk(size)[rank]``), but values can.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from deepsp.ranks.agreement import Difference, difference, digest_of, first_difference, number_of
from deepsp.ranks.groups import Member, device_of, objects_on_all_ranks, on_all_ranks
from deepsp.schedule.flow.values import tensors_in

_NUMBERS = (int, float, bool, str)

# Floating tensors are compared by signed sums of this many parts: ranks may round differently.
_PARTS = 32
_ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.1}


class Alike:
    """Records tensors during the dry run, and compares them across the group at its end."""

    def __init__(self, member: Member):
        self.member = member
        self._digests: list[tuple[str, int]] = []
        self._floats: list[tuple[str, float, Tensor]] = []  # name, rounding, sums and norm
        self._numbers: dict[str, list[list[int] | None]] = {}

    @torch.no_grad()
    def note(self, name: str, tensor: Tensor) -> None:
        """Records a tensor. ``name`` says where it comes from, for the error."""
        if self.member[1] == 1 or tensor.is_meta:
            return
        with torch._C.DisableTorchFunction():
            rounding = _ROUNDING.get(tensor.dtype)
            if rounding is None or tensor.layout != torch.strided:
                self._digests.append((name, digest_of("", tensor)))
                return
            self._digests.append((name, digest_of("", tensor.to("meta"))))
            self._floats.append((name, rounding, _sums(tensor)))

    def note_numbers(self, name: str, numbers: list[int] | None) -> None:
        """Records numbers that local sizes may have led to, such as how many query heads read a kv
        head: right ones don't depend on the rank. None: not known on this rank."""
        if self.member[1] > 1:
            self._numbers.setdefault(name, []).append(numbers)

    def compare(self) -> None:
        """All ranks make this call, when the dry run is over.

        Raises:
            ValueError: something differs.
        """
        differs = self._first_difference()
        if differs is None:
            differs = self._different_numbers()
        if differs is not None and any(isinstance(value, str) for value in differs.values):
            raise differs.error(
                differs.name,
                "the ranks split two numbers differently, such as query heads and kv heads: pass "
                "a unit= to shard and divide that splits both alike (the unit of q is all query "
                "heads of a kv head)",
            )
        if differs is not None:
            raise differs.error(
                f"{differs.name}, which is computed from replicated tensors,",
                "something in the model, or in a hook, depends on the rank: let the schedule split "
                "tensors (sync with scatter), and leave out hooks that mask by rank, since a "
                "sharded Embedding takes ids of the full vocabulary",
            )

    def _first_difference(self) -> Difference | None:
        if self.member[1] == 1:
            return None
        differs = difference(self._digests, self.member)
        if differs is not None or not self._floats:
            return differs
        rank, size, name = self.member
        local = torch.stack([sums for _, _, sums in self._floats])
        local = local.to(device_of(self.member)).unsqueeze(0)
        with torch._C.DisableTorchFunction():
            every = torch.ops.deepsp.all_gather(local, 0, [1] * size, "replicated", rank, name)
            every = every.cpu()
        for n, (what, rounding, _) in enumerate(self._floats):
            first = every[0, n]
            for other in range(1, size):
                distance = torch.linalg.vector_norm(every[other, n, :-1] - first[:-1])
                if distance > rounding * max(first[-1], every[other, n, -1]):
                    return Difference(what, 0, other, (0, 0))
        return None

    def _different_numbers(self) -> Difference | None:
        if self.member[1] == 1:
            return None
        device, items = device_of(self.member), list(self._numbers.items())
        digests = on_all_ranks([number_of(items)], self.member, device)
        if all(digest == digests[0] for digest in digests):
            return None
        every = [dict(items) for items in objects_on_all_ranks(items, self.member, device)]
        for name, first in every[0].items():
            for rank, other in enumerate(every):
                got = other.get(name, [])
                if len(got) != len(first):  # a rank has more heads, and loops over them
                    continue
                for one, two in zip(first, got, strict=True):
                    if one != two and one is not None and two is not None:
                        return Difference(name, 0, rank, (str(one), str(two)))
        return None


def compare_inputs(args: tuple, kwargs: Mapping, member: Member) -> None:
    """Compares the inputs of a call of the model. All ranks make this call.

    Raises:
        ValueError: they differ.
    """
    tensors = [(f"tensor {n}", t) for n, t in enumerate(tensors_in((args, kwargs)))]
    plain = (x for x in tree_leaves((args, kwargs)) if type(x) in _NUMBERS)
    numbers = [(f"number {n}", repr(x)) for n, x in enumerate(plain)]
    differs = first_difference([*tensors, *numbers], member)
    if differs is not None:
        raise differs.error(
            f"the full batch, the model's inputs (for example {differs.name}),",
            "the schedule splits the batch: DistributedSampler gives each rank a batch of its own "
            "unless it counts data-parallel ranks only (num_replicas=, rank=)",
        )


def _sums(tensor: Tensor) -> Tensor:
    """Signed sums of a tensor's parts, and its norm. On average, the difference of two tensors'
    sums has the norm of the tensors' difference."""
    flat = tensor.detach().double().reshape(-1).nan_to_num(nan=1e3, posinf=1e6, neginf=-1e6)
    n = flat.numel()
    index = torch.arange(n, device=flat.device)
    # Hash the index, so that neighbours and repeated values don't cancel.
    mixed = (index * 0x9E3779B97F4A7C1 + 0x1234567) ^ (index >> 7)
    mixed = (mixed ^ (mixed >> 29)) * 0x5851F42D4C957F2D
    signed = torch.where(((mixed >> 40) & 1).bool(), flat, -flat)
    sums = flat.new_zeros(_PARTS + 1).index_add(0, (mixed >> 50) & (_PARTS - 1), signed)
    sums[-1] = torch.linalg.vector_norm(flat)
    return sums
