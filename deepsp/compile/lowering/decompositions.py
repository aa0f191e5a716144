"""The ops as Inductor sees them: aten ops and ``_c10d_functional`` collectives.

Inductor knows those collectives as asynchronous: it keeps the order start, compute, wait, never
reuses a buffer that is on its way, and fuses the packing copy into what produces its input. Other
backends run the C++ kernels; so does Inductor with ``DEEPSP_DEBUG=1``.

The table of ``torch._inductor.decomposition`` is process-wide: :mod:`deepsp.patches`.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

import torch
import torch.compiler.config

from deepsp.compile import along_dim, exchange, gather, projection, sums, tensor_parallel

_TABLE = "torch._inductor.decomposition"


_DECOMPOSITIONS = {
    "heads_to_seq": exchange.heads_to_seq,
    "seq_to_heads_start": exchange.seq_to_heads_start,
    "seq_to_heads_wait": exchange.seq_to_heads_wait,
    "heads_to_seq_start": exchange.heads_to_seq_start,
    "heads_to_seq_wait": exchange.heads_to_seq_wait,
    "project_to_heads_start": projection.project_to_heads_start,
    "project_to_heads_backward": projection.project_to_heads_backward,
    "heads_to_output_wait": projection.heads_to_output_wait,
    "heads_to_output_weight_grad": projection.heads_to_output_weight_grad,
    "gather_cast_coalesced_start": gather.gather_cast_coalesced_start,
    "gather_cast_coalesced_wait": gather.gather_cast_coalesced_wait,
    "reduce_scatter_cast_coalesced_start": gather.reduce_scatter_cast_coalesced_start,
    "reduce_scatter_cast_coalesced_wait": gather.reduce_scatter_cast_coalesced_wait,
    "all_gather_start": along_dim.all_gather_start,
    "all_gather_wait": along_dim.all_gather_wait,
    "reduce_scatter_start": along_dim.reduce_scatter_start,
    "reduce_scatter_wait": along_dim.reduce_scatter_wait,
    "scatter_start": along_dim.scatter_start,
    "scatter_wait": along_dim.scatter_wait,
    "all_gather_matmul": tensor_parallel.all_gather_matmul,
    "all_gather_matmul_backward": tensor_parallel.all_gather_matmul_backward,
    "matmul_reduce_scatter": tensor_parallel.matmul_reduce_scatter,
    "matmul_reduce_scatter_backward": tensor_parallel.matmul_reduce_scatter_backward,
    "all_reduce": sums.all_reduce,
    "all_reduce_start": sums.all_reduce_start,
    "all_reduce_wait": sums.all_reduce_wait,
}


# Compiled graphs are cached on disk under a key that knows the graph before decomposition, but not
# what our decompositions made of it: this is what a later version's must not be taken for.
_CACHE_TAG = (
    "deepsp-"
    + hashlib.sha256(
        b"".join(path.read_bytes() for path in sorted(Path(__file__).parents[1].rglob("*.py")))
    ).hexdigest()[:12]
)


def install() -> None:
    """Adds the decompositions to Inductor's table, which has been imported."""
    debug = os.environ.get("DEEPSP_DEBUG") == "1"
    if _CACHE_TAG not in torch.compiler.config.cache_key_tag:
        torch.compiler.config.cache_key_tag += ("debug-" if debug else "") + _CACHE_TAG
    if debug:
        return  # the C++ kernels compare, and what they send has arrived when they return
    table = sys.modules[_TABLE].decompositions
    for name, function in _DECOMPOSITIONS.items():
        table[getattr(torch.ops.deepsp, name).default] = function
    _forget_copies()


def _forget_copies() -> None:
    """Inductor keeps a copy of its table from the first compilation on, which may have been before
    deepsp's import: without our entries it would call asynchronous kernels, and reuse buffers that
    are on their way."""
    sys.modules[_TABLE].fast_random_decomps.cache_clear()


def uninstall() -> None:
    """Undoes :func:`install`: Inductor then calls the C++ kernels, as other backends do."""
    tag = torch.compiler.config.cache_key_tag
    for ours in ("debug-" + _CACHE_TAG, _CACHE_TAG):
        tag = tag.replace(ours, "")
    torch.compiler.config.cache_key_tag = tag
    table = sys.modules[_TABLE].decompositions
    for name in _DECOMPOSITIONS:
        table.pop(getattr(torch.ops.deepsp, name).default, None)
    _forget_copies()
