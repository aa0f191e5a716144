"""Names of torch functions, as ``__torch_function__`` sees them."""

from __future__ import annotations

import torch

from deepsp.placement.table import find, overloads

_OPERATORS = {"truediv": "div", "floordiv": "floor_divide", "mod": "remainder"}

ABOUT = {
    "shape", "size", "dim", "ndim", "ndimension", "numel", "nelement", "dtype", "device", "layout",
    "is_cuda", "is_cpu", "is_meta", "is_xpu", "is_mps", "is_floating_point", "is_complex",
    "is_sparse", "is_quantized", "is_nested", "is_leaf", "names", "get_device", "element_size",
    "itemsize", "nbytes", "len", "hash", "is_inference", "is_conj", "is_neg", "is_same_size",
    "grad_fn", "retains_grad", "stride", "is_contiguous", "storage_offset",
}  # fmt: skip
"""Functions whose result doesn't depend on a tensor's values."""


def name_of(func) -> tuple[str, bool]:
    """A function's name without the underscores of in-place and special methods (``__rmul__`` is
    "mul"), and whether it writes to its first argument."""
    raw = getattr(func, "__name__", str(func))
    if isinstance(func, torch._ops.OpOverload):
        func = func.overloadpacket
    if isinstance(func, torch._ops.OpOverloadPacket):
        namespace, _, raw = func._qualified_op_name.partition("::")
        if namespace != "aten":
            return f"{namespace}.{raw}", raw.endswith("_")
    if raw in ("__get__", "__set__"):
        name = getattr(func.__self__, "__name__", raw)
        return name if raw == "__get__" else f"set_{name}", False
    if raw.startswith("__") and raw.endswith("__"):
        name = raw[2:-2]
        for prefix in ("r", "i"):
            operator = name.removeprefix(prefix)
            if operator != name and hasattr(torch.Tensor, f"__{operator}__"):
                return _OPERATORS.get(operator, operator), prefix == "i"
        return _OPERATORS.get(name, name), name == "setitem"
    if raw.endswith("_") and not raw.startswith("_"):
        return raw[:-1], raw not in ("requires_grad_", "detach_", "share_memory_")
    return raw, False


def is_by_element(name: str) -> bool:
    """Whether a function computes each element on its own, and deterministically."""
    rules = [(op, find(op)) for op in overloads(name)]
    return any(
        rule is not None
        and rule.family == "pointwise"
        and torch.Tag.nondeterministic_seeded not in op.tags
        for op, rule in rules
    )
