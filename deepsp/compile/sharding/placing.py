"""Where the tokens are in a replicated tensor: found by its sizes. A wrong guess costs time,
not numbers, since whoever needs another part cuts it from the full tensor."""

from __future__ import annotations

import sympy
from torch import fx

from deepsp.compile.sharding.forms import Value
from deepsp.compile.sharding.nodes import is_tensor
from deepsp.compile.sharding.tokens import Size, Tokens, same, size_of


def placed(walk, node: fx.Node, values: list[Value]) -> Tokens | None:
    """The only dimension that is as long as a known sequence, or longer or shorter by some
    tokens: ids that were shifted, a mask, an arange."""
    found = []
    for dim, n in enumerate(walk.shape_of(node)):
        if isinstance(n, int):
            # Any size may be as large: only where an operand's tokens were can they be.
            if any(isinstance(v.tokens, Tokens) and _only(walk, node, v, dim) for v in values):
                found.append((dim, n))
        elif any(same(n, x) for x in walk.lengths) or (
            values and any(_differ_by_some(n, x) for x in walk.lengths)
        ):
            found.append((dim, n))
    if len(found) != 1:
        return None
    dim, length = found[0]
    return Tokens(dim, length, walk.sequence(length))


def _only(walk, node: fx.Node, operand: Value, dim: int) -> bool:
    """Whether a result differs from an operand in its number of tokens alone."""
    shape, before = walk.shape_of(node), list(walk.env[operand.full].shape)
    if operand.tokens.dim != dim or len(before) != len(shape) or not operand.tokens.alone:
        return False
    return shape[dim] > 1 and all(
        same(size_of(a), b) for d, (a, b) in enumerate(zip(before, shape, strict=True)) if d != dim
    )


def of_pairs(walk, node: fx.Node) -> bool:
    """Whether it has a number for each pair of tokens, as a mask has: every rank has it in full,
    if it has what it is made of."""
    if not is_tensor(node.meta["val"]):
        return False  # several results
    shape = walk.shape_of(node)
    return sum(any(same(n, x) for x in walk.lengths) for n in shape if n != 1) > 1


def _differ_by_some(a: Size, b: Size) -> bool:
    difference = sympy.expand(sympy.sympify(a) - sympy.sympify(b))
    return bool(difference.is_number)
