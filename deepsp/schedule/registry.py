"""Registers how modules are sharded, and the effects of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields

from torch import nn

from deepsp.schedule.placement import Placement


@dataclass(frozen=True)
class Follow:
    """How a parameter that follows another one is sharded, if its parts and units differ.

    Args:
        axis: the dimension along which it is split.
        parts: as in :meth:`deepsp.schedule.Schedule.shard`.
        unit: as in :meth:`deepsp.schedule.Schedule.shard`.
    """

    axis: int
    parts: int | Sequence[int] = 1
    unit: int | Sequence[int] = 1


@dataclass(frozen=True)
class Effect:
    """What follows when parameters of a module are sharded. Everything may be left out: then only
    the parameters change, and the dry run finds the consequences when the model is first called.

    Args:
        also: other parameters that must be sharded with these, and their axis; with the same parts
            and units, or as a :class:`Follow` says. "child.weight" is a child's.
        attributes: int attributes of the module that shrink in the same proportion as the first
            parameter along its axis (``out_features``, ``num_heads``).
        input: the placement that the first input must have; its axis may be negative.
        output: the placement that the output will have.
        input_gradient: the gradient of a replicated input on each rank: "partial", if the ranks'
            gradients must be summed, or "replicated".
        add_after: a parameter that must count once ("bias"): the forward leaves it out, and it is
            added when the output has been reduced.
        forward: a class with another ``forward``, put before the module's class.
        opaque: the dry run doesn't follow the forward and trusts ``output``.
        parts: the parameters' parts, if the schedule gives none.
        unit: the parameters' unit, if the schedule gives none.
    """

    also: Mapping[str, int | Follow] = field(default_factory=dict)
    attributes: Sequence[str] = ()
    input: Placement | None = None
    output: Placement | None = None
    input_gradient: str | None = None
    add_after: str | None = None
    forward: type | None = None
    opaque: bool = False
    parts: int | Sequence[int] | None = None
    unit: int | Sequence[int] | None = None

    def merged(self, other: Effect, name: str) -> Effect:
        """Merges two effects, of parameters of one module that are sharded in separate steps.

        Args:
            other: the later one.
            name: of the module, for errors.

        Raises:
            ValueError: the two contradict each other.
        """
        values = {}
        for f in fields(self):
            mine, its = getattr(self, f.name), getattr(other, f.name)
            if f.name == "also":
                values[f.name] = {**mine, **its}
            elif f.name == "attributes":
                values[f.name] = tuple(dict.fromkeys((*mine, *its)))
            elif f.name == "opaque":
                values[f.name] = mine or its
            elif None not in (mine, its) and mine != its and f.name not in ("parts", "unit"):
                raise ValueError(
                    f"{name} is sharded in two ways that contradict each other: its {f.name} would "
                    f"be {mine} and {its}"
                )
            else:
                values[f.name] = its if mine is None else mine
        return Effect(**values)


Method = Callable[[nn.Module, tuple[str, ...], int], Effect]

_methods: dict[type | str, Method] = {}


def register_shard_method(*classes: type | str) -> Callable[[Method], Method]:
    """Registers how modules of a class are sharded.

    Args:
        classes: module classes, or their names, "package.module.Class", where importing them would
            cost too much. Subclasses with the same ``forward`` are sharded in the same way.

    Returns:
        A decorator for ``method(module, names, axis) -> Effect``. ``names`` are the parameters that
        the schedule names, and ``axis`` is not negative. The method raises a ValueError for what it
        can't do. ::

            @deepsp.register_shard_method(MyLinear)
            def shard_my_linear(module, names, axis):
                return Effect(also={"bias": 0}, attributes=["out_features"], output=Shard(-1))

    Raises:
        ValueError: ``classes`` has something else.
    """

    def register(method: Method) -> Method:
        for cls in classes:
            if not isinstance(cls, str) and not (
                isinstance(cls, type) and issubclass(cls, nn.Module)
            ):
                raise ValueError(
                    f"expected classes to be module classes or their names, got {cls!r}"
                )
            _methods[cls] = method
        return method

    return register


def method_of(name: str, module: nn.Module) -> Method:
    """The shard method of a module.

    Raises:
        ValueError: none is registered.
    """
    for cls in type(module).__mro__:
        method = _methods.get(cls) or _methods.get(f"{cls.__module__}.{cls.__qualname__}")
        if method is not None and type(module).forward is cls.forward:
            return method
    cls = type(module).__name__
    raise ValueError(
        f"{name or 'the model'} is a {cls}, for which no shard method is registered. Register "
        f"one:\n     @deepsp.register_shard_method({cls})\n"
        f"    def shard_{cls.lower()}(module, names, axis):\n"
        "        return Effect(also=..., attributes=..., output=...)  # deepsp.schedule.Effect"
    )
