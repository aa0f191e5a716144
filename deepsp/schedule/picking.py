"""One tensor among a module's inputs or outputs, taken out and put back."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

Key = int | str | None
"""Which tensor: its position, its name, or None: the only one."""


def pick_input(module: nn.Module, args: tuple, kwargs: dict, key: Key, where: str):
    """(tensor, put): put(new) gives args and kwargs with the new tensor in its place."""
    place = _place_of_input(module, args, kwargs, key, where)
    value = args[place] if isinstance(place, int) else kwargs[place]
    if not isinstance(value, torch.Tensor):
        raise ValueError(
            f"{where}: expected the module's input {key!r} to be a tensor, got "
            f"{type(value).__name__}; pass the position or name of a tensor"
        )

    def put(new):
        if isinstance(place, int):
            return (*args[:place], new, *args[place + 1 :]), kwargs
        return args, {**kwargs, place: new}

    return value, put


def _place_of_input(module, args, kwargs, key, where) -> int | str:
    if key is None:
        places: list[int | str] = [i for i, x in enumerate(args) if isinstance(x, torch.Tensor)]
        places += [name for name, x in kwargs.items() if isinstance(x, torch.Tensor)]
        if len(places) != 1:
            raise ValueError(
                f"{where}: expected one tensor in the module's inputs, got {len(places)}, {places}"
                "; pass tensor=, the position or name of one"
            )
        return places[0]
    if key in kwargs:
        return key
    names = _parameters(module)
    if isinstance(key, str) and key in names and names.index(key) < len(args):
        return names.index(key)
    if isinstance(key, int):
        if -len(args) <= key < len(args):
            return key % len(args)
        if 0 <= key < len(names) and names[key] in kwargs:
            return names[key]
    raise ValueError(
        f"{where}: expected tensor= to name one of the module's inputs, {len(args)} by position "
        f"and {list(kwargs)} by name, got {key!r}; pass the position or name of an input"
    )


def _parameters(module: nn.Module) -> list[str]:
    return list(inspect.signature(module.forward).parameters)


def pick_output(output: Any, key: Key, where: str):
    """(tensor, put): put(new) gives the output with the new tensor in its place."""
    if isinstance(output, torch.Tensor):
        if key not in (None, 0, -1):
            raise ValueError(
                f"{where}: expected no tensor=, since the module's output is one tensor, got "
                f"{key!r}; leave tensor= out"
            )
        return output, lambda new: new
    if key is None:
        key = _only(output, where)
    try:
        value = _get(output, key)
    except (IndexError, KeyError, AttributeError, TypeError):
        value = None
    if not isinstance(value, torch.Tensor):
        raise ValueError(
            f"{where}: expected tensor= to name a tensor of the module's output, which is a "
            f"{type(output).__name__} with {_described(output)}, got {key!r}; pass the position or "
            "name of a tensor"
        )
    return value, lambda new: _put(output, key, new)


def _only(output, where: str):
    keys = [key for key, value in _items(output) if isinstance(value, torch.Tensor)]
    if len(keys) != 1:
        raise ValueError(
            f"{where}: expected an output of one tensor, got a {type(output).__name__} with "
            f"{len(keys)} tensors, {keys}; pass tensor=, the position or name of one"
        )
    return keys[0]


def _items(output) -> list[tuple]:
    if isinstance(output, Mapping):
        return list(output.items())
    if isinstance(output, (tuple, list)):
        return list(enumerate(output))
    return list(getattr(output, "__dict__", {}).items())


def _described(output) -> str:
    return ", ".join(f"{key}: {type(value).__name__}" for key, value in _items(output)) or "nothing"


def _get(output, key):
    if isinstance(output, Mapping):
        return list(output.values())[key] if isinstance(key, int) else output[key]
    if isinstance(output, (tuple, list)) and isinstance(key, int):
        return output[key]
    return getattr(output, key)


def _put(output, key, new):
    if isinstance(output, Mapping):
        changed = copy.copy(output)
        changed[list(output)[key] if isinstance(key, int) else key] = new
        return changed
    if isinstance(output, tuple):
        if hasattr(output, "_fields"):  # a named one
            name = output._fields[key] if isinstance(key, int) else key
            return output._replace(**{name: new})
        return tuple(new if i == key % len(output) else x for i, x in enumerate(output))
    if isinstance(output, list):
        return [new if i == key % len(output) else x for i, x in enumerate(output)]
    if dataclasses.is_dataclass(output):
        return dataclasses.replace(output, **{key: new})
    changed = copy.copy(output)
    setattr(changed, key, new)
    return changed
