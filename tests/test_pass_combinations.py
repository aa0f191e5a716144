"""What docs/compile.md lets users combine with the pass, under Inductor itself: loss and gradients
are those of one process. And where Dynamo skips code, the first call says so."""

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from harness import on_ranks
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from zoo import LM, batch

import deepsp

f64 = torch.float64


class Checkpointed(LM):
    """Each block is checkpointed."""

    def __init__(self, prints=False):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Saving(block, prints) for block in self.blocks)


class Saving(torch.nn.Module):
    def __init__(self, block, prints):
        super().__init__()
        self.block, self.prints = block, prints

    def forward(self, x, mask=None):
        return checkpoint(self.run, x, mask, use_reentrant=False)

    def run(self, x, mask):
        if self.prints:
            print(end="")
        return self.block(x, mask)


def _plain(model, how):
    return torch.compile(model, **how)


def _weights(model, how):
    deepsp.shard_parameters(model, dtype=f64, reduce_dtype=f64)
    return torch.compile(model, **how)


_MEAN = {"gradients": "mean"}
CASES = {
    "weights": (LM, _weights, {}),
    "weights, checkpoints and budget": (Checkpointed, _weights, {"memory_budget": 0.5}),
    "checkpoints and offload": (Checkpointed, _plain, {}),
    "budget": (LM, _plain, {"memory_budget": 0.2}),
    "FSDP2 before": (LM, lambda m, how: torch.compile(fully_shard(m), **how), _MEAN),
    "FSDP2 after": (LM, lambda m, how: fully_shard(torch.compile(m, **how)), _MEAN),
    "DDP": (LM, lambda m, how: torch.compile(DistributedDataParallel(m), **how), _MEAN),
}


def _same(case):
    torch._dynamo.reset()
    make, wrap, options = CASES[case]
    torch.manual_seed(0)
    reference = make().double()
    del reference.blocks[1:]
    model, inputs = copy.deepcopy(reference), batch(13)
    parameters = dict(model.named_parameters())  # before any wrapper
    compiled = wrap(model, {"backend": "deepsp", "options": options})
    with deepsp.offload() if "offload" in case else contextlib.nullcontext():
        loss = compiled(**deepsp.prepare_inputs(dict(inputs)))
    loss.backward()
    expected = reference(**inputs)
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=0)
    if "FSDP2" in case:  # which makes others
        parameters = dict(model.named_parameters())
    for name, p in reference.named_parameters():
        right, gradient = p.grad, parameters[name].grad
        if isinstance(gradient, DTensor):
            gradient = gradient.full_tensor()
        if "weights" in case:  # this rank's rows
            right = right.tensor_split(2)[dist.get_rank()]
        torch.testing.assert_close(gradient, right, rtol=1e-8, atol=1e-11, msg=name)


# The same graph as DDP's; and what another case has, too.
_NIGHTLY = {"FSDP2 before", "weights", "budget"}


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[pytest.mark.nightly] * (c in _NIGHTLY)) for c in CASES]
)
def test_under_inductor(case):
    on_ranks(2, _same, case)


class Printing(Checkpointed):
    def __init__(self):
        super().__init__(prints=True)


def _layer_by_layer(model, how):
    for block in model.blocks:
        fully_shard(block)
    return torch.compile(fully_shard(model), **how)


def _skips():
    """Dynamo skips a frame with a break in a loop, or in a checkpoint, and runs it without the
    pass."""
    inputs = deepsp.prepare_inputs(batch(13))
    line = r"Dynamo skipped its code, so .*\n  .*{}.*\nRemove the break .* FSDP2: call fully_shard"
    for make, wrap, place in (
        (Printing, _plain, r"test_pass_combinations.py:\d+, in run: print\(end"),
        (Checkpointed, _layer_by_layer, r"zoo.py:\d+, in forward: x = block"),
        (LM, _layer_by_layer, r"zoo.py:\d+, in forward: x = block"),
    ):
        torch._dynamo.reset()
        model = wrap(make(), {"backend": "deepsp", "options": {"inner": "eager"}})
        with pytest.raises(Exception, match=line.format(place)):
            model(**inputs)
    torch._dynamo.reset()
    model = torch.compile(Changing(), backend="deepsp", options={"inner": "eager"})
    with torch._dynamo.config.patch(recompile_limit=1):
        model(**inputs)
        model.scale = 3  # compiles again
        with pytest.raises(ValueError, match=r"and gave no reason \(a limit of recompiles, say"):
            model(**inputs)
    with torch.compiler.set_stance("force_eager"):
        model(**inputs)
    with pytest.raises(TypeError, match="unexpected keyword"):
        model(**inputs, other=1)


class Changing(LM):
    scale = 2

    def forward(self, ids, labels):
        return super().forward(ids, labels) * self.scale


def test_skipped_code_is_an_error():
    on_ranks(2, _skips)


class Mixing(torch.nn.Module):
    def forward(self, ids, labels):
        return ids.cumsum(1).double().softmax(1) * labels


def _lengths(marked, sizes, dynamic=None):
    """Which lengths compile, and whether the inner compiler gets constants."""
    torch._dynamo.reset()
    compiled = []

    def inner(gm, inputs):
        lengths = [
            node.meta["example_value"].size(1)
            for node in gm.graph.find_nodes(op="placeholder")
            if "tensor_dict" in node.meta and node.meta["tensor_dict"].get("tag")
        ]
        compiled.append(all(isinstance(n, int) or n.node.expr.is_number for n in lengths))
        return gm

    model = Mixing()
    options = {"inner": inner}
    run = torch.compile(model, backend="deepsp", fullgraph=True, dynamic=dynamic, options=options)
    for size in sizes:
        inputs = {name: batch(size)[name] for name in ("ids", "labels")}
        if marked:
            torch._dynamo.mark_dynamic(inputs["ids"], 1)
        expected = copy.deepcopy(model)(**inputs)
        out = run(**deepsp.prepare_inputs(inputs))
        torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    return compiled


def _first_length():
    assert _lengths(False, (12, 12)) == [True]
    assert _lengths(False, (12, 18, 24, 12)) == [True, False]
    assert _lengths(True, (12, 18)) == [False]
    assert _lengths(False, (12, 18), dynamic=True) == [False]


def test_the_first_length_is_a_constant():
    on_ranks(2, _first_length)
