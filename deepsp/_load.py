"""Loads the extension, or explains why it can't be loaded."""

import re
from pathlib import Path

import torch

try:
    from deepsp._built_for import CUDA, TORCH
except ImportError:
    folder = Path(__file__).parent
    hint = (
        f" Python found the sources in {folder} first; to import the installed deepsp, run from "
        "another folder, or install with -e."
        if (folder.parent / "setup.py").exists()
        else ""
    )
    raise ImportError(
        "the C++ extension of deepsp isn't built. Install deepsp against the torch that you use: "
        "pip install --no-build-isolation ." + hint
    ) from None


def _series(version: str) -> str:
    """Releases of one minor version have one ABI; that of a pre-release is its own."""
    release = re.match(r"(\d+\.\d+)\.\d+(\.post\d+)?(\+|$)", version)
    return release[1] if release else version


def check_torch(built: str, built_cuda: str | None, version: str, cuda: str | None) -> None:
    """Raises ImportError if an extension built for one torch can't run under another."""
    if (_series(built), built_cuda) == (_series(version), cuda):
        return
    ours, found_torch = (f"with CUDA {c}" if c else "without CUDA" for c in (built_cuda, cuda))
    raise ImportError(
        f"deepsp was built for torch {_series(built)} {ours}, but this is torch {version} "
        f"{found_torch}. Install deepsp's wheel for this torch, or rebuild it in deepsp's folder: "
        "pip install --no-build-isolation --force-reinstall --no-deps ."
    )


check_torch(TORCH, CUDA, torch.__version__, torch.version.cuda)

from deepsp import _C, patches  # noqa: E402, F401

patches.install()
