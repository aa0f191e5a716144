"""``python -m deepsp.doctor``: what it prints, and that it finds what is wrong."""

import os
import re
import socket
import subprocess
import sys
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import on_ranks
from torch.distributed.distributed_c10d import _get_default_store
from torch.nn.attention import SDPBackend, sdpa_kernel

import deepsp
from deepsp import doctor

NAMES = ["versions", "machine", "variables", "kernels", "transport"]
NAMES += ["exchange", "attention", "loss", "speed"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def _start(*arguments, **variables):
    left_out = ("RANK", "OMP_NUM_THREADS", "DEEPSP_TRANSPORT")
    environment = {name: v for name, v in os.environ.items() if name not in left_out}
    command = [sys.executable, *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    return subprocess.Popen(command, env=environment | variables, **pipes)


def _run(*arguments, **variables):
    """Run Python; return the exit status and what it prints."""
    process = _start(*arguments, **variables)
    report, _ = process.communicate(timeout=60)
    return process.returncode, report


def _states(report):
    """Return the state of each check by its name."""
    return dict(re.findall(r"^(\w+) +(ok|slow|FAILED) ", report, re.MULTILINE))


def test_alone():
    status, report = _run("-m", "deepsp.doctor", DEEPSP_DEBUG="1")
    assert status == 0, report
    assert list(_states(report)) == NAMES
    assert _states(report)["variables"] == "slow" and "DEEPSP_DEBUG=1" in report
    assert f"deepsp {deepsp.__version__}, built for torch" in report
    assert f"torch {torch.__version__}" in report and "transformers " in report
    assert "the group has one rank" in report and "one rank sends nothing" in report
    assert re.search(r"all checks passed(, \d slow)? \(ranks: 1, device: cpu\)\n$", report)


def test_under_torchrun():
    status, report = _run(*TORCHRUN, "-m", "deepsp.doctor", DEEPSP_TRANSPORT="auto")
    assert status == 0, report
    assert list(_states(report)) == NAMES and len(report.splitlines()) <= 30
    assert max(map(len, report.splitlines())) <= 110
    assert "ranks 0, 1: shared memory" in report and "DEEPSP_TRANSPORT=auto" in report
    assert "causal SDPA in torch.bfloat16: FLASH_ATTENTION" in report
    assert "tokens by rank: [9, 14]" in report
    for name in ("seq_to_heads", "all_to_all_single"):
        assert re.search(rf"4 MiB by {name}, .* [\d.]+ / [\d.]+ ms, [\d.]+ GB/s", report)
    assert report.endswith("all checks passed (ranks: 2, device: cpu)\n")


RAISES = """
import torch.distributed as dist
import deepsp
from deepsp import doctor

attention = deepsp.distributed_attention

def fails_on_rank_1(*args, **options):
    if dist.get_rank() == 1:
        raise MemoryError("no memory")
    return attention(*args, **options)

deepsp.distributed_attention = fails_on_rank_1
doctor.TIMEOUT = 3.0
doctor.main()
"""


def test_a_rank_that_raises(tmp_path):
    """Both ranks end with status 1. Without torchrun, which would end one after the other."""
    script = tmp_path / "raises.py"
    script.write_text(RAISES)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes = [_start(script, RANK=str(rank), **group) for rank in range(2)]
    report, nothing = (process.communicate(timeout=60)[0] for process in processes)
    assert [process.returncode for process in processes] == [1, 1] and nothing == ""
    assert _states(report)["attention"] == "FAILED"
    assert "rank 1: MemoryError: no memory" in report
    assert "rank 0: DistBackendError" in report and "waiting for rank 1" in report
    assert "out of step" in report and "\nloss" not in report
    assert report.endswith("FAILED (ranks: 2, device: cpu)\n")


def _scaled_gradient(x):
    return x.detach() + (x - x.detach()) * 1.01


def _attention_with(change):
    attention = deepsp.distributed_attention
    return lambda q, k, v, **options: change(lambda *qkv: attention(*qkv, **options), q, k, v)


def _exchange_with(function, dtype):
    return lambda inputs, *args, **options: [
        x.roll(1, 0) if x.dtype == dtype and i == 1 else x
        for i, x in enumerate(function(inputs, *args, **options))
    ]


def _loss_with(change):
    loss = deepsp.cross_entropy
    return lambda logits, labels: change(loss, logits, labels)


FAULTS = {  # a check, its complaint, and what replaces a function of deepsp on one rank
    "there": (
        "exchange",
        r"there \(torch.float32\)",
        "seq_to_heads",
        lambda: _exchange_with(deepsp.seq_to_heads, torch.float32),
    ),
    "back": (
        "exchange",
        r"back \(torch.bfloat16\)",
        "heads_to_seq",
        lambda: _exchange_with(deepsp.heads_to_seq, torch.bfloat16),
    ),
    "output": (
        "attention",
        r"output \(torch.float32\) is off by 1e-04",
        "distributed_attention",
        lambda: _attention_with(lambda f, *x: f(*x) * 1.0001),
    ),
    "bfloat16": (
        "attention",
        r"output \(torch.bfloat16\)",
        "distributed_attention",
        lambda: _attention_with(lambda f, *x: f(*x) * (1.1 if x[0].element_size() == 2 else 1)),
    ),
    "nan": (
        "attention",
        r"output \(torch.float32\) is off by nan",
        "distributed_attention",
        lambda: _attention_with(lambda f, *x: f(*x) * float("nan")),
    ),
    "q": (
        "attention",
        r"gradient of q \(torch.float32\) is off by 1e-02",
        "distributed_attention",
        lambda: _attention_with(lambda f, q, k, v: f(_scaled_gradient(q), k, v)),
    ),
    "k": (
        "attention",
        r"gradient of k \(torch.float32\) is off by 1e-02",
        "distributed_attention",
        lambda: _attention_with(lambda f, q, k, v: f(q, _scaled_gradient(k), v)),
    ),
    "v": (
        "attention",
        r"gradient of v \(torch.float32\) is off by 1e-02",
        "distributed_attention",
        lambda: _attention_with(lambda f, q, k, v: f(q, k, _scaled_gradient(v))),
    ),
    "loss": (
        "loss",
        r"loss \(torch.float(32|64)\) is off by 1e-03",
        "cross_entropy",
        lambda: _loss_with(lambda f, x, y: f(x, y) * 1.001),
    ),
    "logits": (
        "loss",
        r"gradient of logits \(torch.float32\) is off by 1e-02",
        "cross_entropy",
        lambda: _loss_with(lambda f, x, y: f(_scaled_gradient(x), y)),
    ),
}


def _with_fault(name, faulty):
    store = dist.PrefixStore(f"test_doctor/{name}/{faulty}", _get_default_store())
    rank, size = dist.get_rank(), dist.get_world_size()
    _, _, function, replacement = FAULTS[name]
    original = getattr(deepsp, function)
    replaced = replacement() if rank == faulty else original
    with mock.patch.object(deepsp, function, replaced):
        return doctor._examine(store, rank, size, torch.device("cpu"))


@pytest.mark.parametrize("name", FAULTS)
def test_finds_wrong_results(name):
    check, complaint, *_ = FAULTS[name]
    faulty = len(name) % 2
    for report, passed in on_ranks(2, _with_fault, name, faulty):
        assert not passed
        assert {n for n, state in _states(report).items() if state == "FAILED"} == {check}
        assert list(_states(report)) == NAMES  # the ranks go on
        assert re.search(rf"^{check} +FAILED rank \d: ", report, re.MULTILINE)
        assert re.search(rf" rank {faulty}: {complaint}", report)
        assert re.search(r"^ +next: \w+", report, re.MULTILINE)
        assert report.splitlines()[-1] == "FAILED (ranks: 2, device: cpu)"


def _with_other_environment():
    store = dist.PrefixStore("test_doctor/environment", _get_default_store())
    rank, size = dist.get_rank(), dist.get_world_size()
    extra = {"DEEPSP_OF_A_TEST": "1", "NCCL_OF_A_TEST": "1"} if rank == 1 else {}
    versions = doctor._versions() + ("\ntorch 0.1" if rank == 1 else "")
    with (
        mock.patch.dict(os.environ, extra),
        mock.patch.object(doctor, "_versions", lambda: versions),
    ):
        return doctor._examine(store, rank, size, torch.device("cpu"))[0]


def test_ranks_with_other_versions_or_variables():
    report, _ = on_ranks(2, _with_other_environment)
    assert re.search(r"versions +FAILED rank 1: \['torch 0.1'\]", report)
    assert re.search(r"variables +FAILED rank 1: \['DEEPSP_OF_A_TEST=1'\]", report)


def test_a_rank_without_an_answer(monkeypatch):
    monkeypatch.setattr(doctor, "TIMEOUT", 0.05)
    alive, missing = doctor._gather(dist.HashStore(), "x", 0, 2, {"state": "ok", "text": ""})
    assert alive["state"] == "ok" and missing["state"] == "stopped"


def test_slow_settings(monkeypatch):
    with sdpa_kernel(SDPBackend.MATH):
        assert "MATH" in (report := doctor._kernels(torch.device("cpu")))
    assert doctor._answer(lambda: report)["state"] == "slow"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    for threads, slow in ((3, True), (4, False), (8, False), (9, True)):
        monkeypatch.setattr(torch, "get_num_threads", lambda n=threads: n)
        assert ("set OMP_NUM_THREADS=8" in doctor._machine()) == slow
