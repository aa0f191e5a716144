"""Calls a local attention: a function that sees the full sequence of some heads."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from deepsp.ranks.groups import Member
from deepsp.ranks.randomness import own_randomness
from deepsp.sequence.attention import parts

INDICES = ("head_indices", "query_indices")
"""Arguments that a local attention receives if it declares them."""


def indices_wanted(function: Callable | None) -> tuple[str, ...]:
    """Which of INDICES a local attention declares as arguments."""
    if function is None:
        return ()
    declared = declared_by(function)
    return tuple(name for name in INDICES if name in declared)


def why_whole(function: Callable | None, wanted: tuple[str, ...]) -> str | None:
    """Why a local attention needs whole heads, and what to do; None: it doesn't."""
    if function is None or "query_indices" in wanted:
        return None
    return (
        "local_attention sees all queries of its heads; let it declare an argument query_indices, "
        "the tokens of its queries, to be called with some of them"
    )


def check_exchange(
    exchange: str, function: Callable | None, wanted: tuple[str, ...], chunks: int | str
) -> str:
    """``exchange``; raises unless it is one that a local attention and ``chunks`` allow."""
    names = ("heads", "keys", "auto") if function is None else ("heads", "keys")
    if exchange not in names:
        raise ValueError(f"expected exchange to be one of {list(names)}, got {exchange!r}")
    if exchange == "keys" and chunks not in (1, "auto"):
        raise ValueError(
            f"expected chunks=1 with exchange 'keys', got {chunks}; leave it out, or pass "
            "exchange='heads'"
        )
    if exchange == "keys" and function is not None and "query_indices" not in wanted:
        raise ValueError(
            "expected a local_attention that declares an argument query_indices with exchange "
            "'keys': it gets some of the queries with all keys, and has to know which; got one "
            "without"
        )
    return exchange


def indices(wanted: tuple[str, ...], like: Tensor, cell: parts.Cell) -> dict[str, Tensor]:
    """The wanted arguments: the global indices of a cell's heads and queries."""
    values = dict(zip(INDICES, (cell.heads, sum(cell.queries, ())), strict=True))
    return {name: torch.ops.deepsp._indices_in(like, list(values[name])) for name in wanted}


def heads_before_tokens(function: Callable | None) -> str | None:
    """The name of a function that takes [B, H, S, D] in any layout, and would attend over heads if
    it got [B, S, H, D]; else None."""
    while True:
        if isinstance(function, functools.partial):
            function = function.func
        elif (inner := getattr(function, "_torchdynamo_orig_callable", None)) is not None:
            from torch._dynamo import external_utils  # imported already if Dynamo wraps

            # Dynamo wraps callables without Python code, such as a partial.
            wraps = getattr(inner, "__globals__", None) is vars(external_utils)
            function = inner.__wrapped__ if wraps else inner
        else:
            break
    op = torch.ops.aten.scaled_dot_product_attention
    for candidate, name in (
        (F.scaled_dot_product_attention, "scaled_dot_product_attention"),
        (op, "scaled_dot_product_attention"),
        (op.default, "scaled_dot_product_attention"),
    ):
        if function is candidate:
            return name
    flex = sys.modules.get("torch.nn.attention.flex_attention")
    return "flex_attention" if flex is not None and function is flex.flex_attention else None


def check_function(function: Callable | None, layout: str, advice: str) -> None:
    """Raises for a local attention that is known to take another layout. ``advice``: what to pass
    instead."""
    name = heads_before_tokens(function)
    if name is not None and layout != "bhsd":
        raise ValueError(
            f"expected local_attention to take {_shape(layout)}, but {name} takes "
            f"{_shape('bhsd')} and would attend over heads; pass {advice}"
        )


def _shape(layout: str) -> str:
    return "[" + ", ".join(d.upper() for d in layout) + "]"


class Watch:
    """Checks once what a local attention passes to ``scaled_dot_product_attention``. A wrapper that
    forgets to transpose attends over heads, without an error."""

    def __init__(self, function: Callable | None):
        self._looks = _names_sdpa(function)

    def over(self, shape: list[int], right: list[int], layout: str):
        """The context of one call. shape: of the function's q; right: as [B, H, S, D]."""
        if not self._looks or torch.compiler.is_compiling() or shape[:3] == right[:3]:
            return contextlib.nullcontext()
        self._looks = False
        return _SdpaSees(shape, layout)


