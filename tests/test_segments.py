"""Trees of segments that share what they begin with: attention to a row of them, against each of
its sequences alone, in one process and float64."""

import itertools
import random

import pytest
import torch
import torch.distributed as dist
from attentions import compare_attention, compare_tokens, draw_qkv, make_layer, run_plain
from harness import on_ranks
from pretended import on_gpu
from reference import draw, everything, lens_of
from torch._dynamo.testing import CompileCounterWithBackend

import deepsp


def tree_of(seed, count, most, *, depth=6, several=True):
    """Segments in any order in which parents come first, some empty; and several trees."""
    draws = random.Random(seed)
    lengths = [draws.choice([0, 1, 1, 2, 3, 5, most]) for _ in range(count)]
    parents, depths = [], []
    for n in range(count):
        roots = [-1] * (n == 0 or several)
        parents.append(draws.choice([*roots, *(m for m in range(n) if depths[m] < depth)]))
        depths.append(0 if parents[-1] < 0 else depths[parents[-1]] + 1)
    return deepsp.Segments(lengths, parents)


def paths(tree):
    """For each segment, the places of its ancestors' tokens and its own, and how many it has."""
    begins = tree.documents[:, 0].tolist()
    found = []
    for n, (length, parent) in enumerate(zip(tree.lengths, tree.parents, strict=True)):
        own = list(range(begins[n], begins[n] + length))
        found.append((found[parent][0] if parent >= 0 else []) + own)
        found[-1] = (found[-1], length)
    return found


def alone(tree, q, k, v, sinks=None, **how):
    """Each sequence alone: what its last segment's tokens get, in the order of the row."""
    outs, sums = [], []
    for path, own in paths(tree):
        out, lse = everything(*(x[:, path] for x in (q, k, v)), None, True, sinks=sinks,
                              return_lse=True, **how)  # fmt: skip
        outs.append(out[:, len(path) - own :])
        sums.append(lse[:, len(path) - own :])
    padding = q.size(1) - sum(tree.lengths)
    outs.append(q.new_zeros(1, padding, q.size(2), v.size(3)) + 0 * v.sum())
    none = q.new_full((q.size(2),), -torch.inf) if sinks is None else sinks
    sums.append(none.expand(1, padding, -1))
    return torch.cat(outs, 1), torch.cat(sums, 1)


# By name: options of attention; heads and kv heads.
CASES = {
    "plain": ({}, (4, 2)),
    "window": ({"window_size": (3, 0)}, (4, 2)),
    "wide window": ({"window_size": (11, -1), "softcap": 3.0}, (4, 4)),
    "sinks": ({"sinks": True, "scale": 0.4}, (4, 1)),
    "cut queries": ({}, (1, 1)),
    "cut, window": ({"window_size": (4, 0)}, (3, 3)),
    "parts of keys": ({"kv_chunk": 7}, (4, 2)),
    "parts, window": ({"kv_chunk": 9, "window_size": (6, 0)}, (4, 2)),
    "by keys": ({"exchange": "keys"}, (4, 2)),
    "by keys, window": ({"exchange": "keys", "window_size": (5, 0), "sinks": True}, (4, 2)),
}


def _equal(seeds):
    size = dist.get_world_size()
    for seed, (name, (options, heads)) in itertools.product(seeds, CASES.items()):
        tree = tree_of(seed, 12, 9)
        total = sum(tree.lengths) + seed % 3  # padding behind
        lens = lens_of(("split", "skewed", "empty")[seed % 3], total, size)
        sinks = [draw(heads[0], seed=7).requires_grad_()] if "sinks" in options else []
        names = {"window_size": "window"}
        how = {names.get(k, k): x for k, x in options.items()}
        how = {k: how[k] for k in ("window", "softcap", "scale") if k in how}

        def ours(*leaves, tree=tree, options=options, lens=lens):
            more = {"sinks": leaves[3]} if "sinks" in options else {}
            return deepsp.distributed_attention(
                *leaves[:3], is_causal=True, enable_gqa=True, documents=tree, seq_lens=lens,
                return_lse=True, **(options | more),
            )  # fmt: skip

        def reference(*leaves, tree=tree, how=how):
            return alone(tree, *leaves, **how)

        try:
            compare_attention(draw_qkv(1, total, *heads, 6, 5), lens, ours, reference, sinks)
        except AssertionError as error:
            raise AssertionError(f"{name}, {seed}, {tree}: {error}") from None


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_random_trees(size):
    on_ranks(size, _equal, range(3))


