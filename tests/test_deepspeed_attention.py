"""DeepSpeed's attention by our exchange, against one process, and against DeepSpeed's own."""

import copy
import functools
import os
import subprocess
import sys

import harness
import pytest
import torch
import torch.distributed as dist
from harness import on_ranks
from reference import attention, draw
from torch import nn

import deepsp
from deepsp.integrations.deepspeed import DistributedAttention

BATCH, DIM = 2, 8
on_deepspeeds_ranks = functools.partial(harness.on_ranks, apart="deepspeed attention")


@pytest.fixture(scope="module", autouse=True)
def ended():
    yield
    harness.stop("deepspeed attention")


class _Local(nn.Module):
    """Knows its layout, has a parameter, and wants arguments of its own."""

    def __init__(self, batch_dim_idx):
        super().__init__()
        self.batch_dim_idx = batch_dim_idx
        self.temper = nn.Parameter(torch.linspace(0.5, 1.5, DIM, dtype=torch.float64))

    def forward(self, q, k, v, factor, *, causal):
        if self.batch_dim_idx == 1:
            q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        out = attention(q * self.temper * factor, k, v, is_causal=causal)
        # Contiguous, as DeepSpeed's exchange needs it of what has one kv head.
        return (out.transpose(0, 1) if self.batch_dim_idx == 1 else out).contiguous()


def _swapped(x, batch_dim_idx):
    return x.transpose(0, 1) if batch_dim_idx == 1 else x


def _turned(x, cos, sin):
    """x [B, S, H, D] by complex numbers: channel i with channel i + R / 2."""
    turned, passed = x[..., : 2 * cos.size(-1)], x[..., 2 * cos.size(-1) :]
    both = torch.complex(*turned.chunk(2, -1)) * torch.complex(cos, sin)[None, :, None]
    return torch.cat([both.real, both.imag, passed], -1)


def _made(heads, kv_heads, batch_dim_idx, length, turned):
    """The whole q, k, v [B, S, H, D], the whole sequence's angles, and them as DeepSpeed has it."""
    q, k, v = (draw(BATCH, length, h, DIM, seed=n) for n, h in enumerate([heads] + [kv_heads] * 2))
    if not turned:
        return (q, k, v), None, None
    angle = torch.arange(length)[:, None] * torch.tensor([0.5, 0.11, 0.03], dtype=torch.float64)
    whole = angle.cos(), angle.sin()
    given = [torch.cat([x, x], -1)[:, None, None] for x in whole]  # [S, 1, 1, R]
    return (q, k, v), whole, [x.transpose(0, 1) for x in given] if batch_dim_idx == 1 else given


def _expected(local, qkv, angles, batch_dim_idx, grad):
    qkv = [x.clone().requires_grad_() for x in qkv]
    q, k, v = qkv
    if angles is not None:
        q, k = (_turned(x, *angles) for x in (q, k))
    q, k, v = (_swapped(x, batch_dim_idx) for x in (q, k, v))
    out = _swapped(local(q, k, v, 1.25, causal=True), batch_dim_idx)
    return out, torch.autograd.grad(out, [*qkv, *local.parameters()], grad)


def _ran(module, qkv, rotary, batch_dim_idx, grad):
    """Out and gradients of this rank's part, as [B, S_r, H, D], and the parameters' sums."""
    part = functools.partial(deepsp.shard, dim=1)
    q, k, v = (_swapped(part(x), batch_dim_idx).clone().requires_grad_() for x in qkv)
    out = module(q, k, v, batch_dim_idx, rotary, 1.25, causal=True)
    assert out.is_contiguous()
    leaves = [q, k, v, *module.parameters()]
    grads = torch.autograd.grad(out, leaves, _swapped(part(grad), batch_dim_idx).contiguous())
    for x in grads[3:]:
        dist.all_reduce(x)
    return _swapped(out, batch_dim_idx), (
        *(_swapped(x, batch_dim_idx) for x in grads[:3]),
        *grads[3:],
    )


def _compare(ours, expected):
    torch.testing.assert_close(ours[0], deepsp.shard(expected[0], 1), rtol=1e-10, atol=1e-10)
    whole = [deepsp.shard(x, 1) for x in expected[1][:3]]
    torch.testing.assert_close(ours[1], (*whole, *expected[1][3:]), rtol=1e-10, atol=1e-10)


