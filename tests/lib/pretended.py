"""Tensors that say that they are on a GPU, where there is none: the C++ runs that a GPU would run,
with values of the CPU, and every launch is counted. Flash attention and cuDNN's are computed by
their definition, with what PyTorch's kernels make of their arguments."""

from __future__ import annotations

import math

import torch
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

aten = torch.ops.aten


class Pretended(torch.Tensor):
    @staticmethod
    def __new__(cls, inner):
        new = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            inner.stride(),
            inner.storage_offset(),
            dtype=inner.dtype,
            device="cuda:0",
        )
        new.inner = inner
        return new

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} outside of OnGpu")


def _seen(queries, keys, longest, left, right):
    """Aligned at the lower right. A window as wide as the longest document has keys is none."""
    i = torch.arange(queries)[:, None] + keys - queries
    j = torch.arange(keys)
    seen = torch.ones(queries, keys, dtype=torch.bool)
    if left is not None and left < longest:
        seen &= j >= i - left
    if right is not None and right < longest:
        seen &= j <= i + right
    return seen


def _documents(q, k, cum_q, cum_k, max_k):
    """Of a call: (index of its queries, index of its keys, its log-sum-exp's index, longest)."""
    if cum_q is None:
        return [(n, n, n, k.size(1)) for n in range(q.size(0))]
    borders = zip(*(x.unfold(0, 2, 1).tolist() for x in (cum_q, cum_k)), strict=True)
    return [(slice(*a), slice(*b), (slice(None), slice(*a)), max_k) for a, b in borders]


