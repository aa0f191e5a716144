"""Checks a layer's projections and norms, and reads its head sizes from them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from deepsp.weights import partitioned


def biases(projections: Sequence[nn.Linear]) -> list[Tensor]:
    if all(p.bias is None for p in projections):
        return []
    return [p.weight.new_zeros(p.weight.size(0)) if p.bias is None else p.bias for p in projections]


def check_linears(linears: Mapping[str, nn.Module]) -> None:
    """Raises ValueError for a module that isn't a plain ``nn.Linear`` without hooks."""
    for name, linear in linears.items():
        _check_linear(name, linear)


def _check_linear(name: str, linear: nn.Module) -> None:
    if not isinstance(linear, nn.Linear) or type(linear).forward is not nn.Linear.forward:
        raise ValueError(
            f"expected {name} to be a plain nn.Linear, whose weight is used and whose forward "
            f"isn't called, got {type(linear).__name__}"
        )
    if "forward" in vars(linear):
        raise ValueError(
            f"expected {name} to be a plain nn.Linear, but {name} has a forward of its own, which "
            "would not be called"
        )
    hooks = (
        *linear._forward_hooks.values(),
        *linear._forward_pre_hooks.values(),
        *linear._backward_hooks.values(),
        *linear._backward_pre_hooks.values(),
    )
    # DeepSpeed's hooks may be skipped: reading a weight gathers it, too.
    if not all(map(partitioned.is_hook, hooks)):
        raise ValueError(
            f"expected {name} to have no hooks, but {name} has hooks, which would not run: its "
            "weight is used, and its forward isn't called"
        )


def head_sizes(projections: dict[str, nn.Linear], num_heads: int) -> tuple[int, int, int]:
    """head_dim, number of kv heads, head_dim of v."""
    q, k, v, o = (projections[name] for name in ("q_proj", "k_proj", "v_proj", "o_proj"))
    if num_heads < 1 or q.out_features % num_heads != 0:
        raise ValueError(
            f"expected num_heads to divide the {q.out_features} output features of q_proj, got "
            f"{num_heads}"
        )
    head_dim = q.out_features // num_heads
    kv_heads, rest = divmod(k.out_features, head_dim)
    if rest != 0 or kv_heads == 0 or num_heads % kv_heads != 0:
        raise ValueError(
            f"expected the output features of k_proj to be those of n heads of head_dim "
            f"{head_dim}, where n divides num_heads ({num_heads}), got {k.out_features}"
        )
    if v.out_features % kv_heads != 0:
        raise ValueError(
            f"expected the output features of v_proj to be a multiple of the {kv_heads} kv heads "
            f"of k_proj, got {v.out_features}"
        )
    v_head_dim = v.out_features // kv_heads
    if o.in_features != num_heads * v_head_dim:
        raise ValueError(
            f"expected o_proj to have {num_heads * v_head_dim} input features, {num_heads} heads "
            f"of {v_head_dim}, got {o.in_features}"
        )
    for name, p in (("k_proj", k), ("v_proj", v)):
        if p.in_features != q.in_features:
            raise ValueError(
                f"expected {name} to have the input features of q_proj ({q.in_features}), got "
                f"{p.in_features}"
            )
    return head_dim, kv_heads, v_head_dim


def is_wide(name: str, norm: nn.Module | None, num_heads: int, head_dim: int) -> bool:
    """Whether a norm of q or k is over the channels of all heads, not of each head."""
    size = getattr(norm, "normalized_shape", None)
    if size is None:
        weight = getattr(norm, "weight", None)
        size = partitioned.full_shape(weight) if isinstance(weight, Tensor) else ()
        size = size if len(size) == 1 else (head_dim,)
    size = math.prod(size) if isinstance(size, (tuple, list)) else size
    if size not in (head_dim, num_heads * head_dim):
        raise ValueError(
            f"expected {name} to normalize {head_dim} channels, those of a head, or "
            f"{num_heads * head_dim}, those of all {num_heads} heads, got {size}"
        )
    return size != head_dim
