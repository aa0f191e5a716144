"""The loss of transformers' causal language models without logits, against the same model with
"sdpa" and all its logits in one process, in float64."""

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import on_ranks
from models import SMALL
from torch import nn

import deepsp
from deepsp.integrations.transformers import register

TIGHT = {"rtol": 1e-9, "atol": 1e-11}
FAMILIES = {
    "Llama": {},
    "Qwen3": {"tie_word_embeddings": True},
    # Attention's own softcap isn't supported by attn_implementation="deepsp".
    "Gemma2": {"final_logit_softcapping": 0.7, "attn_logit_softcapping": None},
    "Cohere": {"logit_scale": 0.4},
    "Granite": {"logits_scaling": 3.0, "tie_word_embeddings": True},
    "GraniteMoe": {"logits_scaling": 0.5, "num_local_experts": 2, "num_experts_per_tok": 1},
    "Phi": {},  # its head has a bias
}


def _make(family, attention="sdpa", **options):
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SMALL, **FAMILIES[family] | options)
    # Gemma 2 says that it has no "sdpa", because of attention's softcap.
    eager = family == "Gemma2" and attention == "sdpa"
    config._attn_implementation = "eager" if eager else attention
    config._experts_implementation = "eager"
    model = getattr(transformers, f"{family}ForCausalLM")(config).double()
    for module in list(model.modules()):  # theirs are computed in float32
        for name, inner in module.named_children():
            if type(inner).__name__.endswith("RMSNorm") and "Gemma" not in type(inner).__name__:
                eps = getattr(inner, "variance_epsilon", 1e-6)
                norm = nn.RMSNorm(inner.weight.numel(), eps, dtype=torch.float64)
                setattr(module, name, norm)
    with torch.no_grad():
        for p in model.parameters():  # as drawn, logits are all but equal
            if p.dim() > 1:
                p.mul_(3)
            if p.dim() == 1:
                p.add_(0.1 * torch.randn_like(p))
    return model.train()


def _batch(length=13):
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(0, SMALL["vocab_size"], (2, length), generator=generator)
    labels = ids.clone()
    labels[0, 3:6] = -100
    return {"input_ids": ids, "labels": labels}


def _expected(model, batch, smoothing=0.0, z_loss=0.0, reduction="mean"):
    """By all logits of the model, in one process."""
    logits = model(batch["input_ids"], use_cache=False).logits[:, :-1]
    labels = batch["labels"][:, 1:]
    each = F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="none", label_smoothing=smoothing
    ).view(labels.shape)
    loss = (each + z_loss * logits.logsumexp(-1) ** 2)[labels != -100].sum()
    if reduction == "mean":
        loss = loss / (labels != -100).sum()
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters()}


def _close(model, loss, expected, factor=1, **tolerance):
    loss.backward()
    if factor == 1:
        deepsp.sync_gradients(model)
    else:  # which refuses gradients that are scaled for wrappers
        for p in model.parameters():
            dist.all_reduce(p.grad)
    torch.testing.assert_close(loss.detach(), expected[0], **tolerance or TIGHT)
    gradients = {n: p.grad for n, p in model.named_parameters()}
    assert gradients.keys() == expected[1].keys()
    for name, grad in gradients.items():
        full = expected[1][name]
        assert (grad is None) == (full is None), name
        if grad is not None:
            torch.testing.assert_close(grad, full * factor, **tolerance or TIGHT, msg=name)


def _loss(family):
    register()
    batch = _batch()
    # These compute rotary embeddings, norms or logits in float32.
    low = {"rtol": 2e-5, "atol": 2e-6}
    tolerance = low if family in ("Gemma2", "Cohere", "Granite", "GraniteMoe") else TIGHT
    for options in ({}, {"label_smoothing": 0.1, "z_loss": 1e-2, "reduction": "sum"}):
        terms = {n.replace("label_", ""): x for n, x in options.items()}
        expected = _expected(_make(family), batch, **terms)
        part, _ = deepsp.shard_batch(batch)
        for average in (False, True):
            model = _make(family, "deepsp")
            loss = deepsp.causal_lm_loss(
                model, part, chunk_tokens=4, average_gradients=average, **options
            )
            assert "shift_labels" in part, "the batch is left alone"
            factor = dist.get_world_size() if average else 1
            _close(model, loss, expected, factor, **tolerance)
            assert "forward" not in vars(model.get_output_embeddings())


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients(ranks, family):
    on_ranks(ranks, _loss, family, apart="transformers")


