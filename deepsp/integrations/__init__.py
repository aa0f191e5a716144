"""What other libraries need replaced in memory to take deepsp by a word in their own config.

Each integration is one module, installed when both deepsp and that library are imported, in either
order; neither import makes the other happen. What transformers is told is put there by a call,
:func:`deepsp.integrations.transformers.register`, only.
"""

from __future__ import annotations

import importlib

from deepsp._after_import import after_import


def install() -> None:
    """Installs each integration now, or when the library it is for is imported."""
    # By its name: nothing of it is imported without DeepSpeed.
    after_import(
        "deepspeed", lambda: importlib.import_module("deepsp.integrations.deepspeed").install()
    )


def __getattr__(name: str):
    """``deepsp.integrations.deepspeed`` and ``.transformers`` need no import of their own."""
    if name in ("deepspeed", "transformers"):
        return importlib.import_module(f"deepsp.integrations.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
