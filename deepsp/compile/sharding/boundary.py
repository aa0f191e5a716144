"""What enters a graph and leaves it, besides tokens.

Weights that are sharded already are gathered in the user's graph. The gradient of a gathered weight
is summed over its group by the gather itself. Where that group holds all ranks of the sequence, the
sum over them is in that: the weight's gradient is to be this rank's part of it, whatever
``gradients`` says. Where it holds none of them but this one (data ranks, say), a gathered weight is
like any other value that all ranks have. Other collectives between the sequence's ranks are
refused: what their gradients would be isn't known.

The gradients of other parameters are summed over the ranks in buckets, or left partial.

A model may return a cache of keys and values in training, where nobody reads it. Each rank has the
keys of its tokens, and gathering them all would cost what sharding saves. So a compiled model
returns an :class:`Absent` in the place of each, which says so when it is used."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from deepsp.compile.sharding.forms import Forms, has_tensor, is_differentiated, is_random
from deepsp.compile.sharding.inputs import _PREFIX
from deepsp.compile.sharding.report import CannotShard

_ours, _c10d = torch.ops.deepsp, torch.ops._c10d_functional
COMMUNICATE = ("deepsp", "c10d", "_c10d_functional", "_c10d_functional_autograd")
GATHERS = {
    _ours.gather_cast.default,
    _ours.gather_cast_coalesced.default,
    _ours.gather_through_float8.default,
    _c10d.all_gather_into_tensor.default,
    _c10d.all_gather_into_tensor_coalesced.default,
    torch.ops._c10d_functional_autograd.all_gather_into_tensor.default,
}
# What stands between a gather and what computes with it.
_PASSED = {operator.getitem, _c10d.wait_tensor.default}


def _group_of(node: fx.Node) -> str | None:
    """The name of the group that an op communicates in."""
    if getattr(node.target, "namespace", "") not in COMMUNICATE:
        return None
    for i, argument in enumerate(node.target._schema.arguments):
        if argument.name == "group_name":
            return node.args[i] if i < len(node.args) else node.kwargs[argument.name]
    return None


def summed_by_gathers(
    graph: fx.Graph, group_name: str, differentiated: set[fx.Node]
) -> set[fx.Node]:
    """The nodes of a graph whose gradients gathers sum over the sequence group: shards, and what
    was gathered of them, up to where it is computed with. ``differentiated``: placeholders.

    Raises:
        CannotShard: a gather over some, but not all, of the sequence's ranks; of more than a
            shard, or of one that is used otherwise, too; another collective between them.
    """
    resolve = torch._C._distributed_c10d._resolve_process_group
    of_sequence = set(dist.get_process_group_ranks(resolve(group_name)))
    gathered: set[fx.Node] = set()
    shards: set[fx.Node] = set()
    for node in graph.nodes:
        if node.target in _PASSED and node.all_input_nodes[0] in gathered:
            gathered.add(node)
            continue
        name = _group_of(node)
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
    """What a shard is made of, without what has no gradient: one parameter's shard, cast, viewed
    or scaled."""
    behind, stack = [], [shard]
    while stack:
        node = stack.pop()
        if node not in behind:
            behind.append(node)
            stack += node.all_input_nodes
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
    there = set(forms.new.nodes)
    for share, full in list(forms.parameters.items()):
        if share not in reached:
            if share in there:
                share.replace_all_uses_with(full)
            del forms.parameters[share]


def settle_gradients(forms: Forms) -> None:
    """Gives parameters that are used with tokens the gradients that were asked for."""
    if forms.gradients == "local":
        for share, full in forms.parameters.items():
            share.replace_all_uses_with(full)
        return
    if forms.gradients == "mean":
        for share, full in forms.parameters.items():
            with forms.new.inserting_before(share):
                new = forms.call(_ours._scale_gradient.default, full, float(forms.size))
            share.replace_all_uses_with(new)
        return
    open_: dict[tuple, list[fx.Node]] = {}
    filled: dict[tuple, int] = {}
    for share, full in forms.parameters.items():
        value = forms.env[full]
        key = (value.dtype, value.device)
        if key not in open_ or filled[key] >= BUCKET_BYTES:
            if key in open_:
                _sum_bucket(forms, open_[key])
            open_[key], filled[key] = [], 0
        open_[key].append(share)
        filled[key] += value.nbytes
    for bucket in open_.values():
        _sum_bucket(forms, bucket)


def _sum_bucket(forms: Forms, shares: list[fx.Node]) -> None:
    last = forms.new.find_nodes(op="placeholder")[-1]
    with forms.new.inserting_before(last.next):
        started = forms.replicate_start([forms.parameters[s] for s in shares])
    with forms.new.inserting_before(shares[0]):
        for share, summed in zip(shares, forms.replicate_wait(*started), strict=True):
            share.replace_all_uses_with(summed)


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


def caches_of(walk, outputs: Collection[fx.Node]) -> set[fx.Node]:
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


def without_caches(compiled: Callable, places: Collection[int]) -> Callable:
    """``compiled`` with an :class:`Absent` at these places of what it returns."""
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
    there = set(walk.new.nodes)
    repeated = [old for new, old in walk.repeated.items() if new in there]
    if walk.lengths and repeated and not walk.worked & there:
        raise CannotShard(
            "every rank would compute all of it, and nothing in this graph would be sharded, since "
            "no input is known to hold tokens. deepsp.prepare_inputs marks them; indexing by "
            "anything but a slice loses the mark",
            repeated[0],
        )


def role_of(node: fx.Node) -> tuple[str, int] | None:
    """The role and the sequence's dimension of a placeholder, if it was marked."""
    tag = node.meta.get("tensor_dict", {}).get("tag")
    if not isinstance(tag, str) or not tag.startswith(f"{_PREFIX}:"):
        return None
    _, role, dim = tag.split(":")
    return role, int(dim)
