"""deepsp's ops as Inductor sees them.

In a group whose ranks write into each other's memory, they are calls of the C++ kernels (namespace
``deepsp_mapped``): a start has read its inputs when it returns, so Inductor may reuse these. In
other groups, and for gathers of weights, which passes move and merge, they are aten ops and
``_c10d_functional`` collectives, made in csrc/inductor. Inductor knows those as asynchronous: it
keeps the order start, compute, wait, never reuses a buffer in flight, and fuses the packing copy
into the kernel before it. Other backends run the C++ kernels; so does Inductor with
``DEEPSP_DEBUG=1``.

The table of ``torch._inductor.decomposition`` is process-wide: :mod:`deepsp.patches`.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.compiler.config
from torch import Tensor
from torch.utils._pytree import tree_leaves

from deepsp import _C
from deepsp.ranks.transport import is_mapped

_TABLE = "torch._inductor.decomposition"
_MAPPED = "deepsp_mapped::"


def mapped_ops() -> list:
    """The calls of kernels that take the place of deepsp's ops."""
    return [
        getattr(torch.ops.deepsp_mapped, name.removeprefix(_MAPPED)).default
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith(_MAPPED)
    ]


@functools.cache
def _decompositions() -> dict:
    """From each op of deepsp to what is traced in its place."""
    return {
        getattr(torch.ops.deepsp, op._opname).default: _decomposition(op) for op in mapped_ops()
    }


def _decomposition(call) -> Callable:
    """``call`` in groups that are mapped, else collectives."""
    collectives = getattr(torch.ops.deepsp_inductor, call._opname).default
    if "gather_cast" in call._opname:
        return collectives
    place = [argument.name for argument in call._schema.arguments].index("group_name")

    def decomposed(*args, **kwargs):
        group = args[place] if len(args) > place else kwargs["group_name"]
        on_cpu = all(x.device.type == "cpu" for x in tree_leaves(args) if isinstance(x, Tensor))
        # The backend's own sums read their inputs later.
        called = on_cpu and kwargs.get("backend_sums") is None and is_mapped(group)
        return (call if called else collectives)(*args, **kwargs)

    return decomposed


@functools.cache
def _cache_tag() -> str:
    """A tag for the key of Inductor's disk cache. The key knows the graph before decomposition, so
    without the tag another version's compiled graph could be taken."""
    sources = sorted(Path(__file__).parents[1].rglob("*.py"))
    made_by = b"".join(path.read_bytes() for path in [Path(_C.__file__), *sources])
    return "deepsp-" + hashlib.sha256(made_by).hexdigest()[:12]


def _change_table(change) -> None:
    """Changes Inductor's table and its cached copy, which may be older than deepsp's import:
    without deepsp's entries, Inductor would call asynchronous kernels and reuse buffers in
    flight."""
    module = sys.modules[_TABLE]
    change(module.decompositions)
    module.fast_random_decomps.cache_clear()


def install() -> None:
    """Adds the decompositions to Inductor's table."""
    debug = os.environ.get("DEEPSP_DEBUG") == "1"
    if _cache_tag() not in torch.compiler.config.cache_key_tag:
        torch.compiler.config.cache_key_tag += ("debug-" if debug else "") + _cache_tag()
    if not debug:  # in debug mode, the C++ kernels compare, and complete before they return
        _change_table(lambda table: table.update(_decompositions()))


def uninstall() -> None:
    """Undoes :func:`install`: Inductor then calls the C++ kernels, as other backends do."""
    tag = torch.compiler.config.cache_key_tag
    for ours in ("debug-" + _cache_tag(), _cache_tag()):
        tag = tag.replace(ours, "")
    torch.compiler.config.cache_key_tag = tag
    _change_table(lambda table: [table.pop(op, None) for op in _decompositions()])
