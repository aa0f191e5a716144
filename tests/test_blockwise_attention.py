"""Attention by blocks of scores, documents by their borders, keys in parts: against all scores at
once, in float64."""

import functools
import itertools

import pretended
import pytest
import torch
import torch.distributed as dist
from harness import on_ranks
from pretended import on_gpu
from reference import draw, everything, lens_of, names
from torch.nn.attention import SDPBackend

import deepsp

BLOCKWISE = torch.ops.deepsp._blockwise_attention
BACKWARD = torch.ops.deepsp._blockwise_attention_backward


def _leaves(batch, length, heads, kv_heads, dim, dim_v, with_sinks, dtype=torch.float64):
    shapes = [
        (batch, length, heads, dim),
        (batch, length, kv_heads, dim),
        (batch, length, kv_heads, dim_v),
        *[(heads,)] * with_sinks,
    ]
    return [draw(*s, seed=n, dtype=dtype).requires_grad_() for n, s in enumerate(shapes)]


def _compare(found, expected, leaves, grad, atol=1e-12):
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)
    mine = torch.autograd.grad(found, leaves, grad, retain_graph=True)
    theirs = torch.autograd.grad(expected, leaves, grad, retain_graph=True)
    torch.testing.assert_close(mine, theirs, rtol=0, atol=atol)


@pytest.mark.parametrize(
    ("shape", "documents"),
    [
        ((1, 300, 4, 2, 16, 16), [[0, 37], [37, 38], [40, 300]]),
        ((1, 700, 2, 2, 8, 12), [[100, 700]]),  # more keys than a tile has
        ((2, 150, 6, 2, 8, 8), [[0, 100], [100, 140], [150, 250]]),
    ],
)
@pytest.mark.parametrize("packed", [True, False])
def test_equals_all_scores(shape, documents, packed):
    documents = torch.tensor(documents) if packed else None
    windows = ((), (20, -1), (5, 7), (0, 0), (1000, 1000))
    for causal, window, cap, sunk in itertools.product(
        (True, False), windows, (None, 3.0), (False, True)
    ):
        q, k, v, *sinks = leaves = _leaves(*shape, sunk)
        sinks = sinks[0] if sinks else None
        out, log_sum = BLOCKWISE(q, k, v, documents, causal, window, 0.3, cap, sinks)
        expected = everything(q, k, v, documents, causal, window, cap, sinks, 0.3, return_lse=True)
        grads = [draw(*x.shape, seed=9) for x in expected]
        _compare(out, expected[0], leaves, grads[0])
        _compare((out, log_sum.transpose(1, 2)), expected, leaves, grads)


