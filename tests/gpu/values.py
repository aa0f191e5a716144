"""Values and gradients on CUDA tensors against one process, float64; opcheck and Inductor."""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import TIGHT, attention, draw, uneven
from torch.library import opcheck
from zoo import LM, batch

import deepsp

op = torch.ops.deepsp


def exchange_values():
    """Every dtype and stride against indexing, both ways, bit for bit."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for dtype in (
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.uint8,
        torch.bool,
    ):
        for dims in ((8, 8, 8), (64, 64, 128), (7, 5, 3), (65, 1, 33)):
            for layout in ("bshd", "bhsd", "slices"):
                lens = uneven(13)
                counts = (6, 3, 3)
                whole = [
                    (draw(2, 13, h, d, seed=i) * 10).to(dtype)
                    for i, (h, d) in enumerate(zip(counts, dims, strict=True))
                ]
                mine = [x.split(lens, 1)[rank] for x in whole]
                if layout == "bhsd":
                    mine = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in mine]
                if layout == "slices":
                    mine = [torch.stack([x, x], -1).flatten(3)[..., ::2] for x in mine]
                there = deepsp.seq_to_heads(mine, seq_lens=lens)
                q, kv = deepsp.sequence.attention.local_heads(6, num_kv_heads=3)
                for x, y, h in zip(whole, there, (q, kv, kv), strict=True):
                    assert torch.equal(y, x[:, :, h.start : h.stop]), (dtype, dims, layout)
                (back,) = deepsp.heads_to_seq(there[:1], [6], seq_lens=lens)
                assert torch.equal(back, mine[0]), (dtype, dims, layout)
                if dtype.is_floating_point:
                    _, k, _ = deepsp.heads_to_seq(there, counts, seq_lens=lens)
                    reads = torch.zeros(3, device="cuda", dtype=torch.float64)
                    for p in range(size):
                        begin, end = op.head_split(6, 3, size, p)[2:]
                        reads[begin:end] += 1
                    expected = (mine[1].double() * reads[:, None]).to(dtype)
                    assert torch.equal(k, expected), (dtype, dims, layout)


def attention_gradients():
    """Output and gradients against one process on the whole sequence, float64."""
    rank = dist.get_rank()
    for heads, kv_heads, chunks in ((8, 8, 1), (8, 2, 1), (6, 3, 2), (9, 3, 3)):
        lens = uneven(17)
        shapes = (heads, kv_heads, kv_heads)
        whole = [draw(2, 17, h, 16, seed=i) for i, h in enumerate(shapes)]
        full = [x.clone().requires_grad_() for x in whole]
        mine = [x.split(lens, 1)[rank].clone().requires_grad_() for x in whole]
        expected = attention(*full, is_causal=True)
        out = deepsp.distributed_attention(
            *mine, is_causal=True, enable_gqa=True, seq_lens=lens, chunks=chunks
        )
        grad = draw(*expected.shape, seed=9)
        g_expected = torch.autograd.grad(expected, full, grad)
        g_out = torch.autograd.grad(out, mine, grad.split(lens, 1)[rank])
        for a, b in zip([out, *g_out], [expected, *g_expected], strict=True):
            torch.testing.assert_close(a, b.split(lens, 1)[rank], **TIGHT)


def _sums(value, g, initial_state=None, output_final_state=False):
    """A decaying sum over the tokens before, token by token; K is 1."""
    state = value.new_zeros(*value[:, 0].shape[:2], 1, value.size(3))
    state = state if initial_state is None else initial_state
    out = []
    for t in range(value.size(1)):
        state = state * g[:, t, :, None, None].exp() + value[:, t, :, None]
        out.append(state[:, :, 0])
    return torch.stack(out, 1), state


def recurrences():
    """The tokens before, and a recurrence by heads and by state; with gradients."""
    rank = dist.get_rank()
    lens = uneven(17)
    first = sum(lens[:rank])
    whole = [draw(2, 17, 4, 8), -draw(2, 17, 4).abs()]
    full = [x.clone().requires_grad_() for x in whole]
    mine = [x.split(lens, 1)[rank].clone().requires_grad_() for x in whole]
    before = deepsp.previous_tokens(mine[0], 3, seq_lens=lens)
    expected = F.pad(full[0], (0, 0, 0, 0, 3, 0))[:, first : first + 3]
    assert torch.equal(before, expected)
    (grad,) = torch.autograd.grad(before.square().sum(), mine[0])
    counts = torch.zeros(17, device="cuda", dtype=torch.float64)
    for p in range(len(lens)):
        counts[max(0, sum(lens[:p]) - 3) : sum(lens[:p])] += 1
    wanted = 2 * whole[0] * counts[:, None, None]
    torch.testing.assert_close(grad, wanted.split(lens, 1)[rank], **TIGHT)
    expected, _ = _sums(*full)
    g_expected = torch.autograd.grad(expected.square().sum(), full)
    for state in ("heads", "pass"):
        module = deepsp.DistributedRecurrence(_sums, state=state)
        out = module(value=mine[0], g=mine[1], seq_lens=lens)
        g_out = torch.autograd.grad(out.square().sum(), mine)
        for a, b in zip([out, *g_out], [expected, *g_expected], strict=True):
            torch.testing.assert_close(a, b.split(lens, 1)[rank], **TIGHT)


def experts():
    """Rows to the ranks that hold their experts, and back; with gradients."""
    rank, size, name = dist.get_rank(), dist.get_world_size(), dist.group.WORLD.group_name
    counts = [(3 * p + q) % 4 + 1 for p in range(size) for q in range(size)]
    rows = draw(sum(counts[rank * size : (rank + 1) * size]), 5).requires_grad_()
    there = op.expert_dispatch(rows * 2, counts, rank, name)
    assert there.size(0) == sum(counts[rank::size])
    back = op.expert_combine(there.sin(), counts, rank, name)
    torch.testing.assert_close(back, (rows * 2).sin(), **TIGHT)
    (grad,) = torch.autograd.grad(back.sum(), rows)
    torch.testing.assert_close(grad, 2 * (rows * 2).cos(), **TIGHT)


def sparse_models():
    """Models with an indexer, for some queries at a time, against one process on this GPU."""
    try:
        import indexed
    except ImportError:
        return ["transformers isn't here: its models weren't tried"]
    from deepsp.integrations.transformers import indexers, register

    register()
    most, indexers.ENTRIES = indexers.ENTRIES, 2**12
    for name in ("deepseek_v32", "deepseek_v4", "minimax_m3_vl_text", "deepseek_v3"):
        model, given = indexed.make(name).cuda(), indexed.batch("left")
        given = {n: x.cuda() for n, x in given.items()}
        losses, gradients = [], []
        for sharded in (False, True):
            if sharded:
                indexed.attend_by(model, name, "deepsp")
                loss = model(**deepsp.shard_batch(given)[0]).loss
            else:
                loss = model(**given).loss
            loss.backward()
            if sharded:
                deepsp.sync_gradients(model)
            losses.append(loss.item())
            gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
            model.zero_grad(set_to_none=True)
        assert abs(losses[0] - losses[1]) < 1e-5 * losses[0], (name, losses)
        assert gradients[0].keys() == gradients[1].keys()
        for n, expected in gradients[0].items():
            off = (gradients[1][n] - expected).abs().max() / expected.abs().max().clamp(min=1e-6)
            assert off < 1e-3, (name, n, off.item())
    indexers.ENTRIES = most
    return []


def sixteen_bits():
    lens = uneven(64)
    rank = dist.get_rank()
    for dtype in (torch.bfloat16, torch.float16):
        whole = [draw(1, 64, h, 64, seed=h, dtype=dtype) for h in (8, 2)]
        q, k = (x.split(lens, 1)[rank] for x in whole)
        out = deepsp.distributed_attention(q, k, k, is_causal=True, enable_gqa=True, seq_lens=lens)
        expected = attention(*(x.double() for x in (*whole, whole[1])), is_causal=True)
        torch.testing.assert_close(
            out.double(), expected.split(lens, 1)[rank], rtol=3e-2, atol=3e-2
        )


def loss_and_rest():
    rank, size = dist.get_rank(), dist.get_world_size()
    lens = uneven(9)
    logits = draw(2, 9, 5).requires_grad_()
    labels = torch.arange(18, device="cuda").view(2, 9) % 5
    labels[:, 2] = -100
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    (full,) = torch.autograd.grad(expected, logits)
    mine = logits.detach().split(lens, 1)[rank].clone().requires_grad_()
    loss = deepsp.cross_entropy(mine, labels.split(lens, 1)[rank])
    torch.testing.assert_close(loss, expected, **TIGHT)
    (grad,) = torch.autograd.grad(loss, mine)
    torch.testing.assert_close(grad, full.split(lens, 1)[rank], **TIGHT)
    assert torch.equal(deepsp.unshard(mine.detach(), 1, seq_lens=lens), logits.detach())
    hidden, weight = draw(2, 9, 6, seed=3).requires_grad_(), draw(5, 6, seed=4).requires_grad_()
    expected = F.cross_entropy((hidden @ weight.T).flatten(0, 1), labels.flatten())
    full = torch.autograd.grad(expected, (hidden, weight))
    mine = hidden.detach().split(lens, 1)[rank].clone().requires_grad_()
    loss = deepsp.linear_cross_entropy(
        mine, weight, labels.split(lens, 1)[rank].contiguous(), chunk_tokens=2
    )
    torch.testing.assert_close(loss, expected, **TIGHT)
    grads = torch.autograd.grad(loss, (mine, weight))
    torch.testing.assert_close(grads[0], full[0].split(lens, 1)[rank], **TIGHT)
    share = deepsp.collectives.all_reduce(grads[1], grad="replicated")
    torch.testing.assert_close(share, full[1], **TIGHT)
    other, head = draw(2, 9, 7, seed=5), draw(5, 7, seed=6)
    log_p, log_q = ((x @ w.T / 0.7).log_softmax(-1) for x, w in ((hidden, weight), (other, head)))
    log_m = torch.log(0.7 * log_p.exp() + 0.3 * log_q.exp())
    each = 0.3 * log_q.exp() * (log_q - log_m) + 0.7 * log_p.exp() * (log_p - log_m)
    expected = each.sum(-1)[labels != -100].mean()
    full = torch.autograd.grad(expected, (hidden, weight))
    loss, entropy = deepsp.linear_kl(
        *(mine, weight, other.split(lens, 1)[rank], head, labels.split(lens, 1)[rank]),
        beta=0.3,
        temperature=0.7,
        chunk_tokens=2,
        entropy=True,
    )
    torch.testing.assert_close(loss, expected, **TIGHT)
    of_all = -(log_p.exp() * log_p).sum(-1)
    torch.testing.assert_close(entropy, of_all[labels != -100].mean(), **TIGHT)
    grads = torch.autograd.grad(loss, (mine, weight))
    torch.testing.assert_close(grads[0], full[0].split(lens, 1)[rank], **TIGHT)
    share = deepsp.collectives.all_reduce(grads[1], grad="replicated")
    torch.testing.assert_close(share, full[1], **TIGHT)
    mean = deepsp.token_mean(of_all.detach().split(lens, 1)[rank], labels.split(lens, 1)[rank])
    torch.testing.assert_close(mean, entropy, **TIGHT)
    log_p = (hidden @ weight.T / 0.7).log_softmax(-1)
    expected = log_p.gather(-1, labels.clamp(min=0)[..., None])[..., 0] * (labels != -100)
    full = torch.autograd.grad(expected.exp().sum(), (hidden, weight))
    found, entropy = deepsp.token_log_probs(
        mine,
        weight,
        labels.split(lens, 1)[rank],
        temperature=0.7,
        entropy=True,
        chunk_tokens=2,
        outputs="full",
        seq_lens=lens,
    )
    torch.testing.assert_close(found, expected, **TIGHT)
    of_all = -(log_p.exp() * log_p).sum(-1) * (labels != -100)
    torch.testing.assert_close(entropy, of_all, **TIGHT)
    grads = torch.autograd.grad(found.exp().sum(), (mine, weight))
    torch.testing.assert_close(grads[0], full[0].split(lens, 1)[rank], **TIGHT)
    share = deepsp.collectives.all_reduce(grads[1], grad="replicated")
    torch.testing.assert_close(share, full[1], **TIGHT)
    torch.manual_seed(0)
    module = torch.nn.Linear(3, 4, device=labels.device)
    for p in module.parameters():
        p.grad = torch.full_like(p, rank + 1.0)
    deepsp.sync_gradients(module)
    assert (module.weight.grad == size * (size + 1) / 2).all()


def dropout():
    """Ranks that are seeded alike drop other weights, in compiled code, too; gradients follow."""
    rank, size = dist.get_rank(), dist.get_world_size()
    total, heads = 32, 4
    mine = total // size

    def attend(q, k, v):
        return deepsp.distributed_attention(q, k, v, dropout_p=0.5)

    for dtype in (torch.float32, torch.bfloat16):
        zeros = draw(1, mine, heads, total, dtype=dtype).zero_()
        eye = torch.eye(total, dtype=dtype, device=zeros.device).view(1, total, 1, total)
        v = eye.expand(-1, -1, heads, -1).split(mine, 1)[rank].clone().requires_grad_()
        for call in (attend, torch.compile(attend, fullgraph=True)):
            torch._dynamo.reset()
            torch.manual_seed(7)
            out = call(zeros, zeros, v)
            weights = deepsp.collectives.all_gather(out.detach(), 1, grad="replicated")[
                0
            ].transpose(0, 1)
            kept = (weights != 0).float()  # [heads, queries, keys]
            for i in range(heads):
                assert all((kept[i] - kept[j]).abs().mean() > 0.3 for j in range(i)), (i, call)
            (grad,) = torch.autograd.grad(out.sum(), v)
            expected = weights.float().sum(1).T.split(mine)[rank].view(1, mine, heads, 1)
            torch.testing.assert_close(grad.float(), expected.expand_as(grad), rtol=0.02, atol=0.02)
        x = [draw(1, 16, h, 8, seed=h, dtype=dtype).requires_grad_() for h in (4, 2, 2)]
        found = []
        for _ in range(2):
            torch.manual_seed(3)
            seed, _ = op._dropout_seed(x[0], rank)
            assert seed.is_cpu
            out = op._attention_with_dropout(*x, None, 0.3, True, None, seed)
            found.append([out, *torch.autograd.grad(out.sum(), x)])
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b)


def op_checks():
    rank, size = dist.get_rank(), dist.get_world_size()
    name = dist.group.WORLD.group_name
    lens = uneven(4 * size)
    q = draw(2, lens[rank], 8, 6, dtype=torch.float32).requires_grad_()
    k = draw(2, lens[rank], 2, 6, dtype=torch.float32).requires_grad_()
    held = [x.detach().requires_grad_() for x in op.seq_to_heads([q, k], lens, rank, name)]
    with torch.autograd.set_detect_anomaly(True, check_nan=False):  # see tests/lib/calls.py
        arriving = op.seq_to_heads_start([q, k], lens, 2, False, rank, name)
        leaving = op.heads_to_seq_start(held, [8, 2], lens, 0, 1, rank, name)
        arriving = [x.detach().requires_grad_() for x in arriving]
        leaving = leaving.detach().requires_grad_()
        shape = ([8, 2], [6, 6], 2)
        opcheck(op.seq_to_heads.default, ([q, k], lens, rank, name))
        opcheck(op.heads_to_seq.default, (held, [8, 2], lens, rank, name))
        opcheck(op.seq_to_heads_start.default, ([q, k], lens, 2, False, rank, name))
        opcheck(
            op.seq_to_heads_wait.default, (arriving[0], *shape, lens, 0, len(arriving), rank, name)
        )
        opcheck(op.heads_to_seq_start.default, (held, [8, 2], lens, 0, 1, rank, name))
        opcheck(op.heads_to_seq_wait.default, ([leaving], *shape, lens, rank, name))
        opcheck(
            op.distributed_attention.default,
            (q, k, k, None, 0.0, True, None, True, 1, lens, rank, name),
        )
        alike = draw(2, 6, dtype=torch.float32).requires_grad_()
        opcheck(op.all_reduce.default, (alike, "partial", rank, size, name))
        opcheck(op.all_gather.default, (q, 1, lens, "partial", rank, name))


def along_dim():
    """Collectives along every dimension, and the linear layers fused with them, against plain
    sums, float64."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for dim, shape in ((0, (7, 4, 6)), (1, (1, 7, 6)), (1, (3, 7, 6)), (-2, (5, 7, 6))):
        lens = uneven(7)
        each = [draw(*shape, seed=r) for r in range(size)]
        weights = [draw(*shape, seed=50 + r) for r in range(size)]
        total = sum(weights)

        def part(x, dim=dim, lens=lens):
            return x.split(lens, dim)[rank]

        x = part(each[0]).clone().requires_grad_()
        for grad, expected in (("replicated", weights[0]), ("partial", total)):
            y = deepsp.collectives.all_gather(x, dim, sizes=lens, grad=grad)
            assert torch.equal(y, each[0])
            w = weights[0 if grad == "replicated" else rank]
            (g,) = torch.autograd.grad((y * w).sum(), x)
            torch.testing.assert_close(g, part(expected), **TIGHT)
        x = each[rank].clone().requires_grad_()
        y = deepsp.collectives.reduce_scatter(x, dim, sizes=lens)
        torch.testing.assert_close(y, part(sum(each)), **TIGHT)
        (g,) = torch.autograd.grad((y * part(weights[0])).sum(), x)
        assert torch.equal(g, weights[0])
        y = deepsp.collectives.scatter(x, dim, sizes=lens)
        assert torch.equal(y, part(each[rank]))
        y = deepsp.collectives.all_reduce(each[rank], grad="partial")
        torch.testing.assert_close(y, sum(each), **TIGHT)
        half = deepsp.collectives.all_reduce(each[rank].bfloat16(), grad="partial")
        wide = sum(e.bfloat16().float() for e in each).bfloat16()
        torch.testing.assert_close(half, wide)

        w = draw(3, 6, seed=8).requires_grad_()
        x = part(each[0]).clone().requires_grad_()
        y = deepsp.collectives.all_gather_matmul(x, w, None, dim, sizes=lens)
        torch.testing.assert_close(y, F.linear(each[0], w), **TIGHT)
        g = torch.autograd.grad(y.sum(), (x, w))
        ones = torch.ones_like(y)
        torch.testing.assert_close(g[0], part(size * ones @ w), **TIGHT)
        torch.testing.assert_close(g[1], ones.flatten(0, -2).t() @ each[0].flatten(0, -2), **TIGHT)
        y = deepsp.collectives.matmul_reduce_scatter(each[rank], w, None, dim, sizes=lens)
        torch.testing.assert_close(y, part(sum(F.linear(e, w) for e in each)), **TIGHT)