def _in_use():
    register()
    rank, size = dist.get_rank(), dist.get_world_size()
    batch = _batch()
    part, _ = deepsp.shard_batch(batch)

    # Tied or not, frozen or not.
    for tied in (False, True):
        for frozen in (False, True):
            reference, model = (
                _make("Llama", attention, tie_word_embeddings=tied)
                for attention in ("sdpa", "deepsp")
            )
            for m in (reference, model):
                m.get_output_embeddings().weight.requires_grad_(not frozen)
            expected = _expected(reference, batch)
            names = []
            with torch.profiler.profile(record_shapes=True) as profile:
                loss = deepsp.causal_lm_loss(model, part)
            names = [e.input_shapes for e in profile.events() if e.name == "aten::addmm_"]
            assert ([64, 48] in [s[0] for s in names]) != frozen, "the head's gradient"
            _close(model, loss, expected)

    # Twice: what follows the head is tried out once, and again where the configuration is another.
    model = _make("Gemma2", "deepsp")
    a = deepsp.causal_lm_loss(model, part)
    assert torch.equal(a, deepsp.causal_lm_loss(model, part))
    model.config.final_logit_softcapping = 0.1
    assert not torch.isclose(a, deepsp.causal_lm_loss(model, part))

    # Micro-batches: the mean divides by the valid tokens of all.
    model, reference = _make("Llama", "deepsp"), _make("Llama")
    second = {n: x.flip(0).roll(2, 1) for n, x in batch.items()}
    valid = sum((b["labels"][:, 1:] != -100).sum() for b in (batch, second))
    for b in (batch, second):
        _expected(reference, b, reduction="sum")
    expected = {n: p.grad / valid for n, p in reference.named_parameters()}
    for number, b in ((int(valid), batch), (valid, second)):
        mine, _ = deepsp.shard_batch(b)
        deepsp.causal_lm_loss(model, mine, num_valid_tokens=number).backward()
    deepsp.sync_gradients(model)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], **TIGHT, msg=name)

    # Weights of tokens; without gradients; in evaluation.
    weights = torch.arange(26.0).view(2, 13).tensor_split(size, 1)[rank]
    logits = model(**{n: x for n, x in part.items() if n != "shift_labels"}, use_cache=False).logits
    twin = deepsp.cross_entropy(logits, part["shift_labels"], token_weights=weights)
    with torch.no_grad():
        loss = deepsp.causal_lm_loss(model.eval(), part, token_weights=weights)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, twin, **TIGHT)

    # With gradient checkpointing, and under autocast.
    reference, model = _make("Llama"), _make("Llama", "deepsp")
    model.activation_checkpointing_enable()
    _close(model, deepsp.causal_lm_loss(model, part), _expected(reference, batch))
    model = _make("Llama", "deepsp").float()
    with torch.autocast("cpu", torch.bfloat16):
        loss = deepsp.causal_lm_loss(model, part)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(
        loss.double(), _expected(_make("Llama"), batch)[0], rtol=3e-2, atol=0
    )

    # bfloat16 throughout: what follows the head is still found.
    model = _make("Granite", "deepsp").bfloat16()
    loss = deepsp.causal_lm_loss(model, part)
    torch.testing.assert_close(
        loss.double(), _expected(_make("Granite"), batch)[0], rtol=3e-2, atol=0
    )


@pytest.mark.parametrize("ranks", [1, 2])
def test_in_use(ranks):
    on_ranks(ranks, _in_use, apart="transformers")