def test_inputs_stay_as_they_are():
    # A document of one token: what tiles are made of are views then.
    leaves = _leaves(1, 5, 2, 1, 4, 6, True)
    before = [x.detach().clone() for x in leaves]
    q, k, v, sinks = leaves
    out, _ = BLOCKWISE(q, k, v, torch.tensor([[1, 2], [2, 5]]), True, [], None, 2.0, sinks)
    out.sum().backward()
    torch.testing.assert_close([x.detach() for x in leaves], before, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_narrow_dtypes(dtype):
    documents = torch.tensor([[0, 50], [50, 200]])
    for cap, window in ((None, ()), (None, (30, 0)), (5.0, ())):
        leaves = _leaves(1, 200, 4, 2, 16, 16, True, dtype)
        wide = [x.detach().double().requires_grad_() for x in leaves]
        out, log_sum = BLOCKWISE(*leaves[:3], documents, True, window, None, cap, leaves[3])
        assert log_sum.dtype == torch.float32 and out.dtype == dtype
        expected = everything(*wide[:3], documents, True, window, cap, wide[3])
        grad = draw(*out.shape, seed=9, dtype=dtype)
        mine = torch.autograd.grad(out, leaves, grad)
        theirs = torch.autograd.grad(expected, wide, grad.double())
        rough = 2e-5 if dtype == torch.float32 else 2e-2 if dtype == torch.bfloat16 else 4e-3
        for x, y in zip((out, *mine), (expected, *theirs), strict=True):
            assert (x.double() - y).abs().max() <= rough * max(1, y.abs().max())


# Launches forward and backward, per kind of call: documents, causal, window, softcap, sinks, ranges
# of queries, rows.
ON_GPU = {
    "full": ((None, False, (), None, False, [], 1), (1, 1)),
    "causal": ((None, True, (), None, False, [], 1), (1, 1)),
    "window": ((None, True, (30, 0), None, False, [], 1), (1, 1)),
    "wide window": ((None, False, (500, 7), None, False, [], 1), (1, 1)),
    "rows": ((None, True, (30, 0), None, False, [], 2), (2, 4)),  # copied into order
    "packed": (([[0, 70], [70, 71], [71, 200]], True, (), None, False, [], 1), (1, 1)),
    "both ways": (([[0, 70], [70, 200]], False, (), None, False, [], 1), (1, 1)),
    "packed window": (([[0, 70], [70, 200]], True, (30, 0), None, False, [], 1), (1, 1)),
    "short, long": (([[0, 5], [5, 90], [90, 200]], False, (8, 3), None, False, [], 1), (1, 1)),
    "of one": (([[n, n + 1] for n in range(200)], True, (), None, False, [], 1), (1, 1)),
    "padded": (([[0, 70], [70, 150]], True, (), None, False, [], 1), (5, 8)),
    "gap": (([[0, 70], [71, 150]], True, (), None, False, [], 1), (8, 13)),
    "rows of documents": (
        ([[0, 70], [70, 200], [200, 300], [300, 400]], True, (), None, False, [], 2),
        (8, 11),
    ),
    "sinks": (([[0, 70], [70, 200]], True, (), None, True, [], 1), (6, 12)),
    "cut": ((None, True, (), None, False, [20, 60, 120, 170], 1), (8, 13)),
    "cut window": ((None, True, (30, 0), None, False, [20, 60, 120, 170], 1), (8, 13)),
    "cut, both ways": ((None, False, (30, 10), None, False, [20, 60, 120, 200], 1), (11, 20)),
    "cut documents": (([[0, 70], [70, 200]], True, (), None, False, [20, 90], 1), (8, 13)),
    "tiles": ((None, True, (), 5.0, False, [], 1), (86, 90)),
}


@pytest.mark.skipif(torch.version.cuda is not None, reason="CUDA itself is asked for a stream")
@pytest.mark.parametrize("kind", ON_GPU)
def test_flash_on_a_gpu(kind):
    (borders, causal, window, cap, sunk, queries, rows), budget = ON_GPU[kind]
    documents = None if borders is None else torch.tensor(borders)
    q, k, v, *sinks = _leaves(rows, 200, 4, 2, 16, 16, sunk, torch.float16)
    rows_of_q = [i for a, b in zip(queries[::2], queries[1::2], strict=True) for i in range(a, b)]
    rows_of_q = rows_of_q or range(200)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v, *sinks)]
    q = q[:, rows_of_q]
    sink = sinks[0] if sinks else None
    call = (q, k, v, documents, causal, window, 0.3, cap, sink)
    on_gpu(BLOCKWISE.default, *call, queries)  # copies the documents' borders
    (out, log_sum), forward = on_gpu(BLOCKWISE.default, *call, queries)
    whole = everything(
        *wide[:3], documents, causal, window, cap, *(wide[3:] or [None]), 0.3, return_lse=True
    )
    expected, sums = (x[:, rows_of_q] for x in whole)
    grad = draw(*out.shape, seed=9, dtype=torch.float16)
    of_sums = draw(*sums.shape, seed=8)
    args = (grad, *call, out, log_sum, [1, 1, 1, int(sunk)], queries)
    found, backward = on_gpu(BACKWARD.default, *args)
    both, launched = on_gpu(BACKWARD.default, *args, of_sums.transpose(1, 2).float())
    assert ("_flash_attention_backward" in launched) == (cap is None)
    assert all(x.transpose(0, 1).is_contiguous() for x in both[:3])
    theirs = list(torch.autograd.grad(expected, wide, grad.double(), retain_graph=True))
    of_both = list(torch.autograd.grad((expected, sums), wide, (grad.double(), of_sums)))
    theirs[0], of_both[0] = theirs[0][:, rows_of_q], of_both[0][:, rows_of_q]
    every = zip((out, *found, *both), (expected, *theirs, *of_both), strict=True)
    for mine, other in every:
        assert (mine.double() - other).abs().max() <= 4e-3 * max(1, other.abs().max())
    assert out.transpose(0, 1).is_contiguous()
    assert (cap is None) == ("_flash_attention_forward" in forward)
    assert (len(forward), len(backward)) == budget, (forward, backward)


