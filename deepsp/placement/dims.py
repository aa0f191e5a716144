"""What ops do to dimensions.

For a product: the names of its operands' and result's dimensions, as in einsum. Dimensions of one
name go together, and a name that the result lacks is summed over.

For an op that moves dimensions: its order. For each dimension of the result, it has the operand's
dimension, or None for a new one.
"""

from __future__ import annotations

from collections.abc import Sequence

Labels = tuple[list[list], list]
"""The names of each operand's dimensions, and of the result's."""


def linear(x: int, weight: int) -> Labels:
    """Labels of ``x [..., in]`` and ``weight [out, in]`` or ``[in]``, by numbers of dimensions."""
    rows = [("rows", n) for n in range(x - 1)]
    features = ["features"] * (weight > 1)
    return [[*rows, "summed"], [*features, "summed"]], [*rows, *features]


def matmul(a: int, b: int) -> Labels:
    """Labels of ``a @ b``, by numbers of dimensions; for ``mm``, ``bmm``, ``mv`` and ``dot``,
    too."""
    # Batch dimensions are counted from the back, as broadcasting aligns them.
    left, right = ([("batch", n) for n in range(-max(ndim - 2, 0), 0)] for ndim in (a, b))
    longest = max(left, right, key=len)
    rows, columns = ["rows"] * (a > 1), ["columns"] * (b > 1)
    return [[*left, *rows, "summed"], [*right, "summed", *columns]], [*longest, *rows, *columns]


def einsum(equation: str, ndims: list[int]) -> Labels:
    """Letters are names; the dimensions of ``...`` have numbers, counted from the back."""
    inputs, arrow, out = equation.replace(" ", "").partition("->")
    named = inputs.split(",")
    if not arrow:  # the letters that occur once, in alphabetical order
        letters = sorted(set(inputs) - set(",."))
        out = "..." * ("..." in inputs) + "".join(c for c in letters if inputs.count(c) == 1)
    left_out = [n - len(x.replace("...", "")) for n, x in zip(ndims, named, strict=True)]
    widest = max([n for n, x in zip(left_out, named, strict=True) if "..." in x], default=0)

    def labels(text: str, count: int) -> list:
        front, dots, back = text.partition("...")
        return [*front, *(range(-count, 0) if dots else ()), *back]

    return [labels(x, n) for x, n in zip(named, left_out, strict=True)], labels(out, widest)


def listed(value: int | Sequence[int]) -> list[int]:
    """An argument that is one dimension or several, as a list."""
    return [value] if isinstance(value, int) else list(value)


DimOrder = list[int | None]


def permute(ndim: int, dims: Sequence[int]) -> DimOrder:
    return [d % ndim for d in dims]


def transpose(ndim: int, a: int, b: int) -> DimOrder:
    order = list(range(ndim))
    order[a], order[b] = order[b], order[a]
    return order


def turn(ndim: int, op: str) -> DimOrder:
    """``T`` and ``numpy_T`` reverse all dimensions; ``t``, ``mT``, ``H``, ... swap the last two."""
    if op in ("T", "numpy_T"):
        return list(reversed(range(ndim)))
    return transpose(ndim, -1, -2) if ndim > 1 else list(range(ndim))


def movedim(ndim: int, source: int | Sequence[int], destination: int | Sequence[int]) -> DimOrder:
    pair = [listed(x) for x in (source, destination)]
    moved = {to % ndim: source % ndim for source, to in zip(*pair, strict=True)}
    rest = iter(d for d in range(ndim) if d not in moved.values())
    return [moved[d] if d in moved else next(rest) for d in range(ndim)]


def unsqueeze(ndim: int, dim: int) -> DimOrder:
    dim %= ndim + 1
    return [*range(dim), None, *range(dim, ndim)]


def without(ndim: int, dims: Sequence[int]) -> DimOrder:
    """For ``select``, ``unbind`` and ``squeeze``, which remove these dimensions."""
    gone = [d % ndim for d in dims]
    return [d for d in range(ndim) if d not in gone]
