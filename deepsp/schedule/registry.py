"""Which modules can be sharded, and what follows from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields

from torch import nn

from deepsp.schedule.placement import Placement


@dataclass(frozen=True)
class Follow:
    """How a parameter is sharded that follows another, where not in the same parts and units."""

    axis: int
    parts: int | Sequence[int] = 1
    unit: int | Sequence[int] = 1


@dataclass(frozen=True)
class Effect:
    """What follows when parameters of a module are sharded. Everything may be left out: then only
    the parameters change, and what that does is found when the model is first called.

    Args:
        also: other parameters that must be sharded with these, and along which axis; in the same
            parts and units, or as a :class:`Follow` says. "child.weight" is a child's.
        attributes: whole numbers of the module that shrink in the same proportion as the first
            parameter along its axis (``out_features``, ``num_heads``).
        input, output: the placement that the first input must have, and the output will; axes may
            be negative.
        input_gradient: what the gradient of a whole input is on each rank: "partial", where the
            ranks' gradients must be summed, or "replicated".
        add_after: a parameter that the forward leaves out, as it must count once: it is added when
            the output has been reduced ("bias").
        forward: a class with another ``forward``, put in front of the module's class.
        opaque: what the forward does isn't followed: ``output`` is taken for it.
        parts, unit: of the parameters, where the schedule says nothing.
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
        """Of both, where parameters of one module are sharded one after another."""
        values = {}
        for f in fields(self):
            mine, theirs = getattr(self, f.name), getattr(other, f.name)
            if f.name == "also":
                values[f.name] = {**mine, **theirs}
            elif f.name == "attributes":
                values[f.name] = tuple(dict.fromkeys((*mine, *theirs)))
            elif f.name == "opaque":
                values[f.name] = mine or theirs
            elif None not in (mine, theirs) and mine != theirs and f.name not in ("parts", "unit"):
                raise ValueError(
                    f"{name} is sharded in two ways that don't go together: its {f.name} would be "
                    f"{mine} and {theirs}"
                )
            else:
                values[f.name] = theirs if mine is None else mine
        return Effect(**values)


Method = Callable[[nn.Module, tuple[str, ...], int], Effect]

_methods: dict[type | str, Method] = {}


def register_shard_method(*classes: type | str) -> Callable[[Method], Method]:
    """Says how modules of a class are sharded.

    Args:
        classes: module classes, or their names, "package.module.Class", where importing them would
            cost too much. Subclasses with the same ``forward`` are sharded in the same way.

    Returns:
        A decorator for ``method(module, names, axis) -> Effect``. ``names``: the parameters that
        the schedule names; ``axis``: along which, not negative. It raises a ValueError for what
        it can't do. ::

            @deepsp.register_shard_method(MyLinear)
            def shard_my_linear(module, names, axis):
                return Effect(also={"bias": 0}, attributes=["out_features"], output=Sharded(-1))
    """

    def register(method: Method) -> Method:
        for cls in classes:
            if not isinstance(cls, str) and not (
                isinstance(cls, type) and issubclass(cls, nn.Module)
            ):
                raise ValueError(f"classes has {cls!r}; a class of modules or its name is right")
            _methods[cls] = method
        return method

    return register


def method_of(name: str, module: nn.Module) -> Method:
    """How a module is sharded.

    Raises:
        ValueError: nobody has said so.
    """
    for cls in type(module).__mro__:
        method = _methods.get(cls) or _methods.get(f"{cls.__module__}.{cls.__qualname__}")
        if method is not None and type(module).forward is cls.forward:
            return method
    cls = type(module).__name__
    raise ValueError(
        f"{name or 'the model'} is a {cls}, of which nobody has said how it is sharded. Say so:\n"
        f"    @deepsp.register_shard_method({cls})\n"
        f"    def shard_{cls.lower()}(module, names, axis):\n"
        "        return Effect(also=..., attributes=..., output=...)  # deepsp.schedule.Effect"
    )