def _names_sdpa(function: Callable | None) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, nn.Module):
        function = type(function).forward
    code = getattr(function, "__code__", None)
    if code is None or hasattr(function, "_torchdynamo_orig_callable"):
        return False
    sdpa = F.scaled_dot_product_attention
    try:
        variables = inspect.getclosurevars(function)
    except (TypeError, ValueError):  # not plain Python, or an unset variable
        return sdpa.__name__ in code.co_names
    values = (*variables.globals.values(), *variables.nonlocals.values())
    return sdpa.__name__ in code.co_names or any(value is sdpa for value in values)


class _SdpaSees(TorchFunctionMode):
    def __init__(self, shape: list[int], layout: str):
        super().__init__()
        self._shape, self._layout = shape, layout

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            query = args[0] if args else kwargs["query"]
            if list(query.shape[:3]) == self._shape[:3]:
                raise ValueError(
                    f"local_attention passes q as it gets it, {_shape(self._layout)} of shape "
                    f"{list(query.shape)}, to scaled_dot_product_attention, which takes "
                    f"{_shape('bhsd')} and would attend over heads; transpose q, k, v and the "
                    "output in it, or leave local_attention out"
                )
        return func(*args, **kwargs)


def autocasts(device: torch.device) -> bool:
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def check_kwargs(wanted: tuple[str, ...], kwargs: dict) -> None:
    for name in wanted:
        if name in kwargs:
            raise ValueError(
                f"expected no {name}, which deepsp passes to local_attention itself; leave it out"
            )


def check_heads(heads: int, kv_heads: int, v_heads: int) -> None:
    if kv_heads != v_heads or kv_heads == 0 or heads % kv_heads != 0:
        raise ValueError(
            "expected k and v to have the same number of heads, which divides that of q, got q, k "
            f"and v with {heads}, {kv_heads} and {v_heads} heads"
        )


PATTERN = ("documents", "window_size", "softcap", "sinks")
"""Options of attention besides the arguments of ``scaled_dot_product_attention``."""


def check_sdpa_arguments(
    args: tuple, kwargs: dict, names: tuple[str, ...], named: tuple[str, ...] = PATTERN
) -> None:
    """Raises for arguments that attention doesn't take without a local attention. ``named``:
    keyword-only ones."""
    if len(args) > len(names):
        raise ValueError(
            f"expected at most {len(names)} more positional arguments ({', '.join(names)}), got "
            f"{len(args)}"
        )
    for name in kwargs:
        if name == "enable_gqa" and name not in names:
            raise ValueError(
                "enable_gqa isn't an argument here: the number of kv heads follows from k_proj; "
                "leave it out"
            )
        if name not in (*names, *named):
            raise ValueError(
                f"expected an argument of scaled_dot_product_attention ({', '.join(names)}) or "
                f"{', '.join(named)}, got {name}; pass a local_attention that takes it"
            )


def declared_by(function: Callable) -> set[str]:
    """The names of the arguments that a function declares; ``**kwargs`` declares nothing."""
    try:
        parameters = inspect.signature(_declaring(function)).parameters.values()
    except (TypeError, ValueError):  # built in, without a signature
        return set()
    return {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}


def _declaring(function: Callable) -> Callable:
    """The callable with ``function``'s signature: for a module, its forward."""
    if isinstance(function, functools.partial):
        return functools.partial(_declaring(function.func), *function.args, **function.keywords)
    if isinstance(function, nn.Module):
        return getattr(function, "_orig_mod", function).forward  # inside torch.compile
    return function


def randomness_of(member: Member, device: torch.device):
    """The context for a rank's own random numbers, since its heads are different ones. Compiled
    code draws as its surroundings do. Enter it once a call, not once a chunk, so that the state of
    generators doesn't depend on the number of chunks."""
    if member[1] == 1 or torch.compiler.is_compiling():
        return contextlib.nullcontext()
    return own_randomness(member, device)