def _compiled():
    """In a compiled model, and in one that compiles itself."""
    register()
    batch = _batch()
    part, _ = deepsp.shard_batch(batch)
    expected = _expected(_make("Llama"), batch)
    model = _make("Llama", "deepsp")
    compiled = torch.compile(model, backend="aot_eager")
    _close(model, deepsp.causal_lm_loss(compiled, part), expected)
    model = _make("Llama", "deepsp")
    model.compile(backend="aot_eager")
    _close(model, deepsp.causal_lm_loss(model, part), expected)


def test_compiled():
    on_ranks(2, _compiled, apart="transformers")


def _wrapped():
    """DDP, FSDP, sharded parameters and PEFT around the model."""
    import peft
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    register()
    size = dist.get_world_size()
    batch = _batch()
    part, _ = deepsp.shard_batch(batch)
    expected = _expected(_make("Llama"), batch)

    for unused in (False, True):
        model = _make("Llama", "deepsp")
        ddp = DistributedDataParallel(model, find_unused_parameters=unused)
        loss = deepsp.causal_lm_loss(ddp, part, average_gradients=True)
        loss.backward()
        torch.testing.assert_close(loss.detach(), expected[0], **TIGHT)
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.grad, expected[1][name], **TIGHT, msg=name)

    warnings.filterwarnings("error", message=".*returned a view")
    for layers in ("model", "layers", "base", "head"):
        model = _make("Llama", "deepsp")
        if layers != "model":
            for layer in model.model.layers:
                fully_shard(layer)
        if layers == "base":
            fully_shard(model.model)
        if layers == "head":
            fully_shard(model.lm_head)
        fully_shard(model)
        for _ in range(2):
            model.zero_grad()
            loss = deepsp.causal_lm_loss(model, part, average_gradients=True)
            loss.backward()
            torch.testing.assert_close(loss.detach(), expected[0], **TIGHT)
            for name, p in model.named_parameters():
                torch.testing.assert_close(
                    p.grad.full_tensor(), expected[1][name], **TIGHT, msg=f"{layers} {name}"
                )

    for tied in (False, True):
        whole = _expected(_make("Llama", tie_word_embeddings=tied), batch)
        model = _make("Llama", "deepsp", tie_word_embeddings=tied)
        deepsp.shard_parameters(model, dtype=torch.float64, reduce_dtype=torch.float64)
        for _ in range(2):
            model.zero_grad()
            loss = deepsp.causal_lm_loss(model, part)
            torch.testing.assert_close(loss.detach(), whole[0], **TIGHT)
            loss.backward()
            gradients = {id(p): p.grad for p in model.parameters()}
            assert None not in gradients.values()
            total = torch.stack([g.square().sum() for g in gradients.values()]).sum()
            dist.all_reduce(total)
            full = sum(g.square().sum() for g in whole[1].values())
            torch.testing.assert_close(total, full, **TIGHT)

    adapters = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    full = []
    for attention in ("sdpa", "deepsp"):
        torch.manual_seed(1)
        model = peft.get_peft_model(_make("Llama", attention), adapters).double()
        if attention == "sdpa":
            full = _expected(model, batch)
        else:
            _close(model, deepsp.causal_lm_loss(model, part), full)
    assert size == 1 or any("lora" in n for n, g in full[1].items() if g is not None)


@pytest.mark.parametrize("ranks", [1, 2])
def test_wrapped(ranks):
    on_ranks(ranks, _wrapped, apart="transformers")


