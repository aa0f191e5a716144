"""The weights of a tiled module, and their temporary replacement by other tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from deepsp.ranks.groups import is_dtensor
from deepsp.weights.partitioned import check_gathered_as_a_whole
from deepsp.weights.shards import ShardParametrization

_ABSENT = object()


class Weights:
    """The parameters of a module and its submodules, each once. Gathers those that
    :func:`deepsp.shard_parameters` has sharded, once, in the same order on every rank."""

    def __init__(self, module: nn.Module, name: str):
        check_gathered_as_a_whole(name, module)
        self.tensors: list[Tensor] = []
        # For each tensor, the dictionaries and keys in which the module finds it.
        self._places: list[list[tuple[dict, str | int]]] = []
        first: dict[tuple, int] = {}

        def add(key: tuple, place: tuple[dict, str | int], tensor) -> None:
            if key not in first:
                first[key] = len(self.tensors)
                self.tensors.append(tensor())
                self._places.append([])
            self._places[first[key]].append(place)

        of_shards = set()
        for prefix, owner in module.named_modules():
            if owner in of_shards:
                continue
            for key, parameter in owner._parameters.items():
                if parameter is not None:
                    _check(parameter, f"{prefix}.{key}".lstrip("."), name)
                    add((id(parameter),), (owner._parameters, key), lambda p=parameter: p)
            if not parametrize.is_parametrized(owner):
                continue
            for key, parametrizations in owner.parametrizations.items():
                shard = parametrizations[0]
                if isinstance(shard, ShardParametrization):
                    of_shards.add(parametrizations)
                    place = shard.shards.full, shard.index
                    add(
                        (id(shard.shards), shard.index), place, lambda o=owner, k=key: getattr(o, k)
                    )

    @contextlib.contextmanager
    def replaced(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """In this context, the module computes with ``tensors``."""
        before = []
        try:
            for tensor, places in zip(tensors, self._places, strict=True):
                for values, key in places:
                    before.append((values, key, values.get(key, _ABSENT)))
                    values[key] = tensor
            yield
        finally:
            for values, key, value in reversed(before):
                if value is _ABSENT:
                    del values[key]
                else:
                    values[key] = value


def _check(parameter: Tensor, key: str, name: str) -> None:
    if is_dtensor(parameter):
        raise ValueError(
            f"expected {key} of {name} to be a plain tensor when the module is called, got a "
            "DTensor: tensor parallelism within a tiled module isn't supported, and FSDP2's "
            "parameters are whole in the module's own call only"
        )


class ShardedChildren:
    """Submodules that FSDP2 shards separately. Their hooks, which gather and reduce, run once for
    all tiles, around the tiled module's call."""

    def __init__(self, module: nn.Module, name: str):
        self._children = [
            m for m in module.modules() if m is not module and hasattr(m, "_get_fsdp_state")
        ]
        self._states = [m._get_fsdp_state() for m in self._children]
        for child, state in zip(self._children, self._states, strict=True):
            if len(state._modules) > 1:
                raise ValueError(
                    f"{type(child).__name__} in {name} is one of several modules that one call of "
                    "fully_shard groups: call fully_shard on the tiled module, or on each of them"
                )
        self._name = name

    def gather(self, x: Tensor) -> Tensor:
        """Runs their pre-forward hooks; ``x``'s backward then reduces their gradients."""
        for child, state in zip(self._children, self._states, strict=True):
            dtype = state._mp_policy.param_dtype
            if state._mp_policy.cast_forward_inputs and dtype not in (None, x.dtype):
                raise ValueError(
                    f"expected the input of {self._name} to be {dtype}, the param_dtype of "
                    f"{type(child).__name__} in it, got {x.dtype}: call fully_shard on the tiled "
                    "module, which casts its input"
                )
            ((x,), _) = state._pre_forward(child, (x,), {})
        return x

    def free(self, x: Tensor, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Runs their post-forward hooks; the outputs' backward then gathers again."""
        for child, state in reversed(list(zip(self._children, self._states, strict=True))):
            outputs = state._post_forward(child, (x,), outputs)
        return outputs

    @contextlib.contextmanager
    def left_alone(self) -> Iterator[None]:
        """In this context, calls of the submodules neither gather nor reduce."""
        before = []
        for child, state in zip(self._children, self._states, strict=True):
            for hooks, handle in (
                (child._forward_pre_hooks, state._pre_forward_hook_handle),
                (child._forward_hooks, state._post_forward_hook_handle),
            ):
                before.append((hooks, list(hooks.items())))
                hooks.pop(handle.id)
        try:
            yield
        finally:
            for hooks, items in before:
                hooks.clear()
                hooks.update(items)


def has_grad(tensors: Sequence[Tensor]) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
