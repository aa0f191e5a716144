"""Mixtures of experts over a sharded sequence: the loss that balances them, against one process."""

import pytest
import torch
from architectures import VOCAB, make
from harness import on_ranks

import deepsp
from deepsp.integrations.transformers import register


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
