"""Each element by itself, with broadcasting; and what works on one tensor and keeps its shape."""

from __future__ import annotations

import torch

from deepsp.compile.rules import Call, broadcast, overloads, rule
from deepsp.compile.tokens import Tokens

# Pointwise ops that carry no tag, or whose overloads before dispatch carry none.
_NAMES = """
    add sub mul div where masked_fill clamp pow to _to_copy clone contiguous detach alias
    lift_fresh_copy type_as float_power rsub celu selu elu silu gelu relu relu6 hardtanh hardswish
    leaky_relu mish softplus logsigmoid prelu dropout native_dropout alpha_dropout feature_dropout
    bernoulli rand_like randn_like randint_like zeros_like ones_like full_like empty_like fill
    __and__ __or__ __xor__ isnan isinf isfinite nan_to_num positive square logit erf sigmoid tanh
    threshold hardsigmoid softshrink hardshrink rrelu lerp addcmul addcdiv conj resolve_conj
    resolve_neg real view_as_complex view_as_real complex polar fake_quantize_per_tensor_affine
"""


@rule(*overloads(_NAMES))
def pointwise(call: Call) -> Tokens:
    """Operands are aligned; each is cut where the tokens are."""
    out = call.node.meta["val"]
    if call.target in _COMPLEX_VIEWS:
        return call.one_of()
    several = isinstance(out, (list, tuple))
    shape = call.graph.shape_of(call.node) if not several else [*call.shape(call.operands[0])]
    tokens = broadcast(call, call.operands, shape)
    return [tokens if isinstance(x, torch.Tensor) else None for x in out] if several else tokens


_COMPLEX_VIEWS = {torch.ops.aten.view_as_complex.default, torch.ops.aten.view_as_real.default}


@rule(torch.ops.aten.expand.default, torch.ops.aten.expand_as.default)
def expand(call: Call) -> Tokens:
    x, out = call.node.args[0], call.out
    tokens = call.tokens(x)
    if tokens is None:
        call.refuse("it takes its shape from tokens")
    place = tokens.at(tokens.dim + len(out) - len(call.shape(x)))

    def lower():
        shape = call.graph.shape(place.part(out, call.graph.rank))
        return call.graph.call(torch.ops.aten.expand.default, call.given(x), shape)

    call.lower = lower
    return place
