"""Each element by itself, with broadcasting; and what works on one tensor and keeps its shape."""

from __future__ import annotations

import torch

from deepsp.compile.sharding.rules import Call, broadcast, overloads, rule
from deepsp.compile.sharding.tokens import Tokens, same

# Pointwise ops that carry no tag, or whose overloads before dispatch carry none.
_NAMES = """
    add sub mul div where masked_fill clamp pow to _to_copy clone contiguous detach alias
    lift_fresh_copy type_as float_power rsub celu selu elu silu gelu relu relu6 hardtanh hardswish
    leaky_relu mish softplus logsigmoid prelu dropout native_dropout alpha_dropout
    bernoulli rand_like randn_like randint_like zeros_like ones_like full_like empty_like fill
    __and__ __or__ __xor__ isnan isinf isfinite nan_to_num positive square logit erf sigmoid tanh
    threshold hardsigmoid softshrink hardshrink rrelu lerp addcmul addcdiv conj resolve_conj
    resolve_neg real view_as_complex view_as_real complex polar fake_quantize_per_tensor_affine
"""


@rule(*overloads(_NAMES))
def pointwise(call: Call) -> Tokens:
    """Operands are aligned; each is cut where the tokens are."""
    out = call.node.meta["val"]
    if call.target in _ONE_OPERAND:
        first, graph, dtype = call.node.args[0], call.graph, call.node.meta["val"].dtype
        if call.tokens(first) is None:
            call.lower = lambda: graph.call(torch.ops.aten.to.dtype, graph.full(first), dtype)
        return call.tokens(first)
    several = isinstance(out, (list, tuple))
    shape = call.graph.shape_of(call.node) if not several else [*call.shape(call.operands[0])]
    tokens = broadcast(call, call.operands, shape)
    return [tokens if isinstance(x, torch.Tensor) else None for x in out] if several else tokens


# What else they are given says a dtype, or they have another shape.
_ONE_OPERAND = {
    torch.ops.aten.view_as_complex.default,
    torch.ops.aten.view_as_real.default,
    torch.ops.aten.type_as.default,
    torch.ops.aten.to.other,
}


@rule(torch.ops.aten.feature_dropout.default, torch.ops.aten.feature_alpha_dropout.default)
def feature_dropout(call: Call) -> Tokens:
    """[B, C, ...]: channels are dropped, each as a whole."""
    tokens = call.one_of()
    if tokens.dim > 1 and call["train"] and call["p"] > 0:
        call.refuse(
            "it drops channels for all tokens at once, and every rank would drop different ones"
        )
    return tokens


@rule(torch.ops.aten.expand.default, torch.ops.aten.expand_as.default)
def expand(call: Call) -> Tokens:
    x, out = call.node.args[0], call.out
    tokens, like = call.tokens(x), call["other"]
    behind = len(out) - len(call.shape(x))
    if tokens is not None:
        place = tokens.at(tokens.dim + behind)
    elif like is not None and call.tokens(like) is not None:
        place = call.tokens(like)
        dim = place.dim - behind
        call.want(x, place.at(dim) if dim >= 0 and not same(call.shape(x)[dim], 1) else None)
    else:
        call.refuse("it takes its shape from a sharded tensor")

    def lower():
        shape = call.graph.shape(place.part(out, call.graph.rank))
        return call.graph.call(torch.ops.aten.expand.default, call.given(x), shape)

    call.lower = lower
    return place
