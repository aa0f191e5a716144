"""What is kept for backward goes through saved-tensor hooks, so it can be kept elsewhere."""

import pytest
import torch
import torch.distributed as dist
from harness import on_ranks
from reference import draw, lens_of
from torch import nn
from torch.utils.checkpoint import checkpoint

import deepsp
from deepsp.planning.fake_step import _Live

DOCUMENTS = torch.tensor([[0, 9], [9, 26]])


class Away(torch.autograd.graph.saved_tensors_hooks):
    """What is saved leaves torch's memory."""

    def __init__(self):
        def pack(x):
            return x.detach().numpy().copy()

        def unpack(x):
            return torch.from_numpy(x)

        super().__init__(pack, unpack)


class Wrapped(nn.Module):
    """DistributedAttention, with projections of its own."""

    def __init__(self, **options):
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.attend, self.options = deepsp.DistributedAttention(), options

    def forward(self, x, seq_lens):
        q, k, v = self.qkv(x).unflatten(-1, (12, 4)).split(4, 2)
        return self.out(self.attend(q, k, v, seq_lens=seq_lens, **self.options).flatten(2))


class Layer(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.layer = deepsp.SequenceParallelAttention(16, 4, 2, rope_theta=1e4, **options)

    def forward(self, x, seq_lens):
        return self.layer(x, is_causal=True, seq_lens=seq_lens)


def _stack(kind, depth):
    torch.manual_seed(0)
    make = {
        "attention": lambda: Wrapped(is_causal=True),
        "blocks": lambda: Wrapped(window_size=(5, 0), documents=DOCUMENTS),
        "parts": lambda: Wrapped(is_causal=True, kv_chunk=8),
        "layer": Layer,
        "layer in chunks": lambda: Layer(chunks=2),
    }[kind]
    layers = [nn.Sequential(nn.LayerNorm(16), make()) for _ in range(depth)]
    mlps = [deepsp.tile(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)), tokens=5)
            for _ in range(depth)]  # fmt: skip
    return nn.ModuleList(layers).double(), nn.ModuleList(mlps).double()


def _run(stack, x, lens, checkpointed):
    def block(x, layer, mlp):
        norm, attention = layer
        x = x + attention(norm(x), lens)
        return x + mlp(x)

    for layer, mlp in zip(*stack, strict=True):
        x = checkpoint(block, x, layer, mlp, use_reentrant=False) if checkpointed else (
            block(x, layer, mlp)
        )  # fmt: skip
    return x.square().sum()


def _offloaded(kind):
    rank, size = dist.get_rank(), dist.get_world_size()
    lens = lens_of("skewed", 26, size)
    first = sum(lens[:rank])
    x = draw(1, 26, 16)[:, first : first + lens[rank]]
    for checkpointed in (True, False):
        held = []
        for depth in (2, 6):
            stack = _stack(kind, depth)
            _run(stack, x, lens, checkpointed).backward()  # checks, and what is made once
            expected = [p.grad.clone() for p in stack[0].parameters()]
            stack[0].zero_grad()
            with _Live() as live, Away():
                for p in (p for part in stack for p in part.parameters()):
                    live.see(p, "parameters")
                loss = _run(stack, x, lens, checkpointed)
                held.append(sum(live.live.values()) - live.live["parameters"])
            loss.backward()
            found = [p.grad for p in stack[0].parameters()]
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)
        assert held[0] == held[1], (kind, checkpointed, held)


@pytest.mark.parametrize("kind", ["attention", "blocks", "parts", "layer", "layer in chunks"])
def test_nothing_stays_that_grows_with_depth(kind):
    on_ranks(2, _offloaded, kind)
