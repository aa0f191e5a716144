"""Small models for tests: a transformer, transformers' own, and modules that are tiled."""

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY, HIDDEN, HEADS, KV_HEADS, DIM, TOTAL = 31, 48, 6, 2, 8, 37


class Layer(nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.attend = attend
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv = nn.Linear(HIDDEN, (HEADS + 2 * KV_HEADS) * DIM)
        self.out = nn.Linear(HEADS * DIM, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x, seq_lens):
        qkv = self.qkv(self.norm1(x)).unflatten(2, (-1, DIM))
        q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], 2)
        x = x + self.out(self.attend(q, k, v, seq_lens).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.position = nn.Embedding(TOTAL, HIDDEN)
        self.layers = nn.ModuleList([Layer(attend) for _ in range(2)])
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, ids, positions, seq_lens=None):
        x = self.embed(ids) + self.position(positions)
        for layer in self.layers:
            x = layer(x, seq_lens)
        return self.head(x)


SMALL = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "head_dim": 8,
}


class _GemmaNorm(nn.Module):
    def __init__(self, weight, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(weight.detach()), eps

    def forward(self, x):
        return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * (1 + self.weight)


def make_lm(family, attention="sdpa", **options):
    """Makes a small model of transformers, all of it in float64."""
    import transformers

    torch.manual_seed(0)
    if family == "GPT2":
        sizes = {"vocab_size": 64, "n_embd": 48, "n_layer": 2, "n_head": 6, "n_positions": 128}
        off = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
        tokens = {"bos_token_id": 1, "eos_token_id": 2, "scale_attn_by_inverse_layer_idx": True}
        config = transformers.GPT2Config(**sizes, **off, **tokens)
        make = transformers.GPT2LMHeadModel
    else:
        if family in ("Mistral", "Gemma2", "GptOss"):
            options = {"sliding_window": 5} | options
        if family == "GptOss":
            options = {"num_local_experts": 2, "num_experts_per_tok": 1} | options
        config = getattr(transformers, f"{family}Config")(**SMALL, **options)
        make = getattr(transformers, f"{family}ForCausalLM")
    config.use_cache = False
    config._attn_implementation = attention
    config._experts_implementation = "eager"  # the other one has no float64
    model = make(config).double()
    for module in list(model.modules()):  # theirs are computed in float32
        for name, inner in module.named_children():
            if hasattr(inner, "variance_epsilon"):
                norm = nn.RMSNorm(inner.weight.numel(), inner.variance_epsilon, dtype=torch.float64)
                setattr(module, name, norm)
            elif type(inner).__name__ == "Gemma2RMSNorm":
                setattr(module, name, _GemmaNorm(inner.weight, inner.eps))
    return model.train()


class MLP(nn.Module):
    """Remembers how many tokens it saw at a time."""

    def __init__(self, hidden=6, inner=10, dropout=0.0):
        super().__init__()
        self.up, self.down = nn.Linear(hidden, inner), nn.Linear(inner, hidden, bias=False)
        self.dropout = dropout
        self.seen = []

    def forward(self, x):
        self.seen.append(x.size(-2))
        return F.dropout(self.down(F.gelu(self.up(x))), self.dropout, self.training)


class Experts(nn.Module):
    """The first ``capacity`` share of an expert's tokens; all of them, for None."""

    def __init__(self, capacity=None):
        super().__init__()
        self.gate = nn.Linear(6, 4)
        self.experts = nn.ModuleList([nn.Linear(6, 6) for _ in range(4)])
        self.capacity = capacity

    def forward(self, x):
        flat = x.reshape(-1, 6)
        best = self.gate(flat).argmax(-1)
        y = torch.zeros_like(flat)
        for n, expert in enumerate(self.experts):
            at = (best == n).nonzero()[:, 0]
            if self.capacity is not None:
                at = at[: int(self.capacity * len(flat) / 4) + 1]
            if len(at):
                y = y.index_add(0, at, expert(flat[at]))
        return y.view_as(x)


def leaf(*shape, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()
