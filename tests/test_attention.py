"""Distributed attention against one process, the whole sequence, float64: output and gradients."""

import functools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from attentions import TIGHT, check_attention, compare_attention, draw_qkv
from harness import on_ranks
from hypothesis import given
from hypothesis import strategies as st
from reference import Take, attention, draw, events, heads_of, lens_of, sent
from torch.autograd import gradcheck
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import deepsp
from deepsp.sequence.attention import parts


@st.composite
def _cases(draw_):
    kv_heads = draw_(st.integers(1, 5))
    return (
        draw_(st.integers(1, 2)),
        draw_(st.integers(1, 11)),
        kv_heads * draw_(st.integers(1, 6)),
        kv_heads,
        draw_(st.sampled_from([(8, 8), (5, 5), (4, 6)])),
        draw_(st.booleans()),
        draw_(st.integers(1, 4)),
        draw_(st.sampled_from(["split", "skewed", "empty"])),
        draw_(st.sampled_from([None, 0.3])),
    )


@pytest.mark.messages
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@given(case=_cases())
def test_equals_one_process(ranks, case):
    on_ranks(ranks, check_attention, *case)


def _empty_batch():
    size = dist.get_world_size()
    x = torch.empty(0, 3, 4, 8, requires_grad=True)
    out = deepsp.distributed_attention(x, x, x, seq_lens=[3] * size)
    assert out.shape == x.shape
    out.sum().backward()
    assert x.grad.shape == x.shape


def test_empty_batch():
    on_ranks(2, _empty_batch)


def _masks(kind, chunks):
    size = dist.get_world_size()
    total, heads = 9, 8
    lens = lens_of("skewed", total, size)
    shape = {
        "SS": (total, total),
        "B1SS": (2, 1, total, total),
        "BHSS": (2, heads, total, total),
        "HSS": (heads, total, total),
        "1H1S": (1, heads, 1, total),
    }[kind[1]]
    numbers = draw(*shape, seed=7)
    whole = draw_qkv(2, total, heads, 2, 8, 8)
    if kind[0] == "bool":
        mask = numbers > -0.5
        mask[..., 0] = True
        compare_attention(
            whole,
            lens,
            lambda q, k, v: deepsp.distributed_attention(
                q, k, v, mask, enable_gqa=True, seq_lens=lens, chunks=chunks
            ),
            lambda q, k, v: attention(q, k, v, attn_mask=mask),
        )
    else:  # additive, learned: it has a gradient, too
        compare_attention(
            whole,
            lens,
            lambda q, k, v, m: deepsp.distributed_attention(
                q, k, v, m, enable_gqa=True, seq_lens=lens, chunks=chunks
            ),
            lambda q, k, v, m: attention(q, k, v, attn_mask=m),
            extra=[numbers.requires_grad_()],
        )


@pytest.mark.parametrize("dtype", ["bool", "additive"])
@pytest.mark.parametrize("shape", ["SS", "B1SS", "BHSS", "HSS", "1H1S"])
def test_masks_are_global(dtype, shape):
    on_ranks(2, _masks, (dtype, shape), 1)
    on_ranks(3, _masks, (dtype, shape), 2)


def _global_gradcheck():
    size = dist.get_world_size()
    lens = lens_of("skewed", 4, size)
    whole = [x.requires_grad_() for x in draw_qkv(1, 4, 4, 2, 2, 3)]

    def function(*x):
        from reference import Whole

        out = deepsp.distributed_attention(
            *(Take.apply(t, lens, 1) for t in x),
            is_causal=True,
            enable_gqa=True,
            seq_lens=lens,
            chunks=2,
        )
        return Whole.apply(out, lens, 1)

    gradcheck(function, whole, fast_mode=False)


@pytest.mark.parametrize("ranks", [2, 3])
def test_gradcheck(ranks):
    on_ranks(ranks, _global_gradcheck)


def _chunks_agree():
    size = dist.get_world_size()
    lens = lens_of("split", 12, size)
    whole = [x.split(lens, 1)[dist.get_rank()] for x in draw_qkv(2, 12, 12, 6, 8, 8)]
    results = []
    for chunks in (1, 2, 3, 100):
        x = [t.clone().requires_grad_() for t in whole]
        out = deepsp.distributed_attention(
            *x, is_causal=True, enable_gqa=True, seq_lens=lens, chunks=chunks
        )
        out.square().sum().backward()
        results.append([out, *(t.grad for t in x)])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)