def inductor():
    rank = dist.get_rank()
    lens = uneven(32)
    for chunks in (1, 2):
        torch._dynamo.reset()

        def layer(q, k, v, chunks=chunks):
            return deepsp.distributed_attention(
                q * 1.5, k + 1, v, is_causal=True, enable_gqa=True, seq_lens=lens, chunks=chunks
            ).sin()

        x = [
            draw(2, lens[rank], h, 16, seed=h + rank, dtype=torch.float32).requires_grad_()
            for h in (8, 4, 4)
        ]
        expected = layer(*x)
        grad = torch.randn_like(expected)
        g_expected = torch.autograd.grad(expected, x, grad)
        out = torch.compile(layer, fullgraph=True)(*x)
        g_out = torch.autograd.grad(out, x, grad)
        for a, b in zip([out, *g_out], [expected, *g_expected], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def compile_pass():
    """A model through backend="deepsp" on full batches of two lengths, its loss cut at the ranks'
    borders: loss and every gradient against the model that isn't compiled."""
    torch._dynamo.reset()
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.bfloat16, 3e-2)):
        torch.manual_seed(0)
        reference = LM().to("cuda", dtype)
        model = copy.deepcopy(reference)
        compiled = torch.compile(model, backend="deepsp", fullgraph=True)
        for length in (34, 41):
            inputs = {name: x.to("cuda") for name, x in batch(length).items()}
            expected = reference(**inputs)
            loss = compiled(**deepsp.prepare_inputs(inputs))
            torch.testing.assert_close(loss, expected, rtol=tolerance, atol=tolerance)
            for m, of_model in ((reference, expected), (model, loss)):
                m.zero_grad()
                of_model.backward()
            for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
                difference = (p.grad - q.grad).double().norm() / q.grad.double().norm()
                assert difference < 10 * tolerance, (name, length, dtype, float(difference))


