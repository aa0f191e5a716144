"""Parameters that DeepSpeed's ZeRO 3 has partitioned.

Such a parameter has no elements until a hook of DeepSpeed gathers it, in place, for the module that
owns it. In the forward of an engine, ``module.weight`` also gathers what another module owns, and
registers it with the module that runs, whose hooks gather it from then on, in backward too. So code
that uses a weight needs nothing but that access, and an engine around it. DeepSpeed isn't imported.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

_HOOKS_OF = ("deepspeed.runtime.zero.parameter_offload", "deepspeed.utils.nvtx")
"""Where ZeRO 3's hooks on modules are defined, and a decorator that some of them have."""


def is_partitioned(parameter: Tensor | None) -> bool:
    """Whether ZeRO 3 owns it, gathered or not."""
    return hasattr(parameter, "ds_id")


def is_away(parameter: Tensor | None) -> bool:
    """Whether ZeRO 3 owns it, and it isn't gathered."""
    return is_partitioned(parameter) and parameter.numel() < parameter.ds_numel


def full_shape(parameter: Tensor) -> torch.Size:
    """The shape, gathered or not."""
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


def is_hook(hook: Callable) -> bool:
    """Whether it gathers or releases a module's own parameters, and so may be left out where the
    module isn't called."""
    return getattr(hook, "__module__", None) in _HOOKS_OF


def is_gathered_when_called(module: nn.Module) -> bool:
    """Whether an engine has put its hooks on the module."""
    return any(map(is_hook, module._forward_pre_hooks.values()))


def check_here(name: str, parameter: Tensor | None) -> None:
    """Raises ValueError where a parameter that is to be used has no elements."""
    if is_away(parameter):
        raise ValueError(
            f"expected {name} to be the full parameter {tuple(parameter.ds_shape)}, got "
            f"{tuple(parameter.shape)}: DeepSpeed's ZeRO 3 has partitioned it, and gathers it in "
            "the forward of the engine's model only; use it there, and call engine(...)"
        )


def check_linear_here(name: str, linear: nn.Module, called: bool) -> None:
    """:func:`check_here` for the parameters of a linear layer. ``called``: it is going to be
    called, so that its hooks gather them; otherwise the access does."""
    for of, parameter in linear._parameters.items():  # no access as DeepSpeed understands it
        if is_partitioned(parameter) and not (called and is_gathered_when_called(linear)):
            check_here(f"{name}.{of}", parameter if called else getattr(linear, of))


def gather_as_a_whole(module: nn.Module) -> None:
    """Makes an engine that is made later gather all of the module's parameters in its own hooks,
    and none in its submodules': DeepSpeed's "leaf module"."""
    module._z3_leaf = True


def check_gathered_as_a_whole(name: str, module: nn.Module) -> None:
    """Raises ValueError where a call of the module doesn't gather all of its parameters, once."""
    owned = [of for of, parameter in module.named_parameters() if is_partitioned(parameter)]
    inner = [m for m in module.modules() if m is not module]
    if owned and any(map(is_gathered_when_called, inner)):
        raise ValueError(
            f"expected {name} to be tiled before deepspeed.initialize, so that ZeRO 3 gathers it "
            f"once for all tiles, got submodules that ZeRO 3 gathers one by one ({owned[0]}, say): "
            "call deepsp.tile before deepspeed.initialize"
        )
    for of, parameter in module.named_parameters():
        check_here(f"{of} of {name}", parameter)
