"""Installs deepsp into a new environment, and runs README's first program there on one process and
on two ranks.

    python3.12 tests/lib/installed.py dist/deepsp-*.whl torch==2.13.0

The environment's Python is the one that runs this. Give the torch that the wheel was built for, or
any for an sdist, which is compiled."""

import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
WHAT = """
import sys, torch, deepsp
print(f"deepsp {deepsp.__version__}, torch {torch.__version__}, Python {sys.version.split()[0]}")
print(deepsp.__file__)
"""


def first_program() -> str:
    return re.search(r"```python\n(# first\.py.*?)```", (ROOT / "README.md").read_text(), re.S)[1]


def losses(python: Path, program: Path, ranks: int) -> list[float]:
    command = [python, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), program]
    done = subprocess.run(
        command, cwd=program.parent, check=True, capture_output=True, text=True, timeout=300
    )
    return [float(line.split()[-1]) for line in done.stdout.splitlines() if "loss" in line]


def main(package: str, torch: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        venv.create(Path(folder, "env"), with_pip=True)
        python = Path(folder, "env", "bin", "python")
        pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        subprocess.run([*pip, torch, "numpy"], check=True)
        subprocess.run([*pip, "setuptools>=77", "wheel", "ninja"], check=True)
        subprocess.run([*pip, "--no-build-isolation", Path(package).resolve()], check=True)
        subprocess.run([python, "-c", WHAT], cwd=folder, check=True)
        program = Path(folder, "first.py")
        program.write_text(first_program())
        one, two = losses(python, program, 1), losses(python, program, 2)
        print("one process:", *one)
        print("two ranks:  ", *two)
        if not one or any(abs(a - b) > 2e-5 for a, b in zip(one, two, strict=True)):
            sys.exit(f"expected the losses of one process, {one}, got {two}")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
