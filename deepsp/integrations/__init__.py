"""deepsp for users of other libraries.

DeepSpeed takes the compile pass by a word in its config (:mod:`deepsp.patches`). transformers is
told by a call, :func:`deepsp.integrations.transformers.register`, only.
"""

from __future__ import annotations

import importlib


def __getattr__(name: str):
    """``deepsp.integrations.transformers`` and the others need no import of their own."""
    if name in ("accelerate", "deepspeed", "transformers"):
        return importlib.import_module(f"deepsp.integrations.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
