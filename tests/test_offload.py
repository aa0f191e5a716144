"""What is kept for backward, and computed again in it: saved-tensor hooks and checkpoints."""

import collections
import contextlib
import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from harness import on_ranks
from reference import draw, lens_of
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import deepsp
from deepsp.memory.planning.fake_step import _Live

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
        self.attend = deepsp.DistributedAttention(chunks=options.pop("chunks", 1))
        self.options = options

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
        "chunks": lambda: Wrapped(is_causal=True, chunks=2),
        "layer": Layer,
        "layer in chunks": lambda: Layer(chunks=2),
    }[kind]
    layers = [nn.Sequential(nn.LayerNorm(16), make()) for _ in range(depth)]
    mlps = [
        deepsp.tile(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)), tokens=5)
        for _ in range(depth)
    ]
    return nn.ModuleList(layers).double(), nn.ModuleList(mlps).double()


def _run(stack, x, lens, checkpointed, **how):
    def block(x, layer, mlp):
        norm, attention = layer
        x = x + attention(norm(x), lens)
        return x + mlp(x)

    for layer, mlp in zip(*stack, strict=True):
        x = (
            checkpoint(block, x, layer, mlp, use_reentrant=False, **how)
            if checkpointed
            else (block(x, layer, mlp))
        )
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


class _Counted(TorchDispatchMode):
    """How often each op is called."""

    def __init__(self):
        super().__init__()
        self.calls = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func.name()] += 1
        return func(*args, **(kwargs or {}))


ATTENTION = (
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "deepsp::_blockwise_attention",
    "deepsp::_streamed_attention",
)


def _policy(kind, how):
    """The loss and all gradients, of all ranks; attention's calls in backward; bytes kept."""
    rank, size = dist.get_rank(), dist.get_world_size()
    lens = lens_of("skewed", 26, size)
    x = draw(1, 26, 16).split(lens, 1)[rank].requires_grad_()
    stack = _stack(kind, 3)
    options = {"context_fn": deepsp.checkpoint_policy()} if how == "policy" else {}
    _run(stack, x, lens, False)  # checks, and what is made once
    with _Live() as live:
        loss = _run(stack, x, lens, how != "none", **options)
        held = sum(live.live.values())
    with _Counted() as counted:
        parameters = [p for part in stack for p in part.parameters()]
        found = torch.autograd.grad(loss, [x, *parameters])
    whole = [deepsp.collectives.all_gather(found[0], 1, sizes=lens, grad="replicated")]
    for part in (loss.detach(), *found[1:]):
        dist.all_reduce(part)
        whole.append(part)
    return whole, sum(counted.calls[name] for name in ATTENTION), held


@pytest.mark.parametrize("kind", ["attention", "blocks", "parts", "chunks", "layer"])
def test_a_checkpoint_keeps_attention(kind):
    (expected, _, everything), *_ = on_ranks(1, _policy, kind, "none")
    held = {}
    for how, calls in (("none", 0), ("checkpoint", 6 if kind == "chunks" else 3), ("policy", 0)):
        for found, again, bytes_held in on_ranks(3, _policy, kind, how):
            torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
            assert (again > 0) == (calls > 0), (how, again)
            held.setdefault(how, bytes_held)
    assert held["checkpoint"] < held["policy"] < held["none"], held
    assert everything > 0


def test_wrong_ops():
    with pytest.raises(ValueError, match=r"expected ops such as .*, got .*mm.*overload"):
        deepsp.checkpoint_policy(torch.ops.aten.mm)


# ---------------------------------------------------------------------- deepsp.offload


class _Stream:
    """Runs what it is given when somebody waits for it, as late as a GPU may; reads NaN where
    memory was given up before."""

    def __init__(self, device=None):
        self.work = []

    def wait_stream(self, other):
        pass  # the other one runs at once

    def wait_event(self, event):
        self.work.append(event)

    def record_event(self):
        done = len(self.work)

        def event():
            for step in self.work[:done]:
                step()
            self.work[:done] = [lambda: None] * done

        return event


class _Device:
    """What torch.cuda is, with streams of the CPU."""

    Stream = _Stream

    class _Current:
        @staticmethod
        def wait_event(event):
            event()

    copies = 0

    def current_stream(self, device):
        return self._Current

    @contextlib.contextmanager
    def stream(self, stream):
        class Later(TorchDispatchMode):
            def __torch_dispatch__(mode, func, types, args=(), kwargs=None):
                assert func is torch.ops.aten.copy_.default, func
                to, source = (weakref.ref(x.untyped_storage()) for x in args[:2])
                views = [(x.size(), x.stride(), x.storage_offset(), x.dtype) for x in args[:2]]
                _Device.copies += 1

                def copy():
                    if to() is not None:
                        target, found = (
                            None
                            if ref() is None
                            else torch.empty(0, dtype=view[3]).set_(ref(), view[2], *view[:2])
                            for ref, view in zip((to, source), views, strict=True)
                        )
                        target.copy_(torch.nan * target if found is None else found)

                stream.work.append(copy)
                return args[0]

        with Later():
            yield


def _pretended(monkeypatch):
    from deepsp.memory.activations import offload as module

    device = _Device()
    _Device.copies = 0
    monkeypatch.setattr(module.torch, "get_device_module", lambda _: device)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: None, raising=False)
    monkeypatch.setattr(deepsp.offload, "_is_remote", staticmethod(lambda x: True))


@pytest.mark.parametrize("inside", [False, True])
def test_offload_copies_beside(monkeypatch, inside):
    _pretended(monkeypatch)
    layers = [nn.Linear(8, 8).double() for _ in range(6)]
    x = draw(5, 8).requires_grad_()

    def forward(x):
        x = x * 1  # a leaf stays
        for layer in layers:
            x = checkpoint(lambda x, layer=layer: layer(x).tanh(), x, use_reentrant=False)
        return x.square().sum()

    parameters = [x, *(p for layer in layers for p in layer.parameters())]
    expected = torch.autograd.grad(forward(x), parameters)
    seen = []
    layers[-1].register_forward_hook(lambda *_: seen.append(_Device.copies))
    for _ in range(2):
        seen.clear()
        with deepsp.offload(min_bytes=0):
            loss = forward(x)
            there = _Device.copies
            found = torch.autograd.grad(loss, parameters) if inside else None
        found = found or torch.autograd.grad(loss, parameters, retain_graph=True)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        # When the last layer is computed again, the input of the one before is on its way, too.
        assert inside or seen[1] == there + 2 + 1, (seen, there)  # and what the sum saved
        saved = [o for o in gc.get_objects() if type(o).__name__ == "_Saved"]
        assert inside or (saved and all(o.here is None for o in saved))


def test_offload_checks(monkeypatch):
    with pytest.raises(ValueError, match="expected min_bytes >= 0, got -1"):
        deepsp.offload(-1)
    x = draw(5, 8).requires_grad_()
    with deepsp.offload():  # tensors of the CPU stay
        y = (x * 1).square()
    assert y.grad_fn._saved_self.data_ptr() != 0
    _pretended(monkeypatch)
    with deepsp.offload(min_bytes=0):
        y = x * 1
        z = y.square().sum()
        with torch.no_grad():
            y.add_(1)
    with pytest.raises(RuntimeError, match=r"shape \(5, 8\) .* written to while deepsp.offload"):
        z.backward()
