"""What the schedule's tests share: the same model in one process, and the comparison with it."""

import copy
import os

import torch
from torch import nn

import deepsp

f64 = torch.float64


def seeded(make, seed=3):
    """A model in float64; also what starts as ones or zeros is random."""
    torch.manual_seed(seed)
    model = make().to(f64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def data(*shape, seed=7):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=f64)


def weighted(out):
    """A loss whose gradient is different at each place."""
    return (out * torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view(out.shape)).sum()


def run(model, x):
    """Loss, output and the input's gradient."""
    if x.is_floating_point():
        x = x.clone().requires_grad_()
    model.zero_grad(set_to_none=True)
    out = model(x)
    loss = sum(map(weighted, out)) if isinstance(out, tuple) else weighted(out)
    loss.backward()
    return loss.detach(), out, x.grad


def compare(model, built, x):
    """Loss, output and every gradient."""
    for mine, right in zip(run(built, x), run(model, x), strict=True):
        torch.testing.assert_close(mine, right)
    full = deepsp.full_state_dict(built, gradients=True)
    right = {n: p.grad for n, p in model.named_parameters(remove_duplicate=False)}
    assert set(full) == {n for n, grad in right.items() if grad is not None}
    for name, grad in full.items():
        torch.testing.assert_close(grad, right[name], msg=lambda m, name=name: f"{name}: {m}")


def check(make, plan, *inputs, **options):
    """Builds ``make()`` as ``plan(sch)`` says, and compares it on each of the inputs."""
    model = seeded(make)
    sch = deepsp.create_schedule(copy.deepcopy(model))
    plan(sch)
    built, _ = deepsp.build(sch, **options)
    for x in inputs:
        compare(model, built, x)
    return model, built, sch


class Mlp(nn.Module):
    def __init__(self, dim=5, hidden=11, bias=True, dropout=0.0):
        super().__init__()
        self.up = nn.Linear(dim, hidden, bias=bias)
        self.down = nn.Linear(hidden, dim, bias=bias)
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        return self.drop(self.down(torch.nn.functional.gelu(self.up(x))))


class GroupedAttention(nn.Module):
    """Fused q, k, v of grouped heads; heads that may not divide by the ranks."""

    def __init__(self, dim=12, num_heads=6, num_kv_heads=3):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, 4
        self.qkv = nn.Linear(dim, (num_heads + 2 * num_kv_heads) * self.head_dim)
        self.out = nn.Linear(num_heads * self.head_dim, dim)

    def forward(self, x):
        heads = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
        q, k, v = (
            t.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for t in self.qkv(x).split([h * self.head_dim for h in heads], -1)
        )
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        )
        return self.out(out.transpose(1, 2).flatten(2))


def make_transformer(family, dropout=0.0, **options):
    """Makes a small model of transformers in float64, with random biases and norms."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers

    torch.manual_seed(0)
    if family == "gpt2":
        config = transformers.GPT2Config(
            n_embd=24,
            n_layer=2,
            n_head=6,
            vocab_size=50,
            n_positions=32,
            use_cache=False,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
            **options,
        )
        model = transformers.GPT2LMHeadModel(config)
        model.loss_type = "ForCausalLM"
    else:
        kinds = {
            "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
            "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
            "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
            "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        }
        make_config, make = kinds[family]
        settings = dict(
            hidden_size=24,
            intermediate_size=40,
            num_hidden_layers=2,
            num_attention_heads=12,
            num_key_value_heads=6,
            head_dim=4,
            vocab_size=50,
            max_position_embeddings=32,
            use_cache=False,
            attention_dropout=dropout,
        )
        model = make(make_config(**settings | options))
    model = model.double().train()
    with torch.no_grad():  # biases and norms, too, are random
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    return model


def draw_ids(length=9, batch=2):
    return torch.randint(50, (batch, length), generator=torch.Generator().manual_seed(3))


def compare_transformer(model, built, length, close):
    """Compares loss, logits and every gradient."""
    ids = draw_ids(length)
    for m in (model, built):
        m.zero_grad(set_to_none=True)
    want = model(input_ids=ids, labels=ids)
    got = built(input_ids=ids, labels=ids)
    torch.testing.assert_close(got.loss, want.loss, **close)
    torch.testing.assert_close(got.logits, want.logits, **close)
    want.loss.backward()
    got.loss.backward()
    gradients = deepsp.full_state_dict(built, gradients=True)
    for name, p in model.named_parameters():
        torch.testing.assert_close(
            gradients[name], p.grad, **close, msg=lambda m, n=name: f"{n}: {m}"
        )
