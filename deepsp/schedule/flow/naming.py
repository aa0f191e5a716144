"""Which torch function is called."""

from __future__ import annotations

import torch

from deepsp.schedule.flow import names
from deepsp.schedule.flow.values import Call


def name_of(func, raw: str) -> tuple[str, bool]:
    """A name without what marks in-place and special methods, and whether it writes to its first
    argument."""
    if isinstance(func, torch._ops.OpOverload):
        func = func.overloadpacket
        raw = func.__name__
    if isinstance(func, torch._ops.OpOverloadPacket):
        namespace, _, raw = func._qualified_op_name.partition("::")
        if namespace != "aten":
            return f"{namespace}.{raw}", raw.endswith("_")
    if raw == "__get__":
        return getattr(func.__self__, "__name__", raw), False
    if raw == "__set__":
        return "set_" + getattr(func.__self__, "__name__", raw), False
    if raw.startswith("__") and raw.endswith("__"):
        plain = raw[2:-2]
        if plain == "setitem":
            return plain, True
        if plain in _INPLACE:
            return plain[1:], True
        return plain, False
    if raw.endswith("_") and not raw.startswith("_"):
        return raw[:-1], raw not in ("requires_grad_", "detach_", "share_memory_")
    return raw, False


_INPLACE = {
    "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor",
    "ilshift", "irshift", "imatmul",
}  # fmt: skip


def draws(call: Call) -> bool:
    if call.kwargs.get("generator") is not None:
        return False
    name = call.name
    if name in names.DROPOUTS:
        default = 1 / 8 if name == "rrelu" else 0.5
        p = call.arg(1, "p", default)
        training = call.arg(3 if name == "rrelu" else 2, "training", name == "rrelu")
        return bool(training) and (name == "rrelu" or p > 0)
    if name in ("scaled_dot_product_attention", "deepsp.distributed_attention"):
        return (call.arg(4, "dropout_p", 0.0) or 0.0) > 0
    return name in names.RANDOM
