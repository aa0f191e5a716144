"""Training loops with accelerate, and the loss that models return themselves."""

import pytest
import torch
from harness import on_ranks
from trained import Rows, launched, one_process, tiny, wide_loss

import deepsp

f64 = torch.float64


def _accelerated(size, batch, accumulation, labelled):
    """Losses and weights of a few steps. ``labelled``: all tokens are, so that the mean over data
    ranks of their means is the mean."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    model = tiny(dtype=f64)
    rows = Rows(8 * accumulation)
    if labelled:
        rows = [{"input_ids": x, "labels": x} for x in rows.ids]
    loader = torch.utils.data.DataLoader(rows, batch_size=batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if size == 1:
        model.loss_function = wide_loss
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    else:
        from deepsp.integrations.accelerate import prepare

        model, optimizer, loader = prepare(
            accelerator, model, optimizer, loader, sequence_parallel_size=size
        )
    found = []
    assert len(loader) == 8 * accumulation // batch // (accelerator.num_processes // size)
    for each in loader:
        with accelerator.accumulate(model):
            loss = model(**each).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        found.append(accelerator.reduce(loss.detach(), "mean").item())
    state = accelerator.get_state_dict(model)
    return found, {name: x.double() for name, x in state.items()}


def _on_rank(*args):
    with launched():
        return _accelerated(*args)


@pytest.mark.parametrize(("world", "size", "accumulation"), [(2, 2, 1), (3, 3, 2), (4, 2, 2)])
def test_prepare(world, size, accumulation):
    groups = world // size
    losses, weights = one_process(_on_rank, 1, 4, accumulation, groups > 1)
    call = (_on_rank, size, 4 // groups, accumulation, groups > 1)
    for mine, state in on_ranks(world, *call):
        assert mine == pytest.approx(losses, rel=1e-10)
        torch.testing.assert_close(state, weights, rtol=1e-10, atol=1e-10)


def _own_loss():
    from transformers import BertConfig, BertForTokenClassification

    from deepsp.integrations.transformers import register

    register()
    full, model = tiny(dtype=f64), tiny(dtype=f64)
    batch = torch.utils.data.default_collate([Rows(4)[i] for i in range(4)])
    full.loss_function = wide_loss
    expected = full(**batch).loss
    expected.backward()
    model.set_attn_implementation("deepsp")
    local, _ = deepsp.shard_batch(batch)
    before = model.loss_function
    loss = model(**local).loss
    assert model.loss_function is before and "_loss_function" not in vars(model)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    loss.backward()
    deepsp.sync_gradients(model)
    for (name, a), b in zip(model.named_parameters(), full.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-9, atol=1e-12, msg=name)
    counted = model(**local, num_items_in_batch=7).loss
    valid = (batch["labels"][:, 1:] != -100).sum()
    torch.testing.assert_close(counted, expected * valid / 7)
    with pytest.raises(ValueError, match=r"pass the shift_labels that deepsp.shard_batch returns"):
        model(**{k: v for k, v in local.items() if k != "shift_labels"}, labels=batch["labels"])
    model.loss_function = wide_loss
    with pytest.raises(ValueError, match="loss function of LlamaForCausalLM to be transformers'"):
        model(**local)
    small = BertConfig(vocab_size=97, hidden_size=32, num_hidden_layers=1, num_attention_heads=4,
                       intermediate_size=32)  # fmt: skip
    tokens = BertForTokenClassification(small)
    tokens.set_attn_implementation("deepsp")
    with pytest.raises(ValueError, match="loss function of BertForTokenClassification"):
        tokens(**local)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_model_returns_the_loss_of_the_full_sequence(ranks):
    on_ranks(ranks, _own_loss)


def _refusals():
    from accelerate import Accelerator

    from deepsp.integrations.accelerate import prepare

    for size in (0, 3, None, 1.0):
        with launched(), pytest.raises(ValueError, match="a divisor of 2, the number of proce"):
            prepare(Accelerator(cpu=True), tiny(), sequence_parallel_size=size)
    with launched(), pytest.raises(ValueError, match="causal language model of transformers, got"):
        prepare(Accelerator(cpu=True), torch.nn.Linear(2, 2), sequence_parallel_size=2)


def test_refusals():
    on_ranks(2, _refusals)