def _scores(q, k, longest, scale, left, right):
    q, k = (x.double().transpose(0, 1) for x in (q, k))
    k = k.repeat_interleave(q.size(0) // k.size(0), 0)
    seen = _seen(q.size(1), k.size(1), longest, left, right)
    return (q @ k.mT * scale).masked_fill(~seen, -math.inf)


def _forward(
    q,
    k,
    v,
    cum_q,
    cum_k,
    max_q,
    max_k,
    dropout,
    causal,
    debug,
    *,
    scale=None,
    window_size_left=None,
    window_size_right=None,
):
    assert not dropout and q.dtype in (torch.bfloat16, torch.float16)
    window_size_right = 0 if causal else window_size_right
    out = torch.full(q.shape, math.nan, dtype=q.dtype)
    heads, tokens = q.size(-2), q.size(-3)
    log_sum = torch.full((*q.shape[:-3], heads, tokens), math.nan)
    for of_q, of_k, of_sum, longest in _documents(q, k, cum_q, cum_k, max_k):
        scores = _scores(q[of_q], k[of_k], longest, scale, window_size_left, window_size_right)
        values = v[of_k].double().transpose(0, 1)
        values = values.repeat_interleave(heads // values.size(0), 0)
        out[of_q] = (scores.softmax(-1) @ values).transpose(0, 1).to(q.dtype)
        log_sum[of_sum] = scores.logsumexp(-1).float()
    return out, log_sum, torch.empty(2), torch.empty(0), torch.empty(0)


def _backward(
    grad,
    q,
    k,
    v,
    out,
    log_sum,
    cum_q,
    cum_k,
    max_q,
    max_k,
    dropout,
    causal,
    *_,
    scale,
    window_size_left=None,
    window_size_right=None,
):
    assert log_sum.is_contiguous() and not dropout
    window_size_right = 0 if causal else window_size_right
    log_sum = log_sum.as_strided(  # by its address
        (*q.shape[:-3], q.size(-2), q.size(-3)), log_sum.stride(), log_sum.storage_offset()
    )
    dq, dk, dv = (torch.full(x.shape, math.nan, dtype=x.dtype) for x in (q, k, v))
    for of_q, of_k, of_sum, longest in _documents(q, k, cum_q, cum_k, max_k):
        scores = _scores(q[of_q], k[of_k], longest, scale, window_size_left, window_size_right)
        weights = (scores - log_sum[of_sum].double()[..., None]).exp()
        each = q.size(-2) // k.size(-2)
        query, key, value, of_out, result = (
            x.double().transpose(0, 1) for x in (q[of_q], k[of_k], v[of_k], grad[of_q], out[of_q])
        )
        key, value = (x.repeat_interleave(each, 0) for x in (key, value))
        delta = (of_out * result).sum(-1, keepdim=True)
        of_scores = weights * (of_out @ value.mT - delta) * scale

        def summed(x, each=each):
            return x.unflatten(0, (-1, each)).sum(1).transpose(0, 1)

        dq[of_q] = (of_scores @ key).transpose(0, 1).to(q.dtype)
        dk[of_k] = summed(of_scores.mT @ query).to(q.dtype)
        dv[of_k] = summed(weights.mT @ of_out).to(q.dtype)
    return dq, dk, dv


def _cudnn(q, k, v, bias, with_sums, dropout=0.0, causal=False, debug=False, *, scale=None):
    assert bias is None and with_sums and (not causal or q.size(2) == k.size(2))
    by_token = (x.transpose(1, 2) for x in (q, k, v))
    none = (None, None, 0, 0, 0.0, causal, False)
    out, log_sum, *_ = _forward(*by_token, *none[:2], 0, k.size(2), *none[4:], scale=scale)
    planned = torch.empty_like(q).copy_(out.transpose(1, 2))
    seed, offset = torch.empty(2, dtype=torch.long)
    return planned, log_sum[..., None], None, None, q.size(2), k.size(2), seed, offset, None


def _cudnn_backward(grad, q, k, v, out, log_sum, seed, offset, *others, scale):
    *none, _, _, _, causal = others
    assert none == [None] * 3  # a bias, borders
    assert log_sum.is_contiguous() and log_sum.shape == (*q.shape[:3], 1)
    # Plans are kept by the strides of q, k and v alone.
    assert grad.stride() == out.stride() == torch.empty_like(q).stride()
    by_token = [x.transpose(1, 2) for x in (grad, q, k, v, out)]
    gradients = _backward(
        *by_token, log_sum[..., 0], None, None, 0, 0, 0.0, causal, seed, offset, scale=scale
    )
    return tuple(x.transpose(1, 2) for x in gradients)


KERNELS = {
    aten._flash_attention_forward.default: _forward,
    aten._flash_attention_backward.default: _backward,
    aten._scaled_dot_product_cudnn_attention.default: _cudnn,
    aten._scaled_dot_product_cudnn_attention_backward.default: _cudnn_backward,
}
CUDA = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
NO_LAUNCH = ("empty", "empty_like", "empty_strided", "detach", "_fused_sdp_choice")


class OnGpu(TorchDispatchMode):
    """Runs what is called with Pretended tensors. ``launched``: the names of ops, but for views.
    ``choice``: the kernel that SDPA would take."""

    def __init__(self, choice=SDPBackend.CUDNN_ATTENTION):
        super().__init__()
        self.launched: list[str] = []
        self.choice = choice

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        returned = func._schema.returns
        alias = returned[0].alias_info if returned else None
        if func.overloadpacket.__name__ not in NO_LAUNCH and (alias is None or alias.is_write):
            self.launched.append(func.overloadpacket.__name__)
        if func is aten._fused_sdp_choice.default:
            return int(self.choice)
        args, kwargs = tree_map_only(Pretended, lambda x: x.inner, (args, kwargs or {}))
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CUDA"):
            found = func.redispatch(CUDA, *args, **kwargs)  # what a user registered
        else:
            found = KERNELS.get(func, func)(*args, **kwargs)
        return tree_map_only(torch.Tensor, Pretended, found)


def on_gpu(op: torch._ops.OpOverload, *args, mode=OnGpu):
    """Calls the op's kernel with floating-point CPU tensors as if they were a GPU's; what it
    returns, and the names of what it launches."""
    args = tree_map_only(
        torch.Tensor, lambda x: Pretended(x.detach()) if x.is_floating_point() else x, args
    )
    cpu = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)  # the same function as the GPU's key
    with mode() as mode, torch.no_grad():
        found = op.redispatch(cpu, *args)
    return tree_map_only(Pretended, lambda x: x.inner, found), mode.launched
