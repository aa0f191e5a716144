"""What a layer's projections and norms must be, and what they say of its heads."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor, nn


def biases(projections: Sequence[nn.Linear]) -> list[Tensor]:
    if all(p.bias is None for p in projections):
        return []
    return [p.weight.new_zeros(p.weight.size(0)) if p.bias is None else p.bias for p in projections]


def check_linear(name: str, linear: nn.Module) -> None:
    if not isinstance(linear, nn.Linear) or type(linear).forward is not nn.Linear.forward:
        raise ValueError(
            f"{name} is a {type(linear).__name__}; an nn.Linear is right (its weight is used, its "
            "forward isn't called)"
        )
    if "forward" in vars(linear):
        raise ValueError(f"{name} has a forward of its own, which would not be called")
    hooks = [*linear._forward_hooks.values(), *linear._forward_pre_hooks.values()]
    hooks += [*linear._backward_hooks.values(), *linear._backward_pre_hooks.values()]
    if not all(getattr(hook, "observes", False) for hook in hooks):  # shard_parameters' own do
        raise ValueError(
            f"{name} has hooks, which would not run: its weight is used, its forward isn't called"
        )


def head_sizes(projections: dict[str, nn.Linear], num_heads: int) -> tuple[int, int, int]:
    """head_dim, number of kv heads, head_dim of v."""
    q, k, v, o = (projections[name] for name in ("q_proj", "k_proj", "v_proj", "o_proj"))
    if num_heads < 1 or q.out_features % num_heads != 0:
        raise ValueError(
            f"num_heads is {num_heads}, which doesn't divide the {q.out_features} features of "
            "q_proj"
        )
    head_dim = q.out_features // num_heads
    kv_heads, rest = divmod(k.out_features, head_dim)
    if rest != 0 or kv_heads == 0 or num_heads % kv_heads != 0:
        raise ValueError(
            f"k_proj has {k.out_features} features; a number of heads of {head_dim} that divides "
            f"num_heads, {num_heads}, is right"
        )
    if v.out_features % kv_heads != 0:
        raise ValueError(
            f"v_proj has {v.out_features} features, which the {kv_heads} heads of k_proj don't "
            "divide"
        )
    v_head_dim = v.out_features // kv_heads
    if o.in_features != num_heads * v_head_dim:
        raise ValueError(
            f"o_proj takes {o.in_features} features; {num_heads * v_head_dim}, {num_heads} heads "
            f"of {v_head_dim}, is right"
        )
    for name, p in (("k_proj", k), ("v_proj", v)):
        if p.in_features != q.in_features:
            raise ValueError(
                f"{name} takes {p.in_features} features, but q_proj takes {q.in_features}; they "
                "must be the same"
            )
    return head_dim, kv_heads, v_head_dim


def is_wide(name: str, norm: nn.Module | None, num_heads: int, head_dim: int) -> bool:
    """Whether a norm of q or k is over all heads' channels together, not over each head's."""
    size = getattr(norm, "normalized_shape", None)
    if size is None:
        weight = getattr(norm, "weight", None)
        size = weight.shape if isinstance(weight, Tensor) and weight.dim() == 1 else (head_dim,)
    size = math.prod(size) if isinstance(size, (tuple, list)) else size
    if size not in (head_dim, num_heads * head_dim):
        raise ValueError(
            f"{name} is over {size} channels; {head_dim}, those of each head, or "
            f"{num_heads * head_dim}, those of all {num_heads} heads together, are right"
        )
    return size != head_dim