# Documents, ranges of queries, tokens; calls of each kernel.
DENSE = {
    "a part of one": (
        [[0, 4200], [4200, 4500]],
        [],
        4500,
        {"_scaled_dot_product_cudnn_attention": 1, "_flash_attention_forward": 2},
    ),
    "rows of one length": (
        [[0, 30], [30, 2930], [2930, 5830]],
        [],
        5830,
        {"_scaled_dot_product_cudnn_attention": 1, "_flash_attention_forward": 1},
    ),
    "cut": (None, [4100, 8200], 8200, {"_scaled_dot_product_cudnn_attention": 2}),
}


@pytest.mark.skipif(torch.version.cuda is not None, reason="CUDA itself is asked for a stream")
@pytest.mark.parametrize("kind", DENSE)
def test_long_pieces_are_dense_calls_on_a_gpu(kind):
    borders, queries, length, calls = DENSE[kind]
    documents = None if borders is None else torch.tensor(borders)
    q, k, v = _leaves(1, length, 2, 1, 8, 8, False, torch.float16)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    mine = slice(*queries or (0, length))
    expected = torch.cat(
        [
            torch.nn.functional.scaled_dot_product_attention(
                *(x[:, begin:end].transpose(1, 2) for x in wide), is_causal=True, enable_gqa=True
            ).transpose(1, 2)
            for begin, end in borders or [[0, length]]
        ],
        1,
    )[:, mine]
    # As an exchange of two rows leaves them: strided.
    q, k, v = (torch.stack([x, x], 1).transpose(0, 1)[0] for x in (q[:, mine], k, v))
    call = (q, k, v, documents, True, (), None, None, None)
    (out, log_sum), forward = on_gpu(BLOCKWISE.default, *call, queries)
    grad = draw(*out.shape, seed=9, dtype=torch.float16)
    gradients, backward = on_gpu(BACKWARD.default, grad, *call, out, log_sum, [1, 1, 1, 0], queries)
    expected_gradients = list(torch.autograd.grad(expected, wide, grad.double()))
    expected_gradients[0] = expected_gradients[0][:, mine]
    for x, y in zip((out, *gradients), (expected, *expected_gradients), strict=True):
        assert (x.double() - y).abs().max() <= 4e-3 * max(1, y.abs().max())
    for name, count in calls.items():
        assert forward.count(name) == count, forward
        assert backward.count(name.removesuffix("_forward") + "_backward") == count, backward
    assert sum("attention" in name for name in forward) == sum(calls.values())


@pytest.mark.skipif(torch.version.cuda is not None, reason="CUDA itself is asked for a stream")
def test_an_activated_flash_attention_is_called():
    """With nothing but is_causal to take, forward and backward; also for long documents, where the
    user's choice is flash attention."""
    calls = []

    def implement():
        library = torch.library.Library("aten", "IMPL", "CUDA")
        for direction in ("forward", "backward"):
            name = f"_flash_attention_{direction}"
            kernel = pretended.KERNELS[getattr(torch.ops.aten, name).default]

            def impl(*args, kernel=kernel, direction=direction, **kwargs):
                causal = args[8] if direction == "forward" else args[11]
                windows = [kwargs.get(f"window_size_{side}") for side in ("left", "right")]
                calls.append((direction, causal, windows))
                return kernel(*args, **kwargs)

            library.impl(name, impl, "CUDA")
        handles.append(library)

    handles = []
    torch.nn.attention.register_flash_attention_impl("of a test", register_fn=implement)
    torch.nn.attention.activate_flash_attention_impl("of a test")
    try:
        q, k, v = _leaves(1, 4200, 1, 1, 8, 8, False, torch.float16)
        call = (q, k, v, torch.tensor([[0, 50], [50, 4200]]), True, (), None, None, None)
        flash = functools.partial(pretended.OnGpu, choice=SDPBackend.FLASH_ATTENTION)
        (out, log_sum), launched = on_gpu(BLOCKWISE.default, *call, mode=flash)
        on_gpu(BACKWARD.default, out, *call, out, log_sum, [1, 1, 1, 0], mode=flash)
    finally:
        handles[0]._destroy()
    assert calls == [("forward", True, [None, None]), ("backward", True, [None, None])]
    assert "_scaled_dot_product_cudnn_attention" not in launched


