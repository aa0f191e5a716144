"""The table of what each torch function does to placements."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from deepsp.schedule.flow import (
    exchanges,
    lookups,
    names,
    pointwise,
    products,
    reductions,
    reshapes,
    views,
)
from deepsp.schedule.flow.values import Call, Place, Split
from deepsp.schedule.placement import REPLICATE

BEFORE: dict[str, Callable[[Call], Place]] = {}
"""By name: what comes out, from what goes in; called before the function is."""

AFTER: dict[str, Callable] = {}
"""The same, called with what the function returned: its sizes tell. A list: one for each output."""


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
    for name in (
        names.UNARY | names.BINARY | names.SUMS | names.PRODUCTS | names.QUOTIENTS | names.DROPOUTS
    ):
        BEFORE[name] = pointwise.pointwise
    for name in ("where", "masked_fill", "bernoulli"):
        BEFORE[name] = pointwise.pointwise
    for name in names.SAME:
        BEFORE[name] = pointwise.same
    for name in ("zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like"):
        BEFORE[name] = pointwise.like
    BEFORE["randint_like"] = pointwise.like
    for name in ("new_zeros", "new_ones", "new_full", "new_empty", "new_tensor"):
        BEFORE[name] = lambda call: REPLICATE
    for name in ("zero", "fill", "normal", "uniform", "random", "exponential"):
        BEFORE[name] = pointwise.like
    BEFORE["copy"] = pointwise.copy
    for name in ("sum", "nansum"):
        BEFORE[name] = reductions.reduction(linear=True)
    BEFORE["mean"] = reductions.reduction(linear=True)
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
        BEFORE[name] = reductions.reduction(keep=3 if name in ("var", "std") else 2)
    BEFORE["norm"] = BEFORE["vector_norm"] = reductions.reduction(position=2, keep=3)
    BEFORE["kthvalue"] = reductions.reduction(position=2, default=-1, keep=3)
    for name in [
        "softmax",
        "log_softmax",
        "softmin",
        "logcumsumexp",
        "cumprod",
        "cummax",
        "cummin",
    ]:
        BEFORE[name] = reductions.along(1)
    for name in ("cumsum", "diff", "flip"):
        BEFORE[name] = reductions.along(1, name="dims" if name == "flip" else "dim", linear=True)
    BEFORE["roll"] = reductions.along(2, name="dims", linear=True)
    for name in ("sort", "argsort", "glu"):
        BEFORE[name] = reductions.along(1, default=-1)
    BEFORE["topk"] = reductions.along(2, default=-1)
    BEFORE["normalize"] = reductions.along(2, default=1)
    BEFORE["gumbel_softmax"] = reductions.along(4, default=-1)
    for name in ("tril", "triu"):
        BEFORE[name] = reductions.last(lambda call: 2, linear=True)
    for name in ("layer_norm", "rms_norm"):
        BEFORE[name] = reductions.last(reductions.normalized)
    BEFORE["batch_norm"] = BEFORE["instance_norm"] = reductions.batch_norm
    BEFORE["group_norm"] = reductions.group_norm
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
        BEFORE[name] = lookups.loss
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
    BEFORE["gather"] = BEFORE["take_along_dim"] = lookups.gather_along
    BEFORE["index_select"] = lookups.index_select
    BEFORE["pad"] = lookups.pad
    BEFORE["setitem"] = lookups.setitem
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
        AFTER[name] = reshapes.reshape
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
    AFTER["view_as_complex"], AFTER["view_as_real"] = views.as_complex, views.as_real
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
