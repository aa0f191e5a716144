"""docs/loops.md: the new side of each diff, on ranks, trains as the old one does in one process."""

import functools
import re
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import on_ranks
from pipelined import draw_batch, make_stage, train_in_one_process
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.optim import SGD

import deepsp

PAGE = (Path(__file__).parents[1] / "docs" / "loops.md").read_text()


def _program(section, side):
    """The diffs of a section, without the lines of the other side, as a program."""
    text = next(x for x in PAGE.split("\n## ") if x.startswith(section))
    lines = "".join(re.findall(r"```diff\n(.*?)```", text, re.DOTALL)).splitlines()
    assert {line[0] for line in lines} == {" ", "-", "+"}
    return "\n".join(line[1:] for line in lines if line[0] in (" ", side))


def _run(section, side, changes, **names):
    """The names of the program, in float64, and what it prints."""
    program, printed = _program(section, side), []
    for old, new in changes.items():
        assert old in program, f"{section} no longer has {old}"
        program = program.replace(old, new)
    names["print"] = printed.append
    torch.set_default_dtype(torch.float64)
    try:
        exec(compile(program, f"docs/loops.md, {section}", "exec"), names)
    finally:
        torch.set_default_dtype(torch.float32)
    return names, printed


# ------------------------------------------------------------------------------ nanoGPT

_CHANGES = {
    "torch.randint(len(data[split]) - block_size, (batch_size,))": "draw(split)",
    # AdamW hides the size of gradients. Some norms are above 0.6, some below.
    "torch.optim.AdamW(raw_model.parameters(), lr=1e-3)": "SGD(raw_model.parameters(), lr=0.1)",
    "grad_clip = 5, 2, 2, 1.0": "grad_clip = 5, 2, 2, 0.6",
}


def _draws(rank, ranks):
    """The rows of a data rank's next batch. One process reads those of all ranks, in turn."""
    drawn = {"train": rank, "val": 0}  # rank 0 evaluates in the old program

    def draw(split):
        generator = torch.Generator().manual_seed(drawn[split])
        drawn[split] += ranks if split == "train" else 1
        return torch.randint(1900, (2,), generator=generator)

    return draw


def _nanogpt(size):
    rank, world = dist.get_rank(), dist.get_world_size()
    changes = {'init_process_group("gloo")': "", "sequence_ranks = 2": f"sequence_ranks = {size}"}
    draw = _draws(rank // size, world // size)
    with mock.patch.dict("os.environ", RANK=str(rank), WORLD_SIZE=str(world)):
        names, printed = _run("nanoGPT", "+", _CHANGES | changes, draw=draw, SGD=SGD)
    return names["raw_model"].state_dict(), printed


@pytest.mark.parametrize(("world", "size"), [(3, 3), (4, 2)])
def test_nanogpt(world, size):
    names, printed = _run("nanoGPT", "-", _CHANGES, draw=_draws(0, 1), SGD=SGD)
    assert len(printed) == 3
    expected = names["raw_model"].state_dict()
    for rank, (weights, theirs) in enumerate(on_ranks(world, _nanogpt, size)):
        assert theirs == (printed if rank == 0 else [])
        torch.testing.assert_close(weights, expected, rtol=1e-9, atol=1e-11)


# ------------------------------------------------------------------------------ torchtitan


def _weights(model):
    return {name: p.full_tensor().detach() for name, p in model.named_parameters()}


def _titan(side, size, batch, summed):
    changes = {
        'dist.init_process_group("gloo")\n': "",
        "max_norm = 2, 33": f"max_norm = {batch}, 33",
    }
    names = {}
    if side == "+":
        changes["sequence_ranks = 2"] = f"sequence_ranks = {size}"
    if summed:
        changes["average_gradients=True\n    )"] = 'reduction="sum"\n    ) / tokens'
        changes["optimizer = "] = "undivided(model)\noptimizer = "
        names = {"tokens": 4 * 33, "undivided": _undivided}
    names, printed = _run("torchtitan", side, changes, **names)
    return _weights(names["model"]), names["grad_norm"], printed


def _undivided(model):
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)


@pytest.mark.parametrize(("world", "size", "summed"), [(3, 3, False), (4, 2, False), (4, 2, True)])
def test_torchtitan(world, size, summed):
    ((expected, norm, printed),) = on_ranks(1, _titan, "-", 1, 4, False)
    assert len(printed) == 4
    groups = world // size
    for rank, (weights, mine, theirs) in enumerate(
        on_ranks(world, _titan, "+", size, 4 // groups, summed)
    ):
        torch.testing.assert_close(mine, norm, rtol=1e-8, atol=0)
        # AdamW divides by gradients that are almost zero.
        torch.testing.assert_close(weights, expected, rtol=1e-7, atol=1e-8)
        if not summed:
            assert theirs == (printed if rank == 0 else [])


# ------------------------------------------------------------------------------ pipeline stages


def _stages():
    snippet = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1]
    batch = draw_batch(0)
    names = {"deepsp": deepsp, "functools": functools, "init_device_mesh": init_device_mesh}
    names |= {"PipelineStage": PipelineStage, "Schedule1F1B": Schedule1F1B}
    names |= {"stages": 2, "sequence": 2, "microbatches": 3, "device": torch.device("cpu")}
    names |= {"ids": batch["input_ids"], "make_stage": make_stage, "optimizer": mock.Mock()}
    exec(snippet, names)
    ((loss, gradients),) = train_in_one_process([batch])
    if names["number"] == 1:
        assert sum(x.item() for x in names["losses"]) / 3 == pytest.approx(loss, rel=1e-12)
    for name, p in names["module"].named_parameters():
        torch.testing.assert_close(p.grad, gradients[name], rtol=1e-9, atol=1e-13, msg=name)


def test_stages():
    on_ranks(4, _stages)
