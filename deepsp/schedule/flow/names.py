"""Names of torch functions, by what they do."""

from __future__ import annotations


def words(text: str) -> set[str]:
    return set(text.split())


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


ABOUT = words(
    "shape size dim ndim ndimension numel nelement dtype device layout is_cuda is_cpu is_meta "
    "is_xpu is_mps is_floating_point is_complex is_sparse is_quantized is_nested is_leaf names "
    "get_device element_size itemsize nbytes len hash is_inference is_conj is_neg is_same_size "
    "grad_fn retains_grad stride is_contiguous storage_offset"
)
"""What they return doesn't depend on what a tensor holds."""


UNARY = words(
    "abs absolute acos acosh angle asin asinh atan atanh arccos arcsin arctan bitwise_not ceil "
    "clamp clamp_max clamp_min clip cos cosh deg2rad digamma elu celu selu erf erfc erfinv exp "
    "exp2 expm1 fix floor frac gelu hardshrink hardsigmoid hardswish hardtanh i0 invert isfinite "
    "isinf isnan isneginf isposinf leaky_relu lgamma log log10 log1p log2 logical_not logit "
    "logsigmoid mish nan_to_num prelu quick_gelu rad2deg reciprocal relu relu6 round rrelu rsqrt "
    "sgn sigmoid sign silu sin sinc sinh softplus softshrink softsign sqrt square tan tanh "
    "tanhshrink threshold trunc isreal signbit special_expit special_erf swish"
)


BINARY = words(
    "addcdiv addcmul atan2 bitwise_and bitwise_or bitwise_xor and or xor rand ror rxor copysign eq "
    "floor_divide floordiv rfloordiv fmax fmin fmod ge greater greater_equal gt heaviside hypot "
    "isclose ldexp le lerp less less_equal logaddexp logaddexp2 logical_and logical_or logical_xor "
    "lt maximum minimum mod rmod ne nextafter not_equal pow float_power remainder rpow xlogy "
    "bitwise_left_shift bitwise_right_shift lshift rshift rdiv rtruediv"
)


SUMS = {"add", "radd", "sub", "rsub", "subtract", "addition"}


PRODUCTS = {"mul", "rmul", "multiply"}


QUOTIENTS = {"div", "truediv", "divide", "true_divide"}


SAME = words(
    "clone contiguous to type float double half bfloat16 cpu cuda neg negative positive pos alias "
    "detach data real requires_grad type_as copy deepcopy pin_memory _to_copy cfloat long int "
    "short bool char byte resolve_conj resolve_neg stop_gradient as_subclass"
)


LINEAR_CASTS = SAME - {"long", "int", "short", "bool", "char", "byte"}
