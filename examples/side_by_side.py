"""A script's training on one process or on several, for examples that compare the two."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

LOGS = "logs.json"


def run(script: str, ranks: int, arguments: list[str]) -> Any:
    """What the first process of ``script`` writes to ``LOGS`` in the folder ``--output``."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable]
        if ranks > 1:
            command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command += [script, *arguments, "--output", folder]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        if subprocess.run(command, env=environment).returncode != 0:
            sys.exit(f"the training on {ranks} processes failed")
        return json.loads(Path(folder, LOGS).read_text())


def leave() -> None:
    """Ends a process of a training."""
    if dist.is_initialized():
        dist.destroy_process_group()


def compare(script: str, ranks: int, tolerance: float) -> None:
    """Runs ``script`` with this command's arguments on one process and on ``ranks``. Exits with an
    error if their lists of losses differ by more than ``tolerance``."""
    print("one process", flush=True)
    one = run(script, 1, sys.argv[1:])
    print(f"\n{ranks} ranks", flush=True)
    sharded = run(script, ranks, sys.argv[1:])
    worst = max(abs(a - b) for a, b in zip(one, sharded, strict=True))
    if not worst <= tolerance:
        sys.exit(f"expected losses within {tolerance}, got a difference of {worst:.1e}")
    print(f"\nloss {sharded[0]:.3f} -> {sharded[-1]:.3f}, the same to {worst:.1e}")


def main(
    script: str,
    description: str,
    train: Callable[[argparse.Namespace], None],
    tolerance: float,
    steps: int,
    rows: int,
) -> None:
    """The command of ``script``, whose ``train`` gets its options: :func:`compare`."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--ranks", type=int, default=2, help="processes (default: 2)")
    add("--steps", type=int, default=steps, help=f"optimizer steps (default: {steps})")
    add("--rows", type=int, default=rows, help=f"samples a step (default: {rows})")
    add("--output", help=argparse.SUPPRESS)  # where a training writes its losses
    options = parser.parse_args()
    if options.output:
        train(options)
    else:
        compare(script, options.ranks, tolerance)
