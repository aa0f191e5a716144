"""Mixtures of experts over a sharded sequence, against one process: the loss that balances them,
and experts that are dealt out over the ranks."""

import random

import pytest
import torch
import torch.distributed as dist
from architectures import VOCAB, make
from harness import on_ranks
from reference import draw, sent

import deepsp
from deepsp.integrations.transformers import register, shard_experts


def _balanced(name):
    register()
    options = {"output_router_logits": True, "router_aux_loss_coef": 0.7}
    models = []
    for attention in ("sdpa", "deepsp"):
        torch.manual_seed(0)
        models.append(make(name, attn_implementation=attention, **options))
    reference, model = models
    ids = torch.randint(3, VOCAB, (2, 17), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    for batch in ({}, {"attention_mask": mask}):
        labels = ids.masked_fill(batch.get("attention_mask", mask * 0 + 1) == 0, -100)
        batch |= {"input_ids": ids, "labels": labels}
        expected = reference(**batch, use_cache=False)
        expected.loss.backward()
        local, _ = deepsp.shard_batch(batch)
        out = model(**local)
        out.loss.backward()
        deepsp.sync_gradients(model)
        assert expected.aux_loss > 1
        torch.testing.assert_close(out.aux_loss, expected.aux_loss, rtol=1e-6, atol=0)
        torch.testing.assert_close(out.loss.double(), expected.loss.double(), rtol=1e-6, atol=0)
        for (n, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
            scale = q.grad.abs().max().item()
            torch.testing.assert_close(
                p.grad, q.grad, rtol=0, atol=1e-5 * scale, msg=lambda m, n=n: f"{n}: {m}"
            )
        model.zero_grad()
        reference.zero_grad()


@pytest.mark.parametrize("name", ["Mixtral", "Qwen3 MoE"])
def test_balanced(name):
    on_ranks(3, _balanced, name)


# ------------------------------------------------------------------ experts on the ranks


def _mlp(x, expert, up, down):
    """Each row by its expert."""
    return torch.einsum(
        "nh,neh->ne", torch.einsum("ne,neh->nh", x, up[expert]).tanh(), down[expert]
    )


def _dealt(experts, each):
    """Uneven tokens, one rank without any, and an expert that gets none."""
    rank, size = dist.get_rank(), dist.get_world_size()
    lens = [9, 0, 4, 7][:size] if size > 1 else [9]
    total = sum(lens)
    generator = torch.Generator().manual_seed(experts)
    chosen = torch.stack(
        [torch.randperm(experts - 1, generator=generator)[:each] for _ in range(total)]
    )
    whole = [draw(total, 6), draw(total, each, seed=1)]
    weights = [draw(experts, 6, 5, seed=2), draw(experts, 6, 5, seed=3)]
    full = [x.clone().requires_grad_() for x in (*whole, *weights)]
    expected = sum(
        _mlp(full[0], chosen[:, k], *full[2:]) * full[1][:, k : k + 1] for k in range(each)
    )
    grad = draw(*expected.shape, seed=4)
    wanted = torch.autograd.grad(expected, full, grad)
    own = [x.split(lens)[rank].clone().requires_grad_() for x in whole]
    module = deepsp.DistributedExperts(None, experts)
    mine = slice(module.experts.start, module.experts.stop)
    own += [w[mine].clone().requires_grad_() for w in weights]
    module.function = lambda x, expert: _mlp(x, expert, *own[2:])
    out = module(own[0], chosen.split(lens)[rank], own[1])
    found = torch.autograd.grad(out, own, grad.split(lens)[rank])
    close = {"rtol": 1e-10, "atol": 1e-12}
    for a, b in zip((out, *found[:2]), (expected, *wanted[:2]), strict=True):
        torch.testing.assert_close(a, b.split(lens)[rank], **close)
    for a, b in zip(found[2:], wanted[2:], strict=True):
        torch.testing.assert_close(a, b[mine], **close)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_dealt_out(ranks):
    for experts, each in ((4, 1), (5, 2), (7, 3)):
        on_ranks(ranks, _dealt, experts, each)


@pytest.mark.messages
def test_dealt_out_by_messages():
    on_ranks(3, _dealt, 5, 2, apart="messages")


def _oss(attention):
    from transformers import AutoModelForCausalLM, GptOssConfig

    config = GptOssConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=24, num_hidden_layers=2, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=3, num_experts_per_tok=2,
        sliding_window=7, pad_token_id=0, eos_token_id=2, attn_implementation=attention,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def _in_models(name):
    """A model's experts, and their memory; saved and loaded whole."""
    register()
    models = []
    for attention in ("eager" if name == "GPT-OSS" else "sdpa", "deepsp"):
        torch.manual_seed(0)
        made = _oss(attention) if name == "GPT-OSS" else make(name, attn_implementation=attention)
        models.append(made.double())
        models[-1].set_experts_implementation("eager")  # others don't know float64
    reference, model = models
    before = {n: p.numel() for n, p in model.named_parameters()}
    shard_experts(model)
    mine = {n: p.numel() for n, p in model.named_parameters()}
    cut = {n for n in mine if mine[n] < before[n]}
    assert cut and all(".experts." in n for n in cut)
    ids = torch.randint(3, VOCAB, (2, 17), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids}
    expected = reference(**batch, use_cache=False).loss
    expected.backward()
    local, _ = deepsp.shard_batch(batch)
    for checkpoints in (False, True):
        if checkpoints:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        loss = model(**local).loss
        loss.backward()
        deepsp.sync_gradients(model)
        torch.testing.assert_close(loss.double(), expected.double(), rtol=1e-6, atol=0)
        gradients = deepsp.full_state_dict(model, gradients=True)
        for n, q in reference.named_parameters():
            scale = q.grad.abs().max().item()
            torch.testing.assert_close(
                gradients[n], q.grad, rtol=0, atol=1e-5 * scale, msg=lambda m, n=n: f"{n}: {m}"
            )
    full = {n: x.clone() for n, x in deepsp.full_state_dict(model).items()}
    for n, x in reference.state_dict().items():
        assert torch.equal(full[n], x), n
    deepsp.load_full_state_dict(model, {n: x + 1 for n, x in full.items()})
    for n, x in deepsp.full_state_dict(model).items():
        assert torch.equal(x, full[n] + 1), n
    norm = deepsp.clip_grad_norm_(model, 1e9)
    expected = torch.nn.utils.get_total_norm([q.grad for q in reference.parameters()])
    torch.testing.assert_close(norm.double(), expected.double(), rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("name", "ranks"),
    [("Mixtral", 2), pytest.param("Qwen3 MoE", 3), pytest.param("GPT-OSS", 2)],
)
def test_in_models(name, ranks):
    on_ranks(ranks, _in_models, name)


def _sends():
    """A rank sends the rows of other ranks' experts, and no others."""
    rank, size, name = dist.get_rank(), dist.get_world_size(), dist.group.WORLD.group_name
    counts = [(3 * p + q) % 5 for p in range(size) for q in range(size)]
    mine = counts[rank * size : (rank + 1) * size]
    rows = draw(sum(mine), 4, dtype=torch.float32)
    found = sent(lambda: torch.ops.deepsp.expert_dispatch(rows, counts, rank, name))
    assert sum(found) == (sum(mine) - mine[rank]) * 16


def test_bytes():
    on_ranks(3, _sends, apart="messages")


def _compiled(inner):
    rank, size, name = dist.get_rank(), dist.get_world_size(), dist.group.WORLD.group_name
    torch._dynamo.reset()
    op = torch.ops.deepsp

    def there_and_back(x, counts):
        y = op.expert_dispatch(x * 2, counts, rank, name)
        return op.expert_combine(y.sin(), counts, rank, name)

    call = torch.compile(there_and_back, backend=inner, fullgraph=True, dynamic=True)
    draws = random.Random(0)
    for _ in range(3):
        counts = [draws.randint(2, 9) for _ in range(size * size)]
        x = draw(sum(counts[rank * size : (rank + 1) * size]), 3).requires_grad_()
        outs = [f(x, counts) for f in (there_and_back, call)]
        grads = [torch.autograd.grad(out.square().sum(), x)[0] for out in outs]
        torch.testing.assert_close(outs[0], (x * 2).sin())
        torch.testing.assert_close(*outs)
        torch.testing.assert_close(*grads)


def test_compiled():
    on_ranks(3, _compiled, "aot_eager")


@pytest.mark.nightly
def test_inductor():
    on_ranks(3, _compiled, "inductor")


def _refused():
    with pytest.raises(ValueError, match=r"at least as many experts as ranks .*\(2\), got 1"):
        deepsp.DistributedExperts(None, 1)
    module = deepsp.DistributedExperts(lambda x, expert: x[:-1], 2)
    x, chosen, weights = draw(3, 4), torch.zeros(3, 1, dtype=torch.long), draw(3, 1)
    with pytest.raises(ValueError, match="hidden of shape"):
        module(x, chosen, weights[:2])
    with pytest.raises(ValueError, match="chosen to be experts below 2, got 5"):
        module(x, chosen + 5, weights)
    module.function = lambda x, expert: None
    with pytest.raises(ValueError, match="a row for each token that it got, got NoneType"):
        module(x, chosen, weights)
    with pytest.raises(ValueError, match=r"rows that counts says rank 0 sends"):
        torch.ops.deepsp.expert_dispatch(x, [1, 1, 1, 1], 0, "0")
    with pytest.raises(ValueError, match=r"P \* P numbers, got 3"):
        torch.ops.deepsp.expert_combine(x, [1, 1, 1], 0, "0")


def test_refused():
    on_ranks(2, _refused)