@pytest.mark.messages
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_any_chunk_count_gives_the_same(ranks):
    on_ranks(ranks, _chunks_agree)


MARKS = {
    "deepsp::seq_to_heads_start": "S",
    "deepsp::seq_to_heads_wait": "W",
    "deepsp::heads_to_seq_start": "s",
    "deepsp::heads_to_seq_wait": "w",
    "deepsp::exchange": "x",
    "aten::scaled_dot_product_attention": "A",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": "A",
}


def _order():
    x = [draw(1, 32, 8, 16, seed=i, dtype=torch.float32).requires_grad_() for i in range(3)]
    kept = []

    def marks(call):
        seen, until = [], {}
        for event in events(call):
            mark = MARKS.get(event.name)
            # An op is seen once at the Autograd key and once below it: count the outer one.
            if mark and event.time_range.start >= until.get(event.name, 0):
                seen.append(mark)
                until[event.name] = event.time_range.end
        return "".join(seen)

    def forward():
        kept.append(deepsp.distributed_attention(*x, chunks=3))

    grad = torch.ones(1, 32, 8, 16)
    forward()
    forwards = marks(forward)
    backwards = marks(lambda: torch.autograd.grad(kept[-1], x, grad))
    # All q, k, v chunks are launched; while attention works on one, the others and the outputs
    # of those before it are on their way; outputs are waited for at the end.
    assert forwards == "Sxxx" + "WAsx" * 3 + "w", forwards
    # And mirrored.
    assert backwards == "Sxxx" + "WAsx" * 3 + "w", backwards


@pytest.mark.messages
def test_order_of_launches_and_waits():
    on_ranks(2, _order)


def _sizes():
    """A kv head travels once, with the first chunk that reads it; backward, the last chunk leaves
    first."""
    q = draw(1, 16, 8, 16, dtype=torch.float32).requires_grad_()
    k = draw(1, 16, 2, 16, dtype=torch.float32).requires_grad_()
    kept = []

    def forward():
        kept.append(deepsp.distributed_attention(q, k, k, enable_gqa=True, chunks=3))

    head = 16 * 16 * 4  # bytes
    # Each rank has 4 query heads, cut 2, 1, 1, and one kv head.
    assert sent(forward) == [4 * head, head, head, 2 * head, head, head]
    assert sent(lambda: kept[-1].sum().backward()) == [head, head, 2 * head, head, head, 4 * head]


def test_what_travels_with_which_chunk():
    on_ranks(2, _sizes, apart="messages")


# ------------------------------------------------------------------------- a local attention


def _alibi(q, k, v, slopes):
    total = q.size(1)
    distance = torch.arange(total) - torch.arange(total)[:, None]
    bias = slopes[:, None, None] * -distance.abs().to(q.dtype)
    return attention(q, k, v, attn_mask=bias)


def _wrapped(heads, kv_heads, chunks):
    """A user's attention with something per head, sliced by local_heads; positional and keyword
    arguments go through."""
    rank, size = dist.get_rank(), dist.get_world_size()
    lens = lens_of("skewed", 10, size)
    slopes = torch.linspace(0.1, 1, heads, dtype=torch.float64)
    mine = deepsp.sequence.attention.local_heads(heads)
    q_heads, kv = deepsp.sequence.attention.local_heads(heads, num_kv_heads=kv_heads)
    assert mine == q_heads and [list(q_heads), list(kv)] == list(
        heads_of(rank, size, heads, kv_heads)
    )
    seen = []

    def local(q, k, v, slopes):
        seen.append((q.shape, k.shape))
        assert q.size(2) % k.size(2) == 0
        if chunks > 1:
            return attention(q, k, v, is_causal=True)
        return _alibi(q, k, v, slopes)

    module = deepsp.DistributedAttention(local, chunks=chunks)
    compare_attention(
        draw_qkv(2, 10, heads, kv_heads, 8, 6),
        lens,
        lambda q, k, v: module(q, k, v, slopes=slopes[mine.start : mine.stop], seq_lens=lens),
        lambda q, k, v: (
            attention(q, k, v, is_causal=True) if chunks > 1 else _alibi(q, k, v, slopes)
        ),
    )
    assert all(shape[1] == 10 for shape, _ in seen) and "chunks" in repr(module)


@pytest.mark.parametrize("heads", [(8, 8, 1), (8, 2, 1), (9, 3, 1), (8, 4, 2)])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_any_local_attention(ranks, heads):
    on_ranks(ranks, _wrapped, *heads)


