"""The state of sharded modules as if they were whole."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from deepsp.sharding import sharded_parameters


def full_state_dict(module: nn.Module) -> dict[str, Tensor]:
    """``module.state_dict()`` as it would be without sharding: whole tensors under the names that
    they had, in the dtype of the shards. Every rank makes the call, and gets them all."""
    shards = {}
    for name, _, owner, index in sharded_parameters(module):
        shards[_shard_key(name)] = (name, owner, index)
    result = {}
    gathered: dict[int, Tensor] = {}
    for key, value in module.state_dict().items():
        if key not in shards:
            result[key] = value
            continue
        name, owner, index = shards[key]
        parameter = owner.parameters[index]
        if id(parameter) not in gathered:
            gathered[id(parameter)] = owner.gather(index, parameter.dtype)
        result[name] = gathered[id(parameter)]
    return result


def load_full_state_dict(module: nn.Module, state_dict: Mapping[str, Tensor]) -> None:
    """Loads what :func:`full_state_dict`, or the module before it was sharded, gave: each rank
    takes its rows.

    Raises:
        ValueError: a tensor has another shape than the parameter.
        RuntimeError: names are missing or left over, as ``load_state_dict`` raises.
    """
    own = dict(state_dict)
    for name, _, owner, index in sharded_parameters(module):
        if name in own:
            whole = own.pop(name)
            if whole.shape != owner.wholes[index].shape:
                raise ValueError(
                    f"state_dict[{name!r}] has shape {tuple(whole.shape)}; "
                    f"{tuple(owner.wholes[index].shape)} is right"
                )
            own[_shard_key(name)] = owner.rows_of(index, whole)
    module.load_state_dict(own)


def _shard_key(name: str) -> str:
    prefix, _, leaf = name.rpartition(".")
    return f"{prefix}.parametrizations.{leaf}.original".removeprefix(".")
