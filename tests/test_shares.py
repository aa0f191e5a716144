"""Ranks that share heads: more ranks than heads, and heads that can't be dealt out evenly. Against
one process, the whole sequence, float64: outputs and every gradient."""

import functools
import itertools
import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from attentions import check_shares, compare_attention, draw_qkv
from harness import on_ranks
from hypothesis import given
from hypothesis import strategies as st
from models import make_lm
from reference import attention, draw, events, lens_of, names, sent
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import deepsp
from deepsp.ranks.groups import member_of
from deepsp.sequence.attention.parts import cells_of

op = torch.ops.deepsp
f64 = torch.float64

# ---------------------------------------------------------------- who has what


@given(
    heads=st.integers(1, 12),
    ranks=st.integers(1, 12),
    total=st.integers(0, 60),
    chunks=st.integers(1, 2),
    data=st.data(),
)
def test_each_query_has_one_rank(heads, ranks, total, chunks, data):
    parts = data.draw(
        st.sampled_from(
            [0, *(r for r in range(1, ranks + 1) if ranks % r == 0 <= heads - ranks // r)]
        )
    )
    found = []
    chunks = op._chunks_in_force(heads, ranks, chunks, parts)
    for rank, chunk in itertools.product(range(ranks), range(chunks)):
        for cell in cells_of(heads, total, parts, ranks, rank, chunk, chunks):
            tokens = [t for a, b in cell.queries for t in range(a, b)]
            assert tokens == sorted(tokens)
            found += [(h, t) for h in range(*cell.heads) for t in tokens]
    assert sorted(found) == list(itertools.product(range(heads), range(total)))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("heads", "ranks"), [(8, 3), (8, 5), (8, 7), (2, 4), (1, 8), (12, 8)])
def test_work_is_even(heads, ranks, causal):
    plan = deepsp.plan_attention(heads, seq_len=4099, ranks=ranks, is_causal=causal)
    assert plan.query_parts == 0 and plan.imbalance < 1.005
    assert sum(r.share for r in plan.ranks) == pytest.approx(1)


# ---------------------------------------------------------------- numbers


_NIGHTLY = [pytest.param(n, marks=pytest.mark.nightly) for n in (1, 4, 7)]


@pytest.mark.parametrize("ranks", [2, 3, 5, *_NIGHTLY])
def test_equals_one_process(ranks):
    cases = itertools.product(["causal", "full", "bool mask", "mask"], ["split", "skewed", "empty"])
    for n, (more, kind) in enumerate(cases):
        heads, kv_heads = [(2, 1), (8, 2), (3, 3), (6, 2), (1, 1)][n % 5]
        parts = "auto" if n % 3 or heads < 1 else ranks
        dims, layout = [(8, 8), (4, 6)][n % 2], ["bshd", "sbhd", "bhsd"][n % 3]
        on_ranks(ranks, check_shares, heads, kv_heads, kind, parts, 1 + n % 2, more, dims, layout)


def _groups():
    for parts in (2, 3):
        check_shares(9, 3, "skewed", parts, 1, "causal", (8, 8))


def test_groups_of_heads():
    on_ranks(6, _groups)


def _patterns(options):
    """Documents, windows, softcap and sinks: by blocks, which have the queries of a share."""
    size, total = dist.get_world_size(), 17
    lens = lens_of("skewed", total, size)
    options = dict(options)
    if "documents" in options:
        options["documents"] = torch.tensor([[0, 5], [5, 6], [6, 16], [17, 30], [30, 34]])
    extra = [draw(3, seed=9).requires_grad_()] if options.pop("sinks", False) else []
    call = functools.partial(deepsp.distributed_attention, enable_gqa=True, is_causal=True)

    def ours(q, k, v, sinks=None):
        return call(q, k, v, seq_lens=lens, sinks=sinks, **options)

    def theirs(q, k, v, sinks=None):
        given = {"documents": None, "window_size": [], "softcap": None} | options
        found = op._blockwise_attention(
            q, k, v, given["documents"], True, given["window_size"], None, given["softcap"], sinks
        )
        return found[0]

    compare_attention(draw_qkv(2, total, 3, 1, 8, 8), lens, ours, theirs, extra)


@pytest.mark.parametrize("ranks", [4])
@pytest.mark.parametrize(
    "options",
    [
        {"documents": 1},
        {"window_size": (4, 0)},
        {"window_size": (2, 0), "documents": 1},
        {"softcap": 2.0, "sinks": True},
        {"sinks": True, "documents": 1},
    ],
)
def test_patterns(ranks, options):
    on_ranks(ranks, _patterns, tuple(options.items()))


def _dropout():
    """Of ones, dropout leaves 0 or more; the mean stays; another seed drops others."""
    rank, size = dist.get_rank(), dist.get_world_size()
    lens = lens_of("skewed", 64, size)
    q = draw(1, lens[rank], 2, 8).requires_grad_()
    ones = torch.ones(1, lens[rank], 1, 8, dtype=f64)
    found = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        found.append(
            deepsp.distributed_attention(
                q,
                draw(1, lens[rank], 1, 8, seed=1),
                ones,
                dropout_p=0.5,
                is_causal=True,
                enable_gqa=True,
                seq_lens=lens,
            )
        )
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
    whole = deepsp.unshard(found[0].detach(), 1, seq_lens=lens)
    assert 0.7 < whole.mean() < 1.3
    first = whole[:, 0]  # sees itself only
    assert ((first == 0) | (first - 2).abs().lt(1e-12)).all()
    found[0].sum().backward()
    assert q.grad.isfinite().all() and q.grad.any()


def test_dropout():
    on_ranks(4, _dropout)


def _compiled_dropout(heads, more):
    """Each head and query drops others, on whatever rank; generators go on alike."""
    torch._dynamo.reset()
    rank, size, total = dist.get_rank(), dist.get_world_size(), 24
    lens = lens_of("split", total, size)
    zeros = torch.zeros(1, lens[rank], heads, total, dtype=f64)
    eye = torch.eye(total, dtype=f64)[None, :, None].expand(1, -1, heads, -1)
    v = eye.split(lens, 1)[rank].clone().requires_grad_()
    mask = {"mask": torch.zeros(total, total, dtype=f64)}.get(more)

    @functools.partial(torch.compile, backend="aot_eager", fullgraph=True)
    def attend(v):
        return deepsp.distributed_attention(
            zeros, zeros, v, mask, 0.5, is_causal=more == "causal", seq_lens=lens, chunks=2
        )

    torch.manual_seed(0)
    out = attend(v)
    after = [None] * size
    dist.all_gather_object(after, torch.rand(()).item())
    assert len(set(after)) == 1
    weights = deepsp.unshard(out.detach(), 1, seq_lens=lens)[0].transpose(0, 1)  # [h, query, key]
    seen = torch.ones(total, total).tril() if more == "causal" else torch.ones(total, total)
    assert (weights * (1 - seen) == 0).all()
    (kept,) = (weights[:, seen.bool()] != 0).double()[None]
    assert ((kept.mean(1) - 0.5).abs() < 0.15).all()
    for i, j in itertools.combinations(range(heads), 2):
        assert (kept[i] - kept[j]).abs().mean() > 0.3, (i, j)
    (grad,) = torch.autograd.grad(out.sum(), v)
    expected = weights.sum(1).T[..., None].split(lens)[rank]
    torch.testing.assert_close(grad[0], expected.expand_as(grad[0]))


@pytest.mark.parametrize("more", ["", "causal", "mask"])
def test_compiled_dropout(more):
    on_ranks(3, _compiled_dropout, 8, more)


def _mask_alone():
    """What dropout leaves depends on a trained mask, on ranks that have no query, too."""
    torch._dynamo.reset()
    rank, size, total, heads = dist.get_rank(), dist.get_world_size(), 2, 2
    lens = [2] + [0] * (size - 1)
    zeros = torch.zeros(1, lens[rank], heads, total, dtype=f64)
    v = torch.eye(total, dtype=f64)[None, :, None].expand(1, -1, heads, -1).split(lens, 1)[rank]
    mask = draw(total, total, seed=3).requires_grad_()
    by_column = torch.tensor([1.0, 3.0], dtype=f64)

    @functools.partial(torch.compile, backend="aot_eager", fullgraph=True)
    def attend(mask):
        return deepsp.distributed_attention(zeros, zeros, v, mask, 0.5, seq_lens=lens)

    torch.manual_seed(4)
    out = attend(mask)
    (out * by_column).sum().backward()
    whole = deepsp.unshard(out.detach(), 1, seq_lens=lens)
    plain = mask.detach().requires_grad_()
    kept = (whole[0].transpose(0, 1) != 0) * 2.0  # [heads, queries, keys]
    (plain.softmax(-1) * kept * by_column).sum().backward()
    torch.testing.assert_close(
        deepsp.collectives.all_reduce(mask.grad, grad="replicated"),
        plain.grad,
        rtol=1e-9,
        atol=1e-12,
    )
    assert plain.grad.any()


def test_compiled_dropout_of_a_trained_mask():
    on_ranks(5, _mask_alone)


def _mask_alone_trains():
    """Ranks without queries take part in backward, too."""
    rank, size, total = dist.get_rank(), dist.get_world_size(), 3
    lens = lens_of("split", total, size)
    whole = draw(1, total, 1, 4)
    masks = [
        draw(total, total, seed=3).masked_fill(torch.eye(total) > 0, -math.inf).requires_grad_()
        for _ in range(2)
    ]
    q = whole.split(lens, 1)[rank]
    deepsp.distributed_attention(q, q, q, masks[0], seq_lens=lens).square().sum().backward()
    attention(whole, whole, whole, attn_mask=masks[1]).square().sum().backward()
    dist.all_reduce(masks[0].grad)
    torch.testing.assert_close(masks[0].grad, masks[1].grad)


def test_mask_alone_trains():
    on_ranks(4, _mask_alone_trains)


def _differ(monkey):
    """Ranks that cut queries in other ways are told so."""
    x = draw(1, 4, 3, 8)
    with monkey.context() as patch:
        patch.setenv("DEEPSP_DEBUG", "1")
        parts = "auto" if dist.get_rank() == 0 else 2
        with pytest.raises(ValueError, match=r"query_parts auto.*query_parts 2"):
            deepsp.distributed_attention(x, x, x, query_parts=parts)


def test_differences_are_found():
    on_ranks(2, _differ, pytest.MonkeyPatch)


def _rounding(dtype):
    """No worse than attention of whole heads."""
    size, total = dist.get_world_size(), 300
    lens = lens_of("skewed", total, size)
    whole = draw_qkv(1, total, 2, 1, 16, 16)
    errors = []
    for heads_alone in (True, False):
        leaves = [x.to(dtype).requires_grad_() for x in whole]
        if heads_alone:
            out = F.scaled_dot_product_attention(
                *(x.transpose(1, 2) for x in leaves), is_causal=True, enable_gqa=True
            ).transpose(1, 2)
        else:
            mine = [x.split(lens, 1)[dist.get_rank()] for x in leaves]
            out = deepsp.distributed_attention(
                *mine, is_causal=True, enable_gqa=True, seq_lens=lens
            )
            out = deepsp.unshard(out, 1, seq_lens=lens)
        exact = [x.to(dtype).double().requires_grad_() for x in whole]
        expected = attention(*exact, is_causal=True)
        out.double().square().sum().backward()
        expected.square().sum().backward()
        off = [(out - expected).abs().max() / expected.abs().max()]
        for x, y in zip(leaves, exact, strict=True):
            if not heads_alone:
                dist.all_reduce(x.grad)
            off.append((x.grad - y.grad).abs().max() / y.grad.abs().max())
        errors.append(torch.stack([e.detach() for e in off]))
    assert (errors[1] < 2 * errors[0] + torch.finfo(dtype).eps).all(), errors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding(dtype):
    on_ranks(4, _rounding, dtype)


# ---------------------------------------------------------------- what travels


def _traffic(heads, kv_heads):
    """One exchange there and one back; the bytes are those of the plan."""
    rank, size, total, dim = dist.get_rank(), dist.get_world_size(), 24, 8
    lens = lens_of("skewed", total, size)
    q, k, v = (draw(1, lens[rank], h, dim).requires_grad_() for h in (heads, kv_heads, kv_heads))

    def forward():
        return deepsp.distributed_attention(q, k, v, is_causal=True, enable_gqa=True, seq_lens=lens)

    forward().sum().backward()  # what comes once only
    plan = deepsp.plan_attention(
        heads, kv_heads, seq_len=total, ranks=size, head_dim=dim, seq_lens=lens, dtype=f64
    )
    out = {}

    def keep():
        out["y"] = forward()

    counted = torch.tensor([sum(sent(keep)), sum(sent(lambda: out["y"].sum().backward()))])
    dist.all_reduce(counted)
    expected = sum(r.received for r in plan.ranks)
    # Backward brings what forward did: dO for the output, dq, dk and dv for q, k and v.
    assert counted.tolist() == [expected, expected]
    for call in (keep, lambda: out["y"].sum().backward()):
        found = [e.name for e in events(call)]
        assert found.count("deepsp::exchange") == 2


def test_traffic():
    on_ranks(4, _traffic, 2, 1, apart="messages")
    on_ranks(3, _traffic, 8, 2, apart="messages")


def _decomposed(heads, kv_heads, parts, kind, chunks):
    """What Inductor makes of the ops moves what they do; and gradients of the ops go back."""
    rank, size, name = member_of(None)
    lens, dims, counts = lens_of(kind, 17, size), [4, 4, 6], [heads, kv_heads, kv_heads]
    x = [draw(2, lens[rank], h, d, seed=rank) for h, d in zip(counts, dims, strict=True)]

    def there_and_back(ops, x):
        arriving = ops.seq_to_heads_start(x, lens, chunks, False, rank, name, query_parts=parts)
        found, leaving = [], []
        for chunk in range(chunks):
            part = (chunk, chunks, rank, name)
            arrived = ops.seq_to_heads_wait(
                arriving[chunk], counts, dims, 2, lens, *part, query_parts=parts
            )
            found += arrived
            leaving.append(ops.heads_to_seq_start(arrived, counts, lens, *part, query_parts=parts))
        return found + ops.heads_to_seq_wait(
            leaving, counts, dims, 2, lens, rank, name, query_parts=parts
        )

    leaves = [y.clone().requires_grad_() for y in x]
    found = there_and_back(op, leaves)
    for y, z in zip(found, there_and_back(torch.ops.deepsp_inductor, x), strict=True):
        assert torch.equal(y, z)
    loss = sum((y * draw(*y.shape, seed=7 + rank)).sum() for y in found)
    grads = torch.autograd.grad(loss, leaves)
    # All is linear: <x, gradient> is the loss.
    both = torch.stack([loss.detach(), sum((y * g).sum() for y, g in zip(x, grads, strict=True))])
    dist.all_reduce(both)
    torch.testing.assert_close(both[0], both[1], rtol=1e-12, atol=1e-10)


@pytest.mark.parametrize("kind", ["split", "skewed", "empty"])
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_decomposition(ranks, kind):
    for heads, kv_heads, parts in ((2, 1, 0), (8, 2, 0), (9, 3, 1)):
        on_ranks(ranks, _decomposed, heads, kv_heads, parts, kind, 1 + ranks % 2)


# ---------------------------------------------------------------- a mesh of two dimensions


def _mesh(ranks):
    """Rows have all heads; the ranks of a column cut their queries."""
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("outer", "data", "heads"))["outer", "heads"]
    mine = mesh.mesh.flatten().tolist()
    me, total, heads = mine.index(dist.get_rank()), 13, 2
    lens = lens_of("skewed", total, len(mine))
    leaves = [x.requires_grad_() for x in draw_qkv(1, total, heads, 1, 8, 8)]
    mine = [x.detach().split(lens, 1)[me].requires_grad_() for x in leaves]
    expected = attention(*leaves, is_causal=True)
    expected.square().sum().backward()
    attend = deepsp.DistributedAttention(group=mesh)
    assert attend.query_parts == 2
    for call in (attend, functools.partial(deepsp.distributed_attention, group=mesh)):
        out = call(*mine, is_causal=True, enable_gqa=True, seq_lens=lens)
        torch.testing.assert_close(out, expected.split(lens, 1)[me])
        found = torch.autograd.grad(out.square().sum(), mine)
        for x, y in zip(found, leaves, strict=True):
            torch.testing.assert_close(x, y.grad.split(lens, 1)[me])
    with pytest.raises(ValueError, match=r"'auto' or 2, the size of the first dimension .* got 4"):
        deepsp.DistributedAttention(group=mesh, query_parts=4)
    with pytest.raises(ValueError, match="1 or 2 dimensions, got one of 3"):
        deepsp.DistributedAttention(group=DeviceMesh("cpu", ranks))
    with pytest.raises(ValueError, match=r"to ascend, row by row, got \[\[0, 2\], \[1, 3\]\]"):
        deepsp.DistributedAttention(group=DeviceMesh("cpu", [[0, 2], [1, 3]]))