def _again(heads, kv_heads, total):
    """Even heads go by one exchange each way; later calls of the same sizes make no checks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    lens = lens_of("skewed", total, size)
    whole = draw_qkv(2, total, heads, kv_heads, 8, 6)
    module = deepsp.DistributedAttention(functools.partial(attention, is_causal=True))
    even = heads % size == 0 and kv_heads % size == 0

    def compare():
        """Whether sizes were checked."""
        with (
            mock.patch.object(parts, "AttentionCall", side_effect=parts.AttentionCall) as checks,
            mock.patch.object(module, "_attend", side_effect=module._attend) as by_chunks,
        ):
            compare_attention(
                whole,
                lens,
                functools.partial(module, seq_lens=lens),
                lambda q, k, v: attention(q, k, v, is_causal=True),
            )
        assert (by_chunks.call_count == 0) == (even and module.chunks == 1)
        return checks.call_count == 1

    assert compare()
    assert compare() != even
    q, k, v = (x.split(lens, 1)[rank] for x in whole)
    for wrong, name in (((q, k[:, :-1], v), "k"), ((q, k, v[:1]), "v|inputs"), ((q[0], k, v), "q")):
        with pytest.raises(ValueError, match=f"expected ({name})"):
            module(*wrong, seq_lens=lens)
    with pytest.raises(ValueError, match="expected no local_attention with deal"):
        module(q, k, v, deal=deepsp.deal_documents([total], size))
    with pytest.raises(ValueError, match="expected seq_lens to be ints"):
        module(q, k, v, seq_lens=[*map(float, lens)])
    for _ in range(2):  # not accepted the second time
        with pytest.raises(ValueError, match="k and v to have the same number of heads"):
            module(q, k, v.repeat(1, 1, 2, 1), seq_lens=lens)
    compare()  # remembers the sizes
    module.chunks = 2
    assert compare()
    module.chunks = 1
    compare()
    module.layout = "sbhd"
    if lens[rank] != 2:
        with pytest.raises(ValueError, match="expected q to have sequence length"):
            module(q, k, v, seq_lens=lens)
    module.layout = "bshd"
    assert compare() or even

    # The same ops in each call, which a selective checkpoint runs again.
    fresh = deepsp.DistributedAttention(functools.partial(attention, is_causal=True))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = checkpoint(
        functools.partial(fresh, seq_lens=lens),
        *leaves,
        use_reentrant=False,
        context_fn=deepsp.checkpoint_policy(),
    )
    kept = torch.autograd.grad(out.sum(), leaves)
    plain = torch.autograd.grad(fresh(*leaves, seq_lens=lens).sum(), leaves)
    assert all(map(torch.equal, kept, plain))


@pytest.mark.messages
@pytest.mark.parametrize("ranks, heads", [(1, (6, 3)), (2, (8, 2)), (3, (6, 3)), (3, (7, 7))])
def test_calls_of_the_same_sizes(ranks, heads):
    on_ranks(ranks, _again, *heads, 11)


def _flex():
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    total, window = 64, 7
    size = dist.get_world_size()
    lens = lens_of("skewed", total, size)

    def near(b, h, i, j):
        return (i >= j) & (i - j < window)

    block_mask = create_block_mask(near, None, None, total, total, device="cpu", BLOCK_SIZE=16)

    def local(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return flex_attention(q, k, v, block_mask=block_mask, enable_gqa=True).transpose(1, 2)

    module = deepsp.DistributedAttention(local)
    i = torch.arange(total)
    mask = (i[:, None] >= i) & (i[:, None] - i < window)
    rank = dist.get_rank()
    whole = draw_qkv(1, total, 8, 2, 16, 16, torch.float32)
    with torch.no_grad():  # FlexAttention has no backward on the CPU
        out = module(*(x.split(lens, 1)[rank] for x in whole), seq_lens=lens)
    torch.testing.assert_close(
        out, attention(*whole, attn_mask=mask).split(lens, 1)[rank], rtol=1e-5, atol=1e-5
    )


def test_flex_attention_with_a_global_block_mask():
    on_ranks(2, _flex)


def _wrong_local():
    x = draw(1, 4, 4, 8)
    module = deepsp.DistributedAttention(lambda q, k, v: q[:, :, :1])
    with pytest.raises(ValueError, match="expected local_attention to return"):
        module(x, x, x)


def test_a_local_attention_that_returns_nonsense():
    on_ranks(1, _wrong_local)


# ------------------------------------------------------------------------- dtypes and groups


def _in_modes():
    """A user's function runs in the modes of the call, such as that of a default device."""
    found = []

    def look(q, k, v):
        found.append(torch.empty(0).device.type)
        return q

    q = draw(1, 2, 2, 4)
    with torch.device("meta"):
        deepsp.DistributedAttention(look)(q, q, q)
    assert found == ["meta"]


