"""What docs/guide.md says: its snippets keep the gradient contract, and its figures are right; and
the README's first program."""

import copy
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import on_ranks
from models import TOTAL, VOCABULARY, Model
from reference import attention, sent
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import deepsp

ROOT = Path(__file__).parents[1]
GUIDE = (ROOT / "docs" / "guide.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
S, HEADS, KV_HEADS, D, BYTES = 65536, 32, 8, 128, 2  # of its table


def _snippets():
    """Each leaves the gradient of one process on every rank."""
    ids = torch.randint(0, VOCABULARY, (2, TOTAL), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    reference = Model(lambda q, k, v, _: attention(q, k, v, is_causal=True)).double()
    logits = reference(ids, torch.arange(TOTAL)[None])
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    expected.backward()

    attend = deepsp.DistributedAttention()
    model = Model(
        lambda q, k, v, lens: attend(q, k, v, is_causal=True, enable_gqa=True, seq_lens=lens)
    )
    model.double().load_state_dict(copy.deepcopy(reference.state_dict()))
    names = {
        "deepsp": deepsp,
        "init_device_mesh": init_device_mesh,
        "DistributedDataParallel": DistributedDataParallel,
        "ids": ids,
        "model": model,
        "group": None,
        "data": 1,
        "sequence": dist.get_world_size(),
    }
    rank, lens = dist.get_rank(), deepsp.ranks.seq_lens(TOTAL)
    first, *trainings = SNIPPETS
    whole = [torch.randn(2, TOTAL, heads, 8).double() for heads in (4, 2, 2)]
    for name, x in zip("qkv", whole, strict=True):
        names[name] = x.split(lens, 1)[rank]
    exec(first, names | {"seq_lens": lens}, names)
    mine = attention(*whole, is_causal=True).split(lens, 1)[rank]
    torch.testing.assert_close(names["out"], mine, rtol=1e-10, atol=1e-12)

    assert len(trainings) == 2
    for snippet in trainings:
        model.zero_grad()
        exec(snippet, names)
        torch.testing.assert_close(names["loss"], expected, rtol=1e-10, atol=0)
        for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-12, msg=name)


def _launched(ranks, program, folder):
    """What torchrun prints."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, f"--nproc-per-node={ranks}", program],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_whole_training(tmp_path):
    """Prints what its page says."""
    page = (ROOT / "docs" / "training.md").read_text()
    program, *others = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (expected,) = re.findall(r"It prints\n\n```\n(.*?)```", page, re.DOTALL)
    (tmp_path / "training.py").write_text(program)
    for line, same in zip(
        _launched(2, "training.py", tmp_path).splitlines(), expected.splitlines(), strict=True
    ):
        numbers, wanted = ([float(n) for n in re.findall(r"\d+\.?\d*", x)] for x in (line, same))
        assert re.sub(r"\d", "", line) == re.sub(r"\d", "", same)
        assert numbers == pytest.approx(wanted, abs=0.03)
    (mesh,) = others
    on_ranks(2, _of_the_training, mesh)


def _of_the_training(snippet):
    names = {"data": 1, "sequence": 2}
    exec(snippet, names)
    assert names["number"] == 0


def test_the_readmes_first_program(tmp_path):
    """Runs as it stands, and its losses are those of one process."""
    readme = (ROOT / "README.md").read_text()
    (program,) = re.findall(r"```python\n(# first\.py.*?)```", readme, re.DOTALL)
    (tmp_path / "first.py").write_text(program)
    printed = []
    for ranks in (1, 3):
        out = _launched(ranks, "first.py", tmp_path)
        printed.append(re.findall(r"step (\d): loss (\d\.\d+)", out))
    assert len(printed[0]) == 5
    for losses in printed[1:]:
        for (step, loss), (same_step, expected) in zip(losses, printed[0], strict=True):
            assert step == same_step and abs(float(loss) - float(expected)) < 1e-4
    assert float(printed[0][-1][1]) < float(printed[0][0][1])


@pytest.mark.parametrize(
    ("page", "name", "lines"), [("README.md", "sft", 3 * 4), ("docs/rl.md", "grpo", 3 * 3)]
)
def test_programs_with_trl(page, name, lines, tmp_path):
    """They run as they stand, and log what plain TRL logs in one process."""
    text = (ROOT / page).read_text()
    (program,) = re.findall(rf"```python\n(# {name}\.py.*?)```", text, re.DOTALL)
    plain = re.sub(r"sequence_parallel\((\w+Trainer)\)\(", r"\1(", program)
    plain = re.sub(r" +(sequence_parallel_size|fold_prefixes)=.*\n", "", plain)
    logs = []
    for file, ranks, text in (("plain.py", 1, plain), (f"{name}.py", 2, program)):
        (tmp_path / file).write_text(text)
        out = _launched(ranks, file, tmp_path)
        logs.append(re.findall(r"'(loss|grad_norm|reward|num_tokens)': '([-\d.e+]+)'", out))
    assert len(logs[0]) >= lines
    for (key, value), (same_key, expected) in zip(*logs, strict=True):
        assert key == same_key and float(value) == pytest.approx(float(expected), rel=2e-3)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_snippets(ranks):
    on_ranks(ranks, _snippets)


def _bytes(ranks, tokens):
    """Of q, k and v and of the output that rank 0 sends forward, by the layout ops."""
    split = [torch.ops.deepsp.head_split(HEADS, KV_HEADS, ranks, r) for r in range(ranks)]
    lens = torch.ops.deepsp.token_split(tokens, ranks)
    heads = [(q_end - q, kv_end - kv) for q, q_end, kv, kv_end in split]
    there = lens[0] * sum(q + 2 * kv for q, kv in heads[1:])
    back = sum(lens[1:]) * heads[0][0]
    return there * D * BYTES, back * D * BYTES


def test_table():
    table = GUIDE[GUIDE.index("| P | a rank sends") :].split("\n\n")[0].splitlines()[2:]
    rows = [[float(cell) for cell in line.strip("| ").split("|")] for line in table]
    assert [row[0] for row in rows] == [2, 8, 32]
    for ranks, mib, ring, tera, ratio in rows:
        ranks = int(ranks)
        moved = sum(_bytes(ranks, S))
        if ranks <= KV_HEADS:
            assert moved == S * 2 * (HEADS + KV_HEADS) * D * BYTES * (ranks - 1) / ranks**2
        flops = 2 * S**2 * HEADS * D / ranks
        assert mib == round(moved / 2**20)
        assert ring == round(2 * KV_HEADS * S * D * BYTES * (ranks - 1) / ranks / 2**20)
        assert tera == round(flops / 1e12, 1)
        assert ratio == round(flops / moved)


def _sends(tokens):
    """What really travels, forward and backward."""
    ranks = dist.get_world_size()
    shapes = [(1, tokens // ranks, heads, D) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    q, k, v = (torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes)
    outputs = []

    def forward():
        outputs.append(deepsp.distributed_attention(q, k, v, enable_gqa=True))

    def backward():
        outputs[-1].backward(torch.ones_like(q))

    there, back = sum(sent(forward)), sum(sent(backward))
    if dist.get_rank() == 0:
        assert there == back == sum(_bytes(ranks, tokens))


def test_bytes_that_travel():
    on_ranks(2, _sends, 16, apart="messages")


def test_picture():
    """What the text says of it."""
    assert "Here 3 ranks share 11 tokens, 6 query heads and 2 kv heads" in GUIDE
    split = [list(torch.ops.deepsp.head_split(6, 2, 3, rank)) for rank in range(3)]
    assert split == [[0, 2, 0, 1], [2, 4, 0, 2], [4, 6, 1, 2]]
    for name in re.findall(r"!\[.*\]\((.*)\)", GUIDE):
        assert (Path(__file__).parents[1] / "docs" / name).exists(), name