def _as_one(batch_dim_idx):
    size = dist.get_world_size()
    for heads, kv_heads, turned in [(6, 6, False), (6, 2, True), (4, 1, False), (7, 7, True)]:
        local = _Local(batch_dim_idx)
        qkv, angles, rotary = _made(heads, kv_heads, batch_dim_idx, 5 * size, turned)
        grad = draw(BATCH, 5 * size, heads, DIM, seed=9)
        module = DistributedAttention(local, dist.group.WORLD, gather_idx=1 - batch_dim_idx)
        assert list(module.state_dict()) == ["local_attn.temper"]
        expected = _expected(local, qkv, angles, batch_dim_idx, grad)
        _compare(_ran(module, qkv, rotary, batch_dim_idx, grad), expected)
    twin = copy.deepcopy(module)
    with torch.no_grad():
        twin.local_attn.temper.zero_()  # the copy's attention is the copy's
    assert not torch.equal(_ran(twin, qkv, rotary, batch_dim_idx, grad)[0], expected[0])
    _compare(_ran(module, qkv, rotary, batch_dim_idx, grad), expected)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("batch_dim_idx", [0, 1])
def test_equals_one_process(ranks, batch_dim_idx):
    on_ranks(ranks, _as_one, batch_dim_idx)


def _as_deepspeed(batch_dim_idx):
    os.environ.update(DS_ACCELERATOR="cpu")
    import deepspeed
    from deepspeed.sequence.layer import DistributedAttention as Theirs

    deepspeed.init_distributed("gloo")
    size = dist.get_world_size()
    for heads, kv_heads, turned in [(4, 4, True), (4, 2, False)]:
        local = _Local(batch_dim_idx)
        qkv, angles, rotary = _made(heads, kv_heads, batch_dim_idx, 5 * size, turned)
        grad = draw(BATCH, 5 * size, heads, DIM, seed=9)
        arguments = (local, dist.group.WORLD, 2, 1 - batch_dim_idx)
        theirs = _ran(Theirs(*arguments), qkv, rotary, batch_dim_idx, grad)
        ours = _ran(DistributedAttention(*arguments), qkv, rotary, batch_dim_idx, grad)
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
        _compare(theirs, _expected(local, qkv, angles, batch_dim_idx, grad))


@pytest.mark.parametrize("batch_dim_idx", [0, 1])
def test_equals_deepspeeds(batch_dim_idx):
    on_deepspeeds_ranks(2, _as_deepspeed, batch_dim_idx)


def _wrong():
    def make(local=lambda q, k, v, *args, **kwargs: q, **options):
        return DistributedAttention(local, dist.group.WORLD, **options)

    def call(module=None, heads=(4, 2, 2), batch_dim_idx=0, rotary=None, dims=4):
        shape = [2, 3] if batch_dim_idx == 0 else [3, 2]
        q, k, v = (torch.zeros(*shape, h, 8, dtype=torch.float64) for h in heads)
        q = q.flatten(2) if dims == 3 else q
        return (module or make())(q, k, v, batch_dim_idx, rotary, 1.0, causal=True)

    turn = torch.zeros(6, 1, 1, 4, dtype=torch.float64)
    for wrong, message in [
        (lambda: make(None), "expected local_attention .*, got None"),
        (lambda: make(scatter_idx=1), "scatter_idx to be 2, .*, got 1"),
        (lambda: make(gather_idx=2), "gather_idx to be 0 or 1, .*, got 2"),
        (lambda: make(sp_stream=object()), "sp_stream to be None, got"),
        (lambda: call(batch_dim_idx=2), "batch_dim_idx to be 0 or 1, got 2"),
        (lambda: call(dims=3), r"query to have 4 dimensions \[batch, sequence, heads.*, got 3"),
        (lambda: call(make(num_kv_heads=4)), r"key to have num_kv_heads \(4\) heads, got 2"),
        (lambda: call(heads=(4, 3, 3)), "q, k and v with 4, 3 and 3 heads"),
        (lambda: call(heads=(1, 1, 1)), "at least 2 heads"),
        (
            lambda: call(rotary=(turn, turn[:3])),
            r"sine .* to have shape \(6, 1, 1, R\), .*, got \(3, 1, 1, 4\)",
        ),
        (lambda: call(rotary=(turn, turn), batch_dim_idx=1), r"\(1, 6, 1, R\)"),
        (lambda: call(rotary=(turn[..., :3],) * 2), "even R of at most 8"),
    ]:
        with pytest.raises(ValueError, match=message):
            wrong()
    assert call(make(num_kv_heads=2), rotary=(turn, turn)).shape == (2, 3, 4, 8)


def test_errors():
    on_ranks(2, _wrong)


def test_needs_no_deepspeed():
    code = (
        "import sys, deepsp.integrations.deepspeed as d; d.DistributedAttention; d.sequence_group"
    )
    code += "; assert 'deepspeed' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