def test_opcheck():
    documents = torch.tensor([[0, 5], [5, 9], [12, 20]])
    for cap, window, sunk in ((None, (), False), (3.0, (4, 2), True)):
        q, k, v, *sinks = _leaves(2, 10, 4, 2, 8, 8, sunk)
        sinks = sinks[0] if sinks else None
        call = (q, k, v, documents, True, window, None, cap, sinks)
        torch.library.opcheck(BLOCKWISE.default, call)
        out, log_sum = BLOCKWISE(*(x.detach() if isinstance(x, torch.Tensor) else x for x in call))
        with torch.no_grad():
            torch.library.opcheck(
                BACKWARD.default,
                (out, *call, out, log_sum, [1, 1, 1, int(sunk)]),
                test_utils=("test_schema", "test_faketensor"),
            )


def test_gradients_have_none():
    q, k, v = _leaves(1, 6, 2, 2, 4, 4, False)
    out, _ = BLOCKWISE(q, k, v, None, True, [], None, None, None)
    (first,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="not implemented"):
        first.sum().backward()


def _largest(call):
    """Bytes of the largest piece of memory that a call asks for."""
    with torch.profiler.profile(profile_memory=True) as profile:
        call()
    return max(
        event.typed[1].alloc_size
        for event in profile.profiler.kineto_results.experimental_event_tree()
        for event in _with_children(event)
        if isinstance(event.typed[1], torch._C._profiler._ExtraFields_Allocation)
    )


def _with_children(event):
    yield event
    for child in event.children:
        yield from _with_children(child)


def test_no_matrix_of_scores():
    length, heads, dim = 4096, 2, 8
    one = length * heads * dim * 4  # a float32 tensor like q
    for cap, window, dim_v in (
        (None, None, 8),
        (None, (64, 0), 8),
        (5.0, None, 8),
        (None, None, 9),
    ):
        leaves = _leaves(1, length, heads, heads, dim, dim_v, False, torch.float32)
        documents = torch.arange(0, length + 1, 512)

        def run(leaves=leaves, documents=documents, cap=cap, window=window):
            deepsp.distributed_attention(
                *leaves, is_causal=True, documents=documents, window_size=window, softcap=cap
            ).sum().backward()

        largest = _largest_alone(run)
        assert largest <= max(2 * one, heads * 128 * 512 * 4), (cap, window, largest)


def _largest_alone(run):
    if not dist.is_initialized():
        dist.init_process_group("fake", rank=0, world_size=1, store=dist.HashStore())
    try:
        return _largest(run)
    finally:
        dist.destroy_process_group()


# ---------------------------------------------------------------------- over ranks


def _sharded(cases):
    rank, size = dist.get_rank(), dist.get_world_size()
    for shape, kind, packed, options in cases:
        batch, length, *_ = shape
        lens = lens_of(kind, length, size)
        documents = None
        if packed:
            third = length // 3
            documents = [[0, third], [third, length]]
            if batch > 1:
                documents.append([length + 3, 2 * length - 5])
            documents = torch.tensor(documents)
        options = dict(options)
        sunk = options.pop("sunk", False)
        window, softcap = options.get("window_size"), options.get("softcap")
        causal = options.get("is_causal", False)
        q, k, v, *sinks = leaves = _leaves(*shape, sunk)
        given = {"sinks": sinks[0]} if sinks else {}
        first = sum(lens[:rank])
        out = deepsp.distributed_attention(
            *(x[:, first : first + lens[rank]] for x in (q, k, v)),
            enable_gqa=True,
            seq_lens=lens,
            documents=documents,
            **given,
            **options,
        )
        expected = everything(
            q, k, v, documents, causal, window, softcap, sinks[0] if sinks else None
        )
        grad = draw(*expected.shape, seed=9)
        here = slice(first, first + lens[rank])
        torch.testing.assert_close(out, expected[:, here], rtol=0, atol=1e-12)
        mine = torch.autograd.grad(out, leaves, grad[:, here])
        theirs = torch.autograd.grad(expected, leaves, grad)
        for x, y in zip(mine, theirs, strict=True):
            x = x.clone()
            dist.all_reduce(x)
            torch.testing.assert_close(x, y, rtol=0, atol=1e-12)


