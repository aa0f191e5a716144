"""How things are launched: large, odd and shifted memory, streams, threads, graphs; and what is
started and never waited for."""

import os
import threading
import warnings

import torch
import torch.distributed as dist
from common import TIGHT, draw, uneven

import deepsp

op = torch.ops.deepsp


def is_mapped():
    """Which way the tests behind it go."""
    found = deepsp.transport(device="cuda")
    assert found.machines == (tuple(range(dist.get_world_size())),), str(found)
    assert found.memory == "symmetric memory"
    return [str(found)]


def odd_rows():
    """Rows of 13 MB and 2 bytes, which begin 2 bytes behind a multiple of 16; many small rows."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for outer, row in ((3, 6_500_001), (100_003, 3), (517, 65), (64, 2048)):
        whole = draw(size * outer * row + 1, dtype=torch.bfloat16)[1:].view(size, outer, row)
        x = whole[rank]
        y = deepsp.collectives.all_gather(x, 1, sizes=[row] * size, grad="replicated")
        assert torch.equal(y, torch.cat(list(whole), 1)), (outer, row)
        y = deepsp.collectives.reduce_scatter(y, 1, sizes=[row] * size)
        assert torch.equal(y, (whole[rank].float() * size).bfloat16()), (outer, row)


def large():
    """More than 2^31 elements, there and back."""
    shape = (1, (1 << 20) + 8, 16, 129)
    x = torch.arange(shape[1], device="cuda").remainder(251).to(torch.uint8)
    x = x[None, :, None, None] + torch.arange(129, device="cuda", dtype=torch.uint8)
    x = x.expand(shape).transpose(1, 2).contiguous().transpose(1, 2)  # heads lie apart
    assert x.numel() > 1 << 31
    (y,) = deepsp.seq_to_heads([x])
    assert torch.equal(y, x)
    (z,) = deepsp.heads_to_seq([y], [16])
    assert torch.equal(z, x)


def streams():
    """Started on one stream, waited for on another, which still reads what arrived, and what was
    sent, when the first makes tensors anew."""
    side = torch.cuda.Stream()
    for n in range(10):
        x = draw(1, 512, 8, 64, seed=n, dtype=torch.float32)
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(10_000_000)
            handle = deepsp.seq_to_heads_start([x])
        (y,) = handle.wait()
        torch.cuda._sleep(10_000_000)
        found = y.clone()
        del handle, y
        with torch.cuda.stream(side):
            anew = [torch.full_like(x, -1) for _ in range(4)]
        assert torch.equal(found, x), n
        del anew


def waited_for_twice():
    """Each start is waited for once."""
    x = draw(1, 512, 8, 64, dtype=torch.float32)
    rank, size, name = dist.get_rank(), dist.get_world_size(), dist.group.WORLD.group_name
    if size == 1 and os.environ["DEEPSP_TEST_COLLECTIVES"] != "1":
        return  # nothing travels
    lens = [512] * size
    (buffer,) = op.seq_to_heads_start([x], lens, 1, False, rank, name)
    call = (buffer, [8], [64], 1, lens, 0, 1, rank, name)
    op.seq_to_heads_wait(*call)
    for _ in range(2):
        try:
            op.seq_to_heads_wait(*call)
        except ValueError as error:
            assert "waited for already" in str(error)
        else:
            raise AssertionError("expected the second wait to raise")


def threads():
    """Forward and backward in several threads at once."""
    errors = []

    def run(seed):
        try:
            for n in range(5):
                x = draw(1, 64, 4, 16, seed=10 * seed + n).requires_grad_()
                deepsp.distributed_attention(x, x, x, is_causal=True).square().sum().backward()
                heads = [x.detach().transpose(1, 2).requires_grad_()] * 3
                y = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
                (g,) = torch.autograd.grad(y.square().sum(), heads[0])
                torch.testing.assert_close(x.grad, g.transpose(1, 2), **TIGHT)
        except Exception as error:
            errors.append(error)

    started = [threading.Thread(target=run, args=(seed,)) for seed in range(3)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    if errors:
        raise errors[0]


def _captured(call):
    """A CUDA graph of a call, after three others, and what replays of it write."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    return graph, results