def test_a_local_attention_in_modes():
    on_ranks(1, _in_modes)


def _low(dtype):
    lens = lens_of("split", 33, dist.get_world_size())
    whole = draw_qkv(2, 33, 8, 2, 16, 16, dtype)
    rank = dist.get_rank()
    out = deepsp.distributed_attention(
        *(x.split(lens, 1)[rank] for x in whole), is_causal=True, enable_gqa=True, seq_lens=lens
    )
    assert out.dtype == dtype
    expected = attention(*(x.double() for x in whole), is_causal=True).split(lens, 1)[rank]
    torch.testing.assert_close(out.double(), expected, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits(dtype):
    on_ranks(2, _low, dtype)


def _autocast():
    x = [t.float().requires_grad_() for t in draw_qkv(1, 6, 4, 4, 8, 8)]
    with torch.autocast("cpu", torch.bfloat16):
        out = deepsp.distributed_attention(*x)
        expected = deepsp.distributed_attention(*(t.bfloat16() for t in x))
    assert out.dtype == torch.bfloat16 and torch.equal(out, expected)
    out.sum().backward()
    assert x[0].grad.dtype == torch.float32

    class Spy(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.deepsp.seq_to_heads_start.default:
                seen.append([t.dtype for t in args[0]])
            return func(*args, **(kwargs or {}))

    seen = []
    with torch.autocast("cpu", torch.bfloat16), Spy():
        deepsp.distributed_attention(*x)
    assert seen == [[torch.bfloat16] * 3]


def test_autocast_casts_before_the_exchange():
    on_ranks(2, _autocast)


def _groups():
    """A 2 x 2 mesh: each row is a sequence group of its own."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "seq"))
    row, place = mesh.get_coordinate()
    whole = [x + row for x in draw_qkv(1, 7, 4, 2, 8, 8)]
    lens = deepsp.ranks.seq_lens(7, mesh["seq"])
    assert lens == [4, 3]
    mine = [x.split(lens, 1)[place] for x in whole]
    expected = attention(*whole, is_causal=True).split(lens, 1)[place]
    for group in (mesh["seq"], mesh["seq"].get_group()):
        out = deepsp.distributed_attention(
            *mine, is_causal=True, enable_gqa=True, group=group, seq_lens=lens
        )
        torch.testing.assert_close(out, expected, **TIGHT)
    assert deepsp.sequence.attention.local_heads(4, mesh["seq"]) == range(2 * place, 2 * place + 2)
    assert deepsp.sequence.attention.local_heads(4) == range(dist.get_rank(), dist.get_rank() + 1)


def test_groups_and_meshes():
    on_ranks(4, _groups)


def _messages():
    """Tags that nothing of the user's matches; two groups of the same ranks, used in turn."""
    rank = dist.get_rank()
    other = dist.new_group([0, 1])
    whole = draw_qkv(1, 8, 4, 4, 8, 8)
    x = [t.split(4, 1)[rank].clone().requires_grad_() for t in whole]
    mine = torch.full((3,), float(rank))
    theirs = torch.empty(3)
    receive = dist.irecv(theirs, 1 - rank)  # posted before, served after the exchanges
    out = deepsp.distributed_attention(*x)
    out = out + deepsp.distributed_attention(*x, group=other)
    torch.testing.assert_close(out, 2 * attention(*whole).split(4, 1)[rank], **TIGHT)
    out.sum().backward()
    dist.isend(mine, 1 - rank).wait()
    receive.wait()
    assert torch.equal(theirs, torch.full((3,), 1.0 - rank))


def test_users_own_messages_are_left_alone():
    on_ranks(2, _messages)


def test_dropout_is_handed_to_sdpa():
    on_ranks(2, _dropout)


def _dropout():
    x = [t.clone() for t in draw_qkv(1, 4, 4, 4, 8, 8)]
    out = deepsp.distributed_attention(*x, dropout_p=1.0)
    assert not out.any()
    kept = deepsp.distributed_attention(*x, dropout_p=0.5)
    assert not torch.equal(kept, deepsp.distributed_attention(*x)) and F.relu(kept).any()