UNEVEN = (1, 57, 8, 2, 16, 16)  # on 3 ranks, kv heads have different numbers of readers
ROWS = (2, 40, 6, 3, 8, 8)
WIDE_V = (2, 37, 4, 4, 8, 12)
FEW = (2, 31, 2, 1, 8, 4)  # on 3 ranks, each has a part of both heads' queries
CAUSAL = {"is_causal": True}
ALL = {"is_causal": True, "window_size": (9, 3), "softcap": 2.0, "sunk": True}
CASES = [
    (UNEVEN, "split", True, CAUSAL),
    (ROWS, "empty", True, ALL | {"chunks": 2}),
    (WIDE_V, "skewed", False, {"sunk": True}),
    (UNEVEN, "skewed", True, CAUSAL | {"layout": "bshd", "chunks": 3, "sunk": True}),
    *[
        (shape, kind, packed, options | {"kv_chunk": chunk})
        for (shape, kind, packed, options), chunk in itertools.product(
            [
                (UNEVEN, "split", True, CAUSAL | {"sunk": True}),
                (ROWS, "empty", False, CAUSAL),
                (WIDE_V, "skewed", True, {"window_size": (4, 6)}),
                (UNEVEN, "skewed", False, ALL),
                (UNEVEN, "split", True, CAUSAL | {"sunk": True, "query_parts": 1}),
                (FEW, "skewed", True, ALL),
            ],
            (1, 11, 1000),
        )
    ],
]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_over_ranks(ranks):
    on_ranks(ranks, _sharded, CASES)


