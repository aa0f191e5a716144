"""Helpers for passes over graphs: what a node does (compute, communicate, move, cast), its bytes,
adding a node with its shapes, and ordering a node after others."""

from __future__ import annotations

import operator

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.fx_passes.control_dependencies import control_deps, preserve_node_ordering
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree
from torch.utils._ordered_set import OrderedSet

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

WAIT = c10d.wait_tensor.default
OURS = "deepsp"
"""The namespace of deepsp's ops."""
CONVERT = torch.ops.prims.convert_element_type.default

_COMPUTE = {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten._scaled_mm.default,
    aten._grouped_mm.default,
    aten._scaled_grouped_mm.default,
}
# Words in the names of attention ops: PyTorch's, FlexAttention, deepsp's, other custom ops.
_ATTENTION = ("scaled_dot_product", "attention", "attn")

_FUNCTIONALIZED = (
    torch.ops.higher_order.auto_functionalized,
    torch.ops.higher_order.auto_functionalized_v2,
)

# Views, and below them copies: their results are elements of their inputs. Except for view.dtype, a
# cast before them gives the same bits as a cast after them.
VIEWS = {
    operator.getitem,
    aten.alias.default,
    aten.as_strided.default,
    aten.expand.default,
    aten.narrow.default,
    aten.permute.default,
    aten.reshape.default,
    aten.select.int,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.t.default,
    aten.transpose.int,
    aten.unbind.int,
    aten.unsqueeze.default,
    aten.view.default,
    aten._unsafe_view.default,
    aten.view.dtype,
}
_COPIES = {aten.cat.default, aten.clone.default, aten.constant_pad_nd.default}
_SIZES = {aten.sym_size.int, aten.sym_stride.int, aten.sym_numel.default}


# --------------------------------------------------------------------------- the kind of a node


def _call_of(node: fx.Node) -> fx.Node:
    """The node, or the call inside it if it is tied (``control_deps``)."""
    if node.target is control_deps:
        inner = getattr(node.graph.owning_module, node.args[1].target)
        return next(n for n in inner.graph.nodes if n.op == "call_function")
    return node


def target_of(node: fx.Node):
    """The target of a node's call, also if the node is tied."""
    return _call_of(node).target


def is_op(node: fx.Node, name: str) -> bool:
    """Whether the node calls deepsp's op of this name, which needn't be registered."""
    target = target_of(node)
    return isinstance(target, torch._ops.OpOverload) and (
        target.namespace == OURS and target._opname == name
    )


def computes(node: fx.Node) -> bool:
    """Whether the node is a matrix product or attention: long enough to hide a collective."""
    call = _call_of(node)
    # A functionalized custom op is the first argument of the call.
    target = call.args[0] if call.target in _FUNCTIONALIZED else call.target
    if target in _COMPUTE:
        return True
    if not isinstance(target, (torch._ops.OpOverload, torch._ops.HigherOrderOperator)):
        return False
    named_so = any(word in target.name() for word in _ATTENTION)
    # A check has no output.
    gives = node.meta.get("val") is not None
    return named_so and gives and not is_collective(node)


def is_collective(node: fx.Node) -> bool:
    """Whether the node launches a collective."""
    target = target_of(node)
    if not isinstance(target, torch._ops.OpOverload) or target is WAIT:
        return False
    if target.namespace == OURS:
        return any(isinstance(a.type, torch.StringType) for a in target._schema.arguments) and (
            not target._opname.endswith("_wait")
        )
    return target.namespace in ("_c10d_functional", "_c10d_functional_autograd")


def is_wait(node: fx.Node) -> bool:
    target = target_of(node)
    return target is WAIT or (
        isinstance(target, torch._ops.OpOverload)
        and target.namespace == OURS
        and target._opname.endswith("_wait")
    )


def writes(node: fx.Node) -> bool:
    """Whether the node writes to its arguments, or draws from a generator."""
    target = target_of(node)
    return isinstance(target, torch._ops.OpOverload) and (
        (target._schema.is_mutable and not is_wait(node))
        or torch.Tag.nondeterministic_seeded in target.tags
    )


def moves(node: fx.Node) -> bool:
    """Whether the node's result consists of elements of its inputs (and zeros)."""
    if node.target is aten.constant_pad_nd.default:
        return len(node.args) < 3 or node.args[2] == 0
    return node.target in VIEWS or node.target in _COPIES


def asks_sizes(node: fx.Node) -> bool:
    return node.target in _SIZES


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def cast_to(node: fx.Node) -> torch.dtype | None:
    """The dtype that a node casts to, if it does nothing else."""
    if node.target is CONVERT:
        return node.args[1]
    if node.target is aten._to_copy.default:
        passed = {k: v for k, v in node.kwargs.items() if v is not None and v is not False}
        return passed.get("dtype") if set(passed) == {"dtype"} else None
    return None


def is_narrower(dtype: torch.dtype | None, than: torch.dtype) -> bool:
    """Whether both are floating-point, and the first has fewer bytes."""
    return (
        dtype is not None
        and dtype.is_floating_point
        and than.is_floating_point
        and dtype.itemsize < than.itemsize
    )


# -------------------------------------------------------------------------------------- values


def count(size) -> int:
    """A size as a number; for a symbolic one, its value when the graph was traced."""
    return size if isinstance(size, int) else size.node.hint or 0


def bytes_of(node: fx.Node) -> int:
    """The bytes of a node's tensor, or list of tensors."""
    values = [v for v in pytree.tree_leaves(node.meta["val"]) if isinstance(v, Tensor)]
    return sum(v.element_size() * count(v.numel()) for v in values)


