"""What only a comparison between ranks shows: on a module's first call, and before each exchange
with DEEPSP_DEBUG=1; and what is left after a peer that died or hung."""

import datetime
import os
import tempfile
import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor  # assert_close imports it: too late where time is short
from harness import Workers, on_ranks
from reference import attention, draw, sent
from torch._subclasses.fake_tensor import FakeTensorMode

import deepsp
from deepsp import patches


def _fine():
    """The group is in step: nothing was sent that nobody took."""
    x = draw(1, 4 * dist.get_world_size(), 6, 8)
    rank, lens = dist.get_rank(), [4] * dist.get_world_size()
    out = deepsp.distributed_attention(*[x.split(lens, 1)[rank]] * 3, seq_lens=lens)
    torch.testing.assert_close(out, attention(x, x, x).split(lens, 1)[rank])


def _by_themselves():
    """The ops' own comparison: of texts that differ by an empty line at the end, too. It sends
    little."""
    rank, size, name = dist.get_rank(), dist.get_world_size(), dist.group.WORLD.group_name
    check = torch.ops.deepsp._check_agreement
    for mine in (["a", ""], ["a", "b"]):
        with pytest.raises(ValueError, match="rank 0 passes nothing, rank 1 passes"):
            check("a call", mine if rank == 1 else ["a"], torch.ones(1), rank, size, name)
    _fine()

    def compare(mine):
        check("a call", mine, torch.ones(1), rank, size, name)

    def differ():
        with pytest.raises(ValueError, match="ranks disagree"):
            compare([f"seq_lens {rank}" + 500 * " "])

    # A hash, and the texts only if it differs.
    assert sent(lambda: compare([500 * "seq_lens"])) == [16]
    assert sent(differ) == [16, 517]


def test_empty_lines():
    on_ranks(2, _by_themselves)


def _under_inductor():
    """Compiled code compares, too, and is right."""
    rank, lens = dist.get_rank(), [3, 5]
    patches.uninstall()
    os.environ["DEEPSP_DEBUG"] = "1"
    patches.install()
    torch._dynamo.reset()
    try:
        full = [draw(2, 8, h, 4, seed=h).requires_grad_() for h in (4, 2, 2)]
        mine = [x.detach().split(lens, 1)[rank].clone().requires_grad_() for x in full]

        @torch.compile(fullgraph=True)
        def attend(q, k, v):
            out = deepsp.distributed_attention(
                q * 2, k.sin(), v + 1, enable_gqa=True, chunks=2, seq_lens=lens
            )
            return out.cos()

        q, k, v = full
        k, v = (x.repeat_interleave(2, 2) for x in (k.sin(), v + 1))
        expected, found = attention(q * 2, k, v).cos(), attend(*mine)
        torch.testing.assert_close(found, expected.split(lens, 1)[rank])
        gradients = torch.autograd.grad(expected.square().sum(), full)
        for a, b in zip(torch.autograd.grad(found.square().sum(), mine), gradients, strict=True):
            torch.testing.assert_close(a, b.split(lens, 1)[rank])
        odd = [x[:, :, :, : 4 - rank].detach() for x in mine]
        with pytest.raises(ValueError, match=r"rank 0 passes head_dims \[4, .*, rank 1 passes"):
            attend(*odd)
    finally:
        patches.uninstall()
        del os.environ["DEEPSP_DEBUG"]
        patches.install()
    _fine()


def test_inductor_compares_in_debug_mode():
    on_ranks(2, _under_inductor)


