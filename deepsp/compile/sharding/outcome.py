"""What is wrong with a whole graph though each of its ops is right."""

from __future__ import annotations

import torch
from torch import fx

from deepsp.compile.sharding.messages import CannotShard

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


def check_caches(walk) -> None:
    """Raises if keys and values are returned in training, where nobody has a use for them: each
    would be gathered."""

    def source(node: fx.Node) -> fx.Node:
        while node.target in _MOVES and node.args:
            node = node.args[0][-1] if isinstance(node.args[0], (list, tuple)) else node.args[0]
        return node

    attended = {source(n) for n in walk.attended}
    for node in walk.current.all_input_nodes:
        new = walk.values[node].mine
        if source(node) in attended and new is not None and walk.differentiated(new):
            raise CannotShard(
                "the graph returns the keys or values of attention, a cache, in training; set "
                "use_cache = False in the model's config, or pass use_cache=False",
                node,
            )


def check_sharded(walk) -> None:
    """Raises if every rank would do all of the work."""
    there = set(walk.new.nodes)
    repeated = [old for new, old in walk.repeated.items() if new in there]
    if walk.lengths and repeated and not walk.worked & there:
        raise CannotShard(
            "every rank would compute all of it, and nothing in this graph would be sharded, since "
            "no input is known to hold tokens. deepsp.prepare_inputs marks them; indexing by "
            "anything but a slice loses the mark",
            repeated[0],
        )
