"""Graphs for tests of the passes over them."""

import torch
import torch.distributed as dist
from reference import draw
from torch.fx.experimental.proxy_tensor import make_fx

from deepsp.compile import fuse_gather_cast
from deepsp.compile.graphs import bytes_of, is_collective
from deepsp.compile.passes.recognize import find_gathers

c10d = torch.ops._c10d_functional
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
E4M3 = torch.float8_e4m3fn


def group_of():
    return dist.get_world_size(), dist.group.WORLD.group_name


def gathered(x):
    return c10d.wait_tensor(c10d.all_gather_into_tensor(x, *group_of()))


def scattered(x, kind="sum"):
    return c10d.wait_tensor(c10d.reduce_scatter_tensor(x, kind, *group_of()))


def convert(x, dtype):
    return torch.ops.prims.convert_element_type(x, dtype)


def draw_shard(*shape, seed=0):
    """Other numbers on every rank."""
    return draw(*shape, seed=seed + 100 * dist.get_rank(), dtype=F32)


def targets_of(graph):
    return [str(n.target) for n in graph.nodes if n.op == "call_function"]


def gather_dtypes(graph):
    """What is gathered, and as what, in the order of the launches."""
    values = [root.meta["val"] for gather in find_gathers(graph) for root in gather.outputs]
    return [(str(v.dtype).removeprefix("torch."), tuple(v.shape)) for v in values]


def received_bytes(graph):
    """Bytes that arrive from other ranks: those of every collective's output."""
    ranks = dist.get_world_size()
    return sum(bytes_of(n) for n in graph.nodes if is_collective(n)) * (ranks - 1) // ranks


def assert_valid(gm):
    """lint, and every node's noted value is what its inputs give."""
    from deepsp.compile.graphs import _fake_inputs

    gm.graph.lint()
    gm.recompile()
    for node in gm.graph.nodes:
        if node.op != "call_function" or "val" not in node.meta:
            continue
        mode, args, kwargs = _fake_inputs(node)
        with mode:
            values = node.target(*args, **kwargs)
        noted = node.meta["val"]
        one = isinstance(values, torch.Tensor) or not isinstance(values, (list, tuple))
        for new, old in zip(*([x] if one else x for x in (values, noted)), strict=True):
            if isinstance(new, torch.Tensor):
                assert (new.dtype, new.shape, new.stride()) == (
                    (old.dtype, old.shape, old.stride())
                ), (node, new, old)


def assert_same(a, b):
    """The same bits, layout and dtype."""
    assert a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride(), (a, b)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    assert torch.equal(a.contiguous().view(bits), b.contiguous().view(bits)), (a, b)


def assert_agreed(gm):
    """Every rank launches the same collectives, in the same order."""
    mine = [
        (str(n.target), [str(v.dtype) for v in torch.utils._pytree.tree_leaves(n.meta["val"])])
        for n in gm.graph.nodes
        if is_collective(n)
    ]
    all_of_them = [None] * dist.get_world_size()
    dist.all_gather_object(all_of_them, mine)
    assert all(other == mine for other in all_of_them), all_of_them


def fuse(function, *inputs, mode="fake", exact=True, **options):
    """Traces, fuses, checks, runs both; gives the graph as it was, as it is, and the report."""
    options.setdefault("combine_bytes", 0)
    old = make_fx(function, tracing_mode=mode)(*inputs)
    new = make_fx(function, tracing_mode=mode)(*inputs)
    report = fuse_gather_cast(new.graph, **options)
    assert_valid(new)
    assert_agreed(new)
    again = [(n.name, n.args) for n in new.graph.nodes]
    second = fuse_gather_cast(new.graph, **options)
    assert str(again) == str([(n.name, n.args) for n in new.graph.nodes])  # nothing left to do
    assert not second.rewrites and not second.combined and not second.bytes_saved
    results = [torch.utils._pytree.tree_leaves(g(*inputs)) for g in (old, new)]
    for a, b in zip(*results, strict=True):
        if exact:
            assert_same(a, b)
        else:
            torch.testing.assert_close(a, b)
    storages = [x.untyped_storage().data_ptr() for x in results[1] if x.numel()]
    before = [x.untyped_storage().data_ptr() for x in results[0] if x.numel()]
    assert len(set(storages)) == len(set(before))  # what was apart is apart
    return old.graph, new.graph, report


def marks_of(targets):
    """Writes a letter for each launch, wait, attention and product."""
    marks = {
        "all_to_all_single": "x",
        "deepsp._project_to_heads_start": "x",
        "deepsp.seq_to_heads_start": "x",
        "deepsp.heads_to_seq_start": "x",
        "wait_tensor": "w",
        "deepsp.seq_to_heads_wait": "w",
        "deepsp.heads_to_seq_wait": "w",
        "scaled_dot_product": "A",
        "aten.mm": "m",
        "aten.addmm": "m",
        "aten.bmm": "m",
        "extern_kernels.mm(": "m",
        "extern_kernels.addmm(": "m",
        "extern_kernels.bmm(": "m",
    }
    return "".join(
        next((mark for part, mark in marks.items() if part in target), "") for target in targets
    )