def _first_calls():
    rank = dist.get_rank()
    odd = rank == 1  # one of three

    def attend(tokens=4, heads=6, batch=1, dtype=torch.float32, grad=True, **options):
        x = torch.ones(batch, tokens, heads, 8, dtype=dtype, requires_grad=grad)
        deepsp.DistributedAttention(**options)(x, x, x)

    def layer(tokens=4, dtype=torch.float32, train=True, **options):
        module = deepsp.SequenceParallelAttention(48, 6, **options).to(dtype)
        module.requires_grad_(train)
        module(torch.ones(1, tokens, 48, dtype=dtype))

    who = r"ranks 0 and 2 pass {}.*, rank 1 passes {}.*every rank must make the same call"
    cases = [
        (lambda: attend(tokens=5 if odd else 4), r"seq_lens \[4, 4, 4\]", r"seq_lens \[5, 5, 5\]"),
        (lambda: attend(heads=7 if odd else 6), r"shapes \[\[1, 6, 8\]", r"shapes \[\[1, 7, 8\]"),
        (lambda: attend(batch=2 if odd else 1), r"shapes \[\[1, 6", r"shapes \[\[2, 6"),
        (
            lambda: attend(dtype=torch.float64 if odd else torch.float32),
            "dtype torch.float32",
            "dtype torch.float64",
        ),
        (lambda: attend(chunks=2 if odd else 1), "chunks 1", "chunks 2"),
        (lambda: attend(layout="bhsd" if odd else "bshd"), "layout bshd", "layout bhsd"),
        (lambda: attend(grad=not odd), r"gradients \[True", r"gradients \[False"),
        (lambda: layer(tokens=5 if odd else 4), r"seq_lens \[4, 4, 4\]", r"seq_lens \[5, 5, 5\]"),
        (
            lambda: layer(dtype=torch.float64 if odd else torch.float32),
            "dtype torch.float32",
            "dtype torch.float64",
        ),
        (lambda: layer(chunks=2 if odd else 1), "chunks 1", "chunks 2"),
        (lambda: layer(overlap=not odd), "overlap True", "overlap False"),
        (lambda: layer(head_dim=6 if odd else 8), r"head_dims \[8, 8\]", r"head_dims \[6, 6\]"),
        (lambda: layer(train=not odd), "gradients", "gradients"),
    ]
    with pytest.raises(
        ValueError, match=r"same call\. seq_lens lists the number .* None means that all"
    ):
        attend(tokens=5 if odd else 4)
    for call, most, other in cases:
        with pytest.raises(ValueError, match=who.format(most, other)):
            call()
    _fine()


def test_a_modules_first_call():
    on_ranks(3, _first_calls)


def _once():
    """Later calls compare nothing."""
    module = deepsp.DistributedAttention()
    x = torch.ones(1, 4, 4, 8)
    with torch.profiler.profile() as profile:
        module(x, x, x)
    assert any("check_agreement" in e.name for e in profile.events())
    with torch.profiler.profile() as profile:
        module(x, x, x)
    assert not any("check_agreement" in e.name for e in profile.events())


def test_later_calls():
    on_ranks(2, _once)


def _without_data():
    """What traces a module compares nothing, and its first call is still to come."""
    for make, inputs in (
        (deepsp.DistributedAttention, [(1, 4, 4, 8)] * 3),
        (lambda: deepsp.SequenceParallelAttention(32, 4), [(1, 4, 32)]),
    ):
        module = make()
        with FakeTensorMode(allow_non_fake_inputs=True):
            module(*(torch.ones(shape) for shape in inputs))
        if isinstance(module, deepsp.DistributedAttention):
            module(*(torch.ones(shape, device="meta") for shape in inputs))
        dtype = torch.float64 if dist.get_rank() else torch.float32
        module.to(dtype)
        with pytest.raises(ValueError, match=r"rank 0 passes dtype .*32, rank 1 passes"):
            module(*(torch.ones(shape, dtype=dtype) for shape in inputs))


def test_a_call_without_data_is_not_the_first():
    on_ranks(2, _without_data)


