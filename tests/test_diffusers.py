"""Diffusion transformers of diffusers over sharded tokens: the output and every gradient of one
process that has them all, in float64."""

import pytest
import torch
import torch.distributed as dist
from diffusion import F64, MODELS, draw_normal, make_diffusion_model
from harness import on_ranks
from torch.nn.parallel import DistributedDataParallel

import deepsp

# Parts of these compute in float32.
NEAR = {"Wan": 1e-5, "LTX": 1e-5, "LTX, times": 1e-5, "LTX 2": 1e-5, "LTX 2, split": 1e-5}


def _step(model, inputs):
    """The output, and the gradients of a loss that weighs its elements differently."""
    inputs = {n: x.clone() if isinstance(x, torch.Tensor) else x for n, x in inputs.items()}
    inputs["hidden_states"].requires_grad_()
    out = torch.cat([x.flatten() for x in model(**inputs, return_dict=False)])
    weights = torch.linspace(0.5, 1.5, out.numel(), dtype=out.dtype)
    (out * weights).square().mean().backward()
    return out.detach(), inputs["hidden_states"].grad


def _compare(name, model, inputs, expected, wanted, of_input, average=1):
    near = NEAR.get(name, 1e-10)
    model.zero_grad()
    out, gradient = _step(model, inputs)
    torch.testing.assert_close(out, expected, rtol=near, atol=near)
    deepsp.sync_gradients(model)
    dist.all_reduce(gradient)
    torch.testing.assert_close(
        gradient / average, of_input, rtol=0, atol=near * of_input.abs().max()
    )
    for n, p in model.named_parameters():
        if wanted[n] is not None:
            scale = wanted[n].abs().max().item()
            error = (p.grad / average - wanted[n]).abs().max().item()
            assert error <= near * scale + 1e-14, (n, error, scale)


def _equals_one_process(name):
    from deepsp.integrations.diffusers import disable, enable

    model, inputs = make_diffusion_model(name)
    before = dict(vars(model))
    expected, of_input = _step(model, inputs)
    wanted = {
        n: p.grad.clone() if p.grad is not None else None for n, p in model.named_parameters()
    }
    enable(model)
    _compare(name, model, inputs, expected, wanted, of_input)
    model.enable_gradient_checkpointing()
    _compare(name, model, inputs, expected, wanted, of_input)
    disable(model)
    assert vars(model).keys() == before.keys()
    torch.testing.assert_close(_step(model, inputs)[0], expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("ranks", "name"),
    [(ranks, name) for name in MODELS for ranks in ((3,) if "," in name else (2, 3))],
)
def test_equals_one_process(ranks, name):
    on_ranks(ranks, _equals_one_process, name)


def _in_use():
    """DDP over the sequence, checkpoints of two lengths in one backward, and what is refused."""
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    from deepsp.integrations.diffusers import disable, enable

    table = dict(_AttentionBackendRegistry._backends)
    model, inputs = make_diffusion_model("Flux")
    other = make_diffusion_model("Flux", text=4)[1]
    expected = [_step(model, x)[0] for x in (inputs, other)]
    wanted = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    enable(model, average_gradients=True)
    model.enable_gradient_checkpointing()
    ddp = DistributedDataParallel(model)
    outs = []
    with ddp.no_sync():
        outs = [ddp(**x, return_dict=False)[0] for x in (inputs, other)]
    for out, want in zip(outs, expected, strict=True):
        torch.testing.assert_close(out.detach().flatten(), want, rtol=1e-10, atol=1e-10)
    weights = [torch.linspace(0.5, 1.5, x.numel(), dtype=F64).view_as(x) for x in outs]
    sum((x * w).square().mean() for x, w in zip(outs, weights, strict=True)).backward()
    size = dist.get_world_size()
    for p, want in zip(model.parameters(), wanted, strict=True):
        dist.all_reduce(p.grad)
        torch.testing.assert_close(p.grad / size, want, rtol=0, atol=1e-10 * want.abs().max())

    with pytest.raises(ValueError, match="that isn't parallel yet"):
        enable(model)
    wrong = {**inputs, "hidden_states": inputs["hidden_states"] + dist.get_rank()}
    with pytest.raises(ValueError, match=r"expected hidden_states, .*; draw noise and"):
        model(**wrong)
    disable(model)
    with pytest.raises(ValueError, match="expected a model that was enabled"):
        disable(model)
    assert dict(_AttentionBackendRegistry._backends) == table
    assert "deepsp" not in [x.value for x in table]
    assert "deepsp" not in [x.value for x in AttentionBackendName]
    with pytest.raises(ValueError, match=r"expected a model of diffusers among Flux.*, got Linear"):
        enable(torch.nn.Linear(2, 2))
    model.transformer_blocks[0].ff.net[1].p = 0.1
    with pytest.raises(ValueError, match=r"without dropout, .* p=0.1 in transformer_blocks.0.ff"):
        enable(model)


