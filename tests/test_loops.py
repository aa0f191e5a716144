"""docs/loops.md: the new side of each diff, on ranks, trains as the old one does in one process."""

import contextlib
import functools
import re
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import on_ranks
from pipelined import draw_batch, make_stage, train_in_one_process
from torch import nn
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
    """Return the names of the program, in float64, and what it prints."""
    return _executed(section, _program(section, side), changes, **names)


def _executed(section, program, changes, **names):
    printed = []
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


# ------------------------------------------------------------------------------ FSDP2


class _Plain(nn.Module):
    """The page's model for one process, without deepsp."""

    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(64, 32), nn.Embedding(64, 32)
        self.qkv, self.out, self.head = nn.Linear(32, 96), nn.Linear(32, 32), nn.Linear(32, 64)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions.weight[: ids.size(1)]
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        logits = self.head(x + self.out(y.transpose(1, 2).flatten(2)))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")


def _train_plain(data_ranks):
    """Return what the page's program prints, and the gradients of each step and the weights."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    model, printed, gradients = _Plain(), [], []
    torch.set_default_dtype(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(4):
        rows = []
        for rank in range(data_ranks):
            generator = torch.Generator().manual_seed(100 * step + rank)
            rows += [torch.randint(0, 64, (2, n), generator=generator) for n in (33, 21, 9)]
        loss = sum(map(model, rows)) / sum(2 * (ids.size(1) - 1) for ids in rows)
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters()})
        optimizer.step()
        printed.append(f"step {step}: loss {loss:.9f}, norm {norm:.9f}")
    return printed, gradients, model.state_dict()


FSDP = re.search(r"```python\n(# fsdp\.py.*?)```", PAGE, re.DOTALL)[1]


def _fsdp(folder, resumed):
    assert FSDP.count("\n") <= 71
    gradients = []

    def keep(model):
        gradients.append({n: p.grad.full_tensor() for n, p in model.named_parameters()})

    changes = {
        'dist.init_process_group("gloo")\n': "",
        "dist.destroy_process_group()\n": "",
        "torch.bfloat16, torch.float32": "torch.float64, torch.float64",
        "model.parameters(), 1.0": "model.parameters(), 0.5",
        "optimizer.step()": "keep(model); optimizer.step()",
        "{total:.4f}": "{total:.9f}",
        "{norm:.4f}": "{norm:.9f}",
    }
    with contextlib.chdir(folder), mock.patch("sys.argv", ["fsdp.py", *resumed]):
        names, printed = _executed("FSDP2", FSDP, changes, keep=keep)
    return printed, gradients, _weights(names["model"])


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_fsdp(world, tmp_path):
    """The program trains as one process does, and goes on from a checkpoint with the same bits."""
    printed, gradients, weights = _train_plain(world // 2)
    straight = on_ranks(world, _fsdp, str(tmp_path), [])
    for rank, (lines, steps, trained) in enumerate(straight):
        assert lines == (printed if rank == 0 else [])
        for ours, expected in zip(steps, gradients, strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(trained, weights, rtol=1e-7, atol=1e-8)
    for (lines, steps, trained), before in zip(
        on_ranks(world, _fsdp, str(tmp_path), ["step-2"]), straight, strict=True
    ):
        assert lines == before[0][2:] and len(steps) == 2
        torch.testing.assert_close(trained, before[2], rtol=0, atol=0)


def _fsdp_as_it_stands(folder):
    printed = []
    text = FSDP.replace('dist.init_process_group("gloo")\n', "")
    text = text.replace("dist.destroy_process_group()\n", "")
    text = text.replace(":.4f", "")
    with contextlib.chdir(folder), mock.patch("sys.argv", ["fsdp.py"]):
        exec(compile(text, "docs/loops.md, FSDP2", "exec"), {"print": printed.append})
    return [[float(n) for n in re.findall(r"(?:loss|norm) ([\d.]+)", line)] for line in printed]


@pytest.mark.nightly
def test_fsdp_in_bfloat16(tmp_path):
    """One process and two ranks differ by about as much as the page's table says."""
    for folder in "12":
        (tmp_path / folder).mkdir()
    ((first, second, *_),) = on_ranks(1, _fsdp_as_it_stands, str(tmp_path / "1"))
    (loss, norm), (second_loss, second_norm), *_ = on_ranks(
        2, _fsdp_as_it_stands, str(tmp_path / "2")
    )[0]
    assert loss == pytest.approx(first[0], rel=1e-5)
    assert norm == pytest.approx(first[1], rel=1e-3)
    assert second_loss == pytest.approx(second[0], rel=1e-3)
    assert second_norm == pytest.approx(second[1], rel=1e-3)


# ------------------------------------------------------------------------------ pipeline stages


def _stages():
    text = PAGE[PAGE.index("## Pipeline stages") :]
    snippet = re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]
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
