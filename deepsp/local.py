"""Calling a local attention: what sees the full sequence of some heads."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from deepsp import shares
from deepsp.groups import Member
from deepsp.randomness import sharded_randomness

ORDERS = {"bshd": (0, 1, 2, 3), "sbhd": (1, 0, 2, 3), "bhsd": (0, 2, 1, 3)}
"""By layout: where batch, sequence, heads and head_dim stand. Each order is its own inverse."""

_NAMES = {"b": "batch", "s": "sequence", "h": "heads", "d": "head_dim"}


def check_layout(layout: str) -> None:
    if layout not in ORDERS:
        raise ValueError(f"expected layout to be 'bshd', 'sbhd' or 'bhsd', got {layout!r}")


def check_four(x: Tensor, name: str, layout: str) -> None:
    if x.dim() != 4:
        dims = ", ".join(_NAMES[d] for d in layout)
        raise ValueError(f"expected {name} to have 4 dimensions [{dims}], got {x.dim()}")


INDICES = ("head_indices", "query_indices")
"""What a local attention may ask for, by declaring it."""


def indices_wanted(function: Callable | None) -> tuple[str, ...]:
    """Which of INDICES a local attention declares as arguments."""
    if function is None:
        return ()
    try:
        declared = inspect.signature(_declaring(function)).parameters
    except (TypeError, ValueError):  # built in, without a signature
        return ()
    return tuple(name for name in INDICES if name in declared)


def query_parts_of(module: nn.Module, num_heads: int, device=None, overlaps: bool = False) -> int:
    """``query_parts`` of an attention module, as ops take it. ``overlaps``: it gains by whole
    heads, and has them where it can."""
    whole = None
    if module.local_attention is not None and "query_indices" not in module._indices:
        whole = (
            "local_attention sees all queries of its heads; let it declare an argument "
            "query_indices, the tokens of its queries, to be called with some of them"
        )
    asked, size = module.query_parts, module.member[1]
    if overlaps and asked == "auto" and num_heads >= size:
        return 1
    return shares.parts_of(asked, num_heads, size, device or torch.device("cpu"), whole)


def indices(
    wanted: tuple[str, ...], like: Tensor, heads: Sequence[int], queries: Sequence[int]
) -> dict[str, Tensor]:
    """The arguments wanted. heads, queries: the begin and end of each range."""
    given = dict(zip(INDICES, (heads, queries), strict=True))
    return {name: torch.ops.deepsp.indices_in(like, list(given[name])) for name in wanted}


def autocasts(device: torch.device) -> bool:
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def check_kwargs(wanted: tuple[str, ...], kwargs: dict) -> None:
    for name in wanted:
        if name in kwargs:
            raise ValueError(
                f"expected no {name}, which deepsp passes to local_attention itself; leave it out"
            )


PATTERN = ("documents", "window_size", "softcap", "sinks")
"""What attention takes besides the arguments of ``scaled_dot_product_attention``, by name."""


def check_sdpa_arguments(
    args: tuple, kwargs: dict, known: tuple[str, ...], named: tuple[str, ...] = PATTERN
) -> None:
    """Raises where there is no local attention that would take what is passed. ``named``: what may
    be passed by name only."""
    if len(args) > len(known):
        raise ValueError(
            f"expected at most {len(known)} more positional arguments ({', '.join(known)}), got "
            f"{len(args)}"
        )
    for name in kwargs:
        if name == "enable_gqa" and name not in known:
            raise ValueError(
                "enable_gqa isn't an argument here: the number of kv heads follows from k_proj; "
                "leave it out"
            )
        if name not in (*known, *named):
            raise ValueError(
                f"expected an argument of scaled_dot_product_attention ({', '.join(known)}) or "
                f"{', '.join(named)}, got {name}; pass a local_attention that takes it"
            )


def _declaring(function: Callable) -> Callable:
    """What says which arguments ``function`` takes: a module itself takes any."""
    if isinstance(function, functools.partial):
        return functools.partial(_declaring(function.func), *function.args, **function.keywords)
    if isinstance(function, nn.Module):
        return getattr(function, "_orig_mod", function).forward  # what torch.compile was given
    return function


def randomness_of(member: Member, device: torch.device):
    """Other random numbers on each rank, for other heads; compiled code draws as the code around it
    does. Entered once a call, not once a chunk: the generators go on alike whatever the number of
    chunks."""
    if member[1] == 1 or torch.compiler.is_compiling():
        return contextlib.nullcontext()
    return sharded_randomness(member, device)


def attend(
    function: Callable[..., Tensor],
    qkv: tuple[Tensor, Tensor, Tensor],
    args: tuple,
    kwargs: dict,
    layout: str = "bshd",
) -> Tensor:
    """The local attention of some heads: q, k and v and what it returns [B, S, h, D].

    Raises:
        ValueError: it returned no tensor (or tuple that begins with one), or one of another shape.
    """
    order = ORDERS[layout]
    out = function(*(x.permute(order) for x in qkv), *args, **kwargs)
    if isinstance(out, (tuple, list)) and out:
        out = out[0]  # with log-sum-exp and the like, as flash attention returns it
    seen = [qkv[0].size(d) for d in order]
    if not isinstance(out, Tensor):
        raise ValueError(
            f"expected local_attention to return a tensor of shape {tuple(seen[:3])} and a head "
            f"dimension, got {type(out).__name__}"
        )
    if out.dim() != 4 or list(out.shape[:3]) != seen[:3]:
        raise ValueError(
            f"expected local_attention to return shape {tuple(seen[:3])} and a head dimension, got "
            f"{tuple(out.shape)}"
        )
    return out.permute(order)