def _classes():
    """DistributedAttention and the layer take the same, as does compiled code."""
    rank, size = dist.get_rank(), dist.get_world_size()
    length = 22
    lens = lens_of("skewed", length, size)
    here = slice(sum(lens[:rank]), sum(lens[: rank + 1]))
    documents = torch.tensor([0, 9, 10, 22, 30, 44])
    ranges = torch.stack([documents[:-1], documents[1:]], 1)
    q, k, v, sinks = leaves = _leaves(2, length, 4, 2, 8, 8, True)
    expected = everything(q, k, v, ranges, True, (6, 0), None, sinks)
    attend = deepsp.DistributedAttention(layout="bhsd")
    heads_first = [x[:, here].transpose(1, 2) for x in (q, k, v)]
    options = {"is_causal": True, "enable_gqa": True, "seq_lens": lens, "window_size": (6, 0)}
    out = attend(*heads_first, documents=documents, sinks=sinks, **options).transpose(1, 2)
    torch.testing.assert_close(out, expected[:, here], rtol=0, atol=1e-12)
    found = torch.autograd.grad(out, leaves, torch.ones_like(out))
    for backend in ("aot_eager", "inductor"):
        torch._dynamo.reset()

        def run(*x):
            *qkv, sinks = x
            return attend(*qkv, documents=documents, sinks=sinks, **options)

        compiled = torch.compile(run, fullgraph=True, backend=backend)(*heads_first, sinks)
        compiled = compiled.transpose(1, 2)
        torch.testing.assert_close(compiled, out, rtol=0, atol=1e-12)
        again = torch.autograd.grad(compiled, leaves, torch.ones_like(out))
        torch.testing.assert_close(again, found, rtol=0, atol=1e-12)
    streamed = torch.compile(
        lambda q, k, v: attend(q, k, v, documents=documents, kv_chunk=5, **options),
        fullgraph=True,
        backend="aot_eager",
    )(*heads_first).transpose(1, 2)
    torch.testing.assert_close(
        streamed, everything(q, k, v, ranges, True, (6, 0))[:, here], rtol=0, atol=1e-12
    )
    measured = deepsp.DistributedAttention(layout="bhsd", chunks="auto")
    again = measured(*heads_first, documents=documents, kv_chunk=5, **options).transpose(1, 2)
    torch.testing.assert_close(again, streamed, rtol=0, atol=1e-12)

    torch.manual_seed(0)
    layer = deepsp.SequenceParallelAttention(16, 4, 2, chunks=2, dtype=torch.float64)
    x = draw(2, length, 16)
    y = layer(x[:, here], is_causal=True, seq_lens=lens, documents=documents, softcap=2.0)
    q, k, v = (p(x).unflatten(-1, (-1, 4)) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    whole = layer.o_proj(everything(q, k, v, ranges, True, None, 2.0).flatten(2))
    torch.testing.assert_close(y, whole[:, here], rtol=0, atol=1e-12)


def test_classes_and_compiled_code():
    on_ranks(2, _classes)


def _kept():
    """With kv_chunk, keys and values are sent in parts, in backward once more, and aren't kept."""
    size = dist.get_world_size()
    length, heads, dim, chunk = 4096, size, 16, 256
    q, k, v = (draw(1, length // size, heads, dim, dtype=torch.float32, seed=n) for n in range(3))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        out = deepsp.distributed_attention(*leaves, is_causal=True, kv_chunk=chunk)
    full = length * dim
    given = [x.data_ptr() for x in leaves]
    sizes = sorted(x.numel() for x in kept if x.data_ptr() not in given)
    assert sizes == [length, full, full]  # of one head: log-sum-exp, q, output
    counts = names(lambda: out.sum().backward())
    assert counts["deepsp::seq_to_heads_start"] == 1 + length // chunk
    assert counts["deepsp::heads_to_seq_start"] == 1 + length // chunk


def test_keys_come_in_parts():
    on_ranks(2, _kept)


def _refused():
    q = torch.zeros(1, 4, 4, 8, requires_grad=True)
    mask = torch.ones(8, 8, dtype=torch.bool)
    for options, message in [
        ({"documents": torch.tensor([0, 4])}, r"go from 0 to 8, .* got \[0, 4\]"),
        (
            {"documents": torch.tensor([[0, 5], [4, 8]])},
            r"without overlaps, got \[4, 8\] as number 1",
        ),
        ({"documents": torch.tensor([[0, 9]])}, r"ranges of the 1 x 8 tokens .* got \[0, 9\]"),
        ({"documents": torch.tensor([[3, 2]])}, r"got \[3, 2\] as number 0"),
        ({"documents": torch.tensor([0.0, 8.0])}, "tensor of integers, got torch.float32"),
        ({"documents": [0, 8]}, "tensor of integers, got list"),
        ({"documents": torch.zeros(1, 2, 3).long()}, r"shape \[N, 2\], .* got \(1, 2, 3\)"),
        ({"window_size": (3, 2, 1)}, r"window_size to be \(left, right\).* got \[3, 2, 1\]"),
        ({"window_size": (-2, 0)}, r"got \[-2, 0\]"),
        ({"softcap": 0.0}, "softcap > 0, got 0"),
        ({"sinks": torch.zeros(3)}, r"sinks .* shape \[4\].* got float32 \[3\]"),
        ({"softcap": 1.0, "attn_mask": mask}, "no attn_mask with documents, window_size"),
        ({"kv_chunk": 2, "attn_mask": mask}, "no attn_mask with documents, window_size"),
        ({"window_size": (1, 1), "dropout_p": 0.5}, "dropout_p to be 0 .* got 0.5"),
        ({"kv_chunk": 0}, "kv_chunk >= 1, got 0"),
        ({"kv_chunk": 2, "chunks": 2}, "chunks to be 1 with kv_chunk, got 2"),
    ]:

        def raises(options=options, message=message):
            with pytest.raises(ValueError, match=message):
                deepsp.distributed_attention(q, q, q, **options)

        assert not [n for n in names(raises) if n.startswith("gloo")], message
    layer = deepsp.SequenceParallelAttention(16, 4)
    x = torch.zeros(1, 4, 16)
    for options, message in [
        ({"softcap": -1.0}, "softcap > 0, got -1"),
        ({"documents": torch.tensor([0, 4])}, "go from 0 to 8"),
        ({"kv_chunk": 4}, "or documents, window_size, softcap, sinks, got kv_chunk"),
    ]:
        with pytest.raises(ValueError, match=message):
            layer(x, **options)


def test_wrong_arguments():
    on_ranks(2, _refused)
