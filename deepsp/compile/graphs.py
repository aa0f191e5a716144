"""What the passes know of nodes: which of them compute, communicate, move data or cast; how many
bytes they give; how one is added with its shapes, and how one is tied behind others."""

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
# In the names of attention: PyTorch's, FlexAttention, custom ops of others, ours.
_ATTENTION = ("scaled_dot_product", "attention", "attn")

_FUNCTIONALIZED = (
    torch.ops.higher_order.auto_functionalized,
    torch.ops.higher_order.auto_functionalized_v2,
)

# Views, and below them copies: they give elements of their inputs as they are. But for the last
# view, a cast before and a cast after them give the same bits.
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


# ------------------------------------------------------------------------------- what a node is


def _call_of(node: fx.Node) -> fx.Node:
    """The node, or the call in it where it is tied behind others."""
    if node.target is control_deps:
        inner = getattr(node.graph.owning_module, node.args[1].target)
        return next(n for n in inner.graph.nodes if n.op == "call_function")
    return node


def target_of(node: fx.Node):
    """What a node calls, also where it is tied behind others."""
    return _call_of(node).target


def is_op(node: fx.Node, name: str) -> bool:
    """Whether the node calls the op of ours of this name, which needn't be registered."""
    target = target_of(node)
    return isinstance(target, torch._ops.OpOverload) and target.name() == f"deepsp::{name}"


def computes(node: fx.Node) -> bool:
    """Matrix products and attention: what takes long enough to hide a collective behind."""
    call = _call_of(node)
    # A custom op that writes to its arguments is an argument of what calls it with copies.
    target = call.args[0] if call.target in _FUNCTIONALIZED else call.target
    if target in _COMPUTE:
        return True
    if not isinstance(target, (torch._ops.OpOverload, torch._ops.HigherOrderOperator)):
        return False
    named_so = any(word in target.name() for word in _ATTENTION)
    # A check gives nothing.
    gives = node.meta.get("val") is not None
    return named_so and gives and not is_collective(node)


def is_collective(node: fx.Node) -> bool:
    """Whether the node launches a collective."""
    target = target_of(node)
    if not isinstance(target, torch._ops.OpOverload) or target is WAIT:
        return False
    if target.namespace == "deepsp":
        return any(isinstance(a.type, torch.StringType) for a in target._schema.arguments) and (
            not target._opname.endswith("_wait")
        )
    return target.namespace in ("_c10d_functional", "_c10d_functional_autograd")


def is_wait(node: fx.Node) -> bool:
    target = target_of(node)
    return target is WAIT or (
        isinstance(target, torch._ops.OpOverload)
        and target.namespace == "deepsp"
        and target._opname.endswith("_wait")
    )


def writes(node: fx.Node) -> bool:
    """Whether the node writes to what it is given, or takes random numbers in turn."""
    target = target_of(node)
    return isinstance(target, torch._ops.OpOverload) and (
        (target._schema.is_mutable and not is_wait(node))
        or torch.Tag.nondeterministic_seeded in target.tags
    )


def moves(node: fx.Node) -> bool:
    """Whether the node gives elements of its inputs as they are (and zeros)."""
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
        given = {k: v for k, v in node.kwargs.items() if v is not None and v is not False}
        return given.get("dtype") if set(given) == {"dtype"} else None
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
    """A size as a number: a symbolic one as it was when the graph was traced."""
    return size if isinstance(size, int) else size.node.hint or 0


def bytes_of(node: fx.Node) -> int:
    """What a node's tensor, or list of tensors, takes, in bytes."""
    values = [v for v in pytree.tree_leaves(node.meta["val"]) if isinstance(v, Tensor)]
    return sum(v.element_size() * count(v.numel()) for v in values)


def tensor_inputs(node: fx.Node) -> list[fx.Node]:
    """The inputs that hold data: no sizes."""
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
    """Notes what a node gives, now that it is new or its inputs are others."""
    mode, args, kwargs = _fake_inputs(node)
    with mode, enable_python_dispatcher():
        node.meta["val"] = node.target(*args, **kwargs)
    node.meta.pop("tensor_meta", None)


def copy_with(node: fx.Node, inputs: dict[fx.Node, fx.Node], before: fx.Node | None = None):
    """A copy of a node in front of it (or of another) that reads other inputs."""
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
    """Erases those of a list, in order, whom nobody uses any more, the last first."""
    for node in reversed(nodes):
        if not node.users:
            node.graph.erase_node(node)


def only_user(node: fx.Node, target) -> fx.Node | None:
    """The one node that uses another's data, if it calls ``target``."""
    users = [user for user in node.users if not asks_sizes(user)]
    return users[0] if len(users) == 1 and users[0].target is target else None


# ---------------------------------------------------------------------------------------- order


def tensor_of(launch: fx.Node) -> fx.Node:
    """A tensor that a launch gives: what others can be tied behind."""
    value = launch.meta["val"]
    return launch if isinstance(value, Tensor) else next(iter(launch.users))


def tie(graph: fx.Graph, behind: dict[fx.Node, OrderedSet[fx.Node]]) -> None:
    """Makes Inductor keep nodes behind others, whatever it thinks of their order."""
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
    """The passes that an option of Inductor's holds: none, one or several."""
    if configured is None:
        return []
    return list(configured) if isinstance(configured, (list, tuple)) else [configured]


def uuid_after(before, *own):
    """What tells a pass that runs after others from others for Inductor's caches; None if one of
    those can't be told. That the passes' own code changes, deepsp's cache tag says."""
    others = [p.uuid() if isinstance(p, CustomGraphPass) else None for p in passes(before)]
    return None if None in others else (*own, *others)
