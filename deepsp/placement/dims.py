"""What ops do to dimensions, said once: for the compile pass and for the schedule's dry run.

Of a product, the names of its operands' dimensions and of its result's, as einsum has them:
dimensions of one name go together, and a name that the result doesn't have is summed over.

Of an op that moves dimensions, its order: which of the operand's dimensions each of the result's
is, None for a new one.

What else the two need isn't shared: the compile pass makes new nodes, of sizes that are symbols;
the dry run follows parts, sums and gradients, and explains what to write into the schedule.
"""

from __future__ import annotations

from collections.abc import Sequence

Labels = tuple[list[list], list]
"""The names of every operand's dimensions, and of the result's."""


def linear(x: int, weight: int) -> Labels:
    """Of ``x [..., in]`` and ``weight [out, in]`` or ``[in]``, with so many dimensions."""
    rows = [("rows", n) for n in range(x - 1)]
    features = ["features"] * (weight > 1)
    return [[*rows, "summed"], [*features, "summed"]], [*rows, *features]


def matmul(a: int, b: int) -> Labels:
    """Of ``a @ b`` with so many dimensions: ``mm``, ``bmm``, ``mv`` and ``dot``, too."""
    # Batch dimensions are counted from the back, as broadcasting aligns them.
    left, right = ([("batch", n) for n in range(-max(ndim - 2, 0), 0)] for ndim in (a, b))
    longest = max(left, right, key=len)
    rows, columns = ["rows"] * (a > 1), ["columns"] * (b > 1)
    return [[*left, *rows, "summed"], [*right, "summed", *columns]], [*longest, *rows, *columns]


def einsum(equation: str, ndims: list[int]) -> Labels:
    """Letters are names; what ``...`` stands for has numbers, counted from the back."""
    inputs, arrow, out = equation.replace(" ", "").partition("->")
    named = inputs.split(",")
    if not arrow:  # the letters that stand once, in alphabetical order
        letters = sorted(set(inputs) - set(",."))
        out = "..." * ("..." in inputs) + "".join(c for c in letters if inputs.count(c) == 1)
    left_out = [n - len(x.replace("...", "")) for n, x in zip(ndims, named, strict=True)]
    widest = max([n for n, x in zip(left_out, named, strict=True) if "..." in x], default=0)

    def labels(text: str, count: int) -> list:
        front, dots, back = text.partition("...")
        return [*front, *(range(-count, 0) if dots else ()), *back]

    return [labels(x, n) for x, n in zip(named, left_out, strict=True)], labels(out, widest)


Order = list[int | None]


def permute(ndim: int, dims: Sequence[int]) -> Order:
    return [d % ndim for d in dims]


def transpose(ndim: int, a: int, b: int) -> Order:
    order = list(range(ndim))
    order[a], order[b] = order[b], order[a]
    return order


def turn(ndim: int, op: str) -> Order:
    """``T`` and ``numpy_T`` turn all dimensions; ``t``, ``mT``, ``H`` and the like the last two."""
    if op in ("T", "numpy_T"):
        return list(reversed(range(ndim)))
    return transpose(ndim, -1, -2) if ndim > 1 else list(range(ndim))


def movedim(ndim: int, source: int | Sequence[int], destination: int | Sequence[int]) -> Order:
    pair = [[x] if isinstance(x, int) else x for x in (source, destination)]
    moved = {to % ndim: of % ndim for of, to in zip(*pair, strict=True)}
    rest = iter(d for d in range(ndim) if d not in moved.values())
    return [moved[d] if d in moved else next(rest) for d in range(ndim)]


def unsqueeze(ndim: int, dim: int) -> Order:
    dim %= ndim + 1
    return [*range(dim), None, *range(dim, ndim)]


def without(ndim: int, dims: Sequence[int]) -> Order:
    """Of ``select``, ``unbind`` and ``squeeze``: these dimensions are no longer there."""
    gone = [d % ndim for d in dims]
    return [d for d in range(ndim) if d not in gone]
