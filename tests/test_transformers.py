"""transformers' own models through the compile pass, against one process.

They compute norms and losses in float32 whatever the dtype, so float64 models agree to 1e-6."""

import copy

import pytest
import torch
import torch.nn.functional as F
from harness import on_ranks
from lockstep import lockstep, static_lengths

import deepsp

VOCAB = 64
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "head_dim": 8,
}


def _make(name):
    import transformers

    if name == "GPT2":
        sizes = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
        off = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
        tokens = {"bos_token_id": 1, "eos_token_id": 2}
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **off, **tokens))
    else:
        window = {"sliding_window": 5} if name == "Mistral" else {}
        config = getattr(transformers, f"{name}Config")(**SMALL, **window)
        model = getattr(transformers, f"{name}ForCausalLM")(config)
    # GPT-2 doesn't say which loss it has and warns, which Dynamo can't capture.
    model.loss_type = "ForCausalLM"
    model.config.use_cache = False
    return model.double()


def _compared(name, given, length, ranks=None, checkpointed=False):
    torch._dynamo.reset()
    torch.manual_seed(0)
    reference = _make(name)
    model = copy.deepcopy(reference)
    if checkpointed:
        model.activation_checkpointing_enable()
    if ranks is None:
        options = {"inner": "aot_eager"}
        compiled = torch.compile(model, backend="deepsp", fullgraph=True, options=options)
    else:
        compiled = lockstep(model, ranks)
    ids = torch.randint(0, VOCAB, (2, length))
    labels = ids.clone()
    labels[:, : length // 2 + 1] = -100
    mask = torch.ones(2, length, dtype=torch.int64)
    mask[0, -3:] = 0
    positions = torch.arange(length).expand(2, -1).contiguous()
    known = {"labels": labels, "attention_mask": mask, "position_ids": positions}
    known = {name: tensor for name, tensor in known.items() if name in given}

    def loss(out):
        if "labels" in given:
            return out.loss
        return F.cross_entropy(out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    expected = loss(reference(ids, **known))
    expected.backward()
    deepsp.prepare_inputs(ids, **known)
    mine = loss(compiled(ids, **known))
    mine.backward()
    torch.testing.assert_close(mine, expected, rtol=1e-6, atol=0)
    for (n, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        scale = q.grad.abs().max().item()
        torch.testing.assert_close(
            p.grad, q.grad, rtol=0, atol=1e-6 * scale, msg=lambda m, n=n: f"{n}: {m}"
        )


@pytest.mark.parametrize(
    "name", ["Llama", "Qwen3", "Mistral", "Gemma", pytest.param("GPT2", marks=pytest.mark.nightly)]
)
def test_models(name):
    if name in ("Llama", "GPT2"):
        _compared(name, "labels attention_mask", 13, 2)
    with static_lengths():
        _compared(name, "labels attention_mask", 13, 3)
        _compared(name, "position_ids", 13, 3)


@pytest.mark.parametrize("name", ["Mistral", "GPT2"])
def test_three_ranks(name):
    with static_lengths():
        _compared(name, "labels attention_mask position_ids", 14, 3)


def test_checkpointed():
    on_ranks(2, _compared, "Llama", "labels", 13, None, True)
