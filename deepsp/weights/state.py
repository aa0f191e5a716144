"""The full state of sharded modules."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from deepsp.ranks.groups import device_of
from deepsp.weights.rows import all_shards
from deepsp.weights.shard_gradient import plain


def full_state_dict(module: nn.Module, gradients: bool = False) -> dict[str, Tensor]:
    """``module.state_dict()`` as without sharding: full tensors under their original names, in the
    dtype of the shards.

    Every rank makes the call, and gets all tensors.

    Args:
        module: a result of :func:`deepsp.shard_parameters` or :func:`deepsp.build`, or a part or
            wrapper of it.
        gradients: return the parameters' gradients by name instead; parameters without one are
            left out.

    Raises:
        ValueError: some ranks have a gradient that others don't have.
    """
    shards = {key: (name, shard) for key, name, shard in all_shards(module)}
    if gradients:
        named = module.named_parameters(remove_duplicate=False)
        tensors = {key: p.grad for key, p in named if p.grad is not None}
        _check_on_all_ranks(shards, tensors)
    else:
        tensors = module.state_dict(keep_vars=True)  # so that tied ones are one object
    full: dict[int, Tensor] = {}
    result = {}
    for key, tensor in tensors.items():
        name, shard = shards.get(key, (key, None))
        if shard is not None:
            if id(tensor) not in full:
                full[id(tensor)] = shard.gather(plain(tensor))
            result[name] = full[id(tensor)]
        else:
            result[name] = tensor.detach() if isinstance(tensor, Tensor) else tensor
    return result


def _check_on_all_ranks(shards: dict, gradients: Mapping[str, Tensor]) -> None:
    """Raises unless all ranks have the same gradients: each would gather its own."""
    for rank, size, group in dict.fromkeys(shard.member for _, shard in shards.values()):
        names = {k: name for k, (name, s) in shards.items() if s.member == (rank, size, group)}
        device = device_of((rank, size, group))
        has = torch.tensor([key in gradients for key in names], dtype=torch.int64, device=device)
        ranks = torch.ops.deepsp.all_reduce(has, "replicated", rank, size, group).tolist()
        for name, count in zip(names.values(), ranks, strict=True):
            if 0 < count < size:
                raise ValueError(
                    f"expected the gradient of {name} on all {size} ranks of the group or on none, "
                    f"got it on {count}: run the same backward on every rank"
                )


def load_full_state_dict(module: nn.Module, state_dict: Mapping[str, Tensor]) -> None:
    """Loads a full state dict, from :func:`full_state_dict` or from the unsharded module: each rank
    takes its rows.

    Raises:
        ValueError: a tensor has another shape than the parameter.
        RuntimeError: names are missing or left over, as ``load_state_dict`` raises.
    """
    state = dict(state_dict)
    for key, name, shard in all_shards(module):
        if name in state_dict:
            full = state.pop(name)
            if tuple(full.shape) != shard.shape:
                raise ValueError(
                    f"expected state_dict[{name!r}] to have shape {shard.shape}, got "
                    f"{tuple(full.shape)}"
                )
            state[key] = shard.take(full)
    module.load_state_dict(state)
