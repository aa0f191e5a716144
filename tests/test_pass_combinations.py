"""What docs/compile.md lets users combine with the pass, under Inductor itself: loss and gradients
are those of one process. And where Dynamo skips code, the first call says so."""

import copy
import re
from pathlib import Path

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
PAGE = (Path(__file__).parents[1] / "docs" / "compile.md").read_text()


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


# Programs of docs/compile.md: some compile `model`, the others call it.
PLAIN = "model = torch.compile(model, **how)"
DDP_BEFORE = 'model = torch.compile(DistributedDataParallel(model), **mean | {"fullgraph": False})'
DDP_AFTER = "model = DistributedDataParallel(torch.compile(model, **mean))"
FSDP_BEFORE = "model = torch.compile(fully_shard(model), **mean)"
FSDP_AFTER = "model = fully_shard(torch.compile(model, **mean))"
WEIGHTS = "deepsp.shard_parameters(model); model = torch.compile(model, **how)"
CALL = "loss = model(**batch)"
OFFLOAD = "with deepsp.offload(): loss = model(**batch)"
AUTOCAST = 'with torch.autocast("cpu", torch.bfloat16): loss = model(**batch)'
ACCUMULATE = "for batch in batches: model(**batch).backward()"

CASES = {
    "weights": (LM, WEIGHTS, CALL, {}),
    "weights, checkpoints and budget": (Checkpointed, WEIGHTS, CALL, {"memory_budget": 0.5}),
    "checkpoints and offload": (Checkpointed, PLAIN, OFFLOAD, {}),
    "budget": (LM, PLAIN, CALL, {"memory_budget": 0.2}),
    "FSDP2 before": (LM, FSDP_BEFORE, CALL, {}),
    "FSDP2 after": (LM, FSDP_AFTER, CALL, {}),
    "DDP before": (LM, DDP_BEFORE, CALL, {}),
    "DDP after": (LM, DDP_AFTER, CALL, {}),
    "autocast": (LM, PLAIN, AUTOCAST, {}),
    "accumulation": (LM, PLAIN, ACCUMULATE, {}),
}
_SNIPPET = re.search(r"## Wrappers.*?```python\n(.*?)```", PAGE, re.DOTALL)[1]


def _same(case):
    torch._dynamo.reset()
    make, wrap, call, options = CASES[case]
    torch.manual_seed(0)
    reference = make().to(torch.float32 if case == "autocast" else f64)
    del reference.blocks[1:]
    model = copy.deepcopy(reference)
    batches = [deepsp.prepare_inputs(batch(13, seed=seed)) for seed in range(2)]
    names = {"torch": torch, "deepsp": deepsp, "fully_shard": fully_shard, "batches": batches}
    names |= {"DistributedDataParallel": DistributedDataParallel, "model": model}
    exec(_SNIPPET, names)
    names["how"] |= {"options": options}
    parameters = dict(model.named_parameters())  # before any wrapper
    wide = "shard_parameters(model, dtype=torch.float64, reduce_dtype=torch.float64)"
    exec(wrap.replace("shard_parameters(model)", wide), names)
    losses = []
    for module in (names["model"], reference):
        called = names | {"model": module, "batch": batches[0]}
        exec(call, called)
        if "loss" in called:
            called["loss"].backward()
            losses.append(called["loss"])
    rtol = 1e-2 if case == "autocast" else 1e-8
    torch.testing.assert_close(losses[:1], losses[1:], rtol=rtol, atol=0)
    if "FSDP2" in case:  # which makes others
        parameters = dict(model.named_parameters())
    for name, p in reference.named_parameters():
        right, gradient = p.grad, parameters[name].grad
        if isinstance(gradient, DTensor):
            gradient = gradient.full_tensor()
        if "weights" in case:  # this rank's rows
            right = right.tensor_split(2)[dist.get_rank()]
        if case == "autocast":
            assert (gradient - right).norm() < 0.02 * right.norm(), name
        else:
            torch.testing.assert_close(gradient, right, rtol=rtol, atol=1e-11, msg=name)


# The same graph as DDP's; and what another case has, too.
_NIGHTLY = {"FSDP2 before", "weights", "budget", "autocast", "accumulation"}


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[pytest.mark.nightly] * (c in _NIGHTLY)) for c in CASES]
)
def test_under_inductor(case):
    on_ranks(2, _same, case)


def test_the_pages_programs_are_run():
    section = PAGE.partition("## Wrappers")[2].partition("## Notes")[0].replace(r"\|", "|")
    programs = set(re.findall(r"`([^`]*model(?: =|\(\*\*)[^`]*)`", section))
    assert programs == {program for _, *both, _ in CASES.values() for program in both} - {
        CALL,
        PLAIN,
    }


class Printing(Checkpointed):
    def __init__(self):
        super().__init__(prints=True)


def _plain(model, how):
    return torch.compile(model, **how)


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
