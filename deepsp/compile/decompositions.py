"""The ops as Inductor sees them: aten ops and ``_c10d_functional`` collectives, made in
csrc/inductor.

Inductor knows those collectives as asynchronous: it keeps the order start, compute, wait, never
reuses a buffer that is on its way, and fuses the packing copy into what produces its input. Other
backends run the C++ kernels; so does Inductor with ``DEEPSP_DEBUG=1``.

The table of ``torch._inductor.decomposition`` is process-wide, and importing it takes longer than
importing deepsp: entries are added when, and only if, somebody else imports it.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

import torch
import torch.compiler.config

from deepsp import _C
from deepsp._after_import import after_import, forget
from deepsp.compile import overlap

_TABLE = "torch._inductor.decomposition"

# Compiled graphs are cached on disk under a key that knows the graph before decomposition, but not
# what our decompositions made of it: this is what a later version's must not be taken for.
_CACHE_TAG = (
    "deepsp-"
    + hashlib.sha256(
        b"".join(
            path.read_bytes()
            for path in [Path(_C.__file__), *sorted(Path(__file__).parent.rglob("*.py"))]
        )
    ).hexdigest()[:12]
)


def _decompositions() -> dict:
    """From our ops to those that decompose them, which have the same names."""
    namespace = "deepsp_inductor::"
    names = [
        name.removeprefix(namespace)
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith(namespace)
    ]
    ours, theirs = torch.ops.deepsp, torch.ops.deepsp_inductor
    return {getattr(ours, name).default: getattr(theirs, name).default for name in names}


def _fill() -> None:
    debug = os.environ.get("DEEPSP_DEBUG") == "1"
    if _CACHE_TAG not in torch.compiler.config.cache_key_tag:
        torch.compiler.config.cache_key_tag += ("debug-" if debug else "") + _CACHE_TAG
    if debug:
        return  # the C++ kernels compare, and what they send has arrived when they return
    sys.modules[_TABLE].decompositions.update(_decompositions())
    _forget_copies()


def _forget_copies() -> None:
    """Inductor keeps a copy of its table from the first compilation on, which may have been before
    deepsp's import: without our entries it would call asynchronous kernels, and reuse buffers that
    are on their way."""
    sys.modules[_TABLE].fast_random_decomps.cache_clear()


def install() -> None:
    """Adds the pass that keeps our ops' order to Inductor's passes, and the decompositions to its
    table: the first now, for a ``config.patch`` around the first compilation would undo it later,
    the others when Inductor is imported."""
    overlap.install()
    after_import(_TABLE, _fill)


def uninstall() -> None:
    """Undoes :func:`install`: Inductor then calls the C++ kernels, as other backends do."""
    forget(_TABLE)
    overlap.uninstall()
    tag = torch.compiler.config.cache_key_tag
    for ours in ("debug-" + _CACHE_TAG, _CACHE_TAG):
        tag = tag.replace(ours, "")
    torch.compiler.config.cache_key_tag = tag
    if _TABLE in sys.modules:
        for op in _decompositions():
            sys.modules[_TABLE].decompositions.pop(op, None)
        _forget_copies()
