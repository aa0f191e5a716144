"""``torch.compile(model, backend="deepsp")``."""

from __future__ import annotations

from torch import fx

from deepsp.compile.sharding import parallelize
from deepsp.groups import Group


def deepsp(gm: fx.GraphModule, example_inputs, *, options=None, **kwargs):
    """A backend of ``torch.compile`` that shards the sequence over a group.

    ``options``: those of :func:`deepsp.compile.parallelize`, and ``inner``, the compiler that takes
    the result ("inductor").
    """
    from torch._dynamo.backends.registry import lookup_backend

    options = dict(options or {})
    inner = options.pop("inner", "inductor")
    group: Group = options.pop("group", None)
    known = {"gradients", "outputs", "memory_budget"}
    if set(options) - known:
        raise ValueError(
            f"options has {sorted(set(options) - known)}; group, inner, gradients, outputs and "
            "memory_budget are right"
        )
    new = parallelize(gm, example_inputs, group, **options)
    compiler = lookup_backend(inner) if isinstance(inner, str) else inner
    return compiler(new, example_inputs, **kwargs)
