"""The proof catches each silent fault that doors once had, when its mend is taken out."""

import functools
import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from cases import VOCABULARY, Case, Rows, run
from diffusion import make_diffusion_model
from faults import put_back
from float64 import in_float64
from harness import on_ranks
from torch import nn
from trained import arguments, launched, tiny

import deepsp


def _case(door, family, batches, world=2, size=2, **options):
    return Case(1, door, family, batches, world, size, tuple(options.items()))


_EXPERTS = {"output_router_logits": True}
_CASES = {
    "weights of labels": (
        _case("Trainer", "mamba2", "packed"),
        r"another loss: .* in place of .*batch\['position_ids'\] \[1, \d+\]: positions",
    ),
    "positions of deals": (
        _case("Trainer", "gpt2", "late", mix_lengths=True),
        r"another loss: .*Likely: positions: they don't reach the model",
    ),
    "router logits with smoothing": (
        _case("Trainer", "mixtral", "rows", label_smoothing_factor=0.2, **_EXPERTS),
        r"another loss: .*Likely: .*aux loss",
    ),
    "balance of groups": (
        _case("Trainer", "mixtral", "rows", 4, **_EXPERTS),
        r"another loss: .*rows of your data were evaluated",
    ),
    "router logits of one rank": (
        _case("Trainer", "mixtral", "rows", metrics=True, **_EXPERTS),
        r"another result \['predictions'\]",
    ),
    "rows of streams": (
        _case("SFT", "qwen3", "stream"),
        r"another loss: .*rows of your data were evaluated",
    ),
}


def _refusal(function, fault):
    """Why the proof refuses a run; "": it doesn't."""
    try:
        with put_back(fault):
            function()
    except ValueError as error:
        return str(error)
    return ""


def _run(case):
    run(case, case.size, prove=True)


def _refused(world, function, fault, pattern):
    """Refused on every rank with the fault, and not without it."""
    for error in on_ranks(world, _refusal, function, fault, apart="doors"):
        assert "to be that of one process" in error, error
    assert any(re.search(pattern, x) for x in [error]), error
    assert on_ranks(world, _refusal, function, "", apart="doors") == [""] * world


@pytest.mark.parametrize("fault", _CASES)
def test_doors(fault):
    case, pattern = _CASES[fault]
    _refused(case.world, functools.partial(_run, case), fault, pattern)


# ---- a Trainer with a loss or a model of one's own


class _Counting(nn.Module):
    """Counts its tokens, as experts that are balanced without a loss do."""

    def __init__(self, inner, add):
        super().__init__()
        self.inner, self.add = inner, add
        self.register_buffer("load", torch.zeros(4))

    def forward(self, x):
        if self.training:
            counts = torch.bincount(x[..., 0].mul(99).long().flatten() % 4, minlength=4)
            self.load += self.add(counts)
        return self.inner(x)


def _trained(own_loss=None, add=None):
    from transformers import Trainer

    from deepsp.integrations.transformers import sequence_parallel

    class Own(Trainer):
        if own_loss is not None:
            compute_loss = own_loss

    in_float64()
    model = tiny("llama", torch.float64)
    if add is not None:
        model.model.layers[0].mlp = _Counting(model.model.layers[0].mlp, add)
    case = _case("Trainer", "llama", "masked")
    rows = [{"input_ids": x, "labels": x} for x in Rows(case, 8, 0).ids]
    with launched():
        args = arguments(max_steps=1, eval_strategy="no", per_device_train_batch_size=4)
        sequence_parallel(Own)(
            model, args, train_dataset=rows, sequence_parallel_size=dist.get_world_size()
        ).train()


def _noisy_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
    """Weighs each row by a random number."""
    outputs = model(input_ids=inputs["input_ids"])
    logits, labels = outputs.logits[:, :-1], inputs["labels"][:, 1:]
    each = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    loss = (each.mean(1) * torch.rand(len(each))).sum()
    return (loss, outputs) if return_outputs else loss


def test_noise_in_a_loss():
    function = functools.partial(_trained, _noisy_loss)
    _refused(2, function, "noise of ranks", r"another loss: ")


def _alone(counts):
    return counts


def test_buffers():
    right, wrong = (functools.partial(_trained, add=x) for x in (deepsp.sum_over_ranks, _alone))
    assert on_ranks(3, _refusal, right, "", apart="doors") == [""] * 3
    errors = on_ranks(2, _refusal, wrong, "", apart="doors")
    assert all("mlp.load" in x and "deepsp.sum_over_ranks" in x for x in errors), errors


# ---- loops of one's own