def _refused():
    import peft
    import transformers
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    register()
    batch = _batch()
    part, _ = deepsp.shard_batch(batch)

    def refused(model, message, batch=part, **kwargs):
        with pytest.raises(ValueError, match=message):
            deepsp.causal_lm_loss(model, batch, **kwargs)
        if isinstance(model, transformers.PreTrainedModel) and model.get_output_embeddings():
            assert "forward" not in vars(model.get_output_embeddings())

    model = _make("Llama", "deepsp")
    refused(model, "shift_labels and no labels, .* got .*'labels'", batch=batch)
    refused(model, "to be what deepsp.shard_batch returned first, .* got tuple", batch=(part, [3]))
    without = {n: x for n, x in part.items() if n != "shift_labels"}
    refused(model, "shift_labels and no labels", batch=without)
    refused(model, "num_valid_tokens with reduction='mean'", reduction="sum", num_valid_tokens=3)
    refused(model, "num_valid_tokens > 0, got 0", num_valid_tokens=0)
    refused(model, "reduction to be 'mean' or 'sum', got 'none'", reduction="none")
    refused(nn.Linear(2, 2), "expected model to be one of transformers, got Linear")
    refused(model.model, "LlamaModel to have a head, .*, got None")
    if dist.get_world_size() > 1:
        alone = _make("Llama")
        for model in (alone, torch.compile(alone, backend="deepsp")):  # which takes full batches
            refused(
                model, "attention of LlamaForCausalLM to be 'deepsp', .* gave this rank, got 'sdpa'"
            )

    lora = peft.LoraConfig(target_modules=["lm_head"])
    refused(
        peft.get_peft_model(_make("Llama", "deepsp"), lora),
        r"head of .* nn.Linear, got peft\.\S+\.Linear: ",
    )
    saved = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])
    refused(
        peft.get_peft_model(_make("Llama", "deepsp"), saved),
        "head of LlamaForCausalLM .* nn.Linear, got peft.*ModulesToSaveWrapper",
    )
    model = _make("Llama", "deepsp")
    model.lm_head.forward = lambda x: x
    with pytest.raises(ValueError, match="got one whose forward was replaced"):
        deepsp.causal_lm_loss(model, part)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = _make("Llama", "deepsp")
    deepsp.causal_lm_loss(model, part)  # checked with the weight that it was made with
    model.lm_head.weight = nn.Parameter(distribute_tensor(model.lm_head.weight.detach(), mesh))
    refused(model, "head of LlamaForCausalLM to have its full weight in forward, got a DTensor")
    moe = _make("GraniteMoe", "deepsp", output_router_logits=True)
    refused(moe, "output_router_logits of GraniteMoeForCausalLM to be False, got True")

    # What a model does to its logits and doesn't say.
    class Odd(transformers.LlamaForCausalLM):
        def forward(self, input_ids=None, position_ids=None, **kwargs):
            output = super().forward(input_ids, position_ids=position_ids, **kwargs)
            output.logits = self.odd(output.logits)
            return output

    def masked(logits):
        logits = logits.clone()
        logits[..., 60:] = -1e4
        return logits

    for odd in (lambda x: 1.5 * x, lambda x: x + 1, lambda x: 70 * (x / 70).tanh(), masked):
        model = _make("Llama", "deepsp")
        model.__class__, model.odd = Odd, odd
        refused(model, "Odd changes its logits in a way that isn't known")
    model.odd = lambda x: x[:, -1:]
    refused(model, r"Odd to return what its head made of .*, got 1 calls of the head, and logits")
    model.odd = lambda x: x.nothing
    refused(model, "Odd couldn't be run with given .*: AttributeError: ")
    # A hook counts, too.
    model.odd = lambda x: x
    deepsp.causal_lm_loss(model, part)
    del model._deepsp_after_head
    model.lm_head.register_forward_hook(lambda module, args, output: 2 * output)
    refused(model, "Odd changes its logits")


@pytest.mark.parametrize("ranks", [1, 2])
def test_refused(ranks):
    on_ranks(ranks, _refused, apart="transformers")


def _probe_runs_no_layer():
    """It neither runs a layer, nor launches a collective, nor changes what is drawn."""
    register()
    model = _make("Llama", "deepsp")
    part, _ = deepsp.shard_batch(_batch())
    deepsp.integrations.transformers.check(model)
    called = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda *args: called.append(args[1][0].shape[1]))
    state = torch.get_rng_state()
    deepsp.causal_lm_loss(model, part)
    assert torch.equal(state, torch.get_rng_state())
    assert called == [part["input_ids"].size(1)] * 2


def test_what_follows_the_head_is_tried_without_layers():
    on_ranks(2, _probe_runs_no_layer, apart="transformers")


def test_deepsp_alone_imports_no_transformers():
    import subprocess
    import sys

    code = "import sys, deepsp; deepsp.causal_lm_loss; sys.exit('transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
