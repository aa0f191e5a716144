"""DeepSpeed's ZeRO 3, which partitions parameters, against one process that has none of it.

Models are in float64, and losses are equal to 1e-12 before the first step. DeepSpeed keeps
gradients and the weights that it updates in float32."""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import on_ranks as _on_ranks
from harness import stop
from torch import nn
from under_deepspeed import DIM, HEADS, VOCAB, draw_batch, launch_deepspeed

import deepsp

f64 = torch.float64
KV, STEPS, LR = 2, 3, 0.5
ROUNDING = 1e-6  # of a parameter's largest element

on_ranks = functools.partial(_on_ranks, apart="zero3")


@pytest.fixture(scope="module", autouse=True)
def ended():
    yield
    stop("zero3")


def engine_of(model, **zero):
    """Nothing stays gathered: each use of a parameter has to gather it."""
    deepspeed = launch_deepspeed()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        "gradient_clipping": 0.0,  # 1 by default
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_reuse_distance": 0,
            "stage3_prefetch_bucket_size": 0,
        }
        | zero,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def full(model):
    from deepspeed.runtime.zero import GatheredParameters

    with GatheredParameters(list(model.parameters())):
        return {n: p.detach().clone() for n, p in model.named_parameters()}


def full_gradients(model):
    from deepspeed.utils import safe_get_full_grad

    return {n: safe_get_full_grad(p) for n, p in model.named_parameters()}


def near(found, expected, scale, what):
    """To within rounding of the largest element of ``scale``."""
    atol = ROUNDING * scale.abs().max().item()
    torch.testing.assert_close(
        found.double(), expected, rtol=0, atol=atol, msg=lambda m: f"{what}: {m}"
    )


def trained(engine, model, reference, loss_of, loss_of_one, sequences=1, mine=0):
    """Each step's loss and gradients are those of one process, and so are the weights then."""
    start = copy.deepcopy(reference)
    optimizer = torch.optim.SGD(reference.parameters(), lr=LR)
    for step in range(STEPS):
        each = [loss_of_one(reference, *draw_batch(step, s)) for s in range(sequences)]
        (sum(each) / sequences).backward()
        loss = loss_of(engine, *draw_batch(step, mine))
        assert abs(loss.item() - each[mine].item()) < (1e-6 if step else 1e-12), (step, loss, each)
        engine.backward(loss)
        gradients = full_gradients(model)
        named = dict(reference.named_parameters())
        assert gradients.keys() == named.keys()
        for name, p in named.items():
            near(gradients[name], p.grad, p.grad, f"gradient of {name} in step {step}")
        engine.step()
        optimizer.step()
        optimizer.zero_grad()
    assert all(p.numel() == 0 for p in model.parameters())  # partitioned again
    before = dict(start.named_parameters())
    for (name, found), p in zip(full(model).items(), reference.parameters(), strict=True):
        change = (p.detach() - before[name]).abs().max()
        assert change > 100 * ROUNDING * p.abs().max(), name
        near(found, p.detach(), p.detach(), name)


# ---------------------------------------------------------------- the layer


