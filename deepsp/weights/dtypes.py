"""Checks that a module's input has the dtype of its gathered parameters, and advises autocast in
place of PyTorch's error about a product's dtypes."""

from __future__ import annotations

import re
import sys

import torch
from torch import Tensor, nn

# Forwards that take one dtype only, by the argument that must have it.
_STRICT = {
    cls.forward.__code__: name
    for cls, name in (
        (nn.Linear, "input"),
        *((c, "input") for c in (nn.Conv1d, nn.Conv2d, nn.Conv3d)),
        (nn.Bilinear, "input1"),
    )
}
_DTYPES = re.compile("dtype|scalar type")  # in PyTorch's errors
_FRAMES = 12  # from the read of a parameter to the forward that reads it


def check_input_dtype(name: str, gathered: torch.dtype, shard: Tensor) -> None:
    """
    Raises:
        ValueError: the input of the module that reads the parameter has another dtype.
    """
    if torch.is_autocast_enabled(shard.device.type):
        return
    frame = sys._getframe(1)
    for _ in range(_FRAMES):
        frame = frame.f_back
        if frame is None:
            return
        if (argument := _STRICT.get(frame.f_code)) is not None:
            x = frame.f_locals.get(argument)
            if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != gathered:
                raise ValueError(
                    f"expected the input of {name}'s module in {_of(gathered)}, in which "
                    f"shard_parameters gathers {name}, got {_of(x.dtype)}; {_advice(x, gathered)}"
                )
            return


def explain_dtypes(error: BaseException | None, infos: list, parameters: list) -> None:
    """Adds advice to an error about dtypes from a module's forward."""
    if not isinstance(error, RuntimeError) or not _DTYPES.search(str(error)):
        return
    for info, parameter in zip(infos, parameters, strict=True):
        if info.dtype != parameter.dtype:
            autocasts = torch.is_autocast_enabled(parameter.device.type)
            error.add_note(
                f"shard_parameters gathers parameters such as {info.name} in {_of(info.dtype)}, "
                + (
                    "which this function doesn't take, under autocast either; pass dtype to "
                    "shard_parameters as a function of name and parameter that returns "
                    f"{parameter.dtype} for it"
                    if autocasts
                    else f"and autocast is off; {_advice(parameter, info.dtype)}"
                )
            )
            return


def _advice(like: Tensor, gathered: torch.dtype) -> str:
    return (
        f'call the module within torch.autocast("{like.device.type}", dtype={gathered}), or pass '
        f"dtype={like.dtype} to shard_parameters"
    )


def _of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
