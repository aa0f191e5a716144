"""What backward finds kept, and what it computes again."""

import copy

import pytest
import torch
from functorch.compile import min_cut_rematerialization_partition
from harness import on_ranks
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import checkpoint
from zoo import LM, batch

import deepsp


def _compiled(model, budget):
    """The model, and what its forward keeps (bytes) and its backward calls, once it has run."""
    seen = {}

    def forward(gm, inputs):
        outputs = gm.graph.output_node().args[0][1:]
        values = [n.meta["val"] for n in outputs if n.op == "call_function"]
        storages = {id(v.untyped_storage()): v for v in values if isinstance(v, torch.Tensor)}
        seen["kept"] = sum(v.numel() * v.element_size() for v in storages.values())
        return gm

    def backward(gm, inputs):
        seen["backward"] = [str(n.target) for n in gm.graph.nodes if n.op == "call_function"]
        return gm

    inner = aot_autograd(
        fw_compiler=forward, bw_compiler=backward, partition_fn=min_cut_rematerialization_partition
    )
    options = {"inner": inner, "memory_budget": budget}
    return torch.compile(model, backend="deepsp", fullgraph=True, options=options), seen


def _budgets(dropout):
    kept, again = {}, {}
    for budget in (None, 0.2, 0) if not dropout else (0,):
        torch._dynamo.reset()
        torch.manual_seed(0)
        reference = LM(dropout=dropout).double()
        model = copy.deepcopy(reference)
        inputs = batch(16)
        compiled, seen = _compiled(model, budget)
        loss = compiled(**deepsp.prepare_inputs(dict(inputs)))
        loss.backward()
        if not dropout:
            reference(**inputs).backward()
            for p, q in zip(model.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-12)
        calls = seen["backward"]
        kept[budget] = int(seen["kept"])
        again[budget] = sum("addmm" in c or "gelu.default" in c for c in calls)
        assert sum("seq_to_heads_start" in c for c in calls) == 2  # backward's own, of two layers
        assert not any("_for_cpu.default" in c or "dropout.default" in c for c in calls), calls
    if not dropout:
        assert kept[None] > kept[0.2] > kept[0], kept
        assert again[0] > again[0.2] >= again[None], again


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_less_budget_keeps_less(dropout):
    on_ranks(2, _budgets, dropout)


class _Checkpointed(LM):
    """Layers in checkpoints, or the same without."""

    def __init__(self, checkpointed):
        super().__init__(dropout=0.3)
        self.checkpointed = checkpointed

    def forward(self, ids, labels):
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(self.norm(x)).square().mean()


def _checkpoints():
    kept = {}
    for checkpointed in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        compiled, seen = _compiled(_Checkpointed(checkpointed), None)
        compiled(**deepsp.prepare_inputs(batch(16))).backward()
        kept[checkpointed] = int(seen["kept"])
        calls = seen["backward"]
        assert sum("seq_to_heads_start" in c for c in calls) == 2  # backward's own
        assert not any("_for_cpu.default" in c or "dropout.default" in c for c in calls), calls
        assert any("addmm" in c for c in calls) == checkpointed
    assert kept[True] < 0.7 * kept[False], kept


def test_checkpoints_in_the_model():
    on_ranks(2, _checkpoints)


def _wrong():
    torch._dynamo.reset()
    compiled, _ = _compiled(LM(), 1.5)
    with pytest.raises(Exception, match=r"0 <= memory_budget <= 1 or None, got 1.5"):
        compiled(**deepsp.prepare_inputs(batch(16)))


def test_wrong_budget():
    on_ranks(1, _wrong)
