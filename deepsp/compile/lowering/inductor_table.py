"""The ops as Inductor sees them: aten ops and ``_c10d_functional`` collectives, made in
csrc/inductor.

Inductor knows those collectives as asynchronous: it keeps the order start, compute, wait, never
reuses a buffer that is on its way, and fuses the packing copy into what produces its input. Other
backends run the C++ kernels; so does Inductor with ``DEEPSP_DEBUG=1``.

The table of ``torch._inductor.decomposition`` is process-wide: :mod:`deepsp.patches`.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
from pathlib import Path

import torch
import torch.compiler.config

from deepsp import _C

_TABLE = "torch._inductor.decomposition"
_NAMESPACE = "deepsp_inductor::"


def _decompositions() -> dict:
    """From our ops to those that decompose them, which have the same names. Others are what
    decompositions are made of."""
    names = [
        name.removeprefix(_NAMESPACE)
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith(_NAMESPACE)
    ]
    ours, theirs = torch.ops.deepsp, torch.ops.deepsp_inductor
    return {
        getattr(ours, name).default: getattr(theirs, name).default
        for name in names
        if hasattr(ours, name)
    }


@functools.cache
def _cache_tag() -> str:
    """Compiled graphs are cached on disk under a key that knows the graph before decomposition, but
    not what our decompositions made of it: this is what a later version's must not be taken for."""
    sources = sorted(Path(__file__).parents[1].rglob("*.py"))
    made_by = b"".join(path.read_bytes() for path in [Path(_C.__file__), *sources])
    return "deepsp-" + hashlib.sha256(made_by).hexdigest()[:12]


def _change_table(change) -> None:
    """Inductor keeps a copy of its table from the first compilation on, which may have been before
    deepsp's import: without our entries it would call asynchronous kernels, and reuse buffers that
    are on their way."""
    module = sys.modules[_TABLE]
    change(module.decompositions)
    module.fast_random_decomps.cache_clear()


def install() -> None:
    """Adds the decompositions to Inductor's table, which has been imported."""
    debug = os.environ.get("DEEPSP_DEBUG") == "1"
    if _cache_tag() not in torch.compiler.config.cache_key_tag:
        torch.compiler.config.cache_key_tag += ("debug-" if debug else "") + _cache_tag()
    if not debug:  # else the C++ kernels compare, and what they send has arrived when they return
        _change_table(lambda table: table.update(_decompositions()))


def uninstall() -> None:
    """Undoes :func:`install`: Inductor then calls the C++ kernels, as other backends do."""
    tag = torch.compiler.config.cache_key_tag
    for ours in ("debug-" + _cache_tag(), _cache_tag()):
        tag = tag.replace(ours, "")
    torch.compiler.config.cache_key_tag = tag
    _change_table(lambda table: [table.pop(op, None) for op in _decompositions()])
