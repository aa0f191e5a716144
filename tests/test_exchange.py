"""The exchange moves every element to where the definition says, and back to its adjoint."""

import pytest
import torch
import torch.distributed as dist
from exchanges import check_exchange, check_fresh_outputs, check_modes, check_pairs, with_layout
from harness import on_ranks
from hypothesis import given
from hypothesis import strategies as st
from reference import Take, Whole, draw, heads_of, lens_of, names
from torch.autograd import gradcheck, gradgradcheck

import deepsp

RANKS = [1, 2, 3, 4]


@st.composite
def _cases(draw_):
    kv_heads = draw_(st.integers(1, 6))
    return (
        draw_(st.integers(0, 3)),
        draw_(st.integers(0, 13)),
        kv_heads * draw_(st.integers(max(1, -(-4 // kv_heads)), 5)),
        kv_heads,
        draw_(st.tuples(*[st.integers(1, 9)] * 3)),
        draw_(
            st.sampled_from(
                [
                    torch.float64,
                    torch.float32,
                    torch.bfloat16,
                    torch.float16,
                    torch.int64,
                    torch.uint8,
                    torch.bool,
                ]
            )
        ),
        draw_(st.sampled_from(["bshd", "bhsd", "sbhd", "dfirst", "slices"])),
        draw_(st.sampled_from(["split", "skewed", "empty"])),
    )


@pytest.mark.messages
@pytest.mark.parametrize("ranks", RANKS)
@given(case=_cases())
def test_values(ranks, case):
    on_ranks(ranks, check_exchange, *case)


@pytest.mark.messages
def test_large_and_streamed():
    """Past every threshold: streaming stores, unpacked gradients, several pool blocks."""
    on_ranks(2, check_exchange, 1, 8192, 8, 4, (64, 64, 64), torch.float32, "bshd", "skewed")
    on_ranks(2, check_exchange, 1, 8192, 8, 4, (64, 64, 64), torch.float32, "bhsd", "split")
    on_ranks(3, check_exchange, 1, 6400, 6, 2, (67, 67, 67), torch.float32, "bshd", "empty")


def _expanded():
    size = dist.get_world_size()
    row = draw(1, 4, 1, 6).expand(2, 4, 4, 6)
    (y,) = deepsp.seq_to_heads([row])
    assert torch.equal(y, draw(1, 4, 1, 6).expand(2, 4, 4 // size, 6).repeat(1, size, 1, 1))
    assert names(lambda: deepsp.seq_to_heads([row]))["aten::copy_"] == 0


def test_expanded_inputs_are_not_copied_first():
    on_ranks(2, _expanded)


def _sum_is_wide(dtype):
    """Sums of shared heads are taken in float32 and rounded once."""
    size = dist.get_world_size()
    numbers = [torch.tensor(1.0), *[torch.tensor(2.0**-9)] * (size - 1)]
    x = numbers[dist.get_rank()].to(dtype).expand(1, 4 * size, 1, 8)
    q = torch.zeros(1, 4 * size, 1, 8, dtype=dtype)
    _, k = deepsp.heads_to_seq([q, x], [size, 1])
    expected = sum(n.to(dtype).float() for n in numbers).to(dtype)
    assert torch.equal(k, expected.expand_as(k)), (k.flatten()[0], expected)


@pytest.mark.messages
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_shared_heads_are_summed_in_float32(dtype):
    on_ranks(4, _sum_is_wide, dtype)


@pytest.mark.parametrize("ranks", [1, 2])
def test_outputs_are_fresh(ranks):
    on_ranks(ranks, check_fresh_outputs)


# ------------------------------------------------------------------------------ gradients


def _there(lens, counts):
    """Global: whole tensors in, every rank's heads side by side out."""

    def function(*whole):
        size = dist.get_world_size()
        out = deepsp.seq_to_heads([Take.apply(x, lens, 1) for x in whole], seq_lens=lens)
        wholes = []
        for i, y in enumerate(out):
            held = [len(heads_of(p, size, counts[0], counts[i])[1]) for p in range(size)]
            wholes.append(Whole.apply(y, held, 2))
        return tuple(wholes)

    return function


def _back(lens, counts, pair):
    def function(*whole):
        size = dist.get_world_size()
        parts = []
        for i, x in enumerate(whole):
            held = [len(heads_of(p, size, counts[0], counts[i])[1]) for p in range(size)]
            parts.append(Take.apply(x, held, 2))
        op = deepsp.heads_to_seq_start if pair else deepsp.heads_to_seq
        out = op(parts, counts, seq_lens=lens)
        out = out.wait() if pair else out
        return tuple(Whole.apply(y, lens, 1) for y in out)

    return function


def _gradients(pair):
    size = dist.get_world_size()
    lens = lens_of("skewed", 5, size)
    counts = [6, 2]
    x = [draw(2, 5, 6, 2, seed=1), draw(2, 5, 2, 3, seed=2)]
    x = [t.requires_grad_() for t in x]
    forward = _there(lens, counts)
    gradcheck(forward, x, fast_mode=True)
    gradgradcheck(forward, x, fast_mode=True)
    held = [sum(len(heads_of(p, size, 6, c)[1]) for p in range(size)) for c in counts]
    y = [draw(2, 5, held[0], 2, seed=3), draw(2, 5, held[1], 3, seed=4)]
    y = [t.requires_grad_() for t in y]
    backward = _back(lens, counts, pair)
    gradcheck(backward, y, fast_mode=True)
    gradgradcheck(backward, y, fast_mode=True)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("pair", [False, True])
def test_gradcheck(ranks, pair):
    on_ranks(ranks, _gradients, pair)


def _adjoint(heads, kv_heads, total):
    """<A x, y> summed over ranks is <x, A' y>: across every kind of layout at once."""
    rank, size = dist.get_rank(), dist.get_world_size()
    lens = lens_of("skewed", total, size)
    counts = [heads, kv_heads]
    x = [draw(2, total, h, 4, seed=i).split(lens, 1)[rank] for i, h in enumerate(counts)]
    ax = deepsp.seq_to_heads(x, seq_lens=lens)
    y = [draw(*t.shape, seed=10 + rank) for t in ax]
    ay = deepsp.heads_to_seq(y, counts, seq_lens=lens)
    products = torch.stack(
        [sum((a * b).sum() for a, b in zip(p, q, strict=True)) for p, q in ((ax, y), (x, ay))]
    )
    dist.all_reduce(products)
    torch.testing.assert_close(products[0], products[1], rtol=1e-12, atol=1e-12)


@pytest.mark.messages
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("heads", [(4, 1), (8, 2), (9, 3), (12, 4), (7, 7)])
def test_directions_are_adjoint(ranks, heads):
    on_ranks(ranks, _adjoint, *heads, 9)


def _undefined():
    """A gradient that nobody asked for travels as zeros."""
    x = [draw(1, 2, 4, 3, seed=i).requires_grad_() for i in range(3)]
    y = deepsp.seq_to_heads(x)
    q, k, v = torch.autograd.grad(y[1].sum(), x)
    assert torch.equal(k, torch.ones_like(k))
    assert not q.any() and not v.any()
    # Nor did this one travel: of a sum over the buffer, it is one number, expanded.
    place = (0, 1, dist.get_rank(), dist.group.WORLD.group_name)
    buffer = torch.ops.deepsp.heads_to_seq_start([y[0]], [4], [2, 2], *place)
    (q,) = torch.autograd.grad(buffer.sum(), y[0])
    assert torch.equal(q, torch.ones_like(q))


def test_undefined_gradients():
    on_ranks(2, _undefined)


@pytest.mark.parametrize("ranks", [1, 2])
def test_no_grad_inference_forward_ad_vmap(ranks):
    on_ranks(ranks, check_modes)


def _anomaly():
    with torch.autograd.detect_anomaly(check_nan=True):
        for _ in range(3):
            # Pool blocks full of NaN: what no exchange wrote would be seen.
            poison = [
                deepsp.seq_to_heads([torch.full((1, n, 8, 16), float("nan"))]) for n in (3, 4, 5, 7)
            ]
            del poison
            x = draw(1, 4 if dist.get_rank() else 3, 8, 16, dtype=torch.float32).requires_grad_()
            out = deepsp.distributed_attention(x, x, x, seq_lens=[3, 4], chunks=2)
            out.sum().backward()


@pytest.mark.messages
def test_anomaly_mode_sees_no_nan_in_buffers_on_their_way():
    on_ranks(2, _anomaly)


# -------------------------------------------------------------------------------- the pairs


@pytest.mark.messages
@pytest.mark.parametrize("ranks", RANKS)
def test_pairs_equal_the_whole(ranks):
    on_ranks(ranks, check_pairs)


def _waited_twice():
    x = draw(1, 4, 4, 3)
    name, rank = dist.group.WORLD.group_name, dist.get_rank()
    op = torch.ops.deepsp
    (y,) = deepsp.seq_to_heads([x])
    buffer = op.heads_to_seq_start([y], [4], [4, 4], 0, 1, rank, name)
    op.heads_to_seq_wait([buffer], [4], [3], 1, [4, 4], rank, name)
    with pytest.raises(ValueError, match="waited for already"):
        op.heads_to_seq_wait([buffer], [4], [3], 1, [4, 4], rank, name)
    first, last, fresh = (
        op.heads_to_seq_start([y[:, :, :1]], [4], [4, 4], chunk, 2, rank, name)
        for chunk in (0, 1, 0)
    )
    op.heads_to_seq_wait([first, last], [4], [3], 1, [4, 4], rank, name)
    with pytest.raises(ValueError, match="waited for already"):
        op.heads_to_seq_wait([fresh, last], [4], [3], 1, [4, 4], rank, name)


def test_waiting_twice_raises():
    on_ranks(2, _waited_twice)


def _started_twice_waited():
    """Both waits of the pair, twice: never a silently wrong gradient."""
    rank, name = dist.get_rank(), dist.group.WORLD.group_name
    op = torch.ops.deepsp
    (buffer,) = op.seq_to_heads_start([draw(1, 4, 4, 3)], [4, 4], 1, False, rank, name)
    op.seq_to_heads_wait(buffer, [4], [3], 1, [4, 4], 0, 1, rank, name)
    for _ in range(2):  # a wait that raised leaves the next one to raise
        with pytest.raises(ValueError, match="waited for already"):
            op.seq_to_heads_wait(buffer, [4], [3], 1, [4, 4], 0, 1, rank, name)


@pytest.mark.messages
def test_views_are_waited_for_once():
    on_ranks(2, _started_twice_waited)


def _own_block():
    """A rank's own block is copied from source to destination: the pool holds the received block
    and what went to the other rank, no more."""
    x = draw(1, 4096, 4, 64, dtype=torch.float32)
    deepsp.ranks.buffers.clear()
    (y,) = deepsp.seq_to_heads([x])
    received, sent = y.nbytes, y.nbytes // 2
    del y
    assert deepsp.ranks.buffers.idle_bytes() == received + sent
    deepsp.ranks.buffers.clear()
    (y,) = deepsp.seq_to_heads([x])
    base = deepsp.ranks.buffers.idle_bytes()
    (z,) = deepsp.heads_to_seq([y], [4])  # lies by tokens: sent from where it is
    assert torch.equal(z, x)
    merged = z.nbytes
    del z
    assert deepsp.ranks.buffers.idle_bytes() <= max(base, 0) + merged + x.nbytes
    del y


def test_a_ranks_own_block_is_not_sent():
    on_ranks(2, _own_block, apart="messages")


def _anomaly_on_one_rank():
    """Debugging one rank doesn't change what travels."""
    x = [draw(1, 8192, 8, 64, seed=i, dtype=torch.float32).requires_grad_() for i in range(3)]
    with torch.autograd.set_detect_anomaly(dist.get_rank() == 0):
        y = deepsp.seq_to_heads(x)
        gradients = torch.autograd.grad(sum((t * t).sum() for t in y), x)
    for g, t in zip(gradients, x, strict=True):
        torch.testing.assert_close(g, 2 * t.detach())


def test_anomaly_mode_on_one_rank_only():
    on_ranks(2, _anomaly_on_one_rank)


def _dropped():
    """Nobody waits (an exception came between, say): the group stays usable, memory returns."""
    x = draw(1, 64, 4, 32)
    deepsp.ranks.buffers.clear()
    for _ in range(3):
        deepsp.seq_to_heads_start([x])
        (y,) = deepsp.seq_to_heads([x])
        deepsp.heads_to_seq_start([y], [4])
        del y
    assert deepsp.ranks.buffers.idle_bytes() > 0
    (y,) = deepsp.seq_to_heads([x])
    assert torch.equal(deepsp.heads_to_seq([y], [4])[0], x)


@pytest.mark.messages
def test_a_start_without_a_wait():
    on_ranks(2, _dropped)


# ------------------------------------------------------------------------------- what it costs


def _train(x, module):
    out = module(*x)
    grad = torch.ones_like(out)
    return out, lambda: torch.autograd.grad(out, x, grad)


class _Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        ctx.shapes = q.shape, k.shape, v.shape
        return torch.ones(q.shape, dtype=q.dtype)

    @staticmethod
    def backward(ctx, grad):
        return tuple(torch.ones(shape, dtype=grad.dtype) for shape in ctx.shapes)


def _costs(batch, tokens, expected_forward, expected_backward):
    heads, dim = 8, 64
    x = [torch.ones(batch, tokens, h, dim, requires_grad=True) for h in (heads, 4, 4)]
    module = deepsp.DistributedAttention(_Nothing.apply)
    module(*x)  # the first call compares
    kept = []
    forward = names(lambda: kept.append(_train(x, module)))
    backward = names(kept[0][1])
    keys = ("deepsp::exchange", "deepsp::pack", "deepsp::merge")
    assert tuple(forward[k] for k in keys) == expected_forward
    assert tuple(backward[k] for k in keys) == expected_backward
    for seen in (forward, backward):
        for other in ("aten::copy_", "aten::clone", "aten::contiguous", "aten::cat"):
            assert seen[other] == 0, other


@pytest.mark.messages
def test_collectives_and_copies():
    """Exchanges, packs, merges. A pack or a merge is one copy of all that travels together."""
    # Small: gradients go packed. B = 1: the output needs no packing (it lies by tokens).
    on_ranks(2, _costs, 1, 256, (2, 1, 1), (2, 2, 1), apart="messages")
    # Large, B = 1: dq, dk and dv go as they are.
    on_ranks(2, _costs, 1, 8192, (2, 1, 1), (4, 1, 1), apart="messages")
    # B > 1 and an attention that returns [B, S, h, D]: its output is packed, too, and gradients are
    # at any size.
    on_ranks(2, _costs, 2, 2048, (2, 2, 1), (2, 2, 1), apart="messages")


def test_one_copy():
    """Through shared memory, what packs writes to where it is read: nothing is merged."""
    for batch, tokens in ((1, 256), (1, 8192), (2, 256)):
        on_ranks(2, _costs, batch, tokens, (2, 2, 0), (2, 2, 0), apart="mapped")


def _merges_of_ops():
    for layout in ("bshd", "sbhd"):
        shape = (2, 64) if layout == "bshd" else (64, 2)
        x = [torch.ones(*shape, h, 16, requires_grad=True) for h in (8, 4, 4)]
        kept = []

        def forward(x=x, kept=kept, layout=layout):
            kept.append(deepsp.distributed_attention(*x, enable_gqa=True, layout=layout))

        forward()
        assert names(forward)["deepsp::merge"] == 0, layout
        seen = names(lambda kept=kept, x=x: torch.autograd.grad(kept[-1].sum(), x))
        assert seen["deepsp::merge"] == 0, layout
    x = [torch.ones(2, 64, h, 16, requires_grad=True) for h in (8, 4)]
    for start in (deepsp.seq_to_heads, lambda x: deepsp.seq_to_heads_start(x).wait()):
        got = start(x)
        seen = names(lambda got=got: torch.autograd.grad([y.sum() for y in got], x))
        assert seen["deepsp::merge"] == 0


def test_ops_merge_nothing():
    on_ranks(2, _merges_of_ops, apart="mapped")


def _memory_differs():
    """The gradient of seq_to_heads, whatever the order of a rank's inputs in memory."""
    rank, size = dist.get_rank(), dist.get_world_size()
    lens = lens_of("skewed", 11, size)
    weights = [draw(2, 11, h, 3, seed=h) for h in (5, 1)]
    for of_rank in (("bshd", "sbhd", "bhsd"), ("sbhd", "sbhd", "sbhd")):
        mine = [w.split(lens, 1)[rank] for w in weights]
        x = [with_layout(torch.ones_like(w), of_rank[rank]).requires_grad_() for w in mine]
        for op in (deepsp.seq_to_heads, lambda x, **k: deepsp.seq_to_heads_start(x, **k).wait()):
            got = op(x, seq_lens=lens)
            read = heads_of(rank, size, 5, 1)
            loss = sum((y * w[:, :, hs]).sum() for y, w, hs in zip(got, weights, read, strict=True))
            grads = torch.autograd.grad(loss, x)
            assert torch.equal(grads[0], mine[0])
            torch.testing.assert_close(grads[1], size * mine[1])
        # The op takes layout's order for what lies in memory.
        found = []
        for memory in (of_rank[rank], "sbhd"):
            q, k, v = (
                with_layout(draw(2, 11, h, 4, seed=h).split(lens, 1)[rank], memory).requires_grad_()
                for h in (6, 3, 3)
            )
            out = deepsp.distributed_attention(
                *(x.transpose(0, 1) for x in (q, k, v)),
                enable_gqa=True,
                layout="sbhd",
                seq_lens=lens,
            )
            found.append((out, *torch.autograd.grad((out * out).sum(), (q, k, v))))
        for x, y in zip(*found, strict=True):
            torch.testing.assert_close(x, y)


@pytest.mark.parametrize("apart", ["mapped", "machines", "messages"])
def test_memory_of_ranks_differs(apart):
    on_ranks(3, _memory_differs, apart=apart)


def _sdpa_needs_no_copy():
    for batch in (1, 2):
        x = [torch.ones(batch, 256, h, 64, requires_grad=True) for h in (8, 2, 2)]
        kept = []

        def forward(x=x, kept=kept):
            kept.append(deepsp.distributed_attention(*x, is_causal=True, enable_gqa=True))

        forward()
        kept.clear()
        seen = names(forward)
        assert (seen["deepsp::exchange"], seen["deepsp::pack"], seen["deepsp::merge"]) == (2, 1, 1)
        assert seen["aten::copy_"] == seen["aten::clone"] == 0
        grad = torch.ones_like(kept[0])
        seen = names(lambda kept=kept, grad=grad, x=x: torch.autograd.grad(kept[0], x, grad))
        assert (seen["deepsp::exchange"], seen["deepsp::pack"], seen["deepsp::merge"]) == (2, 2, 1)


def test_sdpa_works_on_the_views():
    """Attention's output of our views lies by tokens, at any batch size: it is never packed."""
    on_ranks(2, _sdpa_needs_no_copy, apart="messages")


# ------------------------------------------------------------------------------ meta, P = 1024


def test_shapes_without_a_group():
    op = torch.ops.deepsp
    lens = [1000] * 1023 + [7]
    rank = 1023
    q = torch.empty(2, 7, 2048, 128, device="meta", dtype=torch.bfloat16)
    k = torch.empty(2, 7, 256, 128, device="meta", dtype=torch.bfloat16)
    there = op.seq_to_heads([q, k, k], lens, rank, "none")
    assert [tuple(y.shape) for y in there] == [(2, 1023007, 2, 128)] + [(2, 1023007, 1, 128)] * 2
    assert there[1].stride() == (512, 1024, 128, 1)
    back = op.heads_to_seq(there, [2048, 256, 256], lens, rank, "none")
    assert [y.shape for y in back] == [q.shape, k.shape, k.shape]
    out = op.distributed_attention(q, k, k, None, 0.0, True, None, True, 1, lens, rank, "none")
    assert out.shape == q.shape and out.stride() == q.stride()