def plain_layer(layer, x):
    """The layer on the whole sequence, with its parameters and nothing else of it."""
    q, k, v = (
        p(x).unflatten(-1, (heads, -1))
        for p, heads in (
            (layer.q_proj, layer.num_heads),
            (layer.k_proj, layer.num_kv_heads),
            (layer.v_proj, layer.num_kv_heads),
        )
    )
    return layer.o_proj(attention(q, k, v, is_causal=True).flatten(2))


def layer_gradients():
    """The whole layer: output and every gradient against one process, float64."""
    rank = dist.get_rank()
    for heads, kv_heads, chunks, overlap in (
        (8, 8, 1, True),
        (8, 2, 2, True),
        (6, 3, 3, True),
        (8, 4, 1, False),
    ):
        lens = uneven(17)
        torch.manual_seed(0)
        layer = deepsp.SequenceParallelAttention(
            24,
            heads,
            kv_heads,
            head_dim=16,
            bias=True,
            chunks=chunks,
            overlap=overlap,
            device="cuda",
            dtype=torch.float64,
        )
        x = draw(2, 17, 24).requires_grad_()
        mine = x.detach().split(lens, 1)[rank].clone().requires_grad_()
        grad = draw(2, 17, 24, seed=4)
        expected = plain_layer(layer, x)
        theirs = torch.autograd.grad(expected, [x, *layer.parameters()], grad)
        out = layer(mine, seq_lens=lens, is_causal=True)
        ours = torch.autograd.grad(out, [mine, *layer.parameters()], grad.split(lens, 1)[rank])
        torch.testing.assert_close(out, expected.split(lens, 1)[rank], **TIGHT)
        torch.testing.assert_close(ours[0], theirs[0].split(lens, 1)[rank], **TIGHT)
        for a, b in zip(ours[1:], theirs[1:], strict=True):
            a = a.clone()
            dist.all_reduce(a)
            torch.testing.assert_close(a, b, **TIGHT)