def _accelerated():
    """A loss of one's own under accelerate, whose step is proven."""
    from accelerate import Accelerator

    from deepsp.integrations.accelerate import prepare

    with launched():
        accelerator, model = Accelerator(cpu=True), tiny("llama", torch.float64)
        rows = [{"input_ids": x, "labels": x} for x in Rows(_case("", "llama", "rows"), 4, 0).ids]
        loader = torch.utils.data.DataLoader(rows, batch_size=2)
        model, loader = prepare(accelerator, model, loader, sequence_parallel_size=2)

        def step(batch):
            logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
            loss = deepsp.cross_entropy(logits, batch["shift_labels"], accelerator.sequence_group)
            accelerator.backward(loss)
            return loss

        deepsp.prove(step, next(iter(loader)), accelerator.sequence_group)


def test_loss_under_accelerate():
    pattern = r"another gradient of .*Likely: scale: it is divided by the number of ranks"
    _refused(2, _accelerated, "gradients of losses", pattern)


def _turning(value, log_decay, initial_state=None, output_final_state=False):
    """A diagonal recurrence with complex states, as in LRU and S4D."""
    state = torch.zeros_like(value[:, 0, :, None]) if initial_state is None else initial_state
    out = []
    for t in range(value.size(1)):
        state = state * log_decay[:, t].exp()[..., None, None] + value[:, t, :, None]
        out.append(state.squeeze(2))
    return torch.stack(out, 1), state


class _Turning(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, 12)
        self.turn = deepsp.DistributedRecurrence(_turning, state="heads")
        self.head = nn.Linear(6, VOCABULARY)

    def forward(self, ids, lens):
        value = torch.view_as_complex(self.embed(ids).unflatten(-1, (2, 3, 2)))
        decay = torch.complex(-value.real.abs().mean(-1), value.imag.mean(-1))
        return self.head(self.turn(value=value, log_decay=decay, seq_lens=lens).real.flatten(2))


def _recurrent():
    model, ids = _Turning().double(), torch.arange(34).view(2, 17)

    def step(batch):
        local, lens = deepsp.shard_batch(batch)
        logits = model(local["input_ids"], lens)
        loss = deepsp.cross_entropy(logits, local["shift_labels"])
        loss.backward()
        deepsp.sync_gradients(model)
        return loss

    deepsp.prove(step, {"input_ids": ids, "labels": ids})


def test_complex_states():
    _refused(2, _recurrent, "imaginary parts", r"another loss: ")


def _adapted():
    from peft import LoraConfig, get_peft_model

    from deepsp.integrations.transformers import register, shard_experts

    register()
    experts = {"num_local_experts": 4, "attn_implementation": "deepsp"}
    model = tiny("mixtral", num_experts_per_tok=2, **experts)
    model.set_attn_implementation("deepsp")
    shard_experts(model)
    torch.manual_seed(1)
    lora = LoraConfig(
        r=2, target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj"]
    )
    model = get_peft_model(model, lora)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(0, 0.1, generator=torch.Generator().manual_seed(2))

    def step(batch):
        local, _ = deepsp.shard_batch(batch)
        loss = model(**local).loss
        loss.backward()
        deepsp.sync_gradients(model)
        return loss

    ids = torch.arange(3, 37).view(2, 17)
    deepsp.prove(step, {"input_ids": ids, "labels": ids})


def test_adapters_of_dealt_experts():
    errors = on_ranks(2, _refusal, _adapted, "adapters of dealt experts", apart="float32")
    assert all("to be that of one process" in x for x in errors), errors
    errors = on_ranks(2, _refusal, _adapted, "", apart="float32")
    assert all("no adapters on the experts" in x for x in errors), errors


def _processors():
    from diffusers.models.transformers import transformer_flux2 as flux2

    from deepsp.integrations.diffusers import enable

    model, inputs = make_diffusion_model("Flux 2")
    for block in model.transformer_blocks:
        block.attn.set_processor(flux2.Flux2KVAttnProcessor())
    for block in model.single_transformer_blocks:
        block.attn.set_processor(flux2.Flux2KVParallelSelfAttnProcessor())
    enable(model)

    def step(batch):
        how = {"kv_cache_mode": "extract", "num_ref_tokens": 9, "return_dict": False}
        loss = model(**batch, **how)[0].square().mean()
        loss.backward()
        deepsp.sync_gradients(model)
        return loss

    deepsp.prove(step, inputs)


def test_any_processor():
    errors = on_ranks(2, _refusal, _processors, "any processor", apart="doors")
    assert all("to be that of one process" in x for x in errors), errors
