"""What benchmarks/exchange.py compares: one exchange there and back, forward and backward, around
an attention that does nothing."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import bench
import torch
import torch.distributed as dist
from torch import Tensor

import deepsp


class Nothing(torch.autograd.Function):
    """An attention that costs nothing: its results exist before."""

    @staticmethod
    def forward(ctx, q, k, v, results):
        ctx.results = results
        return results[0]

    @staticmethod
    def backward(ctx, grad):
        return *ctx.results[1:], None


def do_nothing(results: dict) -> Callable[..., Tensor]:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        key = (q.shape, k.shape)
        if key not in results:
            results[key] = [torch.randn(x.shape, dtype=x.dtype) for x in (q, q, k, v)]
        return Nothing.apply(q, k, v, results[key])

    return attention


_kept: dict[str, Tensor] = {}


def _keep(name: str, like: Tensor) -> Tensor:
    """Return the same tensor for the same shape, at every call."""
    key = f"{name} {tuple(like.shape)} {like.dtype}"
    if key not in _kept:
        _kept[key] = torch.randn(like.shape, dtype=like.dtype)
    return _kept[key]


@torch.library.custom_op("deepsp_benchmark::nothing", mutates_args=())
def nothing(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """:class:`Nothing` as an op, for compiled code."""
    return _keep("out", q)


@torch.library.custom_op("deepsp_benchmark::nothing_backward", mutates_args=())
def nothing_backward(grad: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _keep("dq", grad), _keep("dk", k), _keep("dv", v)


def _contiguous(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


nothing.register_fake(lambda q, k, v: _contiguous(q))
nothing_backward.register_fake(lambda *inputs: tuple(map(_contiguous, inputs)))
nothing.register_autograd(
    lambda ctx, grad: nothing_backward(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[1:]),
)


class TorchSeqToHeads(torch.autograd.Function):
    """Exchanges [B, S/P, H, D] for [B, S, H/P, D] with torch alone."""

    @staticmethod
    def forward(ctx, x):
        return torch_exchange(x, by_heads=True)

    @staticmethod
    def backward(ctx, grad):
        return torch_exchange(grad, by_heads=False)


class TorchHeadsToSeq(torch.autograd.Function):
    """Exchanges [B, S, H/P, D] for [B, S/P, H, D] with torch alone."""

    @staticmethod
    def forward(ctx, x):
        return torch_exchange(x, by_heads=False)

    @staticmethod
    def backward(ctx, grad):
        return torch_exchange(grad, by_heads=True)


def torch_exchange(x: Tensor, by_heads: bool) -> Tensor:
    size = dist.get_world_size()
    b, s, h, d = x.shape
    if by_heads:
        sent = x.reshape(b, s, size, h // size, d).permute(2, 0, 1, 3, 4).contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        return received.permute(1, 0, 2, 3, 4).reshape(b, size * s, h // size, d)
    sent = x.reshape(b, size, s // size, h, d).permute(1, 0, 2, 3, 4).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    return received.permute(1, 2, 0, 3, 4).reshape(b, s // size, size * h, d)


def torch_alone(q: Tensor, k: Tensor, v: Tensor, attention) -> Tensor:
    size = dist.get_world_size()
    if k.size(2) < size:  # a kv head for every rank
        k, v = (x.repeat_interleave(size // x.size(2), 2) for x in (k, v))
    return TorchHeadsToSeq.apply(attention(*(TorchSeqToHeads.apply(x) for x in (q, k, v))))


def deepspeed(attention) -> Callable[..., Tensor]:
    """Return DeepSpeed's DistributedAttention."""
    import deepspeed.comm
    from deepspeed.sequence.layer import DistributedAttention

    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed("gloo", verbose=False)
    theirs = DistributedAttention(attention, dist.group.WORLD, scatter_idx=2, gather_idx=1)
    return lambda q, k, v: theirs(q, k, v, 0)


def yunchang(attention) -> Callable[..., Tensor]:
    """Return yunchang's Ulysses."""
    from yunchang.kernels import AttnType
    from yunchang.ulysses import UlyssesAttention

    theirs = UlyssesAttention(dist.group.WORLD, attn_type=AttnType.TORCH_MATH)
    theirs.attn_fn = lambda q, k, v, *_, **__: attention(q, k, v)
    return theirs


def floor(shape: tuple[int, ...], dtype: torch.dtype) -> Callable[[], None]:
    """Return a call of bare collectives: of q, k and v together, the output, and both ways back."""
    b, s, heads, kv_heads, d = shape
    rank, size = dist.get_rank(), dist.get_world_size()
    lens = deepsp.ranks.seq_lens(s)

    def columns(p: int, kv: bool) -> int:
        q0, q1, kv0, kv1 = torch.ops.deepsp.head_split(heads, kv_heads, size, p)
        return (q1 - q0 + (2 * (kv1 - kv0) if kv else 0)) * d

    exchanges = []
    for kv in (True, False):
        by_tokens = [lens[rank] * b * columns(p, kv) for p in range(size)]
        by_heads = [n * b * columns(rank, kv) for n in lens]
        tokens, whole = (torch.randn(sum(x)).to(dtype) for x in (by_tokens, by_heads))
        there = (whole, tokens, by_heads, by_tokens)
        back = (tokens.clone(), whole.clone(), by_tokens, by_heads)
        exchanges += [there, back]

    def run() -> None:
        for received, sent, gets, gives in exchanges:
            dist.all_to_all_single(received, sent, gets, gives)

    return run


def contenders(shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Callable[[], None]]:
    b, s, heads, kv_heads, d = shape
    mine = deepsp.ranks.seq_lens(s)[dist.get_rank()]
    q, k, v = (
        torch.randn(b, mine, h, d, dtype=dtype).requires_grad_()
        for h in (heads, kv_heads, kv_heads)
    )
    grad = torch.randn(b, mine, heads, d, dtype=dtype)
    attention = do_nothing({})
    ours = deepsp.DistributedAttention(attention)
    torch._dynamo.reset()  # each size compiles anew
    compiled = torch.compile(deepsp.DistributedAttention(nothing), fullgraph=True, dynamic=False)
    messages = deepsp.DistributedAttention(attention, group=bench.group_of("messages"))

    def train(forward: Callable[[], Tensor]) -> Callable[[], None]:
        return lambda: torch.autograd.grad(forward(), (q, k, v), grad)

    calls = {
        "deepsp": train(lambda: ours(q, k, v)),
        "compiled": train(lambda: compiled(q, k, v)),
        "messages": train(lambda: messages(q, k, v)),
        "torch": train(lambda: torch_alone(q, k, v, attention)),
        "floor": floor(shape, dtype),
    }
    # Heads that don't divide by the ranks: theirs fails, or kills the process.
    if all(h % dist.get_world_size() == 0 for h in (heads, kv_heads)):
        for name, make in (("deepspeed", deepspeed), ("yunchang", yunchang)):
            if importlib.util.find_spec(name):
                theirs = make(attention)
                calls[name] = train(lambda theirs=theirs: theirs(q, k, v))
    return calls
