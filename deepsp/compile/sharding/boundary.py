"""Inputs and outputs of a graph besides tokens: weights, their gradients, and caches.

The user's graph gathers weights that are sharded already, and the gather sums the gradient of the
gathered weight over its group. If that group holds all ranks of the sequence, it sums over them,
too: the gradient that the gather gets must be this rank's partial one, whatever ``gradients`` says.
If the group holds no other rank of the sequence (data ranks, say), a gathered weight is like any
other replicated value. Other collectives between the sequence's ranks are refused, because the
placement of their gradients isn't known.

Gradients of other parameters are summed over the ranks in buckets, or left partial.

In training, a model may return a cache of keys and values that isn't used. Each rank has the keys
of its tokens, and gathering all would cost what sharding saves. So a compiled model returns an
:class:`Absent` in place of each, which raises when it is used."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from deepsp.compile.sharding.forms import Forms
from deepsp.compile.sharding.inputs import MARK
from deepsp.compile.sharding.nodes import (
    group_of,
    has_tensor,
    is_differentiated,
    is_random,
    sources_of,
)
from deepsp.compile.sharding.report import CannotShard

_ours, _c10d = torch.ops.deepsp, torch.ops._c10d_functional
GATHERS = {
    _ours.gather_cast.default,
    _ours.gather_cast_coalesced.default,
    _ours.gather_through_float8.default,
    _c10d.all_gather_into_tensor.default,
    _c10d.all_gather_into_tensor_coalesced.default,
    torch.ops._c10d_functional_autograd.all_gather_into_tensor.default,
}
# Nodes between a gather and the ops that use the gathered tensor.
_PASSED = {operator.getitem, _c10d.wait_tensor.default}


def summed_by_gathers(
    graph: fx.Graph, group_name: str, differentiated: set[fx.Node]
) -> set[fx.Node]:
    """The nodes whose gradients a gather sums over the sequence group: shards and gathered
    tensors. ``differentiated``: placeholders that require grad.

    Raises:
        CannotShard: a gather over some, but not all, of the sequence's ranks; a gather of more than
            one shard; another use of a shard; another collective between the ranks.
    """
    resolve = torch._C._distributed_c10d._resolve_process_group
    of_sequence = set(dist.get_process_group_ranks(resolve(group_name)))
    gathered: set[fx.Node] = set()
    shards: set[fx.Node] = set()
    for node in graph.nodes:
        if node.target in _PASSED and node.all_input_nodes[0] in gathered:
            gathered.add(node)
            continue
        name = group_of(node)
        ranks = set() if name is None else set(dist.get_process_group_ranks(resolve(name)))
        common = ranks & of_sequence
        if len(common) < 2:
            continue
        if node.target not in GATHERS:
            raise CannotShard(
                "it communicates with other ranks of the sequence group; the model must be written "
                "for one device, except for gathers of weights",
                node,
            )
        if common != of_sequence:
            raise CannotShard(
                "expected it to gather a weight over all ranks of the sequence group, "
                f"{sorted(of_sequence)}, or over this one only, got ranks {sorted(ranks)}",
                node,
            )
        gathered.add(node)
        for shard in node.all_input_nodes:
            shards |= _made_of(shard, node, differentiated)
    for node in shards:
        for user in node.users:
            if user not in shards | gathered and has_tensor(user.meta.get("val")):
                raise CannotShard(
                    f"it uses the shard {node.name}, which is gathered elsewhere; use the gathered "
                    "tensor",
                    user,
                )
    return gathered | shards


def _made_of(shard: fx.Node, gather: fx.Node, differentiated: set[fx.Node]) -> set[fx.Node]:
    """The nodes that compute a shard from one parameter by casts, views or scales; without those
    that have no gradient."""
    behind = list(sources_of(shard))
    parameters = [n for n in behind if n in differentiated]
    random = [n for n in behind if is_random(n.target)]
    if len(parameters) > 1 or random:
        names = ", ".join(n.name for n in (parameters if len(parameters) > 1 else random))
        raise CannotShard(
            f"expected it to gather a parameter's shard, cast or viewed, got a tensor computed "
            f"from {names}",
            gather,
        )
    reached = set(parameters)
    for node in sorted(behind):
        if reached & set(node.all_input_nodes):
            reached.add(node)
    return reached


BUCKET_BYTES = 25 << 20
_ours = torch.ops.deepsp


def drop_unused_parameters(forms: Forms) -> None:
    """Parameters that no output is differentiated by get no gradient, as in one process."""
    reached, stack = set(), [forms.new.output_node()]
    while stack:
        for node in stack.pop().all_input_nodes:
            leaves = tree_leaves(forms.env[node])
            if node not in reached and any(is_differentiated(x) for x in leaves):
                reached.add(node)
                stack.append(node)
    nodes = set(forms.new.nodes)
    for partial, full in list(forms.parameters.items()):
        if partial not in reached:
            if partial in nodes:
                partial.replace_all_uses_with(full)
            del forms.parameters[partial]


def settle_gradients(forms: Forms) -> None:
    """Gives parameters that are used with tokens the gradients that ``gradients`` asks for."""
    if forms.gradients == "local":
        for partial, full in forms.parameters.items():
            partial.replace_all_uses_with(full)
        return
    if forms.gradients == "mean":
        for partial, full in forms.parameters.items():
            with forms.new.inserting_before(partial):
                new = forms.call(_ours._scale_gradient.default, full, float(forms.size))
            partial.replace_all_uses_with(new)
        return
    open_: dict[tuple, list[fx.Node]] = {}
    filled: dict[tuple, int] = {}
    for partial, full in forms.parameters.items():
        value = forms.env[full]
        key = (value.dtype, value.device)
        if key not in open_ or filled[key] >= BUCKET_BYTES:
            if key in open_:
                _sum_bucket(forms, open_[key])
            open_[key], filled[key] = [], 0
        open_[key].append(partial)
        filled[key] += value.nbytes
    for bucket in open_.values():
        _sum_bucket(forms, bucket)


def _sum_bucket(forms: Forms, partials: list[fx.Node]) -> None:
    last = forms.new.find_nodes(op="placeholder")[-1]
    with forms.new.inserting_before(last.next):
        started = forms.replicate_start([forms.parameters[n] for n in partials])
    with forms.new.inserting_before(partials[0]):
        for partial, summed in zip(partials, forms.replicate_wait(*started), strict=True):
            partial.replace_all_uses_with(summed)


# Ops between keys and values and their copies in a cache.
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
# Attributes that wrappers (DDP, FSDP) read of a model's outputs, without using them.
_ASKED = {"requires_grad", "grad_fn", "is_leaf", "device", "dtype", "layout"}


class Absent(Tensor):
    """In place of a tensor that wasn't gathered: any use of it raises ValueError."""

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