def attend(
    function: Callable[..., Tensor],
    qkv: tuple[Tensor, Tensor, Tensor],
    args: tuple,
    kwargs: dict,
    watch: Watch,
    layout: str = "bshd",
    head_dim: int | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Calls the local attention for some heads; q, k, v and the result are [B, S, h, D].
    ``head_dim``: the result's D; None: any. ``return_lse``: returns its log-sum-exp, too, [B, S,
    h].

    Raises:
        ValueError: the result isn't a tensor (or a tuple that begins with one), or has the wrong
            shape; there is no log-sum-exp.
    """
    shape, order = qkv[0].shape, parts.ORDERS[layout]
    seen = [shape[d] for d in order]
    if layout != "bshd":
        qkv = tuple(x.permute(order) for x in qkv)
    with watch.over(seen, [shape[d] for d in parts.ORDERS["bhsd"]], layout):
        out = function(*qkv, *args, **kwargs)
    lse = _lse_of(out, shape) if return_lse else None
    if isinstance(out, (tuple, list)) and out:
        out = out[0]  # flash attention also returns log-sum-exp
    if not isinstance(out, Tensor):
        raise ValueError(
            f"expected local_attention to return a tensor of shape {tuple(seen[:3])} and a head "
            f"dimension, got {type(out).__name__}"
        )
    wrong = out.dim() != 4 or list(out.shape[:3]) != seen[:3]
    if wrong or (head_dim is not None and out.size(3) != head_dim):
        expected = (
            f"{tuple(seen[:3])} and a head dimension"
            if head_dim is None
            else f"{(*seen[:3], head_dim)}"
        )
        raise ValueError(
            f"expected local_attention to return shape {expected}, got {tuple(out.shape)}"
        )
    out = out if layout == "bshd" else out.permute(order)
    if lse is None:
        return out
    wide = torch.float64 if out.dtype == torch.float64 else torch.float32
    return out, lse.to(wide).transpose(1, 2)


def _lse_of(result, shape: torch.Size) -> Tensor:
    """The log-sum-exp [B, h, S] that a local attention returns for q [B, S, h, D]."""
    lse = result[1] if isinstance(result, (tuple, list)) and len(result) > 1 else None
    lse = getattr(lse, "lse", lse)  # flex_attention's auxiliary output
    expected = (shape[0], shape[2], shape[1])
    if not isinstance(lse, Tensor) or tuple(lse.shape) != expected:
        raise ValueError(
            "expected local_attention to return its output and the log-sum-exp of shape "
            f"{expected} [batch, heads, sequence] with return_lse=True, got "
            f"{tuple(lse.shape) if isinstance(lse, Tensor) else type(lse).__name__} as the second; "
            "return (out, lse), or leave return_lse out"
        )
    return lse


def drops(attn_mask=None, dropout_p=0.0, *_, **__) -> bool:
    """Whether ``scaled_dot_product_attention`` with these arguments drops weights."""
    return dropout_p > 0


def sdpa(
    q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, *, where: tuple, **pattern
) -> Tensor:
    """Attention of a cell, without a local attention; q, k and v are [B, S, h, D]. ``where``: the
    number of query heads, and the cell as ops take it."""
    sharded = torch.compiler.is_compiling()
    return torch.ops.deepsp._attention_of_cell(
        q,
        k,
        v,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        *where,
        sharded_randomness=sharded,
        **_without_none(pattern),
    )


def check_sdpa(
    x, tokens, num_heads, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, **pattern
) -> None:
    """Raises for arguments of ``scaled_dot_product_attention`` that don't fit, before anything is
    sent."""
    dtype = x.dtype
    if attn_mask is not None and autocasts(x.device):
        dtype = attn_mask.dtype  # autocast casts it
    torch.ops.deepsp._check_attention(
        attn_mask,
        dropout_p,
        is_causal,
        dtype,
        x.size(0),
        num_heads,
        tokens,
        **_without_none(pattern),
    )


def _without_none(pattern: dict) -> dict:
    return {name: value for name, value in pattern.items() if value is not None}
