"""All that needs a GPU, in stages of less than ten minutes: ``make gpu-test`` runs all of them, and
``tests/gpu/first.sh`` one at a time.

Ops on CUDA tensors over gloo with two ranks on one GPU; in an NCCL group of one rank, where nothing
is sent, and where it sends to itself by collectives (DEEPSP_TEST_COLLECTIVES), or through symmetric
memory; in NCCL groups of 2 and 4 ranks that share the GPU and exchange by NCCL's sockets, or
through symmetric memory; on several GPUs, if there are, through each other's memory. opcheck,
Inductor and the compile pass on CUDA; the kernels' speed against a copy of the same bytes.

Results are printed, and written to a folder as they come: ``$OUT``, or one that is named after the
GPU.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from attention import (
    activated_flash,
    dense_border,
    dense_pieces,
    flash_pieces,
    flash_speed,
    mixed_lengths,
    trees_and_log_sums,
)
from gather import gathered, sharded_training, summed_by_nccl
from launches import (
    capture,
    capture_layer,
    host_waits,
    is_mapped,
    large,
    never_waited_for,
    odd_rows,
    streams,
    threads,
    waited_for_twice,
)
from links import rates, transports_by_size
from processes import Ranks, Run, environment_of
from speed import cast_bandwidth, kernel_bandwidth, overlap_profile, projection_speed
from values import (
    along_dim,
    attention_gradients,
    compile_pass,
    dropout,
    exchange_values,
    experts,
    inductor,
    layer_checks,
    layer_gradients,
    loss_and_rest,
    op_checks,
    recurrences,
    sixteen_bits,
    sparse_models,
)

ROOT = Path(__file__).parents[2]

# What a stage runs, those that tell most first.
STAGES = {
    "values": [
        is_mapped,
        exchange_values,
        odd_rows,
        along_dim,
        gathered,
        summed_by_nccl,
        waited_for_twice,
        capture,
        large,
        never_waited_for,
    ],
    "attention": [
        flash_pieces,
        dense_pieces,
        trees_and_log_sums,
        activated_flash,
        attention_gradients,
        sixteen_bits,
        recurrences,
        mixed_lengths,
        experts,
        sparse_models,
    ],
    "paths": [
        loss_and_rest,
        sharded_training,
        layer_gradients,
        host_waits,
        capture_layer,
        streams,
        threads,
    ],
    "sanitizer": [odd_rows, along_dim, exchange_values],
    "compile": [compile_pass, inductor, op_checks, layer_checks, dropout],
    "speed": [
        kernel_bandwidth,
        cast_bandwidth,
        projection_speed,
        overlap_profile,
        flash_speed,
        dense_border,
    ],
    "links": [rates, transports_by_size, overlap_profile],
}
EVERYWHERE = {
    exchange_values,
    odd_rows,
    along_dim,
    gathered,
    summed_by_nccl,
    waited_for_twice,
    loss_and_rest,
    sharded_training,
    layer_gradients,
    compile_pass,
    inductor,
    op_checks,
    layer_checks,
    dropout,
    overlap_profile,
    *STAGES["attention"],
}
# On ranks that share a GPU. Four of them take longer, and leave out what two ranks tell.
SHARED = EVERYWHERE - {overlap_profile}
OF_FOUR = SHARED & {*STAGES["values"], *STAGES["attention"]}
# Not on several ranks: they compare with this rank's input, or use one group in several threads,
# whose exchanges would meet in any order.
ALONE = {large, streams, threads, never_waited_for}
SPEED = {kernel_bandwidth, projection_speed, cast_bandwidth, flash_speed, dense_border, rates}
# Where nothing waits on the host.
BY_NCCL = {capture_layer, host_waits}
# Through symmetric memory: what is captured in a graph goes by NCCL, and is tested there.
RUNS = [
    (Run("gloo", 2, False, "auto"), EVERYWHERE),
    (Run("nccl", 1, False, "auto"), EVERYWHERE | ALONE | SPEED | BY_NCCL | {capture}),
    (Run("nccl", 1, True, "auto"), EVERYWHERE | ALONE | BY_NCCL | {capture}),
    (Run("nccl", 1, True, "mapped"), EVERYWHERE | ALONE | {is_mapped}),
    *(
        (Run("nccl", size, False, transport), tests | of_transport)
        for size, tests, by_nccl in ((2, SHARED, BY_NCCL), (4, OF_FOUR, set()))
        for transport, of_transport in (("auto", by_nccl), ("mapped", {is_mapped}))
    ),
]
if torch.cuda.device_count() > 1:
    several = [
        Run("nccl", min(torch.cuda.device_count(), 8), False, transport)
        for transport in ("auto", "mapped")
    ]
    RUNS += [
        (several[0], EVERYWHERE | BY_NCCL | {rates, transports_by_size}),
        (several[1], EVERYWHERE | {is_mapped}),
    ]

Report = Callable[[str], None]


def results_folder() -> Path:
    name = "_".join(torch.cuda.get_device_name().lower().replace("nvidia", "").split())
    folder = Path(os.environ.get("OUT") or ROOT / "benchmarks" / "results" / f"gpu_{name}")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def run_tests(chosen: list[Callable], deadline: float, report: Report) -> bool:
    """Runs tests wherever they belong; whether all passed."""
    passed = failed = 0
    for run, theirs in RUNS:
        ranks = Ranks(run, report, deadline)
        ranks.all([test for test in chosen if test in theirs])
        passed, failed = passed + ranks.passed, failed + ranks.failed
    report(f"{passed} passed, {failed} failed")
    return failed == 0


def run_program(command: list[str], deadline: float, report: Report, **environment: str) -> bool:
    """Whether it ended well, in time."""
    report(f"$ {' '.join(command)}")
    process = subprocess.Popen(
        ["timeout", "-k", "5", str(max(1, int(deadline - time.monotonic()))), *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, **environment},
    )
    for line in process.stdout:
        report(line.rstrip("\n"))
    code = process.wait()
    report("passed" if code == 0 else "FAILED, " + ("no time" if code == 124 else f"exit {code}"))
    return code == 0


def run_sanitizer(deadline: float, report: Report) -> bool:
    """Memory accesses of the kernels."""
    if shutil.which("compute-sanitizer") is None:
        report("there is no compute-sanitizer: memory accesses stay unchecked here")
        return True
    options = ["--target-processes", "all", "--report-api-errors", "no", "--error-exitcode", "1"]
    tests = [test.__name__ for test in STAGES["sanitizer"]]
    left = str(max(1, int(deadline - time.monotonic()) - 15))
    this = [sys.executable, __file__, "--limit", left, *tests]
    return run_program(["compute-sanitizer", *options, *this], deadline, report)


def run_training(deadline: float, report: Report) -> bool:
    """The example's training against one process: on one rank, by NCCL that sends to itself, and on
    two that share it; on each GPU, if there are several."""
    example = [sys.executable, str(ROOT / "examples" / "train.py"), "--device", "cuda"]
    example += ["--dtype", "bfloat16", "--output", str(results_folder() / "train")]
    count = torch.cuda.device_count()
    if count > 1:
        return run_program([*example, "--ranks", str(count)], deadline, report)
    alone = [*example, "--ranks", "1"]
    fine = run_program(alone, deadline, report, DEEPSP_TEST_COLLECTIVES="1")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    shared = environment_of(0, Run("nccl", 2, False, "auto"), 1)
    del shared["NCCL_HOSTID"]  # each rank's own
    each = ["--no-python", "bash", "-c", 'NCCL_HOSTID=host$RANK exec "$@"', "rank"]
    return run_program([*torchrun, *each, *example], deadline, report, **shared) and fine


def run_memory(deadline: float, report: Report) -> bool:
    """Time and peak memory of a step, setting by setting."""
    if importlib.util.find_spec("transformers") is None:
        report("transformers isn't here: memory wasn't measured")
        return True
    return run_program([sys.executable, str(ROOT / "tests/gpu/memory.py")], deadline, report)


PROGRAMS = {"sanitizer": run_sanitizer, "train": run_training, "memory": run_memory}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    stages = ", ".join(dict.fromkeys([*STAGES, *PROGRAMS]))
    parser.add_argument("only", nargs="+", help=f"a stage ({stages}), or parts of tests' names")
    parser.add_argument("--limit", type=float, default=570, help="seconds, of all of it")
    args = parser.parse_args()
    deadline = time.monotonic() + args.limit
    every = list(dict.fromkeys(test for tests in STAGES.values() for test in tests))
    tests_of = {
        word: STAGES.get(word) or [test for test in every if word in test.__name__]
        for word in args.only
    }
    for word, tests in tests_of.items():
        if not tests and word not in PROGRAMS:
            parser.error(f"expected a stage or a part of a test's name, got {word}")
    if not torch.cuda.is_available():
        sys.exit("gpu-test: there is no GPU here")
    file = results_folder() / ("_".join(args.only)[:60] + ".txt")
    with file.open("w") as results:

        def report(line: str) -> None:
            print(line, flush=True)
            print(line, file=results, flush=True)

        where = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
        report(f"{' '.join(args.only)}: {where}, {datetime.date.today()}")
        fine = True
        for word, tests in tests_of.items():
            if word in PROGRAMS:
                fine = PROGRAMS[word](deadline, report) and fine
            else:
                fine = run_tests(tests, deadline, report) and fine
    print(f"results: {file}")
    sys.exit(0 if fine else 1)


if __name__ == "__main__":
    main()
