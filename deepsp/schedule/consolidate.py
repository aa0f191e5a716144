"""The whole again."""

from __future__ import annotations

from torch import Tensor, nn

from deepsp.schedule.shards import sharded


def consolidate(model: nn.Module, gradients: bool = False) -> dict[str, Tensor]:
    """``model.state_dict()`` as one process would have it: whole tensors under the same names.
    Every rank makes the call, and gets them all.

    Args:
        model: what :func:`deepsp.build` gave, or a part or wrapper of it.
        gradients: instead, the parameters' gradients by name, those that are there.
    """
    shards = sharded(model)
    tensors = model.state_dict()
    if gradients:
        named = model.named_parameters(remove_duplicate=False)
        tensors = {name: p.grad for name, p in named if p.grad is not None}
    gathered: dict[int, Tensor] = {}  # tied ones once
    result = {}
    for name, tensor in tensors.items():
        shard = shards.get(name)
        if shard is None:
            result[name] = tensor.detach() if isinstance(tensor, Tensor) else tensor
            continue
        key = tensor.data_ptr()
        if key not in gathered:
            gathered[key] = shard.gather(tensor)
        result[name] = gathered[key]
    return result
