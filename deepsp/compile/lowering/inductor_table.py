"""deepsp's ops as Inductor sees them.

CPU tensors: calls of the C++ kernels (:mod:`~deepsp.compile.lowering.calls`). CUDA tensors, and
gathers of weights, which passes move and merge: aten ops and ``_c10d_functional`` collectives, made
in csrc/inductor. Inductor knows those as asynchronous: it keeps the order start, compute, wait,
never reuses a buffer in flight, and fuses the packing copy into the kernel before it. Other
backends run the C++ kernels; so does Inductor with ``DEEPSP_DEBUG=1``.

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

_TABLE = "torch._inductor.decomposition"
_NAMESPACE = "deepsp_inductor::"


@functools.cache
def _decompositions() -> dict:
    """From each op of deepsp that Inductor doesn't always call to what is traced in its place."""
    names = [
        name.removeprefix(_NAMESPACE)
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith(_NAMESPACE)
    ]
    return {
        getattr(torch.ops.deepsp, name).default: _decomposition(
            getattr(torch.ops.deepsp_inductor, name).default
        )
        for name in names
        if hasattr(torch.ops.deepsp, name)
    }


def ops() -> list:
    """The ops that Inductor may call."""
    return list(_decompositions())


def calls_kernels() -> bool:
    """Whether Inductor calls kernels for CPU tensors. Tests turn it off."""
    return os.environ.get("DEEPSP_TEST_COLLECTIVES") != "1"


def _decomposition(collectives) -> Callable:
    """``collectives``, or nothing: the op is called."""
    if "gather_cast" in collectives._opname:
        return collectives

    def decomposed(*args, **kwargs):
        on_cpu = all(x.device.type == "cpu" for x in tree_leaves(args) if isinstance(x, Tensor))
        # The backend's own sums read their inputs later.
        called = on_cpu and kwargs.get("backend_sums") is None
        return NotImplemented if called and calls_kernels() else collectives(*args, **kwargs)

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