def test_in_use():
    on_ranks(2, _in_use)


def _changed():
    """Copies, backends, processors and images after enable, and a step that is proven."""
    import copy

    from diffusers.models.transformers import transformer_flux2

    from deepsp.integrations.diffusers import disable, enable

    model, inputs = make_diffusion_model("Flux")
    expected, _ = _step(model, inputs)
    close = {"rtol": 1e-10, "atol": 1e-10}
    enable(model)
    other = copy.deepcopy(model)
    for left in (other, model):  # disabling one leaves the other as it was
        torch.testing.assert_close(_step(left, inputs)[0], expected, **close)
        disable(other if left is other else model)
    torch.testing.assert_close(_step(other, inputs)[0], expected, **close)

    enable(model)
    model.set_attention_backend("native")
    torch.testing.assert_close(_step(model, inputs)[0], expected, **close)
    with pytest.raises(ValueError, match=r"core to be one of sdpa, .*, got 'x'"):
        model.set_attention_backend("x")
    model.reset_attention_backend()

    def step(batch, syncs=True):
        model.zero_grad()
        out = model(**batch, return_dict=False)[0]
        loss = out.square().mean()
        loss.backward()
        if syncs:
            deepsp.sync_gradients(model)
        return loss

    deepsp.prove(step, inputs)
    with pytest.raises(ValueError, match=r"another gradient of .*sync_gradients is missing"):
        deepsp.prove(lambda batch: step(batch, syncs=False), inputs)
    few = {**inputs, "hidden_states": draw_normal(2, 1, 4), "img_ids": draw_normal(1, 3)}
    with pytest.raises(ValueError, match=r"image token for each of 2 ranks in Flux.*larger images"):
        model(**few)
    attention = model.transformer_blocks[0].attn
    enabled, attention.processor._attention_backend = attention.processor._attention_backend, None
    with pytest.raises(ValueError, match=r"with None, which would attend to a rank's own tokens"):
        model(**inputs)
    attention.processor._attention_backend = enabled
    attention.set_processor(type(attention.processor)())
    with pytest.raises(ValueError, match=r"processors that Flux.* had when .*call disable before"):
        model(**inputs)
    disable(model)
    two = make_diffusion_model("Flux 2")[0]
    two.transformer_blocks[0].attn.set_processor(transformer_flux2.Flux2KVAttnProcessor())
    with pytest.raises(ValueError, match=r"got a Flux2KVAttnProcessor in Flux2.*leave adapters, c"):
        enable(two)


def test_changed():
    on_ranks(2, _changed)


def _by_other_cores(name):
    """diffusers' own backends compute attention."""
    from deepsp.integrations.diffusers import disable, enable

    model, inputs = make_diffusion_model(name)
    expected, of_input = _step(model, inputs)
    wanted = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    for core in ("native", "_native_math"):
        enable(model, core=core, chunks=2)
        _compare(name, model, inputs, expected, wanted, of_input)
        disable(model)
    with pytest.raises(ValueError, match=r"core to be one of sdpa, .*native.*, got 'x'"):
        enable(model, core="x")
    assert not hasattr(model, "_deepsp_diffusers")


@pytest.mark.parametrize("name", ["QwenImage", "SD3"])
def test_other_cores(name):
    on_ranks(2, _by_other_cores, name)


def _compiled(name):
    """torch.compile breaks the graph where ranks exchange lengths and tensors."""
    from deepsp.integrations.diffusers import enable

    torch._dynamo.reset()
    model, inputs = make_diffusion_model(name)
    expected, of_input = _step(model, inputs)
    wanted = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    enable(model)
    model.compile(backend="aot_eager")
    _compare(name, model, inputs, expected, wanted, of_input)


@pytest.mark.nightly  # the compile pass has a test of its own
@pytest.mark.parametrize("name", ["Flux", "SD3"])
def test_compiled(name):
    on_ranks(2, _compiled, name)


def _in_bfloat16(name):
    """As far from float64 as one process is."""
    from deepsp.integrations.diffusers import enable

    model, inputs = make_diffusion_model(name)
    exact, _ = _step(model, inputs)
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    half = {
        n: x.bfloat16() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for n, x in inputs.items()
    }
    model.zero_grad()
    model.bfloat16()

    def errors(sync):
        out, _ = _step(model, half)
        if sync:
            deepsp.sync_gradients(model)
        found = [p.grad.double() for p in model.parameters() if p.grad is not None]
        of_gradients = [(x - y).norm() for x, y in zip(found, gradients, strict=True)]
        model.zero_grad()
        return (out.double() - exact).norm(), torch.stack(of_gradients).norm()

    alone = errors(False)
    enable(model)
    for mine, other in zip(errors(True), alone, strict=True):
        assert mine < 1.2 * other, (mine, other)