def test_many_leaves():
    """A thousand completions of one token and a few longer ones, of one prompt."""
    lengths = [300, *[1] * 1000, 40, 50]
    tree = deepsp.Segments(lengths, [-1] + [0] * 1002)
    q, k, v = (x.requires_grad_() for x in draw_qkv(1, sum(lengths), 2, 1, 4, 4))
    out, _ = torch.ops.deepsp._blockwise_attention(
        q, k, v, tree.documents, True, [], None, None, None
    )
    see = torch.zeros(sum(lengths), dtype=torch.bool)
    see[:300] = True
    mask = see.expand(sum(lengths), -1).clone()
    for begin, end, _ in tree.documents.tolist():
        mask[begin:end, begin:end] = torch.ones(end - begin, end - begin).tril().bool()
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), mask, enable_gqa=True
    ).transpose(1, 2)
    torch.testing.assert_close(out, expected)
    grad = draw(*out.shape, seed=9)
    mine, theirs = (torch.autograd.grad(x, (q, k, v), grad) for x in (out, expected))
    torch.testing.assert_close(mine, theirs)


def _of_deals(seeds):
    """Trees that ranks have alone, and trees that they share."""
    size, rank = dist.get_world_size(), dist.get_rank()
    shared = set()
    for seed, window in itertools.product(seeds, (None, (5, 0))):
        trees = [tree_of(seed + n, 5, 3 + 20 * (n == 0), several=False) for n in range(4)]
        lengths, parents = [], []
        for tree in trees:
            parents += [p + len(lengths) if p >= 0 else -1 for p in tree.parents]
            lengths += tree.lengths
        tree = deepsp.Segments(lengths, parents)
        deal = deepsp.deal_documents(tree, size)
        shared.add(deal.shared > 0)
        index = deal.tokens(rank)
        assert torch.equal(deal.positions(rank), tree.positions[0][index])
        whole = [x.requires_grad_() for x in draw_qkv(1, sum(lengths), 4, 2, 6, 5)]
        found = deepsp.distributed_attention(
            *(x[:, index] for x in whole), is_causal=True, enable_gqa=True, deal=deal,
            window_size=window, return_lse=True,
        )  # fmt: skip
        expected = alone(tree, *whole, window=window)
        compare_tokens(found, expected, index, whole)
    assert size == 1 or True in shared
    with pytest.raises(ValueError, match="expected is_causal=True with documents that have paren"):
        deepsp.distributed_attention(*(x[:, index] for x in whole), enable_gqa=True, deal=deal)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_dealt_trees(size):
    on_ranks(size, _of_deals, range(4))


def test_trees_cost_what_sees_each_other():
    """Eight completions of a prompt are less work than a document of as many tokens."""
    tree = deepsp.Segments([400, *[100] * 8, 1200], [-1, *[0] * 8, -1])
    assert tree.pairs() == [400**2 + 8 * 100 * (800 + 100), 1200**2]
    deal = deepsp.deal_documents(tree, 2, cost=(1.0, 1e-2))
    assert deal.imbalance <= 0.03
    assert deepsp.deal_documents([1200, 1200], 2, cost=(1.0, 1e-2)).digest != deal.digest
    with pytest.raises(ValueError, match="one after another, got 2, whose parent is 0, behind 1"):
        deepsp.deal_documents(deepsp.Segments([1, 1, 1], [-1, -1, 0]), 2)
    with pytest.raises(ValueError, match="expected pairs of document 0 from 0 to its length squa"):
        torch.ops.deepsp.deal_documents([3], 1, 3, 1.0, 1.0, [10.0])


