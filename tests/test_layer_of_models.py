"""The layer in place of models' own, against one process: their rotary embeddings, norms over all
heads, local attentions that return more than the output. And chunks that are measured."""

import pytest
import torch
import torch.distributed as dist
from harness import on_ranks
from reference import attention, draw, lens_of
from torch import nn

import deepsp
from deepsp.sequence.attention import chunks as auto_chunks

TOTAL, SIZE, HEADS, KV_HEADS = 13, 48, 6, 2
SCALED = {
    "default": {"rope_type": "default", "rope_theta": 100.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 100.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 100.0,
        "factor": 4.0,
        "original_max_position_embeddings": 8,
    },
    "dynamic": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0},
}


def _theirs(name, rope, **more):
    """An attention layer of transformers with its rotary embedding, as its model calls them."""
    import importlib

    import transformers

    torch.manual_seed(0)
    settings = {
        "hidden_size": SIZE,
        "num_attention_heads": HEADS,
        "num_hidden_layers": 1,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": 8,
        "intermediate_size": 8,
        "max_position_embeddings": 8,
    }
    settings |= more
    config = getattr(transformers, f"{name}Config")(**settings, rope_parameters=rope)
    config._attn_implementation = "sdpa"
    module = importlib.import_module(f"transformers.models.{name.lower()}.modeling_{name.lower()}")
    layer = getattr(module, f"{name}Attention")(config, 0).double()
    for p in layer.parameters():
        nn.init.normal_(p, std=0.3)
    return layer, getattr(module, f"{name}RotaryEmbedding")(config)


def _compare(theirs, ours, cos_sin, lens, **arguments):
    """Output, and every gradient, of this rank's part."""
    rank, x = dist.get_rank(), draw(2, TOTAL, SIZE).requires_grad_()
    expected = theirs(x, position_embeddings=cos_sin, attention_mask=None, is_causal=True)[0]
    grad = draw(*expected.shape, seed=7)
    parameters = dict(theirs.named_parameters())
    gradients = torch.autograd.grad(expected, [x, *parameters.values()], grad)
    mine = x.detach().split(lens, 1)[rank].clone().requires_grad_()
    out = ours(mine, seq_lens=lens, is_causal=True, **arguments)
    found = torch.autograd.grad(out, [mine, *parameters.values()], grad.split(lens, 1)[rank])
    # Their norms are computed in float32.
    normed = hasattr(theirs, "q_norm")
    close = {"rtol": 1e-5, "atol": 1e-7} if normed else {"rtol": 1e-9, "atol": 1e-10}
    torch.testing.assert_close(out, expected.split(lens, 1)[rank], **close)
    torch.testing.assert_close(found[0], gradients[0].split(lens, 1)[rank], **close)
    for name, a, b in zip(parameters, found[1:], gradients[1:], strict=True):
        dist.all_reduce(a)
        torch.testing.assert_close(a, b, **close, msg=lambda m, n=name: f"{n}: {m}")


def _converted(theirs, heads=HEADS, **options):
    o_proj = theirs.o_proj if hasattr(theirs, "o_proj") else theirs.dense
    return deepsp.SequenceParallelAttention.from_projections(
        theirs.q_proj, theirs.k_proj, theirs.v_proj, o_proj, heads, register=False, **options
    )


def _models():
    lens = lens_of("skewed", TOTAL, dist.get_world_size())
    restarting = torch.stack([torch.arange(TOTAL) % 5, torch.arange(TOTAL) + 3])
    for name, rope, more, options in [
        ("Llama", SCALED["llama3"], {}, {"chunks": 2}),
        ("Llama", SCALED["yarn"], {}, {"overlap": False}),
        ("Llama", SCALED["dynamic"], {}, {"chunks": "auto"}),
        # Half of the channels only; and norms of q and k over all heads together.
        ("Phi", SCALED["default"] | {"partial_rotary_factor": 0.5}, {}, {"chunks": 2}),
        ("Olmo2", SCALED["default"], {}, {"chunks": 2}),
        ("Olmo2", SCALED["default"], {}, {"overlap": False}),
        ("Qwen3", SCALED["llama3"], {"head_dim": 8}, {}),
    ]:
        theirs, rotary = _theirs(name, rope, **more)
        norms = {n: getattr(theirs, n) for n in ("q_norm", "k_norm") if hasattr(theirs, n)}
        for positions in (torch.arange(TOTAL)[None], restarting):
            cos_sin = rotary(draw(1, 1), positions)
            ours = _converted(theirs, **norms, **options, rotary=rotary)
            given = {} if positions.size(0) == 1 else {"position_ids": positions}
            _compare(theirs, ours, cos_sin, lens, **given)
        # The pair that a model computes once for all layers.
        _compare(theirs, _converted(theirs, **norms, rotary=cos_sin), cos_sin, lens)
        ours = _converted(theirs, **norms, rope_theta=None)
        _compare(theirs, ours, cos_sin, lens, rotary=cos_sin)