def caches_of(walk, outputs: Collection[fx.Node]) -> set[fx.Node]:
    """The outputs that are keys and values of local tokens, with a gradient."""

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
        and walk.values[n].local is not None
        and walk.differentiated(walk.values[n].local)
    }


def without_caches(compiled: Callable, places: Collection[int]) -> Callable:
    """``compiled``, but with an :class:`Absent` at these places of its outputs."""
    if not places:
        return compiled

    def run(*args):
        outputs = list(compiled(*args))
        for place in places:
            outputs[place] = Absent()
        return tuple(outputs)

    return run


def check_sharded(walk) -> None:
    """Raises if every rank would do all of the work."""
    nodes = set(walk.new.nodes)
    repeated = [old for new, old in walk.repeated.items() if new in nodes]
    if walk.lengths and repeated and not walk.worked & nodes:
        raise CannotShard(
            "every rank would compute all of it, and nothing in this graph would be sharded, since "
            "no input is known to hold tokens. deepsp.prepare_inputs marks them; indexing by "
            "anything but a slice loses the mark",
            repeated[0],
        )


def role_of(node: fx.Node) -> tuple[str, int] | None:
    """The role and the sequence's dimension of a placeholder, if it was marked."""
    tag = node.meta.get("tensor_dict", {}).get("tag")
    if not isinstance(tag, str) or not tag.startswith(f"{MARK}:"):
        return None
    _, role, dim = tag.split(":")
    return role, int(dim)
