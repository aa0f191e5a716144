"""Everything that deepsp changes in the process-wide state of other libraries.

A change is made when somebody else imports the library that it is for, or by a call of the user's,
and undone by :func:`uninstall`. Two things are done elsewhere, and aren't undone:

- :func:`deepsp.integrations.transformers.register` also adds an entry to each of transformers' two
  registers of attention functions and masks, by their own method;
- ``torch.compile(backend="deepsp")`` clears, behind each compilation, what Dynamo has noted of
  floats for it (``deepsp.compile.sharding.backend``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from deepsp._after_import import after_import, forget
from deepsp.compile.lowering import inductor_table, overlap
from deepsp.integrations.deepspeed import config
from deepsp.integrations.transformers import calls


@dataclass(frozen=True)
class Patch:
    """One change.

    library: the module whose import it waits for; until then ``sys.meta_path`` has an entry.
    changes: what it replaces or adds to.
    reason: what for, and for whom it makes a difference.
    on_call: it waits for a call of the user's, not for an import.
    """

    library: str
    changes: tuple[str, ...]
    reason: str
    install: Callable[[], None]
    uninstall: Callable[[], None]
    on_call: bool = False


PATCHES = (
    Patch(
        "torch._inductor.config",
        ("torch._inductor.config.post_grad_custom_post_pass",),
        "Keeps the order start, compute, wait in graphs with deepsp's ops; others are left alone. "
        "Made at once: a config.patch around the first compilation would undo it later.",
        overlap.install,
        overlap.uninstall,
    ),
    Patch(
        "torch._inductor.decomposition",
        (
            "torch._inductor.decomposition.decompositions",
            "torch._inductor.decomposition.fast_random_decomps",
            "torch.compiler.config.cache_key_tag",
        ),
        "Entries for deepsp's ops, which Inductor then knows as asynchronous collectives. Its copy "
        "of the table is made anew, and compiled graphs are cached under deepsp's version.",
        inductor_table.install,
        inductor_table.uninstall,
    ),
    Patch(
        "deepspeed",
        tuple(f"deepspeed: {what}" for what in config.REPLACED),
        'Takes "passes": ["deepsp"] in DeepSpeed\'s config; others\' configs mean what they did.',
        config.install,
        config.uninstall,
    ),
    Patch(
        "transformers",
        tuple(f"transformers: {what}" for what in calls.REPLACED),
        "Refuses calls of models that would be wrong on one rank's tokens, in processes that call "
        "deepsp.integrations.transformers.register(); in others nothing is replaced.",
        calls.install,
        calls.uninstall,
        on_call=True,
    ),
)


def install() -> None:
    """Makes every change now, or when what it waits for happens."""
    for patch in PATCHES:
        if patch.on_call:
            patch.install()  # again, if that call was made
        else:
            after_import(patch.library, patch.install)


def uninstall() -> None:
    """Undoes :func:`install`: Inductor then calls the C++ kernels, as other backends do."""
    for patch in reversed(PATCHES):
        if not forget(patch.library):
            patch.uninstall()