def capture():
    """A CUDA graph of an attention in a group of one. With collectives it isn't captured: their ops
    say so (cudagraph_unsafe)."""
    if os.environ["DEEPSP_TEST_COLLECTIVES"] == "1":
        return
    x = draw(1, 64, 4, 16, dtype=torch.float32)

    def call():
        return deepsp.distributed_attention(x, x, x, is_causal=True)

    graph, y = _captured(call)
    for n in range(3):
        x.copy_(draw(1, 64, 4, 16, seed=n, dtype=torch.float32))
        graph.replay()
        torch.testing.assert_close(y, call())


def capture_layer():
    """A CUDA graph of a whole layer, forward and backward, which NCCL sends in, replayed with other
    inputs."""
    rank = dist.get_rank()
    lens = uneven(256)
    torch.manual_seed(0)
    layer = deepsp.SequenceParallelAttention(
        64, 8, 2, head_dim=16, chunks=2, device="cuda", dtype=torch.float32
    )

    def part(seed):
        return draw(1, 256, 64, seed=seed, dtype=torch.float32).split(lens, 1)[rank]

    x = part(0).clone().requires_grad_()
    weights = [x, *layer.parameters()]

    def step():
        out = layer(x, seq_lens=lens, is_causal=True)
        return [out, *torch.autograd.grad(out.square().sum(), weights)]

    graph, results = _captured(step)
    for n in range(3):
        with torch.no_grad():
            x.copy_(part(n))
        graph.replay()
        torch.testing.assert_close(results, step())


def host_waits():
    """The host waits for the GPU nowhere in attention and a loss, and in a model of transformers'
    as often with two layers as with six."""

    def step(lens, layers, weight):
        x = draw(1, lens[dist.get_rank()], 64, dtype=torch.bfloat16).requires_grad_()
        documents = torch.tensor([[0, 100], [100, sum(lens)]])
        y = x
        for layer in layers:
            q = layer(y).unflatten(2, (8, 16))
            y = deepsp.distributed_attention(
                q, q, q, is_causal=True, documents=documents, seq_lens=lens
            ).flatten(2)
        labels = torch.arange(x.size(1), device="cuda")[None] % weight.size(0)
        deepsp.linear_cross_entropy(y, weight, labels).backward()

    lens = uneven(512)
    layers = [torch.nn.Linear(64, 128, device="cuda", dtype=torch.bfloat16)]
    layers.append(torch.nn.Linear(128, 128, device="cuda", dtype=torch.bfloat16))
    weight = draw(100, 128, dtype=torch.bfloat16)
    step(lens, layers, weight)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(lens, layers, weight)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    try:
        from transformers import LlamaConfig, LlamaModel

        from deepsp.integrations.transformers import register
    except ImportError:
        return ["transformers isn't here: its models weren't tried"]
    register()
    counts = []
    for count in (2, 6):
        config = LlamaConfig(
            vocab_size=100,
            hidden_size=64,
            intermediate_size=64,
            num_hidden_layers=count,
            num_attention_heads=8,
            attn_implementation="deepsp",
            use_cache=False,
        )
        model = LlamaModel(config).to("cuda", torch.bfloat16)
        ids = torch.arange(512, device="cuda")[None] % 100
        for _ in range(3):  # the first ones compare more
            batch, _ = deepsp.shard_batch({"input_ids": ids})
            torch.cuda.synchronize()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn")
                model(**batch).last_hidden_state.sum().backward()
                torch.cuda.set_sync_debug_mode("default")
        counts.append(sum("synchronizing CUDA operation" in str(w.message) for w in caught))
    assert counts[0] == counts[1] <= 2, counts
    return [f"the host waits {counts[0]} times in a step of transformers' Llama"]


def never_waited_for():
    """The memory of starts that nobody waits for returns, and the group goes on."""
    x = draw(1, 1024, 8, 128, dtype=torch.float32)  # 4 MiB
    rank, size, name = dist.get_rank(), dist.get_world_size(), dist.group.WORLD.group_name

    def start(times):
        for _ in range(times):
            op.seq_to_heads_start([x], [1024] * size, 1, False, rank, name)
            op.all_reduce_start([x], "partial", rank, size, name)
        torch.cuda.synchronize()
        op.all_reduce_start([x], "partial", rank, size, name)  # what is done leaves
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    before = start(5)
    after = start(50)
    (y,) = deepsp.seq_to_heads([x])
    assert torch.equal(y, x)
    assert after - before < 10 * x.nbytes, f"{(after - before) >> 20} MiB more"
