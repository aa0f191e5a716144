"""Parameters that DeepSpeed's ZeRO 3 has partitioned.

Such a parameter has no elements until a hook of DeepSpeed gathers it, in place, for the module that
owns it. In the forward of an engine, reading ``module.weight`` also gathers another module's
parameter, and registers it with the running module, whose hooks gather it from then on, in backward
too. So code that uses a weight only needs to read it inside an engine. DeepSpeed isn't imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

_HOOKS_OF = ("deepspeed.runtime.zero.parameter_offload", "deepspeed.utils.nvtx")
"""Modules that define ZeRO 3's hooks, and a decorator of some of them."""


def is_partitioned(parameter: Tensor | None) -> bool:
    """Whether ZeRO 3 has partitioned it, gathered now or not."""
    return hasattr(parameter, "ds_id")


def is_away(parameter: Tensor | None) -> bool:
    """Whether ZeRO 3 has partitioned it, and it isn't gathered now."""
    return is_partitioned(parameter) and parameter.numel() < parameter.ds_numel


def full_shape(parameter: Tensor) -> torch.Size:
    """The shape of the full parameter."""
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


def is_hook(hook: Callable) -> bool:
    """Whether a hook gathers or releases a module's own parameters. It may be skipped if the module
    isn't called."""
    return getattr(hook, "__module__", None) in _HOOKS_OF


def is_gathered_when_called(module: nn.Module) -> bool:
    """Whether an engine has put its hooks on the module."""
    return any(map(is_hook, module._forward_pre_hooks.values()))


def check_here(name: str, parameter: Tensor | None) -> None:
    """Raises ValueError if a parameter has no elements now."""
    if is_away(parameter):
        raise ValueError(
            f"expected {name} to be the full parameter {tuple(parameter.ds_shape)}, got "
            f"{tuple(parameter.shape)}: DeepSpeed's ZeRO 3 has partitioned it, and gathers it in "
            "the forward of the engine's model only; use it there, and call engine(...)"
        )


def check_linears_here(linears: Mapping[str, nn.Module], called: Sequence[str]) -> None:
    """:func:`check_here` for the parameters of linear layers. ``called``: those that will be
    called, so that their hooks gather the parameters; in others, reading gathers them."""
    for name, linear in linears.items():
        for key, parameter in linear._parameters.items():  # doesn't trigger DeepSpeed's gather
            is_called = name in called
            if is_partitioned(parameter) and not (is_called and is_gathered_when_called(linear)):
                check_here(f"{name}.{key}", parameter if is_called else getattr(linear, key))


def gather_as_a_whole(module: nn.Module) -> None:
    """Makes a later engine gather all of the module's parameters in the module's hooks, and none in
    its submodules': DeepSpeed's "leaf module"."""
    module._z3_leaf = True


def check_gathered_as_a_whole(name: str, module: nn.Module) -> None:
    """Raises ValueError unless a call of the module gathers all of its parameters once."""
    owned = [key for key, parameter in module.named_parameters() if is_partitioned(parameter)]
    inner = [m for m in module.modules() if m is not module]
    if owned and any(map(is_gathered_when_called, inner)):
        raise ValueError(
            f"expected {name} to be tiled before deepspeed.initialize, so that ZeRO 3 gathers it "
            f"once for all tiles, got submodules that ZeRO 3 gathers one by one ({owned[0]}, say): "
            "call deepsp.tile before deepspeed.initialize"
        )
    for key, parameter in module.named_parameters():
        check_here(f"{key} of {name}", parameter)
