"""Models of transformers under ``register()``: right, or refused by name; none is just wrong."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from architectures import ARCHITECTURES, GROUPED, SMALL, VOCAB, through_register
from harness import on_ranks
from reference import names
from torch import nn

import deepsp
from deepsp.integrations.transformers import check, register

OWN = "computes its attention itself"
NO_MASK = "to get its mask from transformers. create_recurrent_attention_mask"
PLACES = "forward to take position_ids"
REFUSED = {
    "GPT-Neo": OWN,
    "BLOOM": OWN,
    "Falcon": OWN,
    "Llama, dynamic RoPE": "rope_type of LlamaAttention is 'dynamic', .* at most 8 tokens",
    "OPT": "OPTAttention by itself counts otherwise",
    "ModernBERT": "position_ids that reach the model's .* .ModernBertAttention. .*, got None",
    "RoBERTa": "RobertaSelfAttention by itself counts otherwise",
    "T5": "an encoder and a decoder",
    "BART": "an encoder and a decoder",
    "ViT": "forward to take input_ids",
}


def _zoo(length):
    return {name: through_register(name, length) for name in ARCHITECTURES}


@pytest.mark.parametrize("ranks", [2, 3])
def test_architectures(ranks):
    for found in on_ranks(ranks, _zoo, 13):
        for name, refused in found.items():
            if name in REFUSED:
                assert refused is not None, name
                with pytest.raises(ValueError, match=REFUSED[name]):
                    raise ValueError(refused)
            else:
                assert refused is None, f"{name}: {refused}"


# ---------------------------------------------------------------------- what mixes tokens

_MIXED = ["linear_attention", "full_attention"]
MIXERS = {
    "RecurrentGemma": (
        SMALL | {"lru_width": 32, "attention_window_size": 8, "num_hidden_layers": 3},
        "layers.0.temporal_block .RecurrentGemmaRecurrentBlock",
    ),
    "MiniMax": (
        GROUPED | {"layer_types": _MIXED[::-1], "num_local_experts": 2, "block_size": 8},
        "layers.1.self_attn .MiniMaxLightningAttention",
    ),
    "Mamba": ({"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2}, NO_MASK),
    "FalconMamba": ({"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2}, NO_MASK),
    "xLSTM": ({"vocab_size": VOCAB, "hidden_size": 32, "num_blocks": 2, "num_heads": 4}, PLACES),
    "Rwkv": (
        {
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "attention_hidden_size": 32,
            "num_hidden_layers": 2,
        },
        OWN,
    ),
}


def _ids(length=13):
    return torch.randint(3, VOCAB, (2, length), generator=torch.Generator().manual_seed(length))


def _mixers():
    import transformers

    register()
    part, _ = deepsp.shard_batch({"input_ids": _ids()})
    for name, (settings, message) in MIXERS.items():

        def call(name=name, settings=settings):
            config = getattr(transformers, f"{name}Config")(**settings)
            config._attn_implementation = "deepsp"
            model = getattr(transformers, f"{name}ForCausalLM")(config).double()
            if hasattr(model.config, "_experts_implementation"):
                model.set_experts_implementation("eager")
            model(**part, use_cache=False)

        def raises(call=call, message=message, name=name):
            with pytest.raises(ValueError, match=message) as caught:
                call()
            assert f"{name}ForCausalLM" in str(caught.value)

        seen = names(raises)
        assert not any(n.startswith(("deepsp::", "gloo:")) for n in seen), name


@pytest.mark.parametrize("ranks", [2])
def test_layers_that_mix_tokens_are_refused(ranks):
    on_ranks(ranks, _mixers)


class _Shift(nn.Module):
    """A little of the token in front."""

    def forward(self, x):
        return x + 1e-9 * F.pad(x[:, :-1], (0, 0, 1, 0))


class _Chosen(nn.Module):
    """Works on the half of all tokens that have the largest values."""

    def forward(self, x):
        x = x.nan_to_num(7.0)
        picked = x[..., 0].topk(x.size(1) // 2, dim=1).indices[..., None].expand(-1, -1, x.size(2))
        return x.scatter_add(1, picked, torch.ones_like(x))


class _Counted(nn.Module):
    """Knows where it is by counting: positions from 0 on every rank."""

    def forward(self, x):
        return x + torch.arange(x.size(1), device=x.device)[:, None]


class _Length(nn.Module):
    def forward(self, x):
        return x * x.size(1)


def _llama(attention="deepsp", **more):
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**GROUPED, **more}, use_cache=False)
    config._attn_implementation = attention
    return transformers.LlamaForCausalLM(config).double()


def _unknown():
    import transformers

    register()
    part, lens = deepsp.shard_batch({"input_ids": _ids()})
    whole_ids = _ids()

    def model_with(module, where="mlp"):
        model = _llama()
        layer = model.model.layers[1]
        setattr(layer, where, nn.Sequential(getattr(layer, where), module))
        return model

    for module, message in [
        (_Shift(), r"model.layers.1.mlp.1 \(_Shift\) of LlamaForCausalLM mixes tokens"),
        (_Chosen(), r"model.layers.1.mlp.1 \(_Chosen\) of LlamaForCausalLM mixes tokens"),
    ]:
        for dtype_ in (torch.float64, torch.bfloat16):
            with pytest.raises(ValueError, match=message):
                model_with(module).to(dtype_)(**part)
    # Each token alone, but by its place on this rank, or by how many there are.
    for module in (_Counted(), _Length()):
        model = _llama()
        model.model.layers[0].input_layernorm = module
        with pytest.raises(ValueError, match=r"self_attn .LlamaAttention. .* number or place"):
            model(**part)

    class Lost(transformers.LlamaForCausalLM):
        """Forgets positions on their way to the rotary embedding."""

        def forward(self, input_ids, position_ids=None, **kwargs):
            own = torch.arange(input_ids.size(1))[None]
            positions = self.model.rotary_emb.forward
            self.model.rotary_emb.forward = lambda x, position_ids: positions(x, own)
            try:
                return super().forward(input_ids, position_ids=position_ids, **kwargs)
            finally:
                del self.model.rotary_emb.forward

    model = Lost(_llama().config).double()
    with pytest.raises(ValueError, match="other queries or keys"):
        model(**part)
    # One layer with attention of its own, in a model that has ours.
    model = _llama()
    model.model.layers[1].self_attn.config = copy.deepcopy(model.config)
    model.model.layers[1].self_attn.config._attn_implementation_internal = "eager"
    with pytest.raises((ValueError, TypeError), match=r"layers.1.self_attn .LlamaAttention"):
        model(**part)
    # Outputs that aren't each token's.
    config = _llama().config
    config._attn_implementation, config.num_labels = "deepsp", 2
    pooled = transformers.LlamaForSequenceClassification(config).double()
    with pytest.raises(ValueError, match=r"logits of LlamaForSequenceClassification .* \[7, 2\]"):
        pooled(**part)
    bert = transformers.BertConfig(**SMALL)
    bert._attn_implementation = "deepsp"
    with pytest.raises(ValueError, match="pooler_output of BertModel"):
        transformers.BertModel(bert).double()(**part)
    assert transformers.BertModel(bert, add_pooling_layer=False).double()(**part)
    # A model that counts from another number on is right with its own positions.
    settings = transformers.RobertaConfig(**{**SMALL, "is_decoder": True})
    settings._attn_implementation = "deepsp"
    torch.manual_seed(0)
    model = transformers.RobertaForCausalLM(settings).double().eval()
    with pytest.raises(ValueError, match=r"by itself counts otherwise .* put the position_ids"):
        model(**part)
    reference = copy.deepcopy(model)
    reference.set_attn_implementation("sdpa")
    placed, _ = deepsp.shard_batch(
        {"input_ids": whole_ids, "position_ids": torch.arange(1, 14)[None]}
    )
    mine = reference(whole_ids).logits.split(lens, 1)[dist.get_rank()]
    torch.testing.assert_close(model(**placed).logits, mine, rtol=1e-9, atol=1e-9)
    # Nothing is refused for being new.
    model = model_with(nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU()).double())
    reference = copy.deepcopy(model)
    reference.set_attn_implementation("sdpa")
    mine = reference(whole_ids).logits.split(lens, 1)[dist.get_rank()]
    torch.testing.assert_close(model(**part).logits, mine, rtol=1e-9, atol=1e-9)


def test_modules_that_nobody_knows():
    on_ranks(2, _unknown)


# ------------------------------------------------------------------------- when it is checked


def _when():
    import transformers

    register()
    ids = _ids()
    part, _ = deepsp.shard_batch({"input_ids": ids})
    model = _llama(attention_dropout=0.1).train()
    model.model.norm.eval()
    model.model.rotary_emb.register_buffer("seen", torch.zeros(()))
    count = []

    def counted(module, args):
        module.seen += 1
        count.append(torch.is_grad_enabled())

    hook = model.model.rotary_emb.register_forward_pre_hook(counted)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    check(model)
    assert torch.equal(torch.rand(3), expected), "random numbers go on as before"
    assert count == [False] * 3 and model.model.rotary_emb.seen == 0
    assert model.training and not model.model.norm.training
    assert all(p.grad is None for p in model.parameters())
    model(**part)
    assert count == [False, False, False, True], "once checked, it isn't again"
    copy.deepcopy(model)(**part)
    assert len(count) == 5
    hook.remove()
    model.set_attn_implementation("sdpa")
    with pytest.raises(
        ValueError, match="attention of LlamaForCausalLM to be 'deepsp', got 'sdpa'"
    ):
        check(model)
    with pytest.raises(ValueError, match=r"expected model to be .*, got Linear"):
        check(nn.Linear(1, 1))
    with torch.device("meta"), pytest.raises(ValueError, match="have no data"):
        check(_llama())

    # Left on "sdpa": any model, given what shard_batch handed out, however it came there.
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
    }
    for alone in (model, transformers.FalconForCausalLM(transformers.FalconConfig(**sizes))):
        for given in (part, {n: x.clone() for n, x in part.items()}):
            with pytest.raises(ValueError, match=r"attention of .* to be 'deepsp', .*, got 'sdpa'"):
                alone(**given)
        with pytest.raises(ValueError, match="is called with the tokens"):
            alone(part["input_ids"])
        alone(ids)
        alone(**{n: x.roll(1) for n, x in part.items()})
    embeds, _ = deepsp.shard_batch({"inputs_embeds": model.get_input_embeddings()(ids).detach()})
    with pytest.raises(ValueError, match="is called with the tokens"):
        model(**embeds)
    # Under a compiler, too, what isn't ours is left alone.
    whole = torch.compile(model.eval(), backend="eager", fullgraph=True)
    torch.testing.assert_close(whole(ids).logits, model(ids).logits, rtol=1e-9, atol=1e-9)
    # Ours is checked in front of compiled code.
    torch._dynamo.reset()
    mixing = _llama()
    mixing.model.layers[1].mlp = nn.Sequential(mixing.model.layers[1].mlp, _Shift())
    with pytest.raises(ValueError, match="_Shift"):
        torch.compile(mixing, backend="eager")(**part)


def test_when_models_are_checked():
    on_ranks(2, _when)


def _calls():
    register()
    part, _ = deepsp.shard_batch({"input_ids": _ids()})
    model = _llama().train()
    for given, message in [
        ({"labels": part["input_ids"]}, "expected no labels in the call of LlamaForCausalLM"),
        ({"use_cache": True}, "use_cache to be False, got True: .*'sdpa'. for generate"),
        ({"output_router_logits": True}, "output_router_logits to be False, got True: aux_loss"),
        ({"logits_to_keep": 1}, "expected no logits_to_keep"),
        ({"pixel_values": torch.zeros(1, 3, 4, 4)}, r"expected no pixel_values .* \(1, 3, 4, 4\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            model(**part, **given)
    compiled = torch.compile(model, backend="eager")
    with pytest.raises(ValueError, match="expected no labels in the call of LlamaForCausalLM"):
        compiled(**part, labels=part["input_ids"])
    for cached in (True, False):
        with pytest.raises(ValueError, match=r"'sdpa'\) for generate"):
            model.generate(_ids(), max_new_tokens=2, use_cache=cached, do_sample=False)
    # Scaled by length only above its border: all ranks below it agree.
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    for kind, length in (("dynamic", 16), ("longrope", 16)):
        if kind == "longrope":
            rope = {
                "rope_type": kind,
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "short_factor": [1.0, 1.1, 1.2, 1.3],
                "long_factor": [2.0, 2.1, 2.2, 2.3],
            }
        settings = {"rope_parameters": rope, "max_position_embeddings": 16}
        scaled, reference = (_llama(a, **settings) for a in ("deepsp", "sdpa"))
        for total in (length, length + 1):
            part, lens = deepsp.shard_batch({"input_ids": _ids(total)})
            if total > length:
                with pytest.raises(ValueError, match=f"rope_type of LlamaAttention is '{kind}'"):
                    scaled(**part)
                continue
            mine = reference(_ids(total)).logits.split(lens, 1)[dist.get_rank()]
            torch.testing.assert_close(scaled(**part).logits, mine, rtol=1e-9, atol=1e-9)


def test_calls_that_would_be_wrong():
    on_ranks(2, _calls)


def _sharded_weights():
    """The dry run gathers weights as any forward does, on every rank; later steps are right."""
    from torch.distributed.fsdp import fully_shard

    register()
    ids = _ids()
    part, _ = deepsp.shard_batch({"input_ids": ids, "labels": ids})
    shifted = part.pop("shift_labels")
    reference = _llama("sdpa").train()
    logits = reference(ids).logits[:, :-1]
    F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
    expected = {n: p.grad for n, p in reference.named_parameters()}
    for how in ("deepsp", "fsdp", "checkpointed"):
        model = _llama().train()
        if how == "deepsp":
            deepsp.shard_parameters(model, dtype=torch.float64, reduce_dtype=torch.float64)
        if how == "fsdp":
            for layer in model.model.layers:
                fully_shard(layer)
            fully_shard(model)
        if how == "checkpointed":
            model.activation_checkpointing_enable({"use_reentrant": False})
        for _ in range(2):
            model.zero_grad()
            average = how == "fsdp"
            loss = deepsp.cross_entropy(model(**part).logits, shifted, average_gradients=average)
            loss.backward()
        if how == "checkpointed":
            deepsp.sync_gradients(model)
        for n, p in model.named_parameters():
            n = n.replace("parametrizations.", "").replace(".original", "")
            whole = p.grad.full_tensor() if how == "fsdp" else p.grad
            wanted = deepsp.shard(expected[n], 0) if how == "deepsp" else expected[n]
            torch.testing.assert_close(whole, wanted, rtol=1e-6, atol=1e-9, msg=f"{how}: {n}")


def test_weights_that_are_sharded():
    on_ranks(2, _sharded_weights)