def tensor_inputs(node: fx.Node) -> list[fx.Node]:
    """The inputs that are tensors."""
    return [
        n
        for n in node.all_input_nodes
        if any(isinstance(v, Tensor) for v in pytree.tree_leaves(n.meta.get("val")))
    ]


def same_layout(a: Tensor, b: Tensor) -> bool:
    """Same dtype, sizes and strides, as far as is known without new guards."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_eq

    return a.dtype == b.dtype and all(
        len(x) == len(y) and all(statically_known_true(sym_eq(i, j)) for i, j in zip(x, y))  # noqa: B905
        for x, y in ((a.shape, b.shape), (a.stride(), b.stride()))
    )


def _fake_inputs(node: fx.Node):
    """The node's arguments as fake tensors of one mode."""
    mode = None

    def value_of(n: fx.Node):
        if "val" not in n.meta:
            raise ValueError(
                f"expected node {n.name!r} to have meta['val'], which it lacks; trace the graph "
                "with make_fx or AOTAutograd, or run FakeTensorProp first"
            )
        return n.meta["val"]

    for n in node.all_input_nodes:
        for leaf in pytree.tree_leaves(value_of(n)):
            if mode is None and isinstance(leaf, FakeTensor):
                mode = leaf.fake_mode
    mode = mode or FakeTensorMode()

    def of_mode(x):
        if not isinstance(x, Tensor) or getattr(x, "fake_mode", None) is mode:
            return x
        with mode:
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)

    def convert(n: fx.Node):
        return pytree.tree_map(of_mode, value_of(n))

    return mode, map_arg(node.args, convert), map_arg(node.kwargs, convert)


def add(target, args: tuple, kwargs: dict | None = None, *, before: fx.Node, like: fx.Node):
    """A new node, with its ``meta["val"]``; the rest of its meta is that of ``like``."""
    with before.graph.inserting_before(before):
        node = before.graph.call_function(target, args, kwargs or {})
    unlike = ("val", "tensor_meta", "eager_input_vals", "example_value")
    node.meta = {key: x for key, x in like.meta.items() if key not in unlike}
    revalue(node)
    return node


def revalue(node: fx.Node) -> None:
    """Computes a node's meta["val"], for a new node or new inputs."""
    mode, args, kwargs = _fake_inputs(node)
    with mode, enable_python_dispatcher():
        node.meta["val"] = node.target(*args, **kwargs)
    node.meta.pop("tensor_meta", None)


def copy_with(node: fx.Node, inputs: dict[fx.Node, fx.Node], before: fx.Node | None = None):
    """A copy of a node, inserted before it (or before ``before``), that reads other inputs."""
    return add(
        node.target,
        map_arg(node.args, lambda n: inputs.get(n, n)),
        map_arg(node.kwargs, lambda n: inputs.get(n, n)),
        before=before or node,
        like=node,
    )


def sizes(node: fx.Node, before: fx.Node) -> list[int | fx.Node]:
    """The sizes of a node's tensor as arguments: numbers, or nodes that give them."""
    return [
        size
        if isinstance(size, int)
        else add(aten.sym_size.int, (node, dim), before=before, like=node)
        for dim, size in enumerate(node.meta["val"].shape)
    ]


def replace(old: fx.Node, new: fx.Node) -> None:
    """Puts a node in another's place; both must give the same dtype, sizes and strides."""
    if not same_layout(old.meta["val"], new.meta["val"]):
        raise AssertionError(f"{new.name} gives {new.meta['val']}, not {old.meta['val']}")
    old.replace_all_uses_with(new)


def forget(nodes: list[fx.Node]) -> None:
    """Erases the nodes of a list without users, from last to first."""
    for node in reversed(nodes):
        if not node.users:
            node.graph.erase_node(node)


def only_user(node: fx.Node, target) -> fx.Node | None:
    """The only user of a node's data, if it calls ``target``."""
    users = [user for user in node.users if not asks_sizes(user)]
    return users[0] if len(users) == 1 and users[0].target is target else None


# ---------------------------------------------------------------------------------------- order


def tensor_of(launch: fx.Node) -> fx.Node:
    """A tensor among a launch's outputs, for tying other nodes behind the launch."""
    value = launch.meta["val"]
    return launch if isinstance(value, Tensor) else next(iter(launch.users))


def data_of(node: fx.Node) -> list:
    """A call's arguments, without the nodes that it is tied behind."""
    return list(node.args[2:] if node.target is control_deps else node.args)


def tie(graph: fx.Graph, behind: dict[fx.Node, OrderedSet[fx.Node]]) -> None:
    """Makes Inductor keep nodes behind others, in whatever order it would put them."""
    place = {node: i for i, node in enumerate(graph.nodes)}
    fresh = {}
    for node in sorted(behind, key=place.__getitem__):
        if node.target is control_deps:
            node.args = (tuple(OrderedSet([*node.args[0], *behind[node]])), *node.args[1:])
        else:
            fresh[node] = behind[node]
    preserve_node_ordering(graph, fresh)


# --------------------------------------------------------------------------------------- passes


def passes(configured) -> list:
    """The passes in an Inductor option: none, one or several."""
    if configured is None:
        return []
    return list(configured) if isinstance(configured, (list, tuple)) else [configured]


def uuid_after(before, *parts):
    """The uuid, for Inductor's caches, of a pass that runs after others; None if one of those has
    none. deepsp's cache tag covers the passes' own code."""
    others = [p.uuid() if isinstance(p, CustomGraphPass) else None for p in passes(before)]
    return None if None in others else (*parts, *others)
