"""Built models under ``torch.compile``, next to the same model in one process."""

import copy

import pytest
import torch
from harness import on_ranks
from scheduled import Mlp, compare, compare_transformer, data, make_transformer, seeded

import deepsp
from deepsp.schedule.ready import tensor_sequence_parallel


def _tensor_parallel(sch):
    sch["up"].shard("weight", axis=0).sync("bwd_post", "all_reduce")
    sch["down"].shard("weight", axis=1).sync("fwd_post", "all_reduce")


def _sequence_parallel(sch):
    sch["up"].shard("weight", axis=0)
    sch["down"].shard("weight", axis=1).sync("fwd_post", "reduce_scatter", axis=1)
    sch["up"].sync("fwd_pre", "scatter", axis=1).sync("fwd_pre", "all_gather", axis=1)
    sch["drop"].sync("fwd_post", "all_gather", axis=1)


def _overlapped(sch):
    sch["up"].shard("weight", axis=0)
    sch["down"].shard("weight", axis=1).sync("fwd_post", "reduce_scatter", axis=1, overlap=True)
    sch["up"].sync("fwd_pre", "scatter", axis=1).sync("fwd_pre", "all_gather", axis=1, overlap=True)
    sch["drop"].sync("fwd_post", "all_gather", axis=1)


def _mlp(plan):
    torch._dynamo.reset()
    model = seeded(Mlp)
    sch = deepsp.create_schedule(copy.deepcopy(model))
    plan(sch)
    built, _ = deepsp.build(sch)
    x = data(2, 7, 5)
    compare(model, built, x)  # what carries which gradient is found
    built.compile(backend="aot_eager", fullgraph=True)
    compare(model, built, x)
    compare(model, built, data(2, 9, 5))  # another length


@pytest.mark.parametrize("plan", [_tensor_parallel, _sequence_parallel, _overlapped])
@pytest.mark.parametrize("size", [2, 3])
def test_mlp(size, plan):
    on_ranks(size, _mlp, plan)


def _needs_a_call():
    torch._dynamo.reset()
    model = seeded(Mlp)
    sch = deepsp.create_schedule(copy.deepcopy(model))
    _tensor_parallel(sch)
    built, _ = deepsp.build(sch)
    compiled = torch.compile(built, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="before it is compiled"):
        compiled(data(2, 7, 5))
    x = data(2, 7, 5).requires_grad_()
    sch.check(x)
    torch._dynamo.reset()
    for m in (model, compiled):
        m(x).square().sum().backward()
    gradients = deepsp.full_state_dict(built, gradients=True)
    for name, p in model.named_parameters():
        torch.testing.assert_close(gradients[name], p.grad)


def test_needs_a_call_before():
    on_ranks(2, _needs_a_call)


def _plan(family, overlap):
    torch._dynamo.reset()
    model = make_transformer(family)
    built, _ = deepsp.build(tensor_sequence_parallel(copy.deepcopy(model), overlap=overlap))
    close = dict(rtol=1e-9, atol=1e-9)
    compare_transformer(model, built, 9, close)
    built.compile(backend="aot_eager", fullgraph=True)
    for length in (9, 12):
        compare_transformer(model, built, length, close)


@pytest.mark.parametrize(
    ("family", "overlap"), [("llama", True), pytest.param("gpt2", False, marks=pytest.mark.nightly)]
)
def test_plan(family, overlap):
    on_ranks(2, _plan, family, overlap)
