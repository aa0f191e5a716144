"""deepsp for users of other libraries.

DeepSpeed takes the compile pass by a word in its config (:mod:`deepsp.patches`). transformers takes
deepsp's attention after a call of :func:`deepsp.integrations.transformers.register`.
"""

from __future__ import annotations

import importlib


def __getattr__(name: str):
    """Imports ``deepsp.integrations.transformers`` and the others on first use."""
    if name in ("accelerate", "deepspeed", "diffusers", "lightning", "transformers"):
        return importlib.import_module(f"deepsp.integrations.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
