"""Reports how deepsp runs here, and tests it on the ranks of a group.

``python -m deepsp.doctor`` tests one process, ``torchrun --nproc-per-node 2 -m deepsp.doctor`` a
group. Rank 0 prints. The exit status is 1 on every rank if a check fails on any of them.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from importlib import metadata

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.rendezvous import rendezvous
from torch.nn.attention import SDPBackend

import deepsp
from deepsp import _built_for

START, TIMEOUT = 120.0, 20.0  # seconds for all ranks to start, and for an exchange
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 0.05}  # of errors, relative to the largest value
PACKAGES = ("transformers", "trl", "accelerate", "deepspeed", "diffusers")
VARIABLES = ("DEEPSP_", "NCCL_", "TORCH_NCCL_", "GLOO_", "OMP_NUM_THREADS", "PYTORCH_CUDA_ALLOC")
NEXT = {
    "versions": "install the same versions on all machines",
    "variables": "set the same DEEPSP_ variables on all ranks",
    "transport": "read docs/transport.md; DEEPSP_TRANSPORT=messages does without shared memory",
    "exchange": "run again with DEEPSP_TRANSPORT=messages, and report both outputs",
    "attention": "run python -m deepsp.doctor: if it fails, a kernel is wrong, else the exchange",
}
SLOW = "slow: see docs/diagnose.md"


class _WrongResult(Exception):
    """A check has a wrong result, but this rank can go on to the next check."""


def _versions() -> str:
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None
    if torch.cuda.is_available() and _built_for.CUDA is None:
        raise _WrongResult(
            "deepsp was built without CUDA: install CUDA's toolkit with nvcc of torch's version "
            f"{torch.version.cuda}, and deepsp again"
        )
    there = {d.name.lower(): d.version for d in metadata.distributions() if d.name}
    installed = [f"{name} {there[name]}" for name in PACKAGES if name in there]
    return (
        f"deepsp {deepsp.__version__}, built for torch {_built_for.TORCH}, CUDA {_built_for.CUDA}\n"
        f"torch {torch.__version__}, CUDA {torch.version.cuda}, NCCL {nccl}, "
        f"Python {platform.python_version()}\n"
    ) + (", ".join(installed) or f"none of {', '.join(PACKAGES)}")


def _variables() -> str:
    lines = [f"{name}={os.environ[name]}" for name in sorted(os.environ)]
    lines = [line for line in lines if line.startswith(VARIABLES)] or ["none of deepsp's or NCCL's"]
    debug = ["slow: with DEEPSP_DEBUG=1 nothing overlaps"] if "DEEPSP_DEBUG=1" in lines else []
    return "\n".join(lines + debug)


def _machine() -> str:
    cores, threads = len(os.sched_getaffinity(0)), torch.get_num_threads()
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    lines = [f"CPU cores: {cores}, ranks on this machine: {ranks}, threads of torch: {threads}"]
    fitting = max(1, cores // ranks)  # torch may count two hardware threads as one core
    if ranks > cores:
        lines.append("slow: more ranks than cores")
    if not fitting / 2 <= threads <= fitting and not torch.cuda.is_available():
        lines.append(f"slow: set OMP_NUM_THREADS={fitting} (cores / ranks)")
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return "\n".join(lines + [f"GPU {g.name}, {g.total_memory / 2**30:.0f} GiB" for g in gpus])


def _kernels(device: torch.device) -> str:
    lines = []
    for dtype in LIMITS:
        q = torch.randn(1, 2, 256, 64, device=device, dtype=dtype)
        kernel = SDPBackend(torch._fused_sdp_choice(q, q, q, is_causal=True)).name
        lines.append(f"causal SDPA in {dtype}: {kernel}")
        lines += [SLOW] * (kernel == "MATH")
    return "\n".join(lines)


def _draw(shape: list[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))  # the same numbers on every rank
    return torch.randn(shape, generator=generator).to(device, dtype)


def _compare(results: list[tuple[str, Tensor, Tensor]]) -> str:
    """Compare results with float64. At the end of a check: no rank may leave out a collective."""
    largest = dict.fromkeys(LIMITS, 0.0)
    for name, result, expected in results:
        dtype = result.dtype if result.dtype in LIMITS else torch.float32
        error = ((result.double() - expected).abs().amax() / expected.abs().amax()).item()
        if not error <= LIMITS[dtype]:  # NaN is wrong, too
            raise _WrongResult(f"{name} ({dtype}) is off by {error:.0e}, limit {LIMITS[dtype]:.0e}")
        largest[dtype] = max(largest[dtype], error)
    return " and ".join(f"{error:.0e} ({dtype})" for dtype, error in largest.items() if error)


def _exchange(rank: int, lens: list[int], device: torch.device) -> str:
    heads, results = 2 * len(lens) + 1, []
    for dtype in LIMITS:
        whole = _draw([2, sum(lens), heads, 8], dtype, device)
        mine, expected = whole.split(lens, 1)[rank], whole.tensor_split(len(lens), 2)[rank]
        by_heads = deepsp.seq_to_heads([mine, mine], seq_lens=lens)
        back = deepsp.heads_to_seq(by_heads, [heads, heads], seq_lens=lens)
        results += [("there", x, expected) for x in by_heads] + [("back", x, mine) for x in back]
    for name, x, expected in results:
        if not torch.equal(x, expected):
            raise _WrongResult(f"{name} ({x.dtype}), other numbers come than were sent")
    return f"there and back, {heads} heads, every bit is the same; tokens by rank: {lens}"


def _attention(rank: int, lens: list[int], device: torch.device) -> str:
    results = []
    for dtype in LIMITS:
        shapes = [[2, sum(lens), heads, 16] for heads in (6, 3, 3, 6)]
        *inputs, weight = (_draw(shape, dtype, device) for shape in shapes)
        whole = [x.double().transpose(1, 2).requires_grad_() for x in inputs]
        full = F.scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=True)
        full.backward(weight.double().transpose(1, 2))
        mine = [x.split(lens, 1)[rank].clone().requires_grad_() for x in inputs]
        options = {"is_causal": True, "enable_gqa": True, "seq_lens": lens}
        out = deepsp.distributed_attention(*mine, **options)
        out.backward(weight.split(lens, 1)[rank])
        pairs = [("output", out.detach(), full.detach())]
        pairs += [(f"gradient of {n}", mine[i].grad, whole[i].grad) for i, n in enumerate("qkv")]
        results += [(n, x, y.transpose(1, 2).split(lens, 1)[rank]) for n, x, y in pairs]
    return f"output, gradients of q, k, v are off by {_compare(results)}"


def _loss(rank: int, lens: list[int], device: torch.device) -> str:
    logits = _draw([2, sum(lens), 50], torch.float32, device)
    labels = (logits.sum(-1).abs() * 7).long() % 50
    labels[:, ::4] = -100
    whole = logits.double().requires_grad_()
    full = F.cross_entropy(whole.flatten(0, 1), labels.flatten())
    full.backward()
    mine = logits.split(lens, 1)[rank].clone().requires_grad_()
    loss = deepsp.cross_entropy(mine, labels.split(lens, 1)[rank])
    loss.backward()
    results = [("loss", loss.detach(), full.detach())]
    results.append(("gradient of logits", mine.grad, whole.grad.split(lens, 1)[rank]))
    return f"cross_entropy and its gradient are off by {_compare(results)}"


def _speed(size: int, device: torch.device) -> str:
    if size == 1:
        return "one rank sends nothing; run torchrun --nproc-per-node 2 -m deepsp.doctor"
    x = torch.ones(1, 2**15 // size, size, 64, device=device)
    flat, received = x.flatten(), torch.empty_like(x.flatten())
    calls = {"seq_to_heads": lambda: deepsp.seq_to_heads([x])}
    calls["all_to_all_single"] = lambda: dist.all_to_all_single(received, flat)
    sent, lines, medians = x.nbytes * (size - 1) / size, [], []
    for name, call in calls.items():
        seconds = []
        for _ in range(13):
            dist.barrier()
            begin = time.perf_counter()
            call()
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begin)
        least, median = min(seconds[3:]), statistics.median(seconds[3:])
        lines.append(
            f"{sent / 2**20:.0f} MiB by {name + ',':<18} min / median: "
            f"{1e3 * least:.1f} / {1e3 * median:.1f} ms, {sent / median / 1e9:.2f} GB/s"
        )
        medians.append(median)
    return "\n".join(lines + [SLOW] * (medians[0] > 2 * medians[1]))


def _answer(check: Callable[[], str]) -> dict[str, str]:
    try:
        text = check()
    except _WrongResult as error:
        return {"state": "wrong", "text": str(error)}
    except Exception as error:
        return {"state": "stopped", "text": f"{type(error).__name__}: {error}"}
    return {"state": "slow" if "slow: " in text else "ok", "text": text}


def _gather(store, name: str, rank: int, size: int, answer: dict, limit=None) -> list[dict]:
    """Return the answers of all ranks. The store carries them, since the group may have failed."""
    store.set(f"{name}/{rank}", json.dumps(answer))
    deadline, answers = time.monotonic() + (limit or 2 * TIMEOUT), []
    for key in (f"{name}/{r}" for r in range(size)):
        try:
            store.wait([key], timedelta(seconds=max(0.1, deadline - time.monotonic())))
            answers.append(json.loads(store.get(key)))
        except RuntimeError:
            answers.append({"state": "stopped", "text": "no answer: it died or hangs; see its log"})
    return answers


def _examine(store: dist.Store, rank: int, size: int, device: torch.device) -> tuple[str, bool]:
    """Run all checks on all ranks. Return the report, and whether all ranks passed."""
    lens = [9 + 5 * (r % 3) for r in range(size)]
    checks = {
        "versions": _versions,
        "machine": _machine,
        "variables": _variables,
        "kernels": lambda: _kernels(device),
        "transport": lambda: str(deepsp.transport(device=device)),
        "exchange": lambda: _exchange(rank, lens, device),
        "attention": lambda: _attention(rank, lens, device),
        "loss": lambda: _loss(rank, lens, device),
        "speed": lambda: _speed(size, device),
    }
    report, passed, slow = [], True, 0
    for name, check in checks.items():
        answers = _gather(store, name, rank, size, _answer(check))
        compared = {"versions": "", "variables": "DEEPSP_"}.get(name)
        for answer in answers if compared is not None else ():
            a, b = (
                {line for line in x["text"].splitlines() if line.startswith(compared)}
                for x in (answer, answers[0])
            )
            if a != b:
                answer.update(state="wrong", text=f"{sorted(a - b)}, but rank 0 {sorted(b - a)}")
        failed = [r for r in range(size) if answers[r]["state"] in ("wrong", "stopped")]
        state, text = answers[0]["state"], answers[0]["text"]
        if failed:
            passed, state = False, "FAILED"
            text = "\n".join(f"rank {r}: {answers[r]['text']}" for r in failed[:4])
            text += f"\nnext: {NEXT.get(name, 'report this output')}"
        slow += state == "slow"
        report.append(f"{name:<10} {state:<6} " + text.replace("\n", "\n" + " " * 18))
        if any(answer["state"] == "stopped" for answer in answers):
            report.append("The ranks are out of step now: the other checks were left out.")
            break
    result = "all checks passed" if passed else "FAILED"
    result += f", {slow} slow" if slow else ""
    report.append(f"{result} (ranks: {size}, device: {device.type})")
    return "\n".join(report), passed


def main() -> None:
    """Make the default group and run all checks. The process ends with status 1 if one failed."""
    store, rank, size = dist.HashStore(), 0, 1
    if "RANK" in os.environ:
        store, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=START)))
    started = _gather(store, "started", rank, size, {"state": "ok"}, START)
    if missing := [r for r in range(size) if started[r]["state"] != "ok"]:
        raise SystemExit(
            f"FAILED: ranks {missing} didn't start within {START:.0f} s; see their logs"
        )
    device = torch.device("cpu")
    if torch.cuda.is_available():
        local = int(os.environ.get("LOCAL_RANK", 0))
        device = torch.device("cuda", local % torch.cuda.device_count())
        torch.cuda.set_device(device)
    place = {"store": dist.PrefixStore("group", store), "rank": rank, "world_size": size}
    place["timeout"] = timedelta(seconds=TIMEOUT)
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl", **place)
    report, passed = _examine(dist.PrefixStore("doctor", store), rank, size, device)
    if rank == 0:
        print(report, flush=True)
    # No rank leaves before rank 0 has printed: torchrun ends the others when one fails.
    _gather(store, "printed", rank, size, {})
    if not passed:
        os._exit(1)  # destroying the group would wait for an exchange that failed
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