@pytest.mark.parametrize("ranks", [[[[0, 1]], [[2, 3]]], [[[0], [1]], [[2], [3]]]])
def test_mesh(ranks):
    on_ranks(4, _mesh, ranks)


def test_bytes_from_other_rows():
    """Counted token by token."""
    heads, kv_heads, total, rows, row = 4, 2, 26, 3, 2
    size = rows * row
    lens = lens_of("skewed", total, size)
    plan = deepsp.plan_attention(
        heads, kv_heads, seq_len=total, ranks=(rows, row), seq_lens=lens, head_dim=1, dtype=f64
    )
    owner = [r for r, n in enumerate(lens) for _ in range(n)]
    received, away = ([0] * size for _ in range(2))

    def sent(a, b, count):
        received[b] += 8 * count * (a != b)
        away[b] += 8 * count * (a // row != b // row)

    for rank in range(size):
        cells = cells_of(heads, total, rows, size, rank)
        for cell in cells:
            for token in itertools.chain(*(range(a, b) for a, b in cell.queries)):
                sent(owner[token], rank, cell.heads[1] - cell.heads[0])  # q
                sent(rank, owner[token], cell.heads[1] - cell.heads[0])  # out
        for token in range(total):
            sent(owner[token], rank, 2 * kv_heads // row)
    assert [r.received for r in plan.ranks] == received
    assert [r.from_other_rows for r in plan.ranks] == away
    assert plan.query_parts == rows and "from other rows" in str(plan)


# ---------------------------------------------------------------- one's own attention


def _alibi(q, k, v, slopes, head_indices, query_indices):
    distance = query_indices[:, None] - torch.arange(k.size(1))
    bias = (-slopes[head_indices][:, None, None] * distance).masked_fill(distance < 0, -math.inf)
    return F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=bias, enable_gqa=True
    ).transpose(1, 2)


def _own(heads, kv_heads, chunks):
    size, total = dist.get_world_size(), 13
    lens = lens_of("skewed", total, size)
    module = deepsp.DistributedAttention(_alibi, chunks=chunks)
    compare_attention(
        draw_qkv(2, total, heads, kv_heads, 8, 8),
        lens,
        lambda q, k, v, slopes: module(q, k, v, slopes, seq_lens=lens),
        lambda q, k, v, slopes: _alibi(q, k, v, slopes, torch.arange(heads), torch.arange(total)),
        [draw(heads, seed=8).abs().requires_grad_()],
    )


@pytest.mark.parametrize("chunks", [1, 2, "auto"])
@pytest.mark.parametrize(("ranks", "heads", "kv_heads"), [(4, 2, 1), (3, 8, 2), (2, 4, 4)])
def test_query_indices(ranks, heads, kv_heads, chunks):
    on_ranks(ranks, _own, heads, kv_heads, chunks)


def _refused():
    def whole(q, k, v):
        return q

    x = draw(1, 3, 2, 8)
    with pytest.raises(ValueError, match=r"as many query heads as ranks \(4\), got 2: .*query_ind"):
        deepsp.DistributedAttention(whole)(x, x, x)
    with pytest.raises(ValueError, match=r"to be 1 or 'auto', got 2: local_attention"):
        deepsp.DistributedAttention(whole, query_parts=2)(x, x, x)
    with pytest.raises(ValueError, match=r"query_parts 1, got 2; pass query_parts='auto'"):
        deepsp.distributed_attention(x, x, x, query_parts=1)
    with pytest.raises(ValueError, match=r"divide the number of ranks of the group \(4\), got 3"):
        deepsp.distributed_attention(x, x, x, query_parts=3)
    with pytest.raises(
        ValueError, match=r"at least 4 heads, the number of ranks of the group, got 2"
    ):
        op.seq_to_heads_start([x], [3] * 4, 1, False, 0, "0", query_parts=1)
    for wrong in (0, -1, "R", 1.0, True):
        with pytest.raises(ValueError, match='query_parts to be "auto" or an int >= 1, got'):
            deepsp.distributed_attention(x, x, x, query_parts=wrong)
    with pytest.raises(ValueError, match="expected no query_indices"):
        deepsp.DistributedAttention(_alibi)(x, x, x, query_indices=torch.arange(3))
    with pytest.raises(RuntimeError, match="derivative"):
        y = deepsp.distributed_attention(*[x.requires_grad_()] * 3, is_causal=True)
        (g,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        g.sum().backward()


def test_refused():
    on_ranks(4, _refused)


# ---------------------------------------------------------------- layers and models


def _layer(heads, kv_heads, parts, norm, own, checkpointed, chunks):
    rank, size, total, dim = dist.get_rank(), dist.get_world_size(), 15, 8
    lens = lens_of("skewed", total, size)

    def make(group, parts):
        torch.manual_seed(0)
        norms = {}
        if norm is not None:
            widths = (dim, dim) if norm == "each" else (heads * dim, kv_heads * dim)
            norms = {
                name: torch.nn.RMSNorm(n, dtype=f64)
                for name, n in zip(("q_norm", "k_norm"), widths, strict=True)
            }
            for module in norms.values():
                torch.nn.init.normal_(module.weight)
        return deepsp.SequenceParallelAttention(
            24,
            heads,
            kv_heads,
            head_dim=dim,
            rope_theta=1e4,
            bias=True,
            group=group,
            dtype=f64,
            local_attention=_alibi if own else None,
            query_parts=parts,
            chunks=chunks,
            **norms,
        )

    alone = dist.new_subgroups(1)[0]
    one, layer = make(alone, 1), make(None, parts)
    x = draw(2, total, 24)
    args = {"slopes": torch.rand(heads, dtype=f64)} if own else {"is_causal": True}
    if own:
        dist.broadcast(args["slopes"], 0)
    expected = one(x, **args)
    call = functools.partial(layer, seq_lens=lens, **args)
    mine = x.split(lens, 1)[rank].clone()
    found = checkpoint(call, mine, use_reentrant=False) if checkpointed else call(mine)
    if norm != "all":  # products are written into what is sent, and taken from what arrives
        with torch.no_grad():
            ran = names(lambda: call(mine))
        assert ran["deepsp::_project_to_heads_start"] == ran["deepsp::_heads_to_output_wait"] == 1
        assert ran["deepsp::heads_to_seq_start"] == min(2, chunks)
    expected.square().sum().backward()
    found.square().sum().backward()
    deepsp.sync_gradients(layer)
    torch.testing.assert_close(found, expected.split(lens, 1)[rank], rtol=1e-10, atol=1e-11)
    for p, q in zip(layer.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(
    ("ranks", "heads", "kv_heads", "parts", "norm", "own", "chunks"),
    [
        (4, 2, 1, "auto", None, False, 2),
        (4, 2, 2, "auto", "each", False, 1),
        (3, 2, 1, "auto", "all", False, 3),
        (2, 4, 2, 2, "each", True, 2),
        (3, 2, 1, 3, None, True, 1),
    ],
)
def test_layer(ranks, heads, kv_heads, parts, norm, own, chunks):
    on_ranks(ranks, _layer, heads, kv_heads, parts, norm, own, norm == "each", chunks)


def _model(family):
    from deepsp.integrations.transformers import register

    register()
    rank, size, total = dist.get_rank(), dist.get_world_size(), 22
    lens = lens_of("split", total, size)
    model, reference = make_lm(family, "deepsp"), make_lm(family)
    ids = torch.randint(0, 64, (2, total), generator=torch.Generator().manual_seed(0))
    labels = F.pad(ids[:, 1:], (0, 1), value=-100)
    expected = F.cross_entropy(reference(ids).logits.flatten(0, 1), labels.flatten())
    positions = torch.arange(total)[None].split(lens, 1)[rank]
    logits = model(ids.split(lens, 1)[rank], position_ids=positions).logits
    loss = deepsp.cross_entropy(logits, labels.split(lens, 1)[rank])
    expected.backward()
    loss.backward()
    deepsp.sync_gradients(model)
    close = {"rtol": 1e-9, "atol": 1e-11}
    torch.testing.assert_close(loss, expected, **close)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, **close)


@pytest.mark.parametrize(
    ("family", "ranks"), [pytest.param("Llama", 7, marks=pytest.mark.nightly), ("Qwen3", 4)]
)
def test_models_of_transformers(family, ranks):
    on_ranks(ranks, _model, family)  # with 6 heads


class Tiny(torch.nn.Module):
    """Causal attention, as anyone writes it."""

    def __init__(self, heads):
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out = (
            torch.nn.Linear(n, m, dtype=f64) for n, m in ((16, 24 * heads), (8 * heads, 16))
        )

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, -1, 8)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


def _compiled(inner, heads, options):
    torch._dynamo.reset()
    model, reference = Tiny(heads), Tiny(heads)
    x = draw(2, 13, 16)
    expected = reference(x)
    compiled = torch.compile(model, backend="deepsp", options={"inner": inner, **options})
    given = x.clone()
    deepsp.prepare_inputs(given)
    found = compiled(given)
    expected.square().sum().backward()
    found.square().sum().backward()
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-11)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(
    ("inner", "ranks", "heads", "options"),
    [
        ("aot_eager", 3, 2, {}),
        ("aot_eager", 2, 2, {"query_parts": 2}),
        ("inductor", 2, 1, {"chunks": 2}),  # of the last chunk, rank 0 holds no query
    ],
)
def test_compile_pass(inner, ranks, heads, options):
    on_ranks(ranks, _compiled, inner, heads, options)


def _fullgraph(backend, heads):
    torch._dynamo.reset()
    size = dist.get_world_size()

    @functools.partial(torch.compile, backend=backend, fullgraph=True, dynamic=True)
    def compiled(q, k, v, lens):
        return deepsp.distributed_attention(
            q * 2, k + 1, v, is_causal=True, enable_gqa=True, seq_lens=lens
        ).sin()

    for total in (11, 18):
        lens = lens_of("skewed", total, size)
        compare_attention(
            draw_qkv(2, total, heads, 1, 8, 8),
            lens,
            lambda q, k, v, n=lens: compiled(q, k, v, n),
            lambda q, k, v: attention(q * 2, k + 1, v, is_causal=True).sin(),
        )


@pytest.mark.parametrize(("backend", "ranks", "heads"), [("aot_eager", 3, 2), ("inductor", 2, 3)])
def test_fullgraph(backend, ranks, heads):
    on_ranks(ranks, _fullgraph, backend, heads)
