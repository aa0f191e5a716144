"""Replaces the forward of an existing module: its parameters, names and hooks stay."""

from __future__ import annotations

import functools

from torch import nn


class Swapped:
    """A class with another forward, put before a module's class."""

    def __reduce_ex__(self, protocol):
        # The class is made at runtime: pickle and copy rebuild it from its parts.
        return _new, type(self)._made_of, self.__dict__


@functools.cache
def _class(front: type, base: type) -> type:
    members = {"__module__": base.__module__, "_made_of": (front, *_made_of(base))}
    cls = type(base.__name__, (front, base), members)
    cls.__qualname__ = base.__qualname__
    return cls


def _made_of(cls: type) -> tuple[type, ...]:
    return cls._made_of if issubclass(cls, Swapped) else (cls,)


def _swapped_class(*made_of: type) -> type:
    cls = made_of[-1]
    for front in reversed(made_of[:-1]):
        cls = _class(front, cls)
    return cls


def _new(*made_of: type) -> nn.Module:
    cls = _swapped_class(*made_of)
    return cls.__new__(cls)


def swap(module: nn.Module, front: type, name: str, under: type | None = None) -> None:
    """Puts ``front``, a subclass of :class:`Swapped`, before the module's class, but after
    ``under`` if the class has it.

    Raises:
        ValueError: the module has a forward in its __dict__, which would hide the class's.
    """
    if "forward" in vars(module):
        raise ValueError(
            f"{name or 'the model'} has a forward of its own, set on the module and not in its "
            "class, which the schedule can't replace"
        )
    if not isinstance(module, front):
        made_of = _made_of(type(module))
        position = made_of.index(under) + 1 if under in made_of else 0
        module.__class__ = _swapped_class(*made_of[:position], front, *made_of[position:])
