"""A cache of keys and values that a model returns in training, where nobody reads it.

Each rank has the keys of its tokens, and gathering them all would cost what sharding saves. So a
compiled model returns an :class:`Absent` in the place of each, which says so when it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor, fx

from deepsp.compile.sharding.nodes import has_tensor

# From keys and values to what a cache keeps of them.
_MOVES = {
    torch.ops.aten.cat.default,
    torch.ops.aten.clone.default,
    torch.ops.aten.contiguous.default,
    torch.ops.aten.expand.default,
    torch.ops.aten.reshape.default,
    torch.ops.aten.slice.Tensor,
    torch.ops.aten.transpose.int,
    torch.ops.aten.unsqueeze.default,
    torch.ops.aten.view.default,
}
# What wrappers (DDP, FSDP) ask of a model's outputs, whatever they are for.
_ASKED = {"requires_grad", "grad_fn", "is_leaf", "device", "dtype", "layout"}


class Absent(Tensor):
    """In place of a tensor that wasn't gathered: what is done with it raises ValueError."""

    @staticmethod
    def __new__(cls) -> Absent:
        return torch.empty(0, dtype=torch.float32).as_subclass(cls)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        name = getattr(getattr(function, "__self__", None), "__name__", "")
        if getattr(function, "__name__", "") == "__get__" and name in _ASKED:
            return super().__torch_function__(function, types, args, kwargs or {})
        raise ValueError(
            "expected no use of the keys or values of attention that a compiled model returns in "
            "training, a cache: each rank has those of its own tokens, and they aren't gathered; "
            "set use_cache = False in the config that the model was made with (and those inside "
            "of it), or compute in the model what you need of them"
        )

    def __repr__(self, *, tensor_contents=None) -> str:
        return "Absent(keys or values, which aren't gathered in training)"


def found(walk, outputs: Collection[fx.Node]) -> set[fx.Node]:
    """Those of a graph's outputs that are keys and values, with a gradient, of local tokens."""

    def source(node: fx.Node) -> fx.Node:
        while node.target in _MOVES and node.args:
            node = node.args[0][-1] if isinstance(node.args[0], (list, tuple)) else node.args[0]
        return node

    attended = {source(n) for n in walk.attended}
    tensors = [n for n in outputs if has_tensor(n.meta.get("val"))]
    return {
        n
        for n in tensors
        if source(n) in attended
        and walk.values[n].mine is not None
        and walk.differentiated(walk.values[n].mine)
    }


def without(compiled: Callable, places: Collection[int]) -> Callable:
    """``compiled`` with an :class:`Absent` at these places of what it returns."""
    if not places:
        return compiled

    def run(*args):
        outputs = list(compiled(*args))
        for place in places:
            outputs[place] = Absent()
        return tuple(outputs)

    return run