@pytest.mark.parametrize("ranks", [2, 3])
def test_layers_of_models(ranks):
    on_ranks(ranks, _models)


def _interleaved():
    """Channels (2i, 2i + 1), of the first half of a head, turned as complex numbers."""
    lens = lens_of("split", TOTAL, dist.get_world_size())
    torch.manual_seed(0)
    layer = deepsp.SequenceParallelAttention(
        SIZE, HEADS, KV_HEADS, dtype=torch.float64, rope_interleaved=True, chunks=2
    )
    angles = draw(TOTAL, 2)
    pair = tuple(t.repeat_interleave(2, -1) for t in (angles.cos(), angles.sin()))
    x = draw(2, TOTAL, SIZE)

    def turned(heads):
        pairs = torch.view_as_complex(heads[..., :4].unflatten(-1, (2, 2)).contiguous())
        pairs = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
        return torch.cat([torch.view_as_real(pairs).flatten(-2), heads[..., 4:]], -1)

    q, k, v = (p(x).unflatten(-1, (-1, 8)) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    expected = layer.o_proj(attention(turned(q), turned(k), v, is_causal=True).flatten(2))
    mine = x.split(lens, 1)[dist.get_rank()]
    out = layer(mine, seq_lens=lens, is_causal=True, rotary=pair)
    torch.testing.assert_close(out, expected.split(lens, 1)[dist.get_rank()], rtol=1e-9, atol=1e-9)


def test_interleaved_and_partial():
    on_ranks(2, _interleaved)


def _mistakes():
    x = draw(1, 3, 8)
    make, total = deepsp.SequenceParallelAttention, 3 * dist.get_world_size()
    linears = [nn.Linear(8, 8).double() for _ in range(4)]

    def table(*shape):
        return (torch.ones(*shape, dtype=torch.float64),) * 2

    distinct = draw(total, 2)
    layer, turning = (make(8, 2, dtype=torch.float64, rope_theta=t) for t in (None, 100.0))
    attend, q = deepsp.DistributedAttention(), draw(1, 3, 4, 2)
    measured = deepsp.DistributedAttention(chunks="auto")
    for call, message in [
        (lambda: make.from_projections(*linears, 2), "expected rope_theta or rotary, got neither"),
        (
            lambda: make(8, 2, rope_theta=1.0, rotary=table(total, 4)),
            "expected rope_theta or rotary, got both .rope_theta is 1.0",
        ),
        (lambda: make(8, 2, rotary=3), "expected rotary to be a callable .*, got int"),
        (
            lambda: make(8, 2, rotary=lambda x, p: p)(x.float()),
            "expected rotary to be a callable .*, got Tensor",
        ),
        (lambda: turning(x, rotary=table(total, 4)), "rope_theta or rotary, got both .*100.0"),
        (lambda: layer(x, rotary=table(3, 4)), rf"to have shape \[{total}, R\] .*, got \[3, 4\]"),
        (lambda: layer(x, rotary=table(total, 6)), "cos of rotary to have shape .* at most 4"),
        (lambda: layer(x, rotary=table(2, total, 4)), r"cos of rotary to have shape .*, got \[2,"),
        (
            lambda: layer(x, rotary=(table(total, 4)[0], table(total, 2)[0])),
            "sin of rotary to have",
        ),
        (
            lambda: layer(x, rotary=(distinct, distinct)),
            "cos of rotary to have .* its two halves differ",
        ),
        (
            lambda: layer(x, rotary=table(total, 4), position_ids=torch.arange(total)),
            "no position_ids, .* rotary is .cos, sin",
        ),
        (
            lambda: make(8, 2, q_norm=nn.RMSNorm(6)),
            "q_norm to normalize 4 channels, .* 8, .*, got 6",
        ),
        (
            lambda: make(8, 4, 2, k_norm=nn.LayerNorm(8)),
            "k_norm to normalize 2 channels, .* 4, .*, got 8",
        ),
        (lambda: layer(x, enable_gqa=True), "enable_gqa isn't an argument here: .* leave it out"),
        (lambda: layer(x, cu_seqlens=torch.arange(2)), "got cu_seqlens; pass a local_attention"),
        (
            lambda: layer(x, None, 0.0, True, None, None),
            "at most 4 more positional arguments .*, got 5",
        ),
        (lambda: attend(q, q, q, cu_seqlens=torch.arange(2)), "got cu_seqlens"),
        (lambda: deepsp.DistributedAttention(chunks="many"), 'chunks >= 1 or "auto", got .many.'),
        (
            lambda: torch.compile(measured, backend="eager", fullgraph=True)(q, q, q),
            "has been measured",
        ),
    ]:
        with pytest.raises((ValueError, torch._dynamo.exc.Unsupported), match=message):
            call()
    torch._dynamo.reset()
    dist.barrier()  # nobody has sent anything else


def test_mistakes():
    on_ranks(2, _mistakes)


def _measured():
    """chunks="auto": a number that every rank has, measured once for a shape."""
    size, rank = dist.get_world_size(), dist.get_rank()
    lens = lens_of("skewed", TOTAL, size)
    q, k, v = (draw(2, TOTAL, h, 4, seed=h) for h in (12, 6, 6))
    calls = []

    def local(q, k, v, causal):
        calls.append(q.size(2))
        return attention(q, k, v, is_causal=causal), torch.zeros(3), None

    auto_chunks.forget()
    for module, arguments, layout in [
        (deepsp.DistributedAttention(chunks="auto"), {"is_causal": True, "enable_gqa": True}, 0),
        (deepsp.DistributedAttention(local, chunks="auto"), {"causal": True}, 0),
        (
            deepsp.DistributedAttention(chunks="auto", layout="bhsd"),
            {"is_causal": True, "enable_gqa": True},
            1,
        ),
    ]:
        expected_in = [x.clone().requires_grad_() for x in (q, k, v)]
        expected = attention(*expected_in, is_causal=True)
        grad = draw(*expected.shape, seed=5)
        wanted = torch.autograd.grad(expected, expected_in, grad)
        mine = [x.split(lens, 1)[rank].clone().requires_grad_() for x in (q, k, v)]
        given = [x.transpose(1, 2) for x in mine] if layout else mine
        torch.manual_seed(3)
        state = torch.get_rng_state()
        out = module(*given, seq_lens=lens, **arguments)
        assert module.local_attention is not None or torch.equal(torch.get_rng_state(), state)
        picked = [None] * size
        dist.all_gather_object(picked, module.picked)
        assert len(set(picked)) == 1 and picked[0] in (1, 2, 4)
        out = out.transpose(1, 2) if layout else out
        torch.testing.assert_close(out, expected.split(lens, 1)[rank], rtol=1e-10, atol=1e-10)
        found = torch.autograd.grad(out, mine, grad.split(lens, 1)[rank])
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b.split(lens, 1)[rank], rtol=1e-10, atol=1e-10)
        calls.clear()
        module(*given, seq_lens=lens, **arguments)
        assert len(calls) in (0, module.picked), "measured once"
        if module.local_attention is None:
            continue
        compiled = torch.compile(module, backend="aot_eager")
        again = compiled(*given, seq_lens=lens, **arguments)
        again = again.transpose(1, 2) if layout else again
        torch.testing.assert_close(again, out, rtol=1e-10, atol=1e-10)
        torch._dynamo.reset()


def test_measured_chunks():
    on_ranks(3, _measured)
