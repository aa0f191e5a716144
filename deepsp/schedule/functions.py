"""The table of what each torch function does to placements."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from deepsp.schedule import exchanges, products, views
from deepsp.schedule.placement import PARTIAL, WHOLE
from deepsp.schedule.values import Call, Place, Split


def words(text: str) -> set[str]:
    return set(text.split())


BEFORE: dict[str, Callable[[Call], Place]] = {}
"""By name: what comes out, from what goes in; called before the function is."""

AFTER: dict[str, Callable] = {}
"""The same, called with what the function returned: its sizes tell. A list: one for each output."""

FILLED = words(
    "zeros ones full empty new_zeros new_ones new_full new_empty zeros_like ones_like full_like "
    "empty_like scalar_tensor empty_strided new_empty_strided"
)
"""Tensors that are the same number everywhere."""

LIKE = words(
    "zeros_like ones_like full_like empty_like rand_like randn_like randint_like new_zeros "
    "new_ones new_full new_empty new_tensor new_empty_strided detach data stop_gradient"
)
"""No gradient goes through."""

RANDOM = words(
    "rand randn randint randperm normal bernoulli multinomial poisson rand_like randn_like "
    "randint_like uniform exponential geometric cauchy log_normal random gumbel_softmax"
)

DROPOUTS = words(
    "dropout alpha_dropout feature_alpha_dropout feature_dropout dropout1d dropout2d dropout3d "
    "rrelu native_dropout"
)

READS = words(
    "item tolist numpy bool int float index complex is_nonzero equal allclose __array__ "
    "__contains__ contains __format__"
)
"""Numbers that Python sees. Which of them also make tensors is told by what they return."""

_UNARY = words(
    "abs absolute acos acosh angle asin asinh atan atanh arccos arcsin arctan bitwise_not ceil "
    "clamp clamp_max clamp_min clip cos cosh deg2rad digamma elu celu selu erf erfc erfinv exp "
    "exp2 expm1 fix floor frac gelu hardshrink hardsigmoid hardswish hardtanh i0 invert isfinite "
    "isinf isnan isneginf isposinf leaky_relu lgamma log log10 log1p log2 logical_not logit "
    "logsigmoid mish nan_to_num prelu quick_gelu rad2deg reciprocal relu relu6 round rrelu rsqrt "
    "sgn sigmoid sign silu sin sinc sinh softplus softshrink softsign sqrt square tan tanh "
    "tanhshrink threshold trunc isreal signbit special_expit special_erf swish hardswish"
)
_BINARY = words(
    "addcdiv addcmul atan2 bitwise_and bitwise_or bitwise_xor and or xor rand ror rxor copysign eq "
    "floor_divide floordiv rfloordiv fmax fmin fmod ge greater greater_equal gt heaviside hypot "
    "isclose ldexp le lerp less less_equal logaddexp logaddexp2 logical_and logical_or logical_xor "
    "lt maximum minimum mod rmod ne nextafter not_equal pow float_power remainder rpow xlogy "
    "bitwise_left_shift bitwise_right_shift lshift rshift rdiv rtruediv"
)
_SUMS = {"add", "radd", "sub", "rsub", "subtract", "addition"}
_PRODUCTS = {"mul", "rmul", "multiply"}
_QUOTIENTS = {"div", "truediv", "divide", "true_divide"}
_SAME = words(
    "clone contiguous to type float double half bfloat16 cpu cuda neg negative positive pos alias "
    "detach data real requires_grad type_as copy deepcopy pin_memory _to_copy cfloat long int "
    "short bool char byte resolve_conj resolve_neg stop_gradient as_subclass"
)
_LINEAR_CASTS = _SAME - {"long", "int", "short", "bool", "char", "byte"}


def pointwise(call: Call) -> Place:
    """Each number comes from those at its place, with broadcasting."""
    if any(v.partial for _, v in call.tensors):
        return _partial(call)
    sharded = [(t, v) for t, v in call.tensors if v.split]
    if not sharded:
        return WHOLE
    ndim = max(t.dim() for t, _ in call.tensors)
    first, of = sharded[0]
    place = of.place
    axis = None if place.axis is None else place.axis + ndim - first.dim()
    for t, v in sharded[1:]:
        if v.place.axis is None or axis is None:
            if v.place.axis is not None or axis is not None or t.shape != first.shape:
                unknown = of if axis is None else v
                call.fail_split(unknown, "it meets another sharded tensor")
        elif v.place.axis + ndim - t.dim() != axis or v.place.parts != place.parts:
            call.fail(
                f"{of.name} is {place}, of shape {list(first.shape)} here, {v.name} is {v.place}, "
                f"of shape {list(t.shape)}: gather one of them with all_gather"
            )
    for t, v in call.tensors:
        if not v.whole or v.uniform or t.numel() == 1:
            continue
        if axis is None:
            call.fail_split(of, f"it meets {v.name}, which is whole")
        at = axis - ndim + t.dim()
        if at >= 0 and t.size(at) != 1:
            call.fail(
                f"{of.name} is {place}, of shape {list(first.shape)} here, but {v.name} is whole, "
                f"of shape {list(t.shape)}: its axis {at} would be used alike on every rank; "
                "gather the first with all_gather or split the second with scatter (what is made "
                "from this rank's sizes, such as positions, has to begin at this rank's place)"
            )
    return place.at(axis)


def _partial(call: Call) -> Place:
    """Only what is linear commutes with the sum over the ranks."""
    name = call.name
    partial = [v for _, v in call.tensors if v.partial]
    others = [v for _, v in call.tensors if not v.partial]
    value = partial[0]
    sharded = next((v for v in others if v.split), None)
    if sharded is not None:
        call.fail_partial(value, f"it meets {sharded.name}, which is {sharded.place}")
    if name in _SUMS:
        numbers = [
            x for x in (*call.args[:2], call.kwargs.get("other")) if isinstance(x, (int, float))
        ]
        if others or any(n != 0 for n in numbers):
            other = others[0].name if others else str(numbers[0])
            call.fail_partial(value, f"{other}, which is whole, would count P times, once a rank")
        return PARTIAL
    if name in _PRODUCTS and len(partial) == 1:
        return PARTIAL
    if name in _QUOTIENTS and len(partial) == 1 and call.place(call.args[0]) is PARTIAL:
        if call.kwargs.get("rounding_mode") is None:
            return PARTIAL
    elif name == "masked_fill":
        places = [call.place(x) for x in call.args[:2]]
        if places == [PARTIAL, WHOLE] and call.arg(2, "value") == 0:
            return PARTIAL
    elif name == "where" and len(call.args) == 3 and call.place(call.args[0]) is WHOLE:
        if all(
            call.place(x) is PARTIAL or (not isinstance(x, Tensor) and x == 0)
            for x in call.args[1:]
        ):
            return PARTIAL
    elif name in DROPOUTS - {"alpha_dropout", "feature_alpha_dropout", "rrelu"}:
        return PARTIAL
    call.fail_partial(value, "this isn't linear: of the sum it isn't the sum")


def same(call: Call) -> Place:
    x = call.args[0] if call.args else next(iter(call.kwargs.values()))
    place = call.place(x)
    if place is PARTIAL and call.name not in _LINEAR_CASTS:
        _partial(call)
    return place


def like(call: Call) -> Place:
    """Of the sizes of another, if no others are given."""
    place = call.place(call.args[0])
    return place if isinstance(place, Split) else WHOLE


def copy(call: Call) -> Place:
    """``x.copy_(y)``: x becomes y, broadcast."""
    target, source = call.args[:2]
    place = call.place(source)
    if isinstance(place, Split) and place.axis is not None:
        return place.at(place.axis + target.dim() - source.dim())
    held = call.value(target)
    if held.split and place is WHOLE:
        return pointwise(call)
    return place


def _dims(x: Tensor, dim) -> list[int] | None:
    if dim is None or (isinstance(dim, (tuple, list)) and len(dim) == 0):
        return None
    dims = [dim] if isinstance(dim, int) else list(dim)
    return [d % max(x.dim(), 1) for d in dims]


def _reduction(position: int = 1, default=None, linear: bool = False, keep: int = 2):
    def rule(call: Call) -> Place:
        x = call.arg(0, "input")
        value = call.value(x)
        place = value.place
        dim = call.arg(position, "dim", call.kwargs.get("axis", default))
        if isinstance(dim, Tensor):
            return pointwise(call)  # max(x, y)
        if not isinstance(dim, (int, tuple, list, type(None))) or isinstance(dim, bool):
            dim = default
        if place is PARTIAL:
            if not linear:
                call.fail_partial(value, "this isn't linear: of the sum it isn't the sum")
            return place
        if not isinstance(place, Split):
            return place
        dims = _dims(x, dim)
        keepdim = bool(call.arg(keep, "keepdim", False))
        if dims is None or place.axis in dims or place.axis is None:
            if call.name in ("sum", "nansum", "count_nonzero"):
                if place.axis is None and dims is not None:
                    call.fail_split(value, "it is summed along one axis")
                if keepdim or dims is None or place.axis in dims:
                    return PARTIAL
            more = " (a sum can be: it is partial then)" if call.name == "mean" else ""
            call.fail_split(value, f"it is reduced over the sharded axis{more}")
        if keepdim:
            return place
        return place.at(place.axis - sum(d < place.axis for d in dims))

    return rule


def _along(position: int, default=None, name: str = "dim", linear: bool = False):
    def rule(call: Call) -> Place:
        x = call.arg(0, "input")
        value = call.value(x)
        place = value.place
        if place is PARTIAL and not linear:
            call.fail_partial(value, "this isn't linear: of the sum it isn't the sum")
        if any(v is not value and not v.whole for _, v in call.tensors):
            call.fail("another of its arguments isn't whole: gather it with all_gather")
        if not isinstance(place, Split):
            return place
        dims = _dims(x, call.arg(position, name, default))
        if dims is None or place.axis is None or place.axis in dims:
            call.fail_split(value, "it works along the sharded axis")
        return place

    return rule


def _last(count: Callable[[Call], int], linear: bool = False):
    """Works along the last dimensions."""

    def rule(call: Call) -> Place:
        x = call.arg(0, "input")
        value = call.value(x)
        place = value.place
        if place is PARTIAL and not linear:
            call.fail_partial(value, "this isn't linear: of the sum it isn't the sum")
        for t, v in call.tensors:
            if t is not x and not v.whole:
                call.fail(
                    f"{v.name} is {v.place}, which this function can't take: a norm over a sharded "
                    "axis is sharded through the schedule, whose statistics are the group's"
                )
        if isinstance(place, Split) and (place.axis is None or place.axis >= x.dim() - count(call)):
            call.fail_split(value, "it works along the sharded axis: statistics of a part")
        return place

    return rule


def _normalized(call: Call) -> int:
    shape = call.arg(1, "normalized_shape")
    return 1 if isinstance(shape, int) else len(shape)


def batch_norm(call: Call) -> Place:
    x = call.arg(0, "input")
    value = call.value(x)
    if value.partial:
        call.fail_partial(value, "this isn't linear")
    bad = [v for t, v in call.tensors if t is not x and not v.whole]
    if value.split and (bad or value.place.axis == 1 or value.place.axis is None):
        call.fail_split(value, "its channels are sharded")
    if bad:
        call.fail(f"{bad[0].name} is {bad[0].place}: gather it with all_gather")
    training = call.arg(5, "training", call.kwargs.get("use_input_stats", False))
    if value.split and (training or (call.name == "instance_norm" and value.place.axis != 0)):
        call.fail_split(value, "its statistics would be those of this rank's part")
    return value.place


def group_norm(call: Call) -> Place:
    x = call.arg(0, "input")
    value = call.value(x)
    if value.partial:
        call.fail_partial(value, "this isn't linear")
    if value.split and value.place.axis != 0:
        call.fail_split(value, "its statistics would be those of this rank's part")
    if any(v is not value and not v.whole for _, v in call.tensors):
        call.fail("its weight or bias is sharded: gather it with all_gather")
    return value.place


def loss(call: Call) -> Place:
    """Losses with ``reduction``; those of classes have them along axis 1 (0 without a batch)."""
    x, target = call.arg(0, "input"), call.arg(1, "target")
    classes = call.name in ("cross_entropy", "nll_loss")
    kind = call.kwargs.get("reduction")
    if kind is None:
        kind = next((a for a in call.args[2:] if isinstance(a, str)), "mean")
    of, to = call.value(x), call.value(target)
    for v in (of, to):
        if v.partial:
            call.fail_partial(v, "this isn't linear")
    sharded = of if of.split else to if to.split else None
    if sharded is None:
        return WHOLE
    place = sharded.place
    if classes and of.split and place.axis == min(1, x.dim() - 1):
        call.fail_split(of, "its classes (the vocabulary) are sharded")
    if kind == "mean":
        call.fail(
            f"{sharded.name} is {place}: the mean over this rank's part isn't that of the whole; "
            "use deepsp.cross_entropy, whose mean is that over all ranks' tokens, or sync it with "
            "all_gather before"
        )
    if place.axis is None:
        call.fail_split(sharded, "its classes can't be told from its tokens")
    at = place.axis - (1 if classes and of.split and place.axis > 1 else 0)
    for t, v in ((x, of), (target, to)):
        where = at + (1 if classes and t is x and at >= 1 and x.dim() > 1 else 0)
        if v.whole and not v.uniform and where < t.dim() and t.size(where) != 1:
            call.fail(
                f"{sharded.name} is {place}, {v.name} is whole: split it with scatter (labels: "
                "deepsp.shard), or gather the other with all_gather"
            )
        if v.split and v.place.axis != where:
            call.fail(f"{of.name} is {of.place}, {to.name} is {to.place}: they don't fit")
    return PARTIAL if kind == "sum" else place.at(at)


def gather_along(call: Call) -> Place:
    """``x.gather(dim, index)``: both have the same axes."""
    x = call.args[0]
    dim, index = call.arg(1, "dim"), call.arg(2, "index")
    if not isinstance(dim, int):  # take_along_dim(x, indices, dim)
        dim, index = call.arg(2, "dim"), call.arg(1, "indices")
    of, by = call.value(x), call.value(index)
    for v in (of, by):
        if v.partial:
            call.fail_partial(v, "it is looked up")
    if not of.split and not by.split:
        return WHOLE
    if dim is None or not (of.split and by.split) or of.place.axis != by.place.axis:
        call.fail(f"{of.name} is {of.place}, its index {by.place}: they have to be sharded alike")
    if of.place.axis is None or dim % x.dim() == of.place.axis:
        call.fail_split(of, "it is looked up along the sharded axis")
    return of.place


def index_select(call: Call) -> Place:
    x, dim, index = call.args[0], call.arg(1, "dim") % call.args[0].dim(), call.arg(2, "index")
    of, by = call.value(x), call.value(index)
    if by.partial:
        call.fail_partial(by, "it is an index")
    if by.split:
        if not of.whole:
            call.fail("both the tensor and its index are sharded: gather one with all_gather")
        return by.place.at(dim)
    if of.split and of.place.axis in (None, dim):
        call.fail_split(of, "it is looked up along the sharded axis")
    return of.place


def pad(call: Call) -> Place:
    x, sizes = call.arg(0, "input"), list(call.arg(1, "pad"))
    value = call.value(x)
    if value.partial and (call.arg(3, "value") or 0) != 0:
        call.fail_partial(value, "it is padded with what isn't zero")
    if value.split:
        padded = [x.dim() - 1 - n // 2 for n, size in enumerate(sizes) if size != 0]
        if padded and (value.place.axis is None or value.place.axis in padded):
            call.fail_split(value, "it is padded along the sharded axis")
    return value.place


def setitem(call: Call) -> Place:
    x, index, source = call.args[:3]
    held = call.value(x)
    given = call.place(source)
    if any(not v.whole for t, v in call.tensors if t is not x and t is not source):
        call.fail("it writes at indices that aren't whole: gather them with all_gather")
    if held.whole and given is WHOLE:
        return WHOLE
    found = views._indices(x, index)
    if given is WHOLE and held.split and held.place.axis is not None:
        at = 0
        for i in found:
            if i is None:
                continue
            one = not isinstance(source, Tensor) or source.numel() == 1
            if at == held.place.axis and views._full(i, x.size(at)) and one:
                return held.place
            at += 1
    if given == held.place and (given is PARTIAL or all(views._full(i, 0) for i in found)):
        return given
    call.fail(
        f"{held.name} is {held.place}, what is written into it {given}: they can't be one; "
        "sync the first with all_gather (what is partial: all_reduce), or use where"
    )


def broadcast(call: Call) -> list[Place]:
    tensors = (
        call.args[0]
        if len(call.args) == 1 and not isinstance(call.args[0], Tensor)
        else (call.args)
    )
    ndim = max(t.dim() for t in tensors)
    places = [call.place(t) for t in tensors]
    return [
        p.at(p.axis + ndim - t.dim()) if isinstance(p, Split) and p.axis is not None else p
        for p, t in zip(places, tensors, strict=True)
    ]


def _fill():
    for name in _UNARY | _BINARY | _SUMS | _PRODUCTS | _QUOTIENTS | DROPOUTS:
        BEFORE[name] = pointwise
    for name in ("where", "masked_fill", "bernoulli"):
        BEFORE[name] = pointwise
    for name in _SAME:
        BEFORE[name] = same
    for name in ("zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like"):
        BEFORE[name] = like
    BEFORE["randint_like"] = like
    for name in ("new_zeros", "new_ones", "new_full", "new_empty", "new_tensor"):
        BEFORE[name] = lambda call: WHOLE
    for name in ("zero", "fill", "normal", "uniform", "random", "exponential"):
        BEFORE[name] = like
    BEFORE["copy"] = copy
    for name in ("sum", "nansum"):
        BEFORE[name] = _reduction(linear=True)
    BEFORE["mean"] = _reduction(linear=True)
    for name in [
        "amax",
        "amin",
        "max",
        "min",
        "argmax",
        "argmin",
        "prod",
        "any",
        "all",
        "logsumexp",
        "var",
        "std",
        "var_mean",
        "std_mean",
        "median",
        "nanmean",
        "nanmedian",
        "count_nonzero",
        "mode",
        "aminmax",
    ]:
        BEFORE[name] = _reduction(keep=3 if name in ("var", "std") else 2)
    BEFORE["norm"] = BEFORE["vector_norm"] = _reduction(position=2, keep=3)
    BEFORE["kthvalue"] = _reduction(position=2, default=-1, keep=3)
    for name in [
        "softmax",
        "log_softmax",
        "softmin",
        "logcumsumexp",
        "cumprod",
        "cummax",
        "cummin",
    ]:
        BEFORE[name] = _along(1)
    for name in ("cumsum", "diff", "flip"):
        BEFORE[name] = _along(1, name="dims" if name == "flip" else "dim", linear=True)
    BEFORE["roll"] = _along(2, name="dims", linear=True)
    for name in ("sort", "argsort", "glu"):
        BEFORE[name] = _along(1, default=-1)
    BEFORE["topk"] = _along(2, default=-1)
    BEFORE["normalize"] = _along(2, default=1)
    BEFORE["gumbel_softmax"] = _along(4, default=-1)
    for name in ("tril", "triu"):
        BEFORE[name] = _last(lambda call: 2, linear=True)
    for name in ("layer_norm", "rms_norm"):
        BEFORE[name] = _last(_normalized)
    BEFORE["batch_norm"] = BEFORE["instance_norm"] = batch_norm
    BEFORE["group_norm"] = group_norm
    for name in [
        "cross_entropy",
        "nll_loss",
        "mse_loss",
        "l1_loss",
        "smooth_l1_loss",
        "huber_loss",
        "binary_cross_entropy",
        "binary_cross_entropy_with_logits",
        "kl_div",
    ]:
        BEFORE[name] = loss
    BEFORE["linear"] = products.linear
    for name in ("matmul", "rmatmul", "mm", "bmm", "mv", "dot", "inner"):
        BEFORE[name] = products.matmul
    BEFORE.pop("inner")
    for name in ("addmm", "baddbmm", "addmv", "addbmm"):
        BEFORE[name] = products.addmm
    BEFORE.pop("addbmm")
    BEFORE["einsum"] = products.einsum
    BEFORE["outer"] = products.bilinear_outer
    for name in ("conv1d", "conv2d", "conv3d"):
        BEFORE[name] = products.convolution
    BEFORE["embedding"] = products.embedding
    BEFORE["scaled_dot_product_attention"] = products.attention
    BEFORE["gather"] = BEFORE["take_along_dim"] = gather_along
    BEFORE["index_select"] = index_select
    BEFORE["pad"] = pad
    BEFORE["setitem"] = setitem
    BEFORE["broadcast_tensors"] = broadcast
    BEFORE["one_hot"] = lambda call: call.place(call.args[0])
    BEFORE.update(exchanges.RULES)

    for name in [
        "view",
        "reshape",
        "flatten",
        "unflatten",
        "ravel",
        "view_as",
        "reshape_as",
        "unsafe_view",
    ]:
        AFTER[name] = views.reshape
    for name in [
        "transpose",
        "swapaxes",
        "swapdims",
        "permute",
        "t",
        "T",
        "mT",
        "H",
        "mH",
        "adjoint",
    ]:
        AFTER[name] = views.transpose
    AFTER["movedim"] = AFTER["moveaxis"] = views.movedim
    AFTER["squeeze"], AFTER["unsqueeze"] = views.squeeze, views.unsqueeze
    for name in ("expand", "expand_as", "broadcast_to"):
        AFTER[name] = views.expand
    AFTER["repeat_interleave"] = views.repeat_interleave
    for name in [
        "split",
        "chunk",
        "tensor_split",
        "unbind",
        "split_with_sizes",
        "unsafe_split",
        "unsafe_chunk",
    ]:
        AFTER[name] = views.split
    AFTER["narrow"], AFTER["select"] = views.narrow, views.select
    AFTER["getitem"] = views.getitem
    for name in ("cat", "concat", "concatenate", "stack"):
        BEFORE[name] = views.cat


_fill()