def layer_checks():
    """opcheck of the projections; autocast; Inductor."""
    rank, name = dist.get_rank(), dist.group.WORLD.group_name
    lens = uneven(8)
    x = draw(2, lens[rank], 5, dtype=torch.float32).requires_grad_()
    weights = [draw(n, 5, dtype=torch.float32).requires_grad_() for n in (48, 12)]
    biases = [draw(n, dtype=torch.float32).requires_grad_() for n in (48, 12)]
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        opcheck(
            op._project_to_heads_start.default,
            (x, weights, biases, [8, 2], lens, 2, False, rank, name),
        )
        held = op.seq_to_heads([draw(2, lens[rank], 8, 6, dtype=torch.float32)], lens, rank, name)
        leaving = op.heads_to_seq_start(held, [8], lens, 0, 1, rank, name)
        leaving = leaving.detach().requires_grad_()
        output = draw(7, 48, dtype=torch.float32).requires_grad_()
        opcheck(op._heads_to_output_wait.default, ([leaving], output, None, 8, 2, lens, rank, name))
    torch.manual_seed(0)
    layer = deepsp.SequenceParallelAttention(64, 8, 4, rope_theta=1e4, chunks=2, device="cuda")
    torch._dynamo.reset()
    for dtype, tolerance in ((torch.float32, 1e-3), (torch.bfloat16, 5e-2)):
        y = draw(1, lens[rank], 64, dtype=torch.float32).requires_grad_()
        with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
            out = layer(y, seq_lens=lens, is_causal=True)
            compiled = torch.compile(layer, fullgraph=True)(y, seq_lens=lens, is_causal=True)
        assert out.dtype == dtype
        torch.testing.assert_close(compiled, out, rtol=tolerance, atol=tolerance)
        for a, b in zip(
            torch.autograd.grad(compiled.sum(), [y, *layer.parameters()]),
            torch.autograd.grad(out.sum(), [y, *layer.parameters()]),
            strict=True,
        ):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * 4)