# Documents; a window, a softcap, ranges of queries; launches forward.
ON_GPU = {
    "plain": (([], None, []), 3),  # all triangles, and two rectangles
    "window": (([40, 0], None, []), None),
    "softcap": (([], 5.0, []), None),
    "cut": (([], None, [40, 90, 150, 200]), None),
}


@pytest.mark.skipif(torch.version.cuda is not None, reason="CUDA itself is asked for a stream")
@pytest.mark.parametrize("kind", ON_GPU)
def test_on_a_gpu(kind):
    (window, cap, queries), launches = ON_GPU[kind]
    tree = deepsp.Segments([70, 30, 20, 20, 25, 35], [-1, 0, 1, 1, 0, -1])
    mine = [i for a, b in zip(queries[::2], queries[1::2], strict=True) for i in range(a, b)]
    mine = mine or range(200)
    q, k, v = (x.half() for x in draw_qkv(1, 200, 4, 2, 16, 16))
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    how = {"window": window or None, "softcap": cap}
    expected = [x[:, mine] for x in alone(tree, *wide, **how)]
    op = torch.ops.deepsp
    call = (q[:, mine], k, v, tree.documents, True, window, None, cap, None)
    on_gpu(op._blockwise_attention.default, *call, queries)  # copies the documents' borders
    (out, sums), forward = on_gpu(op._blockwise_attention.default, *call, queries)
    torch.testing.assert_close(sums.transpose(1, 2).double(), expected[1], rtol=0, atol=1e-3)
    grad = draw(*out.shape, seed=9).half()
    found, _ = on_gpu(
        op._blockwise_attention_backward.default, grad, *call, out, sums, [1, 1, 1, 0], queries
    )
    theirs = list(torch.autograd.grad(expected[0], wide, grad.double()))
    theirs[0] = theirs[0][:, mine]
    for x, y in zip((out, *found), (expected[0], *theirs), strict=True):
        assert (x.double() - y).abs().max() <= 4e-3 * max(1, y.abs().max())
    flash = forward.count("_flash_attention_forward")
    assert flash == launches if launches else (flash > 0) == (cap is None)


def _layer():
    """Rotary embeddings turn by a token's place in its sequences."""
    tree = tree_of(2, 9, 9)
    lens = lens_of("skewed", sum(tree.lengths) + 2, dist.get_world_size())
    rank = dist.get_rank()
    layer = make_layer(12, 4, 2, head_dim=6, rope_theta=100.0)
    x = draw(1, sum(lens), 12).requires_grad_()
    found = layer(x.split(lens, 1)[rank], seq_lens=lens, documents=tree, is_causal=True)
    rows = [(run_plain(layer, x[:, path], is_causal=True), own) for path, own in paths(tree)]
    expected = torch.cat([row[:, row.size(1) - own :] for row, own in rows], 1)
    grad = draw(*expected.shape, seed=9)
    grad = torch.nn.functional.pad(grad, (0, 0, 0, 2))
    expected = torch.nn.functional.pad(expected, (0, 0, 0, 2))
    torch.testing.assert_close(found, expected.split(lens, 1)[rank])
    leaves = [x, *layer.parameters()]
    mine = torch.autograd.grad(found, leaves, grad.split(lens, 1)[rank])
    theirs = torch.autograd.grad(expected, leaves, grad)
    for a, b in zip(mine, theirs, strict=True):
        dist.all_reduce(a := a.contiguous())
        torch.testing.assert_close(a, b)
    with pytest.raises(ValueError, match="expected position_ids with documents that have parents"):
        layer(x.split(lens, 1)[rank], seq_lens=lens, documents=tree.documents, is_causal=True)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_layer(size):
    on_ranks(size, _layer)


def _compiled(backend, exchange):
    size = dist.get_world_size()
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)

    def attend(q, k, v, documents, lens):
        return deepsp.distributed_attention(
            q * 2, k, v, is_causal=True, documents=documents, seq_lens=lens, exchange=exchange,
            window_size=(6, 0), return_lse=True,
        )  # fmt: skip

    compiled = torch.compile(attend, fullgraph=True, backend=counter)
    for seed in range(4):
        tree = tree_of(seed, 8, 9)
        lens = lens_of("split", sum(tree.lengths), size)
        compare_attention(
            draw_qkv(1, sum(lens), 4, 4, 6, 6),
            lens,
            lambda q, k, v, tree=tree, lens=lens: compiled(q, k, v, tree.documents, lens),
            lambda q, k, v, tree=tree: alone(tree, q * 2, k, v, window=(6, 0)),
        )
    assert counter.frame_count <= 3


