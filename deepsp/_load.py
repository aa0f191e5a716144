"""Loads the extension, or explains why it can't be loaded."""

from pathlib import Path

import torch

try:
    from deepsp._built_for import TORCH as _BUILT_FOR
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

if torch.__version__ != _BUILT_FOR:
    raise ImportError(
        f"deepsp was built for torch {_BUILT_FOR}, but this is torch {torch.__version__}. "
        "Rebuild it against this torch: pip install --no-build-isolation --force-reinstall "
        "--no-deps ."
    )

from deepsp import _C, patches  # noqa: F401

patches.install()