def _each_exchange():
    rank = dist.get_rank()
    os.environ["DEEPSP_DEBUG"] = "1"
    try:
        # Their sizes are equal: without the comparison each rank would be given the other's data.
        a, b = torch.zeros(1, 4, 4, 6), torch.ones(1, 4, 6, 4)
        with pytest.raises(ValueError) as error:
            for x in (a, b) if rank == 0 else (b, a):
                deepsp.seq_to_heads([x])
        assert str(error.value).startswith(
            "seq_to_heads: ranks disagree: rank 0 passes num_heads [4], rank 1 passes num_heads [6]"
        )
        (held,) = deepsp.seq_to_heads([a])
        (whole,) = deepsp.seq_to_heads([b])
        with pytest.raises(ValueError, match=r"rank 0 passes seq_to_heads, rank 1 passes heads_to"):
            if rank == 0:
                deepsp.seq_to_heads([a])
            else:
                deepsp.heads_to_seq([held], [4])
        with pytest.raises(
            ValueError, match=r"rank 0 passes dtype float32, rank 1 passes dtype float64"
        ):
            deepsp.seq_to_heads_start([a.double() if rank else a])
        with pytest.raises(ValueError, match=r"rank 0 passes seq_lens \[4, 4\], rank 1 passes"):
            deepsp.distributed_attention(*[a if rank == 0 else a[:, :3]] * 3)
        with pytest.raises(
            ValueError, match="rank 0 passes chunk 0 of 1, rank 1 passes chunk 0 of 2"
        ):
            deepsp.distributed_attention(a, a, a, chunks=rank + 1)
        linear = torch.nn.Linear(8, 8)
        layer = deepsp.SequenceParallelAttention.from_projections(
            linear, linear, linear, linear, num_heads=4, rope_theta=None
        )
        layer(torch.ones(1, 4, 8))
        with pytest.raises(ValueError, match=r"project_to_heads: .*seq_lens \[5, 4\], rank 1"):
            layer(torch.ones(1, 5 - rank, 8), seq_lens=[5, 4] if rank == 0 else [4, 4])
        deepsp.heads_to_seq([whole], [6])
        gradients = [torch.zeros(2, 8), torch.ones(16)]  # summed in one message
        with pytest.raises(
            ValueError,
            match=r"sum_gradients_: .*rank 0 passes gradients\[0\] of shape \[2, 8\], fl",
        ):
            torch.ops.deepsp._sum_gradients_(
                gradients if rank == 0 else gradients[::-1], rank, 2, layer.member[2]
            )
        _fine()
    finally:
        del os.environ["DEEPSP_DEBUG"]


def test_exchanges_in_another_order():
    on_ranks(2, _each_exchange)


def _survive(fate, store, timeout):
    """Rank 1 of 3 dies or hangs, or is dead before the others' next call, of a module that is new;
    the others are told, and go on in a new group."""
    rank = dist.get_rank()
    x = draw(1, 12, 6, 8)
    module = deepsp.DistributedAttention(chunks=2)
    part = x.split([4] * 3, 1)[rank].clone().requires_grad_()
    module(part, part, part)
    if rank == 1:
        if fate != "hangs":
            os._exit(1)
        time.sleep(2.5 * timeout)
        return
    if fate == "is dead":
        time.sleep(1)  # gloo knows by then: it refuses to launch
        with pytest.raises(
            RuntimeError, match=r"DistributedAttention of rank \d in group"
        ) as error:
            deepsp.DistributedAttention()(part, part, part)
        assert "Another rank died" in str(error.value)
        with pytest.raises(RuntimeError, match=r"sum_gradients_ of rank \d in group"):
            torch.ops.deepsp._sum_gradients_([torch.ones(3)], rank, 3, module.member[2])
    started = time.monotonic()
    with pytest.raises(
        RuntimeError, match=r"_to_\w+ of rank \d in group '.*' of 3 failed"
    ) as error:
        for _ in range(100):
            module(part, part, part).sum().backward()
    assert time.monotonic() - started < 3 * timeout
    assert "Another rank died, hangs, or makes another call" in str(error.value)
    limit = torch.ops.deepsp._pool_limit()
    assert 0 <= deepsp.ranks.buffers.idle_bytes() <= limit
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank // 2,
        world_size=2,
        timeout=datetime.timedelta(seconds=30),
    )
    for seed in range(5):  # what comes late lands in nobody's buffer
        x = draw(1, 12, 6, 8, seed=seed)
        part = x.split([6, 6], 1)[rank // 2].clone().requires_grad_()
        out = deepsp.DistributedAttention(chunks=2)(part, part, part)
        (grad,) = torch.autograd.grad(out.square().sum(), part)
        x.requires_grad_()
        expected = attention(x, x, x)
        (of_x,) = torch.autograd.grad(expected.square().sum(), x)
        torch.testing.assert_close(out, expected.split([6, 6], 1)[rank // 2])
        torch.testing.assert_close(grad, of_x.split([6, 6], 1)[rank // 2])
        time.sleep(0.2 * timeout)


@pytest.mark.parametrize("fate", ["dies", "hangs", "is dead"])
def test_life_after_a_peer(fate):
    timeout = 4
    workers = Workers(3, timeout)
    with tempfile.TemporaryDirectory() as folder:
        try:
            answers = workers.call(_survive, fate, os.path.join(folder, "store"), timeout)
        finally:
            workers.stop()
    for rank in (0, 2):
        fine, what = answers[rank]
        assert fine, what