@pytest.mark.parametrize("exchange", ["heads", "keys"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(backend, exchange):
    on_ranks(2, _compiled, backend, exchange)


def test_positions():
    tree = deepsp.Segments([3, 2, 0, 4, 1, 2], [-1, 0, 0, 2, 1, -1])
    assert tree.positions.tolist() == [[0, 1, 2, 3, 4, 3, 4, 5, 6, 5, 0, 1]]
    assert tree.documents[3].tolist() == [5, 9, 2]
    assert tree == deepsp.Segments((3, 2, 0, 4, 1, 2), (-1, 0, 0, 2, 1, -1))


def test_refuses():
    for lengths, parents, words in (
        ([1, 2], [-1], r"a parent, for each segment, got lengths \[1, 2\] and parents \[-1\]"),
        ([1, -2], [-1, 0], "expected a length of at least 0"),
        ([1, 2], [-1, 1], "expected the parent of segment 1 to be -1 or an earlier one, got 1"),
        (
            [1.0, 2],
            [-1, 0],
            r"expected lengths and parents to be sequences of ints, .* got \[1.0, 2",
        ),
        ([1, 2], [None, 0], "expected lengths and parents to be sequences of ints"),
        ([1, 2], [-2, 0], "the parent of segment 0 to be -1 or an earlier one, got -2"),
    ):
        with pytest.raises(ValueError, match=words):
            deepsp.Segments(lengths, parents)
    on_ranks(2, _refuses)


def _refuses():
    x, two = draw(1, 4, 2, 4), draw(2, 4, 2, 4)
    tree = deepsp.Segments([3, 3], [-1, 0])
    raw = [[0, 3, -1], [3, 8, 0]]
    for q, documents, words in (
        (two, tree, "expected one row of at least 6 tokens, .*, got 2 x 8; put all segments into"),
        (x, deepsp.Segments([9], [-1]), "expected one row of at least 9 tokens"),
        (x, torch.tensor([raw[0], [3, 8, 1]]), "an earlier one of its row, or -1, got 1 for numb"),
        (two, torch.tensor([*raw, [8, 16, 0]]), "an earlier one of its row, or -1, got 0 for"),
    ):
        with pytest.raises(ValueError, match=words):
            deepsp.distributed_attention(q, q, q, is_causal=True, documents=documents)
    with pytest.raises(ValueError, match="expected is_causal=True with documents that have paren"):
        deepsp.distributed_attention(x, x, x, documents=tree)
    with pytest.raises(ValueError, match=r"or \[N, 3\] with parents, got \(2, 4\)"):
        deepsp.distributed_attention(x, x, x, documents=torch.zeros(2, 4, dtype=torch.int64))
    deal = deepsp.deal_documents(deepsp.Segments([4, 4], [-1, 0]), 2)
    with pytest.raises(ValueError, match="expected no documents with deal, got some; deal has"):
        deepsp.distributed_attention(x, x, x, is_causal=True, documents=tree, deal=deal)
    with pytest.raises(
        ValueError, match="expected deal to be what deal_documents returns, got Segm"
    ):
        deepsp.distributed_attention(x, x, x, is_causal=True, deal=tree)
    with pytest.raises(ValueError, match=r"cu_seqlens \[N \+ 1\], or to have shape \[N, 2\], got"):
        deepsp.data.borders.ranges_of(torch.tensor(raw), 1, 8)
    block = torch.ops.deepsp._blockwise_attention
    for documents, words in (
        ([raw[0], [3, 4, 1]], "expected the parent of document 1 to be an earlier one, or -1"),
        ([raw[0], [4, 8, 0]], "expected document 1 to be in the row of its parent 0, got row 1"),
    ):
        with pytest.raises(ValueError, match=words):
            block(two, two, two, torch.tensor(documents), True, [], None, None, None)