class Plain(nn.Module):
    """An attention layer, and nothing of deepsp."""

    def __init__(self, norm=None, bias=False):
        super().__init__()
        d = DIM // HEADS
        self.q_proj, self.o_proj = (nn.Linear(DIM, DIM, bias=bias) for _ in range(2))
        self.k_proj, self.v_proj = (nn.Linear(DIM, KV * d, bias=bias) for _ in range(2))
        sizes = {"head": (d, d), "all": (DIM, KV * d)}.get(norm)
        if sizes is not None:
            self.q_norm, self.k_norm = map(nn.RMSNorm, sizes)
        self.norm = norm

    def forward(self, x, lens=None):
        d = DIM // HEADS
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if self.norm == "all":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (x.unflatten(-1, (-1, d)) for x in (q, k, v))
        if self.norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        angles = torch.arange(x.size(1), dtype=f64)[:, None]
        angles = angles / 1e4 ** (torch.arange(0, d, 2, dtype=f64) / d)
        angles = torch.cat([angles, angles], -1)[:, None]
        q, k = (
            x * angles.cos() + torch.cat([-x[..., d // 2 :], x[..., : d // 2]], -1) * angles.sin()
            for x in (q, k)
        )
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Ours(Plain):
    """The same on this rank's tokens, with the layer around the projections."""

    def __init__(self, norm=None, bias=False, register=False, **options):
        super().__init__(norm, bias)
        if norm is not None:
            options |= {"q_norm": self.q_norm, "k_norm": self.k_norm}
        layer = deepsp.SequenceParallelAttention.from_projections(
            self.q_proj,
            self.k_proj,
            self.v_proj,
            self.o_proj,
            HEADS,
            register=register,
            rope_theta=1e4,
            **options,
        )
        # Registered, its hooks gather; else, those of this module.
        self._layer = layer if register else (layer,)

    def forward(self, x, lens):
        layer = self._layer[0] if isinstance(self._layer, tuple) else self._layer
        return layer(x, is_causal=True, seq_lens=lens)


class Model(nn.Module):
    def __init__(self, attention, checkpoint=None):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm = nn.Embedding(VOCAB, DIM), nn.LayerNorm(DIM)
        self.attention, self.head = attention(), nn.Linear(DIM, VOCAB)
        self.double()
        self.checkpoint = checkpoint

    def forward(self, ids, lens=None, labels=None):
        x = self.embed(ids)
        if self.checkpoint is None:
            x = x + self.attention(self.norm(x), lens)
        else:
            x = x + torch.utils.checkpoint.checkpoint(
                self.attention, self.norm(x), lens, use_reentrant=self.checkpoint
            )
        if labels is None:
            return self.head(x)
        return deepsp.linear_cross_entropy(
            x, self.head.weight, labels, self.head.bias, average_gradients=True
        )


def one_process(model, ids, labels):
    return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def by_logits(engine, ids, labels):
    local, lens = deepsp.shard_batch({"input_ids": ids, "labels": labels})
    logits = engine(local["input_ids"], lens)
    return deepsp.cross_entropy(logits, local["shift_labels"], average_gradients=True)


def without_logits(engine, ids, labels):
    local, lens = deepsp.shard_batch({"input_ids": ids, "labels": labels})
    return engine(local["input_ids"], lens, local["shift_labels"])


LAYERS = {
    "not registered": {"bias": True},
    "registered": {"register": True, "chunks": 2},
    "norms of heads": {"norm": "head"},
    "norms of all heads": {"norm": "all", "bias": True},
    "one after another": {"overlap": False, "norm": "all"},
    "checkpoint": {"bias": True, "checkpoint": False},
    "auto": {"chunks": "auto", "register": True},
}


def _layer(names, **zero):
    for name in names:
        options = dict(LAYERS[name])
        checkpoint, kept = options.pop("checkpoint", None), ("norm", "bias")
        plain = {key: options[key] for key in kept if key in options}
        model = Model(functools.partial(Ours, **options), checkpoint)
        reference = Model(functools.partial(Plain, **plain))
        reference.load_state_dict(
            {n: x for n, x in model.state_dict().items() if "_layer" not in n}
        )
        loss_of = without_logits if name == "not registered" else by_logits
        engine = engine_of(model, **zero)
        trained(engine, model, reference, loss_of, one_process)


@pytest.mark.parametrize(
    ("ranks", "names"),
    [(1, list(LAYERS)[:2]), (2, list(LAYERS)), (3, list(LAYERS)[:4])],
    ids=["1", "2", "3"],
)
def test_layer(ranks, names):
    on_ranks(ranks, _layer, names)


class Attending(nn.Module):
    """Attention by a function, without parameters."""

    def __init__(self, distributed):
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.attend = deepsp.DistributedAttention() if distributed else None

    def forward(self, x, lens=None):
        q, k, v = self.qkv(x).unflatten(-1, (3 * HEADS, -1)).split(HEADS, 2)
        if self.attend is not None:
            return self.out(self.attend(q, k, v, is_causal=True, seq_lens=lens).flatten(2))
        out = F.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True
        )
        return self.out(out.transpose(1, 2).flatten(2))


def _attention():
    model, reference = (Model(functools.partial(Attending, ours)) for ours in (True, False))
    trained(engine_of(model), model, reference, by_logits, one_process)


def test_distributed_attention():
    on_ranks(2, _attention)


# ---------------------------------------------------------------- transformers


def tiny(name, **config):
    from trained import tiny

    return tiny(name, f64, **config)


def of_one(model, ids, labels):
    logits = model(input_ids=ids, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def own_loss(group):
    def loss_of(engine, ids, labels):
        local, _ = deepsp.shard_batch({"input_ids": ids, "labels": labels}, group)
        # A model rounds its own loss to float32.
        shift_labels = local.pop("shift_labels")
        logits = engine(**local, use_cache=False).logits
        return deepsp.cross_entropy(logits, shift_labels, group, average_gradients=True)

    return loss_of


def lm_loss(group):
    def loss_of(engine, ids, labels):
        local, _ = deepsp.shard_batch({"input_ids": ids, "labels": labels}, group)
        return deepsp.causal_lm_loss(engine, local, group, average_gradients=True)

    return loss_of


MODELS = {
    "logits": ("llama", {}, own_loss),
    "without logits": ("qwen3", {"tie_word_embeddings": True}, lm_loss),
    "checkpoints": ("llama", {}, lm_loss),
    "tiles": ("llama", {}, own_loss),
    "checkpoints, tiles": ("qwen3", {}, lm_loss),
}


def _model(names, size):
    from deepsp.integrations.transformers import register

    group = deepsp.integrations.deepspeed.sequence_group(size)
    register(group)
    for name in names:
        kind, config, loss = MODELS[name]
        model, reference = (tiny(kind, attn_implementation=a, **config) for a in ("deepsp", "sdpa"))
        if "checkpoints" in name:
            model.activation_checkpointing_enable()
        if "tiles" in name:  # ranks have different numbers of them
            deepsp.tile_(model, tokens=2)
            deepsp.tile_(model, "*norm", "lm_head", tokens=3)
        data = dist.get_world_size() // size
        mine = dist.get_rank() // size
        trained(engine_of(model), model, reference, loss(group), of_one, data, mine)


@pytest.mark.parametrize(
    ("ranks", "size", "names"),
    [(2, 2, list(MODELS)), (3, 3, ["logits", "tiles"]), (4, 2, ["without logits"])],
)
def test_transformers(ranks, size, names):
    on_ranks(ranks, _model, names, size)


# ---------------------------------------------------------------- errors


class Unused(nn.Module):
    """Calls something that uses parameters which this model's forward doesn't gather."""

    def __init__(self, part):
        super().__init__()
        self.part = part

    def forward(self, x):
        return x


def _refused():
    """On every rank, before anything is sent: nothing of this rank's waits for another."""
    from deepspeed import zero

    from deepsp.integrations.transformers import check, register

    engine_of(model := Unused(deepsp.SequenceParallelAttention(DIM, HEADS, KV)))
    layer, x = model.part, torch.zeros(1, 4, DIM)
    with pytest.raises(ValueError, match=r"q_proj.weight to be the full parameter \(32, 32\), got"):
        layer(x)  # not in the engine's forward
    with pytest.raises(ValueError, match=r"has partitioned part.q_proj.weight.*average_gradients"):
        deepsp.sync_gradients(model)
    with pytest.raises(ValueError, match=r"has partitioned parameter 0 .*gradient_clipping"):
        deepsp.clip_grad_norm_(list(model.parameters()), 1.0)
    with pytest.raises(ValueError, match=r"expected weight to be .*\(32, 32\), got \(0,\).*engine"):
        deepsp.linear_cross_entropy(x, layer.q_proj.weight, torch.zeros(1, 4, dtype=torch.int64))
    # Tiled too late for ZeRO 3 to gather it once for all tiles.
    engine_of(model := Unused(nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU())))
    with pytest.raises(ValueError, match=r"Sequential to be tiled before deepspeed.initialize"):
        deepsp.tile(model.part)(x)
    # Made of partitioned parameters, and never given to DeepSpeed.
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    with zero.Init(config_dict_or_path=config):
        layer = deepsp.SequenceParallelAttention(DIM, HEADS, KV, overlap=False)
        tiled = deepsp.tile(nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU()))
    with pytest.raises(ValueError, match=r"q_proj.weight to be the full parameter"):
        layer(x)
    with pytest.raises(ValueError, match=r"0.weight of Sequential to be the full parameter"):
        tiled(x)
    register()
    model = tiny("llama", attn_implementation="deepsp")
    zero.Init(module=model, config_dict_or_path=config, dtype=f64)
    for call in (check, lambda model: model(torch.zeros(1, 4, dtype=torch.int64))):
        with pytest.raises(ValueError, match=r"LlamaForCausalLM with data.*deepspeed.initialize"):
            call(model)


def test_refused():
    on_ranks(2, _refused)