@pytest.mark.parametrize("name", ["Flux", "Wan", "SD3"])
def test_bfloat16(name):
    on_ranks(2, _in_bfloat16, name)


def _by_the_pass(name, marked):
    """The compile pass: image and text tokens are marked, and concatenated in the model."""
    torch._dynamo.reset()
    model, inputs = make_diffusion_model(name)
    expected, _ = _step(model, inputs)
    wanted = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    options = {"inner": "aot_eager"}
    compiled = torch.compile(model, backend="deepsp", fullgraph=True, options=options)
    inputs = {n: x.clone() if isinstance(x, torch.Tensor) else x for n, x in inputs.items()}
    for n, dim in marked.items():
        deepsp.prepare_inputs({n: inputs[n]}, seq_dim=dim)
    out = compiled(**inputs, return_dict=False)[0].flatten()
    weights = torch.linspace(0.5, 1.5, out.numel(), dtype=F64)
    (out * weights).square().mean().backward()
    near = NEAR.get(name, 1e-10)
    torch.testing.assert_close(out, expected, rtol=near, atol=near)
    for n, p in model.named_parameters():
        if wanted[n] is not None:
            scale = wanted[n].abs().max().item()
            assert (p.grad - wanted[n]).abs().max().item() <= near * scale + 1e-14, n


@pytest.mark.parametrize(
    ("name", "marked"),
    [
        ("Flux", {"hidden_states": 1, "encoder_hidden_states": 1}),
        *(
            pytest.param(name, marked, marks=pytest.mark.nightly)
            for name, marked in (
                ("SD3", {"hidden_states": 2, "encoder_hidden_states": 1}),
                ("Flux", {"hidden_states": 1}),
                ("QwenImage", {"hidden_states": 1, "encoder_hidden_states": 1}),
            )
        ),
    ],
)
def test_the_compile_pass(name, marked):
    on_ranks(3, _by_the_pass, name, marked)


class _Joint(torch.nn.Module):
    """Attention over two concatenated sequences, and what becomes of its tokens."""

    def __init__(self, use):
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        self.use = use

    def forward(self, a, b):
        x = torch.cat([self.first(a), self.second(b)], 1)
        return _USES[self.use](x, a.size(1))


def _attended(x, **kwargs):
    heads = x.unflatten(-1, (2, 4)).transpose(1, 2)
    out = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, **kwargs)
    return out.transpose(1, 2).flatten(2)


_USES = {
    "whole": lambda x, n: _attended(x),
    "rows": lambda x, n: _attended(x, attn_mask=torch.ones(x.size(1), x.size(1)).tril().bool()),
    "places": lambda x, n: _attended(x + torch.arange(x.size(1))[None, :, None] / 10)[:, n:],
    "thrice": lambda x, n: _attended(torch.cat([x, x[:, n:].sin()], 1))[:, n:].sum(1),
    "halves": lambda x, n: torch.cat(x.split([n, x.size(1) - n], 1)[::-1], 1),
    "causal": lambda x, n: _attended(x, is_causal=True),
    "cut": lambda x, n: x[:, n - 1 :],
    "shifted": lambda x, n: x + torch.cat([x[:, n:], x[:, :n]], 1),
}
_REFUSED = {
    "causal": "causal attention is ambiguous",
    "cut": r"selects tokens .* of sequences that were concatenated",
}


def _of_two(use):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = _Joint(use).double()
    a, b = draw_normal(2, 5, 8), draw_normal(2, 11, 8, seed=1)
    deepsp.prepare_inputs({"a": a, "b": b}, seq_dim=1)
    compiled = torch.compile(model, backend="deepsp", fullgraph=True, options={"inner": "eager"})
    if use in _REFUSED:
        with pytest.raises(Exception, match=_REFUSED[use]):
            compiled(a, b)
        return
    expected = model(a, b)
    weights = draw_normal(*expected.shape, seed=2)
    (expected * weights).sum().backward()
    wanted = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    out = compiled(a, b)
    torch.testing.assert_close(out, expected)
    (out * weights).sum().backward()
    for p, want in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(p.grad, want)


@pytest.mark.parametrize("use", _USES)
def test_concatenated_sequences(use):
    on_ranks(3, _of_two, use)
