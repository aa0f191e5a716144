"""Tiny models that say where the compile pass stands: ``make zoo`` runs them all.

A module for each kind of model. ``entries()`` has them by name; packages that aren't installed are
left out with a warning.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from importlib.util import find_spec

import torch
from lockstep import static_lengths

from corpus.packages import declare_ops_of_torchvision
from corpus.step import Entry, training_step

declare_ops_of_torchvision()


@functools.cache
def entries() -> dict[str, Entry]:
    from corpus.by_hand import BY_HAND
    from corpus.diffusion_models import DIFFUSION
    from corpus.families import families
    from corpus.programs import PROGRAMS
    from corpus.vision import TIMM, TORCHVISION
    from corpus.x_transformers_options import X_TRANSFORMERS

    groups = {
        "torchvision": TORCHVISION, "timm": TIMM, "diffusers": DIFFUSION,
        "x_transformers": X_TRANSFORMERS,
    }  # fmt: skip
    result = {**BY_HAND, **families(), **PROGRAMS}
    for package, group in groups.items():
        if find_spec(package) is None:
            warnings.warn(f"{package} isn't installed: its models are left out", stacklevel=2)
        else:
            result |= group
    return result


def through_compile_pass(
    name: str, length: int, inner: str = "aot_eager", static: bool = False, ranks: int | None = None
) -> str | None:
    """Make a training step, as ``training_step`` does. ``static``: the length is a constant."""
    entry = entries()[name]
    torch.manual_seed(0)
    with static_lengths() if static else contextlib.nullcontext():
        return training_step(name, entry.make(length), entry.near, ranks, inner, entry.least)
